"""Between the numpy reference's per-site dictionaries and the product's stacks and lanes: no formula lives here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from reference import llama as ref

from decomp.ci_fn.chunk_transformer import ChunkTransformer
from decomp.masks import Source
from decomp.placement import Axes
from decomp.sites import SiteTable, from_sites
from decomp.target.llama import load_params
from decomp.target.shape import LlamaShape, RopeScaling

BATCH, LENGTH, VOCAB = 2, 5, 32
ONE_DEVICE = Axes({"replicate": 1, "fsdp": 1, "tp": 1})
LLAMA31 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=16)


def tiny_shape(**changes: Any) -> LlamaShape:
    """3 layers, d 16, GQA, MLP 20, vocab 32."""
    sizes = {"n_layers": 3, "d_model": 16, "n_heads": 4, "n_kv_heads": 2, "head_dim": 4, "d_mlp": 20, "vocab": VOCAB}
    return LlamaShape(**({**sizes, "tied": True, "rope_theta": 100.0} | changes))


def reference_shape(shape: LlamaShape) -> ref.Shape:
    """The same numbers as the reference spells them."""
    scaling = None
    if shape.rope_scaling is not None:
        scaling = asdict(shape.rope_scaling)
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_positions")
    fields = {name: getattr(shape, name) for name in ref.Shape.__dataclass_fields__ if name != "rope_scaling"}
    return ref.Shape(**fields, rope_scaling=scaling)


def chosen_table(shape: LlamaShape, chosen: str) -> SiteTable:
    """``all``: every matrix; ``odd``: two runs of unequal selections with a frozen layer between, C by site."""
    matrices = shape.matrices()
    if chosen == "all":
        return from_sites(matrices, {m.name: 6 if m.kind == "down_proj" else 5 for m in matrices})
    kinds = {0: ("v_proj",), shape.n_layers - 1: ("q_proj", "o_proj", "down_proj")}
    return from_sites(matrices, {m.name: 4 + m.layer for m in matrices if m.kind in kinds.get(m.layer, ())})


@dataclass(frozen=True)
class Stored:
    """Reference weights [d_in, d_out] as a Hugging Face folder stores them: matrices transposed."""

    weights: Mapping[str, np.ndarray]

    def get(self, name: str) -> np.ndarray:
        tensor = self.weights[name]
        return tensor.T if tensor.ndim == 2 and name != "model.embed_tokens.weight" else tensor


def weights_of(shape: LlamaShape, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float64 weights with the biases that the shape has."""
    biases = tuple(kind for kind in shape.kinds if shape.has_bias(kind))
    return ref.random_weights(reference_shape(shape), np.random.default_rng(seed), biases)


def target_params(shape: LlamaShape, table: SiteTable, weights: Mapping[str, np.ndarray]) -> Any:
    """The product's parameter tree in float64."""
    return jax.tree.map(jnp.asarray, load_params(Stored(weights), shape, table))


def random_factors(table: SiteTable, rng: np.random.Generator) -> dict[str, dict[str, np.ndarray]]:
    """V, U by site as SPEC F8 scales them."""
    out = {}
    for site in table.sites:
        V = rng.standard_normal((site.matrix.d_in, site.C)) / np.sqrt(site.matrix.d_in)
        out[site.name] = {"V": V, "U": rng.standard_normal((site.C, site.matrix.d_out)) / np.sqrt(site.C)}
    return out


def stacks(table: SiteTable, factors: Mapping[str, Mapping[str, Any]]) -> Any:
    """{group: {V, U}} from {site: {V, U}}."""
    return {
        g.name: {k: jnp.asarray(np.stack([factors[s.name][k] for s in g.sites])) for k in ("V", "U")}
        for g in table.groups.values()
    }


def component_dims(table: SiteTable) -> Any:
    """Mesh axes of V and U on one device: none."""
    return {g: {"V": ((), (), ()), "U": ((), (), ())} for g in table.groups}


def factors_of(table: SiteTable, stacked: Any) -> dict[str, dict[str, np.ndarray]]:
    """The inverse of ``stacks``."""
    return {s.name: {k: np.asarray(stacked[s.group][k][s.slot]) for k in ("V", "U")} for s in table.sites}


def source_values(table: SiteTable, sources: Mapping[str, Mapping[str, Any]]) -> Any:
    """{group: {c, delta}} from the reference's {site: {component, delta}}."""
    parts = (("c", "component"), ("delta", "delta"))
    return {
        g.name: {mine: jnp.asarray(np.stack([sources[s.name][part] for s in g.sites])) for mine, part in parts}
        for g in table.groups.values()
    }


def sources_of(table: SiteTable, values: Any) -> dict[str, dict[str, np.ndarray]]:
    """The inverse of ``source_values``."""
    parts = (("c", "component"), ("delta", "delta"))
    return {s.name: {part: np.asarray(values[s.group][mine][s.slot]) for mine, part in parts} for s in table.sites}


def read_source(table: SiteTable, source: Source) -> dict[str, dict[str, Any]]:
    """A source as masks read it, by site and in the reference's names; no "delta" where it has none."""
    out: dict[str, dict[str, Any]] = {}
    for run in table.masked_runs:
        rows = source.rows(run)
        for i in range(run.length if run.first else 0):
            row = jax.tree.map(lambda x, i=i: x[i], rows)
            for kind in run.first:
                (site,) = (s for s in table.sites if s.matrix.kind == kind and s.matrix.layer == run.start + i)
                component, delta = source.at(run, kind, row)
                out[site.name] = {"component": component} | ({} if delta is None else {"delta": delta})
    return out


def lanes(table: SiteTable, by_site: Mapping[str, Any]) -> dict[str, Any]:
    """{lane: [n, ..]} from {site: [..]}."""
    return {n: jnp.asarray(np.stack([by_site[s.name] for s in lane.sites])) for n, lane in table.lanes.items()}


def sites_of(table: SiteTable, by_lane: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The inverse of ``lanes``."""
    return {s.name: np.asarray(by_lane[s.lane][s.row]) for s in table.sites}


def ci_tree(fn: ChunkTransformer, params: Any) -> dict[str, Any]:
    """The product's CI parameters as the reference names them, a chunk at a time; params may be gradients."""
    out: dict[str, Any] = {}
    own = {"q": "q", "k": "k", "v": "v", "o": "o"}
    own |= {"mlp_in": "in_w", "mlp_in_bias": "in_b", "mlp_out": "out_w", "mlp_out_bias": "out_b"}
    for ch in fn.chunks:
        p, nb = params[ch.name], fn.cfg.n_blocks
        for i, first in enumerate(ch.first_layers):
            blocks = {str(b): {k: np.asarray(p[n][i * nb + b]) for n, k in own.items()} for b in range(nb)}
            heads = {
                sites[i].name: {"w": np.asarray(p["heads"][h][i]), "b": np.asarray(p["head_biases"][h][i])}
                for h, sites in ch.heads.items()
            }
            w_in, b_in = np.asarray(p["w_in"][i]), np.asarray(p["b_in"][i])
            out[f"from{first}"] = {"in_w": w_in, "in_b": b_in, "blocks": blocks, "heads": heads}
    return out


def quick_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """jit without the back end's optimizations: compiling is most of these tests' time."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def close(got: Any, expected: Any, rel: float = 1e-6) -> None:
    """Largest difference within ``rel`` of the expected array's own scale (SPEC 12)."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, f"{got.shape} is not {expected.shape}"
    scale = np.max(np.abs(expected)) if expected.size else 0.0
    worst = np.max(np.abs(got - expected)) if expected.size else 0.0
    assert worst <= rel * scale, f"off by {worst:.3e} on a scale of {scale:.3e}, allowed {rel:g} of it"
