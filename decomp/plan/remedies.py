"""Changes that make a step smaller, cheapest first; each is compiled before it is proposed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from decomp.config.errors import UserError
from decomp.config.load import run_config, to_dict
from decomp.config.schema import RunConfig
from decomp.plan.memory import resting, unavoidable
from decomp.plan.planner import MeshShape, Planner
from decomp.plan.program import arguments
from decomp.plan.report import GIB, Plan
from decomp.step import Step

MOST_COMPILED = 4


def candidates(cfg: RunConfig, shape: MeshShape) -> Iterator[tuple[str, RunConfig, MeshShape]]:
    """(what to type, config, mesh), each with the ones before it: recompute, halve what sources rest in, cut the batch,
    take twice the nodes."""
    raw, typed = to_dict(cfg), []
    for change in (*_recompute(raw), *_small_sources(raw)):
        typed.append(change)
        yield " ".join(typed), run_config(raw), shape
    replicate, fsdp, tp = shape
    k, most = cfg.data.microbatches, cfg.data.batch_size // (replicate * fsdp)
    while k < most and most % (2 * k) == 0:
        k *= 2
        raw["data"]["microbatches"] = k
        yield " ".join([*typed, f"data.microbatches={k}"]), run_config(raw), shape
    raw["data"]["microbatches"] = cfg.data.microbatches
    yield " ".join([*typed, f"mesh.replicate={2 * replicate}"]), run_config(raw), (2 * replicate, fsdp, tp)


def _recompute(raw: dict[str, Any]) -> Iterator[str]:
    """Changes ``raw``, and gives what to type for each change."""
    for section in ("loss", "ci_fn"):
        if not raw[section].get("remat", True):
            raw[section]["remat"] = True
            yield f"{section}.remat=true"


def _small_sources(raw: dict[str, Any]) -> Iterator[str]:
    """16-bit sources of every persistent term at once (SPEC P1); those of shape ``c`` are small as they are."""
    typed = []
    for name, term in raw["loss"]["recon"].items():
        path, source = f"loss.recon.{name}.source", term["source"] if term else {}
        if source.get("kind") == "mixed":
            path, source = f"{path}.persistent", source["persistent"]
        if source.get("dtype") == "float32" and source["shape"] != "c":
            source["dtype"] = "uint16"
            typed.append(f"{path}.dtype=uint16")
    if typed:
        yield " ".join(typed)


def search(plan: Plan, planner: Planner) -> Iterator[str]:
    """Lines about every change tried, until one fits. What the lower bound rules out is not compiled."""
    began, step, compiled = time.monotonic(), plan.program.step, 0
    sizes = step.ax.sizes
    yield "remedies, cheapest first, each compiled:"
    for typed, cfg, shape in candidates(step.cfg, (sizes["replicate"], sizes["fsdp"], sizes["tp"])):
        if compiled == MOST_COMPILED:
            yield f"  {MOST_COMPILED} were compiled and none surely fits; the rest is not tried"
            break
        try:
            least = at_least(*planner.step(cfg, shape))
        except UserError as error:
            yield f"  {typed}: {error}"
            continue
        if least > plan.device.memory:
            yield f"  {typed}: needs at least {least / GIB:.1f} GiB"
            continue
        found, compiled = planner.plan(typed, cfg, shape), compiled + 1
        yield f"  {typed}: {found.verdict}, {found.needed}, {_cost(plan, found)}"
        if found.verdict == "FITS":
            break
    yield f"  remedies took {time.monotonic() - began:.0f} s"


def at_least(step: Step, masters: Any) -> float:
    """Bytes per device in closed form: what rests, and the temporaries that no schedule avoids."""
    rest = resting(step, arguments(step, masters)[0])
    return unavoidable(step) + sum(s.per_device for s in rest.values())


def _cost(plan: Plan, found: Plan) -> str:
    before, after = plan.time.in_sequence, found.time.in_sequence
    return f"a step of {after:.2f} s where it was {before:.2f} s"
