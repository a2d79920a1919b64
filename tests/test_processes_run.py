"""A run of two processes from the command line, with the real step: DESIGN 5, SPEC D8, K1, K3."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from several import DECOMP, several

import decomp

WAIT = 600  # seconds: two processes compile beside each other
SMOKE = ("experiment=smoke", "mesh=single", "mesh.fsdp=2", "mesh.simulate=true")


def _runs(root: Path) -> list[Path]:
    return sorted((root / "outputs" / "smoke").iterdir())


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(3 * WAIT)
def test_two_processes_stopped_and_resumed_equal_one(
    decomp_cli: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The second process is told to stop after two updates; both go on and end where one of two devices ends."""
    one = decomp_cli(*SMOKE, timeout=WAIT)
    assert one.returncode == 0, one.stdout + one.stderr
    (whole,) = _runs(tmp_path)

    with several(tmp_path, *DECOMP, *SMOKE) as run:
        run.wait_for("step 2/8", 0, WAIT)
        run.children[1].terminate()
        assert run.wait(WAIT) == [75, 75], run.out(0) + run.out(1)
    folder = next(f for f in _runs(tmp_path) if f != whole)
    assert "SIGTERM: finishing this step and saving" in (folder / "logs" / "1.log").read_text()
    assert "(cpu, process 1)" in (folder / "environment.txt").read_text()
    stopped = decomp.open_run(folder).step
    assert 2 <= stopped < 8

    with several(tmp_path, *DECOMP, "resume", f"run={folder}") as run:
        assert run.wait(WAIT) == [0, 0], run.out(0) + run.out(1)
    assert f"resumed from checkpoint {stopped}" in run.out(0) and (folder / "report.html").exists()

    ours, theirs = _lines(folder), _lines(whole)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for row, other in zip(ours, theirs, strict=True):
        losses = [name for name in row if name.startswith(("loss/", "eval/"))]
        np.testing.assert_allclose([row[n] for n in losses], [other[n] for n in losses], rtol=1e-5)
    a, b = decomp.open_run(folder), decomp.open_run(whole)
    for site in a.sites:
        for x, y in ((a.V(site), b.V(site)), (a.U(site), b.U(site))):
            assert np.linalg.norm(x - y) <= 5e-5 * np.linalg.norm(y), site
