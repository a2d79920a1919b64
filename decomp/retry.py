"""When a failed save is tried again."""

from __future__ import annotations


class Retry:
    """When a failed save is tried again: at once, then after 2, 4, 8, ... 256 more updates."""

    def __init__(self) -> None:
        self._failures, self._left = 0, 0

    def failed(self) -> None:
        self._failures += 1
        self._left = min(256, 2 ** (self._failures - 1))

    def succeeded(self) -> None:
        self._failures = 0

    def due(self) -> bool:
        """Asked once per update."""
        self._left -= 1
        return self._failures > 0 and self._left == 0
