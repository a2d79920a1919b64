"""L2 minimality and L3 frequency, from the firing rates f of the GLOBAL batch (SPEC L2-L4).

Both enter the step through their slope: with f known, d total / d psi is one number per component, the same for every
position. That is exact, it is what the averaged L3 needs anyway, and it makes microbatches equal to one batch (SPEC
T8).
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from decomp import schedule
from decomp.config.schema import Frequency, Lp, SmoothL0
from decomp.mesh import DATA_AXES
from decomp.placement import Axes

ByLane = dict[str, Float[Array, "n C"]]


def psi(penalty: SmoothL0 | Lp, ci: Array, shape_value: Float[Array, ""]) -> Array:
    """The penalty of one importance: ci^2 / (ci^2 + gamma^2), or (ci + eps)^p."""
    if isinstance(penalty, SmoothL0):
        square = ci * ci
        return square / (square + shape_value * shape_value)
    return jnp.exp(shape_value * jnp.log(ci + penalty.eps))


def shape_value(penalty: SmoothL0 | Lp, step: Any, steps: int, dtype: Any) -> Float[Array, ""]:
    """Gamma or p at this step."""
    curve = penalty.gamma if isinstance(penalty, SmoothL0) else penalty.p
    return schedule.value(curve, step, steps, dtype)


def rates(ax: Axes, penalty: SmoothL0 | Lp, upper: dict[str, Array], value: Array, n_positions: int) -> ByLane:
    """f [n, C] by lane: psi over these examples, as their share of the mean over the global batch (SPEC L4)."""
    return {n: ax.psum(jnp.sum(psi(penalty, u, value), axis=(1, 2)), DATA_AXES) / n_positions for n, u in upper.items()}


def frequency(cfg: Frequency, f: Array, n_positions: int) -> tuple[Array, Array]:
    """Phi(f) = f log2(1 + a' f) and its slope Phi'(f); a' is the reference count (default: positions per batch)."""
    a = cfg.reference_count or float(n_positions)
    log = jnp.log2(1 + a * f)
    return f * log, log + a * f / ((1 + a * f) * math.log(2.0))


def average(cfg: Frequency, mean: ByLane, count: Array, f: ByLane) -> tuple[ByLane, ByLane, Array]:
    """The exponential average with this step's f in it, its debiased value f_hat, and the new count (SPEC L3).

    Without ``ema_halflife_steps`` f_hat is f.
    """
    if cfg.ema_halflife_steps is None:
        return mean, f, count
    decay = 2.0 ** (-1.0 / cfg.ema_halflife_steps)
    mean = {n: decay * mean[n] + (1 - decay) * f[n] for n in f}
    count = count + 1
    debias = 1 - jnp.exp(math.log(decay) * count.astype(next(iter(f.values())).dtype))
    return mean, {n: m / debias for n, m in mean.items()}, count


def total(ax: Axes, lanes: ByLane) -> Float[Array, ""]:
    """Sum over sites and components; lanes hold this device's share of C."""
    return ax.psum(sum(jnp.sum(x) for x in lanes.values()), ("tp",))
