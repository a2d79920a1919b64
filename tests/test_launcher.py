"""launcher=slurm on the login node: what is refused, what is frozen, what is submitted (cases 1, 2, 10)."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from decomp.config.compose import Command
from decomp.config.errors import UserError
from decomp.folder import read_config
from decomp.verbs import run

ROOT = Path(__file__).resolve().parents[1]
TWO_NODES = ("experiment=smoke", "launcher=slurm", "mesh=cpu8", "launcher.devices_per_node=4", "data.batch_size=8")


def submit(*texts: str) -> int:
    return run.main(Command("run", (*TWO_NODES, *texts)))


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to submit from, with an sbatch on PATH that keeps the script as ``submitted.sh``."""
    programs, home = tmp_path / "bin", tmp_path / "home"
    programs.mkdir()
    home.mkdir()
    program(programs, "sbatch", f'cp "$1" {home}/submitted.sh\necho Submitted batch job 4242')
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.chdir(home)
    return home


def run_folders(home: Path) -> list[Path]:
    return sorted(home.glob("outputs/smoke/2*"))


def directives(script: str) -> set[str]:
    return {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")}


# ---------------------------------------------------------------- the script
def test_dry_run_prints_the_script_and_leaves_nothing(login: Path, capsys: pytest.CaptureFixture[str]):
    settings = (
        "launcher.partition=gpu", "launcher.account=lab", "launcher.qos=high", "launcher.time=1-02:00:00",
        "launcher.constraint=h200", "launcher.mem=200G", "launcher.cpus_per_task=12", "launcher.save_before=99",
        "launcher.sbatch={exclude: n3, exclusive: true, nice: 7, comment: false}", "launcher.max_requeues=5",
        "launcher.srun={container-image: image.sqsh}", "launcher.setup=['module load cuda']",
        "launcher.env={NCCL_DEBUG: 'a b', DECOMP_PATIENCE: '90'}", "launcher.python=/opt/python",
    )  # fmt: skip
    assert submit("launcher.dry_run=true", *settings) == 0
    script = capsys.readouterr().out
    assert directives(script) >= {
        "nodes=2", "ntasks-per-node=1", "partition=gpu", "account=lab", "qos=high", "time=1-02:00:00",
        "constraint=h200", "mem=200G", "cpus-per-task=12", "signal=USR2@99", "exclude=n3", "exclusive", "nice=7",
        "requeue", "open-mode=append", "job-name=decomp-smoke",
    }  # fmt: skip
    assert "comment" not in script and "gpus" not in script and "submitit" not in script.lower()
    lines = [line for line in script.splitlines() if line and not line.startswith("#")]
    assert lines[0] == "module load cuda"
    assert lines.index(": ${DECOMP_PATIENCE:=60}; export DECOMP_PATIENCE") < lines.index("export DECOMP_PATIENCE=90")
    assert "export NCCL_DEBUG='a b'" in lines
    job = shlex.split(lines[-1])
    assert job[:6] == ["exec", "/opt/python", "-P", "-m", "decomp.launchers.job", "5"]
    assert {"--kill-on-bad-exit=0", "--container-image=image.sqsh", "--cpus-per-task=12"} < set(job)
    assert job[-2:-1] == ["decomp.launchers.node"] and job[-1].startswith(str(login / "outputs" / "smoke"))
    assert list(login.iterdir()) == []


@pytest.mark.parametrize(
    ("mesh", "per_node", "nodes", "devices"),
    [("dp32", 8, 4, 8), ("dp8", 8, 1, 8), ("dp8", 2, 4, 2), ("single", 8, 1, 1), ("dp8", 16, 1, 8)],
)
def test_nodes_follow_from_the_mesh(
    mesh: str, per_node: int, nodes: int, devices: int, login: Path, capsys: pytest.CaptureFixture[str]
):
    texts = (f"mesh={mesh}", f"launcher.devices_per_node={per_node}", "launcher.dry_run=true", "data.batch_size=32")
    assert submit(*texts) == 0
    assert {f"nodes={nodes}", f"gpus-per-node={devices}", "ntasks-per-node=1"} < directives(capsys.readouterr().out)


def test_accelerators_get_their_defaults_and_simulated_devices_do_not(login: Path, capsys: pytest.CaptureFixture[str]):
    submit("launcher.dry_run=true")
    assert "XLA_" not in capsys.readouterr().out
    submit("launcher.dry_run=true", "mesh=dp8")
    script = capsys.readouterr().out
    assert ": ${XLA_PYTHON_CLIENT_MEM_FRACTION:=0.92}" in script
    assert f": ${{JAX_COMPILATION_CACHE_DIR:={login}/outputs/.xla}}" in script
    assert "--xla_gpu_nccl_termination_timeout_seconds" in script


def test_the_xla_flags_of_a_job_are_known():
    """XLA ends a process that is given a flag it does not know."""
    from decomp.launchers.environment import XLA_FLAGS

    env = os.environ | {"XLA_FLAGS": XLA_FLAGS}
    subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env=env, check=True, timeout=60)


# ---------------------------------------------------------------- submission
def test_a_submission_freezes_everything_and_returns(login: Path, capsys: pytest.CaptureFixture[str]):
    assert submit("seed=3") == 0
    (folder,) = run_folders(login)
    said = capsys.readouterr().out
    assert said.startswith("job 4242: 2 nodes, 4 devices each") and f"run folder: {folder}" in said
    for follow_up in ("squeue --job=4242", f"tail -F {folder}/logs/4242_0.log", "scancel 4242", f"run={folder}"):
        assert follow_up in said
    cfg = read_config(folder)
    assert (cfg.seed, cfg.launcher.kind, cfg.output_dir) == (3, "slurm", str(login / "outputs"))
    assert "seed=3" in (folder / "overrides.txt").read_text()
    assert (folder / "revision.txt").is_file() and (folder / "diff.patch").is_file()
    for source in ("decomp/loop.py", "conf/config.yaml", "launchers/node.py", "decomp/launchers/job.py"):
        frozen = folder / "code" / "decomp" / source.removeprefix("decomp/")
        assert frozen.read_bytes() == (ROOT / source).read_bytes()
    assert not list((folder / "code").rglob("__pycache__"))
    assert (folder / "logs" / "4242_submission.sh").read_text() == (login / "submitted.sh").read_text()


def test_the_job_runs_the_frozen_code_wherever_it_starts(login: Path):
    """Not the checkout that it is started in, nor the one on PYTHONPATH."""
    submit()
    (folder,) = run_folders(login)
    program(login.parent / "bin", "srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    shown = "import decomp, decomp.config.compose as c, sys; print(decomp.__file__, c.conf_dir(), sys.argv[1])"
    (folder / "code" / "decomp" / "launchers" / "node.py").write_text(shown)
    done = subprocess.run(
        ["bash", login / "submitted.sh"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    code = folder / "code" / "decomp"
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{code / '__init__.py'} {code / 'conf'} {folder}", "decomp: exit code 0"]


def test_submissions_of_one_second_have_two_folders(login: Path):
    submit()
    submit()
    assert len(run_folders(login)) == 2


def test_relative_paths_are_those_of_the_login_node(login: Path, monkeypatch: pytest.MonkeyPatch):
    from decomp.target.pretrained import resolve_path

    (login / "model").symlink_to(resolve_path("builtin:pycode"))
    submit("target=llama", "target.path=model", "output_dir=there/outputs")
    (folder,) = login.glob("there/outputs/smoke/2*")
    cfg = read_config(folder)
    assert (cfg.target.path, cfg.output_dir) == (str(login / "model"), str(login / "there" / "outputs"))


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["launcher.devices_per_node=3"], "mesh=2x4x1: its 8 devices are no multiple of launcher.devices_per_node=3"),
        (["mesh=auto"], "mesh=auto: launcher=slurm asks for the devices that a mesh names"),
        (["launcher.time=soon"], "launcher.time=soon: must be minutes, HH:MM:SS or D-HH:MM:SS"),
        (["launcher.sbatch={nodes: 3}"], "launcher.sbatch.nodes: follows from"),
        (["launcher.sbatch={gpus_per_node: 3}"], "launcher.sbatch.gpus_per_node: follows from"),
        (["launcher.sbatch={Nodes: 3}"], "launcher.sbatch.Nodes: is no long option"),
        (["launcher.env={A-B: x}"], "launcher.env.A-B: is no name of an environment variable"),
        (["data.batch_size=3"], "data.batch_size=3: it must be a multiple of"),
        (["sites.layers=[18]"], "sites.layers=18: the target has layers"),
        (["target=llama8b"], "target.path: is required to run"),
        (["target=llama", "target.path=nowhere"], "nowhere: no such folder"),
        (["init_from=nowhere"], "init_from="),
    ],
)
@pytest.mark.parametrize("dry", ["launcher.dry_run=true", "launcher.dry_run=false"])
def test_mistakes_are_answered_before_anything_is_submitted(texts: list[str], said: str, dry: str, login: Path):
    with pytest.raises(UserError) as error:
        submit(dry, *texts)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert list(login.iterdir()) == []


def test_without_sbatch_the_local_launcher_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^launcher=slurm: there is no sbatch here.* launcher=local$"):
        submit()
    assert list(tmp_path.iterdir()) == []


def test_what_sbatch_refuses_is_said_in_one_line_and_leaves_no_run(login: Path, capfd: pytest.CaptureFixture[str]):
    words = "sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed"
    program(login.parent / "bin", "sbatch", f"echo '{words}' >&2; exit 1")
    with pytest.raises(UserError) as error:
        submit("launcher.partition=nope")
    refusal = "launcher=slurm: sbatch refused the job: invalid partition specified: nope; Batch job submission failed"
    assert str(error.value) == refusal
    assert run_folders(login) == []
    assert "sbatch" not in "".join(capfd.readouterr())
