"""The target's matrices, which of them are decomposed, and where each one's factors are stored.

Two static orders describe every array of a run (SPEC D1, D9):

* a **group** holds the weights: V [g, d_in, C], U [g, C, d_out] and the frozen W [g, d_in, d_out] of the sites with
  equal (d_in, d_out, C, optimizer group), in layer-major slots;
* a **lane** holds the activations: CI, masks and routes [n, B, T, C] of the sites of one kind in one group, by layer.

A **run** is a maximal stretch of consecutive layers with equal selection. One layer scan serves one run, and reads both
orders as slices: ``group_rows`` and ``lane_rows`` never copy or restack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jaxtyping import Array

from decomp.config.errors import UserError
from decomp.config.schema import Sites

ATTENTION_KINDS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Matrix:
    """One weight matrix of the target, used as ``x @ W``, W [d_in, d_out]; ``name`` is its tensor path (SPEC F6)."""

    name: str
    kind: str
    layer: int
    d_in: int
    d_out: int

    @property
    def rank(self) -> int:
        return min(self.d_in, self.d_out)


@dataclass(frozen=True)
class Site:
    """A chosen matrix with its C and its place: (group, slot) for weights, (lane, row) for activations."""

    matrix: Matrix
    C: int
    group: str
    slot: int
    lane: str
    row: int

    @property
    def name(self) -> str:
        return self.matrix.name


@dataclass(frozen=True)
class Group:
    """Sites whose factors share one pair of stacks, in slot order."""

    name: str
    d_in: int
    d_out: int
    C: int
    optim: str
    sites: tuple[Site, ...]


@dataclass(frozen=True)
class Lane:
    """Sites of one kind in one group, in layer order."""

    name: str
    kind: str
    group: str
    C: int
    sites: tuple[Site, ...]


@dataclass(frozen=True)
class Run:
    """Consecutive layers ``start .. start + length - 1`` with one selection: kind -> its site in the first layer."""

    start: int
    length: int
    first: Mapping[str, Site]
    group_sizes: Mapping[str, int]
    group_starts: Mapping[str, int]


@dataclass(frozen=True)
class SiteTable:
    """The static table of a selection. Build it with ``select`` or ``from_sites``."""

    n_layers: int
    kinds: tuple[str, ...]
    matrices: tuple[Matrix, ...]
    sites: tuple[Site, ...]

    @cached_property
    def by_name(self) -> dict[str, Site]:
        return {s.name: s for s in self.sites}

    @cached_property
    def frozen(self) -> dict[str, tuple[Matrix, ...]]:
        """Matrices that were not chosen, by kind and in layer order (SPEC F2)."""
        rest = [m for m in self.matrices if m.name not in self.by_name]
        return {k: tuple(m for m in rest if m.kind == k) for k in self.kinds if any(m.kind == k for m in rest)}

    @cached_property
    def groups(self) -> dict[str, Group]:
        out = {}
        for name in dict.fromkeys(s.group for s in self.sites):
            members = tuple(sorted((s for s in self.sites if s.group == name), key=lambda s: s.slot))
            m = members[0].matrix
            optim = name.rpartition("@")[2] if "@" in name else ""
            out[name] = Group(name, m.d_in, m.d_out, members[0].C, optim, members)
        return out

    @cached_property
    def lanes(self) -> dict[str, Lane]:
        out = {}
        for name in dict.fromkeys(s.lane for s in self.sites):
            members = tuple(sorted((s for s in self.sites if s.lane == name), key=lambda s: s.row))
            out[name] = Lane(name, members[0].matrix.kind, members[0].group, members[0].C, members)
        return out

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Maximal stretches of layers with equal selection, frozen stretches included."""
        per_layer = [{s.matrix.kind: s for s in self.sites if s.matrix.layer == i} for i in range(self.n_layers)]
        selection = [tuple((k, s.lane) for k, s in chosen.items()) for chosen in per_layer]
        starts = [i for i in range(self.n_layers) if i == 0 or selection[i] != selection[i - 1]]
        ends = [*starts[1:], self.n_layers]
        return tuple(_run(start, end - start, per_layer[start]) for start, end in zip(starts, ends, strict=True))

    @property
    def masked_runs(self) -> tuple[Run, ...]:
        """The runs a masked forward executes: from the first chosen layer on (SPEC F7)."""
        first = next((i for i, run in enumerate(self.runs) if run.first), len(self.runs))
        return self.runs[first:]

    def describe(self) -> str:
        """One line per group: what is stored together."""
        lines = [
            f"{len(self.sites)} sites in {len(self.groups)} stack groups, {sum(s.C for s in self.sites)} components"
        ]
        for g in self.groups.values():
            kinds = ", ".join(dict.fromkeys(s.matrix.kind for s in g.sites))
            lines.append(f"  {g.name}: {len(g.sites)} x [{g.d_in}, {g.d_out}], C {g.C} ({kinds})")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint stores beside its arrays (SPEC K2)."""
        return {
            s.name: {
                "kind": s.matrix.kind, "layer": s.matrix.layer, "d_in": s.matrix.d_in, "d_out": s.matrix.d_out,
                "C": s.C, "group": s.group, "slot": s.slot, "lane": s.lane, "row": s.row,
            }
            for s in self.sites
        }  # fmt: skip


def _run(start: int, length: int, first: Mapping[str, Site]) -> Run:
    sizes = {g: sum(s.group == g for s in first.values()) for g in dict.fromkeys(s.group for s in first.values())}
    starts = {g: min(s.slot for s in first.values() if s.group == g) for g in sizes}
    return Run(start, length, first, sizes, starts)


def group_rows(run: Run, group: str, stack: Array) -> Array:
    """The run's part of a group's stack [g, ...] as [length, kinds, ...]: a slice and a free reshape (SPEC D1)."""
    k, start = run.group_sizes[group], run.group_starts[group]
    part = stack if run.length * k == stack.shape[0] else jax.lax.slice_in_dim(stack, start, start + run.length * k)
    return part.reshape((run.length, k) + stack.shape[1:])


def lane_rows(run: Run, lane_row: int, stack: Array) -> Array:
    """The run's part [length, ...] of a lane's stack [n, ...] that begins at ``lane_row``."""
    if run.length == stack.shape[0]:
        return stack
    return jax.lax.slice_in_dim(stack, lane_row, lane_row + run.length)


def select(matrices: Sequence[Matrix], cfg: Sites, optim_group_of: Mapping[str, str] | None = None) -> SiteTable:
    """The table of a ``sites`` config on a target's matrices.

    Raises UserError when a layer or kind does not exist, naming those that do.
    """
    kinds = tuple(dict.fromkeys(m.kind for m in matrices))
    n_layers = 1 + max(m.layer for m in matrices)
    layers = range(n_layers) if cfg.layers == "all" else cfg.layers
    for layer in layers:
        if layer >= n_layers:
            raise UserError(f"sites.layers={layer}: the target has layers 0 to {n_layers - 1}; choose among those")
    chosen_kinds = _kinds(cfg, kinds)
    for kind in cfg.C:
        if kind not in kinds:
            raise UserError(f"sites.C.{kind}: the target has no such kind; its kinds are {', '.join(kinds)}")
    wanted = {
        m.name: cfg.C.get(m.kind, 8 * math.ceil(m.rank * cfg.C_per_rank / 8))
        for m in matrices
        if m.layer in layers and m.kind in chosen_kinds
    }
    if not wanted:
        raise UserError("sites: no matrix is chosen; give at least one layer and one kind")
    return from_sites(matrices, wanted, optim_group_of)


def _kinds(cfg: Sites, kinds: tuple[str, ...]) -> tuple[str, ...]:
    if cfg.kinds == "all":
        return kinds
    if cfg.kinds in ("attn", "mlp"):
        return tuple(k for k in kinds if (k in ATTENTION_KINDS) == (cfg.kinds == "attn"))
    for kind in cfg.kinds:
        if kind not in kinds:
            raise UserError(f"sites.kinds={kind}: the target has no such kind; its kinds are {', '.join(kinds)}")
    return tuple(k for k in kinds if k in cfg.kinds)


def from_sites(
    matrices: Sequence[Matrix], C: Mapping[str, int], optim_group_of: Mapping[str, str] | None = None
) -> SiteTable:
    """The table of an explicit dictionary, site name -> C.

    ``optim_group_of`` maps site names to optimizer groups: sites of different groups never share a stack (SPEC T3, D1).
    Raises UserError for a name that is no matrix of the target, or a C below 1.
    """
    known = {m.name: m for m in matrices}
    for name, c in C.items():
        if name not in known:
            raise UserError(f"site {name!r} is no matrix of the target; its first is {next(iter(known))!r}")
        if c < 1:
            raise UserError(f"site {name!r}: C={c}; it must be at least 1")
    kinds = tuple(dict.fromkeys(m.kind for m in matrices))
    ordered = sorted((known[n] for n in C), key=lambda m: (m.layer, kinds.index(m.kind)))
    optim = optim_group_of or {}
    several = len({optim.get(m.name, "") for m in ordered}) > 1
    group_of = {
        m.name: f"{m.d_in}x{m.d_out}_C{C[m.name]}" + (f"@{optim.get(m.name, '')}" if several else "") for m in ordered
    }
    lane_of = {m.name: _lane_name(m, ordered, group_of) for m in ordered}
    slots: dict[str, int] = {}
    rows: dict[str, int] = {}
    sites = []
    for m in ordered:
        group, lane = group_of[m.name], lane_of[m.name]
        slots[group], rows[lane] = slots.get(group, -1) + 1, rows.get(lane, -1) + 1
        sites.append(Site(m, C[m.name], group, slots[group], lane, rows[lane]))
    return SiteTable(1 + max(m.layer for m in matrices), kinds, tuple(matrices), tuple(sites))


def _lane_name(m: Matrix, chosen: Sequence[Matrix], group_of: Mapping[str, str]) -> str:
    alone = len({group_of[o.name] for o in chosen if o.kind == m.kind}) == 1
    return m.kind if alone else f"{m.kind}@{group_of[m.name]}"


def empty_table(matrices: Sequence[Matrix]) -> SiteTable:
    """Nothing is decomposed: every matrix is frozen. For training and for clean forwards alone."""
    return SiteTable(
        1 + max(m.layer for m in matrices), tuple(dict.fromkeys(m.kind for m in matrices)), tuple(matrices), ()
    )
