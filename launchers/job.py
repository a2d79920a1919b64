"""The batch script's process: starts the run's processes with srun, and asks SLURM to run the job again.

``python -P -m decomp.launchers.job MAX_REQUEUES srun ...``. It outlives every process of the run, so that a run whose
process was killed goes on as well. Imports no jax.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

PREEMPTED, KILLED = 75, 128  # exit codes: saved and stopped; KILLED + number is a signal's
GOES_ON = ("RUNNING", "TIMEOUT")  # a cancelled job stays cancelled, and SLURM itself requeues the rest


def main(argv: Sequence[str]) -> int:
    limit, command = int(argv[0]), argv[1:]
    # SLURM signals every process of a job; the run saves, and ends when it has.
    for sign in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(sign, lambda *_: None)
    code = subprocess.call(command)
    code = code if code >= 0 else KILLED - code
    said, again = verdict(code, limit, os.environ, state)
    print(f"decomp: {said}", flush=True)
    if again:
        requeue(os.environ["SLURM_JOB_ID"])
    return code  # which SLURM no longer asks for, once it has said yes


def verdict(code: int, limit: int, environ: Mapping[str, str], state_of: object) -> tuple[str, bool]:
    """What to say of a run that ended with ``code``, and whether to requeue it."""
    if code != PREEMPTED and code <= KILLED:
        return f"exit code {code}", False
    why = "saved and stopped" if code == PREEMPTED else f"killed by signal {code - KILLED}"
    job, restart = environ.get("SLURM_JOB_ID", ""), int(environ.get("SLURM_RESTART_COUNT") or 0)
    assert callable(state_of)
    now = state_of(job)
    if now not in GOES_ON:
        return f"{why}; not requeued: the job is {now}", False
    if restart >= limit:
        return f"{why}; not requeued: launcher.max_requeues={limit} is used up", False
    return f"{why}; requeued, {restart + 1} of launcher.max_requeues={limit}", True


def state(job: str) -> str:
    """SLURM's word for the job, such as RUNNING; UNKNOWN where it does not answer."""
    done = _scontrol("show", "job", "--oneliner", job)
    found = re.search(r"\bJobState=(\w+)", done.stdout) if done else None
    return found[1] if found else "UNKNOWN"


def requeue(job: str) -> None:
    done = _scontrol("requeue", job)
    if done is None or done.returncode:
        print(f"decomp: scontrol requeue {job} failed: {done.stderr.strip() if done else 'no answer'}", flush=True)


def _scontrol(*words: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
