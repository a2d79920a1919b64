"""kill -9 at any moment: a run goes on and ends as if nothing had been (SPEC K3, K4; cases 21, 22, 40).

The kills are real: each launch is a process that sends itself SIGKILL in the middle of something, or is sent one.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_runs import draw_nothing, final, go_on, metrics_lines
from fake_trainer import FakeTrainer, config

from decomp import loop
from decomp.loop import DONE
from decomp.manifest import good_steps, step_folders

pytestmark = pytest.mark.slow

PREAMBLE = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, {tests!r})
import fake_trainer
from decomp import checkpoint, figures, logger, manifest
from fake_trainer import FakeTrainer

figures.draw = lambda *_: iter(())

def die():
    end = time.monotonic() + 60  # a save is asynchronous: those of earlier steps may still be under way
    while manifest.good_steps(next(Path(sys.argv[1]).glob("fake/*/checkpoints"))) != {saved}:
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

def before(owner, name, nth):
    real, calls = getattr(owner, name), []
    setattr(owner, name, lambda *a, **k: (calls.append(0), len(calls) == nth and die(), real(*a, **k))[-1])

def after(owner, name, nth):
    real, calls = getattr(owner, name), []
    setattr(owner, name, lambda *a, **k: (calls.append(0), real(*a, **k), len(calls) == nth and die())[1])

def torn(self, line):
    if line.startswith('{{"step": 8,'):
        self._file.write(line.encode()[:9])
        die()
    return append(self, line)

def half_deleted(path, **_):
    if path.name == "5":
        next(p for p in path.rglob("*") if p.is_file()).unlink()
        die()
    return shutil.rmtree(path, **_)

append, shutil = logger.Logger._append, checkpoint.shutil
{moment}
sys.exit(fake_trainer.main(*sys.argv[1:]))
"""

# The moment, and the whole checkpoints it leaves of a run that saves every 5 updates and keeps 2.
MOMENTS = {
    "in the faithfulness warm-up": ("before(FakeTrainer, 'warmup', 1)", []),
    "in a line of metrics.jsonl": ("logger.Logger._append = torn", [5]),
    "written, without a manifest": ("before(checkpoint, 'write_manifest', 2)", [5]),
    "with a manifest that is not in its place": ("before(manifest, '_crc_of', 2)", [5]),
    "just saved": ("after(checkpoint, 'write_manifest', 2)", [5, 10]),
    "in the deletion of an old one": (
        "checkpoint.shutil = SimpleNamespace(**{**vars(shutil), 'rmtree': half_deleted})", [10, 15],
    ),
    "in the report": ("before(figures, 'report', 1)", [15, 20]),
}  # fmt: skip


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


@contextmanager
def _launched(moment: str, saved: list[int], *arguments: Any) -> Iterator[subprocess.Popen[str]]:
    code = PREAMBLE.format(tests=str(Path(__file__).parent), moment=moment, saved=saved)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_environment())
    try:
        yield child
    finally:
        child.kill()
        child.wait(30)
        assert child.stdout is not None
        child.stdout.close()


def _killed(moment: str, saved: list[int], *arguments: Any) -> None:
    with _launched(moment, saved, *arguments) as child:
        text, _ = child.communicate(timeout=120)
        assert child.returncode == -signal.SIGKILL, text


def _run_folder(root: Path) -> Path:
    (folder,) = (root / "fake").iterdir()
    return folder


def _outcome(folder: Path) -> tuple[list[bytes], list[str]]:
    """Every number of the last checkpoint, and metrics.jsonl without its clock."""
    step, numbers = final(folder)
    assert step == 20
    return numbers, metrics_lines(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[bytes], list[str]]:
    """What a run that nobody killed leaves."""
    root = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        assert loop.start(config(root), [], FakeTrainer) == DONE
    return _outcome(_run_folder(root))


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_nothing(monkeypatch)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", MOMENTS)
def test_killed_and_gone_on_equals_uninterrupted(tmp_path: Path, whole: Any, where: str) -> None:
    """The lock of the dead, torn lines and leftovers are no obstacle; what is taken for a checkpoint is whole."""
    moment, saved = MOMENTS[where]
    _killed(moment, saved, tmp_path)
    folder = _run_folder(tmp_path)
    assert (folder / "run.lock").exists() and good_steps(folder / "checkpoints") == saved
    assert go_on(folder) == DONE
    assert _outcome(folder) == whole
    assert step_folders(folder / "checkpoints") == [15, 20]
    assert not (folder / "run.lock").exists() and (folder / "report.html").exists()
    left = {p.name for p in (folder / "checkpoints").iterdir()} - {"15", "20"}
    assert not left, left


@pytest.mark.timeout(300)
def test_killed_while_restoring_past_a_damaged_step(tmp_path: Path, whole: Any) -> None:
    """SPEC K4, twice: the damaged step was set aside by a launch that died too."""
    assert loop.start(config(tmp_path, stop_after=13), [], FakeTrainer) == DONE
    folder = _run_folder(tmp_path)
    next((folder / "checkpoints" / "13" / "progress").rglob("manifest.ocdbt")).write_bytes(b"")
    _killed("after(checkpoint.Checkpoints, 'restore', 1)", [10], tmp_path, f"resume={folder}")
    assert step_folders(folder / "checkpoints") == [10]
    assert go_on(folder) == DONE
    assert _outcome(folder) == whole


@pytest.mark.timeout(600)
def test_killed_at_random_moments_equals_uninterrupted(tmp_path: Path, whole: Any) -> None:
    """From outside, five times in one run, each within a second and a half of the launch's first word."""
    moments = random.Random(0)
    for launch in range(5):
        arguments = [f"resume={_run_folder(tmp_path)}"] if launch else []
        with _launched("", [], tmp_path, "delay=0.05", *arguments) as child:
            assert child.stdout is not None and "run folder" in child.stdout.readline()
            time.sleep(moments.uniform(0, 1.5))
    folder = _run_folder(tmp_path)
    assert go_on(folder) == DONE
    assert _outcome(folder) == whole
