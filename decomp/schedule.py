"""Scalar curves of the training step (SPEC T2), the same on the host and traced."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from decomp.config.schema import Curve, RunConfig, Schedule


def span(cfg: RunConfig) -> int:
    """The ``steps`` of every schedule of a run; more updates than that only after ``extend=hold`` (SPEC T2)."""
    return cfg.schedule_steps or cfg.steps


def value(schedule: Schedule, step: int | Int[Array, ""], steps: int, dtype: Any = jnp.float32) -> Float[Array, ""]:
    """The value at ``step`` of ``steps``: t = step / (steps - 1), so the last knot falls on the last step; its value
    holds after it."""
    if not isinstance(schedule, Curve):
        return jnp.asarray(schedule, dtype)
    t = jnp.asarray(step, dtype) / (steps - 1) if steps > 1 else jnp.zeros((), dtype)
    knots = schedule.knots
    out = jnp.asarray(knots[0].frac, dtype)  # before the first knot its value holds
    for before, knot in zip(knots, knots[1:], strict=False):
        width = knot.at - before.at
        u = jnp.clip((t - before.at) / width, 0, 1) if width > 0 else jnp.ones((), dtype)
        inside = jnp.where(u >= 1, jnp.asarray(knot.frac, dtype), _segment(before.frac, knot.frac, knot.interp, u))
        out = jnp.where(t >= before.at, inside, out)
    return jnp.asarray(schedule.max, dtype) * out


def _segment(a: float, b: float, interp: str, u: Float[Array, ""]) -> Float[Array, ""]:
    """From a at u = 0 towards b at u = 1, where the knot itself takes over exactly."""
    if interp == "linear":
        return a + (b - a) * u
    if interp == "cosine":
        return b + (a - b) * 0.5 * (1 + jnp.cos(math.pi * u))
    if interp == "quarter_cosine":
        return b + (a - b) * jnp.cos(0.5 * math.pi * u)
    if interp == "log":
        return a * jnp.exp(math.log(b / a) * u)
    return jnp.asarray(a, u.dtype)  # hold: a until the knot
