"""decomp/verbs/resume.py and report.py: DESIGN 5, case 43."""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from fake_trainer import FakeTrainer

from decomp import loop
from decomp.config.compose import Command
from decomp.config.errors import UserError
from decomp.folder import create, read_config
from decomp.lock import RunLock
from decomp.manifest import step_folders
from decomp.verbs import report, resume


def _command(verb: str, *texts: str) -> Command:
    return Command(verb, texts)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shipped recipe's config, trained by the fake for 6 of 8 updates."""
    out = tmp_path_factory.mktemp("out")
    cfg = Command("run", ("experiment=smoke", "steps=8", "stop_after=6", f"output_dir={out}")).config()
    assert loop.start(cfg, ["experiment=smoke", "stop_after=6"], FakeTrainer) == 0
    (folder,) = (out / "smoke").iterdir()
    return folder


@pytest.fixture
def folder(stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, and the fake in the builder's place."""
    fake = types.ModuleType("decomp.build")
    fake.build = FakeTrainer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "decomp.build", fake)
    monkeypatch.setattr(loop.figures, "draw", lambda *_: iter(()))
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


def _refused(folder: Path, *texts: str) -> str:
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(UserError) as caught:
        resume.main(_command("resume", f"run={folder}", *texts))
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    return str(caught.value)


def test_goes_on_to_the_end_and_says_so_afterwards(folder: Path, capsys: Any) -> None:
    assert resume.main(_command("resume", f"run={folder}", "logger.every=3")) == 0
    assert step_folders(folder / "checkpoints")[-1] == 8
    stored = read_config(folder)
    assert stored.logger.every == 3 and stored.stop_after is None
    assert "logger.every=3" in (folder / "overrides.txt").read_text()
    capsys.readouterr()
    assert resume.main(_command("resume", f"run={folder}")) == 0
    assert "complete, all 8 updates are done" in capsys.readouterr().out


def test_stops_again_where_told(folder: Path) -> None:
    assert resume.main(_command("resume", f"run={folder}", "stop_after=7")) == 0
    assert step_folders(folder / "checkpoints")[-1] == 7
    assert "has 7 updates already" in _refused(folder, "stop_after=7")


@pytest.mark.parametrize(
    "text, told",
    [
        ("steps=9", "steps: the run has 8, given is 9"),
        ("seed=1", "seed: the run has 0, given is 1"),
        ("sites=mlp", "sites.kinds: the run has all, given is mlp"),
        ("data.batch_size=3", "data.batch_size: the run has"),
        ("+loss.recon.more={coeff: 1, source: {kind: uniform}}", "loss.recon.more: the run has nothing, given is"),
    ],
)
def test_what_may_not_change_is_refused_with_both_values(folder: Path, text: str, told: str) -> None:
    assert told in _refused(folder, text)


def test_every_difference_is_listed_at_once(folder: Path) -> None:
    lines = _refused(folder, "seed=1", "steps=9", "logger.every=3").splitlines()
    assert len(lines) == 3 and "logger" not in lines[0] + lines[1] and "may change" in lines[2]


def test_the_same_value_is_no_difference(folder: Path) -> None:
    assert resume.main(_command("resume", f"run={folder}", "steps=8", "seed=0")) == 0


@pytest.mark.parametrize("text", ["experiment=smoke", "ablation=none", "nonsense=1"])
def test_recipes_and_unknown_keys_are_refused(folder: Path, text: str) -> None:
    assert text.split("=")[0] in _refused(folder, text)


def test_folders_that_cannot_be_gone_on_from(folder: Path, tmp_path: Path) -> None:
    assert "no such folder" in _refused(tmp_path / "nothing")
    assert "not a run folder" in _refused(folder / "logs")
    assert f"did you mean {folder}" in _refused(tmp_path)
    shutil.rmtree(folder / "checkpoints")
    assert "no checkpoint to go on from: start again with: python -m decomp experiment=smoke" in _refused(folder)


def test_no_permission_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = resume.os.access
    monkeypatch.setattr(resume.os, "access", lambda path, mode: mode != resume.os.W_OK and real(path, mode))
    assert "no permission to write there" in _refused(folder)


def test_a_running_run_is_left_alone(folder: Path) -> None:
    """Case 43: the second writer learns who holds the folder, and config.yaml is as it was."""
    with RunLock(folder):
        assert "writes here since" in _refused(folder, "logger.every=3")


def test_a_damaged_config_is_one_line(folder: Path) -> None:
    (folder / "config.yaml").write_text("steps: [")
    assert "config.yaml" in _refused(folder) and "\n" not in _refused(folder)


def test_report_draws_again_and_takes_no_overrides(folder: Path, capsys: Any) -> None:
    assert report.main(_command("report", f"run={folder}")) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    with pytest.raises(UserError, match="steps=9: report takes"):
        report.main(_command("report", f"run={folder}", "steps=9"))
    with pytest.raises(UserError, match="not a run folder"):
        report.main(_command("report", f"run={folder / 'logs'}"))


def test_a_folder_without_config_is_created_by_nobody(folder: Path) -> None:
    cfg = read_config(folder).model_copy(update={"output_dir": str(folder.parent / "other")})
    assert read_config(create(cfg)) == cfg
