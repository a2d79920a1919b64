"""``plan``: meshes, mistakes, compilers, the verdict, remedies, and what is held at the peak.

The bars of a step's program are in test_plan_bars.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from decomp import __main__ as cli
from decomp import build
from decomp.config.compose import Command
from decomp.config.errors import UserError
from decomp.plan import backend, device, hlo, peak, remedies
from decomp.plan.report import HEADINGS, WIDTHS, Plan, columns
from decomp.verbs import plan as verb

Cli = Callable[..., subprocess.CompletedProcess[str]]
GIB = 2**30
FULL = "experiment=llama8b_full"


# ---------------------------------------------------------------- meshes and mistakes
def test_meshes_are_those_listed_or_the_configured_one():
    cfg = Command("plan", (FULL, "mesh=dp64")).config()
    assert verb.meshes(cfg, None) == {"8x8x1": (8, 8, 1)}
    assert verb.meshes(cfg, "dp32, 4x4x2") == {"dp32": (4, 8, 1), "4x4x2": (4, 4, 2)}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("dp33", "meshes=dp33: is no replicate x fsdp x tp"),
        (",", "meshes=: is empty"),
        ("64x64x1", "meshes=64x64x1: 4096 devices; plan takes at most 1024"),
        ("auto", "mesh=auto: stands for the devices that are found"),
    ],
)
def test_what_is_no_mesh_is_said(names: str, said: str):
    with pytest.raises(UserError) as error:
        verb.meshes(None, names)  # type: ignore[arg-type]
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_a_mistake_is_one_line_and_exit_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["decomp", "plan", FULL, "out=/"])
    assert cli.main() == 2
    said = "decomp: out=/: Is a directory; give a file that can be written, such as plan.md\n"
    assert capsys.readouterr().err == said


CHECKED = """
from decomp.config.compose import Command
from decomp.config.errors import UserError
from decomp.config.load import run_config, to_dict
from decomp.plan import backend, device

backend.prepare_environment("cpu", 64)
from decomp.plan.planner import Planner
from decomp.target.shape import LLAMA_8B
from decomp.verbs.plan import meshes

planner = Planner("cpu", device.find("h100"), LLAMA_8B, print)
base = Command("plan", ("experiment=llama8b_full",)).config()
for names, changes in (
    ("dp32,3x8x1", {}), ("1x2x16", {}), ("4x8x1", {"data": {"microbatches": 8}}),
    ("64x1x1", {"placement": {"on_ragged": "error"}}), ("4x8x1", {"data": {"seq_len": 200000}}),
):
    raw = to_dict(base)
    for section, values in changes.items():
        raw[section] |= values
    try:
        planner.check(run_config(raw), meshes(base, names))
    except UserError as error:
        print(error)
"""


def test_what_only_the_mesh_can_tell_is_one_line_before_anything_is_compiled(simulated: Callable[..., str]):
    expected = (
        "meshes=3x8x1: data.batch_size=128: it must be a multiple of replicate x fsdp x microbatches = 24",
        "mesh.tp=16: it must divide the target's 8 kv heads and ci_fn.n_heads=64",
        "data.batch_size=128: it must be a multiple of replicate x fsdp x microbatches = 256",
        "placement.on_ragged=error: stack ",
        "data.seq_len=200000: the target has at most 131072 positions",
    )
    found = simulated(CHECKED, devices=1).splitlines()
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True)), found
    assert "does not tile replicate=64; use placement.on_ragged=fallback" in found[3]


def test_running_without_the_weights_names_the_ways_on():
    with pytest.raises(UserError, match=r"^target.path: is required to run target=llama8b; .* try `decomp plan`$"):
        build.target_folder(Command("run", (FULL,)).config().target)


# ---------------------------------------------------------------- compilers
def test_no_such_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backend, "_version", lambda package: None)
    with pytest.raises(UserError, match=r"^backend=cuda: no such choice; .*\(valid: auto, cpu, gpu\)$"):
        backend.choose("cuda")
    with pytest.raises(UserError, match=r"^backend=gpu: jax-cuda12-plugin is not installed; pip install '.\[plan-gpu"):
        backend.choose("gpu")
    assert backend.choose("auto") == "cpu"


def test_the_gpus_compiler_is_used_where_it_is_whole(monkeypatch: pytest.MonkeyPatch):
    own = backend.metadata.version("jaxlib")
    installed = dict.fromkeys((*backend.COMPILER, backend.ASSEMBLER), own)
    monkeypatch.setattr(backend, "_version", installed.get)
    assert [backend.choose(x) for x in ("auto", "gpu", "cpu")] == ["gpu", "gpu", "cpu"]
    installed["jax-cuda12-pjrt"] = "0.1"
    assert backend.choose("auto") == "cpu"
    with pytest.raises(UserError, match=f"^backend=gpu: jax-cuda12-pjrt 0.1 stands beside jaxlib {own}; pip install"):
        backend.choose("gpu")


def test_every_device_is_described_to_the_compiler():
    for name, major, memory in (("h100", 9, 80), ("h200", 9, 141), ("b200", 10, 180)):
        text = backend.description(device.find(name).gpu)
        assert f'device_description_str: "NVIDIA {name.upper()}"' in text
        assert f"cuda_compute_capability {{ major: {major} }}" in text
        assert f"device_memory_size: {memory}000000000\n" in text


LIVE = """HloLiveRange (max 9):
  InstructionSequence:
    0:x
  BufferLiveRange:
    x{}:0-9
    a{}:1-2
    b{}:2-5
    loop{}:0-9
    loop{1}:4-8
    body{}:5-6
    c{}:6-6
    late{}:9-9
  Live ranges at 2 (peak):
    x{}: 32 bytes (cumulative: 32 bytes)
"""
# a is gone when the loop's carry, which loop{1} and body share, stands beside b and c's place of its own
ASSIGNED = """BufferAssignment:
allocation 0: size 32, parameter 0, shape |f32[8]| at ShapeIndex {}:
 value: <1 x @0> (size=32,offset=0): f32[8]{0}
allocation 1: size 200, preallocated-temp:
 value: <2 a @0> (size=32,offset=0): f32[8]{0}
 value: <3 b @0> (size=32,offset=64): f32[8]{0}
 value: <4 loop{1} (phi) @0> (size=64,offset=0): bf16[32]{0}
 value: <5 body @0> (size=64,offset=0): bf16[32]{0}
 value: <6 late @0> (size=64,offset=0): f32[16]{0}
allocation 2: size 4, thread-local:
 value: <7 c @0> (size=4,offset=0): f32[]
"""
BODY = """%step (p: bf16[32]) -> bf16[32] {
  %p = bf16[32]{0} parameter(0)
  ROOT %body = bf16[32]{0} negate(%p), metadata={op_name="jit(__call__)/shard_map/while/body/add"}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %a = f32[8]{0} negate(%x), metadata={op_name="jit(__call__)/shard_map/jvp()/neg"}
  %b = f32[8]{0} negate(%a), metadata={op_name="jit(__call__)/jvp()/neg"}
  %loop = (s32[], bf16[32]{0}) custom-call(%b)
  ROOT %late = f32[16]{0} negate(%b)
}
"""


def test_what_is_held_at_the_peak_is_told_by_shape_and_origin():
    """The values of one place count once, and nothing but temporaries counts."""
    held = peak.at_peak(LIVE, ASSIGNED, hlo.parse(BODY))
    assert held == [(64, 1, "bf16[32]", "add"), (32, 1, "f32[8]", "jvp()/neg")]
    assert peak.at_peak("", "", hlo.parse(BODY)) == []


# ---------------------------------------------------------------- verdict and remedies
def plan_of(arguments: float, bound: float, temporaries: float, memory: float) -> Plan:
    class Given(Plan):
        @property
        def bound(self) -> float:
            return bound

    program: Any = SimpleNamespace(
        arguments=arguments, outputs=0, aliased=0, temporaries=temporaries, for_gpu=False
    )  # fmt: skip
    return Given(program, None, SimpleNamespace(memory=memory))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("temporaries", "memory", "verdict", "margin"),
    [(40, 80, "FITS", 10), (71, 80, "UNSURE", -21), (71, 45, "DOES NOT FIT", -5)],
)
def test_the_verdict(temporaries: float, memory: float, verdict: str, margin: float):
    p = plan_of(30, 50, temporaries, memory)
    assert (p.verdict, p.margin) == (verdict, margin)


def test_a_gpu_program_leaves_no_doubt():
    program: Any = SimpleNamespace(arguments=30 * GIB, outputs=9, aliased=9, temporaries=40 * GIB, for_gpu=True)
    for memory, verdict, margin in ((80, "FITS", 10), (60, "DOES NOT FIT", -10)):
        p = Plan(program, None, SimpleNamespace(memory=memory * GIB))  # type: ignore[arg-type]
        assert (p.verdict, p.margin / GIB, p.needed) == (verdict, margin, "70.0 GiB")


def test_a_row_of_the_table_stands_under_its_headings():
    assert len(HEADINGS) == len(WIDTHS)
    assert columns(HEADINGS).index("verdict") == columns(tuple(map(str, range(13)))).index("4")


def test_candidates_go_from_cheap_to_dear():
    source = "loss.recon.adversarial.source.dtype"
    cfg = Command("plan", (FULL, "loss.remat=false", f"{source}=float32")).config()
    first, second = "loss.remat=true", f"loss.remat=true {source}=uint16"
    found = list(remedies.candidates(cfg, (4, 8, 1)))
    assert [(t, c.data.microbatches, shape) for t, c, shape in found] == [
        (first, 1, (4, 8, 1)),
        (second, 1, (4, 8, 1)),
        (f"{second} data.microbatches=2", 2, (4, 8, 1)),
        (f"{second} data.microbatches=4", 4, (4, 8, 1)),
        (f"{second} mesh.replicate=8", 1, (8, 8, 1)),
    ]
    assert [c.loss.remat for _, c, _ in found] == [True] * 5
    assert Command("plan", (FULL, *found[3][0].split())).config() == found[3][1], "what is proposed can be typed"
    one_layer = Command("plan", ("experiment=llama8b_l18", "data.microbatches=1")).config()
    assert next(iter(remedies.candidates(one_layer, (4, 8, 1))))[0] == "data.microbatches=2", "its sources are tiny"


def test_a_remedy_is_compiled_before_it_is_proposed(monkeypatch: pytest.MonkeyPatch):
    """What the lower bound rules out is not compiled, what does not divide is said; the search ends with the first
    that fits."""
    cfg = Command("plan", (FULL,)).config()
    step: Any = SimpleNamespace(cfg=cfg, ax=SimpleNamespace(sizes={"replicate": 4, "fsdp": 8, "tp": 1}))
    start: Any = SimpleNamespace(
        program=SimpleNamespace(step=step), device=SimpleNamespace(memory=80 * GIB),
        time=SimpleNamespace(in_sequence=2.0),
    )  # fmt: skip
    compiled = []

    class Planner:
        def step(self, cfg: Any, shape: Any) -> Any:
            if shape[0] == 8:
                raise UserError("stack does not tile replicate=8")
            return cfg, None

        def plan(self, name: str, cfg: Any, shape: Any) -> Any:
            compiled.append((name, shape))
            return SimpleNamespace(verdict="UNSURE", needed="1 to 99 GiB", time=SimpleNamespace(in_sequence=3.0))

    planner: Any = Planner()
    monkeypatch.setattr(remedies, "at_least", lambda cfg, _: {2: 85 * GIB, 4: 70 * GIB}[cfg.data.microbatches])
    lines = list(remedies.search(start, planner))
    assert compiled == [("data.microbatches=4", (4, 8, 1))]
    assert lines[1:-1] == [
        "  data.microbatches=2: needs at least 85.0 GiB",
        "  data.microbatches=4: UNSURE, 1 to 99 GiB, a step of 3.00 s where it was 2.00 s",
        "  mesh.replicate=8: stack does not tile replicate=8",
    ]


# ---------------------------------------------------------------- the real thing
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_row_each_and_a_page(decomp_cli: Cli, tmp_path: Any):
    """The verb itself, on the shipped target."""
    small = ("experiment=smoke", "data.batch_size=8", "device=h200")
    done = decomp_cli("plan", *small, "meshes=dp8,2x2x1", "out=plan.md", timeout=500)
    assert done.returncode == 0, done.stderr
    head, first, second = done.stdout.splitlines()
    assert head.split()[0] == "mesh" and first.startswith("dp8 ") and second.startswith("2x2x1 ")
    assert "FITS" in first and "FITS" in second
    assert re.search(r"dp8: traced in \d+ s, compiled in \d+ s", done.stderr)
    page = (tmp_path / "plan.md").read_text()
    assert page.startswith("# decomp plan experiment=smoke") and first in page and "predictions" in page


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(backend.lacks() is not None, reason="pip install '.[plan-gpu]' brings the GPU's compiler")
def test_the_gpus_program_is_read(decomp_cli: Cli):
    done = decomp_cli("plan", "experiment=smoke", "data.batch_size=8", "mesh=dp8", "device=h200", timeout=800)
    assert done.returncode == 0, done.stderr
    assert "temporaries of the GPU program" in done.stdout and "FITS in 131.3 GiB of h200" in done.stdout
    assert re.search(r"x 1\.\d{3}$", done.stdout, re.MULTILINE), "executed over useful"
