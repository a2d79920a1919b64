"""A compiled program's figures, what they are held against, and the page and the row that show them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from decomp import aligned
from decomp.plan import census, flops, memory
from decomp.plan.census import Collective
from decomp.plan.device import Device, StepTime, predict
from decomp.plan.program import Program, arguments, compile_optimizer

GIB = 2.0**30
MOST_HELD = 12


@dataclass(frozen=True)
class Plan:
    """What one program costs on one kind of device."""

    program: Program
    masters: Any
    device: Device

    # ------------------------------------------------------------ memory
    @cached_property
    def abstract(self) -> Any:
        return arguments(self.program.step, self.masters)[0]

    @cached_property
    def resting(self) -> dict[str, memory.Share]:
        return memory.resting(self.program.step, self.abstract)

    @property
    def bound(self) -> float:
        """Bytes per device that the step holds at least: a GPU program's own, else the closed form."""
        if self.program.for_gpu:
            return self.upper
        return self.program.arguments + memory.unavoidable(self.program.step)

    @property
    def upper(self) -> float:
        """Bytes per device of the program; the CPU's temporaries are larger than a GPU's."""
        return self.program.arguments + self.program.outputs - self.program.aliased + self.program.temporaries

    @property
    def needed(self) -> str:
        if self.program.for_gpu:
            return f"{self.upper / GIB:.1f} GiB"
        return f"{self.bound / GIB:.1f} to {self.upper / GIB:.1f} GiB"

    @property
    def verdict(self) -> str:
        """UNSURE is for CPU programs alone: a GPU program's two bounds are one."""
        if self.upper <= self.device.memory:
            return "FITS"
        return "DOES NOT FIT" if self.bound > self.device.memory else "UNSURE"

    @property
    def margin(self) -> float:
        """Bytes left, or missing: by the CPU program where it fits, by the lower bound where it does not."""
        return self.device.memory - (self.bound if self.verdict == "DOES NOT FIT" else self.upper)

    @property
    def spread(self) -> float:
        """State on one device, as a multiple of 1/N of the whole."""
        state = [s for name, s in self.resting.items() if name != "frozen target"]
        n = self.program.step.mesh.size
        return sum(s.per_device for s in state) * n / sum(s.whole for s in state)

    # ------------------------------------------------------------ collectives
    @cached_property
    def collectives(self) -> list[Collective]:
        return census.collectives(self.program.partitioned, self.program.step.ax.sizes)

    @property
    def across(self) -> list[Collective]:
        return [c for c in self.collectives if "replicate" in c.axes]

    @property
    def floor(self) -> float:
        """Bytes over ``replicate`` per device and step that D6 needs: every compute copy in, every gradient out."""
        R = self.program.step.ax.size("replicate")
        return 2 * sum(memory.copies(self.program.step).values()) * (R - 1) / R

    @property
    def in_loops(self) -> list[Collective]:
        """What must not be: collectives over ``replicate`` inside a loop, scalars apart."""
        return [c for c in self.across if c.in_loop and c.elements > 1]

    @property
    def permutes(self) -> list[Collective]:
        return [c for c in self.collectives if c.kind == "collective-permute"]

    @cached_property
    def optimizer_across(self) -> float:
        """Bytes over ``replicate`` per device in the optimizer's update, scalars apart (SPEC D6: 0)."""
        module = compile_optimizer(self.program.step, self.masters)
        found = census.collectives(module, self.program.step.ax.sizes)
        return sum(c.total for c in found if "replicate" in c.axes and c.elements > 1)

    # ------------------------------------------------------------ work
    @cached_property
    def executed(self) -> Counter[str]:
        """FLOPs per device of the optimised program."""
        return census.flops(self.program.optimized)

    @cached_property
    def useful(self) -> dict[str, float]:
        """FLOPs of all devices."""
        return flops.useful(self.program.step)

    @property
    def flop_ratio(self) -> float:
        return sum(self.executed.values()) * self.program.step.mesh.size / sum(self.useful.values())

    @cached_property
    def time(self) -> StepTime:
        # an optimised CPU program has no bf16 left: element types are those after partitioning
        typed = census.flops(self.program.partitioned)
        scale = sum(self.executed.values()) / sum(typed.values())
        return predict(self.device, {k: v * scale for k, v in typed.items()}, self.collectives)


# ---------------------------------------------------------------- one row per mesh
HEADINGS = (
    "mesh", "devices", "rest GiB", "step GiB", "verdict", "margin GiB", "useful PFLOP", "executed", "cross GiB",
    "floor GiB", "in-node GiB", "predicted s", "compile s",
)  # fmt: skip
WIDTHS = (10, 7, 8, 16, 12, 10, 12, 8, 9, 9, 11, 14, 9)


def row(name: str, p: Plan) -> tuple[str, ...]:
    inside = sum(c.total for c in p.collectives if c.axes and "replicate" not in c.axes)
    cross = sum(c.total for c in p.across)
    gib = lambda x: f"{x / GIB:.2f}"  # noqa: E731
    return (
        name, str(p.program.step.mesh.size), gib(p.program.arguments), p.needed.removesuffix(" GiB"), p.verdict,
        gib(p.margin), f"{sum(p.useful.values()) / 1e15:.2f}", f"x{p.flop_ratio:.3f}", gib(cross), gib(p.floor),
        gib(inside), f"{p.time.overlapped:.2f} to {p.time.in_sequence:.2f}",
        f"{p.program.traced_s + p.program.compiled_s:.0f}",
    )  # fmt: skip


def columns(cells: tuple[str, ...]) -> str:
    """One line of the table, in widths that do not wait for the other rows."""
    return aligned.line(cells, WIDTHS)


# ---------------------------------------------------------------- one page per mesh
def page(name: str, p: Plan) -> str:
    """Everything about one mesh."""
    return "\n\n".join(
        "\n".join(lines) for lines in (_memory(name, p), _checkpoint(p), _work(p), _traffic(p), _time(p))
    )


def _memory(name: str, p: Plan) -> Iterator[str]:
    prog, sizes = p.program, p.program.step.ax.sizes
    yield f"{name}: {' x '.join(f'{k} {v}' for k, v in sizes.items())}, GiB per device (share of the whole)"
    for owner, s in p.resting.items():
        yield f"  {owner:28}{s.per_device / GIB:10.3f}  {f'1/{s.whole / s.per_device:.4g}' if s.per_device else '-'}"
    closed = sum(s.per_device for s in p.resting.values())
    yield f"  {'at rest, closed form':28}{closed / GIB:10.3f}  compiled arguments {prog.arguments / GIB:.3f}"
    yield f"  {'state against 1/N':28}{p.spread:10.4f}"
    for part, nbytes in memory.copies(prog.step).items():
        yield f"  {'compute copy of ' + part:28}{nbytes / GIB:10.3f}"
    yield f"  {'temporaries at least':28}{memory.unavoidable(prog.step) / GIB:10.3f}"
    if prog.for_gpu:
        yield f"  {'temporaries of the GPU program':28}{prog.temporaries / GIB:8.3f}  at its peak, the largest of them:"
        for held in prog.held[:MOST_HELD]:
            yield f"    {held.nbytes / GIB:8.3f}  {held.count} x {held.array}  {held.origin[-70:]}"
        if rest := prog.held[MOST_HELD:]:
            yield f"    {sum(held.nbytes for held in rest) / GIB:8.3f}  in {len(rest)} smaller ones"
    else:
        yield f"  {'temporaries of the CPU program':28}{prog.temporaries / GIB:8.3f}  holds bf16 arrays as f32"
    yield f"  {'output aliases the state':28}{prog.aliased / GIB:10.3f}  of {prog.outputs / GIB:.3f}"
    needed = f"{p.needed}, margin {p.margin / GIB:+.1f} GiB"
    yield f"  {p.verdict} in {p.device.memory / GIB:.1f} GiB of {p.device.name}: {needed}"


def _checkpoint(p: Plan) -> Iterator[str]:
    yield "checkpoints, GiB in all"
    for name, nbytes in memory.checkpoint(p.program.step, p.abstract).items():
        yield f"  {name:28}{nbytes / GIB:10.1f}"


def _work(p: Plan) -> Iterator[str]:
    total, n = sum(p.useful.values()), p.program.step.mesh.size
    yield f"useful PFLOP per step, all {n} devices"
    for part, x in p.useful.items():
        yield f"  {part:28}{x / 1e15:10.3f}"
    yield f"  {'sum':28}{total / 1e15:10.3f}  {total / p.program.step.model.n_positions / 1e9:.0f} GFLOP a token"
    yield f"  {'program':28}{p.program.n_instructions:10}  instructions, loops counted once"
    yield f"  {'executed':28}{sum(p.executed.values()) * n / 1e15:10.3f}  x {p.flop_ratio:.3f}"
    if loops := p.program.optimized.unknown_loops:
        yield f"  {len(loops)} loops of unknown length are counted once"


def _traffic(p: Plan) -> Iterator[str]:
    R = p.program.step.ax.size("replicate")
    cross = sum(c.total for c in p.across)
    ratio = f"{cross / p.floor:.3f} x" if p.floor else "no"
    yield "collectives: GiB sent per device and step, executions"
    yield from _collective_rows(p.collectives)
    yield f"  over replicate {cross / GIB:.3f}, {ratio} the floor {p.floor / GIB:.3f} of R={R}"
    yield f"  over replicate in loops, scalars apart: {len(p.in_loops)}; permutes: {len(p.permutes)}"
    yield f"  over replicate in the optimizer's update, scalars apart: {p.optimizer_across / GIB:.4f}"
    for c in [*p.in_loops, *p.permutes][:8]:
        yield f"    {c.kind} {c.dtype} x{c.times} {c.total / GIB:.3f} GiB {c.origin[-100:]}"


def _collective_rows(found: list[Collective]) -> Iterator[str]:
    grouped: dict[tuple[str, str, str, str], list[Collective]] = defaultdict(list)
    for c in found:
        place = "in a loop" if c.in_loop else "once"
        grouped[c.kind, "+".join(c.axes) or "one device", c.dtype, place].append(c)
    for (kind, axes, dtype, place), cs in sorted(grouped.items(), key=lambda kv: -sum(c.total for c in kv[1])):
        size, times = sum(c.total for c in cs), sum(c.times for c in cs)
        yield f"  {kind:20}{axes:20}{dtype:6}{place:11}{size / GIB:10.4f}{times:8}"


def _time(p: Plan) -> Iterator[str]:
    t, d = p.time, p.device
    yield f"predicted on {d.name} (data sheet, products at {d.efficiency:.0%} of peak, memory-bound work left out), s"
    yield f"  compute {t.compute:.2f}, inside the node {t.in_node:.2f}, between nodes {t.cross_node:.2f}"
    yield f"  a step {t.overlapped:.2f} (all hidden) to {t.in_sequence:.2f} (nothing hidden)"
    tokens = p.program.step.model.n_positions
    assert math.isfinite(t.in_sequence)
    yield f"  {tokens / t.in_sequence:.0f} to {tokens / t.overlapped:.0f} tokens a second"
