"""decomp/processes.py and what a run of two processes does: cases 29, 30, 34.

The trainer is a fake; the collectives, the signals, the deaths and the checkpoints are real.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_trainer import FakeTrainer, config
from several import FAKE, Several, several

from decomp import loop, processes
from decomp.config.errors import UserError
from decomp.folder import read_config
from decomp.logger import read_metrics
from decomp.manifest import good_steps, step_folders

WAIT = 240  # seconds, on a machine that does other things
PATIENCE = 8  # seconds; those of a test of a silent death


def _folder(output: Path) -> Path:
    (folder,) = (output / "fake").iterdir()
    return folder


def _log(folder: Path, name: str = "run") -> str:
    return (folder / "logs" / f"{name}.log").read_text()


def _numbers(folder: Path) -> list[tuple[Any, ...]]:
    return [
        (r["step"], *(v for k, v in sorted(r.items()) if isinstance(v, float) and k != "time"))
        for r in read_metrics(folder)
    ]


def _assert_as_one_process(folder: Path, output: Path) -> None:
    """Lines of metrics.jsonl equal those of one process that was never stopped, but for the order of sums."""
    assert loop.start(config(output / "one"), [], FakeTrainer) == 0
    ours, one = _numbers(folder), _numbers(_folder(output / "one"))
    assert [row[0] for row in ours] == [row[0] for row in one]
    for row, other in zip(ours, one, strict=True):
        np.testing.assert_allclose(row, other, rtol=1e-6)


# ---------------------------------------------------------------- the environment
@pytest.mark.parametrize(
    "given, message",
    [
        ({"DECOMP_PROCESSES": "2"}, "DECOMP_COORDINATOR: is not set, and DECOMP_PROCESSES=2 is"),
        ({"DECOMP_COORDINATOR": "a:1", "DECOMP_PROCESS": "0"}, "DECOMP_PROCESSES: is not set"),
        ({"DECOMP_COORDINATOR": "a:1", "DECOMP_PROCESSES": "2", "DECOMP_PROCESS": "2"}, "DECOMP_PROCESS=2, "),
        ({"DECOMP_COORDINATOR": "a:1", "DECOMP_PROCESSES": "two", "DECOMP_PROCESS": "0"}, "DECOMP_PROCESSES=two"),
        ({"DECOMP_COORDINATOR": "nowhere", "DECOMP_PROCESSES": "2", "DECOMP_PROCESS": "0"}, "give host:port"),
        (
            {"DECOMP_COORDINATOR": "a:1", "DECOMP_PROCESSES": "2", "DECOMP_PROCESS": "0", "DECOMP_PATIENCE": "soon"},
            "DECOMP_PATIENCE=soon: give a number of seconds",
        ),
    ],
)
def test_a_half_set_environment_is_one_line(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], message: str
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        processes.place()
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_one_process_touches_nothing_of_the_distributed_runtime() -> None:
    with processes.joined():
        assert processes.place() is None and not processes.several() and processes.is_primary()
        assert processes.from_primary(lambda: (1, "two")) == (1, "two")
        assert processes._state().client is None


def test_a_coordinator_that_cannot_listen_is_one_line() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"DECOMP_COORDINATOR={address}: cannot listen there \(\[Errno 98\]"):
            processes._serve(processes.Place(address, 2, 0, 60.0))


# ---------------------------------------------------------------- stopping
def test_a_signal_to_one_process_saves_one_step_on_all(tmp_path: Path) -> None:
    """Case 30: only the second process hears it; both leave with 75, and one process goes on from there."""
    with several(tmp_path, *FAKE, str(tmp_path), "act=step:7:1:SIGTERM", "delay=0.02") as run:
        assert run.wait(WAIT) == [75, 75], run.out(0) + run.out(1)
    folder = _folder(tmp_path)
    saved = good_steps(folder / "checkpoints")[-1]
    assert 7 <= saved <= 9
    assert "SIGTERM reached another process" in _log(folder) and "SIGTERM: finishing" in _log(folder, "1")
    assert f"stopped after {saved} of 20 updates" in _log(folder) and f"stopped after {saved} of 20" in _log(
        folder, "1"
    )
    assert "step " not in run.out(1) and not (folder / "run.lock").exists()
    assert loop.resume(read_config(folder), folder, [], FakeTrainer) == 0
    _assert_as_one_process(folder, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "act, more, saved",
    [
        ("warmup:10:1:SIGUSR2", ("loss.faithfulness.warmup.steps=400", "delay=0.05"), ()),
        ("evaluate:10:1:SIGTERM", ("eval.batches=2000", "delay=0.02"), (10,)),
        ("evaluate:20:0:SIGUSR2", ("eval.batches=2000", "eval.every=1000", "delay=0.02"), (20,)),
        ("step:1:0:SIGUSR2", ("delay=0.02",), (1, 2, 3)),  # in the compile
        ("step:7:1:SIGTERM+SIGTERM+SIGUSR2", ("delay=0.02",), (7, 8, 9)),
        ("step:7:0:SIGINT", ("delay=0.02",), (7, 8, 9)),
    ],
)
def test_a_signal_is_seen_in_every_phase(
    tmp_path: Path, act: str, more: tuple[str, ...], saved: tuple[int, ...]
) -> None:
    """Cases 29, 30; then both processes go on and end as if nothing had been."""
    with several(tmp_path, *FAKE, str(tmp_path), f"act={act}", *more) as run:
        assert run.wait(WAIT) == [75, 75], run.out(0) + run.out(1)
    folder = _folder(tmp_path)
    steps = good_steps(folder / "checkpoints")
    assert (steps[-1] in saved) if saved else not steps
    if not steps:
        return
    stored = read_config(folder)
    loop.write_config(folder, stored.model_copy(update={"eval": stored.eval.model_copy(update={"batches": 1})}))
    with several(tmp_path / "again", *FAKE, str(tmp_path), f"resume={folder}") as run:
        assert run.wait(WAIT) == [0, 0], run.out(0) + run.out(1)
    if stored.eval.every == 10:
        _assert_as_one_process(folder, tmp_path)
    assert (folder / "report.html").exists()


@pytest.mark.parametrize("process", [0, 1])
def test_a_signal_before_there_is_a_folder_ends_all(tmp_path: Path, process: int) -> None:
    """Cases 29, 30: one process hears it as its target loads; no process makes the folder, and the primary says so."""
    with several(tmp_path, *FAKE, str(tmp_path), f"act=build:0:{process}:SIGTERM") as run:
        assert run.wait(WAIT) == [75, 75], run.out(0) + run.out(1)
    assert list((tmp_path / "fake").iterdir()) == []
    assert "SIGTERM: stopping as soon as" in run.out(process)
    assert "SIGTERM: stopped before the first update" in run.out(0) and "before the first" not in run.out(1)


def test_ctrl_c_twice_before_there_is_a_folder_ends_all_at_once(tmp_path: Path) -> None:
    with several(tmp_path, *FAKE, str(tmp_path), "act=build:0:1:SIGINT+SIGINT") as run:
        assert run.wait(WAIT) == [130, 130], run.out(0) + run.out(1)
    assert list((tmp_path / "fake").iterdir()) == []


# ---------------------------------------------------------------- dying
def _seconds_until_gone(run: Several, survivor: int, victim: int) -> tuple[int, float]:
    run.wait(WAIT, (victim,))
    began = time.monotonic()
    (code,) = run.wait(WAIT, (survivor,))
    return code, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("where", ["step:8", "evaluate:10"])
def test_the_death_of_one_ends_the_other(tmp_path: Path, victim: int, where: str) -> None:
    """kill -9 in the middle of training, and while the other one waits for nothing; then both go on."""
    act = (f"act={where}:{victim}:SIGKILL", "eval.batches=500", "delay=0.3")
    with several(tmp_path, *FAKE, str(tmp_path), *act, DECOMP_PATIENCE=str(PATIENCE)) as run:
        code, seconds = _seconds_until_gone(run, 1 - victim, victim)
        assert code == 1 and seconds < PATIENCE + 10
    said = [line for line in run.out(1 - victim).splitlines() if line.startswith("decomp: ")]
    assert len(said) == 1 and ("died" in said[0]), run.out(1 - victim)
    folder = _folder(tmp_path)
    assert good_steps(folder / "checkpoints")[-1] == 5
    stored = read_config(folder)
    loop.write_config(folder, stored.model_copy(update={"eval": stored.eval.model_copy(update={"batches": 1})}))
    with several(tmp_path / "again", *FAKE, str(tmp_path), f"resume={folder}") as run:
        assert run.wait(WAIT) == [0, 0], run.out(0) + run.out(1)
    _assert_as_one_process(folder, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("failing", [0, 1])
def test_what_one_raises_ends_the_others_with_its_words(tmp_path: Path, failing: int) -> None:
    """Case 34: gone within seconds, and the traceback stands in the log of the process that raised."""
    with several(tmp_path, *FAKE, str(tmp_path), f"act=step:7:{failing}:raise", "delay=0.02") as run:
        code, seconds = _seconds_until_gone(run, 1 - failing, failing)
        assert code == 1 and seconds < 10
    other = run.out(1 - failing)
    assert f"decomp: process {failing} of 2 failed: ArithmeticError: what a bug says" in other
    assert "Traceback" in run.out(failing) and "Traceback" not in other
    folder = _folder(tmp_path)
    assert "ArithmeticError: what a bug says" in _log(folder, "1" if failing else "run")
    assert not (folder / "run.lock").exists()


# ---------------------------------------------------------------- saving
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_save_that_fails_on_one_process_fails_on_all_and_is_tried_again(tmp_path: Path) -> None:
    """Case 20 with two writers: the second may not write for three updates; it is never counted."""
    options = ("act=step:10:1:refuse", "megabytes=1", "checkpoint.every=10", "steps=30", "delay=0.3")
    with several(tmp_path, *FAKE, str(tmp_path), *options) as run:
        assert run.wait(WAIT) == [0, 0], run.out(0) + run.out(1)
    folder = _folder(tmp_path)
    for name in ("run", "1"):
        assert "warning: checkpoint 10 was not saved: process 1: " in _log(folder, name), _log(folder, name)
        assert "checkpoint 30 saved" in _log(folder, name)
    saved = [int(line.split("checkpoint ")[1].split()[0]) for line in _log(folder).splitlines() if " saved (" in line]
    assert 10 not in saved and saved[0] < 20
    assert step_folders(folder / "checkpoints")[-1] == 30


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_failed_save_is_told_at_the_same_step_whoever_knows_first(tmp_path: Path) -> None:
    """The primary knows of the failure before its next update, the second process after it: had each told it as it
    heard, they would try again at different steps and wait for each other for ever."""
    options = ("act=step:5:1:refuse", "megabytes=1", "steps=10", "delay=0.1", "pause=2")
    with several(tmp_path, *FAKE, str(tmp_path), *options) as run:
        assert run.wait(90) == [0, 0], run.out(0) + run.out(1)
    folder = _folder(tmp_path)
    told = [[line for line in _log(folder, name).splitlines() if "was not saved" in line] for name in ("run", "1")]
    assert len(told[0]) == len(told[1]) > 0
    assert step_folders(folder / "checkpoints")[-1] == 10
