"""Every collective of a program with its mesh axis, bytes and count, and the FLOPs of its matrix products."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from decomp.plan.hlo import Module, Op

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}")
IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}")
AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


@dataclass(frozen=True)
class Collective:
    """One collective instruction. ``sent`` is bytes per device and execution with ring algorithms."""

    kind: str
    axes: tuple[str, ...]
    dtype: str
    elements: int
    sent: float
    times: int
    in_loop: bool
    origin: str

    @property
    def total(self) -> float:
        """Bytes sent per device and step."""
        return self.sent * self.times


def collectives(module: Module, sizes: Mapping[str, int]) -> list[Collective]:
    """Every collective that runs, the largest first. ``sizes`` are the mesh axes, outermost first."""
    found = []
    for op, runs, _ in module.executed():
        kind = op.opcode.removesuffix("-start")
        if kind in KINDS:
            group = first_group(op.attributes, math.prod(sizes.values()))
            elements, nbytes = _payload(op, kind, len(group))
            sent, axes, dtype = _sent(kind, nbytes, len(group)), axes_of(group, sizes), op.results[0].dtype
            found.append(Collective(kind, axes, dtype, elements, sent, runs.times, runs.in_loop, op.origin))
    return sorted(found, key=lambda c: -c.total)


def _payload(op: Op, kind: str, n: int) -> tuple[int, float]:
    """(largest array's elements, bytes of the result). An asynchronous start also carries its operands."""
    elements, nbytes = max(a.size for a in op.results), float(sum(a.nbytes for a in op.results))
    if op.opcode.endswith("-start") and len(op.results) > 1:
        share = {"all-gather": n / (n + 1), "reduce-scatter": 1 / (n + 1)}.get(kind, 0.5)
        nbytes *= share
    return elements, nbytes


def _sent(kind: str, nbytes: float, n: int) -> float:
    if n <= 1:
        return 0.0
    factors = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1.0, "collective-permute": 1.0}
    return nbytes * factors.get(kind, (n - 1) / n)


def first_group(attributes: str, n_devices: int) -> list[int]:
    """Devices of the first group, in any of XLA's three spellings. Raises ValueError for a fourth."""
    if found := LISTED.search(attributes):
        return [int(x) for x in found[1].split(",")]
    if found := IOTA.search(attributes):
        shape, source = _ints(found[1]), _ints(found[2])
        ids = np.arange(math.prod(source)).reshape(source)
        return (ids.transpose(_ints(found[3])) if found[3] else ids).reshape(shape)[0].tolist()
    if found := NAMED.search(attributes):
        return _named_group(*found.groups())
    if "replica_groups={}" in attributes:
        return list(range(n_devices))
    raise ValueError(f"a collective's groups are spelled in an unknown way: {attributes[:300]}")


def _named_group(axes: str, ids: str | None, turned: str | None, used: str) -> list[int]:
    """``mesh['a'=4,'b'=8], device_ids=([4,8]T(1,0)) {'b'}``; ``'b':(2)4`` is the part of b after its first 2 ways."""
    sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", axes)}
    parts = [(name, int(before or 1), int(size or sizes[name])) for name, before, size in AXIS.findall(used)]
    dims, moving = [], []
    for name, n in sizes.items():
        done = 1
        for _, before, size in sorted(p for p in parts if p[0] == name):
            dims += [before // done, size]
            moving += [False, True]
            done = before * size
        dims.append(n // done)
        moving.append(False)
    devices = np.arange(math.prod(sizes.values()))
    if ids:
        devices = devices.reshape(_ints(ids))
        devices = devices.transpose(_ints(turned)) if turned else devices
    return devices.reshape(dims)[tuple(slice(None) if m else 0 for m in moving)].ravel().tolist()


def axes_of(group: list[int], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes along which the members differ."""
    places = np.unravel_index(np.array(group), tuple(sizes.values()))
    return tuple(name for name, place in zip(sizes, places, strict=True) if len(set(place.tolist())) > 1)


def _ints(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]


def flops(module: Module) -> Counter[str]:
    """FLOPs per device and step of all matrix products, by the operands' element type; loops times their length."""
    out: Counter[str] = Counter()
    for op, runs, table in module.executed():
        if op.opcode == "dot":
            left = table[op.operands[0]].results[0]
            found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", op.attributes)
            depth = math.prod(left.shape[i] for i in _ints(found[1])) if found else 1
            out[left.dtype] += 2 * op.results[0].size * depth * runs.times
    return out
