"""``decomp -m``: every point of a sweep as a run of its own, one after another in this terminal.

Each point is a process: meshes, precisions and simulated devices are set once per process, and a point that fails, in
whatever way, leaves the others alone (case 36).
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from decomp.config import overrides
from decomp.config.compose import Command
from decomp.config.errors import UserError

MEANING = {0: "done", 1: "failed", 2: "refused", 3: "diverged", 75: "stopped", 130: "interrupted"}


def main(command: Command) -> int:
    """0 if every point is done, 1 otherwise."""
    if command.verb != "run":
        raise UserError(f"-m: sweeps runs, not {command.verb}; leave -m out")
    points = list(overrides.points(list(command.texts), command.vocabulary))
    codes = _run_all(points, command.config_dirs)
    print(f"sweep of {len(points)}:")
    for i, point in enumerate(points):
        said = MEANING.get(codes[i], f"ended with exit code {codes[i]}") if i < len(codes) else "not started"
        print(f"  {i + 1}: {said:18} {shlex.join(point)}")
    return 0 if codes == [0] * len(points) else 1


def _run_all(points: Sequence[Sequence[str]], config_dirs: Sequence[Path]) -> list[int]:
    """Exit codes of the points that were started; a Ctrl-C ends the point at hand and the sweep."""
    extra = [part for folder in config_dirs for part in ("--config-dir", str(folder))]
    codes = []
    for i, point in enumerate(points):
        print(f"[{i + 1}/{len(points)}] {shlex.join(point)}", flush=True)
        code, stopped = _run([sys.executable, "-m", "decomp", *extra, *point])
        codes.append(code)
        if stopped:
            break
    return codes


def _run(command: Sequence[str]) -> tuple[int, bool]:
    """The exit code, and whether a signal asked the sweep to stop.

    A terminal sends Ctrl-C to the point as well, which saves and ends by itself; SIGTERM is passed on.
    """
    point = subprocess.Popen(command)
    stopped: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        stopped.append(number)
        if number == signal.SIGTERM:
            point.terminate()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return point.wait(), bool(stopped)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
