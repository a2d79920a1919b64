"""One process of a job: goes on with the run of a folder, from its newest good checkpoint or from the beginning.

``python -P -m decomp.launchers.node FOLDER`` under srun, with the frozen code first on PYTHONPATH. Nothing but the
folder is read: config.yaml is resolved, and conf/ is not composed again.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from decomp import mesh, processes
from decomp.config.errors import UserError
from decomp.folder import open_folder, read_config, writing
from decomp.launchers import environment
from decomp.stop import early

MISTAKE, INTERRUPTED = 2, 130


def main(argv: Sequence[str]) -> int:
    try:
        with early(processes.tell_interrupted):  # a signal while jax is imported and processes join is seen afterwards
            return go_on(open_folder(argv[0]))
    except UserError as error:
        for line in str(error).splitlines():
            print(f"decomp: {line}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print("decomp: interrupted", file=sys.stderr)
        return INTERRUPTED


def go_on(folder: Path) -> int:
    """Returns the exit code of the run."""
    environment.adopt(os.environ)
    cfg = read_config(folder)
    mesh.prepare_environment(cfg.mesh)  # before anything imports jax
    from decomp import loop
    from decomp.build import build

    if (said := loop.complete(folder, cfg.steps)) is not None:
        print(said)
        return loop.DONE
    with processes.joined():
        return loop.run(cfg, folder, build, lambda: record(folder))


def record(folder: Path) -> None:
    """One more launch in the folder's history; revision and diff are those of the submission."""
    job, restart = os.environ.get("SLURM_JOB_ID", "none"), os.environ.get("SLURM_RESTART_COUNT", "0")
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    with writing(folder / "overrides.txt"), (folder / "overrides.txt").open("a", encoding="utf-8") as file:
        file.write(f"# {stamp} job {job}, restart {restart}, on {platform.node()}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
