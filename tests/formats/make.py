"""Writes what this version of decomp stores to tests/formats/<format>/: run it once, when a format is new.

    python tests/formats/make.py

``run`` is a run folder of two sites after 3 updates; ``configs`` has the config.yaml of every experiment. They stay as
they are for good: tests/test_upgrade.py reads those of every format.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import numpy as np  # noqa: E402
import tiny  # noqa: E402

from decomp import folder, manifest  # noqa: E402
from decomp.checkpoint import Checkpoints  # noqa: E402
from decomp.config.compose import compose, group_options  # noqa: E402
from decomp.config.schema import RunConfig  # noqa: E402
from decomp.sites import SiteTable  # noqa: E402

KINDS = ("k_proj", "down_proj")


def values(path: tuple[str, ...], shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """What the run holds at ``path`` (item first): bits that only that array has."""
    rng = np.random.default_rng(list("/".join(path).encode()))
    if dtype.kind in "iu":
        return rng.integers(0, 60000, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def main() -> None:
    out = HERE / str(manifest.FORMAT)
    for name in group_options()["experiment"]:
        texts = [f"experiment={name}", *(["target.path=/models/llama"] if name.startswith("llama") else [])]
        (out / "configs" / name).mkdir(parents=True)
        folder.write_config(out / "configs" / name, compose(texts))
    cfg = tiny.config(sites__layers=[1], sites__kinds=list(KINDS), data__batch_size=2, data__seq_len=2)
    run = out / "run"
    run.mkdir()
    folder.write_config(run, cfg)
    (run / "overrides.txt").write_text("# 2026-01-01 00:00:00 run on nowhere\nexperiment=tiny\n")
    (run / "metrics.jsonl").write_text('{"step": 3, "loss/total": 1.5}\n')
    state, table = _state(cfg)
    checkpoints = Checkpoints(run, 2, None, {"sites": table.to_json(), "target": "target-1", "data": "corpus-1"})
    checkpoints.save(3, state)
    print(checkpoints.wait())
    checkpoints.close()


def _state(cfg: RunConfig) -> tuple[Any, SiteTable]:
    """The state of a real step, with values that say where they belong."""
    step, _ = tiny.make(cfg)
    pair = zip(manifest.ITEMS, tiny.init(step), strict=True)
    return tuple(_filled(tree, (item,)) for item, tree in pair), step.model.table


def _filled(tree: Any, path: tuple[str, ...]) -> Any:
    if isinstance(tree, dict):
        return {key: _filled(value, (*path, key)) for key, value in tree.items()}
    import jax.numpy as jnp

    return jnp.asarray(values(path, tree.shape, np.dtype(tree.dtype)))


if __name__ == "__main__":
    main()
