"""`python -m decomp` from end to end: a run, its folder, its resumption, its decomposition opened from Python."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

import decomp
from decomp.checkpoint import read_item
from decomp.manifest import ITEMS, read_manifest

Cli = Callable[..., subprocess.CompletedProcess[str]]
SMOKE = (
    "experiment=smoke", "steps=20", "eval.every=10", "checkpoint.every=5", "profile.steps=[3,4]",
    "loss.frequency.ema_halflife_steps=4", "loss.recon.adversarial.coeff={max: 1.0, knots: [{at: 0.0, frac: 0.5}, "
    "{at: 1.0, frac: 1.0, interp: cosine}]}",
)  # fmt: skip


def lines(folder: Path) -> list[dict[str, object]]:
    """metrics.jsonl without what a clock says."""
    return [
        {k: v for k, v in json.loads(row).items() if "time" not in k and "per_s" not in k}
        for row in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def runs(root: Path, experiment: str = "smoke") -> list[Path]:
    return sorted((root / "outputs" / experiment).iterdir())


def same_checkpoints(first: Path, second: Path, step: int) -> None:
    """Every array of both items: parameters, moments, sources, averages, counts."""
    arrays = read_manifest(first)["arrays"]
    assert arrays == read_manifest(second)["arrays"]
    for item in ITEMS:
        a, b = (read_item(folder, item) for folder in (first, second))
        jax.tree.map(np.testing.assert_array_equal, a, b)
    progress = read_item(first, "progress")
    assert int(progress["step"]) == step and len(jax.tree.leaves(progress["sources"]["adversarial"])) > 3


@pytest.fixture
def cached(tmp_path: Path) -> dict[str, str]:
    """One compilation cache for the processes of a test: they run the same programs."""
    return {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5"}


@pytest.mark.timeout(600)
def test_a_run_and_a_resumed_run_are_the_same_run(decomp_cli: Cli, tmp_path: Path, cached: dict[str, str]) -> None:
    """SPEC K3 with the real model: 20 updates = 10 + resume + 10, bit for bit, through faithfulness warm-up, schedules,
    averages, persistent sources and data order; every promised file is there."""
    whole = decomp_cli(*SMOKE, timeout=300, **cached)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    (first,) = runs(tmp_path)
    for name in (
        "config.yaml", "overrides.txt", "revision.txt", "placement.txt", "optimizer_groups.txt", "environment.txt",
        "metrics.jsonl", "report.html", "checkpoints/20", "figures",
    ):  # fmt: skip
        assert (first / name).exists(), name
    assert list(first.rglob("*.xplane.pb")), "profile.steps left no trace"
    assert "eval/kl_unmasked" in json.dumps(lines(first)[-1])

    stopped = decomp_cli(*SMOKE, "stop_after=10", timeout=300, **cached)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    second = next(r for r in runs(tmp_path) if r != first)
    assert "resume run=" in stopped.stdout
    resumed = decomp_cli("resume", f"run={second}", timeout=300, **cached)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr

    assert lines(second) == lines(first)
    same_checkpoints(first / "checkpoints" / "20", second / "checkpoints" / "20", 20)
    assert read_item(first / "checkpoints" / "20", "progress")["frequency"]["mean"]["q_proj"].any()
    a = decomp.open_run(first)
    assert a.step == 20 and len(a.sites) == 21
    d_in, d_out = a.V(a.sites[0]).shape[0], a.U(a.sites[0]).shape[1]
    assert (d_in, d_out) == (64, 64)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_is_extended_and_begun_with(decomp_cli: Cli, tmp_path: Path, cached: dict[str, str]) -> None:
    """T2, DESIGN 5: extended with hold it is the old run, bit for bit, up to the old end; a new run begins with it."""

    def ran(*texts: str) -> str:
        done = decomp_cli(*texts, timeout=300, **cached)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    ran("experiment=smoke")
    (first,) = runs(tmp_path)
    ran("experiment=smoke", "stop_after=5")
    second = next(r for r in runs(tmp_path) if r != first)
    ran("resume", f"run={second}", "steps=12", "stop_after=8")
    same_checkpoints(first / "checkpoints" / "8", second / "checkpoints" / "8", 8)
    assert lines(second) == lines(first)
    assert "final evaluation after 12 updates" in ran("resume", f"run={second}", "extend=hold")
    rates = [line["lr/components"] for line in lines(second) if "lr/components" in line]
    assert rates[7:] == [rates[7]] * 5 and len(set(rates[:8])) > 4

    said = ran("experiment=smoke", f"init_from={second}", "init_from_step=8", "steps=2", "eval.every=2", "seed=1")
    assert f"begins with the decomposition of {second} after 8 updates" in said
    third = next(r for r in runs(tmp_path) if r not in (first, second))
    began, old = lines(third)[0], [line for line in lines(second) if line["step"] == 9]
    assert began["loss/faithfulness"] == old[0]["loss/faithfulness"]  # of the components alone, before their update
    refused = decomp_cli("experiment=smoke", f"init_from={first}", "sites=mlp", timeout=120, **cached)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "model.layers.0.self_attn.q_proj is there only" in refused.stderr


@pytest.mark.slow
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
    named = [row["guard/bad_term"] for row in lines(folder) if "guard/bad_term" in row]
    assert named == [None, "faithfulness", "faithfulness", "faithfulness"][: len(named)] and len(named) >= 3
    assert not (folder / "run.lock").exists() and "Traceback" not in done.stderr
