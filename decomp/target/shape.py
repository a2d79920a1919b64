"""What a Llama-architecture model looks like: sizes, matrices and the tensors its folder must hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from decomp.sites import ATTENTION_KINDS, Matrix


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency-dependent scaling (``rope_type: llama3`` in config.json)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a decoder with rotary GQA attention, RMS norms and a gated (7 kinds) or plain (6 kinds) MLP."""

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_mlp: int
    vocab: int
    tied: bool
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_eps: float = 1e-6
    act: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    max_positions: int = 2048

    @property
    def kinds(self) -> dict[str, tuple[int, int]]:
        """Kind -> (d_in, d_out), in the order of the forward."""
        d, q, kv = self.d_model, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        attention = {"q_proj": (d, q), "k_proj": (d, kv), "v_proj": (d, kv), "o_proj": (q, d)}
        if self.gated:
            return attention | {"gate_proj": (d, self.d_mlp), "up_proj": (d, self.d_mlp), "down_proj": (self.d_mlp, d)}
        return attention | {"c_fc": (d, self.d_mlp), "down_proj": (self.d_mlp, d)}

    def has_bias(self, kind: str) -> bool:
        return self.attention_bias if kind in ATTENTION_KINDS else self.mlp_bias

    def matrices(self) -> tuple[Matrix, ...]:
        """Every matrix of every layer, layer-major."""
        return tuple(
            Matrix(matrix_name(layer, kind), kind, layer, d_in, d_out)
            for layer in range(self.n_layers)
            for kind, (d_in, d_out) in self.kinds.items()
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Tensor name -> stored shape ([d_out, d_in] for matrices) that the folder must hold."""
        out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.d_model)}
        for m in self.matrices():
            out[f"{m.name}.weight"] = (m.d_out, m.d_in)
            if self.has_bias(m.kind):
                out[f"{m.name}.bias"] = (m.d_out,)
        for layer in range(self.n_layers):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                out[f"model.layers.{layer}.{norm}.weight"] = (self.d_model,)
        out["model.norm.weight"] = (self.d_model,)
        if not self.tied:
            out["lm_head.weight"] = (self.vocab, self.d_model)
        return out


def matrix_name(layer: int, kind: str) -> str:
    """The tensor path of a matrix without ``.weight`` (SPEC F6)."""
    return f"model.layers.{layer}.{'self_attn' if kind in ATTENTION_KINDS else 'mlp'}.{kind}"


LLAMA_8B = LlamaShape(
    n_layers=32, d_model=4096, n_heads=32, n_kv_heads=8, head_dim=128, d_mlp=14336, vocab=128256, tied=False,
    rope_theta=500000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192), rms_eps=1e-5, max_positions=131072,
)  # fmt: skip
"""Llama-3.1-8B, as its config.json says."""
