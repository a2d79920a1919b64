"""The text of an XLA program: computations, how often each runs, shapes.

XLA's own cost analysis counts the body of a loop once, and CPU programs show bf16 as f32; the text after partitioning
has both loops and types.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
    "u64": 8, "f64": 8,
}  # fmt: skip
SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
HEADER = re.compile(r"(ENTRY )?%?([^\s(]+) .*\{$")
NAME = re.compile(r"%?([\w.\-]+)$")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")


@dataclass(frozen=True)
class Array:
    """One array of a type: element type and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * BYTES.get(self.dtype, 0)


@dataclass(frozen=True)
class Op:
    """One instruction: what it gives, its opcode, operand names, and the rest of its line."""

    name: str
    results: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def origin(self) -> str:
        """Where in the Python program it comes from."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


@dataclass(frozen=True)
class Runs:
    """How often a computation runs in one execution of the program, and whether inside a loop."""

    times: int
    in_loop: bool


@dataclass(frozen=True)
class Module:
    """Computations by name, callees before callers as XLA prints them."""

    computations: dict[str, list[Op]]
    entry: str

    @cached_property
    def runs(self) -> dict[str, Runs]:
        """Per computation that is reached. Loops whose length the text does not tell are in ``unknown_loops``."""
        times, looped = dict.fromkeys(self.computations, 0), dict.fromkeys(self.computations, False)
        times[self.entry] = 1
        for name in reversed(self.computations):
            for op in self.computations[name] if times[name] else ():
                for callee, factor in self._calls(op):
                    times[callee] += times[name] * factor
                    looped[callee] |= looped[name] or op.opcode == "while"
        return {name: Runs(n, looped[name]) for name, n in times.items() if n}

    def executed(self) -> Iterator[tuple[Op, Runs, dict[str, Op]]]:
        """Every instruction that runs, with the instructions of its computation by name."""
        for name, runs in self.runs.items():
            table = {op.name: op for op in self.computations[name]}
            for op in self.computations[name]:
                yield op, runs, table

    @cached_property
    def unknown_loops(self) -> list[str]:
        ops = [op for name in self.runs for op in self.computations[name] if op.opcode == "while"]
        return [op.name for op in ops if self._trips(op) is None]

    def _calls(self, op: Op) -> Iterator[tuple[str, int]]:
        trips = (self._trips(op) or 1) if op.opcode == "while" else 1
        for role, callee in CALLED.findall(op.attributes):
            if callee in self.computations:
                yield callee, trips + 1 if role == "condition" else trips
        for found in BRANCHES.findall(op.attributes):
            yield from ((b.strip().lstrip("%"), 1) for b in found.split(","))

    def _trips(self, op: Op) -> int | None:
        """From XLA's note, or from the one integer that the condition compares with."""
        if found := TRIPS.search(op.attributes):
            return int(found[1])
        condition = dict(CALLED.findall(op.attributes)).get("condition", "")
        limits = [o for o in self.computations.get(condition, ()) if o.opcode == "constant" and o.results[0].size == 1]
        numbers = [int(o.operands[0]) for o in limits if o.operands and o.operands[0].lstrip("-").isdigit()]
        return numbers[0] if len(numbers) == 1 else None


def parse(text: str) -> Module:
    """Reads what ``compiled.as_text()`` or a dump gives. Raises ValueError for a text without an entry."""
    computations: dict[str, list[Op]] = {}
    entry, here = "", None
    for line in text.splitlines():
        if line[:1] not in ("", " ", "}") and (found := HEADER.fullmatch(line.rstrip())):
            here = computations.setdefault(found[2], [])
            entry = found[2] if found[1] else entry
        elif line.startswith("}"):
            here = None
        elif here is not None and " = " in line:
            here.append(_op(line))
    if not entry:
        raise ValueError("no ENTRY computation: not the text of an XLA program")
    return Module(computations, entry)


def _op(line: str) -> Op:
    left, _, right = line.strip().partition(" = ")
    end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    rest = right[end:].lstrip()
    opcode, _, tail = rest.partition("(")
    stop = _closing("(" + tail, 0)
    operands = tuple(m[1] for part in _split(tail[: stop - 1]) if (m := NAME.search(part.strip())))
    arrays = tuple(Array(d, tuple(int(n) for n in s.split(",") if n)) for d, s in SHAPE.findall(right[:end]))
    return Op(left.removeprefix("ROOT ").lstrip("%"), arrays, opcode, operands, tail[stop:])


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at ``start``."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text)


def _split(text: str) -> list[str]:
    """At commas outside brackets."""
    parts, depth = [""], 0
    for char in text:
        if char == "," and not depth:
            parts.append("")
            continue
        depth += (char in "([{") - (char in ")]}")
        parts[-1] += char
    return parts
