"""decomp/verbs/migrate.py and export.py: what a person types, and what is answered."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange_source import bits, command, factors, frozen, orbax, safetensors, same, target

import decomp
from decomp import manifest
from decomp.__main__ import main as cli
from decomp.config import load
from decomp.config.compose import Command, conf_dir
from decomp.config.errors import UserError
from decomp.verbs import export, migrate, resume
from decomp.verbs.values import flag, positive, whole

FORMAT_1 = Path(__file__).parent / "formats" / "1" / "run"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def migrated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("run")
    src = safetensors(tmp / "old.safetensors", factors())
    assert migrate.main(command(src, tmp / "run", model, "step=30")) == 0
    return tmp / "run"


def refused(module: Any, *texts: str) -> str:
    with pytest.raises(UserError) as error:
        module.main(Command(module.__name__.rpartition(".")[2], texts))
    assert "\n" not in str(error.value)
    return str(error.value)


def answer(module: Any, overrides: tuple[str, ...] = (), **options: Any) -> str:
    """As ``refused``, without the half second that Hydra takes for each command."""
    defaults = load.read_yaml(conf_dir() / "verb" / f"{module.__name__.rpartition('.')[2]}.yaml")
    typed = types.SimpleNamespace(options=defaults | options, overrides=overrides)
    with pytest.raises(UserError) as error:
        module.main(typed)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_command_line_there_and_back(
    migrated: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["decomp", "export", f"run={migrated}"])
    assert cli() == 0
    out = migrated / "export" / "30"
    assert f"{out}: step 30, 6 sites" in capsys.readouterr().out
    typed = ["migrate", f"src={out}", f"dst={tmp_path / 'back'}", "target=llama", f"target.path={model}"]
    monkeypatch.setattr(sys, "argv", ["decomp", *typed])
    assert cli() == 0
    assert "6 arrays, each read back from both sides, bit for bit the same" in capsys.readouterr().out
    assert same(bits(decomp.open_run(tmp_path / "back")), factors())
    assert cli() == 0
    assert "holds this migration already, whole and verified" in capsys.readouterr().out


def test_dry_run_says_what_would_be_done_and_writes_nothing(model: Path, tmp_path: Path, capsys: Any) -> None:
    src = orbax(tmp_path / "tree", factors())
    before = frozen(tmp_path)
    assert migrate.main(command(src, tmp_path / "run", model, "dry_run=true")) == 0
    said = capsys.readouterr().out
    for part in (
        f"source: {src} (orbax), 12 factors; 1 other tensors are passed over",
        "6 sites in 3 stack groups, 52 components",
        "8x12_C10: 2 x [8, 12], C 10 (up_proj)",
        "sites: layers (1, 2), kinds (k_proj, up_proj, down_proj), C {k_proj: 6, up_proj: 10, down_proj: 10}",
        "array: decomposition/components/8x12_C10/V [2, 8, 10] float32, 640 bytes",
        "in all: 3.97 kB; components alone: no CI function, no progress",
        f"dry_run=true: {tmp_path / 'run'} would be written, step 0; nothing is",
    ):
        assert part in said
    assert frozen(tmp_path) == before and {p.name for p in tmp_path.iterdir()} == {"tree"}


def test_a_migrated_run_cannot_be_resumed_but_begun_from(migrated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before its target is loaded; by the checkpoint too, where it is met later."""
    building = types.ModuleType("decomp.build")
    building.build = lambda _: pytest.fail("the target was loaded")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "decomp.build", building)
    before = frozen(migrated)
    assert refused(resume, f"run={migrated}").endswith(f"start a run from it with init_from={migrated}")
    assert frozen(migrated) == before
    step = migrated / "checkpoints" / "30"
    stored = manifest.read_manifest(step)
    with pytest.raises(UserError, match=rf"no progress.*start a run from it with init_from={migrated}$"):
        manifest.refuse_other(step, stored, stored["identity"], ({}, {}))


def test_mistakes_of_migrate_are_one_line(model: Path, tmp_path: Path) -> None:
    src = safetensors(tmp_path / "old.safetensors", factors())
    (tmp_path / "file").write_text("x")
    fit = (f"src={src}", "target=llama", f"target.path={model}")
    assert refused(migrate, "src=x") == "dst: is required; give dst=..."
    assert "choose another folder with dst=..." in refused(migrate, *fit, f"dst={tmp_path}/file/run")
    assert "target.path: is required" in refused(migrate, f"src={src}", f"dst={tmp_path}/run", "target=llama8b")
    assert f"dst={model}: exists already" in refused(migrate, *fit, f"dst={model}")
    assert "no such file or folder" in refused(migrate, "src=nowhere", f"dst={tmp_path}/run")
    assert "step=-1: must be a whole number" in answer(migrate, src=src, dst=tmp_path / "run", step="-1")
    assert "dry_run=1: must be true or false" in answer(migrate, src=src, dst=tmp_path / "run", dry_run=1)
    assert not (tmp_path / "run").exists()


def test_another_targets_factors_are_refused_line_by_line(tmp_path: Path) -> None:
    src = safetensors(tmp_path / "old.safetensors", factors())
    with pytest.raises(UserError) as error:
        migrate.main(Command("migrate", (f"src={src}", f"dst={tmp_path}/run", "target=pycode")))
    lines = str(error.value).splitlines()
    assert len(lines) == 6 and lines[-1] == f"src={src}: and 1 more"
    assert "has V [8, 6] and U [6, 8]; the target's matrix needs [64, C], [C, 32]" in lines[0]


def test_nothing_is_written_inside_the_source(model: Path, tmp_path: Path) -> None:
    src = orbax(tmp_path / "tree", factors())
    for dst in (src, src / "new", src / ".." / "tree" / "new"):
        assert "lies inside src, where nothing is written" in answer(migrate, src=src, dst=dst)


def test_a_run_folder_brings_its_own_config(tmp_path: Path) -> None:
    assert "brings its own config" in answer(migrate, ("seed=3",), src=FORMAT_1, dst=tmp_path / "new")
    assert "has the present format 1 already" in answer(migrate, src=FORMAT_1, dst=tmp_path / "new")


def test_mistakes_of_export_are_one_line(migrated: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "step=two: must be a whole number" in refused(export, f"run={migrated}", "step=two")
    assert "no checkpoint of step 7; there are 30" in refused(export, f"run={migrated}", "step=7")
    assert "no such format; there is safetensors" in answer(export, run=migrated, format="gguf")
    assert "takes run, step, out, format and shard_gb only" in answer(export, ("seed=3",), run=migrated)
    assert "shard_gb=0: must be a number above 0" in answer(export, run=migrated, shard_gb=0)
    assert "not a run folder" in answer(export, run=tmp_path)
    assert "no such folder" in answer(export, run=tmp_path / "nothing")
    assert "choose another folder with out=..." in answer(export, run=migrated, out=tmp_path / "file" / "out")
    assert f"out={migrated}: exists already" in answer(export, run=migrated, out=migrated)


def test_values() -> None:
    assert whole("n", None) is None and whole("n", "3") == 3 and whole("n", 0) == 0
    assert flag("f", True) is True and positive("x", 2) == 2.0
    for bad in ("-1", "1.5", True, "", "²"):
        with pytest.raises(UserError, match=r"^n="):
            whole("n", bad)
    for bad in (0, -1, True, "many", float("inf"), float("nan"), np.inf):
        with pytest.raises(UserError, match=r"^x="):
            positive("x", bad)
