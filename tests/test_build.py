"""What only the target, the corpus or the devices can tell is refused in one line; rare choices are said aloud."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny
from tiny import SHAPE

from decomp import build
from decomp.config.errors import UserError
from decomp.config.schema import Precision


def mesh(replicate: int = 1, fsdp: int = 1, tp: int = 1) -> Any:
    return SimpleNamespace(shape={"replicate": replicate, "fsdp": fsdp, "tp": tp})


REFUSED = {
    "batch": ({}, mesh(2, 8), "data.batch_size=8: it must be a multiple of replicate x fsdp x microbatches = 16"),
    "microbatches": (
        {"data__microbatches": 4}, mesh(2, 2),
        "data.batch_size=8: it must be a multiple of replicate x fsdp x microbatches = 16",
    ),
    "length": ({"data__seq_len": 65}, mesh(), "data.seq_len=65: the target has at most 64 positions"),
    "kv heads": ({}, mesh(tp=4), "mesh.tp=4: it must divide the target's 2 kv heads and ci_fn.n_heads=2"),
    "CI heads": (
        {"ci_fn__n_heads": 1}, mesh(tp=2), "mesh.tp=2: it must divide the target's 2 kv heads and ci_fn.n_heads=1",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "devices", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_a_batch_that_does_not_fit_is_refused(changes: dict[str, Any], devices: Any, said: str):
    with pytest.raises(UserError) as error:
        build.check_batch(tiny.config(**changes), devices, SHAPE)
    (line,) = str(error.value).splitlines()
    assert line.startswith(said)


@pytest.mark.parametrize("devices", [mesh(), mesh(2, 2, 2), mesh(1, 8)])
def test_a_batch_that_fits_passes(devices: Any):
    build.check_batch(tiny.config(data__seq_len=64), devices, SHAPE)


def test_more_devices_than_there_are():
    with pytest.raises(UserError, match=r"mesh=1x9x1 needs 9 devices and 1 were found"):
        build.build_mesh(tiny.config(mesh={"fsdp": 9}).mesh)


# ---------------------------------------------------------------- targets that cannot be read
def test_a_target_that_is_missing(tmp_path: Path):
    missing = tmp_path / "nothing"
    with pytest.raises(UserError) as error:
        build.build(tiny.config(target={"kind": "llama", "path": str(missing)}))
    (line,) = str(error.value).splitlines()
    assert str(missing) in line


def test_a_target_whose_config_is_broken(tmp_path: Path):
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(UserError) as error:
        build.build(tiny.config(target={"kind": "llama", "path": str(tmp_path)}))
    (line,) = str(error.value).splitlines()
    assert "config.json" in line


def test_sites_that_the_target_lacks():
    with pytest.raises(UserError, match=r"sites\.layers=7: the target has layers 0 to 3"):
        build.site_table(tiny.config(sites={"layers": [7]}), SHAPE)
    with pytest.raises(UserError, match=r"sites\.kinds=c_fc: the target has no such kind; its kinds are q_proj"):
        build.site_table(tiny.config(sites={"kinds": ["c_fc"]}), SHAPE)
    assert build.site_table(tiny.config(sites={"kinds": ["c_fc"]}), replace(SHAPE, gated=False)).sites


# ---------------------------------------------------------------- warnings (case 9)
def warned(**sites: Any) -> list[str]:
    cfg = tiny.config(sites=sites)
    return build.Trainer.warnings(SimpleNamespace(cfg=cfg, table=build.site_table(cfg, SHAPE)))  # pyright: ignore


def test_unusual_numbers_of_components_are_said_aloud():
    """Case 9: fewer components than the rank, or far more; the first such site is named with both numbers."""
    assert warned(C_per_rank=1.0) == []
    assert warned(C_per_rank=16.0) == []
    (few,) = warned(C_per_rank=1.0, C={"o_proj": 15})
    assert few.startswith(
        "4 sites have fewer components than their rank (first model.layers.0.self_attn.o_proj: C=15, rank 16)"
    )
    (many,) = warned(C_per_rank=1.0, C={"k_proj": 129}, layers=[2])
    assert many.startswith("1 sites have over 16 components per rank (first model.layers.2.self_attn.k_proj: C=129")
    assert len(warned(C_per_rank=1.0, C={"k_proj": 129, "o_proj": 15})) == 2


# ---------------------------------------------------------------- precision
@pytest.fixture
def x64() -> Iterator[None]:
    yield
    jax.config.update("jax_enable_x64", False)


def test_precision_is_one_setting(x64: None):
    """P1: fp32 masters; compute copies are fp32 on CPU, bf16 where asked; fp64 for everything as a test mode."""
    assert build.configure_precision(Precision(kind="auto")) == (jnp.float32, jnp.float32)
    assert build.configure_precision(Precision(kind="bf16")) == (jnp.float32, jnp.bfloat16)
    assert build.configure_precision(Precision(kind="fp64")) == (jnp.float64, jnp.float64)


def test_absent_optimizer_groups_are_left_out():
    cfg = tiny.config(optim__more=None)
    assert list(build.optim_groups(cfg)) == ["components", "ci_fn"]
