"""Signals: the first one lets the step finish and save, a second Ctrl-C ends the process at once.

SIGINT (Ctrl-C), SIGTERM and SIGUSR2 (pre-emption) ask. The training loop looks at ``requested`` after every
update, in the faithfulness warm-up and in every evaluation, so a signal that arrives during a compile is seen when it
ends (case 29). With several processes a signal to any one asks all of them (case 30). Before the loop, while modules
are imported, processes join and the target loads, ``early`` hears it.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import ClassVar, Self

ASKS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
INTERRUPTED = 130  # what a shell reports for a process that Ctrl-C ended


class Stop:
    """Context manager that installs the handlers. ``at_once`` runs before a second Ctrl-C ends the process; ``then``
    says what the first signal leads to. One inside another takes over, and knows what the outer one was asked.

    Python runs its handlers between bytecodes, and XLA can compile for minutes inside one call. A thread that
    reads the wake-up socket sees the signal even then.
    """

    _innermost: ClassVar[Stop | None] = None

    def __init__(
        self, say: Callable[[str], None], at_once: Callable[[], None], then: str = "finishing this step and saving"
    ):
        self._say, self._at_once, self._then = say, at_once, then
        self._requested: str | None = None
        self._interrupts = 0
        self._outer: Stop | None = None
        self._before: dict[int, object] = {}

    @property
    def requested(self) -> str | None:
        """The name of the first signal, since the outermost one was entered."""
        return (self._outer.requested if self._outer else None) or self._requested

    @property
    def interrupts(self) -> int:
        """How often Ctrl-C was heard, since the outermost one was entered."""
        return self._interrupts + (self._outer.interrupts if self._outer else 0)

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # signals belong to the main thread; a run in another thread is stopped by its owner
        self._outer, Stop._innermost = Stop._innermost, self
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before = {sign: signal.signal(sign, lambda *_: None) for sign in ASKS}
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not self._before:
            return
        for sign, handler in self._before.items():
            signal.signal(sign, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._wakeup)
        self._writer.close()
        self._thread.join()
        self._reader.close()
        Stop._innermost = self._outer

    def _watch(self) -> None:
        while data := self._reader.recv(64):
            for number in data:
                if number in ASKS:
                    self._ask(signal.Signals(number))

    def _ask(self, sign: signal.Signals) -> None:
        self._interrupts += sign == signal.SIGINT
        if self.interrupts > 1:
            self._at_once()
            os._exit(INTERRUPTED)
        if self.requested is None:
            self._requested = sign.name
            again = "; once more to stop at once, unsaved" if sign == signal.SIGINT else ""
            self._say(f"{sign.name}: {self._then}{again}")


def early(at_once: Callable[[], None]) -> Stop:
    """For what comes before a run has its log: what is under way cannot be cut short, and ends before it is asked."""
    return Stop(lambda text: print(text, flush=True), at_once, "stopping as soon as what is under way ends")
