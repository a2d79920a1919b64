"""decomp/manifest.py: SPEC K2, K4, cases 21, 25."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from decomp import manifest
from decomp.config.errors import UserError
from decomp.manifest import damage_of, differences, read_manifest, refuse_other, write_manifest

ARRAYS = [{"path": ["decomposition", "components", "a.b/c"], "shape": [2, 3], "dtype": "float32"}]
IDENTITY = {"sites": {"model.layers.0.mlp.down_proj": {"C": 80, "slot": 0}}, "target": "abc"}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    folder = tmp_path / "7"
    for name, size in (
        ("decomposition/d/one", 5000),
        ("decomposition/empty", 0),
        ("progress/two", 70_000),
        ("meta", 10),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(random.Random(name).randbytes(size))
    write_manifest(folder, 7, IDENTITY, ARRAYS)
    return folder


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "deleted": (lambda f: (f / "progress/two").unlink(), r"progress/two is missing"),
    "truncated": (lambda f: os.truncate(f / "progress/two", 69_999), r"has 69999 bytes instead of 70000"),
    "emptied": (lambda f: os.truncate(f / "progress/two", 0), r"has 0 bytes"),
    "one bit": (lambda f: _flip(f / "progress/two", 54_321), r"progress/two has changed"),
    "a folder": (lambda f: (os.unlink(f / "progress/two"), os.mkdir(f / "progress/two")), r"missing"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), r"did not finish"),
    "half a manifest": (lambda f: os.truncate(f / "manifest.json", 100), r"manifest is unreadable"),
    "other manifest": (lambda f: (f / "manifest.json").write_text("[]"), r"manifest is unreadable"),
    "a bit of it": (lambda f: _flip(f / "manifest.json", 22), r"manifest"),
}


def test_whole(step: Path) -> None:
    assert damage_of(step) is None
    body = read_manifest(step)
    assert body["step"] == 7 and body["identity"] == IDENTITY and body["arrays"] == ARRAYS
    assert "meta" in body["files"] and "manifest.json" not in body["files"]
    assert not list(step.glob("*.part"))


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_seen(step: Path, name: str) -> None:
    """Case 21; each of these is taken for a good checkpoint by orbax."""
    harm, reason = DAMAGE[name]
    harm(step)
    found = damage_of(step)
    assert found is not None and re.search(reason, found), found


def test_every_bit_of_the_manifest_counts(step: Path) -> None:
    """A flip is seen, or it fell on white space and means the same."""
    size, whole, seen = (step / "manifest.json").stat().st_size, read_manifest(step), 0
    for at in random.Random(0).sample(range(size), 40):
        _flip(step / "manifest.json", at)
        if damage_of(step) is None:
            assert read_manifest(step) == whole
        else:
            seen += 1
        _flip(step / "manifest.json", at)
    assert damage_of(step) is None and seen > 20


def test_only_the_items_asked_for_are_read(step: Path) -> None:
    (step / "progress/two").unlink()
    assert damage_of(step, ("decomposition",)) is None
    assert damage_of(step, ("progress",)) is not None


def test_differences_name_both_values() -> None:
    """Case 25: twelve layers loaded into sixteen."""
    stored = {"sites": {"a": {"C": 1}, "b": {"C": 2}}, "target": "x"}
    present = {"sites": {"a": {"C": 3}, "c": {"C": 2}}, "target": "x"}
    assert list(differences(stored, present)) == [
        "sites.a.C is 1 in the checkpoint, 3 here",
        "sites.b is in the checkpoint only",
        "sites.c is not in the checkpoint",
    ]


def test_a_newer_format_is_refused_not_damaged(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FORMAT", 2)
    write_manifest(step, 7, IDENTITY, ARRAYS)
    monkeypatch.setattr(manifest, "FORMAT", 1)
    assert damage_of(step) is None
    with pytest.raises(UserError, match=r"newer decomp \(format 2.*up to 1\): update"):
        refuse_other(step, read_manifest(step), IDENTITY, ({}, {}))


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("target", "target is abc in the checkpoint, x here: give target.path="),
        ("data", "data is t .* here: give the text"),
    ],
)
def test_another_target_or_text_is_told_with_the_way_on(step: Path, what: str, told: str) -> None:
    progress = {"path": ["progress", "step"], "shape": [], "dtype": "int32"}
    write_manifest(step, 7, IDENTITY | {"data": "t"}, [*ARRAYS, progress])
    with pytest.raises(UserError, match=told) as error:
        refuse_other(step, read_manifest(step), IDENTITY | {"data": "t"} | {what: "x"}, ({}, {}))
    assert "\n" not in str(error.value)


def _denied(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied", "progress/two")


@pytest.mark.parametrize("where", ["_checksum", "Path.read_text", "Path.iterdir"])
def test_what_may_not_be_read_is_not_damaged(step: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """No fall back to the one before, nothing set aside: one line, and the fix."""
    name, _, attribute = where.rpartition(".")
    monkeypatch.setattr(getattr(manifest, name) if name else manifest, attribute, _denied)
    with pytest.raises(UserError, match="progress/two: permission denied: run as its owner"):
        manifest.step_folders(step.parent)
        damage_of(step)
