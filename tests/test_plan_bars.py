"""The bars of a step's program, on one that has Llama-8B's shape and is small (SPEC D2, D5, D6)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

BARS = """
import tiny
from dataclasses import replace
from decomp.plan import backend, device
from decomp.plan.program import compile_step, make_step
from decomp.plan.report import Plan, page, row
from decomp.target.shape import LlamaShape

def shape(n_layers):
    return LlamaShape(n_layers, 256, 8, 4, 32, 512, 1024, False)

def plan(optimizer, n_layers=8, **changes):
    optim = {part: {"kind": optimizer, "match": part, "lr": 1e-3} for part in ("components", "ci_fn")}
    cfg = tiny.config(
        optim=optim, precision={"kind": "bf16"}, data__batch_size=16, data__seq_len=64, loss__remat=True,
        placement={"components": "owner", "ci_fn": "owner"},
        sites={"C_per_rank": 1.0}, **changes,
        ci_fn={"kind": "chunk_transformer", "d_model": 256, "n_heads": 4, "d_mlp": 512, "remat": True},
    )
    step, masters = make_step(cfg, shape(n_layers), backend.make_mesh("cpu", (4, 2, 1), {}))
    return Plan(compile_step(step, masters), masters, device.find("h100"))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_step_reaches_its_bars(simulated: Callable[..., str], monkeypatch: pytest.MonkeyPatch):
    """Bytes over replicate at the floor and none in loops, no permutes, nothing in the optimizer, state at 1/N and
    aliased, and a program that does not grow with the layers."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    code = """
for optimizer in ("adamw", "muon"):
    p = plan(optimizer)
    print(page(optimizer, p))
    across = sum(c.total for c in p.across)
    # vectors of the CI function are whole copies, whose gradients are summed: little here, nothing at scale
    assert 1.0 <= across / p.floor <= 1.05, across / p.floor
    assert p.in_loops == [] and p.permutes == []
    assert p.optimizer_across == 0
    assert p.spread <= 1.01 + 0.02, p.spread
    state = sum(s.per_device for name, s in p.resting.items() if name != "frozen target")
    assert abs(p.program.arguments / sum(s.per_device for s in p.resting.values()) - 1) < 0.01
    assert p.program.aliased >= 0.999 * state
    assert p.program.optimized.unknown_loops == [] == p.program.partitioned.unknown_loops
    assert 1.0 <= p.flop_ratio <= 1.20, p.flop_ratio
deep, shallow = p.program, plan("muon", n_layers=4).program
assert deep.n_instructions <= 1.2 * shallow.n_instructions
print("BARS REACHED")
"""
    assert "BARS REACHED" in simulated(BARS + code, devices=8, timeout=800)
