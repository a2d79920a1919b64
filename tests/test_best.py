"""decomp/best.py: the best checkpoint by a metric is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_runs import draw_nothing, go_on, start
from fake_trainer import FakeTrainer, State, config

from decomp.best import Best
from decomp.config.schema import Checkpoint, RunConfig
from decomp.loop import DONE
from decomp.manifest import step_folders


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_nothing(monkeypatch)


class Scored(FakeTrainer):
    """Evaluations whose KL is worst at the end."""

    scores = (0.3, 0.1, 0.2, 0.4)

    def evaluate(self, state: State, step: int, *stopping: Any) -> Any:
        result = super().evaluate(state, step)
        assert result is not None
        return result._replace(metrics=result.metrics | {"eval/kl_ci": self.scores[step // 5 - 1]})


MEASURED = {"ci": {"kind": "mask", "mask": "ci"}, "l0": {"kind": "l0"}}


def _keeping(tmp_path: Path, name: str, **more: Any) -> RunConfig:
    return config(tmp_path, eval__every=5, eval__metrics=MEASURED, checkpoint__keep_last=1,
                  checkpoint__keep_best=name, **more)  # fmt: skip


def test_the_best_checkpoint_is_kept_also_after_a_resume(tmp_path: Path, capsys: Any) -> None:
    """metrics.jsonl is the truth of which is the best."""
    code, folder = start(_keeping(tmp_path, "eval/kl_ci", stop_after=13), Scored)
    assert code == DONE and step_folders(folder / "checkpoints") == [10, 13]
    assert go_on(folder, Scored) == DONE
    assert step_folders(folder / "checkpoints") == [10, 20]
    assert "best checkpoint by eval/kl_ci: 10 (0.1)" in capsys.readouterr().out


@pytest.mark.parametrize("name, near", [("eval/l0/model.layers.9.mlp.down_proj", "eval/l0/model"), ("l0/x", "l0/mean")])
def test_a_metric_that_no_record_has_is_said_and_ends_nothing(
    tmp_path: Path, capsys: Any, name: str, near: str
) -> None:
    code, folder = start(_keeping(tmp_path, name))
    assert code == DONE and step_folders(folder / "checkpoints") == [20]
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "no such metric" in x]
    assert line.startswith(f"warning: checkpoint.keep_best={name}: ") and f"did you mean {near}" in line


def test_which_is_best() -> None:
    lowest, highest = (Best(Checkpoint(keep_best="eval/x", best_is=way), print) for way in ("lowest", "highest"))
    for step, value in {5: 2.0, 10: 1.0, 15: 1.0, 20: float("nan"), 25: 3.0}.items():
        for best in (lowest, highest):
            best.see(step, {"eval/x": value})
    assert lowest.of(range(30)) == 15, "the later one of equals"
    assert lowest.of([5, 20, 25]) == 5 and lowest.of([20]) is None and lowest.of([]) is None
    assert highest.of(range(30)) == 25
