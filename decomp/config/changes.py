"""What may change while a run stays the same run, and what more steps mean for it (DESIGN 5).

Configs are compared by meaning, as validated values: comments, the order of keys and the way a number is written never
matter (case 27).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from decomp.config import rules
from decomp.config.errors import UserError
from decomp.config.schema import RunConfig

# Where a run computes, what is watched and kept of it, when it stops, where its inputs lie: none of these is the run.
FREE = (
    "mesh", "placement", "launcher", "logger", "eval", "checkpoint", "profile", "stop_after", "max_skipped",
    "target.path", "data.path", "data.microbatches", "loss.remat", "loss.kl_chunk", "ci_fn.remat",
)  # fmt: skip
# The target and the text may be named in another way: checkpoints know them by their content.
BY_CONTENT = ("target", "data.kind")
EXTENDS = ("hold", "stretch")


def differing(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old, new) of every leaf that differs between two trees; ``...`` stands for a key that is absent."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(k for k in new if k not in old)]:
            yield from differing(old.get(key, ...), new.get(key, ...), f"{path}.{key}" if path else str(key))
    elif old != new:
        yield path, old, new


def refused(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, old, new) of every difference between two configs as dicts that makes it another run. ``steps`` is none:
    see ``extended``."""
    free = (*FREE, *BY_CONTENT, "steps")
    return [(k, a, b) for k, a, b in differing(old, new) if not any(f"{k}.".startswith(f"{f}.") for f in free)]


def extended(old: RunConfig, new: RunConfig, how: str | None, done: int) -> RunConfig:
    """``new``, whose steps may be more than those of ``old``, with its schedules: they hold or are stretched.

    With ``hold`` (the default) they stay those of the ``steps`` that the run had, so that up to there it is the same
    run bit for bit; with ``stretch`` they span the new ``steps``. ``done`` is the number of updates that are done.

    Raises:
      UserError: for fewer steps, an ``extend`` that is none or extends nothing, and ``hold`` where a learning rate
        would be held at 0.
    """
    if how not in (None, *EXTENDS):
        raise UserError(
            f"extend={how}: no such way; extend=hold keeps the schedules, extend=stretch spans the new steps"
        )
    if new.steps < old.steps:
        if new.steps <= done:
            raise UserError(f"steps={new.steps}: {done} updates are done already: give more than {old.steps} to extend")
        raise UserError(
            f"steps={new.steps}: the run has {old.steps} and only grows: end it there with stop_after={new.steps}"
        )
    if new.steps == old.steps:
        _nothing_to_extend(old, how)
        return new
    if how == "stretch":
        return new.model_copy(update={"schedule_steps": None})
    if at_zero := next(_ending_at_zero(old), None):
        raise UserError(
            f"extend=hold: {at_zero} ends at 0, where {new.steps - old.steps} more updates would learn nothing: "
            f"extend=stretch spans all {new.steps}"
        )
    return new.model_copy(update={"schedule_steps": old.schedule_steps or old.steps})


def _nothing_to_extend(old: RunConfig, how: str | None) -> None:
    """The same line typed again, as after a pre-emption, asks for what is so already, and passes."""
    if how is not None and (how == "hold") != (old.schedule_steps is not None):
        raise UserError(f"extend={how}: extends nothing; give steps=N with N above {old.steps}")


def _ending_at_zero(cfg: RunConfig) -> Iterator[str]:
    """Learning rates that fall to 0, by their dotted path; a rate that is 0 throughout is meant."""
    for path, curve in rules.every_curve("", cfg):
        values = [curve.max * knot.frac for knot in curve.knots]
        if path.endswith((".lr", ".adam_lr")) and values[-1] == 0 < max(values):
            yield path
