"""Each cross-field rule refuses what it should, names the fix, and lets its neighbours pass."""

from __future__ import annotations

import pytest

from decomp.config import load
from decomp.config.compose import compose
from decomp.config.errors import UserError

KNOTS = "optim.components.lr.knots"
REFUSED = {
    "heads do not divide": (
        ["ci_fn.d_model=130"],
        "ci_fn.d_model: 130 over n_heads=4 gives no even head size; try ci_fn.d_model=128",
    ),
    "odd head": (["ci_fn.d_model=12"], "ci_fn.d_model: 12 over n_heads=4"),
    "microbatches": (
        ["data.batch_size=16", "data.microbatches=3"],
        "data.microbatches: 3 does not divide data.batch_size=16; try data.microbatches=2",
    ),
    "fresh PGD in windows": (
        ["data.microbatches=2", "loss.recon.adversarial.source={kind: fresh_pgd, shape: sc}"],
        "loss.recon.adversarial.source.shape: sc is shared by the batch, of which data.microbatches=2 shows one window "
        "at a time; use data.microbatches=1 or loss.recon.adversarial.source.shape=bsc",
    ),
    "adversary site by site": (
        ["loss.recon.adversarial.routing={kind: per_site}"],
        "loss.recon.adversarial.routing: per_site has no one forward for source=persistent to ascend; "
        "use uniform_k, or source=uniform",
    ),
    "sigmoid in 16 bits": (
        ["loss.recon.adversarial.source={parametrize: sigmoid, dtype: uint16}"],
        "loss.recon.adversarial.source.dtype: uint16 holds [0, 1], which raw values under a sigmoid leave; use float32 "
        "or loss.recon.adversarial.source.parametrize=clip",
    ),
    "sigmoid in 16 bits, mixed": (
        [
            "loss.recon.adversarial.source={kind: mixed, persistent: {parametrize: sigmoid, dtype: uint16}}",
        ],
        "loss.recon.adversarial.source.persistent.dtype: uint16 holds [0, 1]",
    ),
    "bf16 sources": (
        ["loss.recon.adversarial.source.dtype=bfloat16"],
        "loss.recon.adversarial.source.dtype='bfloat16': no such option",
    ),
    "profile order": (["profile.steps=[9,4]"], "profile.steps: [9, 4] is not in order; try profile.steps=[4,9]"),
    "profile beyond": (
        ["steps=10", "profile.steps=[4,10]"],
        "profile.steps: [4, 10] is beyond the last update 9 of steps=10",
    ),
    "stops beyond": (["steps=10", "stop_after=11"], "stop_after: 11 is more than steps=10"),
    "a step of no run": (["init_from_step=3"], "init_from_step: is a step of no run; give init_from=<run folder> too"),
    "best by nothing": (
        ["checkpoint.keep_best=eval/kl_cl"],
        "checkpoint.keep_best: eval/kl_cl: no metric of this run that tells good from bad; did you mean eval/kl_ci?",
    ),
    "best by a learning rate": (
        ["checkpoint.keep_best=lr/components"],
        "checkpoint.keep_best: lr/components: no metric",
    ),
    "best by an absent term": (
        ["checkpoint.keep_best=loss/adversarial", "ablation=no_adversary"],
        "checkpoint.keep_best: loss/adversarial: no metric",
    ),
    "frequency alone": (["loss.minimality=null"], "loss.frequency: needs loss.minimality"),
    "nothing to learn": (
        ["loss.faithfulness=null", "loss.recon.stochastic=null", "loss.recon.adversarial=null"],
        "loss: has neither faithfulness nor a recon term",
    ),
    "gamma 0": (["loss.minimality.penalty.gamma=0"], "loss.minimality.penalty.gamma: reaches 0"),
    "gamma ends at 0": (
        ["loss.minimality.penalty.gamma={max: 1, knots: [{at: 0, frac: 1}, {at: 1, frac: 0}]}"],
        "loss.minimality.penalty.gamma: reaches 0",
    ),
    "knots fall": (
        [f"{KNOTS}=[{{at: 0.5, frac: 1}}, {{at: 0, frac: 1}}, {{at: 1, frac: 1}}]"],
        f"{KNOTS}: are at [0.5, 0.0, 1.0]; list them in rising order",
    ),
    "knots twice": (
        [f"{KNOTS}=[{{at: 0, frac: 1}}, {{at: 0, frac: 1}}, {{at: 1, frac: 1}}]"],
        f"{KNOTS}: are at [0.0, 0.0, 1.0]",
    ),
    "knots end early": ([f"{KNOTS}=[{{at: 0, frac: 1}}, {{at: 0.9, frac: 1}}]"], f"{KNOTS}: run from 0.0 to 0.9"),
    "log from 0": (
        [f"{KNOTS}=[{{at: 0, frac: 0}}, {{at: 1, frac: 1, interp: log}}]"],
        f"{KNOTS}: the log segment that ends at 1.0 touches 0",
    ),
    "curve in a term": (
        ["loss.recon.stochastic.coeff={max: 1, knots: [{at: 0.2, frac: 1}]}"],
        "loss.recon.stochastic.coeff.knots: run from 0.2",
    ),
    "case 42, loss": (
        ["+loss.recon.total={coeff: 1, source: {kind: uniform}}"],
        "loss.recon.total: is the metric name of another loss",
    ),
    "case 42, faithfulness": (
        ["+loss.recon.faithfulness={coeff: 1, source: {kind: uniform}}"],
        "loss.recon.faithfulness: is the metric name",
    ),
    "case 42, metric": (
        ["+eval.metrics.target={kind: mask, mask: ci}"],
        "eval.metrics.target: would write eval/ce_target",
    ),
    "case 42, l0": (
        ["+eval.metrics.kl={kind: l0}", "+eval.metrics.mean={kind: mask, mask: ci}"],
        "eval.metrics.mean: would write eval/kl_mean, as eval.metrics.kl does",
    ),
    "case 42, slash": (["+loss.recon={a/b: {coeff: 1, source: {kind: uniform}}}"], "loss.recon.a/b: is no name"),
}


@pytest.mark.parametrize(("overrides", "wanted"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(overrides: list[str], wanted: str):
    with pytest.raises(UserError) as error:
        compose(overrides)
    found = str(error.value).splitlines()
    assert len(found) == 1, found
    assert found[0].startswith(wanted)


ALLOWED = {
    "best by a site's L0": ["checkpoint.keep_best=eval/l0/model.layers.0.mlp.down_proj"],
    "best by the total": ["checkpoint.keep_best=loss/total", "checkpoint.best_is=highest"],
    "head of 2": ["ci_fn.d_model=8"],
    "microbatches": ["data.batch_size=16", "data.microbatches=16"],
    "fresh PGD by example in windows": [
        "data.microbatches=2",
        "loss.recon.adversarial.source={kind: fresh_pgd, shape: bc}",
    ],
    "fresh PGD in one window": ["loss.recon.adversarial.source={kind: fresh_pgd, shape: c}"],
    "16 bits": ["loss.recon.adversarial.source.dtype=uint16"],
    "16 bits in fp64": ["loss.recon.adversarial.source.dtype=uint16", "precision=fp64"],
    "sigmoid": ["loss.recon.adversarial.source.parametrize=sigmoid"],
    "profile last": ["steps=10", "profile.steps=[9,9]"],
    "stop at the end": ["steps=10", "stop_after=10"],
    "faithfulness alone": ["loss.recon.stochastic=null", "loss.recon.adversarial=null"],
    "no penalties": ["loss.minimality=null", "loss.frequency=null"],
    "constant by one knot": ["optim.ci_fn.lr={max: 1, knots: [{at: 0, frac: 0.5}]}"],
    "coefficient scheduled to 0": [
        "loss.recon.adversarial.coeff={max: 1, knots: [{at: 0, frac: 1}, {at: 1, frac: 0}]}"
    ],
    "two of a kind": ["+eval.metrics.l0_half={kind: l0, threshold: 0.5}"],
    "muon without delta": ["optim=muon", "ablation=no_delta"],
}


@pytest.mark.parametrize("overrides", ALLOWED.values(), ids=ALLOWED.keys())
def test_allowed(overrides: list[str]):
    compose(overrides)


def test_reference_count_is_said_aloud():
    """Case 8: the default follows the batch; another value is a warning with both numbers."""
    assert load.warnings_for(compose()) == []
    same = compose(["data.batch_size=4", "data.seq_len=8", "loss.frequency.reference_count=32"])
    assert load.warnings_for(same) == []
    (warning,) = load.warnings_for(
        compose(["data.batch_size=4", "data.seq_len=8", "loss.frequency.reference_count=2048"])
    )
    assert "reference_count=2048" in warning and "= 32" in warning


def test_keep_every_off_the_cadence_is_said_aloud():
    assert load.warnings_for(compose(["checkpoint.every=100", "checkpoint.keep_every=1000"])) == []
    (warning,) = load.warnings_for(compose(["checkpoint.every=100", "checkpoint.keep_every=250"]))
    assert "keep_every=250" in warning


def test_a_best_that_is_rarely_known_is_said_aloud():
    assert load.warnings_for(compose(["checkpoint.keep_best=eval/kl_ci", "checkpoint.every=450"])) == []
    (warning,) = load.warnings_for(compose(["checkpoint.keep_best=eval/kl_ci", "checkpoint.every=300"]))
    assert "eval.every=225" in warning and "checkpoint.every=300" in warning
    (warning,) = load.warnings_for(
        compose(["checkpoint.keep_best=loss/total", "checkpoint.every=15", "logger.every=10"])
    )
    assert "logger.every=10" in warning
