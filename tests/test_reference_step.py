"""The product's whole training step in float64 against the numpy reference's (SPEC 7), two steps in a row.

What the product draws is read back through its own draw functions and injected, so that both sides see the same masks:
every loss to 1e-6, gradients by central differences along 8 random directions to 1e-4, and the adversaries, averages
and optimizers on those gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import losses as ref_losses
from reference import masks as ref_masks
from reference import optim as ref_optim
from reference import step as ref
from reference import tree
from reference.objective import Adversary, Draw, Model, Settings, Term
from reference_bridge import (
    BATCH,
    LENGTH,
    VOCAB,
    ci_tree,
    close,
    factors_of,
    quick_jit,
    read_source,
    reference_shape,
    sites_of,
    sources_of,
    target_params,
    tiny_shape,
    weights_of,
)

from decomp import masks, state
from decomp.build import build_step, site_table
from decomp.ci_fn.chunk_transformer import RMS_EPS, ChunkTransformer
from decomp.config import schema
from decomp.keys import key_of
from decomp.loss import adversary, objective
from decomp.mesh import AXES
from decomp.sites import SiteTable
from decomp.step import Step

NS_EPS = 1e-8
SHAPE = tiny_shape(n_layers=2, tied=False, rope_theta=10000.0)


@pytest.fixture(autouse=True)
def _fp64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def _decay(top: float, last: float, interp: str = "linear") -> dict[str, Any]:
    return {"max": top, "knots": [{"at": 0.0, "frac": 1.0}, {"at": 1.0, "frac": last, "interp": interp}]}


def _config(loss: dict[str, Any], optim: dict[str, Any], microbatches: int = 1) -> schema.RunConfig:
    return schema.RunConfig.model_validate(
        {
            "experiment": "reference",
            "seed": 3,
            "steps": 5,
            "target": {"kind": "llama", "path": "none: weights are injected"},
            "sites": {"layers": [0, 1], "kinds": ["q_proj", "down_proj"], "C": {"q_proj": 5, "down_proj": 4}},
            "ci_fn": {"kind": "chunk_transformer", "d_model": 8, "n_blocks": 1, "n_heads": 2, "d_mlp": 12},
            "loss": loss,
            "optim": optim,
            "data": {"batch_size": BATCH, "seq_len": LENGTH, "microbatches": microbatches},
            "precision": {"kind": "fp64"},
        }
        | {name: {} for name in ("mesh", "placement", "eval", "checkpoint", "logger")}
        | {"launcher": {"kind": "local"}}
    )


EVERYTHING = _config(
    {
        "faithfulness": {"coeff": _decay(3.0, 0.5), "warmup": {"steps": 3, "lr": 0.002}},
        "minimality": {"coeff": 0.02, "penalty": {"kind": "smooth_l0", "gamma": _decay(0.8, 0.1, "log")}},
        "frequency": {"coeff": 0.01, "ema_halflife_steps": 3.0},
        "recon": {
            "stochastic": {
                "coeff": 0.5, "draws": 2, "source": {"kind": "uniform"}, "routing": {"kind": "uniform_k"},
                "hidden": {"coeff": 0.3, "captures": ["residual", "site_outputs"]},
            },
            "persistent": {
                "coeff": _decay(1.0, 2.0),
                "source": {"kind": "persistent", "shape": "sc", "num_warmup_steps": 2, "optim": {"kind": "adam"}},
            },
            "mixed": {
                "coeff": 0.7,
                "routing": {"kind": "probability", "p": 0.6},
                "source": {
                    "kind": "mixed", "adv_fraction": 0.5,
                    "persistent": {
                        "shape": "c", "num_warmup_steps": 1, "parametrize": "sigmoid",
                        "optim": {"kind": "sign", "lr": _decay(0.2, 0.1)},
                    },
                },
            },
            "pgd": {
                "coeff": 0.4, "source": {"kind": "fresh_pgd", "steps": 2, "step_size": 0.15, "shape": "c"},
                "routing": {"kind": "uniform_k"},
            },
            "ci_as_mask": {"coeff": 0.2, "source": {"kind": "constant", "value": 0.0}},
        },
    },
    {
        "attention": {
            "kind": "adamw", "match": "components.*.q_proj", "lr": _decay(0.01, 0.1), "weight_decay": 0.1, "clip": 0.3,
        },
        "mlp": {"kind": "muon", "match": "components.*.down_proj", "lr": 0.02, "ns_dtype": "float64"},
        "ci": {
            "kind": "muon", "match": "ci_fn", "lr": 0.01, "adam_lr": 0.002, "consistent_rms": False, "clip": 0.2,
            "ns_dtype": "float64",
        },
    },
)  # fmt: skip

# what a sum per microbatch would get wrong: frequency's log, shared sources, both adversaries, L7's norms
SHARED = _config(
    {
        "faithfulness": None,
        "minimality": {"coeff": 0.02, "penalty": {"kind": "lp", "p": 0.7, "eps": 0.01}},
        "frequency": {"coeff": 0.01, "reference_count": 40.0},
        "recon": {
            "persistent": {
                "coeff": 1.0, "hidden": {"coeff": 0.3, "captures": ["block_inputs"]},
                "source": {"kind": "persistent", "shape": "c", "num_warmup_steps": 1},
            },
            "by_example": {"coeff": 0.6, "source": {"kind": "persistent", "shape": "bc", "num_warmup_steps": 1}},
            "pgd": {"coeff": 0.5, "source": {"kind": "fresh_pgd", "steps": 2, "shape": "bc"}},
        },
        "delta": False,
    },
    {"all": {"kind": "adamw", "match": ["components", "ci_fn"], "lr": 0.01}},
    microbatches=2,
)  # fmt: skip


class Run:
    """One configuration on both sides."""

    def __init__(self, cfg: schema.RunConfig) -> None:
        self.cfg, self.table = cfg, site_table(cfg, SHAPE)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), AXES)
        self.training: Step = build_step(cfg, mesh, SHAPE, self.table, jnp.float64)
        self.weights = weights_of(SHAPE)
        self.target = target_params(SHAPE, self.table, self.weights)
        t = self.training
        self.state = state.init(mesh, self.table, t.ci_fn, t.groups, cfg, t.leaves, jnp.float64)
        assert isinstance(cfg.ci_fn, schema.ChunkTransformer)
        taps = {f"from{i}": (f"resid.{i}",) for i in range(SHAPE.n_layers)}
        self.model = Model(reference_shape(SHAPE), self.weights, taps, cfg.ci_fn.n_heads, RMS_EPS)
        self.compiled = quick_jit(self.gradient_and_step)

    def gradient_and_step(self, s: state.State, tokens: jax.Array) -> Any:
        """The whole step, and the gradient it is made from; traced once."""
        found = self.training.sharded(s, self.target, tokens)
        with mock.patch.dict(self.training.__dict__, {"sharded": lambda *_: found}):
            return found[0], self.training(s, self.target, tokens)

    def params(self, decomposition: Any) -> tree.Tree:
        """Decomposition, or its gradient, in the reference's tree."""
        fn: Any = self.training.ci_fn
        assert isinstance(fn, ChunkTransformer)
        factors = factors_of(self.table, decomposition["components"])
        return {"components": factors, "ci": ci_tree(fn, decomposition["ci_fn"])}

    def at(self, curve: Any, step: int) -> float:
        plain = curve.model_dump() if isinstance(curve, schema.Curve) else curve
        return ref_optim.schedule(plain, step, self.cfg.steps)

    # ------------------------------------------------------------ the reference's inputs at one step
    def settings(self, step: int) -> Settings:
        loss = self.cfg.loss
        assert loss.minimality is not None and loss.frequency is not None
        faith = loss.faithfulness
        return Settings(
            terms={name: self.term(name, step) for name in loss.recon},
            psi=self.psi(loss.minimality.penalty, step),
            faithfulness=None if faith is None else self.at(faith.coeff, step),
            normalize="site" if faith is None else faith.normalize,
            minimality=self.at(loss.minimality.coeff, step),
            frequency=self.at(loss.frequency.coeff, step),
            count=loss.frequency.reference_count or BATCH * LENGTH,
            halflife=loss.frequency.ema_halflife_steps,
        )

    def psi(self, penalty: Any, step: int) -> Any:
        if isinstance(penalty, schema.SmoothL0):
            gamma = self.at(penalty.gamma, step)
            return lambda x: ref_losses.smooth_l0(x, gamma)
        p = self.at(penalty.p, step)
        return lambda x: ref_losses.lp(x, p, penalty.eps)

    def term(self, name: str, step: int) -> Term:
        cfg = self.cfg.loss.recon[name]
        assert cfg is not None
        draws = tuple(self.draw(name, cfg, step, i) for i in range(cfg.draws))
        hidden = None
        if cfg.hidden is not None:
            hidden = cfg.hidden.coeff, tuple(n for c in cfg.hidden.captures for n in _capture_names(self.table, c))
        return Term(self.at(cfg.coeff, step), draws, self.adversary(cfg, step), hidden)

    def adversary(self, term: schema.Recon, step: int) -> Adversary | None:
        if isinstance(term.source, schema.FreshPgdSource):
            return Adversary("fresh_pgd", term.source.shape, term.source.steps, term.source.step_size, {})
        source = adversary.persistent_of(term)
        if source is None:
            return None
        lr = self.at(source.optim.lr, step)
        optim = source.optim.model_dump()
        return Adversary("persistent", source.shape, source.num_warmup_steps, lr, optim, source.parametrize)

    def draw(self, name: str, term: schema.Recon, step: int, index: int) -> Draw:
        """What the product draws, read back."""
        routes, source, adversarial = self.drawn(jnp.int32(step), self.state.progress["sources"])[name][index]
        if isinstance(term.source, schema.PersistentSource):
            source = None
        elif isinstance(term.source, schema.ConstantSource):
            shapes = {s.name: np.zeros((BATCH, LENGTH, s.C)) for s in self.table.sites}
            source = ref_masks.constant(shapes, term.source.value)
        else:
            source = self.kept(source)
        routes = None if routes is None else sites_of(self.table, routes)
        return Draw(source, routes, None if adversarial is None else np.asarray(adversarial))

    @cached_property
    def drawn(self) -> Callable[..., Any]:
        """(step, persistent sources) -> per term and draw (routes, sources, adversarial examples)."""

        def draws(step: Any, sources: Any) -> Any:
            return {
                name: [
                    self._drawn(name, term, step, i, sources.get(name, {}).get("raw", {})) for i in range(term.draws)
                ]
                for name, term in self.cfg.loss.recon.items()
                if term is not None
            }

        return quick_jit(draws)

    def _drawn(self, name: str, term: schema.Recon, step: Any, index: int, raw: Any) -> tuple[Any, Any, Any]:
        nothing: Any = None
        ctx = objective.Context(nothing, nothing, nothing, {}, masks.Window(0, BATCH, LENGTH), step)
        key = key_of(self.cfg.seed, f"recon/{name}", step, index)
        routes = objective.draw_routes(self.training.model, term, ctx, key)
        with mock.patch.object(adversary, "fresh_pgd", lambda values, *_: values):  # where its ascents start
            ci = {"dtype": jnp.zeros(())}
            source = objective.prepare_source(self.training.model, term, ctx, {}, ci, key, routes)(raw)
        if isinstance(source, masks.Stored):
            return routes, _by_site(self.table, source.values), None
        if isinstance(source, masks.Mixed):
            return routes, read_source(self.table, source.fresh), source.adversarial
        return routes, read_source(self.table, source), None

    def kept(self, sources: Any) -> Any:
        """Sources in float64, without the delta channel where the run has no delta component."""
        parts = ("component", "delta") if self.cfg.loss.delta else ("component",)
        return {site: {p: np.asarray(own[p], np.float64) for p in parts} for site, own in sources.items()}

    def groups(self, step: int) -> dict[str, ref.Group]:
        return {name: self.group(cfg, step) for name, cfg in self.cfg.optim.items()}

    def group(self, cfg: Any, step: int) -> ref.Group:
        def owns(path: str) -> bool:
            top, _, rest = path.partition("/")
            name = f"components.{rest.rpartition('/')[0]}" if top == "components" else "ci_fn"
            return any(fnmatchcase(name, pattern) or name.startswith(pattern) for pattern in cfg.match)

        if isinstance(cfg, schema.AdamW):
            options: dict[str, Any] = {"betas": cfg.betas, "eps": cfg.eps, "weight_decay": cfg.weight_decay}
            return ref.Group(owns, "adamw", self.at(cfg.lr, step), cfg.clip, options)
        options = {n: getattr(cfg, n) for n in ("momentum", "nesterov", "ns_steps", "consistent_rms", "weight_decay")}
        options["eps"] = NS_EPS
        return ref.Group(owns, "muon", self.at(cfg.lr, step), cfg.clip, options, self.at(cfg.adam_lr, step))

    def initial(self) -> ref.State:
        raw = {n: self.kept(sources_of(self.table, s["raw"])) for n, s in self.state.progress["sources"].items()}
        zeros = {s.name: np.zeros(s.C) for s in self.table.sites}
        return ref.init_state(self.params(self.state.decomposition), self.groups(0), raw, zeros)


def _by_site(table: SiteTable, values: Any) -> dict[str, dict[str, jax.Array]]:
    parts = {"component": "c", "delta": "delta"}
    return {s.name: {p: values[s.group][ours][s.slot] for p, ours in parts.items()} for s in table.sites}


def _capture_names(table: SiteTable, capture: str) -> list[str]:
    """The reference's names of a capture, from the first chosen layer on (F7)."""
    layers = range(table.masked_runs[0].start, table.n_layers)
    return {
        "residual": [f"resid.{i}" for i in [*layers, table.n_layers]],
        "block_inputs": [f"{kind}.{i}" for kind in ("attn_in", "mlp_in") for i in layers],
        "site_inputs": [f"{s.name}.in" for s in table.sites],
        "site_outputs": [f"{s.name}.out" for s in table.sites],
    }[capture]


def _check_gradient(loss: Any, params: tree.Tree, gradient: tree.Tree) -> None:
    """Components and CI function apart, so that neither hides the other (SPEC 12: 8 directions, 1e-4)."""
    for part in params:
        for direction in tree.directions(params[part], 8):
            expected = tree.directional_derivative(
                lambda p, part=part: loss({**params, part: p}), params[part], direction
            )
            got = tree.dot(gradient[part], direction)
            assert got == pytest.approx(expected, rel=1e-4), f"{part}: {got} along a direction where it is {expected}"


def _checked(gradient: tree.Tree, loss: Any, params: tree.Tree) -> tree.Tree:
    """The product's gradient, once it has passed."""
    _check_gradient(loss, params, gradient)
    return gradient


def _compare(got: tree.Tree, expected: tree.Tree, rel: float = 1e-6) -> None:
    expected_leaves = dict(tree.leaves(expected))
    got_leaves = dict(tree.leaves(got))
    assert set(got_leaves) == set(expected_leaves)
    for path, leaf in expected_leaves.items():
        close(got_leaves[path], leaf, rel)


@pytest.mark.parametrize(
    "cfg",
    [
        pytest.param(EVERYTHING, id="everything"),
        pytest.param(SHARED, id="shared_over_microbatches", marks=pytest.mark.slow),
    ],
)
def test_two_steps(cfg: schema.RunConfig) -> None:
    run, rng = Run(cfg), np.random.default_rng(0)
    here, theirs = run.state, run.initial()
    for step in range(2):
        tokens = rng.integers(0, VOCAB, (BATCH, LENGTH))
        grads, (here, metrics) = run.compiled(here, jnp.asarray(tokens))
        gradient = run.params(grads)

        theirs, values = ref.step(
            run.model, run.settings(step), run.groups(step), theirs, tokens, partial(_checked, gradient)
        )
        for name, value in values.items():
            close(metrics[f"loss/{name}"], value)
        for name, group in run.groups(step).items():
            close(metrics[f"lr/{name}"], group.lr)
        for name, raw in theirs.sources.items():
            ours = run.kept(sources_of(run.table, here.progress["sources"][name]["raw"]))
            _compare(ours, raw, 1e-5)
        if cfg.loss.frequency is not None and cfg.loss.frequency.ema_halflife_steps is not None:
            _compare(sites_of(run.table, here.progress["frequency"]["mean"]), theirs.average)
        _compare(run.params(here.decomposition), theirs.params)
        assert int(here.progress["step"]) == theirs.step
    _check_guard(run, here, jnp.asarray(tokens))


def _check_guard(run: Run, here: state.State, tokens: jax.Array) -> None:
    """T7: with one parameter not a number everything stays as it was, but the step goes on and it is counted."""
    first = next(iter(run.table.groups))
    broken = jax.tree.map(lambda x: x, here)
    factors = broken.decomposition["components"][first]
    factors["V"] = factors["V"].at[0, 0, 0].set(jnp.nan)
    _, (after, metrics) = run.compiled(broken, tokens)
    untouched = ("optim", "sources", "frequency")
    jax.tree.map(
        np.testing.assert_array_equal,
        (after.decomposition, {k: after.progress[k] for k in untouched}),
        (broken.decomposition, {k: broken.progress[k] for k in untouched}),
    )
    assert int(after.progress["step"]) == int(here.progress["step"]) + 1
    assert int(metrics["guard/in_a_row"]) == int(metrics["guard/skipped_total"]) == 1
    assert int(metrics["guard/bad_term"]) >= 0


def test_faithfulness_warmup() -> None:
    """T6: three AdamW updates on L1 alone, in two calls; gradients of the reference entry by entry."""
    run = Run(EVERYTHING)
    W = {s.name: run.weights[f"{s.name}.weight"] for s in run.table.sites}
    warmup: Any = run.training.warmup
    update, init = warmup
    components = run.state.decomposition["components"]
    params = factors_of(run.table, components)
    moments = tree.zip_map(ref_optim.zero_moments, params)
    ours = init(components)
    for n in (2, 1):
        components, ours, value = update(components, ours, run.target, n)
        for _ in range(n):
            before = ref_losses.faithfulness(W, params, "site")
            grads = tree.full_gradient(lambda p: ref_losses.faithfulness(W, p, "site"), params)
            pairs = tree.zip_map(lambda p, g, m: ref_optim.adamw(p, g, m, 2e-3), params, grads, moments)
            params, moments = (tree.zip_map(lambda pair, i=i: pair[i], pairs) for i in (0, 1))
        close(value, before)
        _compare(factors_of(run.table, components), params)
