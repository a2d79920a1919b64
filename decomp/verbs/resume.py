"""``decomp resume run=<folder>``: goes on with a stopped run from its newest whole checkpoint.

The stored config.yaml is where it starts from, never the groups of conf/. What may change while a run stays the
same run is listed in config/changes.py; anything else is refused in a table with both values (DESIGN 5).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decomp import aligned, mesh, processes
from decomp.config import changes, load
from decomp.config.compose import Command
from decomp.config.errors import UserError
from decomp.config.schema import RunConfig
from decomp.folder import open_folder, read_config, run_overrides
from decomp.launchers import environment
from decomp.manifest import good_steps, read_manifest, refuse_without_progress, step_folders
from decomp.stop import early

WIDEST = 40  # characters of a value in the table


def main(command: Command) -> int:
    """Returns the exit code. UserError for a folder, a checkpoint or a change that cannot be gone on from."""
    with early(processes.tell_interrupted):  # a signal while jax is imported and processes join is seen afterwards
        return _resume(command)


def _resume(command: Command) -> int:
    folder = open_folder(command.options["run"])
    stored = read_config(folder)
    cfg = changed(command, stored, folder)
    environment.adopt(os.environ)  # under srun, in an allocation that is there already
    mesh.prepare_environment(cfg.mesh)  # before anything imports jax
    from decomp import loop

    if (said := loop.complete(folder, cfg.steps)) is not None:
        print(said)
        return loop.DONE
    _refuse_unusable(folder, cfg)
    from decomp.build import build

    with processes.joined():
        return loop.resume(cfg, folder, command.overrides, build)


def changed(command: Command, stored: RunConfig, folder: Path) -> RunConfig:
    """The stored config with the free overrides, extended if need be; ``stop_after`` belonged to the launch that
    stopped.

    Raises:
      UserError: a table of all keys that differ and may not, with the stored and the given value.
    """
    base = load.to_dict(stored) | {"stop_after": None}
    cfg = command.recompose(base)
    if refused := changes.refused(base, load.to_dict(cfg)):
        raise UserError("\n".join([*_table(refused), _instead(folder)]))
    done = good_steps(folder / "checkpoints")
    return changes.extended(stored, cfg, command.options["extend"], done[-1] if done else 0)


def _table(refused: Sequence[tuple[str, Any, Any]]) -> list[str]:
    """One aligned line per key that may not change."""
    rows = [(key, _show(old), _show(new)) for key, old, new in refused]
    return aligned.lines([("may not change", "the run has", "given is"), *rows])


def _instead(folder: Path) -> str:
    return f"a resumed run keeps these; a new run may start from its decomposition: init_from={folder}"


def _show(value: Any) -> str:
    text = "nothing" if value is ... else "null" if value is None else str(value)
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."


def _refuse_unusable(folder: Path, cfg: RunConfig) -> None:
    """What can be told before anything is built."""
    if not os.access(folder, os.W_OK):
        raise UserError(f"run={folder}: no permission to write there: resume as its owner, or copy the folder")
    steps = step_folders(folder / "checkpoints")
    if not steps:
        again = f"python -m decomp {run_overrides(folder)}".rstrip()
        raise UserError(f"run={folder}: it has no checkpoint to go on from: start again with: {again}")
    done = good_steps(folder / "checkpoints")
    if done:
        newest = folder / "checkpoints" / str(done[-1])
        with contextlib.suppress(ValueError):  # damaged: the restore says so, and goes back to the one before
            refuse_without_progress(newest, read_manifest(newest))
    if cfg.stop_after is not None and done and cfg.stop_after <= done[-1]:
        raise UserError(f"stop_after={cfg.stop_after}: the run has {done[-1]} updates already: give a larger number")
