"""Every loss of the product in float64 against the numpy reference, masks injected: values to 1e-6, gradients by
central differences along 8 random directions to 1e-4 (SPEC 5 and 12)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import ci as ref_ci
from reference import llama as ref
from reference import losses as ref_losses
from reference import masks as ref_masks
from reference import optim as ref_optim
from reference import tree
from reference.objective import Adversary, Draw, Model, Term, bundle_sources, recon, term_value
from reference.objective import clean_forward as ref_clean
from reference.step import fresh_pgd as ref_fresh_pgd
from reference_bridge import (
    BATCH,
    LENGTH,
    ONE_DEVICE,
    VOCAB,
    chosen_table,
    close,
    component_dims,
    factors_of,
    lanes,
    quick_jit,
    random_factors,
    reference_shape,
    sites_of,
    source_values,
    sources_of,
    stacks,
    target_params,
    tiny_shape,
    weights_of,
)

from decomp import masks
from decomp.ci_fn.base import squash
from decomp.config import schema
from decomp.loss import adversary, minimality, reconstruction
from decomp.loss.faithfulness import faithfulness
from decomp.placement import tree_dims
from decomp.target import llama

N_POSITIONS = BATCH * LENGTH


@pytest.fixture(autouse=True)
def _fp64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def check_gradient(loss: Callable[[tree.Tree], float], params: tree.Tree, gradient: tree.Tree, seed: int = 0) -> None:
    """``gradient`` against central differences of ``loss`` along 8 random directions, 1e-4 relative (SPEC 12)."""
    for direction in tree.directions(params, 8, seed):
        expected = tree.directional_derivative(loss, params, direction)
        got = tree.dot(gradient, direction)
        assert got == pytest.approx(expected, rel=1e-4), f"{got} along a direction where it is {expected}"


class Case:
    """A two-layer target, four sites, random factors and CI, on both sides."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        self.shape = tiny_shape(n_layers=2, tied=False)
        self.table = chosen_table(self.shape, "odd")
        self.weights = weights_of(self.shape)
        self.tokens = rng.integers(0, VOCAB, (BATCH, LENGTH))
        self.factors = random_factors(self.table, rng)
        self.ci = {s.name: rng.uniform(0.05, 0.95, (BATCH, LENGTH, s.C)) for s in self.table.sites}
        self.routes = {s.name: rng.random((BATCH, LENGTH)) < 0.6 for s in self.table.sites}
        self.model = llama.Llama(self.shape, self.table, ONE_DEVICE)
        self.params = target_params(self.shape, self.table, self.weights)
        self.dims = tree_dims(llama.leaves(self.shape, self.table, "replicated"), ONE_DEVICE.sizes)
        self.stacks, self.ci_lanes = stacks(self.table, self.factors), lanes(self.table, self.ci)

    @cached_property
    def reference(self) -> Model:
        return Model(reference_shape(self.shape), self.weights, {}, 1, 1e-6)

    @cached_property
    def clean(self) -> Any:
        return ref_clean(self.reference, self.tokens)

    def draw(self, letters: str, seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
        """Random sources by site in M3's shape."""
        rng = np.random.default_rng([seed, 17])
        lead = [n for n, letter in ((BATCH, "b"), (LENGTH, "s")) if letter in letters]
        return {s.name: {"component": rng.random((*lead, s.C)), "delta": rng.random(lead)} for s in self.table.sites}

    def recon(self, factors: Any, ci: Any, source: Any, routes: Any, delta: bool = True, captures: Any = ()) -> Any:
        """The product's KL and, with ``captures``, hidden distance of one masked forward; clean from the reference."""
        given = masks.CiMasks(ci, source, routes, delta)
        start = jnp.asarray(self.clean.captures[f"resid.{self.table.masked_runs[0].start}"])
        hidden, found = self.model.masked(
            self.params, self.dims, factors, component_dims(self.table), given, start, frozenset(captures)
        )
        head = jnp.asarray(self.weights["lm_head.weight"])
        kl = reconstruction.mean_kl(ONE_DEVICE, jnp.asarray(self.clean_hidden), hidden, head, 4, N_POSITIONS)
        if not captures:
            return kl
        clean = self.model.clean(self.params, self.dims, jnp.asarray(self.tokens), frozenset(captures)).captures
        norms = reconstruction.capture_norms(ONE_DEVICE, clean)
        return kl, reconstruction.hidden_distance(ONE_DEVICE, clean, found, norms)

    @cached_property
    def clean_hidden(self) -> np.ndarray:
        return ref.Forward(reference_shape(self.shape), self.weights).hidden(self.tokens)


@cache
def the_case() -> Case:
    return Case()


# ---------------------------------------------------------------- L1
@pytest.mark.parametrize("normalize", ["site", "numel"])
def test_faithfulness(normalize: Any) -> None:
    case = the_case()
    W = {s.name: case.weights[f"{s.name}.weight"] for s in case.table.sites}

    def product(components: Any, grads: Any) -> Any:
        frozen, dims = case.params["sites"], component_dims(case.table)
        return faithfulness(ONE_DEVICE, case.table, components, dims, frozen, normalize, grads, jnp.float64(2.5))

    # the gradient is added, times the coefficient, to what is there: here to the components themselves
    value, added = quick_jit(product)(case.stacks, case.stacks)
    gradient = jax.tree.map(lambda x, before: (x - before) / 2.5, added, case.stacks)
    close(value, ref_losses.faithfulness(W, case.factors, normalize))
    check_gradient(lambda f: ref_losses.faithfulness(W, f, normalize), case.factors, factors_of(case.table, gradient))


# ---------------------------------------------------------------- L2, L3
PENALTIES = {
    "smooth_l0": (schema.SmoothL0(), 0.3, lambda x: ref_losses.smooth_l0(x, 0.3)),
    "lp": (schema.Lp(eps=1e-3), 0.7, lambda x: ref_losses.lp(x, 0.7, 1e-3)),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_minimality(name: str) -> None:
    """L2 on upper, above 1 included; C2's slope is in the gradient."""
    case, (penalty, value, psi) = the_case(), PENALTIES[name]
    rng = np.random.default_rng(6)
    a = {n: rng.uniform(0.05, 1.9, x.shape) for n, x in case.ci.items()}

    def product(a: Any) -> Any:
        f = minimality.rates(ONE_DEVICE, penalty, squash(a)[1], jnp.asarray(value), N_POSITIONS)
        return minimality.total(ONE_DEVICE, f), f

    (total, f), gradient = quick_jit(jax.value_and_grad(product, has_aux=True))(lanes(case.table, a))

    def expected(a: tree.Tree) -> dict[str, np.ndarray]:
        return ref_losses.frequencies({n: ref_ci.upper(x) for n, x in a.items()}, psi)

    close(total, ref_losses.minimality(expected(a)))
    for site, array in sites_of(case.table, f).items():
        close(array, expected(a)[site])
    check_gradient(lambda a: ref_losses.minimality(expected(a)), a, sites_of(case.table, gradient))


@pytest.mark.parametrize("halflife", [None, 3.0])
@pytest.mark.parametrize("reference_count", [None, 77.0])
def test_frequency(halflife: float | None, reference_count: float | None) -> None:
    """L3: value at f_hat, slope at f_hat, three steps of the average, a' defaulting to B T."""
    case = the_case()
    cfg = schema.Frequency(coeff=1.0, reference_count=reference_count, ema_halflife_steps=halflife)
    rng = np.random.default_rng(7)
    zeros = {s.name: np.zeros(s.C) for s in case.table.sites}
    raw, mean, count = zeros, lanes(case.table, zeros), jnp.zeros((), jnp.int32)
    average = quick_jit(lambda *x: minimality.average(cfg, *x))
    for update in range(3):
        f = {n: rng.random(z.shape) for n, z in zeros.items()}
        mean, f_hat, count = average(mean, count, lanes(case.table, f))
        raw, expected = (zeros, f) if halflife is None else ref_losses.ema(raw, update, f, halflife)
        phi = {n: minimality.frequency(cfg, x, N_POSITIONS) for n, x in f_hat.items()}
        close(minimality.total(ONE_DEVICE, {n: v for n, (v, _) in phi.items()}),
              ref_losses.phi(expected, reference_count or N_POSITIONS))  # fmt: skip
        slope = ref_losses.phi_slope(expected, reference_count or N_POSITIONS)
        for site, got in sites_of(case.table, {n: s for n, (_, s) in phi.items()}).items():
            close(got, slope[site])
        for site, got in sites_of(case.table, mean).items():
            close(got, raw[site])


# ---------------------------------------------------------------- L5, L8
@pytest.mark.parametrize("chunk", [3, 5, 64])
def test_kl(chunk: int) -> None:
    """L8: in chunks that divide the positions, that do not, and in one; its own backward in the masked hidden state."""
    rng = np.random.default_rng(8)
    clean, masked = rng.standard_normal((2, BATCH, LENGTH, 16))
    head = rng.standard_normal((16, VOCAB))

    def product(masked: Any) -> Any:
        return reconstruction.mean_kl(ONE_DEVICE, jnp.asarray(clean), masked, jnp.asarray(head), chunk, N_POSITIONS)

    value, gradient = quick_jit(jax.value_and_grad(product))(jnp.asarray(masked))
    close(value, ref_losses.kl(clean @ head, masked @ head))
    check_gradient(lambda p: ref_losses.kl(clean @ head, p["x"] @ head), {"x": masked}, {"x": np.asarray(gradient)})


# ---------------------------------------------------------------- recon terms: every source, routing, L7
def _stored(case: Case, sources: Any, letters: str) -> masks.Stored:
    return masks.Stored(source_values(case.table, sources), letters)


@pytest.mark.parametrize(
    ("letters", "routed", "delta"),
    [("bsc", True, True), ("c", False, True), ("sc", True, False)],
)
def test_recon_of_stored_sources(letters: str, routed: bool, delta: bool) -> None:
    """M1, M3, L5: value, and gradients in V, U, CI and the sources themselves (A2's final ascent)."""
    case, routes = the_case(), None
    raw = case.draw(letters)
    routes = case.routes if routed else None

    def product(factors: Any, ci: Any, values: Any) -> Any:
        lane_routes = None if routes is None else lanes(case.table, routes)
        return case.recon(factors, ci, masks.Stored(values, letters), lane_routes, delta)

    at = (case.stacks, case.ci_lanes, source_values(case.table, raw))
    value, grads = quick_jit(jax.value_and_grad(product, argnums=(0, 1, 2)))(*at)

    bundle = Adversary("persistent", letters, 0, 0.0, {})

    def expected(p: tree.Tree) -> float:
        sources: Any = bundle_sources(p["sources"], bundle)
        if not delta:
            sources = {site: {"component": parts["component"]} for site, parts in sources.items()}
        return recon(case.reference, case.clean, p["components"], p["ci"], sources, routes)

    params = {"components": case.factors, "ci": case.ci, "sources": raw}
    close(value, expected(params))
    gradient = {
        "components": factors_of(case.table, grads[0]),
        "ci": sites_of(case.table, grads[1]),
        "sources": sources_of(case.table, grads[2]),
    }
    for part in params:  # each alone: one of them must not drown another
        check_gradient(lambda p, part=part: expected({**params, part: p}), params[part], gradient[part])


@pytest.mark.parametrize("constant", [0.0, 0.3])
def test_recon_of_a_constant_source(constant: float) -> None:
    """M2: no delta path."""
    case = the_case()
    product = quick_jit(lambda factors, ci: case.recon(factors, ci, masks.Constant(constant), None))
    value = product(case.stacks, case.ci_lanes)
    sources = ref_masks.constant(case.ci, constant)
    close(value, recon(case.reference, case.clean, case.factors, case.ci, sources, None))


@pytest.mark.parametrize("routed", [True, False])
def test_recon_of_a_mixed_source(routed: bool) -> None:
    """M2: example 1 takes the bundle and every route; both kinds of source injected."""
    case = the_case()
    bundle, fresh, adversarial = case.draw("bc", 1), case.draw("bsc", 2), np.array([False, True])
    routes = case.routes if routed else None

    def product(factors: Any, ci: Any, values: Any) -> Any:
        injected: Any = _stored(case, fresh, "bsc")
        source = masks.Mixed(masks.Stored(values, "bc"), injected, jnp.asarray(adversarial))
        return case.recon(factors, ci, source, None if routes is None else lanes(case.table, routes))

    value = quick_jit(product)(case.stacks, case.ci_lanes, source_values(case.table, bundle))
    term = Term(1.0, (Draw(fresh, routes, adversarial),), Adversary("persistent", "bc", 0, 0.0, {}))
    close(value, term_value(case.reference, case.clean, case.factors, case.ci, term, [bundle]))


@pytest.mark.parametrize("captures", [("residual", "block_inputs"), ("site_inputs", "site_outputs")])
def test_hidden_activation(captures: tuple[str, ...]) -> None:
    """L7: the mean runs over the single activations that the masked forward has (F7), squares over the whole batch."""
    case = the_case()
    sources = case.draw("bsc")
    first, last = case.table.masked_runs[0].start, case.shape.n_layers
    layers = range(first, last)
    by_capture = {
        "residual": [f"resid.{i}" for i in [*layers, last]],
        "block_inputs": [f"{kind}.{i}" for kind in ("attn_in", "mlp_in") for i in layers],
        "site_inputs": [f"{s.name}.in" for s in case.table.sites],
        "site_outputs": [f"{s.name}.out" for s in case.table.sites],
    }
    names = [name for capture in captures for name in by_capture[capture]]

    def product(factors: Any) -> Any:
        return case.recon(factors, case.ci_lanes, _stored(case, sources, "bsc"), None, captures=captures)[1]

    value, gradient = quick_jit(jax.value_and_grad(product))(case.stacks)

    def expected(factors: tree.Tree) -> float:
        masked = ref_masks.masked_sites(factors, case.ci, sources, None)
        forward = ref.Forward(reference_shape(case.shape), case.weights, masked)
        forward.logits(case.tokens)
        return ref_losses.hidden(case.clean.captures, forward.captures, names)

    close(value, expected(case.factors))
    check_gradient(expected, case.factors, factors_of(case.table, gradient))


# ---------------------------------------------------------------- the adversary (SPEC 6)
@pytest.mark.parametrize("parametrize", ["clip", "sigmoid"])
@pytest.mark.parametrize("kind", ["adam", "sign"])
def test_source_ascents(kind: str, parametrize: Any) -> None:
    """A1, A2, A4: four ascents, the learning rate of one training step (7 of 20 on a curve) for all of them."""
    case, rng = the_case(), np.random.default_rng(9)
    curve = {"max": 0.2, "knots": [{"at": 0.0, "frac": 1.0}, {"at": 1.0, "frac": 0.1, "interp": "cosine"}]}
    optim = {"kind": kind} | ({"betas": (0.5, 0.99), "eps": 1e-8} if kind == "adam" else {})
    cfg = schema.PersistentSource.model_validate(
        {"shape": "sc", "parametrize": parametrize, "optim": optim | {"lr": curve}}
    )
    raw = case.draw("sc")
    state: dict[str, Any] = {"raw": source_values(case.table, raw)}
    if kind == "adam":
        zeros = jax.tree.map(jnp.zeros_like, state["raw"])
        state |= {"m": zeros, "v": zeros, "count": jnp.zeros((), jnp.int32)}
    moments = tree.zip_map(ref_optim.zero_moments, raw)
    lr = ref_optim.schedule(curve, 7, 20)
    ascend = quick_jit(lambda state, grads: adversary.ascend(cfg, state, grads, 7, 20))
    for _ in range(4):
        grads = tree.zip_map(lambda leaf: rng.standard_normal(leaf.shape), raw)
        state = ascend(state, source_values(case.table, grads))
        raw, moments = ref_optim.source_ascent(raw, grads, moments, lr, optim, parametrize)
    effective = ref_masks.effective(raw, parametrize)
    for site, parts in sources_of(case.table, adversary.effective(cfg, state["raw"])).items():
        for name, got in parts.items():
            close(got, effective[site][name])
    for site, parts in sources_of(case.table, state["raw"]).items():
        for name, got in parts.items():
            close(got, raw[site][name])


@pytest.mark.parametrize("kind", ["adam", "sign"])
def test_source_ascents_in_16_bits(kind: str) -> None:
    """P1: four ascents of the reference with its sources and moments rounded after each, by the same draws."""
    case, rng = the_case(), np.random.default_rng(10)
    optim = {"kind": kind} | ({"betas": (0.5, 0.99), "eps": 1e-8} if kind == "adam" else {})
    cfg = schema.PersistentSource.model_validate({"shape": "sc", "dtype": "uint16", "optim": optim | {"lr": 0.07}})
    codes: Any = tree.zip_map(lambda x: rng.integers(0, 65536, x.shape), case.draw("sc"))
    state: dict[str, Any] = {"raw": jax.tree.map(lambda u: u.astype(jnp.uint16), source_values(case.table, codes))}
    if kind == "adam":
        zeros = jax.tree.map(lambda u: jnp.zeros(u.shape, jnp.bfloat16), state["raw"])
        state |= {"m": zeros, "v": zeros, "count": jnp.zeros((), jnp.int32)}
    moments = tree.zip_map(lambda u: ref_optim.zero_moments(u * 1.0), codes)
    ascend = quick_jit(lambda state, grads, bits: adversary.ascend(cfg, state, grads, 7, 20, bits))

    def rounded(m: Any, bits: np.ndarray) -> Any:
        """m by the lower half of the bits, v by the upper, from what float32 holds of them."""
        halves = ((bits & 0xFFFF) / 65536, (bits >> 16) / 65536)
        new = [ref_optim.round_bfloat16(np.float32(x).astype(float), r) for x, r in zip(m[:2], halves, strict=True)]
        return m._replace(**dict(zip(m._fields[:2], new, strict=True)))

    for _ in range(4):
        grads = tree.zip_map(lambda leaf: rng.standard_normal(leaf.shape), codes)
        bits = [tree.zip_map(lambda u: rng.integers(0, 1 << 32, u.shape, np.uint32), codes) for _ in range(2)]
        drawn = adversary.Bits(*(source_values(case.table, b) for b in bits))
        state = ascend(state, source_values(case.table, grads), drawn)
        raw = tree.zip_map(lambda u: u / 65535.0, codes)
        raw, moments = ref_optim.source_ascent(raw, grads, moments, 0.07, optim, "clip")
        codes = tree.zip_map(lambda x, b: ref_optim.round_fixed(x, (b >> 8) / 2.0**24), raw, bits[0])
        if kind == "adam":
            moments = tree.zip_map(rounded, moments, bits[1])
    got = {"raw": sources_of(case.table, state["raw"])}
    expected = {"raw": codes}
    if kind == "adam":
        for name, i in (("m", 0), ("v", 1)):
            got[name] = sources_of(case.table, state[name])
            expected[name] = tree.zip_map(lambda m, i=i: m[i], moments)
    for name, sites in expected.items():
        tree.zip_map(lambda a, b: np.testing.assert_array_equal(a.astype(float), b), got[name], sites)


def test_fresh_pgd() -> None:
    """M2, M5: three sign ascents under one routing, gradients of the product against full central differences."""
    case = the_case()
    start = case.draw("c")
    routes = lanes(case.table, case.routes)
    factors, ci = case.stacks, case.ci_lanes
    gradient = jax.grad(lambda values: case.recon(factors, ci, masks.Stored(values, "c"), routes))
    values = quick_jit(lambda v: adversary.fresh_pgd(v, gradient, 3, 0.1))(source_values(case.table, start))
    term = Term(1.0, (Draw(start, case.routes),), Adversary("fresh_pgd", "c", 3, 0.1, {"kind": "sign"}))
    expected = ref_fresh_pgd(case.reference, case.clean, case.factors, case.ci, term, 0)
    for site, parts in sources_of(case.table, values).items():
        for name, got in parts.items():
            np.testing.assert_allclose(got, expected[site][name], atol=1e-12)
