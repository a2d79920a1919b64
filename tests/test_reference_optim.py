"""Schedules, clipping, AdamW and Muon of the product in float64 against the numpy reference (SPEC T1 to T5)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import optim as ref
from reference_bridge import close, quick_jit

from decomp import optim, schedule
from decomp.config import schema
from decomp.mesh import AXES
from decomp.placement import Leaf

NS_EPS = 1e-8  # ours; the SPEC leaves it open


@pytest.fixture(autouse=True)
def _fp64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


CURVES: dict[str, Any] = {
    "number": 0.3,
    "cosine_to_zero": {"max": 2.0, "knots": [{"at": 0.0, "frac": 1.0}, {"at": 1.0, "frac": 0.0, "interp": "cosine"}]},
    "ramp_hold_quarter": {
        "max": 0.01,
        "knots": [
            {"at": 0.0, "frac": 0.0},
            {"at": 0.2, "frac": 1.0, "interp": "linear"},
            {"at": 0.5, "frac": 0.8, "interp": "hold"},
            {"at": 1.0, "frac": 0.0, "interp": "quarter_cosine"},
        ],
    },
    "log": {"max": 1.0, "knots": [{"at": 0.0, "frac": 1.0}, {"at": 1.0, "frac": 0.01, "interp": "log"}]},
    "one_knot": {"max": 5.0, "knots": [{"at": 0.0, "frac": 0.5}]},
}


def _curve(name: str) -> Any:
    curve = CURVES[name]
    return schema.Curve.model_validate(curve) if isinstance(curve, dict) else curve


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("steps", [1, 2, 11, 41])
def test_schedule(name: str, steps: int) -> None:
    """T2 at every step of runs of several lengths, on the host and traced."""
    got = quick_jit(jax.vmap(lambda s: schedule.value(_curve(name), s, steps, jnp.float64)))(jnp.arange(steps))
    expected = np.array([ref.schedule(CURVES[name], s, steps) for s in range(steps)])
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-15 * np.max(expected))
    host = [float(schedule.value(_curve(name), s, steps, jnp.float64)) for s in (0, steps - 1)]
    np.testing.assert_allclose(host, expected[[0, -1]], rtol=1e-12, atol=1e-15 * np.max(expected))


@pytest.mark.parametrize("name", CURVES)
def test_the_last_knot_is_reached_exactly_in_float32(name: str) -> None:
    """T2: the precision training uses; a rate that ends at 0 ends at 0, never below."""
    curve = CURVES[name]
    if isinstance(curve, dict):
        last = schedule.value(_curve(name), jnp.asarray(99, jnp.int32), 100, jnp.float32)
        assert np.asarray(last) == np.float32(curve["max"]) * np.float32(curve["knots"][-1]["frac"])


# ---------------------------------------------------------------- groups
LEAVES = {
    "components/a/V": (2, 6, 4),
    "components/a/U": (2, 4, 9),
    "components/b/V": (1, 5, 8),
    "components/b/U": (1, 8, 5),
    "ci_fn/chunks0/w_in": (2, 7, 4),
    "ci_fn/chunks0/b_in": (2, 4),
    "ci_fn/chunks0/heads/0.q": (2, 4, 3),
}
CFG: dict[str, Any] = {
    "adam": schema.AdamW(
        match=("a",), lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, clip=0.5
    ),
    "muon": schema.Muon(match=("b",), lr=schema.Curve.model_validate(CURVES["cosine_to_zero"]), ns_dtype="float64"),
    "ci": schema.Muon(
        match=("ci_fn",), lr=0.02, adam_lr=0.003, momentum=0.9, nesterov=False, ns_steps=4, consistent_rms=False,
        weight_decay=0.2, clip=1e6, ns_dtype="float64",
    ),
}  # fmt: skip


def _reference_update(
    name: str, group: str, param: np.ndarray, grad: np.ndarray, state: Any, step: int, steps: int
) -> tuple[np.ndarray, Any]:
    cfg = CFG[group]
    if isinstance(cfg, schema.AdamW):
        return ref.adamw(param, grad, state, float(cfg.lr), cfg.betas, cfg.eps, cfg.weight_decay)  # pyright: ignore
    if param.ndim == 2:  # a stack of bias vectors
        return ref.adamw(param, grad, state, float(cfg.adam_lr), weight_decay=cfg.weight_decay)
    lr = ref.schedule(CURVES["cosine_to_zero"] if group == "muon" else cfg.lr, step, steps)
    options = (cfg.momentum, cfg.nesterov, cfg.ns_steps, cfg.consistent_rms, cfg.weight_decay, NS_EPS)
    return ref.muon(param, grad, state, lr, *options)


def test_three_updates_of_all_groups() -> None:
    """T1, T3 to T5: every leaf by its own group's rule, clipped by its own group's norm."""
    leaves = {name: Leaf(dims, tuple(None for _ in dims), "replicated") for name, dims in LEAVES.items()}
    table = optim.group_table(CFG, leaves, {"a": "adam", "b": "muon"})
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), AXES)
    rng, steps = np.random.default_rng(0), 6
    params = {name: rng.standard_normal(dims) for name, dims in LEAVES.items()}
    group_of = {name: "ci" if name.startswith("ci_fn") else {"a": "adam", "b": "muon"}[name[11]] for name in LEAVES}
    state = {
        name: (ref.zero_momentum if len(dims) == 3 and group_of[name] != "adam" else ref.zero_moments)(np.zeros(dims))
        for name, dims in LEAVES.items()
    }
    ours = {name: jnp.asarray(x) for name, x in params.items()}
    moments = optim.init(table, ours)
    update = quick_jit(lambda g, p, m, s: optim.update(table, mesh, g, p, m, s, steps))
    for step in range(3):
        grads = {name: rng.standard_normal(dims) for name, dims in LEAVES.items()}
        ours, moments, logs = update({n: jnp.asarray(g) for n, g in grads.items()}, ours, moments, jnp.int32(step))
        for group, cfg in CFG.items():
            own = {name: grads[name] for name in LEAVES if group_of[name] == group}
            close(logs[f"grad_norm/{group}"], ref.global_norm(own))
            for name, grad in ref.clip(own, cfg.clip).items():
                params[name], state[name] = _reference_update(name, group, params[name], grad, state[name], step, steps)
                close(ours[name], params[name])


@pytest.mark.parametrize("dims", [(3, 8), (8, 3), (5, 5)])
def test_newton_schulz(dims: tuple[int, int]) -> None:
    """T5: wide, tall and square; batched over the stack as matrix by matrix."""
    stack = np.random.default_rng(1).standard_normal((3, *dims)) * np.array([1e-3, 1.0, 1e3])[:, None, None]
    got = quick_jit(lambda x: optim.newton_schulz(x, 5))(jnp.asarray(stack))
    close(got, np.stack([ref.newton_schulz(one, 5, NS_EPS) for one in stack]))
