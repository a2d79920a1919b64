"""decomp/verbs/resume.py and report.py: DESIGN 5, case 43."""

from __future__ import annotations

import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_runs import draw_nothing
from fake_trainer import FakeTrainer

from decomp import loop
from decomp.config.compose import Command
from decomp.config.errors import UserError
from decomp.folder import create, read_config
from decomp.lock import RunLock
from decomp.logger import read_metrics
from decomp.manifest import step_folders
from decomp.verbs import report, resume

STORED = Path(__file__).with_name("stored_configs")


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
    draw_nothing(monkeypatch)
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
        ("seed=1", r"seed +0 +1"),
        ("sites=mlp", r"sites\.kinds +all +mlp"),
        ("+loss.recon.more={coeff: 1, source: {kind: uniform}}", r"loss\.recon\.more +nothing +\{"),
    ],
)
def test_what_may_not_change_is_refused_with_both_values(folder: Path, text: str, told: str) -> None:
    head, row, instead = _refused(folder, text).splitlines()
    assert head.split() == ["may", "not", "change", "the", "run", "has", "given", "is"]
    assert re.fullmatch(told + ".*", row)
    assert instead.endswith(f"init_from={folder}")


def test_every_difference_is_listed_at_once(folder: Path) -> None:
    """In one table, as wide as its cells; what may change is not in it."""
    head, *rows, _ = _refused(folder, "data.batch_size=300", "seed=1", "steps=9", "logger.every=3").splitlines()
    assert [row.split() for row in rows] == [["seed", "0", "1"], ["data.batch_size", "2", "300"]]
    assert {row.rindex(row.split()[-1]) for row in rows} == {head.index("given is")}


def test_what_may_change(folder: Path) -> None:
    """DESIGN 5; a group override replaces its subtree."""
    texts = ("checkpoint.every=2", "mesh=auto", "placement=zero1", "target.path=/moved", "stop_after=7")
    assert resume.main(_command("resume", f"run={folder}", *texts)) == 0
    stored = read_config(folder)
    assert (stored.mesh.auto, stored.placement.components, stored.checkpoint.every) == (True, "zero1", 2)
    cfg = resume.changed(_command("resume", f"run={folder}", "checkpoint=default"), stored, folder)
    assert (cfg.checkpoint.every, cfg.mesh.auto) == (4, True)  # the recipe's own


def test_comments_and_the_order_of_keys_never_matter(folder: Path) -> None:
    """Case 27."""
    stored = read_config(folder)
    data = yaml.safe_load((folder / "config.yaml").read_text())
    turned = yaml.safe_dump(dict(reversed(data.items())), default_flow_style=True, sort_keys=False)
    (folder / "config.yaml").write_text("# the one that worked\n" + turned.replace("seed: 0", "seed: 0x0"))
    assert read_config(folder) == stored
    assert resume.main(_command("resume", f"run={folder}")) == 0


@pytest.mark.parametrize("file", sorted(STORED.glob("*.yaml")), ids=lambda f: f.stem)
def test_a_config_of_an_older_version_is_gone_on_with(folder: Path, file: Path) -> None:
    """Case 27: tests/stored_configs holds config.yaml as past versions wrote it, by commit."""
    (folder / "config.yaml").write_text(file.read_text())
    cfg = read_config(folder)
    command = _command("resume", f"run={folder}", "logger.every=7")
    assert resume.changed(command, cfg, folder) == cfg.model_copy(
        update={"stop_after": None, "logger": cfg.logger.model_copy(update={"every": 7})}
    )


def test_a_moved_target_is_known_by_its_content(folder: Path) -> None:
    """The path is free, the weights are not: what does not fit leaves the stored config as it was."""
    before = (folder / "config.yaml").read_bytes(), (folder / "overrides.txt").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeTrainer, "target_hash", lambda self: f"hash of {self.cfg.target.path}")
        with pytest.raises(
            UserError, match=r"target is target-1 in the checkpoint, hash of /moved here: give target.pa"
        ):
            resume.main(_command("resume", f"run={folder}", "target.path=/moved"))
    assert ((folder / "config.yaml").read_bytes(), (folder / "overrides.txt").read_bytes()) == before
    assert resume.main(_command("resume", f"run={folder}", "target=llama", "target.path=/moved")) == 0
    assert read_config(folder).target.path == "/moved"


# ---------------------------------------------------------------- more steps
def _steps(folder: Path) -> tuple[int, int | None]:
    cfg = read_config(folder)
    return cfg.steps, cfg.schedule_steps


def test_more_steps_extend_a_stopped_and_a_complete_run(folder: Path, capsys: Any) -> None:
    """DESIGN 5: the table and the report are written again at the new end."""
    assert resume.main(_command("resume", f"run={folder}", "steps=10")) == 0
    assert _steps(folder) == (10, 8)
    assert resume.main(_command("resume", f"run={folder}", "steps=14", "extend=stretch")) == 0
    assert _steps(folder) == (14, None)
    said = capsys.readouterr().out
    assert "final evaluation after 10 updates" in said and "final evaluation after 14 updates" in said
    assert "14 updates" in (folder / "report.html").read_text()
    assert [r["step"] for r in read_metrics(folder) if "loss/total" in r] == [*range(1, 15)]
    assert resume.main(_command("resume", f"run={folder}", "steps=14", "extend=stretch")) == 0
    assert "complete, all 14 updates are done" in capsys.readouterr().out


@pytest.mark.parametrize(
    "texts, told",
    [
        (("steps=6",), "steps=6: 6 updates are done already: give more than 8 to extend"),
        (("extend=hold",), "extend=hold: extends nothing; give steps=N with N above 8"),
    ],
)
def test_steps_that_extend_nothing_are_one_line(folder: Path, texts: tuple[str, ...], told: str) -> None:
    assert _refused(folder, *texts) == told


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
