"""Masks from CI and sources, source shapes, routing (SPEC 4)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import SHAPE

from decomp import masks as mk
from decomp import sites as st
from decomp.config.schema import RouteAll, RouteProbability, RouteUniformK, Sites
from decomp.keys import key_of
from decomp.state import ONE_DEVICE

TABLE = st.select(SHAPE.matrices(), Sites(C_per_rank=0.5))
WINDOW = mk.Window(0, 16, 32)
KEY = key_of(0, "recon/test", 0, 0)


def ci(value: float) -> dict[str, jnp.ndarray]:
    return {n: jnp.full((len(x.sites), 16, 32, x.C), value) for n, x in TABLE.lanes.items()}


def at(masks: mk.CiMasks, layer: int, kind: str) -> mk.SiteMask:
    """The mask as the layer scan sees it."""
    run = TABLE.runs[0]
    row = _slice(masks.rows(run), layer)
    return masks.at(run, kind, row)


def _slice(tree: object, i: int) -> object:
    import jax

    return jax.tree.map(lambda x: x[i], tree)


def test_mask_is_ci_plus_the_rest_times_source() -> None:
    m = at(mk.CiMasks(ci(0.25), mk.Uniform.draw(ONE_DEVICE, TABLE, WINDOW, KEY)), 1, "q_proj")
    assert float(m.m.min()) >= 0.25
    assert float(m.m.max()) <= 1.0
    assert abs(float(m.m.mean()) - 0.625) < 0.01
    assert m.d is not None
    assert abs(float(m.d.mean()) - 0.5) < 0.06  # the delta mask is the raw source, whatever CI is


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constant_sources_have_no_delta_path(value: float) -> None:
    m = at(mk.CiMasks(ci(0.5), mk.Constant(value)), 0, "down_proj")
    np.testing.assert_array_equal(np.asarray(m.m), 0.5 + 0.5 * value)
    assert m.d is None


def test_without_the_delta_component_there_is_no_delta_mask() -> None:
    assert (
        at(mk.CiMasks(ci(0.5), mk.Uniform.draw(ONE_DEVICE, TABLE, WINDOW, KEY), None, delta=False), 0, "q_proj").d
        is None
    )


@pytest.mark.parametrize("shape", ["c", "bc", "sc", "bsc"])
def test_a_letter_left_out_is_broadcast(shape: str) -> None:
    values = mk.draw_stored(ONE_DEVICE, TABLE, WINDOW, KEY, shape)
    for group, leaves in mk.stored_leaves(TABLE, shape, 16, 32).items():
        assert {k: v.shape for k, v in values[group].items()} == {k: leaf.shape for k, leaf in leaves.items()}
    m = at(mk.CiMasks(ci(0.0), mk.Stored(values, shape)), 2, "up_proj")
    full = np.broadcast_to(np.asarray(m.m), (16, 32, TABLE.lanes["up_proj"].C))
    assert (np.ptp(full, axis=0).max() > 0) == ("b" in shape)
    assert (np.ptp(full, axis=1).max() > 0) == ("s" in shape)
    assert m.d is not None
    assert m.d.shape == (16, 32)


def test_stored_sources_of_a_site_do_not_depend_on_what_else_is_chosen() -> None:
    few = st.select(SHAPE.matrices(), Sites(C_per_rank=0.5, layers=(1,), kinds=("q_proj",)))
    name = "model.layers.1.self_attn.q_proj"
    pick = lambda t: np.asarray(  # noqa: E731
        mk.draw_stored(ONE_DEVICE, t, WINDOW, KEY, "bsc")[t.by_name[name].group]["c"][t.by_name[name].slot]
    )
    np.testing.assert_array_equal(pick(few), pick(TABLE))


def test_uniform_k_routes_a_uniform_subset_of_uniform_size() -> None:
    routes = mk.draw_routes(RouteUniformK(), TABLE, mk.Window(0, 64, 64), KEY)
    assert routes is not None
    by_site = np.stack([np.asarray(v) for v in mk.by_site(TABLE, routes).values()])
    sizes = by_site.sum(0).ravel()
    n = len(TABLE.sites)
    assert sizes.min() == 1
    assert sizes.max() == n
    counts = np.bincount(sizes, minlength=n + 1)[1:]
    expected = sizes.size / n
    assert np.sum((counts - expected) ** 2 / expected) < 75  # 27 degrees of freedom
    each = by_site.mean((1, 2))
    assert np.abs(each - (n + 1) / (2 * n)).max() < 0.05


def test_probability_routes_each_site_alone() -> None:
    routes = mk.draw_routes(RouteProbability(p=0.25), TABLE, WINDOW, KEY)
    assert routes is not None
    assert abs(np.mean([np.asarray(r).mean() for r in routes.values()]) - 0.25) < 0.02


def test_route_one_routes_one_site_everywhere() -> None:
    """M4's ``per_site``, one forward of it."""
    for i, site in enumerate(TABLE.sites):
        routes = mk.by_site(TABLE, mk.route_one(TABLE, mk.Window(0, 2, 3), i))
        assert {n for n, r in routes.items() if np.asarray(r).all()} == {site.name}
        assert {n for n, r in routes.items() if np.asarray(r).any()} == {site.name}


def test_route_all_is_no_route() -> None:
    assert mk.draw_routes(RouteAll(), TABLE, WINDOW, KEY) is None


def test_mixed_routes_its_adversarial_examples_everywhere() -> None:
    adversarial = jnp.arange(16) % 2 == 0
    ones = {
        g: {k: jnp.ones(leaf.shape) for k, leaf in x.items()} for g, x in mk.stored_leaves(TABLE, "bsc", 16, 32).items()
    }
    fresh = mk.Uniform.draw(ONE_DEVICE, TABLE, WINDOW, KEY)
    none_routed = {n: jnp.zeros((len(x.sites), 16, 32), bool) for n, x in TABLE.lanes.items()}
    m = at(mk.CiMasks(ci(0.0), mk.Mixed(mk.Stored(ones, "bsc"), fresh, adversarial), none_routed), 3, "k_proj")
    assert m.r is not None
    np.testing.assert_array_equal(np.asarray(m.r[:, 0]), np.asarray(adversarial))
    np.testing.assert_array_equal(np.asarray(m.m[::2]), 1.0)
    assert float(m.m[1::2].max()) < 1.0


def test_masks_name_exactly_the_chosen_sites() -> None:
    """SPEC F1."""
    values = {s.name: jnp.zeros(s.C) for s in TABLE.sites}
    lanes = mk.by_lane(TABLE, values)
    assert {n: v.shape[0] for n, v in lanes.items()} == {n: len(x.sites) for n, x in TABLE.lanes.items()}
    with pytest.raises(ValueError, match="no value for the chosen sites"):
        mk.by_lane(TABLE, {k: v for k, v in values.items() if "layers.2" not in k})
    with pytest.raises(ValueError, match="not among the chosen"):
        mk.by_lane(TABLE, values | {"model.layers.7.mlp.up_proj": jnp.zeros(4)})
