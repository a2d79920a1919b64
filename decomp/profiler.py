"""A trace of some updates (``profile.steps``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax


class Profiler:
    """A jax.profiler trace of updates first..last (counted as metrics.jsonl counts them) in ``profile/``."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path):
        self.first, self.last = steps or (0, -1)
        self.path, self.on = folder / "profile", False

    def before(self, step: int, state: Any) -> None:
        if not self.on and self.first <= step <= self.last:
            jax.block_until_ready(state)  # earlier updates stay out of the trace
            jax.profiler.start_trace(str(self.path))
            self.on = True

    def after(self, step: int, state: Any) -> None:
        if self.on and step >= self.last:
            jax.block_until_ready(state)
            self._close()

    def _close(self) -> None:
        if self.on:
            self.on = False
            jax.profiler.stop_trace()

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
