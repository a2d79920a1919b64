"""conf/ against the schema: every option composes, nothing is hidden, every field is read (cases 6, 7)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from decomp.config import fields, schema
from decomp.config.compose import Command, compose, conf_dir, group_options, verbs
from decomp.config.errors import UserError
from decomp.config.load import to_dict

ROOT = Path(__file__).resolve().parents[1]
GROUPS = {name: options for name, options in group_options().items() if name != "verb"}
OPTIONS = [(group, option) for group, options in GROUPS.items() for option in options]

# Options that need a companion: what is typed with them, and what is said without it (case 7).
COMPANIONS = {
    ("target", "llama"): (["target.path=/models/some-llama"], "target.path: is required; give target.path=..."),
}


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=[f"{g}={o}" for g, o in OPTIONS])
def test_every_option_composes(group: str, option: str):
    companions, refusal = COMPANIONS.get((group, option), ([], None))
    compose([f"{group}={option}", *companions])
    if refusal is not None:
        with pytest.raises(UserError) as error:
            compose([f"{group}={option}"])
        assert str(error.value) == refusal


# Options that need more than the shipped target and one device can give, and what building them says.
NEEDS_DEVICES = {
    "dp8": "1x8x1 needs 8",
    "dp32": "4x8x1 needs 32",
    "dp64": "8x8x1 needs 64",
    "dp128": "16x8x1 needs 128",
}
NEEDS_DEVICES |= {"dp32tp2": "4x4x2 needs 32", "cpu8": "2x4x1 needs 8"}


def test_sites_that_the_target_lacks_name_its_layers():
    from decomp.build import site_table
    from decomp.target.shape import LlamaShape

    shape = LlamaShape(4, 64, 4, 2, 16, 96, 256, True)
    for option in GROUPS["sites"]:
        cfg = compose([f"sites={option}"])
        if option != "l18":
            assert site_table(cfg, shape).sites
            continue
        with pytest.raises(UserError) as error:
            site_table(cfg, shape)
        assert "\n" not in str(error.value)
        assert "18" in str(error.value) and re.search(r"0\D+3", str(error.value)), "names the layers there are"


@pytest.mark.parametrize("option", GROUPS["mesh"])
def test_meshes_that_the_devices_lack_name_the_ways_on(option: str):
    from decomp.mesh import build_mesh

    cfg = compose([f"mesh={option}"]).mesh
    if option not in NEEDS_DEVICES:
        build_mesh(cfg)
        return
    with pytest.raises(UserError) as error:
        build_mesh(cfg)
    assert NEEDS_DEVICES[option] in str(error.value) and "\n" not in str(error.value)
    if option != "cpu8":
        for way in ("1 ", "plan", "launcher=slurm", "mesh.simulate=true"):
            assert way in str(error.value)


# An attack shared by the batch needs all of it at once; this recipe sees it window by window.
REFUSED = {
    ("llama8b_l18", "fresh_pgd"): (["data.microbatches=1"], r"^loss.recon.adversarial.source.shape: c is shared")
}


@pytest.mark.parametrize("experiment", GROUPS["experiment"])
@pytest.mark.parametrize("ablation", GROUPS["ablation"])
def test_every_ablation_of_every_experiment_composes(experiment: str, ablation: str):
    texts = [f"experiment={experiment}", f"ablation={ablation}"]
    companion, refusal = REFUSED.get((experiment, ablation), ([], None))
    compose([*texts, *companion])
    if refusal is not None:
        with pytest.raises(UserError, match=refusal):
            compose(texts)


@pytest.mark.parametrize("experiment", GROUPS["experiment"])
def test_experiments_take_every_optimizer(experiment: str):
    """An experiment sets values that every option of a group has."""
    for option in GROUPS["optim"]:
        compose([f"experiment={experiment}", f"optim={option}"])


def test_the_defaults_list_is_the_table_of_contents():
    defaults = yaml.safe_load((conf_dir() / "config.yaml").read_text())["defaults"]
    listed = [name for entry in defaults if isinstance(entry, dict) for name in entry]
    assert sorted(listed) == sorted([*GROUPS, "verb"])
    sections = set(schema.RunConfig.model_fields) - {
        "seed",
        "steps",
        "schedule_steps",
        "stop_after",
        "max_skipped",
        "init_from",
        "init_from_step",
        "output_dir",
        "profile",
    }
    assert sections == set(GROUPS) - {"ablation"}


@pytest.mark.parametrize("option", [*(f"optim={o}" for o in GROUPS["optim"]), "launcher=slurm"])
def test_the_yaml_hides_no_field(option: str):
    """`decomp --cfg job` shows every value there is: what the schema has by default stands in conf/ as well."""
    command = Command("run", (option,))
    assert missing_keys(to_dict(command.config()), command._composed(command.typed)) == []


def missing_keys(whole: object, shown: object, path: str = "") -> list[str]:
    if not isinstance(whole, dict):
        return []
    assert isinstance(shown, dict)
    out = []
    for key, value in whole.items():
        if key not in shown:
            out.append(f"{path}{key}")
        else:
            out += missing_keys(value, shown[key], f"{path}{key}.")
    # Knots and metrics have few fields, and a row of them is read more easily without those at their default.
    return [key for key in out if not key.startswith("eval.metrics.")]


def test_every_verb_has_a_module_and_keys_of_its_own():
    from importlib.util import find_spec

    for verb in verbs():
        assert find_spec(f"decomp.verbs.{verb}"), f"conf/verb/{verb}.yaml without decomp/verbs/{verb}.py"
        keys = set(Command(verb).vocabulary.options)
        assert not keys & set(schema.RunConfig.model_fields), f"{verb}: its keys hide those of the config"
        assert not keys & set(GROUPS), f"{verb}: its keys hide groups"


def test_help_names_every_verb():
    template = yaml.safe_load((conf_dir() / "config.yaml").read_text())["hydra"]["help"]["template"]
    assert [verb for verb in verbs() if not re.search(rf"^ +{verb} ", template, re.MULTILINE)] == []


def test_conf_names_its_keys_once():
    """A key that stands twice in a YAML mapping silently loses one of its values."""
    for file in conf_dir().rglob("*.yaml"):
        node = yaml.compose(file.read_text())
        for mapping in walk(node):
            keys = [key.value for key, _ in mapping.value]
            assert len(keys) == len(set(keys)), f"{file}: {keys}"


def walk(node):
    if isinstance(node, yaml.MappingNode):
        yield node
        for _, value in node.value:
            yield from walk(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from walk(value)


# ---------------------------------------------------------------- case 6
PENDING: set[tuple[str, str]] = set()


def schema_models() -> list[type[schema.Model]]:
    found = [m for m in vars(schema).values() if isinstance(m, type) and issubclass(m, schema.Model)]
    return [m for m in found if m is not schema.Model]


def reads() -> set[str]:
    """Every attribute that code outside decomp/config reads."""
    out = set()
    for file in [*(ROOT / "decomp").rglob("*.py"), *(ROOT / "launchers").glob("*.py")]:
        if file.parent != ROOT / "decomp" / "config":
            tree = ast.parse(file.read_text())
            out |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    return out


@pytest.mark.parametrize("model", schema_models(), ids=lambda m: m.__name__)
def test_every_field_is_read(model: type[schema.Model]):
    """Case 6. ``kind`` is read by a match on the class; the rest by name, somewhere outside decomp/config."""
    unread = {name for name in model.model_fields if name != "kind"} - reads()
    assert unread - {name for owner, name in PENDING if owner == model.__name__} == set()


@pytest.mark.parametrize("model", schema_models(), ids=lambda m: m.__name__)
def test_every_model_stands_in_the_config(model: type[schema.Model]):
    """A model that no path of RunConfig reaches is an option that is parsed and never used."""
    reached, todo = set(), [schema.RunConfig]
    while todo:
        here = todo.pop()
        if here not in reached:
            reached.add(here)
            for field in here.model_fields.values():
                for plain in fields.alternatives(field.annotation):
                    todo += [m for arg in (plain, *fields.get_args(plain)) for m in fields.models(arg)]
    assert model in reached
