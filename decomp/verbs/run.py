"""``decomp``: decompose."""

from __future__ import annotations

from decomp import mesh, processes
from decomp.config.compose import Command
from decomp.config.schema import RunConfig
from decomp.stop import early


def main(command: Command) -> int:
    with early(processes.tell_interrupted):  # importing and joining take seconds, and a signal may come meanwhile
        cfg = command.config()
        match cfg.launcher.kind:
            case "local":
                return _here(cfg, command.overrides)


def _here(cfg: RunConfig, overrides: tuple[str, ...]) -> int:
    mesh.prepare_environment(cfg.mesh)
    # Mistakes are answered before jax is imported, and simulated devices are asked for before it.
    from decomp import loop
    from decomp.build import build

    with processes.joined():
        return loop.start(cfg, overrides, build)
