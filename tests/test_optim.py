"""Optimizer groups, clipping, AdamW and stacked Muon against optax (SPEC T1, T3 to T5)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import tiny
from tiny import SHAPE

from decomp import build, optim, state
from decomp.config.errors import UserError
from decomp.config.schema import AdamW, Muon
from decomp.mesh import AXES
from decomp.placement import Leaf
from decomp.state import ONE_DEVICE

RNG = np.random.default_rng(0)


def mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), AXES)


def table_of(cfg: dict[str, Any], sizes: dict[str, tuple[int, ...]], stacks: dict[str, str]) -> optim.GroupTable:
    return optim.group_table(cfg, {n: Leaf(s, (None,) * len(s), "replicated") for n, s in sizes.items()}, stacks)


# ---------------------------------------------------------------- T1
def test_clipping():
    """T1: scale = min(1, max_norm / (norm + 1e-6)), over all leaves of the group; the norm before it is returned."""
    grads = {"a": jnp.asarray([3.0, 0.0]), "b": jnp.asarray([[-4.0]])}
    clipped, norm = optim.clip(grads, 2.0)
    assert float(norm) == 5.0
    np.testing.assert_allclose(clipped["b"], [[-4.0 * 2.0 / (5.0 + 1e-6)]], rtol=1e-7)
    for loose in (None, 5.1):
        kept, norm = optim.clip(grads, loose)
        assert float(norm) == 5.0
        np.testing.assert_array_equal(kept["a"], grads["a"])


# ---------------------------------------------------------------- T3
COMPONENTS, CI = (AdamW(match=(m,), lr=1e-3) for m in ("components", "ci_fn"))
SIZES = {
    "components/6x4_C3/V": (2, 6, 3),
    "components/6x4_C3/U": (2, 3, 4),
    "ci_fn/c/w": (1, 5, 5),
    "ci_fn/c/b": (1, 5),
}


def test_every_leaf_is_in_exactly_one_group():
    table = table_of({"components": COMPONENTS, "ci_fn": CI}, SIZES, {"6x4_C3": "components"})
    assert dict(table.group) == {n: n.partition("/")[0] for n in SIZES}
    assert table.report().count("adamw") == 4


def test_wrong_groups_are_refused():
    """T3: unmatched, matched twice and empty, each in one line that names group and leaf."""
    cfg = {"components": COMPONENTS, "ci_fn": CI}
    with pytest.raises(UserError, match=r"no optimizer group matches 'ci_fn\.c\.w'"):
        table_of({"components": COMPONENTS}, SIZES, {"6x4_C3": "components"})
    with pytest.raises(UserError, match=r"groups ci_fn and also both match 'ci_fn\.c\.b'"):
        table_of(cfg | {"also": AdamW(match=("*.b",), lr=1.0)}, dict(reversed(SIZES.items())), {"6x4_C3": "components"})
    with pytest.raises(UserError, match=r"optim\.rest\.match=\['nothing'\]: no trainable leaf matches"):
        table_of(cfg | {"rest": AdamW(match=("nothing",), lr=1.0)}, SIZES, {"6x4_C3": "components"})
    with pytest.raises(UserError, match=r"no optimizer group matches 'components\.model\.layers\.0\.mlp\.up_proj'"):
        optim.group_of_sites({"a": AdamW(match=("components.*.down_proj",), lr=1.0)}, ["model.layers.0.mlp.up_proj"])


def test_patterns_name_sites_with_or_without_components():
    names = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"]
    for first, second in (("*.q_proj", "components.model.layers.1"), ("model.layers.0", "*up_proj")):
        cfg = {"a": AdamW(match=(first,), lr=1.0), "b": AdamW(match=(second,), lr=1.0)}
        assert list(optim.group_of_sites(cfg, names).values()) == ["a", "b"]


def test_sites_of_different_groups_never_share_a_stack():
    """T3, D1."""
    groups = {
        "early": {"kind": "adamw", "match": "components.model.layers.0", "lr": 1e-3},
        "late": {"kind": "adamw", "match": "components.model.layers.[123].*", "lr": 1e-3},
        "ci_fn": {"kind": "adamw", "match": "ci_fn", "lr": 1e-3},
    }
    table = build.site_table(tiny.config(optim=groups), SHAPE)
    for group in table.groups.values():
        assert {s.matrix.layer == 0 for s in group.sites} == {group.optim == "early"}


# ---------------------------------------------------------------- T5
def trainer_groups(kind: str) -> optim.GroupTable:
    groups = {g: {"kind": kind, "match": g, "lr": 1e-3} for g in ("components", "ci_fn")}
    cfg = tiny.config(optim=groups)
    table = build.site_table(cfg, SHAPE)
    ci_fn = build.build_ci_fn(cfg, SHAPE, table, ONE_DEVICE)
    return build.build_groups(cfg, table, state.decomposition_leaves(table, ci_fn, cfg, ONE_DEVICE.sizes))


def test_the_table_lists_what_muon_owns():
    """T5: every 3-D stack of a Muon group carries Muon state and none falls to Adam; bias stacks take Adam."""
    groups = trainer_groups("muon")
    rules = {name: groups.rule(name) for name in groups.leaves}
    assert {n: "muon" if len(leaf.shape) == 3 else "adam" for n, leaf in groups.leaves.items()} == rules
    adam = {n.rpartition("/")[2] if "head_biases" not in n else "head_biases" for n, r in rules.items() if r == "adam"}
    assert adam == {"b_in", "mlp_in_bias", "mlp_out_bias", "head_biases"}
    assert {n.partition("/")[0] for n, r in rules.items() if r == "muon"} == {"components", "ci_fn"}
    lines = groups.report().splitlines()
    assert len(lines) == 1 + len(rules)
    for name, rule in rules.items():
        (line,) = (x for x in lines if x.split()[3] == name)
        assert line.split()[2] == rule
    held = optim.state_leaves(groups)
    assert {n for g in held.values() for n in g["muon"]["mu"]} == {n for n, r in rules.items() if r == "muon"}
    adamw = trainer_groups("adamw")
    assert {adamw.rule(n) for n in rules} == {"adam"}


MUON_SIZES = {"wide": (3, 4, 7), "tall": (2, 9, 5), "one": (1, 6, 6), "bias": (3, 4)}


@pytest.mark.parametrize(
    "options", [{}, {"consistent_rms": False, "weight_decay": 0.1, "ns_steps": 4}], ids=["default", "other"]
)
def test_stacked_muon_equals_optax_leaf_by_leaf(options: dict[str, Any]):
    """T5, SPEC 12: four updates of stacks against optax.contrib.muon on each matrix alone, rel 1e-4."""
    cfg = Muon(match=("x",), lr=0.02, adam_lr=0.003, **options)
    table = table_of({"x": cfg}, {f"x/{n}": s for n, s in MUON_SIZES.items()}, {})
    params = {n: jnp.asarray(RNG.normal(size=s), jnp.float32) for n, s in MUON_SIZES.items()}
    oracle = optax.contrib.muon(
        0.02, ns_steps=cfg.ns_steps, weight_decay=cfg.weight_decay,
        consistent_rms=0.2 if cfg.consistent_rms else None,
        muon_weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(0, 1),
    )  # fmt: skip
    alone = {f"{n}{i}": x[i] for n, x in params.items() if n != "bias" for i in range(x.shape[0])}
    theirs, apply = oracle.init(alone), jax.jit(oracle.update)
    ours = {f"x/{n}": x for n, x in params.items()}
    moments = optim.init(table, ours)
    update = jax.jit(lambda g, p, m: optim.update(table, mesh(), g, p, m, 0, 10)[:2])
    for _ in range(4):
        grads = {n: jnp.asarray(RNG.normal(size=s), jnp.float32) for n, s in MUON_SIZES.items()}
        ours, moments = update({f"x/{n}": g for n, g in grads.items()}, ours, moments)
        split = {f"{n}{i}": g[i] for n, g in grads.items() if n != "bias" for i in range(g.shape[0])}
        with jax.numpy_dtype_promotion("standard"):
            steps, theirs = apply(split, theirs, alone)
            alone = optax.apply_updates(alone, steps)
    for name, expected in alone.items():  # pyright: ignore[reportAttributeAccessIssue]
        got, start = np.asarray(ours[f"x/{name[:-1]}"][int(name[-1])]), np.asarray(params[name[:-1]][int(name[-1])])
        moved = np.linalg.norm(np.asarray(expected) - start)
        assert np.linalg.norm(got - np.asarray(expected)) <= 1e-4 * moved, name


def test_adamw_equals_optax():
    """T4: three updates, clipped, decayed, with a rate that changes."""
    cfg = AdamW(match=("x",), lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    table = table_of({"x": cfg}, {"x/w": (2, 3, 4), "x/b": (3,)}, {})
    start = {"x/w": jnp.asarray(RNG.normal(size=(2, 3, 4)), jnp.float32), "x/b": jnp.zeros(3)}
    oracle = optax.adamw(0.01, 0.8, 0.95, 1e-6, weight_decay=0.1)
    ours, moments, theirs, expected = start, optim.init(table, start), oracle.init(start), start
    for _ in range(3):
        grads = {n: jnp.asarray(RNG.normal(size=x.shape), jnp.float32) for n, x in start.items()}
        ours, moments, logs = optim.update(table, mesh(), grads, ours, moments, 0, 10)
        with jax.numpy_dtype_promotion("standard"):
            steps, theirs = oracle.update(grads, theirs, expected)
            expected = optax.apply_updates(expected, steps)
        assert float(logs["lr/x"]) == pytest.approx(0.01)
    for name in start:
        np.testing.assert_allclose(ours[name], expected[name], rtol=1e-5, atol=1e-7)  # pyright: ignore
