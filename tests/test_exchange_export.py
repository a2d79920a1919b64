"""decomp.exchange.export: safetensors that need nothing of this project, and that ``migrate`` reads back."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange_source import bits, factors, safetensors, same, target
from safetensors.numpy import load_file
from test_exchange_staging import job, silent

import decomp
from decomp import manifest
from decomp.config.errors import UserError
from decomp.exchange import export, staging
from decomp.folder import open_folder

TRAINED = Path(__file__).parent / "formats" / str(manifest.FORMAT) / "run"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    tmp = tmp_path_factory.mktemp("run")
    staging.carry_out(job(safetensors(tmp / "old.safetensors", factors()), model, step=12), tmp / "run", silent)
    return tmp / "run"


def written(run: Path, out: Path, limit: int = 2**40, step: int | None = None) -> list[str]:
    return list(export.write(export.find(open_folder(run), step), out, limit))


def loaded(out: Path) -> dict[str, np.ndarray]:
    return {name: x for file in out.glob("*.safetensors") for name, x in load_file(file).items()}


@pytest.mark.parametrize("limit", [2**40, 500, 1])
def test_round_trip(run: Path, model: Path, tmp_path: Path, limit: int) -> None:
    out = tmp_path / "out"
    assert str(out) in written(run, out, limit)[-1]
    assert same(loaded(out), factors())
    staging.carry_out(job(out, model), tmp_path / "again", silent)
    assert same(bits(decomp.open_run(tmp_path / "again")), bits(decomp.open_run(run)))


def test_shards_hold_the_limit_and_the_index_names_them(run: Path, tmp_path: Path) -> None:
    written(run, tmp_path / "out", 700)
    index = json.loads((tmp_path / "out" / export.INDEX).read_text())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and files[0].endswith(f"00001-of-{len(files):05}.safetensors")
    sizes = []
    for file in files:
        tensors = load_file(tmp_path / "out" / file)
        assert {index["weight_map"][name] for name in tensors} == {file}
        sizes.append(sum(x.nbytes for x in tensors.values()))
    assert max(sizes) <= 700 and sum(sizes) == index["metadata"]["total_size"] == sum(
        x.nbytes for x in factors().values()
    )


def test_each_stack_is_read_once(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, read = export.read_leaf, []

    def counted(item: Path, path: Any, *spec: Any) -> np.ndarray:
        read.append(path)
        return real(item, path, *spec)

    monkeypatch.setattr(export, "read_leaf", counted)
    written(run, tmp_path / "out", 1)
    assert len(read) == len(set(read)) == 6


def test_the_page_can_be_followed(run: Path, tmp_path: Path) -> None:
    """The snippet of README.md runs with numpy and safetensors alone, and computes what it says."""
    written(run, tmp_path / "out", 700)
    page = (tmp_path / "out" / "README.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    check = (
        "\nimport sys\nassert not {'jax', 'decomp', 'torch'} & set(sys.modules)\nnp.save('y.npy', [x @ V, y, mask])\n"
    )
    check = check.replace("[x @ V, y, mask]", "(x @ V * mask) @ U - y")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    code = [sys.executable, "-W", "error", "-c", snippet + check]
    done = subprocess.run(code, cwd=tmp_path / "out", env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("model.layers.1.self_attn.k_proj (8, 6) (6, 8) [")


def test_the_page_says_what_it_is(run: Path, model: Path, tmp_path: Path) -> None:
    written(run, tmp_path / "out")
    page = (tmp_path / "out" / "README.md").read_text()
    for part in (
        str(model),
        "after 12 updates",
        "44 components" if False else "in 6 sites",
        "float32",
        "delta = W - V U",
    ):
        assert part in page
    assert decomp.open_run(run).table and manifest.read_manifest(run / "checkpoints/12")["identity"]["target"] in page
    assert "| `model.layers.2.mlp.down_proj` | down_proj | 2 | 12 | 8 | 10 |" in page
    assert max(len(line) for line in page.splitlines() if not line.startswith("|")) <= 120


def test_a_trained_run_exports_too(tmp_path: Path) -> None:
    written(TRAINED, tmp_path / "out")
    assert same(loaded(tmp_path / "out"), bits(decomp.open_run(TRAINED)))


def test_what_cannot_be_exported(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no checkpoint of step 5; there are 12"):
        written(run, tmp_path / "out", step=5)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    with pytest.raises(UserError, match=f"out={tmp_path / 'mine'}: exists already"):
        written(run, tmp_path / "mine")
    monkeypatch.setattr("decomp.checkpoint._free", lambda _: 10)
    with pytest.raises(UserError, match=r"needs [\d.]+ kB and the disk has 10 bytes free"):
        written(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_killed_export_leaves_nothing_that_looks_done(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(export, "page", killed)
        with pytest.raises(KeyboardInterrupt):
            written(run, tmp_path / "out", 700)
    assert not (tmp_path / "out").exists()
    written(run, tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"out"} and len(list((tmp_path / "out").iterdir())) == 3
