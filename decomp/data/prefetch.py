"""Batches made ahead of the step that takes them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np


class Prefetch:
    """The batch after the next is made while the device works. ``batch`` is pure, so only time is at stake (R3)."""

    def __init__(self, batch: Callable[[int], np.ndarray], first: int, end: int, ahead: int = 2):
        self._batch, self._end, self._ahead = batch, end, ahead
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._next = first
        self._futures: dict[int, Future[np.ndarray]] = {}

    def take(self, step: int) -> np.ndarray:
        """Batch ``step`` [B, T]."""
        while self._next < min(self._end, step + 1 + self._ahead):
            self._futures[self._next] = self._pool.submit(self._batch, self._next)
            self._next += 1
        return self._futures.pop(step).result()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
