"""decomp/loop.py: SPEC K3, T6, T7; cases 20, 23, 29, 40, 43."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from fake_runs import draw_nothing, final, go_on, metrics_lines, start
from fake_trainer import FakeTrainer, State, config
from several import FAKE
from small_disk import fill, small_disk

from decomp import loop
from decomp.checkpoint import restore_decomposition
from decomp.config.compose import Command
from decomp.config.errors import UserError
from decomp.config.schema import RunConfig
from decomp.folder import read_config
from decomp.lock import RunLock
from decomp.logger import read_metrics
from decomp.loop import DIVERGED, DONE, PREEMPTED
from decomp.manifest import good_steps, step_folders


def _env() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped: what every interrupted one must equal (SPEC K3)."""
    code, folder = start(config(tmp_path_factory.mktemp("whole")))
    assert code == DONE
    return folder


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_nothing(monkeypatch)


def _assert_equal(folder: Path, whole: Path) -> None:
    assert final(folder) == final(whole)
    assert metrics_lines(folder) == metrics_lines(whole)


# ---------------------------------------------------------------- a run from beginning to end
def test_a_run_leaves_a_whole_folder(whole: Path) -> None:
    """DESIGN 5; case 23: a line's and a checkpoint's step is the number of updates done."""
    for name in ("config.yaml", "overrides.txt", "revision.txt", "diff.patch", "placement.txt", "optimizer_groups.txt",
                 "environment.txt", "metrics.jsonl", "report.html", "logs/run.log", "figures/losses.png"):  # fmt: skip
        assert (whole / name).exists(), name
    assert not (whole / "run.lock").exists()
    assert [r["step"] for r in read_metrics(whole) if "loss/total" in r] == list(range(2, 21, 2))
    assert [r["step"] for r in read_metrics(whole) if "eval/kl_ci" in r] == [10, 20]
    assert step_folders(whole / "checkpoints") == [15, 20]
    step, _, manifest = restore_decomposition(whole)
    assert step == 20 and manifest["identity"]["target"] == "target-1"


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, folder = start(config(tmp_path))
    text = capsys.readouterr().out
    assert code == DONE
    for part in (f"run folder: {folder}", "2 sites in 1 stack group", "all  adamw", "4x4_C3  replicated",
                 "warning: C 3 is", "step 20/20  loss", "final evaluation after 20 updates", "eval/kl_ci",
                 "report:"):  # fmt: skip
        assert part in text, part
    assert text.count("final evaluation after") == 1


def test_a_target_that_does_not_build_leaves_no_folder(tmp_path: Path) -> None:
    def refuse(_: RunConfig) -> FakeTrainer:
        raise UserError("target.path=nowhere: no such folder")

    with pytest.raises(UserError, match="nowhere"):
        loop.start(config(tmp_path), [], refuse)
    assert list((tmp_path / "fake").iterdir()) == []


def test_metrics_at_log_steps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the guard's three scalars leave the device at every step."""
    fetched: list[int] = []
    real = jax.device_get
    monkeypatch.setattr(loop.jax, "device_get", lambda tree: (fetched.append(len(tree)), real(tree))[1])
    start(config(tmp_path, logger__every=10))
    assert fetched.count(6) == 2 and all(n in (3, 6) for n in fetched)


# ---------------------------------------------------------------- stopping and going on
@pytest.mark.parametrize("stop_after", [10, 13])
def test_stopped_and_resumed_equals_uninterrupted(tmp_path: Path, whole: Path, stop_after: int, capsys: Any) -> None:
    """SPEC K3, case 40; also where no checkpoint, log line or evaluation was due."""
    code, folder = start(config(tmp_path, stop_after=stop_after))
    assert code == DONE and step_folders(folder / "checkpoints")[-1] == stop_after
    assert f"resume run={folder}" in capsys.readouterr().out
    assert not (folder / "report.html").exists()
    assert go_on(folder) == DONE
    _assert_equal(folder, whole)
    assert (folder / "overrides.txt").read_text().count("# ") == 2


def test_killed_between_checkpoints_equals_uninterrupted(tmp_path: Path, whole: Path) -> None:
    """Lines after the restored step are cut, a torn one too; each stands once at the end."""
    _, folder = start(config(tmp_path, stop_after=13))
    shutil.rmtree(folder / "checkpoints" / "13")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 14, "loss/to')
    assert step_folders(folder / "checkpoints") == [10]
    assert go_on(folder) == DONE
    _assert_equal(folder, whole)


@pytest.mark.slow
@pytest.mark.parametrize("act, saved", [("step:1", 0), ("step:13", 10), ("evaluate:10", 5), ("evaluate:20", 20)])
def test_kill_9_at_any_moment_equals_uninterrupted(tmp_path: Path, whole: Path, act: str, saved: int) -> None:
    """SPEC K3, K4, with a real death: in the compile, in training, in an evaluation, in the final one."""
    arguments = [str(tmp_path), f"act={act}:0:SIGKILL", "delay=0.1"]
    died = subprocess.run([*FAKE, *arguments], env=_env(), timeout=240, check=False, capture_output=True)
    assert died.returncode == -signal.SIGKILL, died.stdout + died.stderr
    (folder,) = (tmp_path / "fake").iterdir()
    assert (folder / "run.lock").exists()
    found = max(good_steps(folder / "checkpoints"), default=0)
    assert found in (saved, max(0, saved - 5))  # a slow disk may still have been writing the newest
    again = go_on(folder) if found else loop.run(read_config(folder), folder, FakeTrainer)
    assert again == DONE
    _assert_equal(folder, whole)


def test_damaged_newest_resumes_from_the_one_before(tmp_path: Path, whole: Path, capsys: Any) -> None:
    """SPEC K4."""
    _, folder = start(config(tmp_path, stop_after=13))
    next((folder / "checkpoints" / "13" / "decomposition").rglob("manifest.ocdbt")).unlink()
    assert go_on(folder) == DONE
    assert "checkpoint 13 is damaged" in capsys.readouterr().out
    _assert_equal(folder, whole)


class Signalling(FakeTrainer):
    """Sends ``sign`` to its own process in the middle of something."""

    where, at, sign = "step", 7, signal.SIGTERM

    def _maybe(self, where: str, step: int) -> None:
        if (where, step) == (self.where, self.at):
            os.kill(os.getpid(), self.sign)
            time.sleep(0.3)  # the watching thread runs

    def step(self, state: State, tokens: np.ndarray) -> Any:
        self._maybe("step", int(state.progress["step"]) + 1)
        return super().step(state, tokens)

    def warmup(self, state: State, n: int) -> Any:
        self._maybe("warmup", n)
        return super().warmup(state, n)

    def evaluate(self, state: State, step: int, stopping: Callable[[], bool] = lambda: False) -> Any:
        self._maybe("evaluate", step)
        return super().evaluate(state, step, stopping)


def _signalling(where: str, at: int, sign: signal.Signals = signal.SIGTERM) -> type[Signalling]:
    return type("Here", (Signalling,), {"where": where, "at": at, "sign": sign})


@pytest.mark.parametrize(
    "where, at, sign",
    [
        ("step", 7, signal.SIGINT),
        ("step", 8, signal.SIGTERM),
        ("step", 1, signal.SIGUSR2),  # in the compile
        ("step", 20, signal.SIGTERM),  # the last one: what is left is the final evaluation
        ("step", 10, signal.SIGTERM),  # an evaluation is due, and waits for the resume
        ("evaluate", 10, signal.SIGTERM),
    ],
)
def test_a_signal_finishes_the_step_saves_and_goes_on_equal(
    tmp_path: Path, whole: Path, capsys: Any, where: str, at: int, sign: signal.Signals
) -> None:
    """Case 29; exit code 75."""
    before = signal.getsignal(sign)
    code, folder = start(config(tmp_path), _signalling(where, at, sign))
    assert code == PREEMPTED
    assert good_steps(folder / "checkpoints")[-1] == at
    text = capsys.readouterr().out
    assert f"{sign.name}: finishing this step" in text and f"resume run={folder}" in text
    assert signal.getsignal(sign) == before
    assert go_on(folder) == DONE
    _assert_equal(folder, whole)


def test_a_signal_in_the_warm_up_has_nothing_to_save(tmp_path: Path, whole: Path, capsys: Any) -> None:
    """SPEC T6: its optimizer is thrown away, so it begins again; as a requeued job does."""
    code, folder = start(
        config(tmp_path, loss__faithfulness={"warmup": {"steps": 13}}), _signalling("warmup", 10), ["steps=20"]
    )
    assert code == PREEMPTED and step_folders(folder / "checkpoints") == []
    assert "python -m decomp steps=20" in capsys.readouterr().out
    assert loop.run(read_config(folder), folder, FakeTrainer) == DONE
    assert [r["step"] for r in read_metrics(folder)] == [r["step"] for r in read_metrics(whole)]


def _heard_in_the_build(cfg: RunConfig) -> FakeTrainer:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.3)  # the watching thread runs
    return FakeTrainer(cfg)


@pytest.fixture
def deaf() -> Iterator[None]:
    """A signal that nobody asks for is lost, where it would end the tests."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_signal_before_the_run_has_a_folder_leaves_none(tmp_path: Path, deaf: None, capsys: Any) -> None:
    """Case 29: as the target loads."""
    assert loop.start(config(tmp_path), ["steps=20", "a=b c"], _heard_in_the_build) == PREEMPTED
    assert list((tmp_path / "fake").iterdir()) == []
    heard, said = capsys.readouterr().out.splitlines()
    assert heard == "SIGTERM: stopping as soon as what is under way ends"
    assert said.startswith("SIGTERM: stopped before the first update, nothing to save")
    assert said.endswith("python -m decomp steps=20 'a=b c'")


def test_a_signal_before_a_run_is_gone_on_with_leaves_it_as_it_is(
    tmp_path: Path, whole: Path, deaf: None, capsys: Any
) -> None:
    """Case 29: there are checkpoints, and nothing new to save."""
    _, folder = start(config(tmp_path, stop_after=10))
    before = (folder / "metrics.jsonl").read_bytes(), (folder / "overrides.txt").read_bytes()
    assert go_on(folder, _heard_in_the_build) == PREEMPTED
    assert good_steps(folder / "checkpoints") == [5, 10] and not (folder / "run.lock").exists()
    assert ((folder / "metrics.jsonl").read_bytes(), (folder / "overrides.txt").read_bytes()) == before
    assert f"SIGTERM: stopped before an update was made; go on with: python -m decomp resume run={folder}" in (
        capsys.readouterr().out
    )
    assert go_on(folder) == DONE
    _assert_equal(folder, whole)


@pytest.mark.parametrize("verb", ["run", "resume"])
def test_a_signal_while_modules_are_imported_is_remembered(
    tmp_path: Path, deaf: None, monkeypatch: pytest.MonkeyPatch, verb: str, capsys: Any
) -> None:
    """Case 29: nothing is built for it."""

    class Importing(types.ModuleType):
        @property
        def build(self) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
            return None

    cfg = config(tmp_path, stop_after=5)
    if verb == "resume":
        _, folder = start(cfg)
    monkeypatch.setitem(sys.modules, "decomp.build", Importing("decomp.build"))
    monkeypatch.setattr(Command, "config", lambda _: cfg)
    texts = (f"run={folder}",) if verb == "resume" else ()
    assert importlib.import_module(f"decomp.verbs.{verb}").main(Command(verb, texts)) == PREEMPTED
    assert len(list((tmp_path / "fake").iterdir())) == (verb == "resume")


def test_ctrl_c_twice_stops_at_once(tmp_path: Path) -> None:
    """Also inside a call that never comes back to Python's own handlers."""
    command = [*FAKE, str(tmp_path), "delay=60", "loss.faithfulness=null"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_env()) as child:
        assert child.stdout is not None
        watchdog = threading.Timer(60, child.kill)
        watchdog.start()
        try:
            for line in child.stdout:
                if line.startswith("warning:"):
                    time.sleep(1)
                    child.send_signal(signal.SIGINT)
                if line.startswith("SIGINT"):
                    child.send_signal(signal.SIGINT)
                    sent = time.monotonic()
            assert child.wait(10) == 130
            assert time.monotonic() - sent < 5
        finally:
            watchdog.cancel()
            child.kill()
    (folder,) = (tmp_path / "fake").iterdir()
    assert not (folder / "run.lock").exists() and step_folders(folder / "checkpoints") == []


def test_a_complete_run_says_so(tmp_path: Path, whole: Path, capsys: Any) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    assert go_on(folder) == DONE
    assert "complete, all 20 updates are done" in capsys.readouterr().out
    (folder / "report.html").unlink()
    assert go_on(folder) == DONE
    assert (folder / "report.html").exists() and metrics_lines(folder) == metrics_lines(whole)


def test_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    """Case 25."""

    class Other(FakeTrainer):
        def target_hash(self) -> str:
            return "target-2"

    _, folder = start(config(tmp_path, stop_after=5))
    with pytest.raises(UserError, match="target is target-1 in the checkpoint, target-2 here"):
        go_on(folder, Other)
    assert "another decomposition" in (folder / "logs" / "run.log").read_text()


def test_second_writer_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """Case 43."""
    _, folder = start(config(tmp_path, stop_after=5))
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with RunLock(folder), pytest.raises(UserError, match="writes here"):
        go_on(folder, checkpoint=config(tmp_path, checkpoint__every=3).checkpoint)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


# ---------------------------------------------------------------- what is not finite
def test_a_non_finite_update_is_named_and_skipped(tmp_path: Path, capsys: Any) -> None:
    """SPEC T7."""
    code, folder = start(config(tmp_path, max_skipped=3), lambda cfg: FakeTrainer(cfg, poison=(4, 8, 9)))
    assert code == DONE
    text = capsys.readouterr().out
    assert "step 4: recon/stochastic was not finite: update skipped (1 in a row)" in text
    assert "step 9: recon/stochastic was not finite: update skipped (2 in a row)" in text
    record = next(r for r in read_metrics(folder) if r["step"] == 4)
    assert record["guard/bad_term"] == "recon/stochastic" and np.isnan(record["loss/total"])
    assert read_metrics(folder)[-2]["guard/skipped_total"] == 3


def test_max_skipped_in_a_row_stops_with_the_last_good_checkpoint(tmp_path: Path, capsys: Any) -> None:
    code, folder = start(config(tmp_path, max_skipped=3), lambda cfg: FakeTrainer(cfg, poison=(7, 8, 9)))
    assert code == DIVERGED
    assert good_steps(folder / "checkpoints") == [5]
    text = capsys.readouterr().out
    assert "diverged: recon/stochastic was not finite in 3 updates in a row, the last one 9" in text
    assert f"the last good checkpoint is {folder / 'checkpoints' / '5'}" in text


def test_a_checkpoint_that_is_due_waits_for_an_update_that_is_not_skipped(tmp_path: Path) -> None:
    """SPEC T7: else those of a state that is stuck would take the place of the last one from before it."""
    poison = (5, 9, 10, 11)
    code, folder = start(config(tmp_path, checkpoint__keep_last=9), lambda cfg: FakeTrainer(cfg, poison=poison))
    assert code == DONE and good_steps(folder / "checkpoints") == [6, 12, 15, 20]


@pytest.mark.parametrize("stop", ["signal", "stop_after", "end"])
def test_the_end_and_a_signal_save_where_updates_are_skipped(tmp_path: Path, stop: str) -> None:
    """SPEC T7."""
    at = 20 if stop == "end" else 10
    poison = (at - 1, at)
    build = _signalling("step", 10) if stop == "signal" else FakeTrainer
    changes = {"stop_after": 10} if stop == "stop_after" else {}
    code, folder = start(config(tmp_path, **changes), lambda cfg: build(cfg, poison=poison))
    assert code == (PREEMPTED if stop == "signal" else DONE)
    assert good_steps(folder / "checkpoints")[-1] == at
    assert stop == "end" or go_on(folder) == DONE


def test_divergence_in_the_last_update_is_no_success(tmp_path: Path) -> None:
    code, folder = start(config(tmp_path, max_skipped=2), lambda cfg: FakeTrainer(cfg, poison=(19, 20)))
    assert code == DIVERGED and good_steps(folder / "checkpoints") == [10, 15]


# ---------------------------------------------------------------- disks
class Filling(FakeTrainer):
    """Fills the disk at one update and empties it at another."""

    disk: Path
    full, free = 6, 1000

    def step(self, state: State, tokens: np.ndarray) -> Any:
        done = int(state.progress["step"])
        if done == self.full:
            end = time.monotonic() + 60
            while not list(self.disk.glob("fake/*/checkpoints/5/manifest.json")):
                assert time.monotonic() < end, "checkpoint 5 was not saved"
                time.sleep(0.01)
            fill(self.disk, leave=64 * 1024)
        if done == self.free:
            (self.disk / "ballast").unlink()
        return super().step(state, tokens)


def test_full_disk_is_said_retried_and_mended(tmp_path: Path, capsys: Any) -> None:
    """Case 20."""
    with small_disk(tmp_path / "disk", "8m") as disk:
        build = type("Mended", (Filling,), {"disk": disk, "free": 11})
        code, folder = start(config(disk), lambda cfg: build(cfg, megabytes=1.0))
        text = capsys.readouterr().out
        assert code == DONE, text
        assert "warning: checkpoint 10 was not saved: no space left" in text and "last good checkpoint is 5" in text
        assert good_steps(folder / "checkpoints")[-1] == 20
        steps = [int(line.split()[1]) for line in text.splitlines() if line.startswith("checkpoint ")]
        assert steps[0] == 5 and 10 < steps[1] < 15  # retried at once, not at the next multiple


def test_disk_that_stays_full_ends_the_run_with_exit_2(tmp_path: Path, capsys: Any) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        build = type("Full", (Filling,), {"disk": disk})
        with pytest.raises(UserError, match=r"checkpoint 20 could not be saved: no space left.*the last good one is 5"):
            start(config(disk), lambda cfg: build(cfg, megabytes=1.0))
        (folder,) = (disk / "fake").iterdir()
        assert good_steps(folder / "checkpoints") == [5] and not (folder / "run.lock").exists()
        assert [r["step"] for r in read_metrics(folder) if "eval/kl_ci" in r] == [10, 20]
        (disk / "ballast").unlink()
        assert go_on(folder, lambda cfg: FakeTrainer(cfg, megabytes=1.0)) == DONE


def test_a_disk_too_small_for_two_saves_is_refused_at_start(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "3m") as disk, pytest.raises(UserError, match="two checkpoints need 4 MB"):
        start(config(disk), lambda cfg: FakeTrainer(cfg, megabytes=2.0))


# ---------------------------------------------------------------- parts
def test_profile_writes_a_trace(tmp_path: Path) -> None:
    code, folder = start(config(tmp_path, steps=4, profile__steps=[2, 3]))
    assert code == DONE
    assert list((folder / "profile").rglob("*.xplane.pb"))
