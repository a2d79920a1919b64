"""L1: how far V U is from W, from the fp32 masters at full matmul precision, where they rest (SPEC L1)."""

from __future__ import annotations

from functools import partial, reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from decomp.components import Stacks
from decomp.placement import Axes, Dims
from decomp.sites import SiteTable

HIGHEST = jax.lax.Precision.HIGHEST


def faithfulness(
    ax: Axes, table: SiteTable, masters: Stacks, dims: Any, frozen: Any, normalize: Literal["site", "numel"]
) -> Float[Array, ""]:
    """Mean over sites of ||W - V U||^2 / ||W||^2 (``site``), or all squares over all weights (``numel``).

    ``masters`` are this device's resting blocks with mesh axes ``dims``; ``frozen`` holds W by group, split inside the
    node.
    """
    sums = {g: squares(ax, masters[g], dims[g], frozen[g]) for g in table.groups}
    whole = partial(_over_owners, ax)
    if normalize == "numel":
        numel = sum(s.matrix.d_in * s.matrix.d_out for s in table.sites)
        return reduce(jnp.add, (whole(jnp.sum(err), dims[g]) for g, (err, _) in sums.items())) / numel
    ratios = (whole(jnp.sum(err / size), dims[g]) for g, (err, size) in sums.items())
    return reduce(jnp.add, ratios) / len(table.sites)


def squares(ax: Axes, factors: Any, dims: Any, W: Array) -> tuple[Float[Array, " g"], Float[Array, " g"]]:
    """(||W - V U||^2, ||W||^2) of the slots that rest here, each the sum over the whole matrix."""
    V, U, dv = factors["V"], factors["U"], dims["V"]
    W = _resting_block(ax, W, dv).astype(V.dtype)
    # a fallback group's U is split over replicate as well: made whole once, before the loop (SPEC D6)
    U = ax.all_gather(U, ("replicate",), 2) if "replicate" in dims["U"][2] else U

    @jax.checkpoint
    def slot(_: None, xs: Any) -> tuple[None, tuple[Array, Array]]:
        v, u, w = xs
        u = ax.all_gather(u, ("fsdp",), 1) if "fsdp" in dims["U"][2] else u
        product = jnp.matmul(v, u, precision=HIGHEST)
        product = ax.psum_scatter(product, ("tp",), 1) if "tp" in dv[2] else product
        return None, (jnp.sum((w - product) ** 2), jnp.sum(w**2))

    err, size = jax.lax.scan(slot, None, (V, U, W))[1]
    inside = tuple(dict.fromkeys((*dv[1], *dv[2])))
    return ax.psum(err, inside), ax.psum(size, inside)


def _resting_block(ax: Axes, W: Array, dv: Dims) -> Array:
    """The part of W that faces V's resting block: own slots of an owner group, own rows of a fallback group."""
    for dim in (0, 1):
        W = ax.shard(W, ("replicate",), dim) if "replicate" in dv[dim] else W
    return W


def _over_owners(ax: Axes, x: Array, dims: Any) -> Array:
    return ax.psum(x, ("replicate",)) if "replicate" in dims["V"][0] else x
