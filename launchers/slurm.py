"""The login node: checks, a run folder with everything frozen, one sbatch, and back to the shell.

No device is needed. The script is submitit's, with a command of ours: the run finds all it needs in its folder, so
nothing is pickled, and signals reach it undisturbed.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from decomp import folder as folders
from decomp.config import load
from decomp.config.errors import UserError
from decomp.config.schema import RunConfig, SlurmLauncher
from decomp.launchers import environment
from decomp.launchers.freeze import CODE, freeze

# submitit sets logging up when it is imported, and that closes the handlers, and so the streams, of other libraries.
os.environ.setdefault("SUBMITIT_LOG_LEVEL", "NOCONFIG")
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm import slurm as submitit_slurm

TIME = re.compile(r"\d+(-\d+(:\d\d){0,2})?|\d+(:\d\d){1,2}")
OURS = ("nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "output", "error", "signal", "requeue", "open-mode")


class Size(NamedTuple):
    """What a mesh asks of the cluster: one process per node, and devices of each node."""

    nodes: int
    devices: int


def submit(cfg: RunConfig, launcher: SlurmLauncher, overrides: Sequence[str]) -> int:
    """Submits one run, or prints its script; returns 0.

    UserError for everything that can be told before the job runs; nothing is left behind then.
    """
    wanted = size(cfg, launcher)
    _check_words(launcher)
    if not launcher.dry_run and shutil.which("sbatch") is None:
        raise UserError("launcher=slurm: there is no sbatch here: log in to the cluster, or run here: launcher=local")
    from decomp import build  # brings jax, which looks for no device here

    cfg = absolute(cfg)
    build.check(cfg)
    if launcher.dry_run:
        stamp = Path(cfg.output_dir) / cfg.experiment / time.strftime("%Y%m%d-%H%M%S")
        print(script(launcher, cfg, wanted, stamp))
        return 0
    folder = folders.create(cfg, overrides)
    try:
        freeze(folder)
        job = _sbatch(script(launcher, cfg, wanted, folder), folder / "logs")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    print("\n".join(_farewell(job, folder, wanted)))
    return 0


# ---------------------------------------------------------------- what is asked for
def size(cfg: RunConfig, launcher: SlurmLauncher) -> Size:
    """Nodes and devices per node of the mesh: whole nodes, or a part of one."""
    mesh, per_node = cfg.mesh, launcher.devices_per_node
    if mesh.auto:
        raise UserError("mesh=auto: launcher=slurm asks for the devices that a mesh names; give mesh=dp8 or another")
    shape = mesh.replicate, mesh.fsdp, mesh.tp
    devices = math.prod(shape)
    if devices > per_node and devices % per_node:
        raise UserError(
            f"mesh={'x'.join(map(str, shape))}: its {devices} devices are no multiple of "
            f"launcher.devices_per_node={per_node}; change one of them"
        )
    return Size(max(1, devices // per_node), min(devices, per_node))


def absolute(cfg: RunConfig) -> RunConfig:
    """``cfg`` with every path of a file absolute: a node has another working folder (case 10)."""
    data = load.to_dict(cfg)
    data["output_dir"] = _absolute(cfg.output_dir)
    path = data["target"].get("path")
    if path is not None and not path.startswith("builtin:"):
        data["target"]["path"] = _absolute(path)
    if cfg.init_from is not None:
        from decomp import init_from

        data = load.to_dict(init_from.pinned(load.run_config(data)))
    return load.run_config(data)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _check_words(launcher: SlurmLauncher) -> None:
    """Settings that sbatch would refuse in other words, or that would undo what the mesh says."""
    if launcher.time is not None and not TIME.fullmatch(launcher.time):
        raise UserError(f"launcher.time={launcher.time}: must be minutes, HH:MM:SS or D-HH:MM:SS")
    for section, options in (("sbatch", launcher.sbatch), ("srun", launcher.srun)):
        for name in options:
            if not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
                raise UserError(f"launcher.{section}.{name}: is no long option; give its name without dashes")
            if name.replace("_", "-") in OURS:
                raise UserError(f"launcher.{section}.{name}: follows from mesh, launcher and run folder; leave it out")
    for name in launcher.env:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UserError(f"launcher.env.{name}: is no name of an environment variable")


# ---------------------------------------------------------------- the script
def script(launcher: SlurmLauncher, cfg: RunConfig, wanted: Size, folder: Path) -> str:
    """The sbatch script of ``folder``'s run. Runs the frozen code and nothing else."""
    parameters: dict[str, Any] = {
        "job_name": f"decomp-{cfg.experiment}",
        "nodes": wanted.nodes,
        "ntasks_per_node": 1,
        "gpus_per_node": None if cfg.mesh.simulate else wanted.devices,
        "cpus_per_task": launcher.cpus_per_task,
        "partition": launcher.partition,
        "account": launcher.account,
        "qos": launcher.qos,
        "constraint": launcher.constraint,
        "time": launcher.time,
        "mem": launcher.mem,
        "signal_delay_s": launcher.save_before,
        "stderr_to_stdout": True,
        "use_srun": False,
        "wckey": None,
        "setup": [*launcher.setup, *exports(launcher, cfg, folder)],
        "additional_parameters": {"requeue": True, "output": str(folder / "logs" / "%j.log")}
        | {name: value for name, value in launcher.sbatch.items() if value is not False},
    }
    text = submitit_slurm._make_sbatch_string(_command(launcher, folder), folder / "logs", **parameters)
    return text.replace("export SUBMITIT_EXECUTOR=slurm\n", "")  # nothing of submitit's runs in the job


def exports(launcher: SlurmLauncher, cfg: RunConfig, folder: Path) -> list[str]:
    """Lines that set the environment: defaults, then the person's, then the frozen code."""
    defaults = environment.EVERYWHERE | ({} if cfg.mesh.simulate else environment.ACCELERATOR)
    values = {name: value.format(output_dir=cfg.output_dir) for name, value in defaults.items()}
    lines = [f": ${{{name}:={shlex.quote(value)}}}; export {name}" for name, value in values.items()]
    if not cfg.mesh.simulate:
        lines.append(f'export XLA_FLAGS="{environment.XLA_FLAGS} ${{XLA_FLAGS:-}}"')  # of two, XLA takes the last
    lines += [f"export {name}={shlex.quote(value)}" for name, value in launcher.env.items()]
    return [*lines, f'export PYTHONPATH={shlex.quote(str(folder / CODE))}"${{PYTHONPATH:+:$PYTHONPATH}}"']


def _command(launcher: SlurmLauncher, folder: Path) -> str:
    python = launcher.python or sys.executable
    # -P: the folder that the job starts in is not looked for modules.
    # A process that has saved and leaves with 75 must not end one that still leaves; of a dead one the others learn
    # by themselves, after DECOMP_PATIENCE at most.
    srun = ["srun", "--kill-on-bad-exit=0", "--open-mode=append", f"--output={folder / 'logs'}/%j_%t.log"]
    if launcher.cpus_per_task is not None:
        srun.append(f"--cpus-per-task={launcher.cpus_per_task}")  # SLURM 22.05 and later do not pass sbatch's on
    node = [python, "-P", "-m", "decomp.launchers.node", str(folder)]
    job = [python, "-P", "-m", "decomp.launchers.job", str(launcher.max_requeues), *srun, *_words(launcher.srun), *node]
    return f"exec {shlex.join(job)}"  # exec: a shell would end at the first signal, and the job with it


def _words(options: Mapping[str, str | int | bool]) -> list[str]:
    given = {name.replace("_", "-"): value for name, value in options.items() if value is not False}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]


# ---------------------------------------------------------------- submission
class _Executor(submitit_slurm.SlurmExecutor):
    """submitit's way to sbatch, for a text that is there already."""

    def __init__(self, logs: Path, text: str):
        super().__init__(logs)
        self.text = text

    @classmethod
    def affinity(cls) -> int:
        return 2  # sbatch has been looked for

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self.text


def _sbatch(text: str, logs: Path) -> str:
    """The job's id. UserError with sbatch's own words where it refuses."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit repeats what sbatch says, and so does its error
            return _Executor(logs, text)._submit_command("").job_id
    except (FailedJobError, FailedSubmissionError) as error:
        said = [line.strip() for line in str(error).splitlines() if "sbatch:" in line] or [str(error).strip()]
        words = "; ".join(dict.fromkeys(line.removeprefix("sbatch: error: ") for line in said))
        raise UserError(f"launcher=slurm: sbatch refused the job: {words}") from error


def _farewell(job: str, folder: Path, wanted: Size) -> list[str]:
    nodes = "1 node" if wanted.nodes == 1 else f"{wanted.nodes} nodes"
    return [
        f"job {job}: {nodes}, {wanted.devices} devices each",
        f"run folder: {folder}",
        f"  squeue --job={job}",
        f"  tail -F {shlex.quote(str(folder / 'logs' / f'{job}_0.log'))}",
        f"  scancel {job}   # saves and ends; go on with: python -m decomp resume run={shlex.quote(str(folder))}",
    ]
