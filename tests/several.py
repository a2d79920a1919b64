"""Several processes of one run on this machine, on loopback, each with a time limit and ended by its pid."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
FAKE = (sys.executable, str(TESTS / "fake_trainer.py"))
DECOMP = (sys.executable, "-m", "decomp")


class Several:
    """Running processes; what they print is in ``out<process>.txt`` of ``folder``."""

    def __init__(self, folder: Path, command: tuple[str, ...], count: int, environment: dict[str, str]):
        self.folder, address = folder, f"127.0.0.1:{_free_port()}"
        folder.mkdir(exist_ok=True, parents=True)
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
            "PYTHONUNBUFFERED": "1",
            "DECOMP_COORDINATOR": address,
            "DECOMP_PROCESSES": str(count),
        }
        self.children = []
        for index in range(count):
            with (folder / f"out{index}.txt").open("w") as out:
                own = env | {"DECOMP_PROCESS": str(index)} | environment
                child = subprocess.Popen(command, env=own, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
            self.children.append(child)

    def out(self, index: int) -> str:
        return (self.folder / f"out{index}.txt").read_text()

    def wait(self, seconds: float, which: tuple[int, ...] | None = None) -> list[int]:
        """Exit codes, by process; fails after ``seconds``, with what was printed."""
        end = time.monotonic() + seconds
        waited = self.children if which is None else [self.children[i] for i in which]
        try:
            return [child.wait(max(0.1, end - time.monotonic())) for child in waited]
        except subprocess.TimeoutExpired as error:
            printed = "\n".join(f"--- {i}\n{self.out(i)[-3000:]}" for i in range(len(self.children)))
            raise AssertionError(f"still running after {seconds} s\n{printed}") from error

    def wait_for(self, text: str, index: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        while text not in self.out(index):
            assert self.children[index].poll() is None, self.out(index)
            assert time.monotonic() < end, f"no {text!r} within {seconds} s\n{self.out(index)}"
            time.sleep(0.02)


@contextlib.contextmanager
def several(folder: Path, *command: str, count: int = 2, **environment: str) -> Iterator[Several]:
    running = Several(folder, command, count, environment)
    try:
        yield running
    finally:
        for child in running.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            child.wait(30)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
