"""decomp/lock.py: case 43."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from decomp import lock
from decomp.config.errors import UserError
from decomp.lock import RunLock


def _foreign(path: Path, age: float, **changes: object) -> None:
    me = lock._identity()
    path.write_text(json.dumps(me | {"host": "node7"} | changes))
    then = time.time() - age
    os.utime(path, (then, then))


def test_a_second_writer_is_told_who_holds_it(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(UserError, match=rf"process {os.getpid()} on this machine writes here since"):
        RunLock(tmp_path)
    assert not (tmp_path / "run.lock").exists()
    RunLock(tmp_path).release()


def test_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    code = "import os, sys, pathlib; from decomp.lock import RunLock; RunLock(pathlib.Path(sys.argv[1])); os._exit(9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False)
    assert (tmp_path / "run.lock").exists()
    RunLock(tmp_path).release()


def test_a_reused_pid_is_not_the_old_process(tmp_path: Path) -> None:
    me = lock._identity()
    (tmp_path / "run.lock").write_text(json.dumps(me | {"birth": "1"}))
    RunLock(tmp_path).release()


def test_lock_of_another_host_holds_until_its_heartbeat_stops(tmp_path: Path) -> None:
    _foreign(tmp_path / "run.lock", age=5)
    with pytest.raises(UserError, match=r"on node7.*heartbeat 5 s ago"):
        RunLock(tmp_path, timeout=60)
    _foreign(tmp_path / "run.lock", age=90)
    RunLock(tmp_path, timeout=60).release()


def test_a_machine_of_the_same_name_is_another_host(tmp_path: Path) -> None:
    _foreign(tmp_path / "run.lock", age=1, host=lock._identity()["host"], boot="another boot", pid=1)
    with pytest.raises(UserError, match="writes here"):
        RunLock(tmp_path, timeout=60)


def test_an_unreadable_lock_is_respected_while_fresh(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text("{")
    with pytest.raises(UserError, match="a process that wrote no name"):
        RunLock(tmp_path, timeout=60)
    RunLock(tmp_path, timeout=0).release()


def test_heartbeat_moves_and_sees_a_takeover(tmp_path: Path) -> None:
    held = RunLock(tmp_path, beat=0.02)
    os.utime(tmp_path / "run.lock", (1, 1))
    _wait(lambda: (tmp_path / "run.lock").stat().st_mtime > 1)
    assert not held.lost
    _foreign(tmp_path / "run.lock", age=0)
    _wait(lambda: held.lost)
    held.release()
    assert (tmp_path / "run.lock").exists()  # another's lock is not ours to remove


def test_of_many_at_once_exactly_one_wins(tmp_path: Path) -> None:
    """Also when all of them find the same stale lock."""
    (tmp_path / "run.lock").write_text(json.dumps(lock._identity() | {"birth": "1"}))
    context = multiprocessing.get_context("spawn")
    results, go = context.Queue(), context.Event()
    workers = [context.Process(target=_contend, args=(tmp_path, go, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for _ in workers:
        assert results.get(timeout=60) == "ready"
    go.set()
    outcomes = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(60)
    assert sorted(outcomes) == ["held", "refused", "refused", "refused"]


def _contend(folder: Path, go: object, results: object) -> None:
    results.put("ready")  # type: ignore[attr-defined]
    go.wait(60)  # type: ignore[attr-defined]
    try:
        held = RunLock(folder)
    except UserError:
        results.put("refused")  # type: ignore[attr-defined]
        return
    results.put("held")  # type: ignore[attr-defined]
    time.sleep(2)
    held.release()


def _wait(true: object) -> None:
    end = time.monotonic() + 20
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end, "nothing happened in 20 s"
        time.sleep(0.01)
