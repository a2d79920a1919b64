"""Llama-architecture forward: clean and masked, layers scanned run by run (SPEC 2, F1-F7, D9).

Parameters of the frozen target, all used as ``x @ W``::

    embed [vocab, d]   head [d, vocab] (absent when tied)   final_norm [d]
    norms {input, post}: [L, d]            biases {kind}: [L, d_out]
    sites {group}: [g, d_in, d_out]        frozen {kind}: [n, d_in, d_out]

The chosen matrices lie in the same slot order as their V and U, so that one slice serves all three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from decomp.components import SiteMask, Stacks, masked_site
from decomp.keys import key_of, normals, site_keys
from decomp.numerics import gelu, matmul, wide
from decomp.placement import Axes, Leaf
from decomp.sites import Run, SiteTable, group_rows, lane_rows
from decomp.target.shape import LlamaShape, matrix_name

Params = dict[str, Any]
Captures = dict[str, Array]
ROW_KINDS = ("o_proj", "down_proj")  # their input is split over tp and their output is whole
# What a recomputed layer keeps: with the outputs of its matrices only x V is multiplied again. Nothing in the layer
# reads down_proj's output, so of that matrix x V itself is kept.
KEPT = jax.checkpoint_policies.save_only_these_names(
    *(f"outputs/{kind}" for kind in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "c_fc")),
    "activations/down_proj",
)


class Clean(NamedTuple):
    """A clean forward: ``hidden`` after the final norm, the residual ``start`` entering the first chosen layer."""

    hidden: Float[Array, "B T d"]
    start: Float[Array, "B T d"]
    captures: Captures


class Masks(Protocol):
    """Masks of one masked forward, read layer by layer."""

    def rows(self, run: Run) -> Any:
        """Arrays with leading axis ``run.length`` that the layer scan slices."""
        ...

    def at(self, run: Run, kind: str, row: Any) -> SiteMask:
        """The mask of the site of ``kind`` in the layer whose slice is ``row``."""
        ...


@dataclass(frozen=True)
class Llama:
    """The forward functions of one shape and one selection on one mesh. ``dims`` are the mesh axes of ``params``."""

    shape: LlamaShape
    table: SiteTable
    ax: Axes
    remat: bool = False

    def clean(self, params: Params, dims: Any, tokens: Int[Array, "B T"], captures: Set[str] = frozenset()) -> Clean:
        """The frozen model (SPEC F3). ``captures``: residual, block_inputs, site_inputs, site_outputs (SPEC F4)."""
        x = start = self.embed(params, dims, tokens)
        found: list[tuple[Run, Any]] = []
        first = self.table.masked_runs[0].start if self.table.masked_runs else 0
        rope = self.rope(tokens.shape[1], x.dtype)
        for run in self.table.runs:
            start = x if run.start == first else start
            x, caps = self._scan_run(run, params, dims, x, rope, captures, clean_linear(self.ax), ())
            found.append((run, caps))
        hidden = rms_norm(x, params["final_norm"], self.shape.rms_eps)
        return Clean(hidden, start, self._collect(found, x, captures))

    def masked(
        self, params: Params, dims: Any, copies: Stacks, copy_dims: Any, masks: Masks, start: Array,
        captures: Set[str] = frozenset(),
    ) -> tuple[Float[Array, "B T d"], Captures]:  # fmt: skip
        """The decomposed forward from the clean residual ``start`` on (SPEC F7): normed hidden state, captures."""
        x, found = start, []
        rope = self.rope(start.shape[1], x.dtype)
        for run in self.table.masked_runs:
            rows = {g: {f: group_rows(run, g, copies[g][f]) for f in "VU"} for g in run.group_sizes}
            linear = masked_linear(self.ax, run, masks, copy_dims)
            x, caps = self._scan_run(run, params, dims, x, rope, captures, linear, (rows, masks.rows(run)))
            found.append((run, caps))
        hidden = rms_norm(x, params["final_norm"], self.shape.rms_eps)
        return hidden, self._collect(found, x, captures)

    def embed(self, params: Params, dims: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T d"]:
        return self.ax.over_node(params["embed"], dims["embed"], lead=0)[tokens]

    def head(self, params: Params, dims: Any) -> Float[Array, "d vocab"]:
        """The unembedding, whole on this device."""
        if self.shape.tied:
            return self.ax.over_node(params["embed"], dims["embed"], lead=0).T
        return self.ax.over_node(params["head"], dims["head"], lead=0)

    def rope(self, length: int, dtype: Any) -> tuple[Array, Array]:
        angles = np.arange(length)[:, None] * rope_frequencies(self.shape)
        return jnp.asarray(np.cos(angles), wide(dtype)), jnp.asarray(np.sin(angles), wide(dtype))

    def _scan_run(
        self, run: Run, params: Params, dims: Any, x: Array, rope: Any, captures: Set[str], linear: Any, extra: Any
    ) -> tuple[Array, Any]:
        layer_xs = _layer_rows(run, self.table, params)
        body = partial(self._layer, run, dims, rope, captures, linear)
        body = jax.checkpoint(body, policy=KEPT) if self.remat and extra else body
        return jax.lax.scan(body, x, (layer_xs, extra))

    def _layer(
        self, run: Run, dims: Any, rope: Any, captures: Set[str], linear: Any, x: Array, xs: Any
    ) -> tuple[Array, Any]:
        """One block on the residual ``x``; ``linear`` computes each matrix. Returns the residual and the captures."""
        layer, extra = xs
        caps: dict[str, Any] = {"residual": x} if "residual" in captures else {}

        def project(kind: str, h: Array) -> Array:
            row = kind in ROW_KINDS
            h = self.ax.all_gather(h, ("tp",), h.ndim - 1) if row else h
            y = linear(kind, h, _weight(self.ax, run, layer, dims, kind), run.first.get(kind), extra, row)
            y = checkpoint_name(y, f"outputs/{kind}")
            if kind in run.first:  # a site's output is x @ W: biases are not part of it (SPEC F5)
                caps.update({f"{n}/{kind}": v for n, v in (("site_inputs", h), ("site_outputs", y)) if n in captures})
            return y + layer["biases"][kind] if kind in layer["biases"] else y

        h = self.ax.varying(rms_norm(x, layer["norms"]["input"], self.shape.rms_eps), ("tp",))
        q, k, v = (project(kind, h) for kind in ("q_proj", "k_proj", "v_proj"))
        x = x + project("o_proj", attention(q, k, v, rope, self.shape.head_dim))
        h2 = self.ax.varying(rms_norm(x, layer["norms"]["post"], self.shape.rms_eps), ("tp",))
        x = x + project("down_proj", self._mlp_inner(project, h2))
        if "block_inputs" in captures:
            caps |= {"block_inputs/attn": h, "block_inputs/mlp": h2}
        return x, caps

    def _mlp_inner(self, project: Callable[[str, Array], Array], h: Array) -> Array:
        act = ACTIVATIONS[self.shape.act]
        if not self.shape.gated:
            return act(project("c_fc", h))
        return act(project("gate_proj", h)) * project("up_proj", h)

    def _collect(self, found: list[tuple[Run, Any]], final: Array, captures: Set[str]) -> Captures:
        """Per-run captures joined: [layers, ...] for the residual stream (entering each block, then the last one's
        output) and block inputs, [n, ...] by lane for site inputs and outputs."""
        out: dict[str, list[Array]] = {}
        for run, caps in found:
            for name, value in caps.items():
                what, _, kind = name.partition("/")
                key = f"{what}/{run.first[kind].lane}" if what.startswith("site_") else name
                out.setdefault(key, []).append(value)
        if "residual" in captures:
            out["residual"].append(final[None])
        return {k: v[0] if len(v) == 1 else jnp.concatenate(v) for k, v in out.items()}


def clean_linear(ax: Axes) -> Callable[..., Array]:
    def linear(kind: str, x: Array, W: Array, site: Any, extra: Any, row: bool) -> Array:
        y = matmul(x, W)
        return ax.join_columns(y) if row else y

    return linear


def masked_linear(ax: Axes, run: Run, masks: Masks, copy_dims: Any) -> Callable[..., Array]:
    """The chosen kinds take the masked site, the others the frozen matrix alone (SPEC F2)."""

    def linear(kind: str, x: Array, W: Array, site: Any, extra: Any, row: bool) -> Array:
        if site is None:
            return clean_linear(ax)(kind, x, W, site, extra, row)
        stacks, mask_row = extra
        j, g = site.slot - run.group_starts[site.group], site.group
        V, U = (ax.over_node(stacks[g][f][j], copy_dims[g][f]) for f in "VU")
        return masked_site(ax, x, V, U, W, masks.at(run, kind, mask_row), row, kind)

    return linear


def _weight(ax: Axes, run: Run, layer: Any, dims: Any, kind: str) -> Float[Array, "d_in d_out"]:
    if kind in run.first:
        site = run.first[kind]
        j = site.slot - run.group_starts[site.group]
        return ax.over_node(layer["sites"][site.group][j], dims["sites"][site.group])
    return ax.over_node(layer["frozen"][kind], dims["frozen"][kind])


def _layer_rows(run: Run, table: SiteTable, params: Params) -> dict[str, Any]:
    """The run's slices of every per-layer parameter, leading axis ``run.length``."""
    by_layer = partial(lane_rows, run, run.start)
    first_frozen = {k: sum(m.layer < run.start for m in ms) for k, ms in table.frozen.items() if k not in run.first}
    return {
        "norms": {k: by_layer(v) for k, v in params["norms"].items()},
        "biases": {k: by_layer(v) for k, v in params["biases"].items()},
        "sites": {g: group_rows(run, g, params["sites"][g]) for g in run.group_sizes},
        "frozen": {k: lane_rows(run, row, params["frozen"][k]) for k, row in first_frozen.items()},
    }


# ---------------------------------------------------------------- pieces of a block
def rms_norm(x: Float[Array, "*b d"], weight: Float[Array, " d"] | None, eps: float) -> Float[Array, "*b d"]:
    z = x.astype(wide(x.dtype))
    y = (z * jax.lax.rsqrt(jnp.mean(z * z, axis=-1, keepdims=True) + eps)).astype(x.dtype)
    return y if weight is None else y * weight


def rope_frequencies(shape: LlamaShape) -> np.ndarray:
    """Rotation per position and pair [head_dim / 2], with Llama 3.1's scaling where the shape has it."""
    freq = shape.rope_theta ** (-np.arange(0, shape.head_dim, 2) / shape.head_dim)
    if (s := shape.rope_scaling) is None:
        return freq
    wavelength = 2 * math.pi / freq
    blend = (s.original_max_positions / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * freq / s.factor + blend * freq


def rotate(x: Float[Array, "B T h D"], rope: tuple[Array, Array]) -> Float[Array, "B T h D"]:
    """Rotate-half rotary embedding; ``rope`` is (cos, sin), each [T, D / 2]."""
    cos, sin = rope[0][:, None], rope[1][:, None]
    a, b = jnp.split(x.astype(wide(x.dtype)), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention(
    q: Float[Array, "B T q"], k: Float[Array, "B T kv"], v: Float[Array, "B T kv"], rope: Any, head_dim: int,
    causal: bool = True,
) -> Float[Array, "B T q"]:  # fmt: skip
    """Grouped-query attention, causal unless told otherwise; scores and softmax at least in float32."""
    B, T, _ = q.shape
    heads = lambda z: z.reshape(B, T, -1, head_dim)  # noqa: E731
    q, k, v = rotate(heads(q), rope), rotate(heads(k), rope), heads(v)
    q = q.reshape(B, T, k.shape[2], -1, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k).astype(wide(q.dtype)) * head_dim**-0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, jnp.asarray(-1e30, scores.dtype))
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(B, T, -1)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": gelu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


# ---------------------------------------------------------------- parameters
def leaves(shape: LlamaShape, table: SiteTable, layout: str) -> dict[str, Any]:
    """Leaf of every parameter; ``layout`` is ``node`` (split inside a node, whole in each) or ``replicated``."""
    d, n = shape.d_model, shape.n_layers
    out: dict[str, Any] = {
        "embed": Leaf((shape.vocab, d), (None, "d_model"), layout),
        "final_norm": Leaf((d,), (None,), layout),
        "norms": {k: Leaf((n, d), (None, None), layout) for k in ("input", "post")},
        "biases": {
            k: Leaf((n, o), (None, None if k in ROW_KINDS else "d_out"), layout)
            for k, (_, o) in shape.kinds.items()
            if shape.has_bias(k)
        },
        "sites": {
            g.name: Leaf((len(g.sites), g.d_in, g.d_out), (None, "d_in", "d_out"), layout)
            for g in table.groups.values()
        },
        "frozen": {
            k: Leaf((len(ms), ms[0].d_in, ms[0].d_out), (None, "d_in", "d_out"), layout)
            for k, ms in table.frozen.items()
        },
    }
    if not shape.tied:
        out["head"] = Leaf((d, shape.vocab), ("d_model", None), layout)
    return out


def load_params(tensors: Any, shape: LlamaShape, table: SiteTable) -> Params:
    """Parameters as numpy arrays from ``tensors.get(name)``, matrices turned to [d_in, d_out]."""
    get, layers = tensors.get, range(shape.n_layers)
    stack = lambda names: np.stack([get(n) for n in names])  # noqa: E731
    matrices = lambda ms: np.stack([get(f"{m.name}.weight").T for m in ms])  # noqa: E731
    norm = {"input": "input_layernorm", "post": "post_attention_layernorm"}
    params: Params = {
        "embed": get("model.embed_tokens.weight"),
        "final_norm": get("model.norm.weight"),
        "norms": {k: stack([f"model.layers.{i}.{v}.weight" for i in layers]) for k, v in norm.items()},
        "biases": {k: stack([f"{matrix_name(i, k)}.bias" for i in layers]) for k in shape.kinds if shape.has_bias(k)},
        "sites": {g.name: matrices([s.matrix for s in g.sites]) for g in table.groups.values()},
        "frozen": {k: matrices(ms) for k, ms in table.frozen.items()},
    }
    if not shape.tied:
        params["head"] = get("lm_head.weight").T
    return params


def export_tensors(params: Params, shape: LlamaShape, table: SiteTable) -> dict[str, np.ndarray]:
    """The inverse of ``load_params``: Hugging Face name -> array as stored."""
    a = jax.tree.map(np.asarray, params)
    out = {"model.embed_tokens.weight": a["embed"], "model.norm.weight": a["final_norm"]}
    for i in range(shape.n_layers):
        out[f"model.layers.{i}.input_layernorm.weight"] = a["norms"]["input"][i]
        out[f"model.layers.{i}.post_attention_layernorm.weight"] = a["norms"]["post"][i]
        out |= {f"{matrix_name(i, k)}.bias": b[i] for k, b in a["biases"].items()}
    for ms, stack in [([s.matrix for s in g.sites], a["sites"][g.name]) for g in table.groups.values()] + [
        (ms, a["frozen"][k]) for k, ms in table.frozen.items()
    ]:
        out |= {f"{m.name}.weight": np.ascontiguousarray(stack[i].T) for i, m in enumerate(ms)}
    if not shape.tied:
        out["lm_head.weight"] = np.ascontiguousarray(a["head"].T)
    return out


def init_params(shape: LlamaShape, table: SiteTable, seed: int, dtype: Any = jnp.float32) -> Params:
    """Random parameters for training: matrices N(0, 1/d_in), residual outputs scaled by 1/sqrt(2 L), norms 1."""
    tree = leaves(shape, table, "replicated")

    def one(path: Any, leaf: Leaf) -> Array:
        name = jax.tree_util.keystr(path)
        if "norm" in name:
            return jnp.ones(leaf.shape, dtype)
        if "biases" in name:
            return jnp.zeros(leaf.shape, dtype)
        scale = 0.02 if "embed" in name else leaf.shape[-2] ** -0.5
        scale *= (2 * shape.n_layers) ** -0.5 if any(k in name for k in ROW_KINDS) else 1.0
        rows = site_keys(key_of(seed, "init", name), [str(i) for i in range(math.prod(leaf.shape[:-2]))])
        draws = jax.vmap(lambda k: normals(k, leaf.shape[-2:], dtype))(rows)  # type: ignore[arg-type]
        return draws.reshape(leaf.shape) * jnp.asarray(scale, dtype)

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=lambda x: isinstance(x, Leaf))


def clean_forward(
    ax: Axes, shape: LlamaShape, table: SiteTable, params: Params, tokens: Int[Array, "B T"],
    captures: Set[str] = frozenset(),
) -> Clean:  # fmt: skip
    """``Llama.clean`` on one device, outside ``shard_map``."""
    dims = jax.tree.map(lambda leaf: leaf.dims(ax.sizes), leaves(shape, table, "replicated"), is_leaf=_is_leaf)
    return Llama(shape, table, ax).clean(params, dims, tokens, captures)


def logits(shape: LlamaShape, params: Params, hidden: Float[Array, "B T d"]) -> Float[Array, "B T vocab"]:
    return matmul(hidden, params["embed"].T if shape.tied else params["head"])


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Leaf)
