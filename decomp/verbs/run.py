"""``decomp``: decompose."""

from __future__ import annotations

import os

from decomp import mesh, processes
from decomp.config import schema
from decomp.config.compose import Command
from decomp.config.schema import RunConfig
from decomp.launchers import environment
from decomp.stop import early


def main(command: Command) -> int:
    cfg = command.config()
    match cfg.launcher:
        case schema.LocalLauncher():
            with early(processes.tell_interrupted):  # importing and joining take seconds; a signal may come meanwhile
                return _here(cfg, command.overrides)
        case schema.SlurmLauncher() as launcher:
            from decomp.launchers import slurm  # submitit is not for everybody's start

            return slurm.submit(cfg, launcher, command.overrides)


def _here(cfg: RunConfig, overrides: tuple[str, ...]) -> int:
    environment.adopt(os.environ)  # under srun, in an allocation that is there already
    mesh.prepare_environment(cfg.mesh)
    # Mistakes are answered before jax is imported, and simulated devices are asked for before it.
    from decomp import loop
    from decomp.build import build

    with processes.joined():
        return loop.start(cfg, overrides, build)
