"""A tiny random Llama and its training step, from shapes alone: no folder, no tokenizer, no corpus."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from decomp import build, state
from decomp.config.load import run_config
from decomp.config.schema import RunConfig
from decomp.mesh import AXES
from decomp.state import State
from decomp.step import Step
from decomp.target.shape import LlamaShape

SHAPE = LlamaShape(
    n_layers=4, d_model=16, n_heads=4, n_kv_heads=2, head_dim=4, d_mlp=32, vocab=64, tied=False, max_positions=64
)
PERSISTENT = {"kind": "persistent", "shape": "bsc", "num_warmup_steps": 1, "optim": {"kind": "adam", "lr": 0.01}}
RECON = {
    "stochastic": {"coeff": 1.0, "source": {"kind": "uniform"}, "routing": {"kind": "uniform_k"}},
    "adversarial": {"coeff": 0.5, "source": PERSISTENT},
}


def config(**changes: Any) -> RunConfig:
    """A small config of every loss; ``changes`` are dotted with ``__``: data__batch_size=4."""
    raw: dict[str, Any] = {
        "experiment": "tiny", "steps": 10, "target": {"kind": "llama", "path": "nowhere"},
        "sites": {"C": {"q_proj": 8, "down_proj": 24}, "C_per_rank": 1.0}, "mesh": {},
        "placement": {"components": "owner"},
        "ci_fn": {"kind": "chunk_transformer", "d_model": 8, "n_heads": 2, "d_mlp": 16}, "optim": {
            "components": {"kind": "adamw", "match": "components", "lr": 3e-3, "clip": 1.0},
            "ci_fn": {"kind": "adamw", "match": "ci_fn", "lr": 3e-3}},
        "loss": {"minimality": {"coeff": 1e-3}, "frequency": {"coeff": 1e-3, "ema_halflife_steps": 4},
                 "recon": {k: dict(v) for k, v in RECON.items()}},
        "data": {"kind": "stdlib", "batch_size": 8, "seq_len": 6}, "eval": {}, "checkpoint": {}, "logger": {},
        "launcher": {"kind": "local"}, "precision": {"kind": "fp32"},
    }  # fmt: skip
    for name, value in changes.items():
        *path, last = name.split("__")
        node = raw
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return run_config(raw)


class RandomTensors:
    """Weights N(0, 1/d_in), drawn by numpy from each tensor's place in the list."""

    def __init__(self, shape: LlamaShape, seed: int = 0):
        names = shape.tensors()
        self.arrays = {
            n: _draw(n, s, np.random.default_rng([seed, i])).astype(np.float32)
            for i, (n, s) in enumerate(names.items())
        }

    def get(self, name: str) -> np.ndarray:
        return self.arrays[name]


def _draw(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if "norm" in name:
        return 1 + 0.1 * rng.normal(size=shape)
    return rng.normal(size=shape) / np.sqrt(shape[-1]) * (2.0 if "lm_head" in name else 1.0)


def make(cfg: RunConfig, mesh_shape: tuple[int, int, int] = (1, 1, 1), shape: LlamaShape = SHAPE) -> tuple[Step, Any]:
    """(step, placed target) on the first devices."""
    dtypes = build.configure_precision(cfg.precision)
    devices = np.array(jax.devices()[: int(np.prod(mesh_shape))]).reshape(mesh_shape)
    mesh = jax.sharding.Mesh(devices, AXES)
    table = build.site_table(cfg, shape)
    build.check_batch(cfg, mesh, shape)
    step = build.build_step(cfg, mesh, shape, table, dtypes[1])
    target = build.place_target(RandomTensors(shape), shape, table, mesh, step.target_leaves, dtypes[1])
    return step, target


def init(step: Step) -> State:
    dtype = jnp.float64 if step.cfg.precision.kind == "fp64" else jnp.float32
    return state.init(step.mesh, step.model.table, step.ci_fn, step.groups, step.cfg, step.leaves, dtype)


def batch(step: Step, index: int) -> jax.Array:
    cfg = step.cfg.data
    tokens = np.random.default_rng(index).integers(0, SHAPE.vocab, (cfg.batch_size, cfg.seq_len), dtype=np.int32)
    return jax.device_put(tokens, NamedSharding(step.mesh, step.batch_spec))


def run(step: Step, target: Any, s: State, n: int, first: int = 0) -> tuple[State, list[dict[str, float]]]:
    """``n`` steps; metrics of each."""
    logs = []
    for i in range(first, first + n):
        s, metrics = step.compiled(s, target, batch(step, i))
        logs.append({k: float(v) for k, v in metrics.items()})
    return s, logs


__all__ = ["SHAPE", "batch", "config", "init", "make", "replace", "run"]
