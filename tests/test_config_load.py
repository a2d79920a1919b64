"""The crossing: every problem at once, one line each, with path, value and fix (cases 3, 5)."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from decomp.config import load
from decomp.config.compose import compose
from decomp.config.errors import UserError
from decomp.config.schema import Lp, RunConfig, SmoothL0, UniformSource


@pytest.fixture(scope="module")
def shipped() -> RunConfig:
    return compose()


def data(cfg: RunConfig, **changes: Any) -> dict[str, Any]:
    """The config as dicts, with values set at dotted paths (``a__b``)."""
    out = copy.deepcopy(load.to_dict(cfg))
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = out
        for name in parents:
            node = node[name]
        node[last] = value
    return out


def lines(values: dict[str, Any]) -> list[str]:
    with pytest.raises(UserError) as error:
        load.run_config(values)
    return str(error.value).splitlines()


def test_round_trip(shipped: RunConfig):
    assert load.run_config(load.to_dict(shipped)) == shipped


@pytest.mark.parametrize(
    ("path", "value", "wanted"),
    [
        ("data__batchsize", 4, "data.batchsize=4: no such key; did you mean batch_size?"),
        ("data__batch_size", 0, "data.batch_size=0: must be above 0"),
        ("data__batch_size", "many", "data.batch_size='many': must be a whole number"),
        ("data__batch_size", 1.5, "data.batch_size=1.5: must be a whole number"),
        ("data__seq_len", 1, "data.seq_len=1: must be at least 2"),
        ("optim__components__lr", "abc", "optim.components.lr='abc': must be a number or a schedule {max, knots"),
        ("optim__components__lr", -1.0, "optim.components.lr=-1.0: must be at least 0"),
        ("optim__components__kind", "adam", "optim.components.kind='adam': no such kind; did you mean adamw?"),
        ("optim__components__betas", [0.9], "optim.components.betas[1]: is required"),
        ("optim__components__lr", {"max": 1.0, "knots": []}, "optim.components.lr.knots=[]: "),
        ("target", {"kind": "llama"}, "target.path: is required; give target.path=..."),
        ("target__path", 100000.0, "target.path=100000.0: must be text (quote it)"),
        ("placement__components", "onwer", "placement.components='onwer': no such option; did you mean owner?"),
        ("sites__layers", "..", "sites.layers='..': must be all or a list"),
        ("sites__layers", [0, -1], "sites.layers[1]=-1: must be at least 0"),
        ("sites__kinds", "mpl", "sites.kinds='mpl': must be all | attn | mlp or a list; did you mean mlp?"),
        ("sites__C", {"q_proj": 0}, "sites.C.q_proj=0: must be above 0"),
        ("loss__recon__stochastic__coeff", float("inf"), "loss.recon.stochastic.coeff=inf: "),
        ("loss__recon__stochastic__source", 5, "loss.recon.stochastic.source=5: must be a mapping of kind uniform |"),
        ("logger__progress", "perhaps", "logger.progress='perhaps': must be true or false"),
        ("mesh", None, "mesh=null: must be"),
    ],
)
def test_one_problem_is_one_line(shipped: RunConfig, path: str, value: Any, wanted: str):
    found = lines(data(shipped, **{path: value}))
    assert len(found) == 1, found
    assert found[0].startswith(wanted)


def test_all_problems_at_once_rules_included(shipped: RunConfig):
    """Types, unknown keys, missing keys and cross-field rules in one answer."""
    values = data(shipped, data__batch_size=15, data__microbatches=4, ci_fn__d_model=130, steps=0, data__seqlen=3)
    values["optim"]["components"]["lr"] = "abc"
    del values["target"]["path"]
    found = {line.partition(":")[0].partition("=")[0] for line in lines(values)}
    assert found == {
        "data.microbatches",
        "ci_fn.d_model",
        "steps",
        "data.seqlen",
        "optim.components.lr",
        "target.path",
    }


def test_a_rule_on_a_refused_value_stays_silent(shipped: RunConfig):
    """stop_after > steps says nothing while steps itself is refused."""
    assert len(lines(data(shipped, steps=-5, stop_after=10))) == 1


def test_unknown_key_of_another_kind_names_the_way_out(shipped: RunConfig):
    values = data(shipped)
    values["loss"]["minimality"]["penalty"]["p"] = 0.9
    path = "loss.minimality.penalty.p"
    assert lines(values) == [f"{path}=0.9: is no key of kind smooth_l0; take it out with ~{path}"]


def test_null_keys_of_another_kind_are_absent(shipped: RunConfig):
    """How an ablation changes a kind: YAML layers merge and cannot remove keys."""
    penalty = {"kind": "lp", "p": 0.9, "gamma": None}
    values = data(shipped, loss__minimality__penalty=penalty)
    assert load.run_config(values).loss.minimality.penalty == Lp(p=0.9)  # type: ignore[union-attr]
    penalty["gama"] = None
    assert "no such key" in lines(data(shipped, loss__minimality__penalty=penalty))[0]


def test_another_kind_that_was_typed_replaces_the_section(shipped: RunConfig):
    values = data(shipped)
    values["loss"]["recon"]["adversarial"]["source"]["kind"] = "uniform"
    path = ("loss", "recon", "adversarial", "source")
    term = load.run_config(values, {path: {"kind"}}).loss.recon["adversarial"]
    assert term is not None and term.source == UniformSource()


def test_a_typed_key_of_the_wrong_kind_is_not_dropped(shipped: RunConfig):
    values = data(shipped)
    values["loss"]["recon"]["adversarial"]["source"]["kind"] = "uniform"
    path = ("loss", "recon", "adversarial", "source")
    with pytest.raises(UserError, match="shape='bsc': is no key of kind uniform"):
        load.run_config(values, {path: {"kind", "shape"}})


def test_validation_does_not_change_its_input(shipped: RunConfig):
    values = data(shipped, steps=0)
    before = copy.deepcopy(values)
    lines(values)
    assert values == before


def test_config_is_immutable(shipped: RunConfig):
    with pytest.raises(ValueError, match="frozen"):
        shipped.steps = 3  # type: ignore[misc]


def test_default_penalty_is_smooth(shipped: RunConfig):
    """Case 13: L_p with p < 1 has no bounded slope at 0."""
    assert isinstance(shipped.loss.minimality.penalty, SmoothL0)  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "5"])
def test_a_broken_stored_config_is_one_line(tmp_path, text: str):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        load.read_yaml(tmp_path / "config.yaml")
    assert "\n" not in str(error.value) and "config.yaml" in str(error.value)


def test_a_missing_stored_config_is_one_line(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        load.read_yaml(tmp_path / "config.yaml")
