"""From a job step's SLURM environment to the variables of ``decomp.processes``, and the defaults for accelerators.

Imports no jax: it is read before jax looks for devices.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, MutableMapping
from typing import NamedTuple

from decomp.config.errors import UserError
from decomp.processes import VARIABLES

# What a job exports unless the person's environment, or launcher.env, says otherwise.
EVERYWHERE = {
    "DECOMP_PATIENCE": "60",  # seconds without a word after which a process is taken for dead
    "PYTHONUNBUFFERED": "1",  # logs can be followed
    "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves a stack
}
# With real devices only: programs of simulated ones crash when they come from a cache (DESIGN 6).
ACCELERATOR = {
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",  # of a GPU's memory; jax takes 0.75 by itself
    "JAX_COMPILATION_CACHE_DIR": "{output_dir}/.xla",  # a requeue does not compile again, on whatever node
}
XLA_FLAGS = "--xla_gpu_nccl_termination_timeout_seconds=1200"  # a collective that waits longer ends the process

FIRST_PORT, PORTS = 61440, 4096  # above the range that Linux gives to outgoing connections
JOB_STRIDE, RESTART_STRIDE = 67, 17
STEP_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_PROCID")


class Task(NamedTuple):
    """One process of a job step."""

    coordinator: str
    count: int
    index: int


def task(environ: Mapping[str, str]) -> Task | None:
    """This process among those of its job step; None outside of a whole one, as in a shell on a node."""
    values = [environ.get(name, "") for name in STEP_VARIABLES]
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not nodes or not all(value.isdecimal() for value in values):
        return None
    job, step, count, index = map(int, values)
    restart = environ.get("SLURM_RESTART_COUNT", "")
    if not index < count:
        return None
    address = f"{hosts(nodes)[0]}:{port(job, step, int(restart) if restart.isdecimal() else 0)}"
    return Task(address, count, index)


def adopt(environ: MutableMapping[str, str]) -> Task | None:
    """Sets the DECOMP_ variables for a job step of several processes; those set by hand are left alone."""
    found = task(environ)
    if found is None or found.count == 1 or any(environ.get(name) for name in VARIABLES):
        return None
    environ.update(zip(VARIABLES, map(str, found), strict=True))
    return found


def port(job: int, step: int, restart: int) -> int:
    """The coordinator's port: another one for another job, step or restart, which may share the node."""
    return FIRST_PORT + (job * JOB_STRIDE + restart * RESTART_STRIDE + step) % PORTS


# ---------------------------------------------------------------- host lists
def hosts(text: str) -> list[str]:
    """Host names of a SLURM list: ``r[1-2]n[01-03,7],login`` in SLURM's order. UserError for what is none."""
    if not re.fullmatch(r"([^\[\],\s]|\[[0-9,-]+\])+(,([^\[\],\s]|\[[0-9,-]+\])+)*", text):
        raise UserError(f"SLURM_JOB_NODELIST={text}: is no list of hosts: start the run with srun")
    return [host for name in re.findall(r"(?:[^\[,]|\[[^\]]*\])+", text) for host in _names(name)]


def _names(name: str) -> Iterator[str]:
    parts = re.split(r"\[([^\]]*)\]", name)  # text, ranges, text, ranges, ..., text
    choices = [list(_numbers(part)) if i % 2 else [part] for i, part in enumerate(parts)]
    return ("".join(chosen) for chosen in itertools.product(*choices))


def _numbers(ranges: str) -> Iterator[str]:
    """``01-03,7`` to 01 02 03 7."""
    for span in ranges.split(","):
        first, _, last = span.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}d}"
