"""Aligned text: one line of cells, or a whole table as wide as its cells."""

from __future__ import annotations

from collections.abc import Sequence


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """One line; with fixed ``widths`` a row does not wait for the others."""
    return "  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip()


def lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Every column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [line(row, widths) for row in rows]
