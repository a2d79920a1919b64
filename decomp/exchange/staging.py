"""A run folder that is built array by array beside its place, read back, and moved there whole.

``<dst>`` does not exist before everything in it is verified. The work lies in ``.<dst>.migrating`` meanwhile, and a
second call with the same job goes on there, wherever the first one was killed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np

from decomp.checkpoint import CHUNK, SAVE_ERRORS, ItemWriter, Keys, human, read_leaf, require_space, short_reason
from decomp.config.errors import UserError
from decomp.folder import explain, is_free, write_text, writing
from decomp.lock import RunLock
from decomp.manifest import differences, write_manifest

RECORD = "migration.json"
Parts = Iterator[tuple[int | EllipsisType, np.ndarray]]


@dataclass(frozen=True)
class Array:
    """One array to be written: its path with the item first, and the parts of it, each read when its turn comes.

    ``parts()`` yields (index along the first axis, or ``...`` for all of it; values in the array's dtype).
    """

    path: Keys
    shape: tuple[int, ...]
    dtype: np.dtype
    parts: Callable[[], Parts]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def label(self) -> str:
        return f"{'/'.join(self.path)} {list(self.shape)} {self.dtype}, {human(self.nbytes)}"

    def whole(self) -> np.ndarray:
        out = np.empty(self.shape, self.dtype)
        for index, part in self.parts():
            out[index] = part
        return out

    def differs(self, stored: np.ndarray) -> bool:
        """Whether any bit of any part is another in ``stored``."""
        if stored.shape != self.shape or stored.dtype != self.dtype:
            return True
        return not all(np.array_equal(_bits(stored[index]), _bits(part)) for index, part in self.parts())


def _bits(x: np.ndarray) -> np.ndarray:
    """The values as unsigned integers: NaN equals NaN, and -0 is not 0."""
    return np.ascontiguousarray(x).reshape(-1).view(f"u{x.dtype.itemsize}")


@dataclass(frozen=True)
class Job:
    """A checkpoint to be written, as one step of a new run folder.

    Attributes:
      empty: paths of empty dictionaries among the arrays.
      record: plain JSON that is equal for equal jobs; kept in the folder as migration.json.
      fill: writes the rest of the run folder (config.yaml and the like).
      told: what a person should know, one line each.
    """

    step: int
    arrays: tuple[Array, ...]
    identity: Mapping[str, Any]
    record: Mapping[str, Any]
    fill: Callable[[Path], None]
    told: tuple[str, ...]
    empty: tuple[Keys, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)

    @property
    def stored_record(self) -> Any:
        """The record as it reads back from JSON."""
        return json.loads(json.dumps(self.record))


def carry_out(job: Job, dst: Path, say: Callable[[str], None] = print) -> None:
    """Writes, verifies and moves into place. What an earlier call has done that was killed is not done again.

    Raises UserError for a ``dst`` that holds anything else, a disk that is too small or full, and arrays that do not
    read back bit for bit.
    """
    record = job.stored_record
    if occupied(dst, record):
        return
    work = dst.with_name(f".{dst.name}.migrating")
    with writing(work, "dst"):
        work.mkdir(parents=True, exist_ok=True)
    with RunLock(work):
        _claim(work, record, dst)
        require_space(work, max(0, job.nbytes - _held(work / "checkpoints")))
        try:
            _write(job, work / "checkpoints" / str(job.step), say)
            job.fill(work)
        except OSError as error:
            raise explain(error, work, "dst") from error
    with writing(dst, "dst"):
        os.rename(work, dst)  # onto nothing, or an empty folder


def occupied(dst: Path, record: Mapping[str, Any]) -> bool:
    """True where ``dst`` is the finished work of this very record; UserError where it is anything but free."""
    if is_free(dst):
        return False
    if dst.is_dir() and _read(dst / RECORD) == record:
        return True
    raise UserError(f"dst={dst}: exists already: give a folder that does not")


def _claim(work: Path, record: Mapping[str, Any], dst: Path) -> None:
    """The work folder is this record's, or nobody's yet."""
    held = _read(work / RECORD)
    if held is None:
        return write_text(work / RECORD, json.dumps(record, indent=1) + "\n")
    if held != record:
        other = next(differences(held, record)).replace("in the checkpoint", "there")
        raise UserError(
            f"dst={dst}: {work} holds the unfinished work of another migration ({other}): "
            "repeat that one, or delete that folder"
        )


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _held(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def _write(job: Job, folder: Path, say: Callable[[str], None]) -> None:
    for item in dict.fromkeys(a.path[0] for a in job.arrays):
        _write_item(job, folder / item, say)
    for array in job.arrays:
        say(f"verify {array.label}")
        if not _reads_back(array, folder):
            raise UserError(
                f"{folder}: {'/'.join(array.path)} does not read back as the source has it: did the source "
                f"change, or is the disk failing? Delete {folder.parents[1]} and start again"
            )
    arrays = [{"path": list(a.path), "shape": list(a.shape), "dtype": str(a.dtype)} for a in job.arrays]
    origin = {name: job.record[name] for name in ("src", "layout")}
    write_manifest(folder, job.step, job.identity, arrays, origin)


def _batches(arrays: list[Array]) -> Iterator[list[Array]]:
    """Small arrays together, a large one alone: a file or two for each of a thousand scalars helps nobody."""
    batch: list[Array] = []
    for array in arrays:
        if batch and sum(a.nbytes for a in batch) + array.nbytes > CHUNK:
            yield batch
            batch = []
        batch.append(array)
    if batch:
        yield batch


def _reads_back(array: Array, folder: Path) -> bool:
    try:
        stored = read_leaf(folder / array.path[0], array.path[1:], array.shape, array.dtype)
    except SAVE_ERRORS:  # a file of ours is damaged or gone
        return False
    return not array.differs(stored)


def _write_item(job: Job, item: Path, say: Callable[[str], None]) -> None:
    writer = ItemWriter(item)
    if writer.finished:
        return
    arrays = [a for a in job.arrays if a.path[0] == item.name and a.path[1:] not in writer.written]
    empty = {p[1:]: {} for p in job.empty if p[0] == item.name and p[1:] not in writer.written}
    try:
        if empty:
            writer.add(empty)
        for batch in _batches(arrays):
            for array in batch:
                say(f"write {array.label}")
            writer.add({array.path[1:]: array.whole() for array in batch})
        writer.finish()
    except UserError:
        raise
    except SAVE_ERRORS as error:
        raise UserError(
            f"{item}: cannot be written ({short_reason(error)}): mend that and repeat the command, which goes on "
            "from here"
        ) from error
