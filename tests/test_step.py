"""One training step on the tiny model in float64: what no cut, order or recomputation may change (SPEC 6, 7, 9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from decomp import masks as mk
from decomp import schedule, state
from decomp.checkpoint import Checkpoints, Saved
from decomp.ci_fn.chunk_transformer import ChunkTransformer
from decomp.config.schema import Curve, RouteUniformK
from decomp.keys import key_of
from decomp.loss import objective
from decomp.placement import tree_shardings
from decomp.state import State
from decomp.step import Given, Step

SITES = {"C": {"q_proj": 8, "down_proj": 24}, "kinds": ["q_proj", "down_proj"]}
FALLING = {"max": 1.0, "knots": [{"at": 0.0, "frac": 1.0}, {"at": 1.0, "frac": 0.0}]}
RECON: dict[str, Any] = {
    "stochastic": {"coeff": 1.0, "source": {"kind": "uniform"}, "routing": {"kind": "uniform_k"}},
    "adversarial": {"coeff": FALLING, "source": {"kind": "persistent", "shape": "bsc", "num_warmup_steps": 0}},
    "shared": {"coeff": 0.5, "source": {"kind": "persistent", "shape": "c", "num_warmup_steps": 1}},
}
FIXED = {n: {**t, "source": {**t["source"], "dtype": "uint16"}} for n, t in RECON.items() if n != "stochastic"}
OPTIM = {
    "components": {"kind": "adamw", "match": "components", "lr": {**FALLING, "max": 3e-3}, "clip": 1.0},
    "ci_fn": {"kind": "adamw", "match": "ci_fn", "lr": 1e-3},
}


@pytest.fixture(autouse=True, scope="module")
def _fp64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_enable_x64", False)  # building a step in fp64 sets it for good


def config(**changes: Any) -> Any:
    return tiny.config(**{"precision__kind": "fp64", "sites": SITES, "optim": OPTIM, "loss__recon": RECON, **changes})


@cache
def made(variant: str) -> tuple[Step, Any]:
    """The step of a variant and its target; a program is compiled once for the whole module."""
    changes: dict[str, dict[str, Any]] = {
        "plain": {},
        "two windows": {"data__microbatches": 2},
        "four windows, reordered, recomputed": {
            "data__microbatches": 4,
            "loss__recon": dict(reversed(RECON.items())),
            "loss__remat": True,
            "ci_fn__remat": True,
        },
        "16 bits": {"loss__recon": {**RECON, **FIXED}},
    }
    return tiny.make(config(**changes[variant]))


def fresh(step: Step, at: int = 0) -> State:
    """The initial state, as if ``at`` updates had passed."""
    s = initial(step.persistent["shared"].dtype)
    return placed(step, State(s.decomposition, {**s.progress, "step": np.int32(at)}))


@cache
def initial(dtype: str = "float32") -> State:
    """The initial state on the host: no other variant changes it, and drawing it is a program of its own."""
    return jax.tree.map(np.asarray, tiny.init(made("16 bits" if dtype == "uint16" else "plain")[0]))


def placed(step: Step, s: Any) -> State:
    """A state where the step leaves it: from anywhere else its program would be compiled anew."""
    return jax.device_put(s, tree_shardings(step.mesh, step.leaves))


@cache
def after(variant: str = "plain", at: int = 0, n: int = 2) -> tuple[Any, list[dict[str, float]]]:
    """State and metrics after ``n`` steps from the state at update ``at``, on the host."""
    step, target = made(variant)
    s, logs = tiny.run(step, target, fresh(step, at), n)
    return jax.tree.map(np.asarray, s), logs


def same(a: Any, b: Any, rel: float) -> None:
    """Every array of two trees, by relative norm."""
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        scale = np.linalg.norm(np.asarray(y, np.float64))
        off = np.linalg.norm(np.asarray(x, np.float64) - np.asarray(y, np.float64))
        assert off <= rel * max(scale, 1e-12), f"{jax.tree_util.keystr(path)}: off by {off:.2e} of {scale:.2e}"


def same_metrics(a: list[dict[str, float]], b: list[dict[str, float]], rel: float) -> None:
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        for name in x:
            assert x[name] == pytest.approx(y[name], rel=rel, abs=1e-14), name


# ---------------------------------------------------------------- T8, R1, remat
@pytest.mark.parametrize(
    "variant", [pytest.param("two windows", marks=pytest.mark.slow), "four windows, reordered, recomputed"]
)
def test_the_same_two_steps(variant: str):
    """T8: microbatches; case 18 and R1: the order of terms; layers recomputed: all give the plain step's values.

    Sources with a batch axis (bsc) and without (c), frequency's running average and Adam moments included.
    """
    state, logs = after(variant)
    plain, plain_logs = after()
    same_metrics(logs, plain_logs, 1e-11)
    same(state, plain, 1e-9)


def test_losses_are_what_is_weighted_and_summed():
    """L6: total = sum of coefficient * term, each logged."""
    for log in after()[1]:
        weighted = {n.partition("/")[2]: v for n, v in log.items() if n.startswith("weighted/")}
        assert set(weighted) == {"faithfulness", "minimality", "frequency", *RECON}
        for name, value in weighted.items():
            assert value == pytest.approx(log[f"schedule/coeff_{name}"] * log[f"loss/{name}"], rel=1e-12)
        assert log["loss/total"] == pytest.approx(sum(weighted.values()), rel=1e-12)


# ---------------------------------------------------------------- schedules, case 16, A3
@pytest.mark.parametrize("at", [0, 4, 9])
def test_the_logged_learning_rate_is_the_applied_one(at: int):
    """Case 16, T2: Adam's first update moves every parameter by the rate itself, and by no more."""
    step, target = made("plain")
    before = initial().decomposition
    s, (log,) = tiny.run(step, target, fresh(step, at), 1, first=at)
    curve = Curve.model_validate(OPTIM["components"]["lr"])
    for group, expected in (("components", 3e-3 * (9 - at) / 9), ("ci_fn", 1e-3)):
        assert log[f"lr/{group}"] == pytest.approx(expected, rel=1e-12, abs=1e-18)
        moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b).max(), s.decomposition[group], before[group])
        assert max(jax.tree.leaves(moved)) == pytest.approx(expected, rel=1e-3, abs=1e-18)
    assert float(schedule.value(curve, at, 10, jnp.float64)) == pytest.approx(log["lr/components"], rel=1e-12)
    assert log["schedule/gamma"] == pytest.approx(0.01 ** (at / 9), rel=1e-9)
    assert log["schedule/coeff_adversarial"] == pytest.approx(1 - at / 9, abs=1e-12)


@pytest.mark.slow
def test_a_run_extended_with_hold_is_the_same_program():
    """T2, K3: no update before the old end knows of the longer run; stretched, the schedules are others."""

    def program(**steps: Any) -> str:
        step, target = tiny.make(config(**steps))
        args = step.mesh, step.model.table, step.ci_fn, step.groups, step.cfg, step.leaves, jnp.float64
        return step.compiled.lower(state.abstract(*args), target, tiny.batch(step, 0)).as_text()

    assert program(steps=10) == program(steps=15, schedule_steps=10) != program(steps=15)


def test_a_term_of_coefficient_zero_still_ascends():
    """A3: the adversary climbs the bare term, whatever the coefficient: at 1 and at 0 bit for bit alike."""
    whole, nothing = (after(at=at, n=1) for at in (0, 9))
    assert (whole[1][0]["schedule/coeff_adversarial"], nothing[1][0]["schedule/coeff_adversarial"]) == (1.0, 0.0)
    sources = [s.progress["sources"]["adversarial"] for s, _ in (whole, nothing)]
    jax.tree.map(np.testing.assert_array_equal, *sources)
    started = initial().progress["sources"]["adversarial"]["raw"]
    moved = jax.tree.map(lambda a, b: np.abs(a - np.asarray(b)).mean(), sources[0]["raw"], started)
    assert min(jax.tree.leaves(moved)) > 1e-3
    counts = {n: int(s["count"]) for n, s in whole[0].progress["sources"].items()}
    assert counts == {"adversarial": 1, "shared": 2}  # the final ascent, and one warm-up ascent before it (A2)


# ---------------------------------------------------------------- sources in 16 bits (SPEC P1)
def sources(s: Any) -> dict[str, Any]:
    return s.progress["sources"]


def test_sources_in_16_bits_start_where_those_in_float32_do():
    """A1, P1: the same draws cut to the grid, code by code uniform; moments rest in bfloat16; what rests is half."""
    plain, fixed = (sources(initial(d)) for d in ("float32", "uint16"))
    for name in FIXED:
        assert {x.dtype for x in jax.tree.leaves(fixed[name]["raw"])} == {np.dtype(np.uint16)}
        assert {x.dtype for m in "mv" for x in jax.tree.leaves(fixed[name][m])} == {jnp.dtype(jnp.bfloat16)}
        off = jax.tree.map(lambda u, x: np.abs(u / 65535 - x).max() * 65535, fixed[name]["raw"], plain[name]["raw"])
        assert max(jax.tree.leaves(off)) <= 1
    u = np.concatenate([x.ravel() for x in jax.tree.leaves(fixed["adversarial"]["raw"])]).astype(float)
    assert abs(u.mean() - 65535 / 2) < 5 * 65536 / np.sqrt(12 * u.size)


def test_a_step_in_16_bits_is_the_step_in_float32_to_the_grid():
    """P1: after one ascent a source is off by less than one step of the draw and one of the rounding, unless its
    gradient is too near 0 to have a sign; losses differ as little."""
    (plain, (log,)), (fixed, (other,)) = after(n=1), after("16 bits", n=1)
    for name in FIXED:
        raws = zip(*(jax.tree.leaves(sources(s)[name]["raw"]) for s in (fixed, plain)), strict=True)
        off = np.concatenate([np.abs(u - x * 65535).ravel() for u, x in raws])
        limit = 2 if name == "adversarial" else 4  # one ascent; two
        assert np.mean(off <= limit) > 0.998 and off.max() < 1400, name  # a sign that flips: 0.02 of the range
    for name in log:
        if name.startswith("loss/"):
            assert other[name] == pytest.approx(log[name], rel=1e-4), name


ELSEWHERE = """
import sys
sys.path.insert(0, {tests!r})
import jax, numpy as np, tiny
import test_step as t

cfg = t.config(data__microbatches=2, loss__remat=True, loss__recon=dict(reversed({**t.RECON, **t.FIXED}.items())))
step, target = tiny.make(cfg, (1, 2, 2))
s, _ = tiny.run(step, target, jax.block_until_ready(tiny.init(step)), 2)
expected = np.load({file!r})
found = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(t.sources(s))}
assert found.keys() == set(expected)
for name, x in found.items():
    np.testing.assert_array_equal(np.asarray(x).astype(float), expected[name], err_msg=name)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rounding_does_not_depend_on_mesh_windows_order_or_recomputation(simulated: Callable[..., str], tmp_path: Path):
    """D8, T8, R1, R2: sources and moments bit for bit after two steps, five ascents of them, on four devices and on
    one; in float64, where no sum comes near a coin's edge."""
    found = jax.tree_util.tree_leaves_with_path(sources(after("16 bits")[0]))
    np.savez(tmp_path / "here.npz", **{jax.tree_util.keystr(path): x.astype(float) for path, x in found})
    code = ELSEWHERE.replace("{tests!r}", repr(str(Path(__file__).parent)))
    code = code.replace("{file!r}", repr(str(tmp_path / "here.npz")))
    simulated(code, devices=4, timeout=240)


def test_every_ascent_has_draws_of_its_own():
    """R1: by term, step, ascent and purpose; and an example's own, wherever it lies (R2)."""
    step, target = made("16 bits")
    given = Given(target, jnp.zeros(()), jnp.zeros((8, 6), jnp.int32), jnp.int32(3))
    later = given._replace(step=jnp.int32(4))
    drawn = [step.rounding(n, g, i) for n, g, i in (("adversarial", given, 0), ("adversarial", given, 1),
             ("adversarial", later, 0))]  # fmt: skip
    parts = [np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(b)]) for bits in drawn for b in bits or ()]
    assert len(parts) == 6 and len(np.unique(np.concatenate(parts))) > 0.999 * sum(map(np.size, parts))
    shared = step.rounding("shared", given, 0)
    assert shared is not None
    assert {x.ndim for x in jax.tree.leaves(shared.raw)} == {1, 2}  # [g, C] and [g]: one draw for all examples (A5)


@pytest.mark.slow
def test_resuming_sources_in_16_bits_equals_not_having_stopped(tmp_path: Path):
    """K3: saved as they rest, restored bit for bit, and the second step rounds as if nothing had been between."""
    step, target = made("16 bits")
    one, _ = after("16 bits", n=1)
    checkpoints = Checkpoints(tmp_path, 1, None, {})
    begun = placed(step, one)
    checkpoints.save(1, (begun.decomposition, begun.progress))
    assert [type(e) for e in checkpoints.wait()] == [Saved]
    args = step.mesh, step.model.table, step.ci_fn, step.groups, step.cfg, step.leaves, jnp.float64
    abstract = state.abstract(*args)
    found = checkpoints.restore((abstract.decomposition, abstract.progress))
    assert found is not None
    restored = State(*found[1])
    jax.tree.map(np.testing.assert_array_equal, restored, one)
    assert {x.dtype for x in jax.tree.leaves(sources(restored)["shared"]["raw"])} == {np.dtype(np.uint16)}
    s, _ = tiny.run(step, target, restored, 1, first=1)
    jax.tree.map(np.testing.assert_array_equal, s, after("16 bits")[0])


def test_a_moment_of_16_bit_sources_that_is_not_finite_is_judged():
    """T7: an integer cannot hand a NaN on to the next forward."""
    step, target = made("16 bits")
    before = jax.tree.map(np.copy, initial("uint16"))
    jax.tree.leaves(sources(before)["shared"]["v"])[0].reshape(-1)[0] = np.nan
    s, (log,) = tiny.run(step, target, placed(step, before), 1)
    assert step.term_names[int(log["guard/bad_term"])] == "shared" and np.isnan(log["loss/shared"])
    floats = lambda x: np.asarray(x).astype(float)  # noqa: E731  numpy does not know bfloat16's NaN as one
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(floats(a), floats(b)), sources(s), sources(before))
    jax.tree.map(np.testing.assert_array_equal, s.decomposition, before.decomposition)


# ---------------------------------------------------------------- T7
def poisoned(what: str) -> tuple[Any, Any]:
    """(state, target) with one number that is not finite."""
    target = made("plain")[1]
    s = jax.tree.map(np.copy, initial())
    if what == "target":
        return s, {**target, "final_norm": target["final_norm"].at[0].set(jnp.nan)}
    parts = {"component": s.decomposition["components"], "CI function": s.decomposition["ci_fn"]}
    part = parts.get(what, s.progress["sources"]["shared"]["raw"])
    jax.tree.leaves(part)[0].reshape(-1)[0] = np.inf if what == "component" else np.nan
    return s, target


@pytest.mark.parametrize(
    ("what", "term"),
    [("target", "stochastic"), ("component", "faithfulness"), ("CI function", "minimality"), ("source", "shared")],
)
def test_a_step_that_is_not_finite_changes_nothing_but_the_counts(what: str, term: str):
    """T7: components, CI function, sources, moments and averages stay; step and guard count; the term is named."""
    step, _ = made("plain")
    before, target = poisoned(what)
    s, (log,) = tiny.run(step, target, placed(step, before), 1)
    found = jax.tree.map(np.asarray, s)
    jax.tree.map(np.testing.assert_array_equal, found.decomposition, before.decomposition)
    for kept in ("optim", "sources", "frequency"):
        jax.tree.map(np.testing.assert_array_equal, found.progress[kept], before.progress[kept])
    assert step.term_names[int(log["guard/bad_term"])] == term
    assert (int(found.progress["step"]), log["guard/in_a_row"], log["guard/skipped_total"]) == (1, 1, 1)


def test_the_guard_counts_in_a_row():
    """T7: a finite step ends the row and keeps the total."""
    step, target = made("plain")
    before, bad = poisoned("target")
    s, logs = tiny.run(step, bad, placed(step, before), 2)
    s, (last,) = tiny.run(step, target, s, 1)
    assert [log["guard/in_a_row"] for log in (*logs, last)] == [1, 2, 0]
    assert [log["guard/skipped_total"] for log in (*logs, last)] == [1, 2, 2]
    assert last["guard/bad_term"] == -1


def test_a_gradient_alone_is_judged_too():
    """T7: every loss finite, one group's gradient not."""
    step, _ = made("plain")
    values = {n: jnp.float64(1.0) for n in step.value_names}
    logs = {"grad_norm/components": jnp.float64(2.0), "grad_norm/ci_fn": jnp.float64(jnp.inf)}
    assert step.term_names[int(step.first_bad(values, logs))] == "gradient of ci_fn"
    assert int(step.first_bad(values, {**logs, "grad_norm/ci_fn": jnp.float64(1.0)})) == -1


# ---------------------------------------------------------------- draws, absent terms, C3
def test_draws_differ_between_examples_and_follow_the_global_example():
    """Case 11, R2: no two examples share masks or routes; a window draws what the whole batch draws there."""
    drawn = []
    for variant in ("plain", "two windows"):
        step, target = made(variant)
        given = Given(target, jnp.zeros(()), jnp.zeros((8, 6), jnp.int32), jnp.int32(3))
        windows = [step.context(_no_clean(), _no_sums(), given, j) for j in range(step.microbatches)]
        key = key_of(0, "recon/stochastic", 3, 0)
        parts = [_draw(step, ctx, key) for ctx in windows]
        drawn.append(jax.tree.map(lambda *x: np.concatenate(x), *parts))
    whole, windows = drawn
    jax.tree.map(np.testing.assert_array_equal, whole, windows)
    masks = whole[0]
    assert masks.shape[0] == 8
    for a in range(8):
        for b in range(a):
            assert np.abs(masks[a] - masks[b]).mean() > 0.2, "two examples share their masks"
    assert len({route.tobytes() for route in whole[1]}) == 8


def _no_clean() -> Any:
    return None


def _no_sums() -> Any:
    return type("NoSums", (), {"norms": {}})()


def _draw(step: Step, ctx: objective.Context, key: Any) -> tuple[np.ndarray, np.ndarray]:
    """Masks [B, T, C] of layer 1's down_proj, routes [B, T, sites]."""
    table, window = step.model.table, ctx.window
    source = mk.Uniform.draw(step.ax, table, window, key)
    run = table.masked_runs[0]
    row = jax.tree.map(lambda x: x[0], source.rows(run))
    routing = step.terms["stochastic"].routing
    assert isinstance(routing, RouteUniformK)
    routes = mk.draw_routes(routing, table, window, key)
    assert routes is not None
    stacked = np.concatenate([np.moveaxis(np.asarray(r), 0, -1) for r in routes.values()], axis=-1)
    return np.asarray(source.at(run, "down_proj", row)[0]), stacked


def shape_of_step(cfg: Any) -> tuple[Any, dict[str, Any]]:
    step, target = tiny.make(cfg)
    state = jax.eval_shape(lambda: tiny.init(step))
    return jax.eval_shape(step.__call__, state, target, tiny.batch(step, 0))


def test_a_term_set_to_null_is_absent():
    """Case 4: null removes one term with its metrics and its sources, and no other."""
    state, metrics = shape_of_step(config(loss__recon={**RECON, "shared": None}, loss__frequency=None))
    assert set(state.progress["sources"]) == {"adversarial"}
    losses = {n for n in metrics if n.startswith("loss/")}
    assert losses == {f"loss/{n}" for n in ("total", "faithfulness", "minimality", "stochastic", "adversarial")}
    assert not any("shared" in n or "frequency" in n for n in metrics)


def test_ci_is_evaluated_once(monkeypatch: pytest.MonkeyPatch):
    """C3: one call in a step of one window, whatever the number of terms."""
    calls, plain = [], ChunkTransformer.__call__

    def counted(self: ChunkTransformer, *args: Any) -> Any:
        calls.append(1)
        return plain(self, *args)

    monkeypatch.setattr(ChunkTransformer, "__call__", counted)
    shape_of_step(config())
    assert len(calls) == 1
