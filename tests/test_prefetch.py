"""decomp/data/prefetch.py."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from decomp.config.errors import UserError
from decomp.data.prefetch import Prefetch


def test_prefetch_is_ahead_in_order_and_off_the_thread() -> None:
    asked: list[tuple[int, int]] = []

    def batch(step: int) -> np.ndarray:
        asked.append((step, threading.get_ident()))
        return np.full(1, step)

    with Prefetch(batch, first=3, end=7) as batches:
        assert [int(batches.take(step)[0]) for step in range(3, 7)] == [3, 4, 5, 6]
    assert [step for step, _ in asked] == [3, 4, 5, 6]
    assert threading.get_ident() not in {thread for _, thread in asked}


def test_an_error_in_the_data_reaches_the_loop() -> None:
    def batch(step: int) -> np.ndarray:
        raise UserError(f"no batch {step}")

    with Prefetch(batch, 0, 5) as batches, pytest.raises(UserError, match="no batch 0"):
        batches.take(0)
