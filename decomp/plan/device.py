"""Accelerators by name (conf/devices.yaml) and the step time that follows from their data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from decomp.config import fields
from decomp.config.compose import conf_dir
from decomp.config.errors import UserError
from decomp.config.load import read_yaml
from decomp.plan.census import Collective


@dataclass(frozen=True)
class Device:
    """FLOP/s by element type, bytes of memory, bytes per second sent inside a node and between nodes; ``gpu`` is what
    XLA's compiler is told (``backend.description``)."""

    name: str
    flops: Mapping[str, float]
    memory: float
    in_node: float
    cross_node: float
    efficiency: float
    gpu: Mapping[str, Any] = field(default_factory=dict)


class StepTime(NamedTuple):
    """Predicted seconds of one step, part by part. Memory-bound work is not in it."""

    compute: float
    in_node: float
    cross_node: float

    @property
    def overlapped(self) -> float:
        """If all communication hides behind computation."""
        return max(self)

    @property
    def in_sequence(self) -> float:
        """If none does."""
        return sum(self)


def find(name: str) -> Device:
    """Raises UserError for a name that conf/devices.yaml does not hold."""
    known = read_yaml(conf_dir() / "devices.yaml")
    if name not in known:
        raise UserError(f"device={name}: no such device in conf/devices.yaml; {fields.hint(name, list(known))}")
    return Device(name, **known[name])


def predict(device: Device, flops: Mapping[str, float], collectives: list[Collective]) -> StepTime:
    """From FLOPs by element type and from every collective's bytes, all per device."""
    rate = lambda dtype: device.flops.get(dtype, device.flops["f32"]) * device.efficiency  # noqa: E731
    cross = sum(c.total for c in collectives if "replicate" in c.axes)
    inside = sum(c.total for c in collectives if c.axes and "replicate" not in c.axes)
    compute = sum(n / rate(dtype) for dtype, n in flops.items())
    return StepTime(compute, inside / device.in_node, cross / device.cross_node)
