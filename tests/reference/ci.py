"""The chunk_transformer CI function and the two squashings (SPEC 3)."""

from __future__ import annotations

import numpy as np

from .llama import activation, attention, rms_norm, rope, rope_frequencies
from .tree import Tree

Array = np.ndarray


def chunk(params: Tree, taps: list[Array], n_heads: int, eps: float) -> dict[str, Array]:
    """Pre-activations [B, T, C] of one chunk's sites.

    taps: [B, T, d_tap] each. params: ``in_w`` [sum d_tap, d], ``in_b`` [d]; ``blocks`` {"0": {q, k, v, o [d, d], in_w
    [d, d_mlp], in_b, out_w [d_mlp, d], out_b}, ...}; ``heads`` {site: {w [d, C], b [C]}}. ``eps`` is the norms'.
    """
    joined = np.concatenate([rms_norm(tap, eps) for tap in taps], axis=-1)
    x = joined @ params["in_w"] + params["in_b"]
    for i in range(len(params["blocks"])):
        block = params["blocks"][str(i)]
        x = x + _attend(block, rms_norm(x, eps), n_heads)
        wide = activation("gelu", rms_norm(x, eps) @ block["in_w"] + block["in_b"])
        x = x + wide @ block["out_w"] + block["out_b"]
    return {site: x @ head["w"] + head["b"] for site, head in params["heads"].items()}


def _attend(block: Tree, x: Array, n_heads: int) -> Array:
    batch, length, d_model = x.shape
    frequencies = rope_frequencies(d_model // n_heads, 10000.0)
    q, k, v = ((x @ block[name]).reshape(batch, length, n_heads, -1) for name in ("q", "k", "v"))
    mixed = attention(rope(q, frequencies), rope(k, frequencies), v, causal=False)
    return mixed.reshape(batch, length, d_model) @ block["o"]


def chunk_transformer(params: Tree, taps: dict[str, list[Array]], n_heads: int, eps: float) -> dict[str, Array]:
    """Pre-activations of all sites; ``params`` and ``taps`` are by chunk name."""
    out: dict[str, Array] = {}
    for name, chunk_params in params.items():
        out |= chunk(chunk_params, taps[name], n_heads, eps)
    return out


def random_chunk(
    rng: np.random.Generator, d_taps: list[int], d_model: int, d_mlp: int, n_blocks: int, sites: dict[str, int]
) -> Tree:
    """Random parameters of one chunk; ``sites`` maps site to C. Biases are not zero, so that they are seen."""

    def normal(*dims: int) -> Array:
        return rng.standard_normal(dims) / np.sqrt(dims[0])

    def block() -> Tree:
        square = {name: normal(d_model, d_model) for name in ("q", "k", "v", "o")}
        mlp = {"in_w": normal(d_model, d_mlp), "out_w": normal(d_mlp, d_model)}
        return square | mlp | {"in_b": 0.1 * rng.standard_normal(d_mlp), "out_b": 0.1 * rng.standard_normal(d_model)}

    return {
        "in_w": normal(sum(d_taps), d_model),
        "in_b": 0.1 * rng.standard_normal(d_model),
        "blocks": {str(i): block() for i in range(n_blocks)},
        "heads": {name: {"w": normal(d_model, C), "b": rng.standard_normal(C)} for name, C in sites.items()},
    }


def lower(a: Array) -> Array:
    """C1's forward value."""
    return np.minimum(np.maximum(a, 0.0), 1.0)


def lower_slope(a: Array, g: Array) -> Array:
    """C1: what multiplies the cotangent ``g`` on the way from lower(a) to a."""
    out = np.zeros(np.broadcast(a, g).shape)
    for index in np.ndindex(out.shape):
        if 0.0 < a[index] <= 1.0:
            out[index] = 1.0
        elif a[index] <= 0.0 and g[index] < 0.0:
            out[index] = 0.01
    return out


def upper(a: Array) -> Array:
    """C2's value: clip(a, 0, 1) below 1 and 1 + 0.01 (a - 1) above."""
    return np.where(a > 1.0, 1.0 + 0.01 * (a - 1.0), np.maximum(a, 0.0))


def upper_slope(a: Array) -> Array:
    """C2: 0 up to and at a = 0, 1 up to and at a = 1, 0.01 above."""
    return np.where(a > 1.0, 0.01, np.where(a > 0.0, 1.0, 0.0))


def lower_linear(a: Array, at: Array, g: Array) -> Array:
    """lower's value at ``at``, continued with C1's slope for cotangent ``g``.

    Its ordinary derivative at a = ``at`` is C1's backward, so central differences of a loss that reads it see what
    training sees.
    """
    return lower(at) + lower_slope(at, g) * (a - at)


def upper_linear(a: Array, at: Array) -> Array:
    """upper's value at ``at``, continued with C2's slope."""
    return upper(at) + upper_slope(at) * (a - at)
