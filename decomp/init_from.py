"""``init_from``: a new run that begins with the decomposition of another one, for fine-tuning.

Components and CI function are taken; optimizers, sources, averages and the step are fresh, and the faithfulness warm-up
is skipped: the components are faithful already, and it would move them by L1 alone (SPEC T6). Where the other run has
components only, as after ``migrate``, the CI function is drawn fresh. ``lineage.txt`` in the run folder names the
ancestors, oldest first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from decomp import processes
from decomp.checkpoint import Tree, read_item, restore_item
from decomp.config.changes import differing
from decomp.config.errors import UserError
from decomp.config.schema import RunConfig
from decomp.folder import open_folder, write_text
from decomp.manifest import MANIFEST, Whole, find_decomposition, first_of, read_manifest

LINEAGE = "lineage.txt"
SIZES = ("d_in", "d_out", "C")
Sites = Mapping[str, Mapping[str, Any]]  # a site table as a manifest has it


class Origin(Whole):
    """A whole decomposition of another run."""

    @property
    def has_ci_fn(self) -> bool:
        return bool(self.shapes("ci_fn"))

    @property
    def content(self) -> str:
        """Hash of what the decomposition's files hold, wherever they lie."""
        files = {n: v for n, v in self.manifest["files"].items() if n.startswith("decomposition/")}
        return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def line(self) -> str:
        return f"{self.folder} after {self.step} updates, content {self.content}"

    def shapes(self, part: str) -> dict[str, list[int]]:
        """Array name -> shape, of ``components`` or ``ci_fn``."""
        return {"/".join(path): list(shape) for path, (shape, _) in self.arrays(part).items()}


def pinned(cfg: RunConfig) -> RunConfig:
    """``cfg`` with the folder absolute and the step a number: what is written down, so that a requeue begins alike.

    Its files are checked, on the primary: a decomposition may be large. Raises UserError where there is no run, or no
    whole decomposition of the step that is asked for.
    """
    where = processes.from_primary(lambda: _where(cfg))  # the origin may be training on
    if where is None:
        return cfg
    return cfg.model_copy(update={"init_from": where[0], "init_from_step": where[1]})


def _where(cfg: RunConfig) -> tuple[str, int] | None:
    if cfg.init_from is None:
        return None
    said = f"init_from={cfg.init_from}: no whole checkpoint there: "
    found = find_decomposition(
        _folder(cfg.init_from),
        cfg.init_from_step,
        lambda damaged: said + (first_of(damaged) or "it has no checkpoint yet"),
    )
    return str(found.folder), found.step


def _folder(text: str) -> Path:
    folder = Path(text).expanduser().absolute()
    return folder if (folder / "checkpoints").is_dir() else open_folder(folder, "init_from")


def of_pinned(cfg: RunConfig) -> Origin | None:
    """What a config that ``pinned`` has just given begins with, not checked again; None where it begins with draws."""
    if cfg.init_from is None or cfg.init_from_step is None:
        return None
    folder = Path(cfg.init_from)
    return Origin(folder, cfg.init_from_step, read_manifest(folder / "checkpoints" / str(cfg.init_from_step)))


def check(origin: Origin, sites: Sites, decomposition: Tree) -> None:
    """UserError where the origin has other sites, other C or another CI function than ``decomposition``."""
    cut = lambda table: {n: {k: row[k] for k in SIZES} for n, row in table.items()}  # noqa: E731
    found = [_told(path, old, new) for path, old, new in differing(cut(origin.sites), cut(sites))]
    if found:
        raise UserError(f"init_from={origin.folder}: its sites and C must be those of this run: {first_of(found)}")
    mine = {"/".join(k.key for k in path): list(x.shape) for path, x in _leaves(decomposition["ci_fn"])}
    found = [_told(path, old, new) for path, old, new in differing(origin.shapes("ci_fn"), mine)]
    if origin.has_ci_fn and found:
        raise UserError(
            f"init_from={origin.folder}: its CI function is another: {first_of(found)}: set ci_fn as it did"
        )


def _leaves(tree: Tree) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


def _told(path: str, old: Any, new: Any) -> str:
    if ... in (old, new):
        return f"{path} is {'not there' if old is ... else 'there only'}"
    return f"{path} is {old} there, {new} here"


def restore(origin: Origin, sites: Sites, abstract: Tree, fresh: Tree) -> Tree:
    """The origin's decomposition where ``abstract`` (shapes with shardings) says; parts that it lacks are ``fresh``.

    The fresh arrays that it replaces are deleted first: no device holds two decompositions. UserError where the origin,
    which may be training on, has deleted the checkpoint since it was checked.
    """
    if not (origin.checkpoint / MANIFEST).is_file():
        raise UserError(f"init_from={origin.folder}: its checkpoint {origin.step} is gone: start again for a newer one")
    check(origin, sites, abstract)
    taken = [part for part in abstract if part != "ci_fn" or origin.has_ci_fn]
    for x in jax.tree.leaves([fresh[part] for part in taken]):
        x.delete()
    if _stacked_alike(origin.sites, sites):
        return fresh | restore_item(origin.item, {part: abstract[part] for part in taken})
    stored = read_item(origin.checkpoint, "decomposition")
    stored["components"] = _restacked(stored["components"], origin.sites, sites, abstract["components"])
    return fresh | {part: jax.tree.map(_placed, abstract[part], stored[part]) for part in taken}


def _stacked_alike(theirs: Sites, mine: Sites) -> bool:
    return all((theirs[n]["group"], theirs[n]["slot"]) == (row["group"], row["slot"]) for n, row in mine.items())


def _restacked(stored: Tree, theirs: Sites, mine: Sites, abstract: Tree) -> Tree:
    """Stacks of other groups, as other optimizer groups make them (SPEC T3), site by site."""
    out: Tree = {group: {f: np.empty(x.shape, x.dtype) for f, x in pair.items()} for group, pair in abstract.items()}
    for name, row in mine.items():
        for factor, stack in out[row["group"]].items():
            stack[row["slot"]] = stored[theirs[name]["group"]][factor][theirs[name]["slot"]]
    return out


def _placed(like: Any, array: np.ndarray) -> jax.Array:
    array = np.asarray(array, like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: array[index])


def record(origin: Origin, folder: Path) -> None:
    """Writes lineage.txt: the origin's own ancestors, then the origin."""
    try:
        before = (origin.folder / LINEAGE).read_text(encoding="utf-8")
    except OSError:
        before = ""
    write_text(folder / LINEAGE, f"{before}{origin.line}\n")


def tell(origin: Origin, target: str, say: Callable[[str], None]) -> None:
    """What a person should know of a run that begins so."""
    say(f"begins with the decomposition of {origin.line}; no faithfulness warm-up")
    if not origin.has_ci_fn:
        say("it holds components and no CI function: that is drawn fresh")
    if origin.manifest["identity"].get("target") not in (None, target):
        say("warning: it decomposes another target: its components start from that one's weights")
