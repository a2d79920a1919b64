"""V and U: stacks in their placement, the one gather in, and the masked site (SPEC 2, D1, D2, D6, D7)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from decomp import placement as pl
from decomp.config.schema import Placement
from decomp.keys import Key, key_of, normals, site_keys
from decomp.mesh import DATA_AXES
from decomp.numerics import matmul
from decomp.placement import Axes, Dims, Leaf
from decomp.sites import SiteTable

Stacks = dict[str, dict[str, Array]]


def leaves(table: SiteTable, cfg: Placement, sizes: Mapping[str, int]) -> dict[str, dict[str, Leaf]]:
    """Per group the Leaf of V [g, d_in, C] and U [g, C, d_out].

    Raises UserError for a ragged stack under ``on_ragged: error`` or a dimension that does not divide.
    """
    out = {}
    for g in table.groups.values():
        n = len(g.sites)
        layout = pl.resting_layout(cfg.components, n, cfg.on_ragged, g.name, sizes)
        out[g.name] = {
            "V": Leaf((n, g.d_in, g.C), ("stack", "d_in", "C"), layout),
            "U": Leaf((n, g.C, g.d_out), ("stack", "C", "d_out"), layout),
        }
        for factor, leaf in out[g.name].items():
            pl.check_divides(f"components {g.name} {factor}", leaf, sizes)
    return out


def init(table: SiteTable, seed: int, dtype: Any) -> Stacks:
    """V ~ N(0, 1/d_in), U ~ N(0, 1/C), by site name (SPEC F8). Under jit with the leaves' shardings as outputs each
    device draws its own blocks and no full copy exists anywhere (SPEC D7)."""
    out: Stacks = {}
    for g in table.groups.values():
        names = [s.name for s in g.sites]
        out[g.name] = {
            "V": _normals(key_of(seed, "init", "V"), names, (g.d_in, g.C), g.d_in, dtype),
            "U": _normals(key_of(seed, "init", "U"), names, (g.C, g.d_out), g.C, dtype),
        }
    return out


def _normals(key: Key, names: list[str], shape: tuple[int, int], fan_in: int, dtype: Any) -> Array:
    draws = jax.vmap(lambda k: normals(k, shape, dtype))(site_keys(key, names))
    return draws * jnp.asarray(1.0 / math.sqrt(fan_in), dtype)


def compute_copies(ax: Axes, masters: Any, dims: Any, dtype: Any) -> Any:
    """One cast and one gather over ``replicate`` of a whole tree (SPEC D6); its transpose is the one reduction out.

    Copies are typed as varying over the data axes, so that even a whole copy's cotangent is summed once, out here.
    """

    def one(x: Array, d: Dims) -> Array:
        return ax.varying(ax.over_replicate(x.astype(dtype), d), DATA_AXES)

    return jax.tree.map(one, masters, dims)


class SiteMask(NamedTuple):
    """Mask m, delta mask d and route r of one site; None is: no delta path, everything routed."""

    m: Float[Array, "*batch C"]
    d: Float[Array, "*batch"] | None = None
    r: Bool[Array, "*batch"] | None = None


def masked_site(
    ax: Axes,
    x: Float[Array, "*batch d_in"],
    V: Float[Array, "d_in C"],
    U: Float[Array, "C d_out"],
    W: Float[Array, "d_in d_out"],
    mask: SiteMask,
    whole: bool = False,
    kind: str = "",
) -> Float[Array, "*batch d_out"]:
    """where(r, ((x V) * (m - d)) U + d (x W), x W), which never builds W - V U (SPEC 2).

    Under ``tp`` C and d_out are this device's shares: U's partial sums are scattered onto W's columns, or, where the
    ``whole`` output is wanted, summed together with them. x V carries the name ``activations/<kind>`` for remat.
    """
    m = mask.m if mask.d is None else mask.m - mask.d[..., None]
    h = checkpoint_name(matmul(x, V), f"activations/{kind}") * m
    frozen = mask.d
    if mask.r is not None:
        h = jnp.where(mask.r[..., None], h, jnp.zeros((), h.dtype))
        kept = jnp.zeros((), h.dtype) if mask.d is None else mask.d
        frozen = jnp.where(mask.r, kept, jnp.ones((), h.dtype))
    y = matmul(h, U)
    if whole:
        y = y if frozen is None else y + ax.place_columns(frozen[..., None] * matmul(x, W))
        return ax.psum(y, ("tp",))
    y = ax.psum_scatter(y, ("tp",), x.ndim - 1)
    return y if frozen is None else y + frozen[..., None] * matmul(x, W)


def site_factors(stacks: Stacks, table: SiteTable, name: str) -> tuple[Array, Array]:
    """V [d_in, C] and U [C, d_out] of one site by its own name."""
    site = table.by_name[name]
    return stacks[site.group]["V"][site.slot], stacks[site.group]["U"][site.slot]


def from_site_factors(table: SiteTable, factors: dict[str, tuple[Array, Array]]) -> Stacks:
    """Stacks from a dictionary site -> (V, U). Raises ValueError on a missing, unknown or misshapen site."""
    if set(factors) != set(table.by_name):
        wrong = sorted(set(factors) ^ set(table.by_name))
        raise ValueError(f"factors must name exactly the chosen sites; these are missing or unknown: {wrong}")
    for s in table.sites:
        found = (factors[s.name][0].shape, factors[s.name][1].shape)
        expected = ((s.matrix.d_in, s.C), (s.C, s.matrix.d_out))
        if found != expected:
            raise ValueError(f"{s.name}: V and U have shapes {found}, expected {expected}")
    return {
        g.name: {k: jnp.stack([factors[s.name][i] for s in g.sites]) for i, k in enumerate("VU")}
        for g in table.groups.values()
    }


def copy_dims(leaves: Any, sizes: Mapping[str, int]) -> Any:
    """Mesh axes of the compute copies."""
    return jax.tree.map(lambda leaf: pl.copied(leaf.dims(sizes)), leaves, is_leaf=pl.is_leaf)
