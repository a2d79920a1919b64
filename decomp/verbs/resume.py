"""``decomp resume run=<folder>``: goes on with a stopped run from its newest whole checkpoint.

The stored config.yaml is where it starts from, never the groups of conf/. What may change while a run stays the
same run is listed in ``FREE``; anything else is refused with both values (DESIGN 5).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from decomp import mesh, processes
from decomp.config import load
from decomp.config.compose import Command
from decomp.config.errors import UserError
from decomp.config.schema import RunConfig
from decomp.folder import open_folder, read_config, run_overrides
from decomp.manifest import good_steps, step_folders

FREE = ("stop_after", "logger", "eval.every", "eval.batches", "checkpoint", "profile")


def main(command: Command) -> int:
    """Returns the exit code. UserError for a folder, a checkpoint or a change that cannot be gone on from."""
    folder = open_folder(command.options["run"])
    stored = read_config(folder)
    cfg = changed(command, stored)
    mesh.prepare_environment(cfg.mesh)  # before anything imports jax
    from decomp import loop

    if (said := loop.complete(folder, cfg.steps)) is not None:
        print(said)
        return loop.DONE
    _refuse_unusable(folder, cfg)
    from decomp.build import build

    with processes.joined():
        return loop.resume(cfg, folder, command.overrides, build)


def changed(command: Command, stored: RunConfig) -> RunConfig:
    """The stored config with the free overrides; ``stop_after`` belonged to the launch that stopped.

    Raises:
      UserError: one line per key that differs and may not, with the stored and the given value.
    """
    base = load.to_dict(stored) | {"stop_after": None}
    cfg = command.recompose(base)
    refused = [
        f"{key}: the run has {_show(old)}, given is {_show(new)}"
        for key, old, new in differing(base, load.to_dict(cfg))
        if not any(key == free or key.startswith(f"{free}.") for free in FREE)
    ]
    if refused:
        raise UserError(
            "\n".join([*refused, f"a resumed run may change {', '.join(FREE)}; start a new run for the rest"])
        )
    return cfg


def differing(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old, new) of every leaf that differs; ``...`` stands for a key that is not there."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        if old != new:
            yield path, old, new
        return
    for key in [*old, *(k for k in new if k not in old)]:
        yield from differing(old.get(key, ...), new.get(key, ...), f"{path}.{key}" if path else str(key))


def _show(value: Any) -> str:
    return "nothing" if value is ... else "null" if value is None else str(value)


def _refuse_unusable(folder: Path, cfg: RunConfig) -> None:
    """What can be told before anything is built."""
    if not os.access(folder, os.W_OK):
        raise UserError(f"run={folder}: no permission to write there: resume as its owner, or copy the folder")
    steps = step_folders(folder / "checkpoints")
    if not steps:
        again = f"python -m decomp {run_overrides(folder)}".rstrip()
        raise UserError(f"run={folder}: it has no checkpoint to go on from: start again with: {again}")
    done = good_steps(folder / "checkpoints")
    if cfg.stop_after is not None and done and cfg.stop_after <= done[-1]:
        raise UserError(f"stop_after={cfg.stop_after}: the run has {done[-1]} updates already: give a larger number")
