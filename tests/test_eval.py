"""Evaluation metrics of the tiny model against direct forwards in float64, by hand (SPEC R4)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import SHAPE

from decomp import masks as mk
from decomp.ci_fn.base import lower
from decomp.eval import N_BINS, EvalResult, Evaluator
from decomp.keys import key_of, uniform_block
from decomp.state import ONE_DEVICE, State
from decomp.step import Step

SITES = {"C": {"q_proj": 8, "down_proj": 24}, "kinds": ["q_proj", "down_proj"], "layers": [1, 2]}
METRICS: dict[str, Any] = {
    **{name: {"kind": "mask", "mask": name} for name in ("unmasked", "zero", "ci", "stochastic")},
    "rounded": {"kind": "mask", "mask": "rounded", "threshold": 0.4},
    "gone": None,
    "l0": {"kind": "l0"},
    "l0_high": {"kind": "l0", "threshold": 0.4},
    "pgd": {"kind": "pgd", "steps": 2, "step_size": 0.3, "shape": "bc"},
}
BATCHES = 2


@pytest.fixture(autouse=True, scope="module")
def _fp64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_enable_x64", False)  # building a step in fp64 sets it for good


class HeldOut:
    """Token batches by number, and a count of what was asked for."""

    corpus_hash, n_train_tokens, n_eval_tokens = "none", 0, 0

    def __init__(self) -> None:
        self.asked: list[int] = []

    def batch(self, step: int) -> np.ndarray:
        raise AssertionError("case 17: evaluation read the training split")

    def eval_batch(self, index: int) -> np.ndarray:
        self.asked.append(index)
        return np.random.default_rng(100 + index).integers(0, SHAPE.vocab, (4, 6), dtype=np.int32)


@cache
def made() -> tuple[Step, Any, State, HeldOut, Evaluator]:
    cfg = tiny.config(
        precision__kind="fp64", sites=SITES, data={"kind": "stdlib", "batch_size": 4, "seq_len": 6},
        eval={"batches": BATCHES, "metrics": METRICS}, loss__recon={},
    )  # fmt: skip
    step, target = tiny.make(cfg)
    s = tiny.init(step)
    wide = jax.tree.map(lambda x: 3 * x, s.decomposition["ci_fn"])  # importances all over [0, 1]
    s = State({**s.decomposition, "ci_fn": wide}, s.progress)
    data = HeldOut()
    return step, target, s, data, Evaluator(step, target, data, cfg)


@cache
def result() -> EvalResult:
    _, _, s, _, evaluator = made()
    return evaluated(evaluator, s, 3)


def evaluated(evaluator: Evaluator, s: Any, step: int) -> EvalResult:
    result = evaluator.run(s, step)
    assert result is not None
    return result


@cache
def direct(index: int) -> tuple[Any, dict[str, jax.Array], np.ndarray]:
    """(clean forward, lower importances by lane, tokens) of a held-out batch, outside the evaluator."""
    tokens = HeldOut().eval_batch(index)
    clean, ci = clean_and_ci()(jnp.asarray(tokens))
    return clean, ci, tokens


@cache
def clean_and_ci() -> Any:
    step, target, s, *_ = made()

    def run(tokens: jax.Array) -> Any:
        clean = step.model.llama.clean(target, step.model.target_dims, tokens, step.ci_fn.captures)
        a = step.ci_fn(s.decomposition["ci_fn"], step.model.copy_dims["ci_fn"], clean.captures, {})
        return clean, {n: lower(x) for n, x in a.items()}

    return jax.jit(run)


@cache
def masked() -> Any:
    """(masks, delta masks, start) -> hidden, of the masked forward."""
    step, target, s, *_ = made()
    model, components = step.model, s.decomposition["components"]

    def run(m: Any, d: Any, start: jax.Array) -> jax.Array:
        dims = model.copy_dims["components"]
        return model.llama.masked(target, model.target_dims, components, dims, mk.GivenMasks(m, d), start)[0]

    return jax.jit(run)


def log_p(hidden: Any) -> np.ndarray:
    logits = np.asarray(hidden) @ np.asarray(made()[1]["head"])
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def cross_entropy(lp: np.ndarray, tokens: np.ndarray) -> float:
    return float(-np.take_along_axis(lp[:, :-1], tokens[:, 1:, None], axis=-1).mean())


def masks_of(name: str, ci: dict[str, jax.Array], index: int) -> tuple[Any, Any]:
    """Masks and delta masks by lane."""
    ones = {n: jnp.ones_like(x) for n, x in ci.items()}
    none = {n: jnp.zeros(x.shape[:-1]) for n, x in ci.items()}
    if name == "stochastic":
        step = made()[0]
        key = key_of(step.cfg.seed, "eval/stochastic", index)
        keys = mk.Uniform.draw(ONE_DEVICE, step.model.table, mk.Window(0, 4, 6), key).keys
        C = {n: x.shape[-1] for n, x in ci.items()}
        u = {n: jnp.stack([uniform_block(k[0], 0, (4, 6, C[n]), C[n]) for k in keys[n]]) for n in ci}
        d = {n: jnp.stack([uniform_block(k[1], 0, (4, 6, 1), 1)[..., 0] for k in keys[n]]) for n in ci}
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), (u, d))
        return {n: x + (1 - x) * wide[0][n] for n, x in ci.items()}, wide[1]
    given = {"unmasked": ones, "zero": jax.tree.map(jnp.zeros_like, ones), "ci": ci}
    return given.get(name, {n: (x > 0.4).astype(x.dtype) for n, x in ci.items()}), none


@pytest.mark.parametrize("name", ["unmasked", "zero", "ci", "rounded", "stochastic"])
def test_kl_and_ce_are_those_of_a_direct_forward(name: str):
    """Means over positions and over held-out batches; delta is masked off but in the stochastic one."""
    kls, ces = [], []
    for index in range(BATCHES):
        clean, ci, tokens = direct(index)
        hidden = masked()(*masks_of(name, ci, index), clean.start)
        p, q = log_p(clean.hidden), log_p(hidden)
        kls.append((np.exp(p) * (p - q)).sum(-1).mean())
        ces.append(cross_entropy(q, tokens))
    assert result().metrics[f"eval/kl_{name}"] == pytest.approx(np.mean(kls), rel=1e-9)
    assert result().metrics[f"eval/ce_{name}"] == pytest.approx(np.mean(ces), rel=1e-9)


def test_the_five_masks_differ():
    kls = [result().metrics[f"eval/kl_{n}"] for n in ("unmasked", "zero", "ci", "rounded", "stochastic")]
    assert min(abs(a - b) for i, a in enumerate(kls) for b in kls[:i]) > 1e-3


def test_the_attack_is_worse_than_its_start():
    """PGD only ever climbs; it is measured like the others."""
    assert result().metrics["eval/kl_pgd"] > result().metrics["eval/kl_stochastic"]
    assert np.isfinite(result().metrics["eval/ce_pgd"])


def test_ce_target_and_names():
    expected = np.mean([cross_entropy(log_p(clean.hidden), tokens) for clean, _, tokens in map(direct, range(BATCHES))])
    metrics = result().metrics
    assert metrics["eval/ce_target"] == pytest.approx(expected, rel=1e-9)
    assert not any("gone" in name for name in metrics)  # null is absent
    assert set(made()[3].asked) == {0, 1}


def test_l0_by_hand():
    """L0: components above the threshold per position, per site; and the share of the matrix's rank they are."""
    table = made()[0].model.table
    for name, threshold in (("l0", 0.0), ("l0_high", 0.4)):
        by_site: dict[str, list[float]] = {n: [] for n in table.by_name}
        for index in range(BATCHES):
            ci = direct(index)[1]
            for n, site in table.by_name.items():
                by_site[n].append(float((np.asarray(ci[site.lane][site.row]) > threshold).sum(-1).mean()))
        found = {n: result().metrics[f"eval/{name}/{n}"] for n in by_site}
        assert found == pytest.approx({n: np.mean(v) for n, v in by_site.items()}, rel=1e-12)
        shares = [np.mean(v) / 16 for v in by_site.values()]  # every matrix here has rank 16
        assert result().metrics[f"eval/{name}_mean"] == pytest.approx(16 * np.mean(shares))
        assert result().metrics[f"eval/{name}_per_rank_mean"] == pytest.approx(np.mean(shares))
        assert result().metrics[f"eval/{name}_per_rank_max"] == pytest.approx(max(shares))
    assert result().metrics["eval/l0_mean"] > result().metrics["eval/l0_high_mean"] > 0


def test_statistics_of_importances():
    """Mean CI per component and the histogram of a site's CI, in [0, 1]."""
    arrays = result().arrays
    np.testing.assert_allclose(arrays["ci_hist_edges"], np.linspace(0, 1, N_BINS + 1))
    for name, site in made()[0].model.table.by_name.items():
        ci = [np.asarray(direct(i)[1][site.lane][site.row]) for i in range(BATCHES)]
        np.testing.assert_allclose(arrays[f"mean_ci/{name}"], np.mean([x.mean((0, 1)) for x in ci], axis=0), rtol=1e-9)
        histogram = np.mean([np.histogram(x, bins=N_BINS, range=(0, 1))[0] for x in ci], axis=0)
        assert arrays[f"ci_hist/{name}"].sum() == 4 * 6 * site.C
        assert np.abs(arrays[f"ci_hist/{name}"] - histogram).sum() <= 2  # a value on an edge may fall on either side


def test_the_same_draws_at_every_evaluation():
    """Curves of one run compare like with like: neither the training step nor a second call moves a number."""
    *_, s, _, evaluator = made()
    assert evaluated(evaluator, s, 8).metrics == result().metrics


def test_an_evaluation_is_left_between_two_batches():
    *_, s, _, evaluator = made()
    asked = iter([False, True])
    assert evaluator.run(s, 8, lambda: next(asked)) is None
    assert next(asked, None) is None
