"""The state of a run: the decomposition (product) and the progress (process), as plain dicts of arrays (SPEC 1, K1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from decomp import components, optim
from decomp import masks as mk
from decomp import placement as pl
from decomp.ci_fn.base import CiFn
from decomp.config.schema import RunConfig
from decomp.keys import key_of
from decomp.loss import adversary
from decomp.placement import Axes, Leaf
from decomp.sites import SiteTable


class State(NamedTuple):
    """``decomposition``: {components, ci_fn}; ``progress``: {step, optim, sources, frequency, guard}."""

    decomposition: dict[str, Any]
    progress: dict[str, Any]


SCALAR = Leaf((), (), "batch")
ONE_DEVICE = Axes({"replicate": 1, "fsdp": 1, "tp": 1})


def decomposition_leaves(table: SiteTable, ci_fn: CiFn, cfg: RunConfig, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Leaf of every trainable array. Raises UserError for what does not divide over the mesh."""
    out = {"components": components.leaves(table, cfg.placement, sizes), "ci_fn": ci_fn.leaves()}
    for name, leaf in optim.flatten(out["ci_fn"], pl.is_leaf).items():
        pl.check_divides(f"ci_fn {name}", leaf, sizes)
    return out


def progress_leaves(table: SiteTable, groups: optim.GroupTable, cfg: RunConfig) -> dict[str, Any]:
    """Leaf of every array of the process: moments beside their parameters, sources with the batch."""
    sources = {}
    for name, term in cfg.loss.recon.items():
        if term and (source := adversary.persistent_of(term)):
            arrays = mk.stored_leaves(table, source.shape, cfg.data.batch_size, cfg.data.seq_len)
            moments = dict.fromkeys(adversary.moment_names(source), arrays)
            sources[name] = {"raw": arrays, **moments, **({"count": SCALAR} if moments else {})}
    averaged = cfg.loss.frequency is not None and cfg.loss.frequency.ema_halflife_steps is not None
    lanes = table.lanes.items() if averaged else ()
    return {
        "step": SCALAR,
        "optim": optim.state_leaves(groups),
        "sources": sources,
        "frequency": {
            "count": SCALAR,
            "mean": {n: Leaf((len(lane.sites), lane.C), (None, "C"), "batch") for n, lane in lanes},
        },
        "guard": {"in_a_row": SCALAR, "total": SCALAR},
    }


def init(
    mesh: Mesh, table: SiteTable, ci_fn: CiFn, groups: optim.GroupTable, cfg: RunConfig, leaves: State, dtype: Any
) -> State:
    """One compiled call draws every array straight into its placement (SPEC D7); values do not depend on the mesh."""
    draw = _draw_fn(table, ci_fn, groups, cfg, leaves, dtype)
    return jax.jit(draw, out_shardings=pl.tree_shardings(mesh, leaves))()


def abstract(
    mesh: Mesh, table: SiteTable, ci_fn: CiFn, groups: optim.GroupTable, cfg: RunConfig, leaves: State, dtype: Any
) -> State:
    """The state as shapes, dtypes and shardings: what a checkpoint restores onto."""
    shapes = jax.eval_shape(_draw_fn(table, ci_fn, groups, cfg, leaves, dtype))
    shardings = pl.tree_shardings(mesh, leaves)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def _draw_fn(table: SiteTable, ci_fn: CiFn, groups: optim.GroupTable, cfg: RunConfig, leaves: State, dtype: Any) -> Any:
    def draw() -> State:
        decomposition = {"components": components.init(table, cfg.seed, dtype), "ci_fn": ci_fn.init(cfg.seed, dtype)}
        return State(decomposition, _init_progress(decomposition, table, groups, cfg, leaves.progress, dtype))

    return draw


def _init_progress(
    decomposition: dict[str, Any], table: SiteTable, groups: optim.GroupTable, cfg: RunConfig, leaves: Any, dtype: Any
) -> dict[str, Any]:
    zero = jnp.zeros((), jnp.int32)
    sources = {n: _init_source(n, table, cfg, leaf, dtype) for n, leaf in leaves["sources"].items()}
    return {
        "step": zero,
        "optim": optim.init(groups, optim.flatten(decomposition)),
        "sources": sources,
        "frequency": {
            "count": zero,
            "mean": {n: jnp.zeros(leaf.shape, dtype) for n, leaf in leaves["frequency"]["mean"].items()},
        },
        "guard": {"in_a_row": zero, "total": zero},
    }


def _init_source(name: str, table: SiteTable, cfg: RunConfig, leaves: Any, dtype: Any) -> dict[str, Any]:
    """Raw sources of one persistent term (SPEC A1) and zero moments."""
    term = cfg.loss.recon[name]
    source = adversary.persistent_of(term) if term else None
    assert source is not None
    window = mk.Window(0, cfg.data.batch_size, cfg.data.seq_len)
    key = key_of(cfg.seed, "init", f"sources/{name}")
    if source.dtype == "uint16":
        bits = mk.stored_bits(ONE_DEVICE, table, window, key, source.shape)
        raw = jax.tree.map(lambda b: (b >> 16).astype(jnp.uint16), bits)  # what float32 draws, cut to the grid
    else:
        raw = mk.draw_stored(ONE_DEVICE, table, window, key, source.shape, source.parametrize == "sigmoid")
        raw = jax.tree.map(lambda x: x.astype(dtype), raw)
    zero = lambda x: jnp.zeros(x.shape, adversary.moment_dtype(source, dtype))  # noqa: E731
    zeros: dict[str, Any] = {m: jax.tree.map(zero, raw) for m in adversary.moment_names(source)}
    return {"raw": raw, **zeros, **({"count": jnp.zeros((), jnp.int32)} if zeros else {})}
