"""Reconstruction terms: from a term's config to its value and gradients on one window of examples (SPEC 4-6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from decomp import masks as mk
from decomp.components import Stacks
from decomp.config.schema import (
    ConstantSource,
    FreshPgdSource,
    Loss,
    MixedSource,
    Recon,
    RouteAll,
    RoutePerSite,
    UniformSource,
)
from decomp.keys import Key, fold, key_of, site_keys, uniform_block
from decomp.loss import adversary, reconstruction
from decomp.numerics import wide
from decomp.placement import Axes
from decomp.sites import SiteTable
from decomp.target.llama import Clean, Llama

ByLane = dict[str, Array]


@dataclass(frozen=True)
class Model:
    """What every term needs and no step changes: forward, table, mesh, sizes of the GLOBAL batch."""

    ax: Axes
    table: SiteTable
    llama: Llama
    loss: Loss
    target_dims: Any
    copy_dims: Any
    n_positions: int
    seed: int


class Context(NamedTuple):
    """One window of examples in one step: target parameters, unembedding, clean forward, capture norms."""

    target: Any
    head: Array
    clean: Clean
    norms: dict[str, Array]
    window: mk.Window
    step: Array


def hidden_captures(loss: Loss) -> frozenset[str]:
    """Captures that some term's hidden-activation option needs (SPEC L7)."""
    return frozenset(c for t in loss.recon.values() if t and t.hidden for c in t.hidden.captures)


def value(model: Model, term: Recon, ctx: Context, components: Stacks, masks: mk.CiMasks) -> Float[Array, ""]:
    """KL at the output, plus the hidden-activation part where the term asks for it (SPEC L5, L7)."""
    captures = frozenset(term.hidden.captures) if term.hidden else frozenset()
    out, _, found = masked(model, ctx, components, masks, captures)
    if term.hidden:
        clean = {n: ctx.clean.captures[n] for n in found}
        out = out + term.hidden.coeff * reconstruction.hidden_distance(model.ax, clean, found, ctx.norms)
    return out


def masked(
    model: Model, ctx: Context, components: Stacks, masks: Any, captures: Set[str] = frozenset()
) -> tuple[Float[Array, ""], Float[Array, "B T d"], ByLane]:
    """(KL at the output in nats, normed hidden state, captures) of one masked forward (SPEC L5)."""
    hidden, found = model.llama.masked(
        ctx.target, model.target_dims, components, model.copy_dims["components"], masks, ctx.clean.start, captures
    )
    kl = reconstruction.mean_kl(model.ax, ctx.clean.hidden, hidden, ctx.head, model.loss.kl_chunk, model.n_positions)
    return kl, hidden, found


def gradients(
    model: Model, name: str, term: Recon, ctx: Context, components: Stacks, a: ByLane, raw: adversary.Values
) -> tuple[Array, tuple[Stacks, ByLane, adversary.Values]]:
    """The bare term and its gradients by (components, lower CI, persistent sources), the mean over draws (SPEC L6, A3).

    ``a`` are the pre-activations of CI; importances themselves will do, being their own clipped values. Gradients by
    sources in uint16 have the dtype of ``a``.
    """
    by_ci = jax.tree.map(model.ax.zeros_like, dict(a))
    variables = adversary.variables(model.ax, raw, _lane_dtype(a))

    def one(draw: int) -> tuple[Array, tuple[Stacks, ByLane, adversary.Values]]:
        key = key_of(model.seed, f"recon/{name}", ctx.step, draw)
        if isinstance(term.routing, RoutePerSite):
            routed = lambda i: under(key, mk.route_one(model.table, ctx.window, i))  # noqa: E731
            return _mean_over(model.ax, routed, len(model.table.sites))
        return under(key, draw_routes(model, term, ctx, key))

    def under(key: Key, routes: Any) -> tuple[Array, tuple[Stacks, ByLane, adversary.Values]]:
        source_of = prepare_source(model, term, ctx, components, a, key, routes)

        def bare(c: Stacks, by_ci: ByLane, by: Any) -> Array:
            source = source_of(adversary.values_of(raw, by))
            return value(model, term, ctx, c, mk.CiMasks(mk.lower_by(a, by_ci), source, routes, model.loss.delta))

        return jax.value_and_grad(bare, argnums=(0, 1, 2))(components, by_ci, variables)

    total = one(0)
    for draw in range(1, term.draws):
        total = jax.tree.map(jnp.add, total, one(draw))
    return total if term.draws == 1 else jax.tree.map(lambda x: x / term.draws, total)


def _mean_over(ax: Axes, fn: Callable[[Any], Any], n: int) -> Any:
    """Mean of ``fn(0) .. fn(n - 1)``, one after the other."""

    def body(total: Any, i: Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, fn(i)), None

    zeros = jax.tree.map(ax.zeros_like, jax.eval_shape(lambda: fn(jnp.int32(0))))
    total, _ = jax.lax.scan(body, zeros, jnp.arange(n, dtype=jnp.int32))
    return jax.tree.map(lambda x: x / n, total)


def ascent_gradient(
    model: Model, term: Recon, ctx: Context, components: Stacks, a: ByLane, raw: adversary.Values
) -> adversary.Values:
    """d bare term / d persistent sources, everything routed, components and CI detached (SPEC A2, A3, M5)."""
    cfg = adversary.persistent_of(term)
    assert cfg is not None

    def bare(by: adversary.Values) -> Array:
        source = mk.Stored(adversary.effective(cfg, adversary.values_of(raw, by)), cfg.shape)
        return value(model, term, ctx, components, mk.CiMasks(mk.lower_by(a, a), source, None, model.loss.delta))

    return jax.grad(bare)(adversary.variables(model.ax, raw, _lane_dtype(a)))


def draw_routes(model: Model, term: Recon, ctx: Context, key: Key) -> Any:
    if isinstance(term.routing, RouteAll):
        return None
    assert not isinstance(term.routing, RoutePerSite), "one forward for each site: see gradients"
    return mk.draw_routes(term.routing, model.table, ctx.window, fold(key, "route"))


def prepare_source(
    model: Model, term: Recon, ctx: Context, components: Stacks, a: ByLane, key: Key, routes: Any
) -> Any:
    """A function from the term's persistent values (empty where it owns none) to its source for this draw."""
    ax, cfg = model.ax, term.source
    fresh = fold(key, "source")
    if isinstance(cfg, ConstantSource):
        return lambda _: mk.Constant(cfg.value)
    if isinstance(cfg, UniformSource):
        return lambda _: mk.Uniform.draw(ax, model.table, ctx.window, fresh)
    if isinstance(cfg, FreshPgdSource):
        found = pgd_sources(model, term, cfg, ctx, components, a, fresh, routes)
        return lambda _: found
    if isinstance(cfg, MixedSource):
        uniform = mk.Uniform.draw(ax, model.table, ctx.window, fresh)
        coin = uniform_block(site_keys(key, ["mixed"])[0], ctx.window.example0, (ctx.window.batch, 1, 1), 1)[:, 0, 0]
        inner = cfg.persistent
        adversarial = coin < cfg.adv_fraction
        return lambda raw: mk.Mixed(mk.Stored(adversary.effective(inner, raw), inner.shape), uniform, adversarial)
    return lambda raw: mk.Stored(adversary.effective(cfg, raw), cfg.shape)


def pgd_sources(
    model: Model, term: Recon, cfg: FreshPgdSource, ctx: Context, components: Stacks, a: ByLane, key: Key, routes: Any
) -> mk.Stored:
    """Sources after ``cfg.steps`` ascents with this step's routing (SPEC M2, M5); constants of the outer gradient."""
    components, a = jax.lax.stop_gradient((components, a))
    values = mk.draw_stored(model.ax, model.table, ctx.window, key, cfg.shape)
    if cfg.init != "random":
        values = jax.tree.map(jnp.ones_like if cfg.init == "ones" else jnp.zeros_like, values)
    values = jax.tree.map(lambda x: x.astype(wide(_lane_dtype(a))), values)

    def bare(v: adversary.Values) -> Array:
        masks = mk.CiMasks(mk.lower_by(a, a), mk.Stored(v, cfg.shape), routes, model.loss.delta)
        return value(model, term, ctx, components, masks)

    return mk.Stored(adversary.fresh_pgd(values, jax.grad(bare), cfg.steps, cfg.step_size), cfg.shape)


def _lane_dtype(lanes: Mapping[str, Array]) -> Any:
    return next(iter(lanes.values())).dtype
