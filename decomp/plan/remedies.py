"""Changes that make a step smaller, cheapest first; each is compiled before it is proposed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from decomp.config.errors import UserError
from decomp.config.load import run_config, to_dict
from decomp.config.schema import RunConfig
from decomp.plan.memory import unavoidable
from decomp.plan.program import MeshShape, make_step
from decomp.plan.report import GIB, Plan

Compile = Callable[[RunConfig, MeshShape], Plan]
MOST_COMPILED = 4


def candidates(cfg: RunConfig, shape: MeshShape) -> Iterator[tuple[str, RunConfig, MeshShape]]:
    """(what to type, config, mesh), each with the ones before it: recompute, cut the batch, take twice the nodes."""
    typed: list[str] = []
    raw = to_dict(cfg)
    for section in ("loss", "ci_fn"):
        if not raw[section].get("remat", True):
            raw[section]["remat"] = True
            typed.append(f"{section}.remat=true")
            yield " ".join(typed), run_config(raw), shape
    replicate, fsdp, tp = shape
    k, most = cfg.data.microbatches, cfg.data.batch_size // (replicate * fsdp)
    while k < most and most % (2 * k) == 0:
        k *= 2
        raw["data"]["microbatches"] = k
        yield " ".join([*typed, f"data.microbatches={k}"]), run_config(raw), shape
    raw["data"]["microbatches"] = cfg.data.microbatches
    yield " ".join([*typed, f"mesh.replicate={2 * replicate}"]), run_config(raw), (2 * replicate, fsdp, tp)


def search(plan: Plan, compile_plan: Compile) -> Iterator[str]:
    """Lines about every change tried, until one fits. What the lower bound rules out is not compiled."""
    began, step, tried = time.monotonic(), plan.program.step, 0
    sizes = step.ax.sizes
    yield "remedies, each compiled:"
    for typed, cfg, shape in candidates(step.cfg, (sizes["replicate"], sizes["fsdp"], sizes["tp"])):
        if tried == MOST_COMPILED:
            break
        try:
            smaller, _ = make_step(cfg, step.model.llama.shape, shape)
        except UserError as error:
            yield f"  {typed}: {error}"
            continue
        more = unavoidable(smaller) + _rest(plan, shape)
        if more > plan.device.memory:
            yield f"  {typed}: needs at least {more / GIB:.1f} GiB"
            continue
        found, tried = compile_plan(cfg, shape), tried + 1
        needed = f"{found.bound / GIB:.1f} to {found.upper / GIB:.1f} GiB"
        yield f"  {typed}: {found.verdict}, {needed}, {_cost(plan, found)}"
        if found.verdict == "FITS":
            break
    yield f"  remedies took {time.monotonic() - began:.0f} s"


def _rest(plan: Plan, shape: MeshShape) -> float:
    """What at least rests on a device: the state spread over all devices of the new mesh."""
    n = shape[0] * shape[1] * shape[2]
    return sum(s.whole for s in plan.resting.values()) / n


def _cost(plan: Plan, found: Plan) -> str:
    before, after = plan.time.in_sequence, found.time.in_sequence
    return f"a step of {after:.2f} s where it was {before:.2f} s"
