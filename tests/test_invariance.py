"""Mesh and placement change nothing (SPEC D8): the verb, its table, its exit code, and CI's cover of every value."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from decomp import invariance as inv
from decomp.config.compose import Command
from decomp.config.errors import UserError
from decomp.verbs import invariance as verb

Cli = Callable[..., subprocess.CompletedProcess[str]]


def choices(*texts: str) -> list[verb.Choice]:
    return verb.chosen(Command("invariance", texts))


# ---------------------------------------------------------------- which cases
def test_every_combination_is_the_default():
    found = choices()
    assert len(found) == 2 * 2 * 3 * 7
    devices = {math.prod(verb.mesh_shape(c.mesh)) for c in found}
    assert devices == {2, 4, 8}, "one device is the reference"
    for shape in ("8x1x1", "1x8x1", "2x4x1", "2x2x2", "4x2x1"):
        assert shape in {c.mesh for c in found}


def test_the_cover_holds_every_value():
    cover, everything = choices("cases=cover"), choices()
    assert len(cover) == len(set(cover)) == len(verb.COVER)
    for column in verb.Choice._fields:
        assert {getattr(c, column) for c in cover} == {getattr(c, column) for c in everything}, column


def test_what_is_typed_for_a_run_restricts():
    (only,) = choices("mesh=cpu8", "placement=zero1", "optim=muon_ci", "precision=fp64")
    assert only == ("fp64", "muon_ci", "zero1", "2x4x1")
    assert {c.mesh for c in choices("meshes=dp8, 2x1x2")} == {"dp8", "2x1x2"}
    assert verb.mesh_shape("dp8") == (1, 8, 1)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("meshes=dp32", "meshes=dp32: 32 devices; at most 8 are simulated"),
        ("meshes=2by2", "meshes=2by2: is no replicate x fsdp x tp; write it as 4x8x1"),
        ("meshes=0x2x2", "meshes=0x2x2: is no replicate x fsdp x tp"),
        ("meshes=auto", "mesh=auto: stands for the devices that are found"),
        ("meshes=", "meshes=: is empty"),
        ("placements=owners", "placements=owners: no such placement; did you mean owner"),
        ("optims=muons", "optims=muons: no such optim"),
        ("precisions=bf16", "precision=bf16: SPEC D8 gives tolerances for fp32 and fp64"),
        ("precision=bf16", "precision=bf16: SPEC D8 gives tolerances for fp32 and fp64"),
        ("cases=some", "cases=some: no such choice"),
        ("updates=1", "updates=1: must be a whole number of at least 2"),
    ],
)
def test_mistakes_are_one_line(typed: str, said: str):
    with pytest.raises(UserError) as error:
        choices(typed)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("meshes=3x1x1", r"meshes=3x1x1 .*data.batch_size=8: it must be a multiple of replicate x fsdp .* = 3"),
        ("meshes=1x1x4", r"meshes=1x1x4 .*mesh.tp=4: it must divide the target's 2 kv heads"),
        ("sites.layers=[7]", r"sites.layers=7: the target has layers 0 to 3"),
    ],
)
def test_what_does_not_divide_says_so(decomp_cli: Cli, typed: str, said: str):
    done = decomp_cli("invariance", typed, "placements=owner", "optims=adamw", "precisions=fp32", timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert re.search(said, done.stderr)


# ---------------------------------------------------------------- differences and the exit code
def test_differences_are_relative_and_name_their_place():
    ref, end = [{"loss/total": 2.0}, {"loss/total": 4.0}], {"V": np.array([3.0, 4.0]), "U": np.array([1.0])}
    found = [{"loss/total": 2.0}, {"loss/total": 4.4}]
    moved = {"V": np.array([3.0, 4.5]), "U": np.array([1.0])}
    got = inv.differences(ref, end, found, moved, first=5)
    assert got.loss.size == pytest.approx(0.1) and got.loss.where == "loss/total in update 6"
    assert got.stack.size == pytest.approx(0.1) and got.stack.where == "V after update 6"
    assert not got.ok("fp64") and not got.ok("fp32")
    assert inv.differences(ref, end, ref, end).ok("fp64")


def test_a_nan_or_a_value_where_there_was_none_is_above():
    ref, end = [{"loss/total": 0.0}], {"V": np.zeros(2)}
    assert inv.differences(ref, end, [{"loss/total": 0.0}], end).ok("fp64")
    assert not inv.differences(ref, end, [{"loss/total": 1e-30}], end).ok("fp32")
    assert not inv.differences(ref, end, [{"loss/total": math.nan}], end).ok("fp32")
    assert not inv.differences(ref, end, ref, {"V": np.array([math.nan, 0.0])}).ok("fp32")


@pytest.mark.parametrize(("size", "code"), [(5e-10, 0), (2e-9, 1), (math.nan, 1)])
def test_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], size: float, code: int):
    """The verb with its numerics replaced: one stack is ``size`` off; a layout met twice runs once."""
    ran = []

    def compare(case: SimpleNamespace, ref: None) -> inv.Result:
        ran.append(case.layout)
        return inv.Result(inv.Difference(0.0, "loss/total in update 0"), inv.Difference(size, "V after update 9"))

    monkeypatch.setattr(inv, "make_case", lambda cfg, shape: SimpleNamespace(layout="one"))
    monkeypatch.setattr(inv, "reference", lambda case: None)
    monkeypatch.setattr(inv, "compare", compare)
    monkeypatch.setattr(inv, "make_step", lambda cfg, shape: None)
    monkeypatch.setattr(verb, "_prepare_environment", lambda devices: None)
    texts = ("meshes=1x2x1", "placements=owner,zero1", "optims=adamw", "precisions=fp64")
    assert verb.main(Command("invariance", texts)) == code
    out = capsys.readouterr().out
    assert len(ran) == 1 and ("as owner" in out) == (code == 0)
    assert ("V after update 9" in out) == (code == 1)


# ---------------------------------------------------------------- the real thing
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_mesh_and_placement_change_nothing(decomp_cli: Cli):
    """SPEC D8, D2, D3, T5, cases 11 and 12: the cover of every mesh, placement, optimizer and precision."""
    done = decomp_cli("invariance", "cases=cover", timeout=1400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == len(verb.COVER)
    assert "all within the tolerance" in done.stdout
