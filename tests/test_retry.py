"""decomp/retry.py."""

from __future__ import annotations

from decomp.retry import Retry


def test_retries_back_off() -> None:
    retry, tried = Retry(), []
    for step in range(40):
        if step == 0 or retry.due():
            tried.append(step)
            retry.failed()
    assert tried == [0, 1, 3, 7, 15, 31]
    retry.succeeded()
    assert not any(retry.due() for _ in range(600))
