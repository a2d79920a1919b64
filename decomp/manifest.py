"""What makes a folder a checkpoint: ``manifest.json``, written last (SPEC K2, K4). Imports neither orbax nor jax.

It holds the format version, the step, the caller's identity (site table, hashes), the shapes of all arrays, and
size and CRC-32 of every file, so that a step that is unfinished, truncated or changed by one bit is known as such.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decomp.config.changes import differing
from decomp.config.errors import UserError

FORMAT = 1
ITEMS = ("decomposition", "progress")
MANIFEST = "manifest.json"
OTHERS = {  # of the identity, what is judged by content: the way on where it is another
    "target": "give target.path= the folder with the weights that the run was made on",
    "data": "give the text that the run was made on; data=stdlib is that of the same Python version",
}

Tree = dict[str, Any]  # nested plain dictionaries of arrays


# ---------------------------------------------------------------- steps
def step_folders(root: Path) -> list[int]:
    """Steps that have a folder, whole or not, oldest first."""
    with _readable(root):
        if not root.is_dir():
            return []
        return sorted(int(p.name) for p in root.iterdir() if p.name.isdecimal() and p.is_dir())


def good_steps(root: Path) -> list[int]:
    """Steps with a whole manifest, oldest first; their data files are not read."""
    with _readable(root):
        return [step for step in step_folders(root) if (root / str(step) / MANIFEST).is_file()]


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """A checkpoint that may not be read is not a damaged one: nothing is set aside for it."""
    try:
        yield
    except PermissionError as error:
        where = error.filename or folder
        raise UserError(f"{where}: permission denied: run as its owner, or have it made readable") from error


# ---------------------------------------------------------------- the manifest
def write_manifest(
    folder: Path,
    step: int,
    identity: Mapping[str, Any],
    arrays: list[dict[str, Any]],
    origin: Mapping[str, Any] | None = None,
) -> int:
    """Makes ``folder`` a checkpoint; returns its bytes. The rename is the moment of commitment.

    ``origin`` says where a checkpoint comes from that no training wrote (``migrate``).
    """
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    sums = _checksums(folder, names)
    files = {name: [(folder / name).stat().st_size, crc] for name, crc in zip(names, sums, strict=True)}
    body = {"format": FORMAT, "step": step, "identity": dict(identity), "arrays": arrays, "files": files}
    body |= {"origin": dict(origin)} if origin else {}
    part = folder / f"{MANIFEST}.part"
    with part.open("w", encoding="utf-8") as file:
        json.dump(body | {"crc": _crc_of(body)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, folder / MANIFEST)
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return sum(size for size, _ in files.values())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. ValueError with the reason where it is absent or damaged."""
    try:
        with _readable(folder):
            text = (folder / MANIFEST).read_text(encoding="utf-8")
        body = json.loads(text)
        crc = body.pop("crc")
    except FileNotFoundError as error:
        raise ValueError("its save did not finish: no manifest") from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError("its manifest is unreadable") from error
    if crc != _crc_of(body):
        raise ValueError("its manifest does not match its own checksum")
    return body


def damage_of(folder: Path, items: Iterable[str] = ITEMS) -> str | None:
    """Why a step cannot be restored, or None. Sizes first, which are free, then checksums of ``items``.

    UserError where the reason is a missing permission.
    """
    with _readable(folder):
        return _damage_of(folder, items)


def _damage_of(folder: Path, items: Iterable[str]) -> str | None:
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return str(error)
    if manifest["format"] > FORMAT:
        return None  # whole, as far as this version can say: refused by name in ``refuse_other``
    wanted = {name: v for name, v in manifest["files"].items() if name.split("/")[0] in set(items)}
    for name, (size, _) in wanted.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if (folder / name).stat().st_size != size:
            return f"{name} has {(folder / name).stat().st_size} bytes instead of {size}"
    try:
        sums = _checksums(folder, list(wanted))
    except PermissionError:
        raise
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return next((f"{n} has changed" for n, crc in zip(wanted, sums, strict=True) if crc != wanted[n][1]), None)


def _crc_of(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _checksums(folder: Path, names: list[str]) -> list[int]:
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda name: _checksum(folder / name), names))


def _checksum(path: Path) -> int:
    """CRC-32 through a memory map: the pages stay cached for orbax, which reads the file next."""
    if path.stat().st_size == 0:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return zlib.crc32(view)


# ---------------------------------------------------------------- what of a run folder is whole
def newest_whole(root: Path, items: Iterable[str], step: int | None) -> tuple[int | None, dict[int, str]]:
    """(newest step whose ``items`` are whole, {damaged step: reason}); with ``step`` only that one is looked at."""
    steps = step_folders(root)
    if step is not None and step not in steps:
        raise UserError(f"{root}: no checkpoint of step {step}; there are {', '.join(map(str, steps)) or 'none'}")
    damage: dict[int, str] = {}
    for candidate in [step] if step is not None else reversed(steps):
        reason = damage_of(root / str(candidate), items)
        if reason is None:
            return candidate, damage
        damage[candidate] = reason
    return None, damage


def damaged_steps(damage: Mapping[int, str]) -> list[str]:
    return [f"{step} is damaged ({reason})" for step, reason in damage.items()]


@dataclass(frozen=True)
class Whole:
    """The decomposition of a run folder at one step, found whole and not yet read."""

    folder: Path
    step: int
    manifest: Mapping[str, Any]

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / str(self.step)

    @property
    def item(self) -> Path:
        return self.checkpoint / "decomposition"

    @property
    def sites(self) -> Mapping[str, Mapping[str, Any]]:
        """The site table."""
        return self.manifest["identity"]["sites"]

    def arrays(self, part: str) -> dict[tuple[str, ...], tuple[tuple[int, ...], str]]:
        """Path within ``components`` or ``ci_fn`` -> (shape, dtype)."""
        entries = [e for e in self.manifest["arrays"] if e["path"][:2] == ["decomposition", part]]
        return {tuple(e["path"][2:]): (tuple(e["shape"]), e["dtype"]) for e in entries}


def find_decomposition(folder: Path, step: int | None, otherwise: Callable[[list[str]], str]) -> Whole:
    """The newest whole decomposition of a run folder, or that of ``step``, its files checked.

    Raises UserError where there is none, in the words of ``otherwise`` for the damaged ones, or of another format.
    """
    root = folder / "checkpoints"
    found, damage = newest_whole(root, ("decomposition",), step)
    if found is None:
        raise UserError(otherwise(damaged_steps(damage)))
    manifest = read_manifest(root / str(found))
    refuse_other_format(root / str(found), manifest)
    return Whole(folder, found, manifest)


# ---------------------------------------------------------------- refusing what does not fit
def refuse_other(
    folder: Path, manifest: Mapping[str, Any], identity: Mapping[str, Any], abstract: tuple[Tree, Tree]
) -> None:
    """UserError that names what differs between a checkpoint and what is being restored (case 25)."""
    refuse_without_progress(folder, manifest)
    found = list(differences(manifest["identity"], json.loads(json.dumps(identity))))
    if not found:
        found = list(differences(_shapes(manifest["arrays"]), _shapes(arrays_of(abstract))))
    if found:
        ways = [way for what, way in OTHERS.items() if any(text.startswith(f"{what} is ") for text in found)]
        raise UserError(": ".join([f"{folder}: another decomposition's checkpoint", first_of(found), *ways]))


def refuse_without_progress(folder: Path, manifest: Mapping[str, Any]) -> None:
    """UserError for a checkpoint that nothing built here could go on from: of another format, or of no training."""
    refuse_other_format(folder, manifest)
    if not any(entry["path"][0] == "progress" for entry in manifest["arrays"]):
        raise UserError(
            f"{folder}: holds a decomposition and no progress, so there is no training to go on with: "
            f"start a run from it with init_from={folder.parents[1]}"
        )


def first_of(found: Sequence[str]) -> str:
    """The first three of many texts, and how many more there are."""
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more


def refuse_other_format(folder: Path, manifest: Mapping[str, Any]) -> None:
    """UserError for a checkpoint that is not of the present format, with the way on."""
    if manifest["format"] > FORMAT:
        raise UserError(newer(str(folder), manifest["format"]))
    if manifest["format"] < FORMAT:
        raise UserError(
            f"{folder}: has the older checkpoint format {manifest['format']}, and this version reads {FORMAT}: "
            f"bring it there first with: python -m decomp migrate src={folder.parents[1]} dst=NEW_FOLDER"
        )


def newer(what: str, version: Any) -> str:
    return f"{what}: written by a newer decomp (format {version}, this version reads up to {FORMAT}): update decomp"


def differences(stored: Any, present: Any) -> Iterator[str]:
    """One text per leaf that differs between two JSON values, with both values."""
    for path, old, new in differing(stored, present):
        if new is ...:
            yield f"{path} is in the checkpoint only"
        elif old is ...:
            yield f"{path} is not in the checkpoint"
        else:
            yield f"{path} is {old} in the checkpoint, {new} here"


def arrays_of(state: tuple[Tree, Tree]) -> list[dict[str, Any]]:
    """Path, shape and dtype of every array of both items, as plain JSON."""
    leaves = _leaves(dict(zip(ITEMS, state, strict=True)), [])
    return [{"path": path, "shape": list(x.shape), "dtype": str(x.dtype)} for path, x in leaves]


def _leaves(tree: Any, path: list[str]) -> Iterator[tuple[list[str], Any]]:
    if not isinstance(tree, Mapping):
        yield path, tree
        return
    for key in tree:
        yield from _leaves(tree[key], [*path, key])


def _shapes(entries: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    return {"/".join(e["path"]): f"{e['dtype']}{e['shape']}" for e in entries}
