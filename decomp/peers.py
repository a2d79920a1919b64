"""Whether the other processes of a run are alive, and what the first of them that failed had to say.

Every process writes a running number and, once, its end into the coordinator's store, and reads everybody's once a
second. One that fails says so before it goes; one that is killed stops counting, and after ``patience`` seconds
it is dead. Clocks of different machines are never compared. The main thread may wait in a collective that never
comes: ``leave`` is called on a thread of ours and ends the process.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

BEAT = 1.0  # seconds
STORE = "decomp/peers/"
ENDED = "ended"


class News(NamedTuple):
    """Why a process left: its exit code, and one line."""

    code: int
    text: str


class Peers:
    """The threads that watch. ``client`` is the coordinator's; ``lost_code`` the exit code after a silent death."""

    def __init__(
        self,
        client: Any,
        index: int,
        count: int,
        patience: float,
        lost_code: int,
        leave: Callable[[News], None],
    ):
        self.client, self.index, self.count, self.patience = client, index, count, patience
        self.lost_code, self.leave = lost_code, leave
        self._beats = 0
        self._seen = {p: ("", time.monotonic()) for p in range(count) if p != index}
        self._heard = time.monotonic()  # from the store itself
        self._done = threading.Event()
        self._threads = [
            threading.Thread(target=loop, name=f"peers-{loop.__name__.strip('_')}", daemon=True)
            for loop in (self._beat, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def tell(self, news: News) -> None:
        """This process fails: the others leave with the same line. Never raises: the store may be gone as well."""
        self._put(f"failed/{self.index}", json.dumps(news))

    def news(self) -> News | None:
        """What the first other process that failed has told, if any has."""
        try:
            told = dict(self.client.key_value_dir_get(STORE))
        except RuntimeError:
            return None
        return self._failed(told)

    def end(self) -> None:
        """This process has come to a good end; the others must not take its silence for death."""
        self._done.set()
        self._put(f"alive/{self.index}", ENDED)

    # ------------------------------------------------------------ threads
    def _beat(self) -> None:
        while not self._done.wait(BEAT):
            self._beats += 1
            if not self._put(f"alive/{self.index}", str(self._beats)):
                continue
            try:
                told = dict(self.client.key_value_dir_get(STORE))
            except RuntimeError:
                continue
            now = self._heard = time.monotonic()
            for peer, (before, _) in self._seen.items():
                said = told.get(f"{STORE}alive/{peer}", "")
                if said != before or said == ENDED:
                    self._seen[peer] = (said, now)
            self._leave_on(self._failed(told))

    def _watch(self) -> None:
        """Apart from ``_beat``, whose calls may hang with the machine they go to."""
        while not self._done.wait(BEAT):
            now = time.monotonic()
            silent = [p for p, (_, since) in self._seen.items() if now - since > self.patience]
            if now - self._heard > self.patience:
                self._leave_on(self._lost("the coordinator, which runs beside process 0, does not answer"))
            elif silent:
                self._leave_on(self._lost(f"process {silent[0]} of {self.count} died"))

    def _lost(self, what: str) -> News:
        return News(self.lost_code, f"{what}: nothing was heard of it for {self.patience:.0f} s, so this run stops")

    def _leave_on(self, news: News | None) -> None:
        if news is not None and not self._done.is_set():
            self.leave(news)

    def _failed(self, told: dict[str, str]) -> News | None:
        for peer in self._seen:
            if (said := told.get(f"{STORE}failed/{peer}")) is not None:
                code, text = json.loads(said)
                return News(code, f"process {peer} of {self.count} failed: {text}")
        return None

    def _put(self, key: str, value: str) -> bool:
        try:
            self.client.key_value_set(STORE + key, value, allow_overwrite=True)
        except RuntimeError:
            return False
        return True
