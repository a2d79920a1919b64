"""From what is typed to the config: one line for a mistake, text stays text, one key changes one key (cases 1-5)."""

from __future__ import annotations

import pytest

from decomp.config import compose as compose_module
from decomp.config import load, overrides
from decomp.config.compose import Command, compose
from decomp.config.errors import UserError
from decomp.config.schema import Curve, FreshPgdSource, Lp, Muon


def refusal(*texts: str, verb: str = "run") -> str:
    with pytest.raises(UserError) as error:
        Command(verb, texts).config()
    return str(error.value)


MISTAKES = {
    "mehs=dp8": "no such key mehs; did you mean mesh?",
    "mesh=dp9": "no such option of mesh; did you mean dp8?",
    "experiment=nope": "no such option of experiment; (valid: ",
    "experiment=pycod": "did you mean pycode?",
    "optim.compnents.lr=1": "no compnents in optim; did you mean components?",
    "optim.components.lrr=1": "no such key lrr; did you mean lr?",
    "loss.recon.stochastc.coeff=1": "no stochastc in loss.recon; did you mean stochastic?",
    "loss.minimality.penalty.gama=1": "no such key gama; did you mean gamma?",
    "+mehs.x=1": "no such key mehs; did you mean mesh?",
    "~mehs": "no such key mehs; did you mean mesh?",
    "++data.batchsize=3": "no such key batchsize; did you mean batch_size?",
    "mesh=null": "mesh= takes an option (auto, cpu8",
    "mesh={fsdp: 2}": "mesh= takes an option (auto, cpu8",
    "verb=resume": "the verb is the first word: decomp resume",
    "seed": "is no key=value; give seed=...",
    "resume": "a verb is the first word: decomp resume ...",
    "seed=0,1": "several values need -m (decomp -m seed=0,1)",
    "seed=range(3)": "several values need -m",
    "optim.components.match.0=x": "optim.components.match is a list",
    "optim.components.lr.knots[0].frac=2": "optim.components.lr.knots is a list",
    "seed=[1": "cannot be read; write key=value",
    "seed=${seeed}": "Interpolation key 'seeed' not found",
    "loss.recon=[1]": "loss.recon: ",
    "hydra.foo=1": "Key 'foo' not in 'HydraConf'",
    "=3": "is no key=value",
}


@pytest.mark.parametrize(("text", "wanted"), MISTAKES.items(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line(text: str, wanted: str):
    said = refusal(text)
    assert "\n" not in said
    assert wanted in said


def test_mistakes_in_names_come_together():
    said = refusal("mehs=dp8", "mesh=dp9", "seed=1")
    assert [line.partition(":")[0] for line in said.splitlines()] == ["mehs=dp8", "mesh=dp9"]


def test_full_error_shows_what_hydra_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(Exception, match="seeed") as error:
        compose(["seed=${seeed}"])
    assert not isinstance(error.value, UserError)


# ---------------------------------------------------------------- case 3
@pytest.mark.parametrize(
    "name", ["1e5", "010", "12e345", "true", "1_000", "0x10", "1.50", "nan", "a b", "a,b", "[a]", "a=b", "it's", "-5"]
)
def test_text_stays_text(name: str):
    cfg = compose([f"output_dir={name}", f"target.path={name}"])
    assert (cfg.output_dir, cfg.target.path) == (name, name)
    assert load.run_config(load.to_dict(cfg)) == cfg


def test_quoted_text_is_unquoted_once():
    assert compose(["output_dir='1e5'"]).output_dir == "1e5"
    assert compose(['output_dir="a b"']).output_dir == "a b"


def test_a_text_list_takes_one_word():
    group = compose(["optim.components.match=010"]).optim["components"]
    assert group is not None and group.match == ("010",)


def test_an_option_named_like_a_number(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "1e5.yaml").write_text("# @package _global_\nsteps: 7\n")
    cfg = Command("run", ("experiment=1e5",), (tmp_path,)).config()
    assert (cfg.experiment, cfg.steps) == ("1e5", 7)


def test_a_number_in_a_text_list_is_refused_not_changed():
    assert refusal("sites.kinds=[q_proj,1e5]") == "sites.kinds[1]=100000.0: must be text (quote it)"
    assert compose(["sites.kinds=[q_proj,'1e5']"]).sites.kinds == ("q_proj", "1e5")


def test_verb_options_stay_text():
    assert Command("resume", ("run=12e345",)).options["run"] == "12e345"


# ---------------------------------------------------------------- case 4
def test_one_key_changes_one_key():
    before, after = load.to_dict(compose()), load.to_dict(compose(["loss.recon.stochastic.coeff=0.25"]))
    assert after["loss"]["recon"]["stochastic"].pop("coeff") == 0.25
    before["loss"]["recon"]["stochastic"].pop("coeff")
    assert before == after


def test_a_term_set_to_null_or_deleted_is_absent():
    assert compose(["loss.recon.stochastic=null"]).loss.recon["stochastic"] is None
    assert "stochastic" not in compose(["~loss.recon.stochastic"]).loss.recon


def test_a_new_term_is_added_on_purpose():
    cfg = compose(["+loss.recon.second={coeff: 0.5, source: {kind: constant}}"])
    assert set(cfg.loss.recon) == {"stochastic", "adversarial", "second"}


def test_a_number_replaces_a_schedule_and_back():
    assert compose(["optim.components.lr=3e-4"]).optim["components"].lr == 3e-4  # type: ignore[union-attr]
    curve = compose(["optim.components.lr.max=3e-4"]).optim["components"].lr  # type: ignore[union-attr]
    assert isinstance(curve, Curve) and curve.max == 3e-4 and len(curve.knots) > 1


def test_fields_that_no_yaml_spells_out_can_be_set():
    cfg = compose(["sites.C.down_proj=128", "loss.recon.stochastic.hidden={coeff: 1, captures: [residual]}"])
    assert cfg.sites.C == {"down_proj": 128}


def test_another_kind_replaces_its_section():
    cfg = compose(["loss.minimality.penalty.kind=lp", "loss.minimality.penalty.p=0.9"])
    assert cfg.loss.minimality.penalty == Lp(p=0.9)  # type: ignore[union-attr]
    cfg = compose(["loss.recon.adversarial.source={kind: fresh_pgd, steps: 3}"])
    assert cfg.loss.recon["adversarial"].source == FreshPgdSource(steps=3, shape="bsc")  # type: ignore[union-attr]


# ---------------------------------------------------------------- recipes
def test_ablations_change_what_they_name():
    assert compose(["ablation=no_adversary"]).loss.recon["adversarial"] is None
    assert compose(["ablation=no_delta"]).loss.delta is False
    assert compose(["ablation=no_frequency"]).loss.frequency is None
    assert isinstance(compose(["ablation=lp"]).loss.minimality.penalty, Lp)  # type: ignore[union-attr]
    assert isinstance(compose(["ablation=muon"]).optim["components"], Muon)
    adversary = compose(["ablation=fresh_pgd"]).loss.recon["adversarial"]
    assert adversary is not None and isinstance(adversary.source, FreshPgdSource)
    assert load.to_dict(compose(["ablation=none"])) == load.to_dict(compose())


def test_what_is_typed_wins_over_recipes():
    cfg = compose(["experiment=smoke", "ablation=muon", "steps=5", "optim=adamw", "data.batch_size=3"])
    assert (cfg.steps, cfg.data.batch_size) == (5, 3)
    assert not isinstance(cfg.optim["components"], Muon)


def test_experiment_names_itself():
    assert compose(["experiment=smoke"]).experiment == "smoke"


# ---------------------------------------------------------------- verbs
def test_a_verb_keeps_its_own_keys_apart():
    command = Command("resume", ("run=outputs/pycode/x", "steps=200", "mesh=dp8"))
    assert command.options["run"] == "outputs/pycode/x"
    assert command.overrides == ("steps=200", "mesh=dp8")
    assert command.config().steps == 200


def test_a_required_option_is_asked_for():
    with pytest.raises(UserError, match=r"^run: is required; give run=...$"):
        _ = Command("resume").options


def test_a_mistyped_option_is_named():
    assert "no such key rnu; did you mean run?" in refusal("rnu=x", verb="resume")


def test_a_nested_option_is_checked():
    assert "no such key stps; did you mean steps?" in refusal("train.stps=3", verb="pretrain")
    assert "out has no keys of its own" in refusal("out.x=3", verb="pretrain")
    options = Command("pretrain", ("train.steps=3", "out=010", "docs=1e5")).options
    assert (options["train"]["steps"], options["out"], options["docs"]) == (3, "010", "1e5")


# ---------------------------------------------------------------- resume: a stored config and what is typed
@pytest.fixture
def stored() -> dict:
    return load.to_dict(compose(["steps=100", "mesh.fsdp=2", "loss.minimality.coeff=0.5", "eval.every=7"]))


def again(stored: dict, *texts: str):
    return Command("resume", ("run=x", *texts)).recompose(stored)


def test_recompose_without_overrides_is_the_stored_config(stored: dict):
    assert load.to_dict(again(stored)) == stored


def test_recompose_sets_values(stored: dict):
    cfg = again(stored, "steps=200", "sites.C.down_proj=64", "~loss.recon.stochastic")
    changed = load.to_dict(cfg)
    assert (changed.pop("steps"), changed["sites"].pop("C")) == (200, {"down_proj": 64})
    assert changed["loss"]["recon"].keys() == {"adversarial"}
    assert cfg.loss.minimality.coeff == 0.5  # type: ignore[union-attr]


def test_recompose_replaces_a_group(stored: dict):
    cfg = again(stored, "mesh=dp32", "mesh.tp=2")
    assert (cfg.mesh.replicate, cfg.mesh.fsdp, cfg.mesh.tp) == (4, 8, 2)
    assert cfg.eval.every == 7


def test_recompose_refuses_recipes(stored: dict):
    with pytest.raises(UserError, match="experiment=smoke, ablation=lp: a stored run keeps its recipe"):
        again(stored, "experiment=smoke", "ablation=lp")


def test_recompose_names_what_is_not_there(stored: dict):
    with pytest.raises(UserError, match="no such option of mesh; did you mean dp8"):
        again(stored, "mesh=dp9")
    with pytest.raises(UserError, match="did you mean stochastic"):
        again(stored, "loss.recon.stochastc.coeff=1")


# ---------------------------------------------------------------- sweeps
def test_points_are_the_product_of_the_values():
    words = Command().vocabulary
    assert list(overrides.points([], words)) == [[]]
    points = list(overrides.points(["seed=0,1", "sites=mlp,full", "steps=5"], words))
    assert points == [[f"seed={s}", f"sites={g}", "steps=5"] for s in (0, 1) for g in ("mlp", "full")]


def test_points_keep_text_and_structure():
    words = Command().vocabulary
    assert list(overrides.points(["output_dir=1e5,010"], words)) == [["output_dir=1e5"], ["output_dir=010"]]
    assert list(overrides.points(["sites.layers=[0,1],[2]"], words)) == [["sites.layers=[0,1]"], ["sites.layers=[2]"]]
    assert list(overrides.points(["seed=range(2)"], words)) == [["seed=0"], ["seed=1"]]
    assert list(overrides.points(["placement=glob(z*)"], words)) == [["placement=zero1"]]


def test_conf_is_found_from_anywhere(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert (compose_module.conf_dir() / "config.yaml").is_file()
    compose()
    assert list(tmp_path.iterdir()) == []
