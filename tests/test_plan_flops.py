"""Useful FLOPs, resting bytes and floors of small steps, counted by hand; device data and mistakes."""

from __future__ import annotations

import math
from typing import Any

import jax
import pytest
import tiny

from decomp.config.errors import UserError
from decomp.plan import backend, device, flops, memory
from decomp.plan.census import Collective
from decomp.plan.program import arguments, make_step, planned
from decomp.target.shape import LLAMA_8B


def step_of(**changes: Any):
    return one_device(tiny.config(**changes))[0]


def one_device(cfg: Any):
    return make_step(cfg, tiny.SHAPE, backend.make_mesh("cpu", (1, 1, 1), {}))


PER_LAYER = 2 * (16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 32)
SCORES = 4 * 6 * 16
HEAD = 2 * 16 * 64


def test_the_clean_forward():
    assert flops.clean_forward(step_of()) == 4 * (PER_LAYER + SCORES) + HEAD


def test_one_site_in_the_last_layer():
    """down_proj of layer 3, C 24: nothing before it needs a gradient, and layers before it run once (SPEC F7)."""
    step = step_of(sites__layers=[3], sites__kinds=["down_proj"])
    forward, by_input, by_factor = flops.masked_parts(step)
    factors = 2 * 24 * (32 + 16)
    assert forward == PER_LAYER + SCORES + HEAD + factors
    assert by_input == HEAD + 2 * 24 * 16, "through U to the mask, and no further"
    assert by_factor == factors


def test_later_layers_pass_the_gradient_on():
    step = step_of(sites__layers=[2], sites__kinds=["down_proj"])
    forward, by_input, _ = flops.masked_parts(step)
    assert forward == 2 * (PER_LAYER + SCORES) + HEAD + 2 * 24 * (32 + 16)
    assert by_input == PER_LAYER + 2 * SCORES + HEAD + 2 * 24 * 16


def test_without_delta_the_frozen_matrix_of_a_site_is_not_used():
    with_delta, without = (
        flops.masked_parts(step_of(sites__layers=[3], sites__kinds=["down_proj"], loss__delta=d))[0]
        for d in (True, False)
    )
    assert with_delta - without == 2 * 32 * 16


def test_passes_count_ascents_and_draws():
    step = step_of(loss__recon__adversarial__source__num_warmup_steps=3, loss__recon__stochastic__draws=2)
    assert flops.passes(step.terms["adversarial"]) == (3, 1)
    assert flops.passes(step.terms["stochastic"]) == (0, 2)


def test_newton_schulz_is_counted_for_muon_alone():
    assert flops.newton_schulz(step_of()) == 0
    muon = step_of(optim__components={"kind": "muon", "match": "components", "lr": 1e-3})
    expected = 0.0
    for g in muon.model.table.groups.values():
        for a, b in (sorted((g.d_in, g.C)), sorted((g.C, g.d_out))):
            expected += 5 * len(g.sites) * (4 * a * a * b + 2 * a**3)
    assert flops.newton_schulz(muon) == expected


def test_resting_bytes_are_those_of_the_state():
    step, masters = one_device(tiny.config())
    abstract = arguments(step, masters)[0]
    resting = memory.resting(step, abstract)
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract.decomposition["components"]))
    assert resting["V and U masters"] == (whole, whole)
    assert resting["optimizer moments"].whole == pytest.approx(
        2 * (whole + resting["CI function masters"].whole), abs=16
    )
    assert memory.n_parameters(step, "components") * 4 == whole
    saved = memory.checkpoint(step, abstract)
    assert saved["one checkpoint"] == saved["decomposition"] + saved["progress"]
    assert saved["the 2 that are kept"] == 2 * saved["one checkpoint"]


def test_llama8b_has_the_published_size():
    assert sum(math.prod(shape) for shape in LLAMA_8B.tensors().values()) == 8_030_261_248


def test_auto_is_planned_as_bf16():
    assert planned(tiny.config(precision={"kind": "auto"})).precision.kind == "bf16"
    assert planned(tiny.config(precision={"kind": "fp32"})).precision.kind == "fp32"


# ---------------------------------------------------------------- devices
def test_step_time_adds_up_parts():
    d = device.Device("d", {"bf16": 100.0, "f32": 10.0}, 1e9, 20.0, 5.0, 0.5)
    found = [
        Collective("all-gather", ("fsdp",), "bf16", 9, 10.0, 4, True, ""),
        Collective("all-gather", ("replicate",), "bf16", 9, 10.0, 1, False, ""),
        Collective("all-reduce", (), "f32", 1, 0.0, 1, False, ""),
    ]
    assert device.predict(d, {"bf16": 100.0, "f32": 10.0}, found) == (4.0, 2.0, 2.0)


def test_every_shipped_device_is_whole():
    for name in ("h100", "h200", "b200"):
        d = device.find(name)
        assert d.flops["bf16"] > d.flops["f32"] > 1e12 and d.in_node > d.cross_node > 1e9 and 0 < d.efficiency <= 1


def test_an_unknown_device_is_one_line():
    with pytest.raises(UserError, match=r"^device=h1000: no such device in conf/devices.yaml; did you mean h100"):
        device.find("h1000")
