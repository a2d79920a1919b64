"""Clipping, schedules, AdamW, Muon, the adversary's optimizers and the guard (SPEC 6 and 7), leaf by leaf."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .tree import Tree, leaves, zip_map

Array = np.ndarray


def schedule(curve: Any, step: int, steps: int) -> float:
    """T2: a number, or {"max": m, "knots": [{"at", "frac", "interp"}, ..]} at ``step`` of ``steps``."""
    if not isinstance(curve, dict):
        return float(curve)
    t = 0.0 if steps == 1 else step / (steps - 1)
    return float(curve["max"]) * _fraction(curve["knots"], t)


def _fraction(knots: Sequence[dict[str, Any]], t: float) -> float:
    reached = [i for i, knot in enumerate(knots) if knot["at"] <= t]
    if not reached:
        return knots[0]["frac"]
    here = knots[reached[-1]]
    if reached[-1] == len(knots) - 1 or here["at"] == t:
        return here["frac"]
    ahead = knots[reached[-1] + 1]
    u = (t - here["at"]) / (ahead["at"] - here["at"])
    return _between(ahead.get("interp", "linear"), here["frac"], ahead["frac"], u)


def _between(interp: str, a: float, b: float, u: float) -> float:
    if interp == "linear":
        return a + (b - a) * u
    if interp == "cosine":
        return b + (a - b) * (1.0 + math.cos(math.pi * u)) / 2.0
    if interp == "quarter_cosine":
        return b + (a - b) * math.cos(math.pi * u / 2.0)
    if interp == "log":
        return a * (b / a) ** u
    if interp == "hold":
        return a
    raise ValueError(f"unknown interp {interp!r}")


def global_norm(grads: Tree) -> float:
    """Square root of the sum of all squares."""
    return math.sqrt(sum(float(np.sum(leaf**2)) for _, leaf in leaves(grads)))


def clip(grads: Tree, max_norm: float | None) -> Tree:
    """T1: scale = min(1, max_norm / (norm + 1e-6))."""
    if max_norm is None:
        return grads
    scale = min(1.0, max_norm / (global_norm(grads) + 1e-6))
    return zip_map(lambda leaf: leaf * scale, grads)


class Moments(NamedTuple):
    """First and second moment of one leaf, and how many updates they have seen."""

    mu: Array
    nu: Array
    count: int


def zero_moments(leaf: Array) -> Moments:
    """Before the first update."""
    return Moments(np.zeros_like(leaf), np.zeros_like(leaf), 0)


def adam_direction(grad: Array, state: Moments, betas: tuple[float, float], eps: float) -> tuple[Array, Moments]:
    """m_hat / (sqrt(v_hat) + eps), eps outside the root."""
    count = state.count + 1
    mu = betas[0] * state.mu + (1.0 - betas[0]) * grad
    nu = betas[1] * state.nu + (1.0 - betas[1]) * grad**2
    m_hat, v_hat = mu / (1.0 - betas[0] ** count), nu / (1.0 - betas[1] ** count)
    return m_hat / (np.sqrt(v_hat) + eps), Moments(mu, nu, count)


def adamw(
    param: Array,
    grad: Array,
    state: Moments,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[Array, Moments]:
    """T4: decoupled weight decay, scaled by the learning rate."""
    direction, state = adam_direction(grad, state, betas, eps)
    return param - lr * (direction + weight_decay * param), state


def newton_schulz(matrix: Array, steps: int = 5, eps: float = 1e-8) -> Array:
    """T5: the quintic of Jordan et al. on one [d_in, d_out] matrix over its Frobenius norm (+ eps)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (np.linalg.norm(matrix) + eps)
    tall = matrix.shape[0] > matrix.shape[1]
    x = x.T if tall else x
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x


class Momentum(NamedTuple):
    """T5: the average of one leaf's gradients, and how many it has seen."""

    mu: Array
    count: int


def zero_momentum(leaf: Array) -> Momentum:
    """Before the first update."""
    return Momentum(np.zeros_like(leaf), 0)


def muon_direction(grad: Array, state: Momentum, b: float, nesterov: bool) -> tuple[Array, Momentum]:
    """T5: u = b m_t / (1 - b^(t+1)) + (1 - b) g / (1 - b^t); without Nesterov m_t / (1 - b^t)."""
    t = state.count + 1
    mu = b * state.mu + (1.0 - b) * grad
    ahead = b * mu / (1.0 - b ** (t + 1)) + (1.0 - b) * grad / (1.0 - b**t) if nesterov else mu / (1.0 - b**t)
    return ahead, Momentum(mu, t)


def muon_scale(fan_in: int, fan_out: int, consistent_rms: bool) -> float:
    """T5: 0.2 sqrt(max(in, out)), or sqrt(max(1, out / in))."""
    return 0.2 * math.sqrt(max(fan_in, fan_out)) if consistent_rms else math.sqrt(max(1.0, fan_out / fan_in))


def muon(
    param: Array,
    grad: Array,
    state: Momentum,
    lr: float,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    consistent_rms: bool = True,
    weight_decay: float = 0.0,
    eps: float = 1e-8,
) -> tuple[Array, Momentum]:
    """T5 on one matrix or, matrix by matrix, on a stack [g, d_in, d_out]; returns (param, momentum)."""
    ahead, state = muon_direction(grad, state, momentum, nesterov)
    scale = muon_scale(param.shape[-2], param.shape[-1], consistent_rms)
    flat = ahead.reshape(-1, *param.shape[-2:])
    update = np.stack([newton_schulz(one, ns_steps, eps) for one in flat]).reshape(param.shape)
    return param - lr * (scale * update + weight_decay * param), state


def source_ascent(
    raw: Tree, grads: Tree, state: Tree, lr: float, optim: dict[str, Any], parametrize: str
) -> tuple[Tree, Tree]:
    """SPEC 6: one ascent of all raw sources; ``optim`` is {"kind": "adam", "betas", "eps"} or {"kind": "sign"}.

    ``state`` has a Moments per leaf (kept for ``sign`` too, unused). Clipped to [0, 1] unless ``sigmoid`` (A1).
    """

    def one(leaf: Array, grad: Array, moments: Moments) -> tuple[Array, Moments]:
        if optim["kind"] == "adam":
            direction, moments = adam_direction(grad, moments, optim["betas"], optim["eps"])
        else:
            direction = np.sign(grad)
        out = leaf + lr * direction
        return (np.clip(out, 0.0, 1.0) if parametrize == "clip" else out), moments

    pairs = zip_map(one, raw, grads, state)
    return zip_map(lambda pair: pair[0], pairs), zip_map(lambda pair: pair[1], pairs)


def round_fixed(x: Array, r: Array) -> Array:
    """P1: [0, 1] to codes 0 .. 65535; x * 65535 is rounded up where ``r`` in [0, 1) is below its fraction."""
    return np.clip(np.ceil(x * 65535.0 - r), 0.0, 65535.0)


def round_bfloat16(x: Array, r: Array) -> Array:
    """P1: to 8 significant bits, away from 0 where ``r`` in [0, 1) is at least one minus the fraction."""
    _, exponent = np.frexp(x)
    spacing = np.ldexp(1.0, exponent - 8)
    return np.sign(x) * np.floor(np.abs(x) / spacing + r) * spacing


class Guard(NamedTuple):
    """T7: updates skipped in a row and in all."""

    in_a_row: int = 0
    total: int = 0


def guard(old: Any, new: Any, finite: bool, state: Guard) -> tuple[Any, Guard]:
    """T7: ``new`` if everything was finite, else ``old`` and one more skip."""
    if finite:
        return new, Guard(0, state.total)
    return old, Guard(state.in_a_row + 1, state.total + 1)
