"""Persistent sources and their own optimizer (SPEC 6), and the fresh PGD of M2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from decomp import schedule
from decomp.config.schema import AdamSource, MixedSource, PersistentSource, Recon
from decomp.keys import to_uniform
from decomp.masks import Fixed
from decomp.numerics import move_fixed, round_bfloat16, wide
from decomp.placement import Axes

Values = dict[str, dict[str, Array]]
SourceState = dict[str, Any]  # {"raw": Values, "m": Values, "v": Values, "count": int32 []}; sign has raw alone


class Bits(NamedTuple):
    """Random uint32 per element for one ascent's rounding; the moments take a half each."""

    raw: Values
    moments: Values


def persistent_of(term: Recon) -> PersistentSource | None:
    """The persistent source of a term, if it owns one (SPEC A4)."""
    source = term.source.persistent if isinstance(term.source, MixedSource) else term.source
    return source if isinstance(source, PersistentSource) else None


def moment_names(cfg: PersistentSource) -> tuple[str, ...]:
    return ("m", "v") if isinstance(cfg.optim, AdamSource) else ()


def moment_dtype(cfg: PersistentSource, masters: Any) -> Any:
    """What moments rest in where masters rest in ``masters`` (SPEC P1)."""
    return jnp.bfloat16 if cfg.dtype == "uint16" else masters


def variables(ax: Axes, raw: Values, dtype: Any) -> Values:
    """What gradients by sources are taken by: the sources, or zeros of ``dtype`` that stand for those in uint16."""
    return jax.tree.map(lambda x: ax.zeros_like(x, dtype) if x.dtype == jnp.uint16 else x, raw)


def values_of(raw: Values, by: Values) -> Any:
    """The sources as functions of their ``variables``."""
    return jax.tree.map(lambda x, b: Fixed(x, b) if x.dtype == jnp.uint16 else b, raw, by)


def effective(cfg: PersistentSource, raw: Values) -> Values:
    """The sources in [0, 1] that masks are made from (SPEC A1)."""
    return jax.tree.map(jax.nn.sigmoid, raw) if cfg.parametrize == "sigmoid" else raw


def ascend(
    cfg: PersistentSource, state: SourceState, grads: Values, step: Any, steps: int, bits: Bits | None = None
) -> SourceState:
    """One ascent on the bare term. The learning rate advances with the training step, not with ascents (SPEC A4).

    With ``dtype: uint16`` the move and the moments are computed in float32 and rounded by ``bits`` (SPEC P1).
    """
    grads = jax.tree.map(lambda g: g.astype(wide(g.dtype)), grads)
    lr = schedule.value(cfg.optim.lr, step, steps, jax.tree.leaves(grads)[0].dtype)
    direction, moments = _direction(cfg, state, grads)
    if cfg.dtype == "uint16":
        assert bits is not None
        move = lambda u, d, b: move_fixed(u, lr * d, to_uniform(b))  # noqa: E731
        return {"raw": jax.tree.map(move, state["raw"], direction, bits.raw), **_rounded(moments, bits.moments)}
    raw = jax.tree.map(lambda x, d: x + lr * d, state["raw"], direction)
    if cfg.parametrize == "clip":
        raw = jax.tree.map(lambda x: jnp.clip(x, 0, 1), raw)
    return {"raw": raw, **moments}


def _rounded(moments: SourceState, bits: Values) -> SourceState:
    """m by the lower half of ``bits``, v by the upper."""
    halves = {"m": 0, "v": 16}
    return {
        n: jax.tree.map(lambda x, b, n=n: round_bfloat16(x, b >> halves[n]), x, bits) if n in halves else x
        for n, x in moments.items()
    }


def _direction(cfg: PersistentSource, state: SourceState, grads: Values) -> tuple[Values, SourceState]:
    if not isinstance(cfg.optim, AdamSource):
        return jax.tree.map(jnp.sign, grads), {}
    b1, b2 = cfg.optim.betas
    count = state["count"] + 1
    m = jax.tree.map(lambda m, g: b1 * m.astype(g.dtype) + (1 - b1) * g, state["m"], grads)
    v = jax.tree.map(lambda v, g: b2 * v.astype(g.dtype) + (1 - b2) * g * g, state["v"], grads)
    n = count.astype(jax.tree.leaves(grads)[0].dtype)
    debias1, debias2 = 1 - jnp.asarray(b1, n.dtype) ** n, 1 - jnp.asarray(b2, n.dtype) ** n
    eps = cfg.optim.eps
    direction = jax.tree.map(lambda m, v: (m / debias1) / (jnp.sqrt(v / debias2) + eps), m, v)
    return direction, {"m": m, "v": v, "count": count}


def fresh_pgd(values: Values, gradient: Callable[[Values], Values], n_steps: int, step_size: float) -> Values:
    """``n_steps`` of + step_size * sign(gradient), clipped to [0, 1] (SPEC M2)."""

    def one(x: Values, _: None) -> tuple[Values, None]:
        return jax.tree.map(lambda x, g: jnp.clip(x + step_size * jnp.sign(g), 0, 1), x, gradient(x)), None

    return jax.lax.scan(one, values, None, length=n_steps)[0]
