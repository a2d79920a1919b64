"""decomp/stop.py: case 29. A second Ctrl-C is tested with the loop, in a process of its own."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from decomp.stop import ASKS, Stop


def _sent(stop: Stop, sign: signal.Signals) -> None:
    os.kill(os.getpid(), sign)
    end = time.monotonic() + 10
    while stop.requested is None:
        assert time.monotonic() < end, "the signal was not seen"
        time.sleep(0.005)


@pytest.mark.parametrize("sign", ASKS)
def test_a_signal_asks_and_says_so_once(sign: signal.Signals) -> None:
    said: list[str] = []
    with Stop(said.append, lambda: None) as stop:
        assert stop.requested is None
        _sent(stop, sign)
        if sign != signal.SIGINT:
            os.kill(os.getpid(), sign)
            time.sleep(0.05)
        assert stop.requested == sign.name and len(said) == 1
        assert ("once more" in said[0]) == (sign == signal.SIGINT)


def test_handlers_and_wakeup_are_as_before() -> None:
    before = [signal.getsignal(sign) for sign in ASKS]
    with Stop(print, lambda: None):
        assert [signal.getsignal(sign) for sign in ASKS] != before
    assert [signal.getsignal(sign) for sign in ASKS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_one_inside_another_takes_over_and_knows_what_was_asked() -> None:
    said: list[str] = []
    with Stop(said.append, lambda: None, "loading") as outer:
        with Stop(said.append, lambda: None) as inner:
            _sent(inner, signal.SIGUSR2)
            assert outer.requested is None  # its time is over
        _sent(outer, signal.SIGTERM)
        with Stop(said.append, lambda: None) as inner:
            assert inner.requested == "SIGTERM" and inner.interrupts == 0
            os.kill(os.getpid(), signal.SIGINT)
            end = time.monotonic() + 10
            while not inner.interrupts:
                assert time.monotonic() < end, "the signal was not seen"
                time.sleep(0.005)
            assert inner.requested == "SIGTERM"
    assert said == ["SIGUSR2: finishing this step and saving", "SIGTERM: loading"]


def test_nothing_is_installed_outside_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def run() -> None:
        with Stop(print, lambda: None):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert seen == [before]
