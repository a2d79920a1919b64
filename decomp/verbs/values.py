"""A verb's own values, which no schema checks: each in the type its name promises, or one line."""

from __future__ import annotations

from typing import Any

from decomp.config.errors import UserError


def whole(name: str, value: Any) -> int | None:
    """A whole number of at least 0, or None. Where the default is null a number arrives as text."""
    if value is None:
        return None
    if isinstance(value, bool) or not str(value).isdecimal():
        raise UserError(f"{name}={value}: must be a whole number, at least 0")
    return int(value)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{name}={value}: must be true or false")
    return value


def positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UserError(f"{name}={value}: must be a number above 0")
    return float(value)
