"""Decompose the weights of trained networks into causally important rank-one components (SPEC.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decomp.api import OpenRun, open_run

__all__ = ["OpenRun", "open_run"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``decomp.open_run`` without making every import of the package pay for jax and orbax."""
    if name in __all__:
        from decomp import api

        return getattr(api, name)
    raise AttributeError(f"module 'decomp' has no attribute {name!r}")
