"""decomp.upgrade: what older versions stored is read by meaning (SPEC K2, case 27). tests/formats/make.py wrote it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from formats.make import values
from omegaconf import OmegaConf

import decomp
from decomp import checkpoint, folder, manifest, upgrade
from decomp.config import load
from decomp.config.errors import UserError
from decomp.upgrade import Upgrade

FORMATS = Path(__file__).parent / "formats"
STORED = sorted(p.parent for p in FORMATS.glob("*/configs/*/config.yaml"))
RUNS = sorted(FORMATS.glob("*/run"))


def test_every_format_has_an_upgrade_and_a_stored_run() -> None:
    assert sorted(upgrade.UPGRADES) == list(range(1, manifest.FORMAT))
    assert sorted(int(p.parent.name) for p in RUNS) == list(range(1, manifest.FORMAT + 1))


@pytest.mark.parametrize("stored", [*STORED, *RUNS], ids=lambda p: "/".join(p.relative_to(FORMATS).parts))
def test_a_stored_config_is_read(stored: Path) -> None:
    """A change of the schema that makes this fail needs a new format with its upgrade: people's runs are no fewer."""
    cfg = folder.read_config(stored)
    assert cfg.experiment == (stored.name if stored.parent.name == "configs" else "tiny")


@pytest.mark.parametrize("run", RUNS, ids=lambda p: p.parent.name)
def test_a_stored_run_of_the_present_format_opens(run: Path) -> None:
    if int(run.parent.name) != manifest.FORMAT:
        pytest.skip("of an older format: tests/test_exchange_formats.py")
    opened = decomp.open_run(run)
    assert opened.step == 3 and len(opened.sites) == 2
    for group, pair in opened.arrays["components"].items():
        for factor, x in pair.items():
            wanted = values(("decomposition", "components", group, factor), x.shape, x.dtype)
            np.testing.assert_array_equal(x, wanted)
    assert opened.ci_fn["chunks0"]["w_in"].ndim == 3


# ---------------------------------------------------------------- a version that does not exist yet
def _config(data: dict[str, Any]) -> dict[str, Any]:
    """``seed`` was called ``random_seed`` and kept as text."""
    data = dict(data)
    return data | {"seed": int(data.pop("random_seed"))}


NEXT = {1: Upgrade(config=_config), 2: Upgrade(config=lambda data: data | {"steps": data["steps"] + 1})}


@pytest.fixture
def third(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were format 3, two upgrades later."""
    monkeypatch.setattr(manifest, "FORMAT", 3)
    monkeypatch.setattr(upgrade, "UPGRADES", NEXT)


def _stored(path: Path, version: int | None) -> Path:
    data = load.to_dict(folder.read_config(RUNS[0]))
    if version in (None, 1):
        data["random_seed"] = str(data.pop("seed"))
    path.mkdir()
    text = OmegaConf.to_yaml(OmegaConf.create(data | ({} if version is None else {"format": version})))
    (path / "config.yaml").write_text(text)
    return path


def test_older_configs_are_upgraded_step_by_step(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    cfg = folder.read_config(RUNS[0])
    first, none, second = (_stored(tmp_path / str(v), v) for v in (1, None, 2))
    request.getfixturevalue("third")
    assert folder.read_config(first) == folder.read_config(none)
    assert folder.read_config(first) == folder.read_config(second) == cfg.model_copy(update={"steps": cfg.steps + 1})


def test_what_is_written_says_its_format(tmp_path: Path, third: None) -> None:
    cfg = decomp.config.compose.compose(["experiment=smoke"])
    folder.write_config(tmp_path, cfg)
    assert (tmp_path / "config.yaml").read_text().startswith("format: 3\n")
    assert folder.read_config(tmp_path) == cfg


@pytest.mark.parametrize("version", [2, 0, -1, "one", True, None])
def test_a_newer_or_odd_format_is_one_line(tmp_path: Path, version: Any) -> None:
    shutil.copy(RUNS[0] / "config.yaml", tmp_path)
    text = (
        (tmp_path / "config.yaml").read_text().replace("format: 1", f"format: {'null' if version is None else version}")
    )
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"written by a newer decomp \(format .*up to 1\): update") as error:
        folder.read_config(tmp_path)
    assert "\n" not in str(error.value)


def test_an_older_checkpoint_names_the_way_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FORMAT", 2)
    with pytest.raises(UserError, match=rf"older checkpoint format 1.*: python -m decomp migrate src={RUNS[0]} dst="):
        checkpoint.restore_decomposition(RUNS[0])


def test_a_newer_checkpoint_is_refused_when_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(RUNS[0], tmp_path / "run")
    step = tmp_path / "run" / "checkpoints" / "3"
    monkeypatch.setattr(manifest, "FORMAT", 2)
    old = manifest.read_manifest(step)
    manifest.write_manifest(step, 3, old["identity"], old["arrays"])
    monkeypatch.setattr(manifest, "FORMAT", 1)
    with pytest.raises(UserError, match=r"newer decomp \(format 2"):
        decomp.open_run(tmp_path / "run")
