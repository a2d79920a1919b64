"""Forwards of the product in float64 against the numpy reference: SPEC 2 and 3, figures of SPEC 12."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import ci as ref_ci
from reference import llama as ref
from reference_bridge import (
    BATCH,
    LENGTH,
    LLAMA31,
    ONE_DEVICE,
    VOCAB,
    chosen_table,
    ci_tree,
    close,
    component_dims,
    lanes,
    quick_jit,
    random_factors,
    reference_shape,
    sites_of,
    stacks,
    target_params,
    tiny_shape,
    weights_of,
)

from decomp.ci_fn.base import lower, upper
from decomp.ci_fn.chunk_transformer import RMS_EPS, ChunkTransformer
from decomp.config import schema
from decomp.masks import GivenMasks
from decomp.placement import tree_dims
from decomp.sites import SiteTable
from decomp.target import llama
from decomp.target.shape import LlamaShape

SHAPES = {
    "gated": {},
    "untied_biases_llama31": {"tied": False, "attention_bias": True, "mlp_bias": True, "rope_scaling": LLAMA31},
    "plain_gelu": {"gated": False, "act": "gelu", "mlp_bias": True},
    "plain_gelu_tanh_mha": {"gated": False, "act": "gelu_tanh", "n_kv_heads": 4},
    "gated_gelu_mqa": {"act": "gelu", "n_kv_heads": 1, "rms_eps": 1e-5},
}
EVERYTHING = frozenset({"residual", "block_inputs", "site_inputs", "site_outputs"})


@pytest.fixture(autouse=True)
def _fp64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def _tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCAB, (BATCH, LENGTH))


def _dims(shape: LlamaShape, table: SiteTable) -> Any:
    return tree_dims(llama.leaves(shape, table, "replicated"), ONE_DEVICE.sizes)


def _compare_captures(shape: LlamaShape, table: SiteTable, got: dict, expected: dict, first: int) -> None:
    """Every capture of the product against the reference's; ``first`` is the layer the forward began at."""
    layers = range(first, shape.n_layers)
    close(got["residual"], np.stack([expected[f"resid.{i}"] for i in [*layers, shape.n_layers]]))
    for product, name in (("attn", "attn_in"), ("mlp", "mlp_in")):
        close(got[f"block_inputs/{product}"], np.stack([expected[f"{name}.{i}"] for i in layers]))
    for lane in table.lanes.values():
        inputs = np.stack([expected[f"{s.name}.in"] for s in lane.sites])
        outputs = np.stack([expected[f"{s.name}.out"] for s in lane.sites])
        close(got[f"site_inputs/{lane.name}"], inputs)
        close(got[f"site_outputs/{lane.name}"], outputs)


@pytest.mark.parametrize("name", SHAPES)
def test_clean_forward(name: str) -> None:
    """F3, F4: logits and every capture."""
    shape = tiny_shape(**SHAPES[name])
    table, weights, tokens = chosen_table(shape, "all"), weights_of(shape), _tokens()
    params = target_params(shape, table, weights)
    forward = quick_jit(lambda t: llama.clean_forward(ONE_DEVICE, shape, table, params, t, EVERYTHING))
    clean = forward(jnp.asarray(tokens))
    expected = ref.Forward(reference_shape(shape), weights)
    close(llama.logits(shape, params, clean.hidden), expected.logits(tokens))
    _compare_captures(shape, table, clean.captures, expected.captures, 0)


@pytest.mark.parametrize(
    ("name", "chosen", "paths"),
    [
        ("untied_biases_llama31", "odd", "delta_and_routes"),
        ("plain_gelu", "all", "delta_and_routes"),
        ("gated", "odd", "neither"),
    ],
)
def test_masked_forward(name: str, chosen: str, paths: str) -> None:
    """SPEC 2, F2, F7: random m, d and routes at every chosen site."""
    shape = tiny_shape(**SHAPES[name])
    table, weights, tokens = chosen_table(shape, chosen), weights_of(shape), _tokens()
    rng = np.random.default_rng(2)
    factors = random_factors(table, rng)
    m = {s.name: rng.random((BATCH, LENGTH, s.C)) for s in table.sites}
    d = {s.name: rng.random((BATCH, LENGTH)) for s in table.sites} if paths != "neither" else None
    r = {s.name: rng.random((BATCH, LENGTH)) < 0.5 for s in table.sites} if paths != "neither" else None

    masked = {
        n: ref.Masked(**uv, mask=m[n], delta=None if d is None else d[n], route=None if r is None else r[n])
        for n, uv in factors.items()
    }
    expected = ref.Forward(reference_shape(shape), weights, masked)
    logits = expected.logits(tokens)

    params, model = target_params(shape, table, weights), llama.Llama(shape, table, ONE_DEVICE)
    given = GivenMasks(lanes(table, m), *(None if x is None else lanes(table, x) for x in (d, r)))

    @quick_jit
    def forward(copies: Any, tokens: Any) -> Any:
        start = model.clean(params, _dims(shape, table), tokens).start
        return model.masked(params, _dims(shape, table), copies, component_dims(table), given, start, EVERYTHING)

    hidden, captures = forward(stacks(table, factors), jnp.asarray(tokens))
    close(llama.logits(shape, params, hidden), logits)
    _compare_captures(shape, table, captures, expected.captures, table.masked_runs[0].start)


# ---------------------------------------------------------------- CI function
@pytest.mark.parametrize(
    ("taps", "per_chunk", "chosen"), [("residual", 1, "all"), ("residual", 2, "odd"), ("site_inputs", 2, "all")]
)
def test_chunk_transformer(taps: str, per_chunk: int, chosen: str) -> None:
    """SPEC 3: every site's pre-activation, parameters all random so that biases are seen."""
    shape = tiny_shape()
    table, weights, tokens = chosen_table(shape, chosen), weights_of(shape), _tokens()
    cfg = schema.ChunkTransformer(
        d_model=8,
        n_blocks=2,
        n_heads=2,
        d_mlp=12,
        layers_per_chunk=per_chunk,
        taps=taps,  # pyright: ignore
    )
    fn = ChunkTransformer(cfg, table, shape.d_model, ONE_DEVICE, "replicated")
    rng = np.random.default_rng(3)
    leaf_tree = fn.leaves()
    params = jax.tree.map(
        lambda leaf: jnp.asarray(0.4 * rng.standard_normal(leaf.shape)), leaf_tree, is_leaf=lambda x: hasattr(x, "axes")
    )
    target = target_params(shape, table, weights)

    def product(params: Any, tokens: Any) -> Any:
        clean = llama.clean_forward(ONE_DEVICE, shape, table, target, tokens, fn.captures)
        return fn(params, tree_dims(leaf_tree, ONE_DEVICE.sizes), clean.captures, None)

    got = sites_of(table, quick_jit(product)(params, jnp.asarray(tokens)))

    forward = ref.Forward(reference_shape(shape), weights)
    forward.logits(tokens)
    tap_names: dict[str, list[str]] = {}
    for start in range(0, shape.n_layers, per_chunk):
        block = range(start, min(start + per_chunk, shape.n_layers))
        sites = [f"{s.name}.in" for s in table.sites if s.matrix.layer in block]
        tap_names[f"from{start}"] = [f"resid.{i}" for i in block] if taps == "residual" else sites
    tree = ci_tree(fn, params)
    tap_arrays = {name: [forward.captures[tap] for tap in tap_names[name]] for name in tree}
    expected = ref_ci.chunk_transformer(tree, tap_arrays, cfg.n_heads, RMS_EPS)
    assert set(got) == set(expected)
    for site, array in expected.items():
        close(got[site], array)


# ---------------------------------------------------------------- squashings
EDGES = np.array([-3.0, -1e-9, 0.0, 1e-9, 0.3, 1.0 - 1e-9, 1.0, 1.0 + 1e-9, 4.0])


@pytest.mark.parametrize("g", [-2.0, 0.0, 2.0])
def test_squashings_value_and_backward(g: float) -> None:
    """C1, C2: exact, ties included."""
    a, cotangent = jnp.asarray(EDGES), jnp.full(EDGES.shape, g)
    for squash, value, slope in (
        (lower, ref_ci.lower(EDGES), ref_ci.lower_slope(EDGES, np.full(EDGES.shape, g))),
        (upper, ref_ci.upper(EDGES), ref_ci.upper_slope(EDGES)),
    ):
        got, backward = jax.vjp(squash, a)
        np.testing.assert_allclose(got, value, rtol=1e-15)
        np.testing.assert_allclose(backward(cotangent)[0], slope * g, rtol=1e-15)
