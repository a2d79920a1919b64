"""Runs of the fake trainer in this process, and what they leave: shared by the tests of the loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from fake_trainer import FakeTrainer

from decomp import loop
from decomp.checkpoint import Checkpoints
from decomp.config.schema import RunConfig
from decomp.folder import read_config
from decomp.logger import read_metrics

Build = Callable[[RunConfig], Any]


def start(cfg: RunConfig, build: Build = FakeTrainer, overrides: Sequence[str] = ()) -> tuple[int, Path]:
    """(exit code, run folder) of a new run."""
    code = loop.start(cfg, overrides, build)
    return code, max((Path(cfg.output_dir) / cfg.experiment).iterdir())


def go_on(folder: Path, build: Build = FakeTrainer, overrides: Sequence[str] = (), **changes: Any) -> int:
    """Exit code of a resumed run, with ``changes`` to its stored config."""
    cfg = read_config(folder).model_copy(update={"stop_after": None} | changes)
    return loop.resume(cfg, folder, overrides, build)


def final(folder: Path) -> tuple[int, list[bytes]]:
    """Step and every number of the newest checkpoint."""
    trainer = FakeTrainer(read_config(folder))
    abstract = trainer.abstract_state()
    found = Checkpoints(folder, 2, None, loop.identity(trainer)).restore((abstract.decomposition, abstract.progress))
    assert found is not None
    return found[0], [np.asarray(x).tobytes() for x in jax.tree.leaves(found[1])]


def metrics_lines(folder: Path) -> list[str]:
    """metrics.jsonl without its clock."""
    return [json.dumps({k: v for k, v in r.items() if k != "time"}) for r in read_metrics(folder)]


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    """Pictures take most of a small run's time; test_figures.py looks at them."""
    patch.setattr(loop.figures, "draw", lambda *_: iter(()))
