"""A Llama in numpy: clean and masked forward (SPEC 2), one site and one layer at a time.

``weights`` maps Hugging Face tensor names to float64 arrays; matrices are [d_in, d_out], used as ``x @ W``.
``shape`` is anything with the fields of ``Shape``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Shape:
    """The numbers of a Llama; ``rope_scaling`` holds Llama 3.1's four numbers under their Hugging Face names."""

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_mlp: int
    vocab: int
    tied: bool = True
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, float] | None = None
    rms_eps: float = 1e-5
    act: str = "silu"
    gated: bool = True


@dataclass(frozen=True)
class Masked:
    """One site's components and masks.

    V [d_in, C], U [C, d_out]; mask broadcasts to [B, T, C]; delta to [B, T], None is no delta path (d = 0);
    route is bool and broadcasts to [B, T], None routes all.
    """

    V: Array
    U: Array
    mask: Array
    delta: Array | None = None
    route: Array | None = None


def erf(x: Array) -> Array:
    """The error function, entry by entry."""
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def activation(name: str, x: Array) -> Array:
    """``silu``, ``gelu`` (exact erf) or ``gelu_tanh``."""
    if name == "silu":
        return x / (1.0 + np.exp(-x))
    if name == "gelu":
        return 0.5 * x * (1.0 + erf(x / math.sqrt(2.0)))
    if name == "gelu_tanh":
        return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    raise ValueError(f"unknown activation {name!r}")


def rms_norm(x: Array, eps: float, weight: Array | None = None) -> Array:
    """x [.., d] over its root mean square; ``weight`` None is the weightless norm."""
    normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed if weight is None else normed * weight


def rope_frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any] | None = None) -> Array:
    """Radians per position, [head_dim / 2]; ``scaling`` stretches long wavelengths as Llama 3.1 does."""
    out = np.zeros(head_dim // 2)
    for i in range(head_dim // 2):
        frequency = theta ** (-2.0 * i / head_dim)
        out[i] = frequency if scaling is None else _llama31(frequency, scaling)
    return out


def _llama31(frequency: float, scaling: Mapping[str, Any]) -> float:
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    factor, trained = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    turns = trained * frequency / (2.0 * math.pi)  # full rotations within the trained context
    if turns > high:
        return frequency
    if turns < low:
        return frequency / factor
    keep = (turns - low) / (high - low)
    return keep * frequency + (1.0 - keep) * frequency / factor


def rope(x: Array, frequencies: Array) -> Array:
    """Rotate x [B, T, H, D]: entry i pairs with entry i + D/2 ("rotate half")."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None, None] * frequencies  # [T, 1, D/2]
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def softmax(x: Array) -> Array:
    """Over the last axis."""
    shifted = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return shifted / np.sum(shifted, axis=-1, keepdims=True)


def attention(q: Array, k: Array, v: Array, causal: bool) -> Array:
    """q [B, T, H, D], k and v [B, T, K, D] with K dividing H: query head h reads head h // (H / K). [B, T, H, D]."""
    batch, length, heads, dim = q.shape
    group = heads // k.shape[2]
    out = np.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            scores = q[b, :, h] @ k[b, :, h // group].T / math.sqrt(dim)
            if causal:
                scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
            out[b, :, h] = softmax(scores) @ v[b, :, h // group]
    return out


def site_output(x: Array, weight: Array, masked: Masked) -> Array:
    """SPEC 2's y, written with the residual W - VU spelled out: ((xV)*m)U + d x(W - VU) where routed, else xW."""
    inner = ((x @ masked.V) * masked.mask) @ masked.U
    if masked.delta is not None:
        inner = inner + masked.delta[..., None] * (x @ (weight - masked.V @ masked.U))
    if masked.route is None:
        return inner
    return np.where(masked.route[..., None], inner, x @ weight)


class Forward:
    """One forward pass; ``captures`` fills with every named activation.

    Names: ``resid.<i>`` enters block i (``resid.<n_layers>`` leaves the last), ``attn_in.<i>`` and ``mlp_in.<i>``
    are the normed inputs, ``<matrix>.in`` and ``<matrix>.out`` are a matrix's x and x @ W without its bias.
    """

    def __init__(self, shape: Any, weights: Mapping[str, Array], masked: Mapping[str, Masked] | None = None) -> None:
        self.shape, self.weights, self.masked = shape, weights, dict(masked or {})
        self.captures: dict[str, Array] = {}
        unknown = [name for name in self.masked if f"{name}.weight" not in weights]
        if unknown:
            raise ValueError(f"unknown sites {unknown}")  # F1

    def hidden(self, tokens: Array) -> Array:
        """tokens [B, T] -> [B, T, d] after the final norm."""
        x = self.weights["model.embed_tokens.weight"][tokens]
        for i in range(self.shape.n_layers):
            self.captures[f"resid.{i}"] = x
            x = x + self._attention(i, self._norm(x, f"model.layers.{i}.input_layernorm", f"attn_in.{i}"))
            x = x + self._mlp(i, self._norm(x, f"model.layers.{i}.post_attention_layernorm", f"mlp_in.{i}"))
        self.captures[f"resid.{self.shape.n_layers}"] = x
        return rms_norm(x, self.shape.rms_eps, self.weights["model.norm.weight"])

    def logits(self, tokens: Array) -> Array:
        """tokens [B, T] -> [B, T, vocab]."""
        hidden = self.hidden(tokens)
        if self.shape.tied:
            return hidden @ self.weights["model.embed_tokens.weight"].T
        return hidden @ self.weights["lm_head.weight"]

    def _norm(self, x: Array, name: str, capture: str) -> Array:
        self.captures[capture] = rms_norm(x, self.shape.rms_eps, self.weights[f"{name}.weight"])
        return self.captures[capture]

    def _matrix(self, name: str, x: Array) -> Array:
        weight = self.weights[f"{name}.weight"]
        y = site_output(x, weight, self.masked[name]) if name in self.masked else x @ weight
        self.captures[f"{name}.in"], self.captures[f"{name}.out"] = x, y
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _attention(self, layer: int, x: Array) -> Array:
        shape, base = self.shape, f"model.layers.{layer}.self_attn"
        batch, length, _ = x.shape
        frequencies = rope_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)
        q = self._matrix(f"{base}.q_proj", x).reshape(batch, length, shape.n_heads, shape.head_dim)
        k = self._matrix(f"{base}.k_proj", x).reshape(batch, length, shape.n_kv_heads, shape.head_dim)
        v = self._matrix(f"{base}.v_proj", x).reshape(batch, length, shape.n_kv_heads, shape.head_dim)
        mixed = attention(rope(q, frequencies), rope(k, frequencies), v, causal=True)
        return self._matrix(f"{base}.o_proj", mixed.reshape(batch, length, -1))

    def _mlp(self, layer: int, x: Array) -> Array:
        base, act = f"model.layers.{layer}.mlp", self.shape.act
        if not self.shape.gated:
            return self._matrix(f"{base}.down_proj", activation(act, self._matrix(f"{base}.c_fc", x)))
        gate = activation(act, self._matrix(f"{base}.gate_proj", x))
        return self._matrix(f"{base}.down_proj", gate * self._matrix(f"{base}.up_proj", x))


def matrices(shape: Any) -> dict[str, tuple[int, int]]:
    """Every decomposable matrix by name: (d_in, d_out)."""
    d, query, key = shape.d_model, shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    kinds = {"self_attn.q_proj": (d, query), "self_attn.k_proj": (d, key), "self_attn.v_proj": (d, key)}
    kinds["self_attn.o_proj"] = (query, d)
    wide = ("mlp.gate_proj", "mlp.up_proj") if shape.gated else ("mlp.c_fc",)
    kinds |= dict.fromkeys(wide, (d, shape.d_mlp)) | {"mlp.down_proj": (shape.d_mlp, d)}
    return {f"model.layers.{i}.{kind}": dims for i in range(shape.n_layers) for kind, dims in kinds.items()}


def random_weights(shape: Any, rng: np.random.Generator, biases: tuple[str, ...] = ()) -> dict[str, Array]:
    """Random tensors for every name; a matrix whose last name part is in ``biases`` gets a bias."""
    out = {"model.embed_tokens.weight": rng.standard_normal((shape.vocab, shape.d_model))}
    for name, (d_in, d_out) in matrices(shape).items():
        out[f"{name}.weight"] = rng.standard_normal((d_in, d_out)) / math.sqrt(d_in)
        if name.rpartition(".")[2] in biases:
            out[f"{name}.bias"] = 0.3 * rng.standard_normal(d_out)
    for i in range(shape.n_layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"model.layers.{i}.{norm}.weight"] = 1.0 + 0.2 * rng.standard_normal(shape.d_model)
    out["model.norm.weight"] = 1.0 + 0.2 * rng.standard_normal(shape.d_model)
    if not shape.tied:
        out["lm_head.weight"] = rng.standard_normal((shape.d_model, shape.vocab)) / math.sqrt(shape.d_model)
    return out
