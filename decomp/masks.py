"""From causal importances and sources to masks, and which sites are routed (SPEC 4).

A ``CiMasks`` is what one masked forward reads, layer by layer: CI by lane, a source, routes. Nothing is drawn before
the layer that needs it, so a fresh uniform source never exists for the whole model at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt16, UInt32

from decomp.components import SiteMask
from decomp.config.schema import RouteAll, RouteProbability, RouteUniformK
from decomp.keys import Key, bits_block, site_keys, to_normal, to_uniform, uniform_block
from decomp.numerics import read_fixed, read_unit
from decomp.placement import Axes, Leaf
from decomp.sites import Run, Site, SiteTable, group_rows, lane_rows

ByLane = dict[str, Array]


class Window(NamedTuple):
    """The examples a device works on: the global index of the first, how many, and their length."""

    example0: Array | int
    batch: int
    length: int


# ---------------------------------------------------------------- what rests in another form than it is read in
class Fixed(NamedTuple):
    """Sources in 16 bits, ``u`` / 65535, and what gradients by them are taken by: ``numerics.read_fixed``."""

    u: UInt16[Array, "*n"]
    by: Float[Array, "*n"]


class Lower(NamedTuple):
    """Lower importances (SPEC C1) as their pre-activations ``a``, and what gradients by the importances are taken by:
    ``numerics.read_unit``. Importances of all layers never exist beside their pre-activations."""

    a: Float[Array, "*n"]
    by: Float[Array, "*n"]


def lower_by(a: Mapping[str, Array], by: Mapping[str, Array]) -> dict[str, Lower]:
    """Lower importances by lane, as functions of ``by``, which may be zeros."""
    return {n: Lower(a[n], by[n]) for n in a}


# ---------------------------------------------------------------- sources (SPEC M2, M3)
class Source(Protocol):
    """A source read layer by layer: component source broadcastable to [B, T, C] and delta source to [B, T], or None."""

    def rows(self, run: Run) -> Any: ...

    def at(self, run: Run, kind: str, row: Any) -> tuple[Array | float, Array | None]: ...


@dataclass(frozen=True)
class Constant:
    """``value`` everywhere, no delta path: 0 makes CI the mask, 1 leaves everything unmasked."""

    value: float

    def rows(self, run: Run) -> Any:
        return ()

    def at(self, run: Run, kind: str, row: Any) -> tuple[float, None]:
        return self.value, None


@dataclass(frozen=True)
class Uniform:
    """U[0, 1), fresh: a site has a key for its components and one for its delta, drawn in the layer scan (SPEC R2)."""

    ax: Axes
    window: Window
    keys: Mapping[str, UInt32[Array, "n 2 2"]]

    @classmethod
    def draw(cls, ax: Axes, table: SiteTable, window: Window, key: Key) -> Uniform:
        return cls(ax, window, {n: pair_keys(key, lane.sites) for n, lane in table.lanes.items()})

    def rows(self, run: Run) -> Any:
        return {k: lane_rows(run, s.row, self.keys[s.lane]) for k, s in run.first.items()}

    def at(self, run: Run, kind: str, row: Any) -> tuple[Array, Array]:
        C = run.first[kind].C
        local = C // self.ax.size("tp")
        (own, delta), (example0, B, T) = row[kind], self.window
        c = uniform_block(own, example0, (B, T, local), C, self.ax.index(("tp",)) * local)
        return c, uniform_block(delta, example0, (B, T, 1), 1)[..., 0]


def pair_keys(key: Key, sites: Sequence[Site]) -> UInt32[Array, "n 2 2"]:
    """Per site a key of its components' stream and one of its delta's."""
    names = [n for s in sites for n in (s.name, f"{s.name}/delta")]
    return site_keys(key, names).reshape(-1, 2, 2)


@dataclass(frozen=True)
class Stored:
    """Sources held as arrays, one pair per stack group, of shape letters ``shape`` (SPEC M3, section 6).

    ``values[group]`` is {"c": [g, (B), (T), C], "delta": [g, (B), (T)]} with B and T only where the letters name them.
    A ``Fixed`` in place of an array is read where its layer needs it: all sources never exist as floats at once.
    """

    values: Mapping[str, Mapping[str, Array | Fixed]]
    shape: str

    def rows(self, run: Run) -> Any:
        return {g: jax.tree.map(lambda x, g=g: group_rows(run, g, x), self.values[g]) for g in run.group_sizes}

    def at(self, run: Run, kind: str, row: Any) -> tuple[Array, Array]:
        site = run.first[kind]
        j = site.slot - run.group_starts[site.group]
        c, delta = (_one_source(row[site.group][part], j) for part in ("c", "delta"))
        missing = [i for i, letter in enumerate("bs") if letter not in self.shape]
        return jnp.expand_dims(c, missing), jnp.expand_dims(delta, missing)


def _one_source(x: Array | Fixed, j: int) -> Float[Array, ...]:
    return read_fixed(x.u[j], x.by[j]) if isinstance(x, Fixed) else x[j]


@dataclass(frozen=True)
class Mixed:
    """Per example ``adversarial`` [B] says whether the stored source (all routed) or the fresh one is used."""

    stored: Stored
    fresh: Uniform
    adversarial: Bool[Array, " B"]

    def rows(self, run: Run) -> Any:
        return self.stored.rows(run), self.fresh.rows(run)

    def at(self, run: Run, kind: str, row: Any) -> tuple[Array, Array]:
        (sc, sd), (uc, ud) = self.stored.at(run, kind, row[0]), self.fresh.at(run, kind, row[1])
        pick = self.adversarial[:, None]
        return jnp.where(pick[..., None], sc, uc.astype(sc.dtype)), jnp.where(pick, sd, ud.astype(sd.dtype))


def stored_leaves(table: SiteTable, shape: str, batch: int, length: int) -> dict[str, dict[str, Leaf]]:
    """Leaf of every stored source array."""
    sizes: dict[str, tuple[int, str | None]] = {"b": (batch, "batch"), "s": (length, None)}
    lead = [sizes[letter] for letter in "bs" if letter in shape]
    out = {}
    for g in table.groups.values():
        dims, axes = (len(g.sites), *(n for n, _ in lead)), (None, *(a for _, a in lead))
        out[g.name] = {"c": Leaf((*dims, g.C), (*axes, "C"), "batch"), "delta": Leaf(dims, axes, "batch")}
    return out


def draw_stored(
    ax: Axes, table: SiteTable, window: Window, key: Key, shape: str, normal: bool = False
) -> dict[str, dict[str, Array]]:
    """Fresh source arrays U[0, 1) (or N(0, 1)) of this device, by site name and global example (SPEC A1, R2)."""
    u = jax.tree.map(to_uniform, stored_bits(ax, table, window, key, shape))
    return jax.tree.map(to_normal, u) if normal else u


def stored_bits(
    ax: Axes, table: SiteTable, window: Window, key: Key, shape: str
) -> dict[str, dict[str, UInt32[Array, ...]]]:
    """32 random bits per element of this device's source arrays, by site name and global example (SPEC R2)."""
    B, T = window.batch if "b" in shape else 1, window.length if "s" in shape else 1
    example0 = window.example0 if "b" in shape else 0
    squeeze = tuple(i for i, letter in enumerate("bs", start=1) if letter not in shape)
    out = {}
    for g in table.groups.values():
        keys, local = pair_keys(key, g.sites), g.C // ax.size("tp")
        offset = ax.index(("tp",)) * local
        c = jax.vmap(lambda k: bits_block(k[0], example0, (B, T, local), g.C, offset))(keys)  # noqa: B023
        delta = jax.vmap(lambda k: bits_block(k[1], example0, (B, T, 1), 1)[..., 0])(keys)
        out[g.name] = {"c": jnp.squeeze(c, squeeze), "delta": jnp.squeeze(delta, squeeze)}
    return out


# ---------------------------------------------------------------- routing (SPEC M4)
def draw_routes(
    cfg: RouteAll | RouteUniformK | RouteProbability, table: SiteTable, window: Window, key: Key
) -> dict[str, Bool[Array, "n B T"]] | None:
    """Routes by lane, or None where everything is routed."""
    if isinstance(cfg, RouteAll):
        return None
    names = [s.name for s in table.sites]
    shape = (window.batch, window.length, 1)
    scores = jax.vmap(lambda k: uniform_block(k, window.example0, shape, 1)[..., 0])(site_keys(key, names))
    if isinstance(cfg, RouteProbability):
        routes = scores < jnp.float32(cfg.p)
    else:
        u = uniform_block(site_keys(key, ["k"])[0], window.example0, shape, 1)[..., 0]
        k = jnp.minimum(jnp.floor(u * len(names)).astype(jnp.int32), len(names) - 1)
        # The k + 1 sites of lowest score are a uniform subset of that size. Ranks are counted, site by site: XLA sorts
        # slowly on CPU, and reduces slowly over a middle axis.
        none = (scores < scores).astype(jnp.int32)
        rank, _ = jax.lax.scan(lambda r, other: (r + (other < scores).astype(jnp.int32), None), none, scores)
        routes = rank <= k
    order = {name: i for i, name in enumerate(names)}
    return {n: routes[jnp.array([order[s.name] for s in lane.sites])] for n, lane in table.lanes.items()}


def route_one(table: SiteTable, window: Window, index: Array | int) -> dict[str, Bool[Array, "n B T"]]:
    """Routes by lane that route site number ``index`` of the table alone, everywhere."""
    order = {s.name: i for i, s in enumerate(table.sites)}
    chosen = {n: np.array([order[s.name] for s in lane.sites]) == index for n, lane in table.lanes.items()}
    shape = (window.batch, window.length)
    return {n: jnp.broadcast_to(jnp.asarray(x)[:, None, None], (*x.shape, *shape)) for n, x in chosen.items()}


# ---------------------------------------------------------------- masks (SPEC M1)
@dataclass(frozen=True)
class CiMasks:
    """m = ci + (1 - ci) * source; the delta mask is the raw delta source (SPEC M1)."""

    ci: Mapping[str, Float[Array, "n B T C"] | Lower]
    source: Source
    routes: Mapping[str, Array] | None = None
    delta: bool = True

    def rows(self, run: Run) -> Any:
        rows = lambda x, site: jax.tree.map(lambda y: lane_rows(run, site.row, y), x)  # noqa: E731
        part = lambda lanes: {k: rows(lanes[s.lane], s) for k, s in run.first.items()}  # noqa: E731
        return part(self.ci), self.source.rows(run), None if self.routes is None else part(self.routes)

    def at(self, run: Run, kind: str, row: Any) -> SiteMask:
        ci = row[0][kind]
        ci = read_unit(*ci) if isinstance(ci, Lower) else ci
        source, delta = self.source.at(run, kind, row[1])
        source = jnp.asarray(source, ci.dtype)
        route = None if row[2] is None else row[2][kind]
        if isinstance(self.source, Mixed) and route is not None:
            route = route | self.source.adversarial[:, None]
        d = jnp.broadcast_to(delta.astype(ci.dtype), ci.shape[:-1]) if self.delta and delta is not None else None
        return SiteMask(ci + (1 - ci) * source, d, route)


@dataclass(frozen=True)
class GivenMasks:
    """Masks given outright, by lane: m [n, B, T, C], delta and route [n, B, T] or None."""

    m: ByLane
    d: ByLane | None = None
    r: ByLane | None = None

    def rows(self, run: Run) -> Any:
        part = lambda lanes: {k: lane_rows(run, s.row, lanes[s.lane]) for k, s in run.first.items()}  # noqa: E731
        return tuple(None if x is None else part(x) for x in (self.m, self.d, self.r))

    def at(self, run: Run, kind: str, row: Any) -> SiteMask:
        d, r = (None if x is None else x[kind] for x in row[1:])
        return SiteMask(row[0][kind], d, r)


def by_lane(table: SiteTable, values: Mapping[str, Array]) -> ByLane:
    """Lane stacks from a dictionary site -> array. Raises ValueError on a missing or unknown site (SPEC F1)."""
    if missing := sorted(set(table.by_name) - set(values)):
        raise ValueError(f"no value for the chosen sites {missing}")
    if unknown := sorted(set(values) - set(table.by_name)):
        raise ValueError(f"{unknown} are not among the chosen sites")
    return {n: jnp.stack([values[s.name] for s in lane.sites]) for n, lane in table.lanes.items()}


def by_site(table: SiteTable, lanes: Mapping[str, Array]) -> dict[str, Array]:
    """The inverse of ``by_lane``."""
    return {s.name: lanes[s.lane][s.row] for s in table.sites}
