"""Checkpoints: the only door to orbax (SPEC 11).

A step is ``checkpoints/<step>/{decomposition,progress}`` written by orbax, and ``manifest.json``, written last
by us: format version, site table, shapes, and size and checksum of every file. Only a folder with a whole
manifest is a checkpoint. That is what makes an asynchronous failure, a killed save and a damaged file visible,
none of which orbax notices (DESIGN 6).
"""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import v1

from decomp import processes
from decomp.config.errors import UserError
from decomp.manifest import (
    ITEMS,
    MANIFEST,
    Tree,
    arrays_of,
    damaged_steps,
    find_decomposition,
    good_steps,
    newest_whole,
    read_manifest,
    refuse_other,
    step_folders,
    write_manifest,
)
from decomp.mesh import returning_large_blocks

ASIDE = ".aside"
Keys = tuple[str, ...]  # to an array, through nested dictionaries
SAVE_ERRORS = (OSError, ValueError, RuntimeError)  # what orbax and tensorstore raise for a disk; a bug is a TypeError


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on the disk, whole and verified."""

    step: int
    seconds: float
    nbytes: int


@dataclass(frozen=True)
class Failed:
    """A save that did not become a checkpoint."""

    step: int
    reason: str


class Checkpoints:
    """The checkpoints of one run folder, for its one writer.

    ``identity`` is plain JSON that must be equal when restoring (site table, hashes of target and data).
    ``say`` receives warnings; ``best`` gives the best of some steps, on any thread. Every method runs on the training
    thread; one thread of ours ends a save. With several processes each has one and calls the same methods in the same
    order; files other than its own parts of arrays are touched by the primary alone, and a save is good, or has failed,
    on all of them.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int,
        keep_every: int | None,
        identity: Mapping[str, Any],
        say: Callable[[str], None] = print,
        best: Callable[[Iterable[int]], int | None] = lambda _: None,
    ):
        self.root = folder.absolute() / "checkpoints"
        self.keep_last, self.keep_every, self.identity, self.say = keep_last, keep_every, dict(identity), say
        self.best = best
        self._events: SimpleQueue[Saved | Failed] = SimpleQueue()
        self._manager: ocp.CheckpointManager | None = None
        self._ending: threading.Thread | None = None
        self._saves = 0  # begun by this process, which is as many as by any other
        self._ended, self._told = 0, 0  # events put, events given by ``poll``
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax logs each failure's traceback; we say one line
        _hush_closed_loops()
        if processes.is_primary():
            for leftover in self.root.glob("*.orbax-checkpoint-tmp*"):  # a killed save (case 22)
                shutil.rmtree(leftover, ignore_errors=True)

    # ------------------------------------------------------------ saving
    def check_space(self, nbytes: int) -> None:
        """Refuses a disk that cannot hold two saves of ``nbytes``, those already there included."""
        if not processes.is_primary():
            return
        needed = max(1, 2 - len(good_steps(self.root))) * nbytes
        free = _free(self.root)
        if free < needed:
            raise UserError(
                f"{self.root}: two checkpoints need {human(2 * nbytes)} ({human(needed)} more) and the disk has "
                f"{human(free)} free: free some space, or choose another disk with output_dir=..."
            )

    def save(self, step: int, state: tuple[Tree, Tree]) -> int:
        """Begins a save: returns when the state is copied to host memory. What became of it comes from ``poll``.

        ``state`` is (decomposition, progress); its buffers may be donated as soon as this returns. The result is how
        many saves had ended before this one began to write: the same number on every process.
        """
        self._join()
        ready, reason = processes.from_primary(lambda: self._prepare(step, tree_bytes(state)))
        if not ready:
            if reason is not None:
                self._fail(step, reason)
            return self._ended
        self._saves, ended = self._saves + 1, self._ended
        began = time.monotonic()
        try:
            self._begin(step, state)
        except SAVE_ERRORS as error:
            reason = short_reason(error)
        arguments = (step, arrays_of(state), began, reason)
        self._ending = threading.Thread(target=self._end, args=arguments, name="checkpoint", daemon=True)
        self._ending.start()
        return ended

    @property
    def ended(self) -> int:
        """How many saves have ended, well or not, on this process."""
        return self._ended

    def poll(self, upto: int | None = None) -> list[Saved | Failed]:
        """What became of saves since the last call, oldest first; never blocks. ``upto`` leaves those for later that
        ended after so many: what all processes agree on is told at the same step."""
        n = max(0, (self._ended if upto is None else upto) - self._told)
        self._told += n
        return [self._events.get() for _ in range(n)]

    def wait(self) -> list[Saved | Failed]:
        """Waits for the save in progress, then ``poll``."""
        self._join()
        return self.poll()

    def close(self) -> None:
        self._join()
        self._reset()

    def _prepare(self, step: int, nbytes: int) -> tuple[bool, str | None]:
        """(whether to save, why that is not possible): what the primary looks at for all."""
        if step in good_steps(self.root):
            return False, None
        try:
            self._make_room(step, nbytes)
        except SAVE_ERRORS as error:
            return False, short_reason(error)
        return True, None

    def _make_room(self, step: int, nbytes: int) -> None:
        # Where orbax cannot even make its folder, it leaves threads that hold the process for minutes: try first.
        probe = self.root / ".writable"
        probe.mkdir(parents=True, exist_ok=True)
        probe.rmdir()
        if (free := _free(self.root)) < nbytes:  # told now, before the disk is full to the last byte
            raise OSError(f"no space left: it needs {human(nbytes)} and the disk has {human(free)} free")
        self._set_aside(step, "replaced")

    def _begin(self, step: int, state: tuple[Tree, Tree]) -> None:
        manager = self._manager = self._manager or self._open_manager()
        args = {item: ocp.args.StandardSave(tree) for item, tree in zip(ITEMS, state, strict=True)}
        if not manager.save(step, args=ocp.args.Composite(**args), force=True):
            raise RuntimeError("orbax declined to save")

    def _open_manager(self) -> ocp.CheckpointManager:
        # Retention is ours: orbax would count a failed save among those to keep.
        options = ocp.CheckpointManagerOptions(max_to_keep=None, create=False)
        if processes.several():
            # Named, so that a barrier that one process missed is never met by another one's next save; and of all
            # processes by number, which makes it the coordinator's: the other kind is a collective on the devices.
            options.multiprocessing_options = ocp.options.MultiprocessingOptions(
                primary_host=0,
                active_processes=set(range(jax.process_count())),
                barrier_sync_key_prefix=f"manager{self._saves}",
            )
            options.async_options = ocp.AsyncOptions(barrier_sync_fn=self._barrier)
        return ocp.CheckpointManager(self.root, options=options)

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        save, failure = f"save{self._saves}", sys.exc_info()[1]
        if failure is not None:  # orbax waits for the others even where it has failed, and they for it
            return processes.refuse(save, short_reason(failure))
        processes.barrier(key, save, timeout_ms / 1000)

    def _end(self, step: int, arrays: list[dict[str, Any]], began: float, reason: str | None) -> None:
        """Runs on its own thread: orbax's commit, then the manifest, then retention."""
        try:
            if reason is None and self._manager is not None:
                self._manager.wait_until_finished()
        except SAVE_ERRORS as error:
            reason = short_reason(error)
        nbytes, reason = processes.settle(
            f"save{self._saves}", reason, lambda failure: self._commit(step, arrays, failure)
        )
        if reason is not None:
            return self._fail(step, reason)
        self._put(Saved(step, time.monotonic() - began, nbytes))
        if processes.is_primary():
            self._retire(step)

    def _commit(self, step: int, arrays: list[dict[str, Any]], failure: str | None) -> tuple[int, str | None]:
        """(bytes, reason): the manifest where every process has written its part, on the primary."""
        if failure is None:
            try:
                return write_manifest(self.root / str(step), step, self.identity, arrays), None
            except SAVE_ERRORS as error:
                failure = short_reason(error)
        return 0, failure

    def _fail(self, step: int, reason: str) -> None:
        self._reset()  # the manager still lists the step that failed
        if processes.is_primary():
            self._clear(step)
        with warnings.catch_warnings():
            # Orbax leaves coroutines behind when it fails early; Python would say so, at any later moment.
            warnings.simplefilter("ignore", RuntimeWarning)
            gc.collect()
        self._put(Failed(step, reason))

    def _clear(self, step: int) -> None:
        """Removes what a failed save left. Other writes of orbax's may still be under way and make their folders anew:
        it is looked for again until it stays away."""
        for pause in (0.0, 0.05, 0.2, 1.0):
            time.sleep(pause)
            left = [self.root / str(step), *self.root.glob(f"{step}.orbax-checkpoint-tmp*")]
            if pause and not any(path.exists() for path in left):
                return
            for path in left:
                shutil.rmtree(path, ignore_errors=True)

    def _put(self, event: Saved | Failed) -> None:
        self._events.put(event)
        self._ended += 1

    def _reset(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            with suppress(*SAVE_ERRORS):  # the failure that is being reported, once more
                manager.close()

    def _join(self) -> None:
        if self._ending is not None:
            self._ending.join()
            self._ending = None

    # ------------------------------------------------------------ retention
    def _retire(self, newest: int) -> None:
        """Deletes what is neither among the newest ``keep_last``, nor a multiple of ``keep_every`` (case 28), nor best.

        Runs only after ``newest`` is whole, so the only good checkpoint is never the one deleted.
        """
        steps = good_steps(self.root)
        kept = set(steps[-self.keep_last :]) | {s for s in steps if self.keep_every and s % self.keep_every == 0}
        kept |= {self.best(steps)}
        for step in set(step_folders(self.root)) - kept - {newest}:  # those without a manifest too: a kill left them
            (self.root / str(step) / MANIFEST).unlink(missing_ok=True)  # half deleted is never a checkpoint
            shutil.rmtree(self.root / str(step), ignore_errors=True)
        for folder in self.root.glob(f"*{ASIDE}"):
            shutil.rmtree(folder, ignore_errors=True)

    def _set_aside(self, step: int, why: str) -> Path | None:
        """Moves ``<step>`` out of the way of later saves; it goes with the next good checkpoint."""
        folder = self.root / str(step)
        if not folder.exists():
            return None
        aside = folder.with_name(f"{step}.{why}{ASIDE}")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)
        return aside

    # ------------------------------------------------------------ restoring
    def restore(self, abstract: tuple[Tree, Tree], step: int | None = None) -> tuple[int, tuple[Tree, Tree]] | None:
        """The newest whole checkpoint, or exactly ``step``; None where there is no checkpoint at all.

        ``abstract`` has jax.ShapeDtypeStruct leaves with shardings: any mesh and placement (SPEC K1). A damaged
        step is named in a warning, set aside, and the one before is taken (K4). Steps after the restored one are
        set aside too: training saves them anew. UserError: a checkpoint of something else, or nothing whole left.
        """
        found, damaged = processes.from_primary(lambda: _newest(self.root, step))
        damage = dict(damaged)
        if found is None and not damage:
            return None
        for bad, reason in damage.items():
            self.say(f"checkpoint {bad} is damaged ({reason}): " + _instead(found))
        if found is None:
            raise UserError(f"{self.root}: no whole checkpoint is left: " + "; ".join(damaged_steps(damage)))
        manifest = read_manifest(self.root / str(found))
        refuse_other(self.root / str(found), manifest, self.identity, abstract)
        restored = tuple(
            restore_item(self.root / str(found) / item, tree) for item, tree in zip(ITEMS, abstract, strict=True)
        )
        for later in [s for s in step_folders(self.root) if s > found] if processes.is_primary() else ():
            self._set_aside(later, "damaged" if later in damage else "later")
        return found, (restored[0], restored[1])


def restore_decomposition(folder: Path, step: int | None = None) -> tuple[int, Tree, dict[str, Any]]:
    """(step, decomposition as numpy arrays, manifest) of a run folder, without optimizer, target or devices (K1).

    Reads the bytes of the decomposition and no others, changes nothing. UserError where no step is whole.
    """
    folder = folder.absolute()
    found = find_decomposition(
        folder, step, lambda damaged: f"{folder / 'checkpoints'}: {'; '.join(damaged) or 'no checkpoint yet'}"
    )
    return found.step, read_item(found.checkpoint, "decomposition"), dict(found.manifest)


def read_item(checkpoint: Path, item: str) -> Tree:
    """One item of a whole checkpoint as numpy arrays, without devices; its bytes and no others are read."""
    tree: Tree = {}
    for entry in read_manifest(checkpoint)["arrays"]:
        if entry["path"][0] == item:
            _set(tree, entry["path"][1:], _as_numpy(entry["shape"], jax.numpy.dtype(entry["dtype"])))
    return restore_item(checkpoint / item, tree, partly=True)  # empty dictionaries are not in the manifest


def _as_numpy(shape: Iterable[int], dtype: Any) -> np.ndarray:
    """Asks orbax for numpy, which needs no device; a broadcast zero costs no memory."""
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))


def _hush_closed_loops() -> None:
    """When orbax fails early it closes its event loop under writes that are still under way; as each of those ends, on
    a thread of tensorstore, Python would print a traceback that nobody can act on. All else is still printed."""
    before = sys.unraisablehook
    if getattr(before, "hushes_closed_loops", False):
        return

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            before(unraisable)

    hook.hushes_closed_loops = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook


def restore_item(path: Path, abstract: Tree, partly: bool = False) -> Tree:
    """The arrays of ``abstract`` (with shardings, or numpy) from an item that has exactly these, or ``partly`` more."""
    # What orbax reads at once comes on top of what it gives: no more than the largest array (case 26).
    largest = max((x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract)), default=0)
    limit: Any = 1.01 * max(largest, 2**20) / 1e9
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=limit)
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    args = ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args, partial_restore=partly)
    with returning_large_blocks(), ocp.Checkpointer(handler) as door:
        return door.restore(path, args=args)


def _newest(root: Path, step: int | None) -> tuple[int | None, list[tuple[int, str]]]:
    found, damage = newest_whole(root, ITEMS, step)
    return found, list(damage.items())


def _instead(found: int | None) -> str:
    return "it is set aside" if found is None else f"going back to {found}"


def _set(tree: Tree, path: list[str], leaf: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def tree_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _free(root: Path) -> int:
    while not root.exists():
        root = root.parent
    return shutil.disk_usage(root).free


def human(nbytes: int) -> str:
    value, units = float(nbytes), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "bytes" else f"{value:.3g} {units[0]}"


def short_reason(error: BaseException) -> str:
    """The part of a tensorstore or system error that a person needs, on one line."""
    text = " ".join(str(error).split())
    for sign in ("No space left on device", "Disk quota exceeded", "Permission denied", "Read-only file system"):
        if sign in text:
            return f"{sign.lower()}: {text}" if len(text) < 200 else sign.lower()
    return text[:200] or type(error).__name__


# ---------------------------------------------------------------- one array at a time
CHUNK = 2**25  # bytes that are compressed at once: a stack in one piece would need its size again


class ItemWriter:
    """Writes one item array by array, for states that do not fit in memory; goes on after a kill at any moment.

    ``add`` returns when its arrays are on the disk; the item appears when ``finish`` returns, never before. ``written``
    has the paths of the arrays that are there already. The one writer of ``item``; OSError and the like from the disk.
    """

    def __init__(self, item: Path):
        self.item = item.absolute()
        self._parts = self.item.with_name(f"{item.name}.parts")  # where orbax collects what it is given
        self._unfinished = self.item.with_name(f"{item.name}.parts.partial_save")
        self._joining = self.item.with_name(f"{item.name}.joining")
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self.item.parent.mkdir(parents=True, exist_ok=True)
        for leftover in self.item.parent.glob(f"{item.name}.parts*.orbax-checkpoint-tmp*"):
            shutil.rmtree(leftover)
        if self._joining.exists():
            self._after_a_kill()
        self.written = {path for meta in self._unfinished.glob("*/*/_METADATA") for path in _paths(meta)}

    @property
    def finished(self) -> bool:
        return self.item.is_dir()

    def add(self, leaves: Mapping[Keys, np.ndarray | Tree]) -> None:
        """More arrays, or empty dictionaries, each with the path that leads to it. Holds no copy when it returns."""
        context = v1.Context()
        context.array.saving.storage_options.chunk_byte_size = CHUNK
        context.memory.deepcopy_host_arrays = False  # nobody changes it: this returns when it is written
        with context:
            v1.partial.save(str(self._parts), _nested(leaves))
        self.written |= set(leaves)

    def finish(self) -> None:
        self._joining.touch()
        v1.partial.finalize(str(self._parts))
        self._move()

    def _move(self) -> None:
        if not self.item.exists():
            (found,) = self._parts.glob("*/_METADATA")
            os.replace(found.parent, self.item)
        shutil.rmtree(self._parts, ignore_errors=True)
        self._joining.unlink()

    def _after_a_kill(self) -> None:
        """Orbax joins the parts by renames that nobody can go on with: all are done, or the parts are lost."""
        if self.item.exists() or self._parts.exists():
            return self._move()
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._joining.unlink()


def item_leaves(item: Path) -> dict[Keys, tuple[tuple[int, ...], np.dtype]]:
    """Path -> (shape, dtype) of every array of an orbax item, whoever wrote it; reads no array. ValueError for none."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as door:
        tree = door.metadata(item.absolute()).item_metadata
    if tree is None:
        raise ValueError("no orbax tree")
    found = jax.tree_util.tree_flatten_with_path(tree.tree, is_leaf=lambda x: hasattr(x, "dtype"))[0]
    return {
        tuple(str(getattr(k, "key", getattr(k, "idx", k))) for k in keys): (tuple(x.shape), np.dtype(x.dtype))
        for keys, x in found
        if hasattr(x, "shape")
    }


def read_leaf(item: Path, path: Keys, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """One array of an orbax item as numpy, without reading another."""
    like = _nested({path: _as_numpy(shape, dtype)})
    as_numpy = _nested({path: ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)})  # whatever devices it came from
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as door:
        wanted = ocp.args.PyTreeRestore(item=like, restore_args=as_numpy, partial_restore=True)
        tree = door.restore(item.absolute(), args=wanted)
    for key in path:
        tree = tree[key]
    return tree


def require_space(root: Path, nbytes: int) -> None:
    """UserError where the disk of ``root`` has not ``nbytes`` free, before anything is begun."""
    if (free := _free(root)) < nbytes:
        raise UserError(f"{root}: needs {human(nbytes)} and the disk has {human(free)} free: free some space first")


def _nested(leaves: Mapping[Keys, Any]) -> Tree:
    tree: Tree = {}
    for path, leaf in leaves.items():
        _set(tree, list(path), leaf)
    return tree


def _paths(metadata: Path) -> list[Keys]:
    """The paths in an orbax ``_METADATA``."""
    entries = json.loads(metadata.read_text())["tree_metadata"].values()
    return [tuple(str(key["key"]) for key in entry["key_metadata"]) for entry in entries]


def empty_nodes(item: Path) -> list[Keys]:
    """Paths of the empty dictionaries of an item that checkpoint.py wrote: they are part of what restores onto it."""
    leaves = item_leaves(item)
    return [path for path in _paths(item / "_METADATA") if path not in leaves]
