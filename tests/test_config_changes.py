"""decomp/config/changes.py: what makes it another run, and what more steps mean (DESIGN 5, case 27)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny

from decomp import schedule
from decomp.config import changes, load
from decomp.config.changes import differing, extended, refused
from decomp.config.errors import UserError
from decomp.config.schema import RunConfig

HALVED = {"max": 1.0, "knots": [{"at": 0.0, "frac": 1.0}, {"at": 1.0, "frac": 0.5}]}
ZERO = {"max": 1.0, "knots": [{"at": 0.0, "frac": 1.0}, {"at": 1.0, "frac": 0.0}]}


def config(**more: Any) -> RunConfig:
    return tiny.config(optim__components__lr=HALVED, **more)


def changed(path: str, value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config as a dict, and the same with another value."""
    old = load.to_dict(config())
    new = copy.deepcopy(old)
    *parents, last = path.split(".")
    node = new
    for name in parents:
        node = node[name]
    assert last not in node or node[last] != value
    node[last] = value
    return old, new


FREE = {
    "mesh.fsdp": 8, "placement.components": "zero1", "placement.on_ragged": "error", "launcher.kind": "slurm",
    "logger.every": 3, "eval.every": 7, "eval.metrics": {"l0": {"kind": "l0"}}, "checkpoint.every": 3,
    "checkpoint.keep_best": "eval/kl_ci", "profile.steps": [1, 2], "stop_after": 5, "max_skipped": 1,
    "target.path": "moved", "target.kind": "llama8b", "data.path": "moved", "data.kind": "tokens",
    "data.microbatches": 2, "loss.remat": True, "loss.kl_chunk": 7, "ci_fn.remat": True,
}  # fmt: skip
KEPT = {
    "seed": 1, "data.batch_size": 16, "data.seq_len": 5, "sites.kinds": "mlp", "sites.C": {}, "ci_fn.d_model": 16,
    "ci_fn.kind": "site_mlp", "loss.delta": False, "loss.recon.stochastic": None, "loss.recon.stochastic.coeff": 2.0,
    "loss.recon.more": {}, "loss.minimality.coeff": 1.0, "loss.faithfulness.warmup.steps": 9,
    "optim.components.lr": 1.0, "optim.components.kind": "muon", "precision.kind": "fp64", "experiment": "other",
    "output_dir": "elsewhere", "schedule_steps": 5, "init_from": "there", "init_from_step": 5,
}  # fmt: skip


@pytest.mark.parametrize("path", FREE)
def test_what_is_not_the_run_may_change(path: str) -> None:
    assert refused(*changed(path, FREE[path])) == []


@pytest.mark.parametrize("path", KEPT)
def test_what_is_the_run_may_not(path: str) -> None:
    found = refused(*changed(path, KEPT[path]))
    assert found and all(key == path or key.startswith(f"{path}.") for key, _, _ in found)


def test_every_section_of_the_config_is_judged() -> None:
    """A new key is part of the run until somebody says otherwise."""
    judged = {path.split(".")[0] for path in (*FREE, *KEPT)} | {"steps"}
    assert judged == set(RunConfig.model_fields)
    for path in changes.FREE:
        assert any(p == path or p.startswith(f"{path}.") for p in FREE), path


def test_both_values_and_absence_are_told() -> None:
    assert list(differing({"a": {"b": 1, "c": 2}}, {"a": {"b": 1.0, "d": 3}})) == [("a.c", 2, ...), ("a.d", ..., 3)]
    assert list(differing([1, 2], [1, 2])) == []


# ---------------------------------------------------------------- more steps
def longer(cfg: RunConfig, steps: int, how: str | None = None, done: int = 10) -> RunConfig:
    return extended(cfg, cfg.model_copy(update={"steps": steps}), how, done)


def rates(cfg: RunConfig) -> list[float]:
    group = cfg.optim["components"]
    assert group is not None
    return [float(schedule.value(group.lr, i, schedule.span(cfg))) for i in range(cfg.steps)]


def test_hold_keeps_every_value_and_the_last_one_afterwards() -> None:
    """SPEC T2: bit for bit the old curve up to the old end; also when it is held once more."""
    cfg = config()
    held = longer(cfg, 15)
    assert held == longer(cfg, 15, "hold") and (held.steps, held.schedule_steps) == (15, 10)
    assert rates(held) == rates(cfg) + [0.5] * 5
    assert rates(longer(held, 20)) == rates(cfg) + [0.5] * 10


def test_stretch_spans_the_new_steps() -> None:
    held = longer(config(), 15)
    for cfg in (longer(config(), 20, "stretch"), longer(held, 20, "stretch")):
        assert (cfg.steps, cfg.schedule_steps) == (20, None)
        assert rates(cfg) == rates(tiny.config(optim__components__lr=HALVED, steps=20))


@pytest.mark.parametrize("path", ["optim.ci_fn.lr", "loss.recon.adversarial.source.optim.lr"])
def test_a_learning_rate_is_not_held_at_0(path: str) -> None:
    cfg = load.run_config(changed(path, ZERO)[1])
    with pytest.raises(UserError) as error:
        longer(cfg, 15)
    told = f"extend=hold: {path} ends at 0, where 5 more updates would learn nothing"
    assert str(error.value) == f"{told}: extend=stretch spans all 15"
    assert longer(cfg, 15, "stretch").steps == 15


def test_a_coefficient_or_a_group_that_is_0_throughout_may_be_held_at_0() -> None:
    cfg = tiny.config(loss__minimality__coeff=ZERO, optim__ci_fn__lr=0.0)
    assert longer(cfg, 15).schedule_steps == 10


@pytest.mark.parametrize(
    ("steps", "how", "told"),
    [
        (9, None, "steps=9: the run has 10 and only grows: end it there with stop_after=9"),
        (6, None, "steps=6: 6 updates are done already: give more than 10 to extend"),
        (10, "hold", "extend=hold: extends nothing; give steps=N with N above 10"),
        (
            15,
            "longer",
            "extend=longer: no such way; extend=hold keeps the schedules, extend=stretch spans the new steps",
        ),
    ],
)
def test_what_extends_nothing_is_one_line(steps: int, how: str | None, told: str) -> None:
    with pytest.raises(UserError) as error:
        longer(config(), steps, how, done=6)
    assert str(error.value) == told


def test_the_same_line_typed_again_passes() -> None:
    """After a pre-emption: what it asks for is so already."""
    for how in ("hold", "stretch"):
        cfg = longer(config(), 15, how)
        assert longer(cfg, 15, how) == cfg
