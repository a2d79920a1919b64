"""Losses and adversary, each against numpy or by hand (SPEC 5, 6). tests/reference compares whole terms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jaxprs import equations, shapes

from decomp import masks as mk
from decomp.ci_fn.base import squash
from decomp.config.schema import AdamSource, Curve, Frequency, Knot, Lp, PersistentSource, SignSource, SmoothL0
from decomp.keys import bits_block, key_of, to_uniform
from decomp.loss import adversary, minimality, objective
from decomp.loss.faithfulness import faithfulness
from decomp.loss.reconstruction import kl_sum
from decomp.sites import Matrix, from_sites
from decomp.state import ONE_DEVICE
from decomp.step import Given

RNG = np.random.default_rng(0)


# ---------------------------------------------------------------- L1
MATRICES = [Matrix("a0", "a", 0, 6, 5), Matrix("b0", "b", 0, 4, 9), Matrix("a1", "a", 1, 6, 5)]


@pytest.mark.parametrize("normalize", ["site", "numel"])
def test_faithfulness(normalize: Any):
    """L1 on two stacks: each site over its own norm, or all squares over all weights."""
    table = from_sites(MATRICES, {"a0": 3, "b0": 2, "a1": 3})
    V, U, W = ({n: RNG.normal(size=s).astype(np.float32) for n, s in sizes.items()} for sizes in (
        {"a0": (6, 3), "b0": (4, 2), "a1": (6, 3)}, {"a0": (3, 5), "b0": (2, 9), "a1": (3, 5)},
        {m.name: (m.d_in, m.d_out) for m in MATRICES}))  # fmt: skip
    W["b0"] *= 7.0  # sites of unequal norm, where the two normalisations part
    stack = lambda x: {g.name: np.stack([x[s.name] for s in g.sites]) for g in table.groups.values()}  # noqa: E731
    v, u = stack(V), stack(U)
    masters = {g: {"V": jnp.asarray(v[g]), "U": jnp.asarray(u[g])} for g in table.groups}
    dims = {g: {"V": ((), (), ()), "U": ((), (), ())} for g in table.groups}
    frozen = jax.tree.map(jnp.asarray, stack(W))
    wide = {n: (W[n].astype(np.float64), V[n].astype(np.float64) @ U[n]) for n in W}
    errors = {n: np.sum((w - p) ** 2) for n, (w, p) in wide.items()}
    expected = sum(errors.values()) / sum(w.size for w in W.values())
    if normalize == "site":
        expected = np.mean([errors[n] / np.sum(w**2) for n, (w, _) in wide.items()])
    zeros = jax.tree.map(jnp.zeros_like, masters)
    got, _ = faithfulness(ONE_DEVICE, table, masters, dims, frozen, normalize, zeros, jnp.float32(1))
    assert float(got) == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------- L2, L3
UPPER = {"q": jnp.asarray(RNG.uniform(0, 1.1, size=(2, 4, 3, 5)), jnp.float32)}


@pytest.mark.parametrize(
    ("penalty", "by_hand"),
    [
        (SmoothL0(gamma=0.3), lambda x: x**2 / (x**2 + 0.09)),
        (Lp(p=0.7, eps=0.01), lambda x: (x + 0.01) ** 0.7),
    ],
    ids=["smooth_l0", "lp"],
)
def test_minimality(penalty: Any, by_hand: Any):
    """L2: mean of psi over all positions, summed over sites and components."""
    value = minimality.shape_value(penalty, 0, 10, jnp.float32)
    rates = minimality.rates(ONE_DEVICE, penalty, UPPER, value, 12)
    expected = by_hand(np.asarray(UPPER["q"], np.float64)).mean(axis=(1, 2))
    np.testing.assert_allclose(rates["q"], expected, rtol=1e-5)
    assert float(minimality.total(ONE_DEVICE, rates)) == pytest.approx(expected.sum(), rel=1e-5)


def test_gamma_follows_its_schedule():
    """L2: gamma falls from 1.0 to 0.01 by default."""
    gamma = [float(minimality.shape_value(SmoothL0(), step, 101, jnp.float32)) for step in (0, 50, 100)]
    assert gamma == pytest.approx([1.0, 0.1, 0.01], rel=1e-5)


def test_frequency_takes_the_log_of_the_global_mean():
    """L4, case 12: shards add up to f before the log; the mean of their own penalties is another number."""
    penalty, cfg = SmoothL0(gamma=0.5), Frequency(coeff=1.0)
    gamma = jnp.float32(0.5)
    rates = lambda upper: minimality.rates(ONE_DEVICE, penalty, upper, gamma, 12)["q"]  # noqa: E731
    whole = rates(UPPER)
    shards = [rates({"q": UPPER["q"][:, i : i + 2]}) for i in (0, 2)]
    np.testing.assert_allclose(shards[0] + shards[1], whole, rtol=1e-6)
    phi = lambda f: np.asarray(minimality.frequency(cfg, f, 12)[0])  # noqa: E731
    f = np.asarray(whole, np.float64)
    np.testing.assert_allclose(phi(whole), f * np.log2(1 + 12 * f), rtol=1e-5)
    assert np.abs(phi(shards[0] * 2) / 2 + phi(shards[1] * 2) / 2 - phi(whole)).max() > 1e-3


def test_frequency_slope_is_its_derivative():
    """L3: Phi'(f), with a reference count of its own."""
    cfg, f = Frequency(coeff=1.0, reference_count=40.0), jnp.linspace(0.0, 1.0, 7)
    value, slope = minimality.frequency(cfg, f, 12)
    np.testing.assert_allclose(slope, jax.vmap(jax.grad(lambda x: minimality.frequency(cfg, x, 12)[0]))(f), rtol=1e-5)
    assert float(value[-1]) == pytest.approx(np.log2(41))


def test_frequency_average():
    """L3: decay 2^(-1/h), debiased, this step included; without a half-life f itself."""
    cfg = Frequency(coeff=1.0, ema_halflife_steps=2.0)
    mean, count = {"q": jnp.zeros((1, 2))}, jnp.int32(0)
    fs, d = [np.array([[0.2, 0.8]]), np.array([[0.6, 0.4]]), np.array([[1.0, 0.0]])], 2.0**-0.5
    for n, f in enumerate(fs, start=1):
        mean, f_hat, count = minimality.average(cfg, mean, count, {"q": jnp.asarray(f, jnp.float32)})
        weights = np.array([d ** (n - i) for i in range(1, n + 1)])
        expected = sum(w * x for w, x in zip(weights, fs, strict=False)) / weights.sum()
        np.testing.assert_allclose(f_hat["q"], expected, rtol=1e-5)
        assert int(count) == n
    _, f_hat, count = minimality.average(Frequency(coeff=1.0), mean, count, {"q": jnp.ones((1, 2))})
    assert (float(f_hat["q"].min()), int(count)) == (1.0, 3)


# ---------------------------------------------------------------- L8
N, D, VOCAB = 10, 6, 23
CLEAN = jnp.asarray(RNG.normal(size=(N, D)), jnp.float32)
MASKED = CLEAN + jnp.asarray(0.5 * RNG.normal(size=(N, D)), jnp.float32)
HEAD = jnp.asarray(RNG.normal(size=(D, VOCAB)), jnp.float32)


def mean_kl(masked: jax.Array, chunk: int) -> Any:
    total: Any = kl_sum(CLEAN, masked, HEAD, chunk)
    return total / N


def plain_kl(masked: jax.Array) -> jax.Array:
    log_p, log_q = (jax.nn.log_softmax(x @ HEAD) for x in (CLEAN, masked))
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q))


@pytest.mark.parametrize("chunk", [1, 4, 5, 10, 64])
def test_chunked_kl_equals_the_plain_one(chunk: int):
    """L8: to 1e-6 nats a position, its gradient too, a ragged last chunk included."""
    value, grad = jax.jit(jax.value_and_grad(lambda m: mean_kl(m, chunk)))(MASKED)
    expected, expected_grad = jax.value_and_grad(lambda m: plain_kl(m) / N)(MASKED)
    assert abs(float(value - expected)) < 1e-6
    np.testing.assert_allclose(grad, expected_grad, atol=1e-6)
    assert abs(float(mean_kl(MASKED, chunk) - expected)) < 1e-6
    assert float(kl_sum(CLEAN, CLEAN, HEAD, chunk)) == 0.0


def test_chunked_kl_never_holds_all_logits():
    """L8: forward and backward see a chunk of positions by vocabulary, never all of them."""
    found = equations(jax.grad(lambda m: kl_sum(CLEAN, m, HEAD, 4)), MASKED)
    by_vocab = {s for e in found for s in shapes(e) if VOCAB in s and D not in s}
    assert by_vocab and max(np.prod(s) for s in by_vocab) == 4 * VOCAB


# ---------------------------------------------------------------- the adversary (SPEC 6)
RAW = {"g": {"c": jnp.asarray([0.02, 0.5, 0.98]), "delta": jnp.asarray([0.5])}}
GRADS = {"g": {"c": jnp.asarray([-3.0, 2.0, 4.0]), "delta": jnp.asarray([0.0])}}


def start(cfg: PersistentSource) -> dict[str, Any]:
    zeros: dict[str, Any] = {m: jax.tree.map(jnp.zeros_like, RAW) for m in adversary.moment_names(cfg)}
    return {"raw": RAW, **zeros, **({"count": jnp.int32(0)} if zeros else {})}


def raw_c(state: dict[str, Any]) -> np.ndarray:
    return np.asarray(state["raw"]["g"]["c"])


def test_sign_ascent_is_clipped():
    """A1: up along the gradient's sign, back into [0, 1]."""
    cfg = PersistentSource(optim=SignSource(lr=0.1))
    after = adversary.ascend(cfg, start(cfg), GRADS, 0, 10)
    np.testing.assert_allclose(raw_c(after), [0.0, 0.6, 1.0], rtol=1e-6)
    assert float(after["raw"]["g"]["delta"][0]) == 0.5  # the sign of 0 is 0


def test_sigmoid_sources_are_not_clipped():
    """A1: the raw value runs free, the effective one is its sigmoid."""
    cfg = PersistentSource(optim=SignSource(lr=2.0), parametrize="sigmoid")
    raw = raw_c(adversary.ascend(cfg, start(cfg), GRADS, 0, 10))
    np.testing.assert_allclose(raw, [-1.98, 2.5, 2.98], rtol=1e-6)
    effective = adversary.effective(cfg, {"g": {"c": jnp.asarray(raw)}})["g"]["c"]
    np.testing.assert_allclose(effective, 1 / (1 + np.exp(-raw)), rtol=1e-6)


def test_adam_ascent_by_hand():
    """SPEC 6: betas (0.5, 0.99), debiased, eps outside the square root; two ascents on gradients g and -2 g."""
    cfg = PersistentSource(optim=AdamSource(lr=0.01))
    state = adversary.ascend(cfg, start(cfg), GRADS, 0, 10)
    state = adversary.ascend(cfg, state, jax.tree.map(lambda g: -2 * g, GRADS), 0, 10)
    g = np.array([-3.0, 2.0, 4.0])
    m, v = (0.5 * 0.5 * g - 0.5 * 2 * g) / 0.75, (0.99 * 0.01 * g**2 + 0.01 * 4 * g**2) / (1 - 0.99**2)
    first = np.clip(raw_c(start(cfg)) + 0.01 * np.sign(g), 0, 1)
    np.testing.assert_allclose(raw_c(state), np.clip(first + 0.01 * m / (np.sqrt(v) + 1e-8), 0, 1), rtol=1e-5)
    assert int(state["count"]) == 2


def test_source_learning_rate_follows_the_training_step():
    """A4: every ascent of a step has that step's rate; the next training step has the next."""
    curve = Curve(max=0.2, knots=(Knot(at=0, frac=1.0), Knot(at=1, frac=0.0)))
    cfg = PersistentSource(optim=SignSource(lr=curve))
    state, moved = start(cfg), []
    for step in (0, 0, 1, 2):
        after = adversary.ascend(cfg, state, {"g": {**GRADS["g"], "c": jnp.asarray([0.0, -1.0, 0.0])}}, step, 3)
        moved.append(float(raw_c(state)[1] - raw_c(after)[1]))
        state = after
    assert moved == pytest.approx([0.2, 0.2, 0.1, 0.0], abs=1e-6)


# ---------------------------------------------------------------- sources in 16 bits (SPEC P1)
def ascents(cfg: PersistentSource, gradient: Any, start: jax.Array, n: int) -> dict[str, Any]:
    """State after ``n`` ascents of independent sources on ``gradient(x, i)``, rounding by draws of their own."""
    fixed = cfg.dtype == "uint16"
    raw = {"g": {"c": jnp.round(start * 65535).astype(jnp.uint16) if fixed else start}}
    zeros = {"g": {"c": jnp.zeros(start.shape, adversary.moment_dtype(cfg, jnp.float32))}}
    state = {"raw": raw, "m": zeros, "v": zeros, "count": jnp.int32(0)}

    def one(state: Any, i: jax.Array) -> Any:
        draws = bits_block(key_of(7, i), 0, (1, 2, start.size), start.size)[0]
        bits = adversary.Bits(*({"g": {"c": b}} for b in draws))
        x = floats(state)
        return adversary.ascend(cfg, state, {"g": {"c": gradient(x, i)}}, 0, 10, bits), None

    return jax.jit(lambda s: jax.lax.scan(one, s, jnp.arange(n)))(state)[0]


def floats(state: dict[str, Any]) -> jax.Array:
    x = state["raw"]["g"]["c"]
    return x.astype(jnp.float32) / 65535 if x.dtype == jnp.uint16 else x


def test_ascents_in_16_bits_are_statistically_those_in_float32():
    """P1's choice for the moments: 300 Adam ascents on noisy gradients, the same noise for both.

    Every source seeks a goal of its own, a quarter of them outside [0, 1]. The two trajectories part by rounding alone:
    by no more than 3% of what the noise moves a source, without bias, and with moments right on average.
    """
    n, updates = 8192, 300
    goal = to_uniform(bits_block(key_of(1, "goal"), 0, (1, 1, n), n)[0, 0]) * 1.5 - 0.25

    def gradient(x: jax.Array, i: jax.Array) -> jax.Array:
        u = to_uniform(bits_block(key_of(2, i), 0, (1, 1, n), n)[0, 0])
        return (goal - x + 3 * (u - 0.5)) * jnp.float32(1e-6)  # as small as those of a large batch's mean

    start = jnp.full(n, 0.5)
    ends = [ascents(PersistentSource(dtype=d), gradient, start, updates) for d in ("float32", "uint16")]
    x, y = (np.asarray(floats(e), np.float64) for e in ends)
    inside = (np.asarray(goal) > 0.2) & (np.asarray(goal) < 0.8)
    spread = np.std((x - np.asarray(goal))[inside])
    off = y - x
    assert spread > 0.02  # what the noise does
    assert np.std(off) < 0.03 * spread
    assert abs(off.mean()) < 5 * np.std(off) / np.sqrt(n)
    for name in ("m", "v"):
        a, b = (np.asarray(e[name]["g"]["c"]).astype(np.float64) for e in ends)
        # one rounding of v is off by 2^-8 of it at most (standard deviation), and decays by 0.99 an update
        assert np.std(b - a) < 2**-8 / np.sqrt(1 - 0.99**2) * np.sqrt(np.mean(a**2)), name
        assert abs((b - a).mean()) < 5 * np.std(b - a) / np.sqrt(n), name
    np.testing.assert_allclose(ends[0]["count"], ends[1]["count"])


def test_a_second_moment_in_bfloat16_needs_its_draws():
    """On |g| = 1, v = 1 - 0.99^n. Rounded to nearest it stays where 0.01 (1 - v) is half a spacing, at 0.8; by draws it
    gets there on average."""
    n, updates = 4096, 400
    state = ascents(PersistentSource(dtype="uint16"), lambda x, i: jnp.ones_like(x), jnp.zeros(n), updates)
    v = np.asarray(state["v"]["g"]["c"]).astype(np.float64)
    # one rounding is at most half of 2^-8 from the mean (standard deviation), and decays by 0.99 an update
    bound = 2**-9 / np.sqrt(1 - 0.99**2)
    assert np.std(v) < bound
    assert abs(v.mean() - (1 - 0.99**updates)) < 5 * bound / np.sqrt(n)
    nearest = jnp.bfloat16(0)
    for _ in range(updates):
        nearest = (0.99 * nearest.astype(jnp.float32) + 0.01).astype(jnp.bfloat16)
    assert float(nearest) < 0.85


@pytest.mark.parametrize("step_size", [0.3, 5.0])
def test_fresh_pgd_stays_in_the_box_and_climbs(step_size: float):
    """M2: n sign steps, clipped to [0, 1] each time."""
    goal = {"g": {"c": jnp.asarray([-1.0, 0.3, 2.0])}}
    gradient = lambda x: jax.tree.map(lambda v, g: g - v, x, goal)  # noqa: E731
    start = {"g": {"c": jnp.asarray([0.5, 0.9, 0.5])}}
    found = np.asarray(adversary.fresh_pgd(start, gradient, 3, step_size)["g"]["c"])
    assert (found[0], found[2]) == (0.0, 1.0)
    assert found.min() >= 0.0 and found.max() <= 1.0
    one = np.asarray(adversary.fresh_pgd(start, gradient, 1, step_size)["g"]["c"])
    expected = np.clip(np.array([0.5, 0.9, 0.5]) + step_size * np.array([-1, -1, 1]), 0, 1)
    np.testing.assert_allclose(one, expected, rtol=1e-6)


# ---------------------------------------------------------------- per_site (M4)
def test_per_site_is_the_mean_of_one_forward_for_each_site():
    """M4: value and gradients of the layerwise term, against a forward by hand with one site's components alone."""
    term = {"coeff": 1.0, "source": {"kind": "constant"}, "routing": {"kind": "per_site"}}
    sites = {"layers": [1, 2], "kinds": ["q_proj", "down_proj"], "C": {"q_proj": 8, "down_proj": 24}}
    step, target = tiny.make(tiny.config(loss__recon={"layer": term}, sites=sites))
    state, model, tokens = tiny.init(step), step.model, tiny.batch(step, 0)
    cfg = step.loss.recon["layer"]
    assert cfg is not None

    @jax.jit
    def both(decomposition: Any, target: Any, tokens: Any) -> Any:
        given = Given(target, model.llama.head(target, model.target_dims), tokens, jnp.int32(0))
        copies = step.gather_in(decomposition)
        clean = step.clean(given, 0)
        a, _ = step.importances(copies, clean)
        ctx = objective.Context(target, given.head, clean, {}, mk.Window(0, *tokens.shape), jnp.int32(0))
        found = objective.gradients(model, "layer", cfg, ctx, copies["components"], a, {})
        m, rest = squash(a)[0], mk.by_site(model.table, a)

        def alone(components: Any, name: str) -> Any:
            routes = {n: jnp.full(x.shape[:2], n == name) for n, x in rest.items()}
            masks = mk.GivenMasks(m, None, mk.by_lane(model.table, routes))
            return objective.masked(model, ctx, components, masks)[0]

        by_hand = [jax.value_and_grad(alone)(copies["components"], s.name) for s in model.table.sites]
        return (found[0], found[1][0]), by_hand

    (value, grads), by_hand = both(state.decomposition, target, tokens)
    assert len(by_hand) == 4 and len({float(v) for v, _ in by_hand}) == 4
    assert float(value) == pytest.approx(np.mean([float(v) for v, _ in by_hand]), rel=1e-5)
    mean = jax.tree.map(lambda *g: sum(g) / len(g), *(g for _, g in by_hand))
    jax.tree.map(lambda g, m: np.testing.assert_allclose(g, m, rtol=1e-4, atol=1e-6), grads, mean)
