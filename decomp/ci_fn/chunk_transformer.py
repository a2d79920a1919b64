"""``chunk_transformer``: one small bidirectional transformer per chunk of the target's blocks (SPEC 3).

Chunks of equal shape share stacks [n_chunks, ...] and one scan; a block's leaves are 3-D stacks
[n_chunks * n_blocks, in, out] so that an optimizer sees a batch of matrices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from decomp.config.schema import ChunkTransformer as Config
from decomp.keys import Key, key_of, normals, site_keys, uniform_block
from decomp.numerics import gelu, matmul, wide
from decomp.placement import Axes, Leaf, resting_layout
from decomp.sites import Site, SiteTable
from decomp.target.llama import attention, rms_norm

RMS_EPS = 1e-6
ROPE_BASE = 10000.0


@dataclass(frozen=True)
class Chunks:
    """Chunks of equal shape: ``first_layers`` of each, taps widths, and per head its sites, one per chunk."""

    name: str
    first_layers: tuple[int, ...]
    d_taps: int
    tap_kinds: tuple[tuple[int, str], ...]  # (layer offset, kind) for site_inputs
    heads: Mapping[str, tuple[Site, ...]]


@dataclass(frozen=True)
class ChunkTransformer:
    """The CI function of ``cfg`` for ``table``; ``d_model`` is the target's residual width."""

    cfg: Config
    table: SiteTable
    d_model: int
    ax: Axes
    layout: str
    on_ragged: str = "fallback"

    @property
    def captures(self) -> frozenset[str]:
        return frozenset({self.cfg.taps})

    @cached_property
    def chunks(self) -> tuple[Chunks, ...]:
        """Chunks that hold a chosen site, grouped by shape."""
        step = self.cfg.layers_per_chunk
        by_signature: dict[Any, list[int]] = {}
        for start in range(0, self.table.n_layers, step):
            sites = self._sites(start)
            if sites:
                length = min(step, self.table.n_layers - start)
                signature = (length, tuple((s.matrix.layer - start, s.matrix.kind, s.C) for s in sites))
                by_signature.setdefault(signature, []).append(start)
        return tuple(self._chunks(i, sig, starts) for i, (sig, starts) in enumerate(by_signature.items()))

    def _sites(self, start: int) -> list[Site]:
        return [s for s in self.table.sites if 0 <= s.matrix.layer - start < self.cfg.layers_per_chunk]

    def _chunks(self, index: int, signature: Any, starts: list[int]) -> Chunks:
        length, entries = signature
        members = [self._sites(s) for s in starts]
        heads = {f"{off}.{kind}": tuple(m[j] for m in members) for j, (off, kind, _) in enumerate(entries)}
        if self.cfg.taps == "residual":
            return Chunks(f"chunks{index}", tuple(starts), length * self.d_model, (), heads)
        width = sum(s.matrix.d_in for s in members[0])
        return Chunks(f"chunks{index}", tuple(starts), width, tuple((o, k) for o, k, _ in entries), heads)

    def leaves(self) -> dict[str, Any]:
        """Leaf of every parameter, by chunk group."""
        c, out = self.cfg, {}
        for ch in self.chunks:
            n, nb = len(ch.first_layers), len(ch.first_layers) * c.n_blocks
            rest = lambda k, name=ch.name: resting_layout(self.layout, k, self.on_ragged, name, self.ax.sizes)  # noqa: E731
            matrix = lambda k, i, o, axes: Leaf((k, i, o), ("stack", *axes), rest(k))  # noqa: E731, B023
            vector = lambda k, o, axis=None: Leaf((k, o), ("stack", axis), rest(k))  # noqa: E731, B023
            out[ch.name] = {
                "w_in": matrix(n, ch.d_taps, c.d_model, ("tp", "d_out")),
                "b_in": vector(n, c.d_model),
                **{k: matrix(nb, c.d_model, c.d_model, ("d_in", "tp")) for k in ("q", "k", "v")},
                "o": matrix(nb, c.d_model, c.d_model, ("tp", "d_out")),
                "mlp_in": matrix(nb, c.d_model, c.d_mlp, ("d_in", "tp")),
                "mlp_in_bias": vector(nb, c.d_mlp, "tp"),
                "mlp_out": matrix(nb, c.d_mlp, c.d_model, ("tp", "d_out")),
                "mlp_out_bias": vector(nb, c.d_model),
                "heads": {h: matrix(n, c.d_model, s[0].C, ("d_in", "C")) for h, s in ch.heads.items()},
                "head_biases": {h: vector(n, s[0].C, "C") for h, s in ch.heads.items()},
            }
        return out

    def init(self, seed: int, dtype: Any) -> dict[str, Any]:
        """Biases 0; in-projections Kaiming (gain sqrt 2), out-projections gain 1, attention U(+-1/sqrt(fan_in))."""
        leaves, out = self.leaves(), {}
        for ch in self.chunks:
            names = [f"layer{first}" for first in ch.first_layers]
            blocks = [f"{n}/block{b}" for n in names for b in range(self.cfg.n_blocks)]

            def one(path: Any, leaf: Leaf, names: list[str] = names, blocks: list[str] = blocks) -> Array:
                name = "/".join(k.key for k in path)
                owners = names if path[0].key in PER_CHUNK else blocks
                return _draw(key_of(seed, "init", "ci_fn", name), name, owners, leaf.shape, dtype)

            out[ch.name] = jax.tree_util.tree_map_with_path(one, leaves[ch.name], is_leaf=_is_leaf)
        return out

    def __call__(
        self, params: Any, dims: Any, taps: Mapping[str, Array], components: Any = None
    ) -> dict[str, Float[Array, "n B T C"]]:
        """Pre-activations by lane from the clean taps; components are not read."""
        pieces: dict[str, list[tuple[tuple[Site, ...], Array]]] = {}
        for ch in self.chunks:
            heads = self._scan(ch, params[ch.name], dims[ch.name], self._taps(ch, taps))
            for name, sites in ch.heads.items():
                pieces.setdefault(sites[0].lane, []).append((sites, heads[name]))
        return {lane: _in_rows(found) for lane, found in pieces.items()}

    def _taps(self, ch: Chunks, taps: Mapping[str, Array]) -> list[Array]:
        """Each tap as [n_chunks, B, T, d], in the order they are concatenated."""
        if self.cfg.taps == "residual":
            length = ch.d_taps // self.d_model
            return [_take(taps["residual"], [f + i for f in ch.first_layers]) for i in range(length)]
        return [_take(taps[f"site_inputs/{s[0].lane}"], [x.row for x in s]) for s in ch.heads.values()]

    def _scan(self, ch: Chunks, params: Any, dims: Any, taps: list[Array]) -> dict[str, Array]:
        per_chunk = {k: v for k, v in params.items() if k in PER_CHUNK}
        nb = self.cfg.n_blocks
        per_block = {k: v.reshape((-1, nb) + v.shape[1:]) for k, v in params.items() if k not in PER_CHUNK}
        length = taps[0].shape[2]
        angles = np.arange(length)[:, None] * ROPE_BASE ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        dtype = wide(taps[0].dtype)
        rope = jnp.asarray(np.cos(angles), dtype), jnp.asarray(np.sin(angles), dtype)

        def chunk(_: None, xs: Any) -> tuple[None, dict[str, Array]]:
            own, blocks, tap = xs
            # Only what enters each part is kept: of the first and the last that saves their gathered matrices.
            # Mesh axes are names and no arguments of a checkpoint.
            part = jax.checkpoint if self.cfg.remat else lambda fn: fn
            block = part(lambda p, x: self._block(p, dims, rope, x))
            x = part(lambda p, tap: self._enter(p, dims, tap))(own, tap)
            x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, blocks)
            return None, part(lambda p, x: self._heads(p, dims, x))(own, x)

        return jax.lax.scan(chunk, None, (per_chunk, per_block, taps))[1]

    @property
    def head_dim(self) -> int:
        return self.cfg.d_model // self.cfg.n_heads

    def _enter(self, p: Any, dims: Any, taps: list[Array]) -> Array:
        x = jnp.concatenate([rms_norm(t, None, RMS_EPS) for t in taps], axis=-1)
        x = self.ax.shard(self.ax.varying(x, ("tp",)), ("tp",), x.ndim - 1)
        return self.ax.psum(matmul(x, self.ax.over_node(p["w_in"], dims["w_in"])), ("tp",)) + p["b_in"]

    def _block(self, p: Any, dims: Any, rope: Any, x: Array) -> Array:
        """A pre-norm block: bidirectional attention, then a GELU MLP; column then row shares over ``tp``."""
        w = lambda k: self.ax.over_node(p[k], dims[k])  # noqa: E731
        h = self.ax.varying(rms_norm(x, None, RMS_EPS), ("tp",))
        q, k, v = (matmul(h, w(name)) for name in "qkv")
        mixed = attention(q, k, v, rope, self.head_dim, causal=False)
        x = x + self.ax.psum(matmul(mixed, w("o")), ("tp",))
        h = self.ax.varying(rms_norm(x, None, RMS_EPS), ("tp",))
        h = gelu(matmul(h, w("mlp_in")) + p["mlp_in_bias"])
        return x + self.ax.psum(matmul(h, w("mlp_out")), ("tp",)) + p["mlp_out_bias"]

    def _heads(self, p: Any, dims: Any, x: Array) -> dict[str, Array]:
        x = self.ax.varying(x, ("tp",))
        weight = lambda k: self.ax.over_node(p["heads"][k], dims["heads"][k])  # noqa: E731
        return {k: matmul(x, weight(k)) + bias for k, bias in p["head_biases"].items()}


PER_CHUNK = ("w_in", "b_in", "heads", "head_biases")


def _draw(key: Key, name: str, owners: list[str], shape: tuple[int, ...], dtype: Any) -> Array:
    """A stack whose rows are drawn by their owner's name, so that choosing other layers moves no number."""
    if "bias" in name or name == "b_in":
        return jnp.zeros(shape, dtype)
    keys, matrix = site_keys(key, owners), (shape[1], shape[2])
    fan_in = matrix[0]
    if name in ("q", "k", "v", "o"):
        draws = jax.vmap(lambda k: uniform_block(k, 0, (1, *matrix), matrix[1])[0])(keys)
        return (2 * draws - 1).astype(dtype) * jnp.asarray(1.0 / math.sqrt(fan_in), dtype)
    gain = math.sqrt(2.0) if name in ("w_in", "mlp_in") else 1.0
    return jax.vmap(lambda k: normals(k, matrix, dtype))(keys) * jnp.asarray(gain / math.sqrt(fan_in), dtype)


def _take(stack: Array, rows: list[int]) -> Array:
    """Rows of a stack: a slice where they are consecutive, which costs no gather."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return stack[rows[0] : rows[0] + len(rows)]
    return stack[np.array(rows)]


def _in_rows(found: list[tuple[tuple[Site, ...], Array]]) -> Array:
    """The heads of one lane as [n, B, T, C] in row order; already so where one head serves the whole lane."""
    rows = [s.row for sites, _ in found for s in sites]
    stack = found[0][1] if len(found) == 1 else jnp.concatenate([x for _, x in found])
    return stack if rows == sorted(rows) else stack[np.argsort(rows)]


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Leaf)
