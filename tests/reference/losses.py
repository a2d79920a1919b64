"""Every loss of SPEC 5 as a number, from per-site dictionaries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray


def faithfulness(weights: Mapping[str, Array], components: Mapping[str, Mapping[str, Array]], normalize: str) -> float:
    """L1; ``weights`` by site [d_in, d_out]; ``normalize`` is ``site`` or ``numel``."""
    error = {site: float(np.sum((weights[site] - uv["V"] @ uv["U"]) ** 2)) for site, uv in components.items()}
    if normalize == "numel":
        return sum(error.values()) / sum(weights[site].size for site in components)
    return sum(value / float(np.sum(weights[site] ** 2)) for site, value in error.items()) / len(error)


def smooth_l0(ci: Array, gamma: float) -> Array:
    """psi of L2."""
    return ci**2 / (ci**2 + gamma**2)


def lp(ci: Array, p: float, eps: float) -> Array:
    """psi of L2, the papers'."""
    return (ci + eps) ** p


def frequencies(ci: Mapping[str, Array], psi: Callable[[Array], Array]) -> dict[str, Array]:
    """f[s, c] of L2: ci is upper, [B, T, C] by site; [C] by site."""
    return {site: np.mean(psi(array), axis=(0, 1)) for site, array in ci.items()}


def minimality(f: Mapping[str, Array]) -> float:
    """L2: activity."""
    return sum(float(np.sum(array)) for array in f.values())


def phi(f: Mapping[str, Array], count: float) -> float:
    """L3's value: sum of f log2(1 + a' f)."""
    return sum(float(np.sum(array * np.log2(1.0 + count * array))) for array in f.values())


def phi_slope(f: Mapping[str, Array], count: float) -> dict[str, Array]:
    """L3: d phi / d f by site."""

    def one(array: Array) -> Array:
        return np.log2(1.0 + count * array) + array * count / ((1.0 + count * array) * math.log(2.0))

    return {site: one(array) for site, array in f.items()}


def ema(
    average: Mapping[str, Array], updates: int, f: Mapping[str, Array], halflife: float
) -> tuple[dict[str, Array], dict[str, Array]]:
    """L3's average after this step: (raw, to keep), (debiased, f_hat).

    ``average`` is the raw average of the ``updates`` steps before, starting from zeros; f_hat includes this step.
    """
    decay = 2.0 ** (-1.0 / halflife)
    raw = {site: decay * average[site] + (1.0 - decay) * array for site, array in f.items()}
    return raw, {site: array / (1.0 - decay ** (updates + 1)) for site, array in raw.items()}


def frequency_linear(f: Mapping[str, Array], f_hat: Mapping[str, Array], count: float) -> float:
    """L3's value at f_hat, plus Phi'(f_hat) . f: only its derivative in f is meant (L3's gradient)."""
    slope = phi_slope(f_hat, count)
    return sum(float(np.sum(slope[site] * array)) for site, array in f.items())


def log_softmax(x: Array) -> Array:
    """Over the last axis."""
    top = np.max(x, axis=-1, keepdims=True)
    return x - top - np.log(np.sum(np.exp(x - top), axis=-1, keepdims=True))


def kl(clean_logits: Array, masked_logits: Array) -> float:
    """L5: mean over positions of KL(softmax(clean) || softmax(masked)), nats."""
    p, q = log_softmax(clean_logits), log_softmax(masked_logits)
    return float(np.mean(np.sum(np.exp(p) * (p - q), axis=-1)))


def mse(clean: Array, masked: Array) -> float:
    """L5 for targets without logits: mean over batch and features."""
    return float(np.mean((clean - masked) ** 2))


def hidden(clean: Mapping[str, Array], masked: Mapping[str, Array], names: Iterable[str]) -> float:
    """L7 without its coefficient: mean over captures of ||masked - clean||^2 / ||clean||^2."""
    ratios = [float(np.sum((masked[n] - clean[n]) ** 2) / np.sum(clean[n] ** 2)) for n in names]
    return sum(ratios) / len(ratios)


def total(terms: Mapping[str, float], coefficients: Mapping[str, Any]) -> float:
    """L6: sum of coefficient times term."""
    return sum(float(coefficients[name]) * value for name, value in terms.items())
