"""What every test runs under: CPU, strict dtype promotion, and warnings as errors (pyproject.toml).

Tests have one device. Several devices are simulated in a process of their own, by ``simulated``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

# Before anything imports jax; processes that tests start inherit these.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ.setdefault("WANDB_MODE", "disabled")


def _fast_compile() -> str:
    """XLA_FLAGS that compile a step three times faster on CPU and change no formula; those set by hand win.

    An unknown flag ends the process: jaxlib 0.12 no longer knows the second one.
    """
    given = os.environ.get("XLA_FLAGS", "")
    wanted = {"xla_backend_optimization_level": "0"}
    if version("jaxlib").startswith("0.10."):
        wanted["xla_cpu_use_fusion_emitters"] = "false"
    return " ".join([given, *(f"--{name}={value}" for name, value in wanted.items() if name not in given)]).strip()


os.environ["XLA_FLAGS"] = _fast_compile()

ROOT = Path(__file__).resolve().parents[1]
MAX_DEVICES = 8


def _strict() -> str:
    """pyproject.toml's filters of warnings as a line of Python: ``-W`` takes no pattern of a module's name."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    error, theirs = config["tool"]["pytest"]["ini_options"]["filterwarnings"]
    action, _, category, module = theirs.split(":")
    assert (error, category) == ("error", "DeprecationWarning")
    return (
        f"import warnings; warnings.simplefilter({error!r}); "
        f"warnings.filterwarnings({action!r}, category={category}, module={module!r})\n"
    )


@pytest.fixture
def simulated(tmp_path: Path) -> Callable[..., str]:
    """Runs a Python snippet with ``devices`` simulated CPU devices and gives its standard output.

    ``simulated(code, devices=4, timeout=120)``: the snippet runs in a folder of its own, sees the repository, and fails
    the test by raising. The persistent compilation cache is off: it crashes multi-device CPU programs (DESIGN 6).
    """

    def run(code: str, devices: int = 4, timeout: float = 240) -> str:
        assert devices <= MAX_DEVICES, f"tests simulate {MAX_DEVICES} devices at most, not {devices}"
        env = os.environ | {
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        script = tmp_path / "snippet.py"
        script.write_text(_strict() + textwrap.dedent(code))
        done = subprocess.run(
            [sys.executable, script],
            env=env,
            cwd=tmp_path,
            timeout=timeout,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr[-8000:]}"
        return done.stdout

    return run


@pytest.fixture
def decomp_cli(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``python -m decomp`` in a folder of its own and gives exit code and output.

    The package is found where this test session found it, so a test of the command says nothing about the installation;
    ``tests/test_packaging.py`` does.
    """

    def run(*args: str, timeout: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(
            [sys.executable, "-m", "decomp", *args],
            env=os.environ | {"PYTHONPATH": path} | env,
            cwd=tmp_path,
            timeout=timeout,
            capture_output=True,
            text=True,
        )

    return run
