"""The masked site, the stacks and their init (SPEC 2, F2, F8, D1, 12)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jaxprs import equations, shapes
from tiny import SHAPE

from decomp import components as comp
from decomp import masks as mk
from decomp import sites as st
from decomp.components import SiteMask, masked_site
from decomp.config.schema import Sites
from decomp.sites import Matrix, from_sites, select
from decomp.state import ONE_DEVICE
from decomp.target.llama import Llama, leaves, load_params

RNG = np.random.default_rng(0)
X, V, U, W = (RNG.normal(size=s) for s in ((2, 3, 8), (8, 5), (5, 7), (8, 7)))
M, D, R = RNG.uniform(size=(2, 3, 5)), RNG.uniform(size=(2, 3)), RNG.uniform(size=(2, 3)) < 0.5


@pytest.fixture
def fp64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def site(dtype: Any, m: np.ndarray, d: np.ndarray | None, r: np.ndarray | None) -> np.ndarray:
    x, v, u, w = (jnp.asarray(a, dtype) for a in (X, V, U, W))
    mask = SiteMask(jnp.asarray(m, dtype), None if d is None else jnp.asarray(d, dtype), r)  # pyright: ignore
    return np.asarray(masked_site(ONE_DEVICE, x, v, u, w, mask), np.float64)


@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-13)])
def test_site_equals_the_two_path_form(fp64: None, with_delta: bool, routed: bool, dtype: str, tolerance: float):
    """SPEC 12: ((xV)*m)U + d x(W - VU) where routed, xW elsewhere, in float64."""
    d, r = (D if with_delta else None), (R if routed else None)
    full = np.zeros((2, 3)) if d is None else d
    expected = ((X @ V) * M) @ U + full[..., None] * (X @ (W - V @ U))
    expected = np.where((np.ones((2, 3), bool) if r is None else r)[..., None], expected, X @ W)
    worst = np.abs(site(dtype, M, d, r) - expected).max()
    assert worst <= tolerance * np.abs(expected).max()


def test_masks_of_one_are_the_frozen_matrix(fp64: None):
    """SPEC 2, 12: m = d = 1 is x W up to 1e-6 of the output's scale, whatever V and U are."""
    for dtype, tolerance in (("float32", 1e-6), ("float64", 1e-15)):
        got = site(dtype, np.ones_like(M), np.ones_like(D), None)
        assert np.abs(got - X @ W).max() <= tolerance * np.abs(X @ W).max()


def test_frozen_kinds_have_no_component_path():
    """F2: with one chosen site, C appears in its own two products and in no other."""
    C = 13  # a size that nothing else has
    name = "model.layers.1.self_attn.q_proj"
    table = from_sites(SHAPE.matrices(), {name: C})
    params = load_params(tiny.RandomTensors(SHAPE), SHAPE, table)
    dims = jax.tree.map(lambda leaf: leaf.dims(ONE_DEVICE.sizes), leaves(SHAPE, table, "replicated"), is_leaf=_is_leaf)
    stacks = comp.init(table, 0, jnp.float32)
    masks = mk.GivenMasks({"q_proj": jnp.ones((1, 2, 3, C))}, {"q_proj": jnp.ones((1, 2, 3))})
    llama = Llama(SHAPE, table, ONE_DEVICE)
    copies = jax.tree.map(lambda x: ((),) * x.ndim, stacks)
    found = equations(lambda start: llama.masked(params, dims, stacks, copies, masks, start)[0], jnp.ones((2, 3, 16)))
    dots = [shapes(e) for e in found if e.primitive.name == "dot_general"]
    assert sum(any(C in s for s in dot) for dot in dots) == 2
    runs = 2  # layer 1, layers 2 to 3; layer 0 is not run (F7)
    frozen = 7 * runs  # every kind's x @ W once per scanned body
    assert sum(all(len(s) == 2 for s in dot) for dot in dots) == frozen + 2


def _is_leaf(x: Any) -> bool:
    return hasattr(x, "layout")


# ---------------------------------------------------------------- stacks and factors
TABLE = select(SHAPE.matrices(), Sites(C_per_rank=0.5))


def test_factors_round_trip():
    """D1: stacks from a dictionary by site, and each site's factors back."""
    factors = {
        s.name: (jnp.full((s.matrix.d_in, s.C), float(i)), jnp.full((s.C, s.matrix.d_out), i + 0.5))
        for i, s in enumerate(TABLE.sites)
    }
    stacks = comp.from_site_factors(TABLE, factors)
    for group in TABLE.groups.values():
        assert stacks[group.name]["V"].shape == (len(group.sites), group.d_in, group.C)
        assert stacks[group.name]["U"].shape == (len(group.sites), group.C, group.d_out)
    for name, (v, u) in factors.items():
        got = comp.site_factors(stacks, TABLE, name)
        np.testing.assert_array_equal(got[0], v)
        np.testing.assert_array_equal(got[1], u)


def test_wrong_factors_are_errors():
    factors = {s.name: (jnp.zeros((s.matrix.d_in, s.C)), jnp.zeros((s.C, s.matrix.d_out))) for s in TABLE.sites}
    first = TABLE.sites[0].name
    with pytest.raises(ValueError, match=r"missing or unknown.*layers\.0\.self_attn\.q_proj"):
        comp.from_site_factors(TABLE, {n: f for n, f in factors.items() if n != first})
    with pytest.raises(ValueError, match=r"missing or unknown.*'other'"):
        comp.from_site_factors(TABLE, factors | {"other": factors[first]})
    with pytest.raises(ValueError, match=r"q_proj: V and U have shapes .*\(16, 9\).* expected"):
        comp.from_site_factors(TABLE, factors | {first: (jnp.zeros((16, 9)), factors[first][1])})


def test_init_has_the_variances_of_the_rule():
    """F8: V ~ N(0, 1/d_in), U ~ N(0, 1/C)."""
    matrices = [Matrix(f"m{i}", "m", i, 64, 96) for i in range(4)]
    (stacks,) = comp.init(from_sites(matrices, {m.name: 80 for m in matrices}), 3, jnp.float32).values()
    for factor, variance in (("V", 1 / 64), ("U", 1 / 80)):
        x = np.asarray(stacks[factor])
        assert abs(x.mean()) < 0.05 * variance**0.5
        assert abs(x.var() / variance - 1) < 0.05
        assert abs(np.corrcoef(x.reshape(4, -1)) - np.eye(4)).max() < 0.05, "sites share draws"


def test_init_of_a_site_does_not_depend_on_what_else_is_chosen():
    """R1: drawn by the site's name; the seed moves it."""
    few = st.select(SHAPE.matrices(), Sites(C_per_rank=0.5, layers=(1, 3), kinds=("down_proj",)))
    more = st.select(SHAPE.matrices(), Sites(C_per_rank=0.5, kinds=("q_proj", "down_proj")))
    name = "model.layers.3.mlp.down_proj"
    own = [comp.site_factors(comp.init(t, seed, jnp.float32), t, name) for t, seed in ((more, 5), (few, 5), (few, 6))]
    for among_more, among_few, other_seed in zip(*own, strict=True):
        np.testing.assert_array_equal(among_more, among_few)
        assert np.abs(np.asarray(among_few - other_seed)).max() > 0.1
