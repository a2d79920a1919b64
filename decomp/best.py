"""Which checkpoint is the best by a metric. metrics.jsonl is the truth, so a resumed run knows it as well."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from decomp.config.fields import nearest
from decomp.config.schema import Checkpoint
from decomp.logger import read_metrics


class Best:
    """Values of ``checkpoint.keep_best`` by step. ``say`` is told once of a name that no record has."""

    def __init__(self, cfg: Checkpoint, say: Callable[[str], None]):
        self.metric, self.highest, self.say = cfg.keep_best, cfg.best_is == "highest", say
        self.values: dict[int, float] = {}
        self._missed = False

    def read(self, folder: Path) -> None:
        """Takes all records of a run folder, once it is cut to the step that training goes on from."""
        self.values.clear()
        for record in read_metrics(folder) if self.metric else ():
            self.see(record["step"], record)

    def see(self, step: int, record: Mapping[str, Any]) -> None:
        """One more record. A value that is not finite is nobody's best."""
        if self.metric is None:
            return
        value = record.get(self.metric)
        if isinstance(value, int | float) and math.isfinite(value):
            self.values[step] = float(value)
        elif value is None:
            self._miss(record)

    def of(self, steps: Iterable[int]) -> int | None:
        """The best of ``steps``, the later one of equals; None where none of them was judged. Safe on any thread."""
        judged = {step: value for step, value in self.values.copy().items() if step in set(steps)}
        sign = -1 if self.highest else 1
        return min(judged, key=lambda step: (sign * judged[step], -step), default=None)

    def _miss(self, record: Mapping[str, Any]) -> None:
        """A record that should have had the metric: an evaluation, or the losses of an update."""
        assert self.metric is not None
        family = self.metric.split("/")[0]
        family = "eval" if family == "eval" else "loss"
        if self._missed or not any(name.startswith(f"{family}/") for name in record):
            return
        self._missed = True
        meant = nearest(self.metric, [name for name, v in record.items() if isinstance(v, int | float)])
        hint = f"; did you mean {meant}?" if meant else ""
        self.say(f"warning: checkpoint.keep_best={self.metric}: no such metric, so no checkpoint is kept for it{hint}")
