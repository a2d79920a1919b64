"""The squashings of C1 and C2, and what every CI function must do (SPEC 3)."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scipy.special import erf
from tiny import SHAPE

from decomp import build, components
from decomp.ci_fn.base import CiFn, lower, squash, upper
from decomp.placement import is_leaf, tree_dims
from decomp.sites import SiteTable
from decomp.state import ONE_DEVICE

# pre-activation, incoming gradient -> lower's value and backward (C1), upper's value and slope (C2)
TABLE = [
    (-2.0, 1.0, 0.0, 0.0, 0.0, 0.0),
    (-2.0, -1.0, 0.0, -0.01, 0.0, 0.0),
    (0.0, 1.0, 0.0, 0.0, 0.0, 0.0),
    (0.0, -1.0, 0.0, -0.01, 0.0, 0.0),
    (0.25, 3.0, 0.25, 3.0, 0.25, 1.0),
    (0.25, -3.0, 0.25, -3.0, 0.25, 1.0),
    (1.0, 2.0, 1.0, 2.0, 1.0, 1.0),
    (1.0, -2.0, 1.0, -2.0, 1.0, 1.0),
    (3.0, 1.0, 1.0, 0.0, 1.02, 0.01),
    (3.0, -1.0, 1.0, 0.0, 1.02, 0.01),
]


@pytest.mark.parametrize(("a", "g", "low", "low_back", "up", "slope"), TABLE)
def test_squashings(a: float, g: float, low: float, low_back: float, up: float, slope: float):
    """C1, C2: values and backward, ties at 0 and 1 included; exact (SPEC 12)."""
    x, cotangent = jnp.float32(a), jnp.float32(g)
    value, back = jax.vjp(lower, x)
    assert (float(value), float(back(cotangent)[0])) == (low, float(np.float32(low_back)))
    value, back = jax.vjp(upper, x)
    assert float(value) == pytest.approx(up, rel=1e-7)
    assert float(back(cotangent)[0]) == pytest.approx(slope * g, rel=1e-7)


def test_upper_is_summed_in_float32():
    """P1: minimality reads float32 even where the CI function computes in bfloat16."""
    low, up = squash({"q": jnp.full((1, 2, 3, 4), 0.5, jnp.bfloat16)})
    assert (low["q"].dtype, up["q"].dtype) == (jnp.bfloat16, jnp.float32)


# ---------------------------------------------------------------- conformance: every CI function joins this list
CI_FUNCTIONS: dict[str, dict[str, Any]] = {
    "chunk_transformer": {"n_blocks": 2},
    "chunk_transformer_of_two_layers": {"layers_per_chunk": 2},
    "chunk_transformer_of_three_layers": {"layers_per_chunk": 3},
    "chunk_transformer_on_site_inputs": {"taps": "site_inputs"},
    "chunk_transformer_on_site_inputs_of_two_layers": {"taps": "site_inputs", "layers_per_chunk": 2, "remat": True},
    "component_mlp": {"kind": "component_mlp", "d_gate": 3},
}
OVER_POSITIONS = [n for n in CI_FUNCTIONS if n != "component_mlp"]
SITES = {"C": {"q_proj": 7, "down_proj": 9}, "kinds": ["q_proj", "down_proj"]}
B, T = 2, 5


class Made(NamedTuple):
    """A CI function, its table, fresh parameters, and ``call(params, taps)``, compiled."""

    fn: CiFn
    table: SiteTable
    params: Any
    call: Any


@cache
def made(name: str, chosen: str = "both") -> Made:
    """The CI function called ``name`` on q_proj and down_proj or on down_proj alone."""
    sites = SITES if chosen == "both" else {"C": {"down_proj": 9}, "kinds": ["down_proj"]}
    small = {"kind": "chunk_transformer", "d_model": 8, "n_heads": 2, "d_mlp": 16}
    own = CI_FUNCTIONS[name]
    cfg = tiny.config(ci_fn=own if "kind" in own else small | own, sites=sites)
    table = build.site_table(cfg, SHAPE)
    fn = build.build_ci_fn(cfg, SHAPE, table, ONE_DEVICE)
    dims = tree_dims(fn.leaves(), ONE_DEVICE.sizes)
    factors = components.init(table, cfg.seed, jnp.float32)
    call = jax.jit(lambda params, taps, factors=factors: fn(params, dims, taps, factors))
    return Made(fn, table, jax.jit(lambda: fn.init(cfg.seed, jnp.float32))(), call)


def taps_of(fn: CiFn, table: SiteTable) -> dict[str, jax.Array]:
    """Random clean activations in the shape of what the CI function captures."""
    rng, out = np.random.default_rng(1), {}
    if "residual" in fn.captures:
        out["residual"] = rng.normal(size=(SHAPE.n_layers + 1, B, T, SHAPE.d_model))
    for lane in table.lanes.values() if "site_inputs" in fn.captures else ():
        out[f"site_inputs/{lane.name}"] = rng.normal(size=(len(lane.sites), B, T, lane.sites[0].matrix.d_in))
    return {k: jnp.asarray(v, jnp.float32) for k, v in out.items()}


@pytest.mark.parametrize("name", CI_FUNCTIONS)
class TestEveryCiFunction:
    def test_shapes(self, name: str):
        """D9: pre-activations as stacks per lane; parameters as their leaves declare."""
        fn, table, params, call = made(name)
        declared = jax.tree.leaves(jax.tree.map(lambda leaf: leaf.shape, fn.leaves(), is_leaf=is_leaf), is_leaf=_tuple)
        assert declared == [x.shape for x in jax.tree.leaves(params)]
        found = call(params, taps_of(fn, table))
        assert {n: x.shape for n, x in found.items()} == {
            n: (len(lane.sites), B, T, lane.C) for n, lane in table.lanes.items()
        }

    def test_every_parameter_gets_a_finite_gradient(self, name: str):
        fn, table, params, call = made(name)
        taps = taps_of(fn, table)
        loss = lambda p: sum(jnp.sum(jnp.sin(x)) for x in call(p, taps).values())  # noqa: E731
        for path, g in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params)):
            assert np.isfinite(np.asarray(g)).all(), path
            assert np.abs(np.asarray(g)).max() > 0, path

    def test_a_site_starts_alike_whatever_else_is_chosen(self, name: str):
        """R1. A function whose taps follow the selection is compared on its head alone."""
        whole, few = made(name), made(name, "down_proj")
        site = "model.layers.2.mlp.down_proj"
        if getattr(whole.fn.cfg, "taps", "own") == "site_inputs":  # type: ignore[attr-defined]
            heads = [_heads(m.params) for m in (whole, few)]
            shared = set(heads[0]) & set(heads[1])
            assert shared
            for head in shared:
                np.testing.assert_array_equal(heads[0][head], heads[1][head])
            return
        taps = taps_of(whole.fn, whole.table)
        found = [m.call(m.params, taps)["down_proj"][m.table.by_name[site].row] for m in (whole, few)]
        np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)

    def test_examples_stay_apart(self, name: str):
        """And within an example, positions mix in those that look over positions (SPEC 3)."""
        fn, table, params, call = made(name)
        taps = taps_of(fn, table)
        moved = {k: x.at[:, 0, -1].add(1.0) for k, x in taps.items()}
        before, after = (call(params, t) for t in (taps, moved))
        for lane, x in before.items():
            change = np.abs(np.asarray(after[lane] - x))
            assert (change[:, 0, 0].max() > 1e-4) == (name in OVER_POSITIONS), lane
            assert change[:, 0, -1].max() > 1e-4, lane
            assert change[:, 1].max() == 0, lane


def _tuple(x: Any) -> bool:
    return isinstance(x, tuple)


def _heads(params: Any) -> dict[str, np.ndarray]:
    return {f"{c}/{h}": np.asarray(w) for c, chunk in params.items() for h, w in chunk["heads"].items()}


# ---------------------------------------------------------------- chunk_transformer's own
def test_chunks_partition_the_sites():
    """Chunks of equal shape share a stack; a last shorter chunk has its own."""
    sizes = {}
    for name in ("chunk_transformer", "chunk_transformer_of_two_layers", "chunk_transformer_of_three_layers"):
        fn: Any = made(name).fn
        sizes[name] = [(c.first_layers, c.d_taps) for c in fn.chunks]
        assert sorted(s.name for c in fn.chunks for h in c.heads.values() for s in h) == sorted(fn.table.by_name)
    d = SHAPE.d_model
    assert list(sizes.values()) == [
        [((0, 1, 2, 3), d)],
        [((0, 2), 2 * d)],
        [((0,), 3 * d), ((3,), d)],
    ]


def test_a_chunk_reads_its_own_taps_alone():
    """SPEC 3: independent networks; layers_per_chunk=2 reads the residual entering both its layers."""
    fn, table, params, call = made("chunk_transformer_of_two_layers")
    taps = taps_of(fn, table)
    before = call(params, taps)["q_proj"]
    for entering, chunk in ((0, 0), (1, 0), (2, 1), (3, 1)):
        changed = {"residual": taps["residual"].at[entering].add(jnp.arange(16.0))}
        moved = np.abs(np.asarray(call(params, changed)["q_proj"] - before)).max(axis=(1, 2, 3)) > 1e-6
        np.testing.assert_array_equal(moved, [chunk == 0, chunk == 0, chunk == 1, chunk == 1])


def test_init_follows_the_rule():
    """SPEC 3: biases 0, in-projections and MLP-in gain sqrt 2, out-projections 1, attention U(+-1/sqrt(fan_in))."""
    cfg = tiny.config(ci_fn={"kind": "chunk_transformer", "d_model": 64, "n_heads": 2, "d_mlp": 128}, sites=SITES)
    fn = build.build_ci_fn(cfg, SHAPE, build.site_table(cfg, SHAPE), ONE_DEVICE)
    (p,) = jax.jit(lambda: fn.init(0, jnp.float32))().values()
    for name, variance in (("w_in", 2 / 16), ("mlp_in", 2 / 64), ("mlp_out", 1 / 128), ("q", 1 / 192), ("o", 1 / 192)):
        assert float(jnp.var(p[name])) == pytest.approx(variance, rel=0.06), name
    assert float(jnp.abs(p["k"]).max()) <= 1 / 8
    assert float(jnp.var(p["heads"]["0.down_proj"])) == pytest.approx(1 / 64, rel=0.1)
    for bias in (p["b_in"], p["mlp_in_bias"], p["mlp_out_bias"], *p["head_biases"].values()):
        assert not np.asarray(bias).any()


# ---------------------------------------------------------------- component_mlp's own
def test_a_component_s_importance_is_its_own_mlp_s():
    """SPEC 3, against numpy in float64: b_out + sum_d w_out gelu(w_in (x . v) + b_in), component by component."""
    fn, table, params, call = made("component_mlp")
    rng = np.random.default_rng(4)
    params = jax.tree.map(lambda p: p + jnp.asarray(0.3 * rng.normal(size=p.shape), p.dtype), params)
    taps, factors = taps_of(fn, table), components.init(table, 0, jnp.float32)
    found = call(params, taps)
    for s in table.sites:
        x = np.asarray(taps[f"site_inputs/{s.lane}"][s.row], np.float64)
        V = np.asarray(factors[s.group]["V"][s.slot], np.float64)
        own = {k: np.asarray(p[s.row], np.float64).reshape(s.C, -1) for k, p in params[s.lane].items()}
        for c in range(s.C):
            h = own["w_in"][c] * (x @ V[:, c])[..., None] + own["b_in"][c]
            gelu = 0.5 * h * (1 + erf(h / np.sqrt(2)))
            expected = gelu @ own["w_out"][c] + own["b_out"][c, 0]
            np.testing.assert_allclose(found[s.lane][s.row, ..., c], expected, rtol=2e-5, atol=2e-6)


def test_its_gradient_reaches_V_and_not_U():
    """SPEC 3: components are read, through V."""
    fn, table, params, call = made("component_mlp")
    factors = components.init(table, 0, jnp.float32)
    loss = lambda f: sum(jnp.sum(jnp.sin(x)) for x in call(params, taps_of(fn, table), f).values())  # noqa: E731
    for group in jax.grad(loss)(factors).values():
        assert np.abs(np.asarray(group["V"])).max(axis=(1, 2)).min() > 0
        assert not np.asarray(group["U"]).any()


def test_its_vectors_take_no_muon():
    """SPEC T5: a component's layers are vectors."""
    cfg = tiny.config(
        ci_fn={"kind": "component_mlp"}, optim__ci_fn={"kind": "muon", "match": "ci_fn", "lr": 1e-3}, loss__recon={}
    )
    step, _ = tiny.make(cfg)
    assert {step.groups.rule(n) for n in step.groups.names("ci_fn")} == {"adam"}


def test_its_init_follows_the_rule():
    """SPEC 3: biases 0, in-projections of gain sqrt 2, out-projections 1."""
    cfg = tiny.config(ci_fn={"kind": "component_mlp", "d_gate": 64}, sites={"C": {"down_proj": 200}, "C_per_rank": 1.0})
    fn = build.build_ci_fn(cfg, SHAPE, build.site_table(cfg, SHAPE), ONE_DEVICE)
    p = jax.jit(lambda: fn.init(0, jnp.float32))()["down_proj"]
    assert float(jnp.var(p["w_in"])) == pytest.approx(2.0, rel=0.03)
    assert float(jnp.var(p["w_out"])) == pytest.approx(1 / 64, rel=0.03)
    assert not np.asarray(p["b_in"]).any() and not np.asarray(p["b_out"]).any()
