"""L5 and L8: KL at the target's output in chunks of positions, with its own backward; L7 hidden activations."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from decomp.mesh import DATA_AXES
from decomp.numerics import wide
from decomp.placement import Axes
from decomp.target.llama import ROW_KINDS, Captures

Hidden = Float[Array, "N d"]
Head = Float[Array, "d vocab"]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def kl_sum(clean: Hidden, masked: Hidden, head: Head, chunk: int) -> Float[Array, ""]:
    """Sum over positions of KL(softmax(clean head) || softmax(masked head)) in nats.

    Never holds [N, vocab]: ``chunk`` positions at a time. The forward for a gradient computes that gradient on the way
    (probabilities are at hand), so logits are formed once. Only ``masked`` is differentiable: the target is frozen.
    """
    return jnp.sum(_chunked(lambda c, m: _kl(c, m, head)[0], chunk, clean, masked))


def _kl_fwd(clean: Hidden, masked: Hidden, head: Head, chunk: int) -> tuple[Array, Array]:
    def value_and_slope(c: Hidden, m: Hidden) -> tuple[Array, Array]:
        kl, p_clean, p_masked = _kl(c, m, head)
        return kl, (p_masked - p_clean).astype(m.dtype) @ head.T

    kl, slope = _chunked(value_and_slope, chunk, clean, masked)
    return jnp.sum(kl), slope


def _kl_bwd(chunk: int, slope: Array, g: Array) -> tuple[None, Array, None]:
    return None, slope * g.astype(slope.dtype), None


kl_sum.defvjp(_kl_fwd, _kl_bwd)


def _kl(clean: Hidden, masked: Hidden, head: Head) -> tuple[Array, Array, Array]:
    log_p = jax.nn.log_softmax(_logits(clean, head), axis=-1)
    log_q = jax.nn.log_softmax(_logits(masked, head), axis=-1)
    p = jnp.exp(log_p)
    return jnp.sum(p * (log_p - log_q), axis=-1), p, jnp.exp(log_q)


def _logits(hidden: Hidden, head: Head) -> Array:
    return (hidden @ head).astype(wide(hidden.dtype))


def _chunked(fn: Any, chunk: int, *xs: Array) -> Any:
    """``fn`` over blocks of ``chunk`` leading rows. Rows of zeros fill the last block; their KL and slope are 0."""
    n = xs[0].shape[0]
    if n <= chunk:
        return fn(*xs)
    blocks = -(-n // chunk)
    pad = lambda x: jnp.pad(x, ((0, blocks * chunk - n), (0, 0))).reshape(blocks, chunk, -1)  # noqa: E731
    out = jax.lax.map(lambda args: fn(*args), tuple(pad(x) for x in xs))
    return jax.tree.map(lambda y: y.reshape((blocks * chunk,) + y.shape[2:])[:n], out)


def mean_kl(
    ax: Axes, clean: Float[Array, "B T d"], masked: Float[Array, "B T d"], head: Head, chunk: int, n_positions: int
) -> Float[Array, ""]:
    """Mean KL over the global batch's positions; ``tp`` devices, whose hidden states are equal, share the positions."""
    split = ("tp",) if clean.shape[1] % ax.size("tp") == 0 else ()
    flat = lambda x: ax.shard(ax.varying(x, split), split, 1).reshape(-1, x.shape[-1])  # noqa: E731
    return ax.psum(kl_sum(flat(clean), flat(masked), head, chunk), (*DATA_AXES, *split)) / n_positions


def mean_cross_entropy(
    ax: Axes, hidden: Float[Array, "B T d"], tokens: Int[Array, "B T"], head: Head, chunk: int, n_positions: int
) -> Float[Array, ""]:
    """Mean next-token cross-entropy in nats over the T - 1 predicted positions of every example."""
    flat, targets = hidden[:, :-1].reshape(-1, hidden.shape[-1]), tokens[:, 1:].reshape(-1, 1)

    def block(h: Array, t: Array) -> Array:
        log_p = jax.nn.log_softmax(_logits(h, head), axis=-1)
        return -jnp.take_along_axis(log_p, t, axis=-1)[:, 0]

    # padded rows come back cut off, so their token 0 does not count
    nll = _chunked(block, chunk, flat, targets)
    T = tokens.shape[1]
    return ax.psum(jnp.sum(nll), DATA_AXES) / (n_positions // T * (T - 1))


def capture_norms(ax: Axes, clean: Captures) -> dict[str, Float[Array, " rows"]]:
    """||clean||^2 of every captured activation over these examples of the global batch, one per row of its stack."""
    return {n: _row_squares(ax, n, x) for n, x in clean.items()}


def hidden_distance(ax: Axes, clean: Captures, masked: Captures, norms: dict[str, Array]) -> Float[Array, ""]:
    """Mean over captured activations of ||masked - clean||^2 / ||clean||^2 (SPEC L7).

    The masked forward may begin later than the clean one (SPEC F7): its rows face the last rows of the clean stack.
    """
    ratios = []
    for name, x in masked.items():
        rows = x.shape[0]
        ratios.append(_row_squares(ax, name, x - clean[name][-rows:]) / norms[name][-rows:])
    return jnp.mean(jnp.concatenate(ratios))


def _row_squares(ax: Axes, name: str, x: Array) -> Float[Array, " rows"]:
    x = x.astype(wide(x.dtype))
    kind = name.removeprefix("site_outputs/").partition("@")[0]
    columns = ("tp",) if name.startswith("site_outputs/") and kind not in ROW_KINDS else ()
    return ax.psum(jnp.sum(x * x, axis=tuple(range(1, x.ndim))), (*DATA_AXES, *columns))
