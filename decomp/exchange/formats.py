"""From a run folder of an older format of this project to one of the present format (case 27)."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from decomp import manifest as mf
from decomp import upgrade
from decomp.checkpoint import Keys, empty_nodes, human, read_leaf
from decomp.config import load
from decomp.config.errors import UserError
from decomp.exchange import staging
from decomp.exchange.sources import fingerprint
from decomp.folder import CONFIG, LOCK, record_launch, write_config
from decomp.manifest import ITEMS, damaged_steps, newest_whole, read_manifest

LEFT_OUT = ("checkpoints", CONFIG, LOCK, f".{LOCK}*", "*.part")


def job(src: Path, step: int | None) -> staging.Job:
    """One step of a run, with everything of it: the newest whole one, or ``step``.

    Raises UserError for a run of the present format, of a newer one, and without a whole checkpoint.
    """
    root = src / "checkpoints"
    found, damage = newest_whole(root, ITEMS, step)
    if found is None:
        reason = "; ".join(damaged_steps(damage))
        raise UserError(f"src={src}: no whole checkpoint there" + (f": {reason}" if reason else ""))
    manifest, what = read_manifest(root / str(found)), str(root / str(found))
    version = manifest["format"]
    if version == mf.FORMAT:
        raise UserError(f"src={src}: has the present format {mf.FORMAT} already: open or resume it as it is")
    arrays = tuple(_array(root / str(found), entry, version, what) for entry in manifest["arrays"])
    empty = tuple(
        upgrade.leaf((item, *path), version, what)
        for item in ITEMS
        if (root / str(found) / item).is_dir()
        for path in empty_nodes(root / str(found) / item)
    )
    cfg = load.run_config(upgrade.config(load.read_yaml(src / CONFIG), str(src / CONFIG)))
    record = {
        "src": str(src), "layout": f"format {version}", "files": fingerprint(root / str(found)), "format": mf.FORMAT,
        "step": found, "config": load.to_dict(cfg),
    }  # fmt: skip

    def fill(folder: Path) -> None:
        shutil.copytree(src, folder, ignore=shutil.ignore_patterns(*LEFT_OUT), dirs_exist_ok=True)
        write_config(folder, cfg)
        record_launch(folder, "migrate", [f"src={src}"])

    identity = upgrade.identity(manifest["identity"], version, what)
    told = _told(src, version, found, damage, arrays)
    return staging.Job(found, arrays, identity, record, fill, told, empty)


def _array(folder: Path, entry: dict[str, Any], version: int, what: str) -> staging.Array:
    item, *path = entry["path"]
    shape, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"])
    parts = partial(_whole, folder / item, tuple(path), shape, dtype)
    return staging.Array(upgrade.leaf((item, *path), version, what), shape, dtype, parts)


def _whole(item: Path, path: Keys, shape: tuple[int, ...], dtype: np.dtype) -> staging.Parts:
    yield ..., read_leaf(item, path, shape, dtype)


def _told(
    src: Path, version: int, step: int, damage: dict[int, str], arrays: tuple[staging.Array, ...]
) -> tuple[str, ...]:
    return (
        f"source: {src}, format {version}, checkpoint {step}",
        *(f"checkpoint {bad} is damaged ({reason}) and is left out" for bad, reason in damage.items()),
        *(f"array: {a.label}" for a in arrays),
        f"in all: {human(sum(a.nbytes for a in arrays))}; format {mf.FORMAT}: config.yaml upgraded, other files copied",
    )
