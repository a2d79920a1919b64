"""decomp.exchange.formats: runs of older formats, whole, to the present one (SPEC K2, K5, case 27).

There is one format so far: the stored run of format 1 is read as by a version that is two formats ahead.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from exchange_source import frozen
from formats.make import values

import decomp
from decomp import manifest, upgrade
from decomp.checkpoint import Checkpoints, empty_nodes, item_leaves
from decomp.config.errors import UserError
from decomp.exchange import formats, staging
from decomp.folder import read_config
from decomp.upgrade import Upgrade

RUN = Path(__file__).parent / "formats" / "1" / "run"
ITEMS = ("decomposition", "progress")


def _leaf(path: tuple[str, ...]) -> tuple[str, ...]:
    """Format 2 has ``factors`` where 1 had ``components``; format 3 keeps the adversary's sources in a folder more."""
    return tuple("factors" if key == "components" else key for key in path)


def _deeper(path: tuple[str, ...]) -> tuple[str, ...]:
    return (*path[:2], "adversary", *path[2:]) if path[:2] == ("progress", "sources") else path


NEXT = {
    1: Upgrade(leaf=_leaf, config=lambda data: data | {"steps": data["steps"] + 5}),
    2: Upgrade(leaf=_deeper, identity=lambda stored: stored | {"corpus": stored["data"]}),
}


@contextmanager
def third_format() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "FORMAT", 3)
        patch.setattr(upgrade, "UPGRADES", NEXT)
        yield


@pytest.fixture
def third() -> Iterator[None]:
    with third_format():
        yield


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    before, dst = frozen(RUN), tmp_path_factory.mktemp("migrated") / "new"
    with third_format():
        staging.carry_out(formats.job(RUN, None), dst, silent)
    assert frozen(RUN) == before
    return dst


def silent(_: str) -> None:
    pass


def moved(path: tuple[str, ...]) -> tuple[str, ...]:
    return _deeper(_leaf(path))


def test_the_present_format_needs_nothing() -> None:
    with pytest.raises(UserError, match=rf"src={RUN}: has the present format 1 already"):
        formats.job(RUN, None)


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(RUN, tmp_path / "run")
    step = tmp_path / "run" / "checkpoints" / "3"
    old = manifest.read_manifest(step)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", 2)
        manifest.write_manifest(step, 3, old["identity"], old["arrays"])
    with pytest.raises(UserError, match=r"newer decomp \(format 2"):
        formats.job(tmp_path / "run", None)


def test_a_run_comes_whole(migrated: Path, third: None) -> None:
    """Both items, every array in its new place, config and identity by meaning, the rest as it was."""
    dst = migrated
    assert read_config(dst).steps == 10 + 5
    assert (dst / "metrics.jsonl").read_text() == (RUN / "metrics.jsonl").read_text()
    assert (
        f"src={RUN}" in (dst / "overrides.txt").read_text() and "experiment=tiny" in (dst / "overrides.txt").read_text()
    )
    old, new = (manifest.read_manifest(p / "checkpoints" / "3") for p in (RUN, dst))
    assert new["format"] == 3 and new["step"] == 3 and new["identity"] == old["identity"] | {"corpus": "corpus-1"}
    assert manifest.damage_of(dst / "checkpoints" / "3") is None
    leaves = {(item, *path): spec for item in ITEMS for path, spec in item_leaves(dst / "checkpoints/3" / item).items()}
    assert leaves == {moved(tuple(e["path"])): (tuple(e["shape"]), np.dtype(e["dtype"])) for e in old["arrays"]}
    for item in ITEMS:
        a, b = (p / "checkpoints" / "3" / item for p in (RUN, dst))
        assert {moved((item, *path)) for path in empty_nodes(a)} == {(item, *path) for path in empty_nodes(b)}


def test_what_was_migrated_is_gone_on_from(migrated: Path, third: None) -> None:
    """The one who restores a training state finds it bit for bit, empty dictionaries and all."""
    stored = manifest.read_manifest(migrated / "checkpoints" / "3")
    checkpoints = Checkpoints(migrated, 2, None, stored["identity"])
    found = checkpoints.restore(_abstract(stored, migrated))
    assert found is not None and found[0] == 3
    old = {
        moved(tuple(e["path"])): tuple(e["path"]) for e in manifest.read_manifest(RUN / "checkpoints" / "3")["arrays"]
    }
    for item, tree in zip(ITEMS, found[1], strict=True):
        for keys, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
            wanted = values(old[(item, *(k.key for k in keys))], x.shape, np.dtype(x.dtype))
            assert np.asarray(x).tobytes() == wanted.tobytes(), keys


def _abstract(stored: dict[str, Any], run: Path) -> Any:
    """What a run would restore onto: the arrays of the manifest, and the empty dictionaries between them."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    trees: dict[str, Any] = {item: {} for item in ITEMS}
    leaves = {
        tuple(e["path"]): jax.ShapeDtypeStruct(e["shape"], np.dtype(e["dtype"]), sharding=sharding)
        for e in stored["arrays"]
    }
    leaves |= {(item, *p): {} for item in ITEMS for p in empty_nodes(run / "checkpoints" / "3" / item)}
    for path, leaf in leaves.items():
        node = trees
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tuple(trees[item] for item in ITEMS)


@pytest.mark.slow
def test_a_kill_in_the_middle_is_gone_on_from(third: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(staging, "write_manifest", killed)
        with pytest.raises(Killed):
            staging.carry_out(formats.job(RUN, None), tmp_path / "new", silent)
    assert not (tmp_path / "new").exists()
    said: list[str] = []
    staging.carry_out(formats.job(RUN, None), tmp_path / "new", said.append)
    assert not [line for line in said if line.startswith("write")]
    assert manifest.good_steps(tmp_path / "new" / "checkpoints") == [3]


def test_steps_that_are_not_there_or_damaged(third: None, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint of step 4; there are 3"):
        formats.job(RUN, 4)
    shutil.copytree(RUN, tmp_path / "run")
    shutil.copytree(RUN / "checkpoints" / "3", tmp_path / "run" / "checkpoints" / "4")
    os.truncate(tmp_path / "run" / "checkpoints" / "4" / "decomposition" / "manifest.ocdbt", 5)
    job = formats.job(tmp_path / "run", None)
    assert job.step == 3 and any("checkpoint 4 is damaged" in line for line in job.told)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "3")
    with pytest.raises(UserError, match="no whole checkpoint there: 4 is damaged"):
        formats.job(tmp_path / "run", None)


@pytest.mark.slow
def test_the_migrated_decomposition_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With names that this version knows, as after an upgrade of config and identity alone."""
    monkeypatch.setattr(manifest, "FORMAT", 2)
    monkeypatch.setattr(upgrade, "UPGRADES", {1: Upgrade()})
    staging.carry_out(formats.job(RUN, None), tmp_path / "new", silent)
    run = decomp.open_run(tmp_path / "new")
    group = run.table[run.sites[0]]["group"]
    stack = run.arrays["components"][group]["V"]
    np.testing.assert_array_equal(stack, values(("decomposition", "components", group, "V"), stack.shape, stack.dtype))
    assert run.ci_fn and run.origin == {"src": str(RUN), "layout": "format 1"}
