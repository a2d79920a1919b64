"""What one device holds at the moment of most memory, from what XLA writes beside a GPU program.

The text of buffer assignment says where in the temporaries each value lies, the text of live ranges from when to when.
Values of one place share it: a loop's carry is one buffer from its first value to its last. (XLA's own list of a peak
leaves out what loops carry.)
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from decomp.plan.hlo import Module, Op

NAME = r"([\w.\-]+)(?:\{([\d,]*)\})?"  # instruction, index in its tuple
RANGE = re.compile(rf"^ +{NAME}:(\d+)-(\d+)$", re.M)
VALUE = re.compile(rf"^ value: <\d+ {NAME}(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\w+\[[\d,]*\])", re.M)
ALLOCATION = re.compile(r"^allocation ", re.M)
TEMPORARIES = "preallocated-temp"


class Held(NamedTuple):
    """Temporaries of one shape and origin that are alive together: how many, and their bytes in all."""

    nbytes: int
    count: int
    array: str
    origin: str


class Place(NamedTuple):
    """A part of the temporaries, as (offset, bytes)."""

    offset: int
    nbytes: int


class Value(NamedTuple):
    """An array in its place, alive at every time from ``first`` to ``last``."""

    place: Place
    first: int
    last: int
    instruction: str
    array: str


def at_peak(live_ranges: str, assignment: str, module: Module) -> list[Held]:
    """The largest first. Empty where the texts tell of no temporaries."""
    values = list(_values(live_ranges, assignment))
    if not values:
        return []
    peak = _fullest(values)
    by_place: dict[Place, list[Value]] = defaultdict(list)
    for v in values:
        by_place[v.place].append(v)
    ops = {op.name: op for ops in module.computations.values() for op in ops}
    nbytes: Counter[tuple[str, str]] = Counter()
    count: Counter[tuple[str, str]] = Counter()
    for place, here in by_place.items():
        held = next((v for v in here if v.first <= peak <= v.last), None)
        if held is not None:
            sharing = [v for v in here if v.first <= held.last and held.first <= v.last]
            key = held.array, next(filter(None, (_origin(ops.get(v.instruction)) for v in (held, *sharing))), "")
            nbytes[key] += place.nbytes
            count[key] += 1
    return [Held(n, count[key], *key) for key, n in nbytes.most_common()]


def _values(live_ranges: str, assignment: str) -> Iterator[Value]:
    ranges = {(m[1], m[2] or ""): (int(m[3]), int(m[4])) for m in RANGE.finditer(live_ranges)}
    for part in ALLOCATION.split(assignment):
        if TEMPORARIES not in part.partition("\n")[0]:
            continue
        for m in VALUE.finditer(part):
            if alive := ranges.get((m[1], m[2] or "")):
                yield Value(Place(int(m[4]), int(m[3])), *alive, m[1], m[5])


def _fullest(values: list[Value]) -> int:
    """The time at which most bytes are taken."""
    changes = sorted([(v.first, 0, v.place) for v in values] + [(v.last + 1, -1, v.place) for v in values])
    taken: Counter[Place] = Counter()
    total, most, when = 0, -1, 0
    for time, end, place in changes:
        before = taken[place] > 0
        taken[place] += 1 + 2 * end
        total += ((taken[place] > 0) - before) * place.nbytes
        if total > most:
            most, when = total, time
    return when


def _origin(op: Op | None) -> str:
    """The parts of an instruction's origin that tell places apart."""
    dull = {"jit(__call__)", "shard_map", "closed_call", "body", "checkpoint", "while", "rematted_computation"}
    return "/".join(part for part in op.origin.split("/") if part not in dull) if op else ""
