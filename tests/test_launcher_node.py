"""launcher=slurm in the job: who a process is among its step's, and when a job runs again (cases 30 to 35)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from decomp.config.errors import UserError
from decomp.launchers import environment, job

STEP = {
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NODELIST": "r1n[03-05]",
    "SLURM_JOB_NODELIST": "r1n[01-05]",
}


# ---------------------------------------------------------------- host lists
@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("a[1,3-4]-ib,login,b[007]", ["a1-ib", "a3-ib", "a4-ib", "login", "b007"]),
        ("gpu-a.cluster,gpu-b.cluster", ["gpu-a.cluster", "gpu-b.cluster"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]):
    assert environment.hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "n[1-", "n1,,n2", "n[a-b]", "n 1"])
def test_what_is_no_host_list(text: str):
    with pytest.raises(UserError, match="is no list of hosts"):
        environment.hosts(text)


# ---------------------------------------------------------------- a step's processes
def test_a_step_of_several_processes():
    environ = dict(STEP)
    assert environment.adopt(environ) == environment.Task(f"r1n03:{environment.port(812, 0, 0)}", 3, 2)
    assert environ["DECOMP_COORDINATOR"] == f"r1n03:{environment.port(812, 0, 0)}", "the step's first node"
    assert (environ["DECOMP_PROCESSES"], environ["DECOMP_PROCESS"]) == ("3", "2")


@pytest.mark.parametrize("missing", [*environment.STEP_VARIABLES, "NODELIST"])
def test_a_partial_environment_is_one_process(missing: str):
    """As in a shell on a node, where some of the job's variables are set."""
    environ = {name: value for name, value in STEP.items() if not name.endswith(missing)}
    before = dict(environ)
    assert environment.adopt(environ) is None and environ == before


def test_one_task_is_one_process_and_what_is_set_by_hand_stays():
    assert environment.adopt(STEP | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    assert environment.adopt(STEP | {"SLURM_STEP_ID": "batch"}) is None
    environ = STEP | {"DECOMP_COORDINATOR": "n7:1", "DECOMP_PROCESSES": "2", "DECOMP_PROCESS": "1"}
    assert environment.adopt(environ) is None and environ["DECOMP_PROCESS"] == "1"


def test_ports_of_what_may_share_a_node_differ():
    near = [(j, s, r) for j in range(800, 816) for s in range(4) for r in range(4)]
    ports = [environment.port(*launch) for launch in near]
    assert len(set(ports)) == len(ports)
    assert all(61440 <= port < 65536 for port in ports)
    assert environment.port(812, 0, 0) == environment.port(812, 0, 0)


@pytest.mark.parametrize("verb", ["run", "resume"])
def test_srun_makes_a_run_one_of_several_processes(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``srun python -m decomp`` in an allocation: the mesh's share is that of a step's process."""
    from decomp import folder, mesh
    from decomp.config.compose import Command, compose
    from decomp.verbs import resume, run

    class Asked(Exception):
        pass

    def ask(cfg: object) -> None:
        raise Asked(*(os.environ[name] for name in environment.VARIABLES))

    stored = folder.create(compose(["experiment=smoke", f"output_dir={tmp_path}"]))
    monkeypatch.setattr(mesh, "prepare_environment", ask)
    monkeypatch.setattr(os, "environ", dict(os.environ) | STEP)
    with pytest.raises(Asked) as asked:
        run.main(Command("run", ("experiment=smoke",))) if verb == "run" else resume.main(
            Command("resume", (f"run={stored}",))
        )
    assert asked.value.args == (f"r1n03:{environment.port(812, 0, 0)}", "3", "2")


# ---------------------------------------------------------------- whether the job runs again
@pytest.mark.parametrize(
    ("code", "state", "restarts", "again", "said"),
    [
        (0, "RUNNING", None, False, "exit code 0"),
        (1, "RUNNING", None, False, "exit code 1"),
        (2, "RUNNING", None, False, "exit code 2"),
        (3, "RUNNING", None, False, "exit code 3"),
        (75, "RUNNING", None, True, "saved and stopped; requeued, 1 of launcher.max_requeues=2"),
        (75, "TIMEOUT", "1", True, "saved and stopped; requeued, 2 of launcher.max_requeues=2"),
        (75, "RUNNING", "2", False, "saved and stopped; not requeued: launcher.max_requeues=2 is used up"),
        (75, "CANCELLED", None, False, "saved and stopped; not requeued: the job is CANCELLED"),
        (75, "PENDING", "1", False, "saved and stopped; not requeued: the job is PENDING"),
        (137, "RUNNING", None, True, "killed by signal 9; requeued, 1 of launcher.max_requeues=2"),
    ],
)
def test_verdict(code: int, state: str, restarts: str | None, again: bool, said: str):
    environ = {"SLURM_JOB_ID": "812"} | ({"SLURM_RESTART_COUNT": restarts} if restarts else {})
    assert job.verdict(code, 2, environ, lambda _: state) == (said, again)


def fake_slurm(folder: Path, state: str, code: int) -> Path:
    """scontrol that knows one job and writes requeues down; returns that file."""
    asked = folder / "requeued"
    (folder / "scontrol").write_text(
        f'#!/bin/bash\n[ "$1" = show ] && echo "JobId=812 JobState={state} Reason=None" && exit\n'
        f'echo "$2" >> {asked}; exit {code}\n'
    )
    (folder / "scontrol").chmod(0o755)
    return asked


def test_a_preempted_run_is_requeued_by_the_batch_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = fake_slurm(tmp_path, "RUNNING", 0)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "812")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    handlers = {sign: signal.getsignal(sign) for sign in (signal.SIGTERM, signal.SIGUSR2)}
    try:
        assert job.main(["3", "bash", "-c", "exit 75"]) == 75
        assert asked.read_text() == "812\n"
        assert job.main(["3", "bash", "-c", "kill -9 $$"]) == 137
        assert asked.read_text() == "812\n812\n"
        assert job.main(["3", "bash", "-c", "exit 1"]) == 1, "a failure is no COMPLETED job (case 35)"
        assert job.main(["0", "bash", "-c", "exit 75"]) == 75
        fake_slurm(tmp_path, "CANCELLED", 0)
        assert job.main(["3", "bash", "-c", "exit 75"]) == 75
        assert asked.read_text() == "812\n812\n"
    finally:
        for sign, handler in handlers.items():
            signal.signal(sign, handler)


def test_the_batch_process_outlives_the_signals_of_its_job(tmp_path: Path):
    """SLURM signals the batch script too; it must be there when the run has saved."""
    fake_slurm(tmp_path, "CANCELLED", 0)
    ready = tmp_path / "ready"
    command = ["bash", "-c", f"touch {ready}; sleep 2; exit 75"]
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "812"}
    batch = subprocess.Popen([sys.executable, "-m", "decomp.launchers.job", "3", *command], env=env)
    until = time.monotonic() + 30
    while not ready.exists() and time.monotonic() < until:
        time.sleep(0.05)
    for sign in (signal.SIGTERM, signal.SIGUSR2, signal.SIGTERM):
        batch.send_signal(sign)
    assert batch.wait(30) == 75


def test_the_batch_process_needs_no_jax():
    code = "import decomp.launchers.job, decomp.launchers.environment, sys; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
