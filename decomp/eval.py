"""What is measured on held-out text, and how (SPEC R4).

One compiled function evaluates one batch; metrics are means over ``eval.batches`` held-out batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from decomp import masks as mk
from decomp import placement as pl
from decomp.ci_fn.base import squash
from decomp.components import SiteMask
from decomp.config.schema import EvalL0, EvalMask, EvalPgd, FreshPgdSource, Recon, RunConfig
from decomp.data.base import Data
from decomp.keys import key_of
from decomp.loss import objective, reconstruction
from decomp.mesh import DATA_AXES
from decomp.placement import Axes
from decomp.sites import Run, SiteTable, lane_rows
from decomp.state import State
from decomp.step import Given, Step

N_BINS = 50
Metrics = dict[str, Array]


class EvalResult(NamedTuple):
    """``metrics``: flat scalars by name; ``arrays``: mean_ci/<site> [C], ci_hist/<site> and ci_hist_edges."""

    metrics: dict[str, float]
    arrays: dict[str, np.ndarray]


class Recipe(NamedTuple):
    """A mask metric as numbers, so that one program serves all: which CI (0 none, 1 as it is, 2 rounded at
    ``threshold``), a constant source, and whether the source and the delta are random."""

    ci: Array
    threshold: Array
    source: Array
    random: Array
    delta: Array
    key: Array


@dataclass(frozen=True)
class RecipeMasks:
    """m = ci + (1 - ci) * source with CI and source as ``recipe`` says."""

    ci: dict[str, Array]
    recipe: Recipe
    ax: Axes
    table: SiteTable
    window: mk.Window

    @cached_property
    def uniform(self) -> mk.Uniform:
        return mk.Uniform.draw(self.ax, self.table, self.window, self.recipe.key)

    def rows(self, run: Run) -> Any:
        return {k: lane_rows(run, s.row, self.ci[s.lane]) for k, s in run.first.items()}, self.uniform.rows(run)

    def at(self, run: Run, kind: str, row: Any) -> SiteMask:
        r, ci = self.recipe, row[0][kind]
        cast = lambda x: x.astype(ci.dtype)  # noqa: E731
        rounded = cast(ci > cast(r.threshold))
        ci = jnp.where(r.ci == 2, rounded, cast(r.ci) * ci)
        u, delta = self.uniform.at(run, kind, row[1])
        source = jnp.where(r.random > 0, cast(u), cast(r.source))
        return SiteMask(ci + (1 - ci) * source, cast(r.delta) * cast(delta))


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a state on held-out data with the forward of ``training``."""

    training: Step
    target: Any
    data: Data
    cfg: RunConfig

    def run(self, state: State, step: int, stopping: Callable[[], bool] = lambda: False) -> EvalResult | None:
        """Metrics and CI statistics; the same held-out batches and draws at every call. ``stopping`` is asked before
        each batch; None where it says so."""
        metrics: dict[str, float] = {}
        arrays: dict[str, np.ndarray] = {}
        n = self.cfg.eval.batches
        for i in range(n):
            if stopping():
                return None
            placed = self.training.put_batch(self.data.eval_batch(i))
            found, stats = self.compiled(state.decomposition, self.target, placed, np.int32(i))
            for name, value in found.items():
                metrics[name] = metrics.get(name, 0.0) + float(value) / n
            for name, value in stats.items():
                arrays[name] = arrays.get(name, 0.0) + np.asarray(value, np.float64) / n
        return EvalResult(metrics, self._by_site(arrays))

    def _by_site(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        out = {"ci_hist_edges": np.linspace(0.0, 1.0, N_BINS + 1)}
        for s in self.training.model.table.sites:
            out |= {f"{k}/{s.name}": arrays[f"{k}/{s.lane}"][s.row] for k in ("mean_ci", "ci_hist")}
        return out

    @cached_property
    def wanted(self) -> dict[str, EvalMask | EvalL0 | EvalPgd]:
        return {n: m for n, m in self.cfg.eval.metrics.items() if m is not None}

    @cached_property
    def compiled(self) -> Callable[..., tuple[Metrics, Metrics]]:
        t = self.training
        decomposition, target = (pl.tree_specs(x, t.ax.sizes) for x in (t.leaves.decomposition, t.target_leaves))
        lanes = t.model.table.lanes
        stats = {f"mean_ci/{n}": pl.spec(((), t.ax.live(("tp",)))) for n in lanes} | {
            f"ci_hist/{n}": pl.spec(()) for n in lanes
        }
        specs = (decomposition, target, t.batch_spec, pl.spec(()))
        sharded = jax.shard_map(self.local, mesh=t.mesh, in_specs=specs, out_specs=(pl.spec(()), stats))
        return jax.jit(sharded, out_shardings=NamedSharding(t.mesh, pl.spec(())))  # every process reads all of it

    # ------------------------------------------------------------ on this device's block
    def local(self, decomposition: Any, target: Any, tokens: Array, index: Array) -> tuple[Metrics, Metrics]:
        t = self.training
        given = Given(target, t.model.llama.head(target, t.model.target_dims), tokens, index)
        copies = t.gather_in(decomposition)
        clean = t.model.llama.clean(target, t.model.target_dims, tokens, t.ci_fn.captures)
        lower, _ = squash(t.importances(copies, clean)[0])
        window = mk.Window(t.ax.index(DATA_AXES) * tokens.shape[0], *tokens.shape)
        ctx = objective.Context(target, given.head, clean, {}, window, index)
        out = {"eval/ce_target": self.cross_entropy(ctx, clean.hidden, tokens)}
        out |= self.under_masks(ctx, copies["components"], lower, tokens)
        for name, metric in self.wanted.items():
            if isinstance(metric, EvalL0):
                out |= self.l0(name, metric, lower)
            elif isinstance(metric, EvalPgd):
                masks = self.pgd(name, metric, ctx, copies["components"], lower)
                kl, ce = self.measure(ctx, copies["components"], masks, tokens)
                out |= {f"eval/kl_{name}": kl, f"eval/ce_{name}": ce}
        return out, self.statistics(lower)

    def measure(self, ctx: objective.Context, components: Any, masks: Any, tokens: Array) -> tuple[Array, Array]:
        """(KL, CE) in nats under ``masks``."""
        kl, hidden, _ = objective.masked(self.training.model, ctx, components, masks)
        return kl, self.cross_entropy(ctx, hidden, tokens)

    def under_masks(self, ctx: objective.Context, components: Any, ci: Any, tokens: Array) -> Metrics:
        """KL and CE of every mask metric in one scan: the masked forward is compiled once for all of them."""
        metrics = {n: m for n, m in self.wanted.items() if isinstance(m, EvalMask)}
        if not metrics:
            return {}
        t = self.training
        recipes = jax.tree.map(lambda *x: jnp.stack(x), *(self.recipe(n, m, ctx) for n, m in metrics.items()))

        def one(_: None, recipe: Recipe) -> tuple[None, tuple[Array, Array]]:
            return None, self.measure(ctx, components, RecipeMasks(ci, recipe, t.ax, t.model.table, ctx.window), tokens)

        kl, ce = jax.lax.scan(one, None, recipes)[1]
        return {f"eval/kl_{n}": kl[i] for i, n in enumerate(metrics)} | {
            f"eval/ce_{n}": ce[i] for i, n in enumerate(metrics)
        }

    def recipe(self, name: str, metric: EvalMask, ctx: objective.Context) -> Recipe:
        ci, source = {"unmasked": (1, 1.0), "zero": (0, 0.0), "rounded": (2, 0.0)}.get(metric.mask, (1, 0.0))
        stochastic = metric.mask == "stochastic"
        key = jnp.asarray(key_of(self.cfg.seed, f"eval/{name}", ctx.step))
        delta = stochastic and self.training.loss.delta
        f32 = jnp.float32
        return Recipe(f32(ci), f32(metric.threshold), f32(source), f32(stochastic), f32(delta), key)

    def pgd(self, name: str, metric: EvalPgd, ctx: objective.Context, components: Any, ci: Any) -> mk.CiMasks:
        t = self.training
        key = key_of(self.cfg.seed, f"eval/{name}", ctx.step)
        source = FreshPgdSource(steps=metric.steps, step_size=metric.step_size, shape=metric.shape)
        term = Recon(coeff=1.0, source=source)
        found = objective.pgd_sources(t.model, term, source, ctx, components, ci, key, None)
        return mk.CiMasks(ci, found, None, t.loss.delta)

    def l0(self, name: str, metric: EvalL0, ci: dict[str, Array]) -> Metrics:
        """L0 per site, its mean, and the mean and largest share of a matrix's rank it takes."""
        t = self.training
        by_site = mk.by_site(t.model.table, t.l0(ci, metric.threshold))
        shares = jnp.stack([by_site[s.name] / s.matrix.rank for s in t.model.table.sites])
        return {f"eval/{name}/{site}": v for site, v in by_site.items()} | {
            f"eval/{name}_mean": sum(by_site.values()) / len(by_site),
            f"eval/{name}_per_rank_mean": jnp.mean(shares),
            f"eval/{name}_per_rank_max": jnp.max(shares),
        }

    def cross_entropy(self, ctx: objective.Context, hidden: Array, tokens: Array) -> Array:
        t = self.training
        return reconstruction.mean_cross_entropy(t.ax, hidden, tokens, ctx.head, t.loss.kl_chunk, t.model.n_positions)

    def statistics(self, ci: dict[str, Array]) -> Metrics:
        """Mean CI [n, C] and histogram of CI [n, bins] by lane."""
        t, n = self.training, self.training.model.n_positions
        out = {}
        for k, x in ci.items():
            wide = x.astype(t.wide)
            out[f"mean_ci/{k}"] = t.ax.psum(jnp.sum(wide, axis=(1, 2)), DATA_AXES) / n
            bins = jnp.clip((wide * N_BINS).astype(jnp.int32), 0, N_BINS - 1)
            counts = jnp.stack([jnp.sum(bins == b, axis=(1, 2, 3), dtype=jnp.int32) for b in range(N_BINS)], axis=1)
            out[f"ci_hist/{k}"] = t.ax.psum(counts, (*DATA_AXES, "tp"))
        return out
