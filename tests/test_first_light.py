"""`python -m decomp` from end to end: a run, its folder, its resumption, its decomposition opened from Python."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import decomp

Cli = Callable[..., subprocess.CompletedProcess[str]]
SMOKE = ("experiment=smoke", "profile.steps=[3,4]")


def lines(folder: Path) -> list[dict[str, object]]:
    """metrics.jsonl without what a clock says."""
    return [
        {k: v for k, v in json.loads(row).items() if "time" not in k and "per_s" not in k}
        for row in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def runs(root: Path, experiment: str = "smoke") -> list[Path]:
    return sorted((root / "outputs" / experiment).iterdir())


@pytest.fixture
def cached(tmp_path: Path) -> dict[str, str]:
    """One compilation cache for the processes of a test: they run the same programs."""
    return {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5"}


@pytest.mark.timeout(600)
def test_a_run_and_a_resumed_run_are_the_same_run(decomp_cli: Cli, tmp_path: Path, cached: dict[str, str]) -> None:
    """SPEC K3 with the real model: 8 updates = 5 + resume + 3, bit for bit; every promised file is there."""
    whole = decomp_cli(*SMOKE, timeout=300, **cached)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    (first,) = runs(tmp_path)
    for name in (
        "config.yaml", "overrides.txt", "revision.txt", "placement.txt", "optimizer_groups.txt", "environment.txt",
        "metrics.jsonl", "report.html", "checkpoints/8", "figures",
    ):  # fmt: skip
        assert (first / name).exists(), name
    assert list(first.rglob("*.xplane.pb")), "profile.steps left no trace"
    assert "eval/kl_unmasked" in json.dumps(lines(first)[-1])

    stopped = decomp_cli(*SMOKE, "stop_after=5", timeout=300, **cached)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    second = next(r for r in runs(tmp_path) if r != first)
    assert "resume run=" in stopped.stdout
    resumed = decomp_cli("resume", f"run={second}", "stop_after=8", timeout=300, **cached)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr

    assert lines(second) == lines(first)
    a, b = decomp.open_run(first), decomp.open_run(second)
    assert a.step == b.step == 8
    assert len(a.sites) == 21
    for site in a.sites:
        np.testing.assert_array_equal(a.V(site), b.V(site))
        np.testing.assert_array_equal(a.U(site), b.U(site))
    d_in, d_out = a.V(a.sites[0]).shape[0], a.U(a.sites[0]).shape[1]
    assert (d_in, d_out) == (64, 64)


@pytest.mark.timeout(600)
def test_a_foreign_model_is_decomposed(decomp_cli: Cli, tmp_path: Path, cached: dict[str, str]) -> None:
    """stories260K: another architecture's sizes, fp32, its own tokenizer."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "models" / "stories260K"
    if not folder.exists():
        pytest.skip("../shared/models/stories260K is not here")
    target = ("target=llama", f"target.path={folder}", "sites=mlp", "steps=2", "eval.every=2")
    done = decomp_cli("experiment=smoke", *target, timeout=300, **cached)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(decomp.open_run(runs(tmp_path)[0]).sites) == 15


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_poison_ends_with_exit_3_the_term_and_the_last_good_checkpoint(decomp_cli: Cli, tmp_path: Path) -> None:
    """SPEC T7 with the real step: a learning rate that no float survives poisons every update after the first."""
    poison = ("optim.components.lr=1e38", "max_skipped=3", "checkpoint.every=1")
    done = decomp_cli("experiment=smoke", *poison, timeout=500)
    assert done.returncode == 3, done.stdout + done.stderr
    (folder,) = runs(tmp_path)
    said = done.stdout.splitlines()[-1]
    assert said.startswith("diverged: faithfulness was not finite in 3 updates in a row, the last one 4"), said
    assert "step 2: faithfulness was not finite: update skipped (1 in a row)" in done.stdout
    good = Path(said.rpartition("the last good checkpoint is ")[2])
    assert good.parent == folder / "checkpoints"
    opened = decomp.open_run(folder, int(good.name))
    assert all(np.isfinite(opened.V(site)).all() for site in opened.sites)
    assert [row["guard/bad_term"] for row in lines(folder)][:2] == [None, "faithfulness"]
    assert not (folder / "run.lock").exists() and "Traceback" not in done.stderr
