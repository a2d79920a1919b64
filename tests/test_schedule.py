"""Schedules hit their knots exactly, the last one at the last step (SPEC T2)."""

from __future__ import annotations

import math

import pytest

from decomp import schedule
from decomp.config.schema import Curve


def curve(*knots: tuple, maximum: float = 2.0) -> Curve:
    return Curve.model_validate(
        {"max": maximum, "knots": [dict(zip(("at", "frac", "interp"), k, strict=False)) for k in knots]}
    )


@pytest.mark.parametrize("interp", ["linear", "cosine", "quarter_cosine", "log", "hold"])
def test_first_and_last_step_are_the_knots(interp: str) -> None:
    c = curve((0.0, 1.0), (1.0, 0.1, interp))
    assert float(schedule.value(c, 0, 7)) == 2.0
    assert float(schedule.value(c, 6, 7)) == pytest.approx(0.2, rel=1e-7)


@pytest.mark.parametrize(
    ("interp", "expected"),
    [
        ("linear", 0.55),
        ("cosine", 0.1 + 0.9 * 0.5),
        ("quarter_cosine", 0.1 + 0.9 * math.cos(math.pi / 4)),
        ("log", math.sqrt(0.1)),
        ("hold", 1.0),
    ],
)
def test_halfway(interp: str, expected: float) -> None:
    value = schedule.value(curve((0.0, 1.0), (1.0, 0.1, interp)), 5, 11)
    assert float(value) == pytest.approx(2 * expected, rel=1e-6)


def test_segments_are_named_by_the_knot_that_ends_them() -> None:
    c = curve((0.0, 0.0), (0.5, 1.0, "linear"), (1.0, 0.0, "hold"), maximum=1.0)
    assert [float(schedule.value(c, s, 5)) for s in range(5)] == [0.0, 0.5, 1.0, 1.0, 0.0]


def test_before_the_first_knot_its_value_holds() -> None:
    assert float(schedule.value(curve((0.5, 0.5), (1.0, 1.0)), 0, 11)) == 1.0


def test_a_run_of_one_step_is_at_its_start() -> None:
    """And stays there when it is extended with its schedules held."""
    assert [float(schedule.value(curve((0.0, 1.0), (1.0, 0.0)), step, 1)) for step in (0, 1, 5)] == [2.0] * 3


def test_after_the_last_step_its_value_holds() -> None:
    c = curve((0.0, 1.0), (1.0, 0.1, "cosine"))
    last = float(schedule.value(c, 6, 7))
    assert [float(schedule.value(c, step, 7)) for step in (7, 8, 1000)] == [last] * 3


def test_a_number_is_a_constant() -> None:
    assert float(schedule.value(0.25, 3, 7)) == 0.25
