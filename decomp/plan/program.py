"""The step compiled from shapes for a mesh, and what the compiler says about it."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from decomp import build, optim, state
from decomp import placement as pl
from decomp.config.load import run_config, to_dict
from decomp.config.schema import RunConfig
from decomp.plan import hlo, peak
from decomp.state import State
from decomp.step import Step
from decomp.target.shape import LlamaShape

MeshShape = tuple[int, int, int]
# The pass that makes one device's program. Later ones turn bf16 to f32 on CPU, and fuse.
PARTITIONED = "*after_spmd-partitioning*.txt"
LIVE_RANGES = "*after_optimizations-live-range.txt"
ASSIGNMENT = "*after_optimizations-buffer-assignment.txt"


@dataclass(frozen=True)
class Program:
    """A compiled step. Bytes are per device; a CPU program's ``temporaries`` hold bf16 arrays as f32."""

    step: Step
    partitioned: hlo.Module
    optimized: hlo.Module
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    traced_s: float
    compiled_s: float
    buffers: tuple[str, str] = ("", "")  # XLA's texts of live ranges and of buffer assignment

    @property
    def for_gpu(self) -> bool:
        """Whether this is the program that a GPU would run."""
        return self.step.mesh.devices.flat[0].platform != "cpu"

    @cached_property
    def held(self) -> list[peak.Held]:
        """Temporaries at the moment of most memory, the largest first."""
        return peak.at_peak(*self.buffers, self.optimized)

    @cached_property
    def n_instructions(self) -> int:
        """The program's size: instructions before optimisation, loops counted once."""
        return sum(map(len, self.partitioned.computations.values()))


def planned(cfg: RunConfig) -> RunConfig:
    """The config as it runs on accelerators: ``precision=auto`` is bf16 there."""
    raw = to_dict(cfg)
    if cfg.precision.kind == "auto":
        raw["precision"]["kind"] = "bf16"
    return run_config(raw)


def make_step(cfg: RunConfig, shape: LlamaShape, mesh: Mesh) -> tuple[Step, Any]:
    """(step, master dtype) from shapes. Raises UserError where something does not divide."""
    masters, compute = build.configure_precision(cfg.precision)
    build.check_batch(cfg, mesh, shape)
    return build.build_step(cfg, mesh, shape, build.site_table(cfg, shape), compute), masters


def arguments(step: Step, masters: Any) -> tuple[State, Any, jax.ShapeDtypeStruct]:
    """State, target and tokens as shapes in their placements."""
    cfg = step.cfg
    abstract = state.abstract(step.mesh, step.model.table, step.ci_fn, step.groups, cfg, step.leaves, masters)
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, step.compute_dtype, sharding=pl.sharding(step.mesh, leaf)),
        step.target_leaves,
        is_leaf=pl.is_leaf,
    )
    placed = NamedSharding(step.mesh, step.batch_spec)
    tokens = jax.ShapeDtypeStruct((cfg.data.batch_size, cfg.data.seq_len), jnp.int32, sharding=placed)
    return abstract, target, tokens


def compile_step(step: Step, masters: Any) -> Program:
    """Traces, lowers and compiles; nothing is allocated."""
    began = time.monotonic()
    lowered = step.compiled.trace(*arguments(step, masters)).lower()
    traced = time.monotonic()
    compiled, partitioned, buffers = _compile(lowered)
    done = time.monotonic()
    m = compiled.memory_analysis()
    return Program(
        step, partitioned, hlo.parse(compiled.as_text()), m.argument_size_in_bytes, m.output_size_in_bytes,
        m.alias_size_in_bytes, m.temp_size_in_bytes, traced - began, done - traced, buffers,
    )  # fmt: skip


def compile_optimizer(step: Step, masters: Any) -> hlo.Module:
    """The optimizer groups' update alone, after partitioning: gradients rest where their masters do."""
    abstract, _, _ = arguments(step, masters)
    params, moments = optim.flatten(abstract.decomposition), abstract.progress["optim"]
    leaves = {n: step.groups.leaves[n] for n in params}
    placed = pl.tree_shardings(step.mesh, (leaves, optim.state_leaves(step.groups)))

    def update(grads: Any, params: Any, moments: Any, count: Any) -> tuple[Any, Any]:
        return optim.update(step.groups, step.mesh, grads, params, moments, count, step.schedule_steps)[:2]

    count = abstract.progress["step"]
    return _compile(jax.jit(update, out_shardings=placed).lower(params, params, moments, count))[1]


def _compile(lowered: Any) -> tuple[Any, hlo.Module, tuple[str, str]]:
    """(compiled, the program of one device before optimisation, XLA's texts about its buffers)."""
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd.*", "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(compiler_options=dump)
        (partitioned,) = Path(folder).glob(PARTITIONED)
        live_ranges, assignment = (
            "".join(file.read_text() for file in Path(folder).glob(name)) for name in (LIVE_RANGES, ASSIGNMENT)
        )
        return compiled, hlo.parse(partitioned.read_text()), (live_ranges, assignment)
