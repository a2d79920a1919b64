"""decomp/folder.py: DESIGN 5, cases 1-3, 10, 41."""

from __future__ import annotations

import errno
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_trainer import config
from small_disk import fill, small_disk

from decomp import folder
from decomp.config.errors import UserError


def test_launches_in_the_same_second_get_a_folder_each(tmp_path: Path) -> None:
    """Cases 1 and 2: a name belongs to whoever made the folder, and is a number in no reader's eyes."""
    cfg = config(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: folder.mint(cfg), range(24)))
    assert len(set(made)) == 24
    assert all(path.parent == tmp_path / "fake" and path.is_dir() for path in made)
    assert all(re.fullmatch(r"\d{8}-\d{6}(-\d+)?", path.name) for path in made)


def test_a_taken_name_is_stepped_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder.time, "strftime", lambda *_: "20260101-000000")
    assert [folder.mint(config(tmp_path)).name for _ in range(3)] == [
        "20260101-000000",
        "20260101-000000-2",
        "20260101-000000-3",
    ]


def test_relative_output_dir_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 10."""
    monkeypatch.chdir(tmp_path)
    assert folder.mint(config("outputs")).is_relative_to(tmp_path / "outputs")


def test_create_writes_what_is_known_before_the_build(tmp_path: Path) -> None:
    made = folder.create(config(tmp_path), ["steps=20", "experiment='a b'"])
    assert folder.read_config(made) == config(tmp_path)
    assert (made / "overrides.txt").read_text().splitlines()[1:] == ["steps=20", "experiment='a b'"]
    assert folder.run_overrides(made) == """steps=20 'experiment='"'"'a b'"'"''"""
    assert len((made / "revision.txt").read_text().splitlines()) >= 2
    assert (made / "diff.patch").exists()
    assert {p.name for p in made.iterdir() if p.is_dir()} == {"checkpoints", "figures", "logs"}


@pytest.mark.parametrize(
    "name", ["1e5", "010", "12e345", "no", "null", "0x1F", "1_000", "~", "a: b", "#x", "é", ".inf"]
)
def test_names_stay_text(tmp_path: Path, name: str) -> None:
    """Case 3: what looks like a number to some YAML reader comes back as the text it was."""
    cfg = config(tmp_path, target__path=name)
    folder.write_config(tmp_path, cfg)
    assert folder.read_config(tmp_path) == cfg


def test_only_overrides_of_the_first_launch_start_it_again(tmp_path: Path) -> None:
    folder.record_launch(tmp_path, "run", ["steps=20"])
    folder.record_launch(tmp_path, "resume", ["stop_after=15"])
    assert folder.run_overrides(tmp_path) == "steps=20"


def test_output_dir_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    for cfg in (config(tmp_path / "out"), config(tmp_path / "out" / "deeper")):
        with pytest.raises(UserError, match=r"not a folder.*output_dir=") as caught:
            folder.mint(cfg)
        assert "\n" not in str(caught.value)


def test_read_only_output_dir(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "ro", "1m", "ro"),
        pytest.raises(UserError, match=r"ro.*Read-only file system.*output_dir="),
    ):
        folder.mint(config(tmp_path / "ro"))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_every_refusal_is_one_line_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(code, "x", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match=re.escape(str(tmp_path))) as caught:
        folder.mint(config(tmp_path))
    assert "\n" not in str(caught.value)


def test_full_disk_is_told_before_anything_is_built(tmp_path: Path) -> None:
    with small_disk(tmp_path / "full", "256k") as disk:
        (disk / "fake").mkdir()
        fill(disk)
        with pytest.raises(UserError, match="disk is full"):
            folder.check_output(config(disk))
        assert list((disk / "fake").iterdir()) == []


def test_a_full_disk_leaves_the_old_file_whole(tmp_path: Path) -> None:
    with small_disk(tmp_path / "full", "256k") as disk:
        (disk / "note.txt").write_text("old")
        fill(disk)
        with pytest.raises(UserError, match="disk is full"):
            folder.write_text(disk / "note.txt", "new" * 5000)
        assert (disk / "note.txt").read_text() == "old"
        assert sorted(p.name for p in disk.iterdir()) == ["ballast", "note.txt"]


def test_open_folder_says_what_is_wrong(tmp_path: Path) -> None:
    made = folder.create(config(tmp_path))
    assert folder.open_folder(made) == made
    with pytest.raises(UserError, match="no such folder"):
        folder.open_folder(tmp_path / "nothing")
    with pytest.raises(UserError, match=f"not a run folder.*did you mean .*{made.name}"):
        folder.open_folder(made.parent)
    with pytest.raises(UserError, match="not a run folder"):
        folder.open_folder(made / "logs")


@pytest.mark.parametrize("text", ["", "[1, 2]", "steps: [", "steps: 20"])
def test_a_config_that_is_none_is_one_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError):
        folder.read_config(tmp_path)


def test_checkout_is_the_package_s_own_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package in a virtual environment inside another repository does not report that repository."""
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", str(tmp_path)]
    package = tmp_path / "decomp"
    package.mkdir()
    (package / "folder.py").write_text("one\n")
    monkeypatch.setattr(folder, "__file__", str(package / "folder.py"))
    assert folder.checkout()[0].startswith("none")
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "other").write_text("x")
    subprocess.run([*git, "add", "other"], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    assert folder.checkout()[0].startswith("none")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "y"], check=True)
    revision, diff = folder.checkout()
    assert re.match(r"[0-9a-f]{40}\nclean", revision) and diff == ""
    (package / "folder.py").write_text("two\n")
    revision, diff = folder.checkout()
    assert "modified" in revision and "+two" in diff


def test_environment_copies_no_variable_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_something=1")
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    text = folder.environment(["0: cpu"])
    assert "XLA_FLAGS=--xla_something=1" in text and "[packages]" in text and "jax==" in text and "0: cpu" in text
    assert "hunter2" not in text
