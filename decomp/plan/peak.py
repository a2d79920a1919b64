"""What one device holds at the moment of most memory, from the live ranges that XLA writes beside a GPU program."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from decomp.plan.hlo import Module

HELD = re.compile(r"\s+([\w.\-]+)\{([\d,]*)\}: (\d+) bytes")


class Held(NamedTuple):
    """Temporaries of one shape and origin that are alive together: how many, and their bytes in all."""

    nbytes: int
    count: int
    array: str
    origin: str


def at_peak(text: str, module: Module) -> list[Held]:
    """The largest first, arguments left out. Empty where the text tells of no peak."""
    ops = {op.name: op for ops in module.computations.values() for op in ops}
    arguments = {op.name for op in module.computations[module.entry] if op.opcode == "parameter"}
    nbytes: Counter[tuple[str, str]] = Counter()
    count: Counter[tuple[str, str]] = Counter()
    for name, index, size in _listed(text):
        if not size or name in arguments or (op := ops.get(name)) is None:
            continue
        results = op.results if not index else op.results[int(index.split(",")[0]) :]
        array = f"{results[0].dtype}{list(results[0].shape)}" if results else op.opcode
        key = array, _short(op.origin)
        nbytes[key] += size
        count[key] += 1
    return [Held(n, count[key], *key) for key, n in nbytes.most_common()]


def _listed(text: str) -> list[tuple[str, str, int]]:
    """(instruction, index in its tuple, bytes) of what is alive at the peak."""
    _, found, rest = text.partition("(peak):\n")
    out = []
    for line in rest.splitlines() if found else ():
        if not (match := HELD.match(line)):
            break
        out.append((match[1], match[2], int(match[3])))
    return out


def _short(origin: str) -> str:
    """The parts of an instruction's origin that tell places apart."""
    dull = {"jit(__call__)", "shard_map", "closed_call", "body", "checkpoint", "while", "rematted_computation"}
    return "/".join(part for part in origin.split("/") if part not in dull)
