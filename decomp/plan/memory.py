"""Bytes per device by owner, in closed form: what rests, what one step must hold at the same time, what is saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decomp import optim
from decomp import placement as pl
from decomp.state import State
from decomp.step import Step


class Share(NamedTuple):
    """Bytes of some arrays: on one device, and all of them once."""

    per_device: float
    whole: float


def share(leaves: Any, dtypes: Any, sizes: Mapping[str, int]) -> Share:
    """Of a tree of Leaf with the dtypes of its arrays."""
    per_device = whole = 0.0
    kinds = jax.tree.leaves(dtypes)
    for leaf, dtype in zip(jax.tree.leaves(leaves, is_leaf=pl.is_leaf), kinds, strict=True):
        nbytes = math.prod(leaf.shape) * jnp.dtype(dtype).itemsize
        whole += nbytes
        per_device += nbytes / leaf.ways(sizes)
    return Share(per_device, whole)


def resting(step: Step, abstract: State) -> dict[str, Share]:
    """Bytes of the state and the target by owner."""
    sizes, leaves = step.ax.sizes, step.leaves
    dtypes = jax.tree.map(lambda x: x.dtype, abstract)
    of = lambda a, b: share(a, b, sizes)  # noqa: E731
    out = {
        "V and U masters": of(leaves.decomposition["components"], dtypes.decomposition["components"]),
        "CI function masters": of(leaves.decomposition["ci_fn"], dtypes.decomposition["ci_fn"]),
        "optimizer moments": of(leaves.progress["optim"], dtypes.progress["optim"]),
        "sources and their moments": of(leaves.progress["sources"], dtypes.progress["sources"]),
        "frequency averages": of(leaves.progress["frequency"], dtypes.progress["frequency"]),
    }
    frozen = jax.tree.map(lambda _: step.compute_dtype, step.target_leaves, is_leaf=pl.is_leaf)
    return out | {"frozen target": of(step.target_leaves, frozen)}


def copies(step: Step) -> dict[str, float]:
    """Bytes per device of the compute copies: whole over ``replicate``, split inside the node (SPEC D6)."""
    ways = step.ax.size("fsdp", "tp")
    width = jnp.dtype(step.compute_dtype).itemsize
    return {part: n_parameters(step, part) * width / ways for part in ("components", "ci_fn")}


def n_parameters(step: Step, part: str) -> int:
    leaves = optim.flatten(step.leaves.decomposition[part], pl.is_leaf)
    return sum(math.prod(leaf.shape) for leaf in leaves.values())


def positions(step: Step) -> float:
    """Positions of one window on one device."""
    cfg = step.cfg.data
    return cfg.batch_size * cfg.seq_len / step.ax.size("replicate", "fsdp") / cfg.microbatches


def unavoidable(step: Step) -> float:
    """Bytes of temporaries that no schedule avoids: at the end of the backward the gradients of all compute copies are
    there, with the CI function's copies and the cotangent of the importances that they are pulled back from."""
    held = copies(step)
    width = jnp.dtype(step.compute_dtype).itemsize
    channels = sum(s.C for s in step.model.table.sites) / step.ax.size("tp")
    return held["components"] + 2 * held["ci_fn"] + positions(step) * channels * width


def checkpoint(step: Step, abstract: State) -> dict[str, float]:
    """Bytes of one checkpoint by item, and of all that retention keeps at once."""
    nbytes = lambda tree: float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)))  # noqa: E731
    parts = {"decomposition": nbytes(abstract.decomposition), "progress": nbytes(abstract.progress)}
    cfg, total = step.cfg.checkpoint, sum(parts.values())
    kept = cfg.keep_last + (step.cfg.steps // cfg.keep_every if cfg.keep_every else 0) + (cfg.keep_best is not None)
    return parts | {"one checkpoint": total, f"the {kept} that are kept": kept * total}
