"""decomp/mesh.py: what devices tell (case 19)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax

from decomp.mesh import peak_memory


def device(number: int, stats: dict[str, int] | None) -> Any:
    return SimpleNamespace(id=number, memory_stats=lambda: stats)


def test_peak_memory_is_the_maximum_over_devices() -> None:
    """Case 19: not device 0's."""
    found = [device(i, {"peak_bytes_in_use": x, "bytes_limit": 80 * 10**9}) for i, x in enumerate((5, 7 * 10**9, 6))]
    assert peak_memory(found) == "peak memory: 7.00 of 80.00 GB on device 1, the most of 3 devices"
    assert peak_memory([device(0, None), device(3, {"peak_bytes_in_use": 10**9})]) == (
        "peak memory: 1.00 GB on device 3, the most of 1 devices"
    )
    assert peak_memory([device(0, None), device(1, {})]) is None
    assert peak_memory(jax.devices()) is None
