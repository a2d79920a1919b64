"""L1: how far V U is from W, from the fp32 masters at full matmul precision, where they rest (SPEC L1).

The gradient is written out, -2 (W - V U) U^T by V and -2 V^T (W - V U) by U: one pass over the slots forms each error
matrix once, and adds into gradients that are there already.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from decomp.components import Stacks
from decomp.placement import Axes, Dims
from decomp.sites import SiteTable

matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def faithfulness(
    ax: Axes, table: SiteTable, masters: Stacks, dims: Any, frozen: Any, normalize: Literal["site", "numel"],
    grads: Stacks, coeff: Float[Array, ""],
) -> tuple[Float[Array, ""], Stacks]:  # fmt: skip
    """(L1, ``grads`` + ``coeff`` * d L1 / d masters).

    L1 is the mean over sites of ||W - V U||^2 / ||W||^2 (``site``), or all squares over all weights (``numel``).
    ``masters`` and ``grads`` are this device's resting blocks with mesh axes ``dims``; ``frozen`` holds W by group,
    split inside the node.
    """
    numel, values, out = sum(s.matrix.d_in * s.matrix.d_out for s in table.sites), [], {}
    for g in table.groups:
        V, dv = masters[g]["V"], dims[g]["V"]
        W = _resting_block(ax, frozen[g], dv)
        if normalize == "site":
            size = ax.psum(jnp.sum(jnp.square(W.astype(V.dtype)), axis=(1, 2)), _inside(dv))
            share = 1 / (len(table.sites) * size)
        else:
            share = jnp.full(V.shape[:1], 1 / numel, V.dtype)
        squares, out[g] = _group(ax, masters[g], dims[g], W, grads[g], coeff * share)
        value = jnp.sum(ax.psum(squares, _inside(dv)) * share)
        values.append(ax.psum(value, ("replicate",)) if "replicate" in dv[0] else value)
    return reduce(jnp.add, values), out


def _group(
    ax: Axes, masters: Any, dims: Any, W: Float[Array, "g d_in d_out"], grads: Any, scale: Float[Array, " g"]
) -> tuple[Float[Array, " g"], Any]:
    """(this device's part of ||W - V U||^2 by slot, ``grads`` + ``scale`` * its gradients)."""
    V, U, du = masters["V"], masters["U"], dims["U"]
    # A fallback group's U is split over replicate as well: made whole before the loop, its gradient summed after (D6).
    across = ("replicate",) if "replicate" in du[2] else ()
    U = ax.all_gather(U, across, 2)
    start = (grads["V"], ax.zeros_like(U) if across else grads["U"])

    def slot(carry: tuple[Array, Array], xs: Any) -> tuple[tuple[Array, Array], Array]:
        i, v, u, w, s = xs
        u = ax.over_node(u, du)
        error = w.astype(v.dtype) - ax.psum_scatter(matmul(v, u), ("tp",), 1)
        pull = ax.all_gather(-2 * s * error, ("tp",), 1)
        by_u = ax.psum_scatter(matmul(v.T, pull), ("fsdp",) if "fsdp" in du[2] else (), 1)
        added = _add_row(carry[0], i, matmul(pull, u.T)), _add_row(carry[1], i, by_u)
        return added, jnp.sum(jnp.square(error))

    rows = jnp.arange(V.shape[0], dtype=jnp.int32)
    (by_v, by_u), squares = jax.lax.scan(slot, start, (rows, V, U, W, scale))
    return squares, {"V": by_v, "U": grads["U"] + ax.psum_scatter(by_u, across, 2) if across else by_u}


def _add_row(stack: Array, i: Array, row: Array) -> Array:
    """``stack`` with ``row`` added to its row ``i``, in place inside a loop."""
    return jax.lax.dynamic_update_index_in_dim(stack, stack[i] + row, i, 0)


def _resting_block(ax: Axes, W: Array, dv: Dims) -> Array:
    """The part of W that faces V's resting block: own slots of an owner group, own rows of a fallback group."""
    for dim in (0, 1):
        W = ax.shard(W, ("replicate",), dim) if "replicate" in dv[dim] else W
    return W


def _inside(dv: Dims) -> tuple[str, ...]:
    """Mesh axes that one matrix is split over."""
    return tuple(dict.fromkeys((*dv[1], *dv[2])))
