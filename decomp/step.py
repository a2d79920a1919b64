"""One training step in SPEC order: gradients inside one ``shard_map``, optimizer where the masters rest (SPEC 7).

``Step.local`` is the method on one screen. Everything it calls works on this device's blocks of the global arrays;
every sum over the batch is a named collective of ``placement.Axes``. A device's examples are cut into ``microbatches``
windows (SPEC T8): with one window nothing is scanned, and CI is run and differentiated once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Int

from decomp import components as comp
from decomp import masks as mk
from decomp import optim, schedule
from decomp import placement as pl
from decomp.ci_fn.base import CiFn, squash
from decomp.config.schema import AdamW, Loss, PersistentSource, Recon, RunConfig, Schedule
from decomp.keys import fold, key_of
from decomp.loss import adversary, minimality, objective, reconstruction
from decomp.loss.faithfulness import faithfulness
from decomp.mesh import AXES, DATA_AXES
from decomp.numerics import in_turn, wide
from decomp.placement import Axes
from decomp.state import SCALAR, State
from decomp.target.llama import Clean

Tree = Any
Values = dict[str, Array]


class Given(NamedTuple):
    """What a device reads in one step besides the trainable state; ``head`` is the whole unembedding."""

    target: Tree
    head: Array
    tokens: Int[Array, "b T"]
    step: Int[Array, ""]


class Seen(NamedTuple):
    """Clean activations and pre-activations of CI of a window; stacked over windows where there are several."""

    clean: Clean
    a: dict[str, Array]


class Sums(NamedTuple):
    """Sums over the GLOBAL batch, formed before any nonlinearity (SPEC L4, T8)."""

    rates: dict[str, Array]
    l0: dict[str, Array]
    norms: dict[str, Array]


@dataclass(frozen=True)
class Step:
    """The step of one configuration on one mesh. ``leaves`` place the state, ``target_leaves`` the frozen model."""

    mesh: Mesh
    model: objective.Model
    ci_fn: CiFn
    groups: optim.GroupTable
    leaves: State
    target_leaves: Tree
    cfg: RunConfig
    compute_dtype: Any

    # ------------------------------------------------------------ SPEC 7, on this device's blocks
    def local(self, state: State, target: Tree, tokens: Int[Array, "b T"]) -> tuple[Tree, Tree, Tree, Values, Tree]:
        """Gradients at the masters, new sources and averages, the value of every loss, L0 by lane."""
        masters, progress = state.decomposition, state.progress
        given = Given(target, self.model.llama.head(target, self.model.target_dims), tokens, progress["step"])
        copies, reduce_out = jax.vjp(self.gather_in, masters)
        seen, sums, pull = self.look(copies, given)
        slopes, average, sparsity = self.sparsity(sums.rates, progress["frequency"], given.step)
        sources = {n: self.warm_up(n, s, copies, seen, sums, given) for n, s in progress["sources"].items()}
        recon, copy_grads, source_grads = self.backward(copies, seen, sums, pull, sources, slopes, given)
        sources = {n: self.ascend(n, s, source_grads[n], given) for n, s in sources.items()}
        recon = {n: self.judged(n, v, sources) for n, v in recon.items()}
        (grads,) = reduce_out(copy_grads)
        faith, grads = self.add_faithfulness(masters["components"], target, grads, given.step)
        return grads, sources, average, faith | sparsity | recon, sums.l0

    def __call__(self, state: State, target: Tree, tokens: Int[Array, "B T"]) -> tuple[State, Values]:
        """The whole step on global arrays: ``local``, optimizer groups, guard (SPEC T1-T7)."""
        grads, sources, average, values, l0 = self.sharded(state, target, tokens)
        old, progress = state.decomposition, state.progress
        params, moments, logs = optim.update(
            self.groups, self.mesh, optim.flatten(grads), optim.flatten(old), progress["optim"], progress["step"],
            self.schedule_steps,
        )  # fmt: skip
        bad = self.first_bad(values, logs)
        changed = {"optim": moments, "sources": sources, "frequency": average}
        unchanged = {k: progress[k] for k in changed}
        keep = lambda new, before: jax.tree.map(lambda n, b: jnp.where(bad < 0, n, b), new, before)  # noqa: E731
        new = {
            **keep(changed, unchanged),
            "step": progress["step"] + 1,
            "guard": self.count_skipped(progress["guard"], bad >= 0),
        }
        decomposition = optim.unflatten(old, keep(params, optim.flatten(old)))
        return State(decomposition, new), self.metrics(values, logs, l0, new["guard"], bad, progress["step"])

    # ------------------------------------------------------------ the parts of ``local``, in the order of use
    def gather_in(self, masters: Tree) -> Tree:
        return comp.compute_copies(self.ax, masters, self.dims.decomposition, self.compute_dtype)

    def look(self, copies: Tree, given: Given) -> tuple[Seen, Sums, Any]:
        """Clean forward and CI of every window (SPEC C3). One window keeps CI's pullback: CI runs once."""

        def window(j: Any) -> tuple[Sums, Seen, Callable[..., Any]]:
            clean = self.clean(given, j)
            a, pull = self.importances(copies, clean)
            return self.sums(clean, a, given.step), Seen(clean, a), pull

        if self.microbatches == 1:
            sums, seen, pull = window(0)
            return seen, sums, pull
        sums, seen = self.over_windows(lambda j: window(j)[:2])
        return seen, sums, None

    def sparsity(self, rates: Tree, average: Tree, step: Array) -> tuple[Tree, Tree, Values]:
        """Slope of L2 + L3 by f, the new averages, and both values (SPEC L2, L3)."""
        if self.loss.minimality is None:
            return {}, average, {}
        coeff = self.at_step(self.loss.minimality.coeff, step)
        slopes = {n: jnp.broadcast_to(coeff, f.shape) for n, f in rates.items()}
        values = {"minimality": minimality.total(self.ax, rates)}
        if (cfg := self.loss.frequency) is not None:
            mean, f_hat, count = minimality.average(cfg, average["mean"], average["count"], rates)
            average = {"mean": mean, "count": count}
            pairs = {n: minimality.frequency(cfg, f, self.model.n_positions) for n, f in f_hat.items()}
            values["frequency"] = minimality.total(self.ax, {n: phi for n, (phi, _) in pairs.items()})
            coeff = self.at_step(cfg.coeff, step)
            slopes = {n: s + coeff * pairs[n][1] for n, s in slopes.items()}
        return slopes, average, values

    def warm_up(self, name: str, source: Tree, copies: Tree, seen: Seen, sums: Sums, given: Given) -> Tree:
        """num_warmup_steps ascents of one persistent term, components and CI detached (SPEC A2)."""
        cfg, term = self.persistent[name], self.terms[name]

        def window(j: Any, raw: Tree) -> tuple[Tree, Tree]:
            here = self.at(seen, j)
            ctx = self.context(here.clean, sums, given, j)
            own = self.own(cfg, raw, j)
            return self.by_shape(
                cfg, objective.ascent_gradient(self.model, term, ctx, copies["components"], here.a, own)
            )

        for i in range(cfg.num_warmup_steps):  # unrolled: as a loop's carry the sources would be copied in and out
            raw = source["raw"]
            grads = self.merge(cfg, *self.over_windows(lambda j, raw=raw: window(j, raw)))
            source = self.ascend(name, source, grads, given, i)
        return source

    def backward(
        self, copies: Tree, seen: Seen, sums: Sums, pull: Any, sources: Tree, slopes: Tree, given: Given
    ) -> tuple[Values, Tree, Tree]:
        """Every recon term and the sparsity slopes, pulled back to the compute copies; bare source gradients."""

        def window(j: Any) -> tuple[Tree, Tree]:
            here = self.at(seen, j)
            back = pull or self.importances(copies, here.clean)[1]
            values, by_components, by_lower, by_source = self.recon(copies, here, sums, sources, j, given)
            (_, upper), unsquash = jax.vjp(squash, here.a)
            by_upper = self.sparsity_cotangent(upper, slopes, given.step)
            ci_grads, more = back(*unsquash((by_lower, by_upper)))
            grads = {"components": jax.tree.map(jnp.add, by_components, more), "ci_fn": ci_grads}
            split = {n: self.by_shape(self.persistent[n], g) for n, g in by_source.items()}
            return (values, grads, {n: s for n, (s, _) in split.items()}), {n: o for n, (_, o) in split.items()}

        (values, grads, shared), own = self.over_windows(window)
        return values, grads, {n: self.merge(self.persistent[n], shared[n], own[n]) for n in sources}

    def recon(
        self, copies: Tree, here: Seen, sums: Sums, sources: Tree, j: Any, given: Given
    ) -> tuple[Values, Tree, Tree, dict[str, Tree]]:
        """Term after term: values, and coefficient-weighted gradients by components and lower CI. A source's gradient
        is the bare term's: the coefficient never reaches it (SPEC A3)."""
        ctx, values, by_source = self.context(here.clean, sums, given, j), {}, {}
        inputs, total, before = (copies["components"], here.a), None, sources
        for name, term in self.terms.items():
            inputs = in_turn(inputs, before)
            raw = self.own(self.persistent[name], sources[name]["raw"], j) if name in sources else {}
            values[name], (*grads, gs) = objective.gradients(self.model, name, term, ctx, *inputs, raw)
            c = self.at_step(term.coeff, given.step)
            weighted = jax.tree.map(lambda g, c=c: c.astype(g.dtype) * g, tuple(grads))
            total = before = weighted if total is None else jax.tree.map(jnp.add, total, weighted)
            if name in sources:
                by_source[name] = gs
        by_components, by_lower = total or jax.tree.map(self.ax.zeros_like, inputs)
        return values, by_components, by_lower, by_source

    def sparsity_cotangent(self, upper: dict[str, Array], slopes: Tree, step: Array) -> dict[str, Array]:
        """d (L2 + L3) / d upper: the slope of each component's rate, times psi' / positions."""
        if self.loss.minimality is None:
            return jax.tree.map(jnp.zeros_like, upper)
        penalty, shape = self.loss.minimality.penalty, self.penalty_shape(step)
        spread = lambda s, u: jnp.broadcast_to(s[:, None, None] / self.model.n_positions, u.shape)  # noqa: E731
        return {
            n: jax.vjp(lambda x: minimality.psi(penalty, x, shape), u)[1](self.like(spread(slopes[n], u), u))[0]
            for n, u in upper.items()
        }

    def ascend(self, name: str, source: Tree, grads: Tree, given: Given, ascent: int | None = None) -> Tree:
        """Ascent number ``ascent`` of this step, by default the final one (SPEC A2)."""
        cfg = self.persistent[name]
        bits = self.rounding(name, given, cfg.num_warmup_steps if ascent is None else ascent)
        return adversary.ascend(cfg, source, grads, given.step, self.schedule_steps, bits)

    def rounding(self, name: str, given: Given, ascent: int) -> adversary.Bits | None:
        """This device's draws of one ascent, by term, step, ascent, site and global example (SPEC P1, R1, R2)."""
        cfg, (B, T) = self.persistent[name], given.tokens.shape
        if cfg.dtype != "uint16":
            return None
        window = mk.Window(self.ax.index(DATA_AXES) * B, B, T)
        key = key_of(self.model.seed, f"sources/{name}", given.step, ascent)
        draw = lambda what: mk.stored_bits(self.ax, self.model.table, window, fold(key, what), cfg.shape)  # noqa: E731
        return adversary.Bits(draw("raw"), draw("moments"))

    def judged(self, name: str, value: Array, sources: Tree) -> Array:
        """The term's value, NaN where moments of its uint16 sources are not finite: an integer cannot carry a NaN to a
        forward that would show it (SPEC T7)."""
        if name not in sources or self.persistent[name].dtype != "uint16":
            return value
        moments = [x for m in adversary.moment_names(self.persistent[name]) for x in jax.tree.leaves(sources[name][m])]
        bad = [self.ax.varying(jnp.any(~jnp.isfinite(x)).astype(jnp.int32), AXES) for x in moments]
        return jnp.where(self.ax.psum(sum(bad, jnp.int32(0)), AXES) > 0, jnp.nan, value) if bad else value

    def add_faithfulness(self, masters: Tree, target: Tree, grads: Tree, step: Array) -> tuple[Values, Tree]:
        if self.loss.faithfulness is None:
            return {}, grads
        coeff = self.at_step(self.loss.faithfulness.coeff, step)
        value, added = self.faithfulness(masters, target, grads["components"], coeff)
        return {"faithfulness": value}, {**grads, "components": added}

    def faithfulness(self, masters: Tree, target: Tree, grads: Tree, coeff: Array) -> tuple[Array, Tree]:
        cfg = self.loss.faithfulness
        assert cfg is not None
        dims = self.dims.decomposition["components"]
        return faithfulness(self.ax, self.model.table, masters, dims, target["sites"], cfg.normalize, grads, coeff)

    # ------------------------------------------------------------ clean forward and importances
    def clean(self, given: Given, j: Any) -> Clean:
        size = self.window_size(given.tokens)
        own = given.tokens if self.microbatches == 1 else jax.lax.dynamic_slice_in_dim(given.tokens, j * size, size)
        captures = self.ci_fn.captures | objective.hidden_captures(self.loss)
        return self.model.llama.clean(given.target, self.model.target_dims, own, captures)

    def importances(self, copies: Tree, clean: Clean) -> tuple[Tree, Callable[..., Any]]:
        """(pre-activations by lane, pullback to (CI parameters, components)) (SPEC C3)."""

        def run(params: Tree, components: Tree) -> Tree:
            return self.ci_fn(params, self.model.copy_dims["ci_fn"], clean.captures, components)

        return jax.vjp(run, copies["ci_fn"], copies["components"])

    def sums(self, clean: Clean, a: Tree, step: Array) -> Sums:
        n, wanted = self.model.n_positions, objective.hidden_captures(self.loss)
        rates = {}
        if self.loss.minimality is not None:
            _, upper = squash(a)
            rates = minimality.rates(self.ax, self.loss.minimality.penalty, upper, self.penalty_shape(step), n)
        l0 = self.l0(a, 0.0)
        captured = {k: x for k, x in clean.captures.items() if k.partition("/")[0] in wanted}
        return Sums(rates, l0, reconstruction.capture_norms(self.ax, captured))

    def l0(self, ci: dict[str, Array], threshold: float) -> dict[str, Array]:
        """Mean number of components with CI above ``threshold`` per position of the global batch, by lane.

        Of pre-activations it is the same: clipping to [0, 1] takes none across a threshold below 1.
        """
        alive = {k: jnp.sum(x.astype(self.wide) > threshold, axis=(1, 2, 3), dtype=jnp.int32) for k, x in ci.items()}
        n = self.model.n_positions
        return {k: self.ax.psum(x, (*DATA_AXES, "tp")).astype(self.wide) / n for k, x in alive.items()}

    def context(self, clean: Clean, sums: Sums, given: Given, j: Any) -> objective.Context:
        size = self.window_size(given.tokens)
        example0 = self.ax.index(DATA_AXES) * given.tokens.shape[0] + j * size
        window = mk.Window(example0, size, given.tokens.shape[1])
        return objective.Context(given.target, given.head, clean, sums.norms, window, given.step)

    # ------------------------------------------------------------ windows of the device's examples (SPEC T8)
    def over_windows(self, fn: Callable[[Any], tuple[Tree, Tree]]) -> tuple[Tree, Tree]:
        """(sum, stack) over windows of what ``fn(j)`` returns; with one window simply ``fn(0)``."""
        if self.microbatches == 1:
            return fn(0)

        def body(total: Tree, j: Array) -> tuple[Tree, Tree]:
            summed, stacked = fn(j)
            return jax.tree.map(jnp.add, total, summed), stacked

        zeros = jax.tree.map(self.ax.zeros_like, jax.eval_shape(lambda: fn(jnp.int32(0))[0]))
        return jax.lax.scan(body, zeros, jnp.arange(self.microbatches, dtype=jnp.int32))

    def at(self, seen: Seen, j: Any) -> Seen:
        return seen if self.microbatches == 1 else jax.tree.map(lambda x: x[j], seen)

    def own(self, cfg: PersistentSource, raw: Tree, j: Any) -> Tree:
        """The window's part of sources with a batch axis; shared sources whole."""
        if self.microbatches == 1 or "b" not in cfg.shape:
            return raw
        size = jax.tree.leaves(raw)[0].shape[1] // self.microbatches
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, j * size, size, 1), raw)

    def by_shape(self, cfg: PersistentSource, grads: Tree) -> tuple[Tree, Tree]:
        """(to be summed, to be stacked): gradients of shared sources add up, per-example ones lie side by side."""
        if "b" in cfg.shape:
            return (), grads
        return jax.tree.map(lambda g: g.astype(wide(g.dtype)), grads), ()

    def merge(self, cfg: PersistentSource, shared: Tree, own: Tree) -> Tree:
        if "b" not in cfg.shape:
            return shared
        if self.microbatches == 1:
            return own
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]), own)

    def window_size(self, tokens: Array) -> int:
        return tokens.shape[0] // self.microbatches

    # ------------------------------------------------------------ guard and metrics
    @cached_property
    def value_names(self) -> tuple[str, ...]:
        """Losses in the order their finiteness is judged; after them the gradient of each optimizer group (SPEC T7)."""
        own = [n for n in ("faithfulness", "minimality", "frequency") if getattr(self.loss, n) is not None]
        return (*own, *self.terms)

    @cached_property
    def term_names(self) -> tuple[str, ...]:
        """What ``guard/bad_term`` counts through."""
        return (*self.value_names, *(f"gradient of {g}" for g in self.groups.cfg))

    def first_bad(self, values: Values, logs: Values) -> Int[Array, ""]:
        """Index in ``term_names`` of the first that is not finite, -1 if all are."""
        judged = [values[n] for n in self.value_names] + [logs[f"grad_norm/{g}"] for g in self.groups.cfg]
        bad: Bool[Array, " n"] = ~jnp.isfinite(jnp.stack(judged))
        return jnp.where(jnp.any(bad), jnp.argmax(bad).astype(jnp.int32), -1)

    def count_skipped(self, guard: Tree, skipped: Bool[Array, ""]) -> Tree:
        one = skipped.astype(jnp.int32)
        return {"in_a_row": (guard["in_a_row"] + 1) * one, "total": guard["total"] + one}

    def metrics(self, values: Values, logs: Values, l0: Tree, guard: Tree, bad: Array, step: Array) -> Values:
        """Flat scalars in two levels; learning rates and coefficients are those applied in this step."""
        coefficients = {n: self.at_step(self.coefficient_of(n), step) for n in self.value_names}
        weighted = {n: coefficients[n] * values[n] for n in self.value_names}
        by_site = mk.by_site(self.model.table, l0)
        out = {f"loss/{n}": v for n, v in values.items()} | {f"weighted/{n}": v for n, v in weighted.items()}
        out |= {"loss/total": reduce(jnp.add, weighted.values())} | self.schedule_metrics(coefficients, step) | logs
        out |= {f"l0/{n}": v for n, v in by_site.items()}
        out |= {"l0/mean": reduce(jnp.add, by_site.values()) / len(by_site)}
        return out | {"guard/in_a_row": guard["in_a_row"], "guard/skipped_total": guard["total"], "guard/bad_term": bad}

    def schedule_metrics(self, coefficients: Values, step: Array) -> Values:
        out = {f"schedule/coeff_{n}": c for n, c in coefficients.items()}
        if self.loss.minimality is not None:
            kind = "gamma" if self.loss.minimality.penalty.kind == "smooth_l0" else "p"
            out[f"schedule/{kind}"] = self.penalty_shape(step)
        return out | {f"schedule/source_lr_{n}": self.at_step(c.optim.lr, step) for n, c in self.persistent.items()}

    # ------------------------------------------------------------ static facts
    @property
    def ax(self) -> Axes:
        return self.model.ax

    @property
    def loss(self) -> Loss:
        return self.model.loss

    @property
    def microbatches(self) -> int:
        return self.cfg.data.microbatches

    @cached_property
    def terms(self) -> dict[str, Recon]:
        return {n: t for n, t in self.loss.recon.items() if t is not None}

    @cached_property
    def persistent(self) -> dict[str, PersistentSource]:
        return {n: p for n, t in self.terms.items() if (p := adversary.persistent_of(t)) is not None}

    @cached_property
    def dims(self) -> State:
        return State(*(pl.tree_dims(x, self.ax.sizes) for x in self.leaves))

    @property
    def wide(self) -> Any:
        return wide(self.compute_dtype)

    @property
    def schedule_steps(self) -> int:
        return schedule.span(self.cfg)

    def coefficient_of(self, name: str) -> Schedule:
        return self.terms[name].coeff if name in self.terms else getattr(self.loss, name).coeff

    def at_step(self, curve: Schedule, step: Array) -> Array:
        return schedule.value(curve, step, self.schedule_steps, self.wide)

    def penalty_shape(self, step: Array) -> Array:
        assert self.loss.minimality is not None
        return minimality.shape_value(self.loss.minimality.penalty, step, self.schedule_steps, self.wide)

    def like(self, x: Array, other: Array) -> Array:
        """``x`` typed as varying over the axes ``other`` varies over, as a cotangent must be."""
        return self.ax.varying(x, tuple(pl.varying_axes(other)))

    # ------------------------------------------------------------ compiled forms
    @cached_property
    def sharded(self) -> Callable[..., Any]:
        """``local`` as a function of global arrays."""
        state, target = (pl.tree_specs(x, self.ax.sizes) for x in (self.leaves, self.target_leaves))
        values = {n: pl.spec(()) for n in self.value_names}
        l0 = {n: pl.spec(()) for n in self.model.table.lanes}
        out = (state.decomposition, state.progress["sources"], state.progress["frequency"], values, l0)
        return jax.shard_map(self.local, mesh=self.mesh, in_specs=(state, target, self.batch_spec), out_specs=out)

    def put_batch(self, tokens: np.ndarray) -> Array:
        """The global batch on the devices: every process has all of its tokens and places its own devices' examples."""
        return jax.make_array_from_process_local_data(NamedSharding(self.mesh, self.batch_spec), tokens, tokens.shape)

    @property
    def batch_spec(self) -> Any:
        return pl.spec((self.ax.live(DATA_AXES), ()))

    @cached_property
    def compiled(self) -> Callable[..., tuple[State, Values]]:
        """The jitted step; the state is donated and comes back in its placement."""
        return jax.jit(self.__call__, donate_argnums=0, out_shardings=(pl.tree_shardings(self.mesh, self.leaves), None))

    @cached_property
    def warmup(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """(components, Adam state, target, n) -> components and Adam state after n AdamW updates on faithfulness alone,
        and its value; beside it, components -> the Adam state they start from (SPEC T6)."""
        specs = pl.tree_specs(self.leaves.decomposition["components"], self.ax.sizes)
        target_specs = pl.tree_specs(self.target_leaves, self.ax.sizes)

        def alone(masters: Tree, target: Tree) -> tuple[Array, Tree]:
            zeros = jax.tree.map(self.ax.zeros_like, masters)
            return self.faithfulness(masters, target, zeros, jnp.ones((), self.wide))

        grad = jax.shard_map(alone, mesh=self.mesh, in_specs=(specs, target_specs), out_specs=(pl.spec(()), specs))
        cfg = self.loss.faithfulness
        assert cfg is not None
        group = AdamW(match=("components",), lr=cfg.warmup.lr)
        leaves = optim.flatten({"components": self.leaves.decomposition["components"]}, pl.is_leaf)
        table = optim.GroupTable({"warmup": group}, dict.fromkeys(leaves, "warmup"), leaves)

        def run(components: Tree, moments: Tree, target: Tree, n: int) -> tuple[Tree, Tree, Array]:
            def one(carry: Any, _: None) -> tuple[Any, Array]:
                params, moments = carry
                value, grads = grad(params, target)
                named = lambda x: optim.flatten({"components": x})  # noqa: E731
                new, moments, _logs = optim.update(table, self.mesh, named(grads), named(params), moments, 0, 1)
                return (optim.unflatten({"components": params}, new)["components"], moments), value

            (components, moments), values = jax.lax.scan(one, (components, moments), None, length=n)
            return components, moments, values[-1]

        components = self.leaves.decomposition["components"]
        self_init = lambda params: optim.init(table, optim.flatten({"components": params}))  # noqa: E731
        shardings = pl.tree_shardings(self.mesh, (components, optim.state_leaves(table), SCALAR))
        return jax.jit(run, static_argnums=3, donate_argnums=(0, 1), out_shardings=shardings), jax.jit(
            self_init, out_shardings=shardings[1]
        )
