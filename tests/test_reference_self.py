"""The numpy reference against identities, so that what the JAX code is compared with is itself checked."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from reference import ci, llama, losses, masks, optim, tree
from reference.objective import (
    Adversary,
    Draw,
    Model,
    Settings,
    Term,
    clean_forward,
    pre_activations,
    surrogate,
    values,
)
from reference.step import Group, init_state, step

STORIES = Path(__file__).resolve().parents[2] / "shared/models/stories260K"
SHAPE = llama.Shape(
    n_layers=2, d_model=8, n_heads=4, n_kv_heads=2, head_dim=4, d_mlp=12, vocab=11, tied=False, rms_eps=1e-6
)
LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def _components(rng: np.random.Generator, names: list[str], C: int) -> dict[str, dict[str, np.ndarray]]:
    dims = llama.matrices(SHAPE)
    return {
        n: {"V": rng.standard_normal((dims[n][0], C)) / 3, "U": rng.standard_normal((C, dims[n][1])) / 2} for n in names
    }


def _tokens(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, SHAPE.vocab, (2, 4))


# ---------------------------------------------------------------- forward
@pytest.mark.parametrize("gated", [True, False])
def test_masks_of_one_give_the_clean_forward(gated: bool) -> None:
    """SPEC 2: with m = d = 1 a site is exactly x W, whatever V and U are."""
    rng = np.random.default_rng(0)
    shape = llama.Shape(2, 8, 4, 2, 4, 12, 11, rms_eps=1e-6, act="silu" if gated else "gelu", gated=gated)
    weights = llama.random_weights(shape, rng, biases=("q_proj", "down_proj"))
    masked = {}
    for name, (d_in, d_out) in llama.matrices(shape).items():
        V, U = rng.standard_normal((d_in, 5)), rng.standard_normal((5, d_out))
        masked[name] = llama.Masked(V, U, np.ones((2, 4, 5)), np.ones((2, 4)), rng.random((2, 4)) < 0.5)
    tokens = _tokens(rng)
    clean = llama.Forward(shape, weights).logits(tokens)
    np.testing.assert_allclose(llama.Forward(shape, weights, masked).logits(tokens), clean, rtol=1e-9, atol=1e-9)


def test_site_equals_the_two_term_form() -> None:
    """SPEC 2: where(r, ((xV) * (m - d)) U + d (xW), xW)."""
    rng = np.random.default_rng(1)
    x, W = rng.standard_normal((2, 3, 4)), rng.standard_normal((4, 6))
    V, U, m = rng.standard_normal((4, 5)), rng.standard_normal((5, 6)), rng.random((2, 3, 5))
    d, r = rng.random((2, 3)), rng.random((2, 3)) < 0.5
    expected = np.where(r[..., None], ((x @ V) * (m - d[..., None])) @ U + d[..., None] * (x @ W), x @ W)
    np.testing.assert_allclose(llama.site_output(x, W, llama.Masked(V, U, m, d, r)), expected, rtol=1e-12)


def test_unknown_site_is_an_error() -> None:
    """F1."""
    weights = llama.random_weights(SHAPE, np.random.default_rng(0))
    with pytest.raises(ValueError, match="unknown"):
        llama.Forward(SHAPE, weights, {"model.layers.9.mlp.up_proj": llama.Masked(*[np.zeros((1, 1))] * 3)})


def test_causal_attention_does_not_see_the_future_and_bidirectional_does() -> None:
    rng = np.random.default_rng(2)
    q, k, v = rng.standard_normal((3, 1, 4, 2, 4))
    later = v.copy()
    later[:, 3] += 1.0
    assert np.allclose(llama.attention(q, k, v, True)[:, :3], llama.attention(q, k, later, True)[:, :3])
    assert not np.allclose(llama.attention(q, k, v, False)[:, :3], llama.attention(q, k, later, False)[:, :3])


def test_rope_scores_depend_on_distance_only() -> None:
    rng = np.random.default_rng(3)
    q, k = np.broadcast_to(rng.standard_normal((2, 1, 1, 1, 8)), (2, 1, 6, 1, 8))
    f = llama.rope_frequencies(8, 100.0)
    scores = llama.rope(q, f)[0, :, 0] @ llama.rope(k, f)[0, :, 0].T
    for offset in range(-5, 6):
        diagonal = np.diagonal(scores, offset)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-12)


def test_llama31_scaling_keeps_short_and_divides_long_wavelengths() -> None:
    plain, scaled = llama.rope_frequencies(32, 10000.0), llama.rope_frequencies(32, 10000.0, LLAMA31)
    assert scaled[0] == plain[0]
    assert scaled[-1] == plain[-1] / 8.0
    assert np.any((scaled < plain) & (scaled > plain / 8.0))


@pytest.mark.skipif(not STORIES.exists(), reason="../shared/models/stories260K is not beside this checkout")
def test_stories260k_logits() -> None:
    """What transformers computes for a real trained Llama; rounding of expected.json's five decimals."""
    from safetensors.numpy import load_file

    config = json.loads((STORIES / "config.json").read_text())
    expected = json.loads((STORIES / "expected.json").read_text())
    stored = load_file(STORIES / "model.safetensors")
    weights = {n: (t.T if t.ndim == 2 and "embed" not in n else t).astype(np.float64) for n, t in stored.items()}
    shape = llama.Shape(5, 64, 8, 4, 8, 172, 512, rms_eps=config["rms_norm_eps"])
    logits = llama.Forward(shape, weights).logits(np.array([expected["greedy_ids"][:-1]]))[0]
    for position, first8 in expected["logits_first8_of_positions_0_4_31"].items():
        np.testing.assert_allclose(logits[int(position), :8], first8, atol=1e-4)
    assert np.argmax(logits, axis=-1)[4:].tolist() == expected["greedy_ids"][5:]


# ---------------------------------------------------------------- squashings
def test_lower_backward_table() -> None:
    """C1: g inside, 0.01 g below only where g < 0, 0 above; a = 0 is below, a = 1 inside."""
    a = np.array([-2.0, -2.0, 0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.5, 1.5])
    g = np.array([-3.0, 3.0, -3.0, 3.0, -3.0, 3.0, -3.0, 3.0, -3.0, 3.0])
    expected = [0.01, 0.0, 0.01, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert ci.lower_slope(a, g).tolist() == expected
    assert ci.lower(a).tolist() == [0.0] * 4 + [0.5] * 2 + [1.0] * 4


def test_upper_table() -> None:
    """C2: value and slope."""
    a = np.array([-1.0, 0.0, 0.25, 1.0, 3.0])
    np.testing.assert_allclose(ci.upper(a), [0.0, 0.0, 0.25, 1.0, 1.02], rtol=1e-15)
    assert ci.upper_slope(a).tolist() == [0.0, 0.0, 1.0, 1.0, 0.01]


def test_chunk_is_bidirectional_and_sees_positions() -> None:
    rng = np.random.default_rng(4)
    params = ci.random_chunk(rng, [8], 8, 12, 2, {"s": 3})
    tap = rng.standard_normal((1, 4, 8))
    changed = tap.copy()
    changed[:, 3] = -changed[:, 3]
    before, after = (ci.chunk(params, [x], 2, 1e-6)["s"] for x in (tap, changed))
    assert np.all(np.abs(before[:, 0] - after[:, 0]) > 0)
    backwards = ci.chunk(params, [tap[:, ::-1]], 2, 1e-6)["s"][:, ::-1]
    assert np.max(np.abs(before - backwards)) > 1e-3


# ---------------------------------------------------------------- losses and masks
def test_kl_of_equal_logits_is_zero_and_of_others_positive() -> None:
    rng = np.random.default_rng(5)
    p, q = rng.standard_normal((2, 2, 3, 7))
    assert abs(losses.kl(p, p + 3.0)) < 1e-15
    assert losses.kl(p, q) > 0.0
    assert losses.kl(np.log([[[0.5, 0.5]]]), np.log([[[0.25, 0.75]]])) == pytest.approx(0.5 * math.log(4.0 / 3.0))


def test_faithfulness_by_hand() -> None:
    """L1: zero when VU = W; 1 for VU = 0; numel divides by all weights."""
    weights = {"a": np.full((2, 3), 2.0), "b": np.ones((1, 1))}
    nothing = {n: {"V": np.zeros((w.shape[0], 1)), "U": np.zeros((1, w.shape[1]))} for n, w in weights.items()}
    exact = {n: {"V": w[:, :1], "U": np.ones((1, w.shape[1]))} for n, w in weights.items()}
    assert losses.faithfulness(weights, exact, "site") == 0.0
    assert losses.faithfulness(weights, nothing, "site") == 1.0
    assert losses.faithfulness(weights, nothing, "numel") == pytest.approx(25.0 / 7.0)


def test_frequency_slope_is_the_derivative_of_its_value() -> None:
    f = {"s": np.array([0.0, 0.01, 0.3, 1.0])}
    direction = {"s": np.array([1.0, -2.0, 0.5, 3.0])}
    numeric = tree.directional_derivative(lambda f: losses.phi(f, 40.0), f, direction, 1e-5)
    assert tree.dot(losses.phi_slope(f, 40.0), direction) == pytest.approx(numeric, rel=1e-8)


def test_ema_of_a_constant_is_that_constant_at_once() -> None:
    """L3: debiased, the present step included; a half-life later an old value counts half as much."""
    f = {"s": np.array([0.2, 0.7])}
    raw, f_hat = losses.ema({"s": np.zeros(2)}, 0, f, 5.0)
    np.testing.assert_allclose(f_hat["s"], f["s"], rtol=1e-14)
    for update in range(1, 6):
        raw, f_hat = losses.ema(raw, update, {"s": np.zeros(2)}, 5.0)
    np.testing.assert_allclose(raw["s"], 0.5 * (1.0 - 2.0 ** (-1 / 5)) * f["s"], rtol=1e-14)
    assert np.all(f_hat["s"] < f["s"])


def test_mixed_takes_the_bundle_and_every_route_for_chosen_examples() -> None:
    """M2."""
    adversarial = np.array([True, False])
    bundle = {"s": {"component": np.full((1, 1, 3), 0.9), "delta": np.full((1, 1), 0.8)}}
    fresh = {"s": {"component": np.zeros((2, 4, 3)), "delta": np.zeros((2, 4))}}
    sources, routes = masks.mixed(adversarial, bundle, fresh, {"s": np.zeros((2, 4), bool)})
    assert np.all(sources["s"]["component"][0] == 0.9) and np.all(sources["s"]["component"][1] == 0.0)
    assert np.all(sources["s"]["delta"][0] == 0.8)
    assert routes["s"].tolist() == [[True] * 4, [False] * 4]


@pytest.mark.parametrize(
    ("letters", "dims"), [("c", (1, 1, 3)), ("bc", (2, 1, 3)), ("sc", (1, 4, 3)), ("bsc", (2, 4, 3))]
)
def test_source_letters(letters: str, dims: tuple[int, ...]) -> None:
    """M3."""
    raw = np.zeros([n for n, letter in zip((2, 4, 3), "bsc", strict=True) if letter in letters])
    assert masks.expand(raw, letters).shape == dims


# ---------------------------------------------------------------- optimizers
@pytest.mark.parametrize("interp", ["linear", "cosine", "quarter_cosine", "log", "hold"])
def test_schedule_reaches_its_knots(interp: str) -> None:
    """T2: knots exactly, the last at the last step; in between, between."""
    knots = [{"at": 0.0, "frac": 1.0}, {"at": 0.5, "frac": 0.25, "interp": interp}, {"at": 1.0, "frac": 0.5}]
    curve = {"max": 8.0, "knots": knots}
    assert [optim.schedule(curve, s, 101) for s in (0, 50, 100)] == [8.0, 2.0, 4.0]
    middle = {"linear": 5.0, "cosine": 5.0, "quarter_cosine": 2 + 6 * math.sqrt(0.5), "log": 4.0, "hold": 8.0}[interp]
    assert optim.schedule(curve, 25, 101) == pytest.approx(middle)
    assert optim.schedule(curve, 0, 1) == 8.0


def test_newton_schulz_pulls_singular_values_to_one() -> None:
    rng = np.random.default_rng(6)
    for dims in ((6, 10), (10, 6)):
        left, _, right = np.linalg.svd(rng.standard_normal(dims), full_matrices=False)
        matrix = left @ np.diag(np.linspace(0.05, 1.0, 6)) @ right
        got = optim.newton_schulz(matrix)
        values = np.linalg.svd(got, compute_uv=False)
        assert np.all((values > 0.6) & (values < 1.25))
        np.testing.assert_allclose(left.T @ got @ right.T, np.diag(np.diag(left.T @ got @ right.T)), atol=1e-9)


def test_stacked_muon_is_muon_matrix_by_matrix() -> None:
    rng = np.random.default_rng(7)
    param, grad, mu = rng.standard_normal((3, 2, 4, 6))
    stacked, _ = optim.muon(param, grad, optim.Momentum(mu, 3), 0.1)
    alone = [optim.muon(param[i], grad[i], optim.Momentum(mu[i], 3), 0.1)[0] for i in range(2)]
    np.testing.assert_allclose(stacked, np.stack(alone), rtol=1e-12)


def test_muon_momentum_by_hand() -> None:
    """T5 with b = 1/2 on gradients 1 and 3: averages 1/2 and 7/4, corrected by 1 - b^t."""
    start = optim.zero_momentum(np.zeros(1))
    first, state = optim.muon_direction(np.ones(1), start, 0.5, True)
    second, state = optim.muon_direction(np.full(1, 3.0), state, 0.5, True)
    np.testing.assert_allclose([first[0], second[0]], [0.25 / 0.75 + 0.5 / 0.5, 0.875 / 0.875 + 1.5 / 0.75])
    plain, _ = optim.muon_direction(np.ones(1), start, 0.5, False)
    assert (plain[0], state.mu[0], state.count) == (1.0, 1.75, 2)


def test_first_adam_update_is_a_signed_step_and_clipping_limits_the_norm() -> None:
    grad = np.array([3.0, -4.0])
    got, _ = optim.adamw(np.zeros(2), grad, optim.zero_moments(grad), 0.1)
    np.testing.assert_allclose(got, [-0.1, 0.1], rtol=1e-7)
    np.testing.assert_allclose(optim.clip({"g": grad}, 1.0)["g"], grad / (5.0 + 1e-6), rtol=1e-15)
    np.testing.assert_array_equal(optim.clip({"g": grad}, 6.0)["g"], grad)


def test_source_ascent_goes_up_and_stays_in_the_box() -> None:
    """A1: clip keeps [0, 1]; sigmoid does not clip the raw value."""
    raw, grads = {"s": np.array([0.95, 0.05, 0.5])}, {"s": np.array([2.0, -2.0, 1.0])}
    state = tree.zip_map(optim.zero_moments, raw)
    got, _ = optim.source_ascent(raw, grads, state, 0.1, {"kind": "sign"}, "clip")
    np.testing.assert_allclose(got["s"], [1.0, 0.0, 0.6])
    got, _ = optim.source_ascent(raw, grads, state, 0.1, {"kind": "sign"}, "sigmoid")
    np.testing.assert_allclose(got["s"], [1.05, -0.05, 0.6])


# ---------------------------------------------------------------- the whole step
def _tiny() -> tuple[Model, Settings, dict, np.ndarray, dict]:
    rng = np.random.default_rng(8)
    names = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
    weights = llama.random_weights(SHAPE, rng)
    model = Model(SHAPE, weights, {"0": ("resid.0",), "1": ("resid.1",)}, ci_heads=2, ci_eps=1e-6)
    params = {
        "components": _components(rng, names, 2),
        "ci": {str(i): ci.random_chunk(rng, [8], 4, 4, 1, {n: 2}) for i, n in enumerate(names)},
    }
    raw = {n: {"component": rng.random(2), "delta": rng.random(())} for n in names}
    adversary = Adversary("persistent", "c", 1, 0.05, {"kind": "adam", "betas": (0.5, 0.99), "eps": 1e-8})
    fresh = {n: {"component": rng.random((2, 4, 2)), "delta": rng.random((2, 4))} for n in names}
    terms = {"stochastic": Term(0.5, (Draw(fresh),)), "persistent": Term(2.0, (Draw(),), adversary)}
    settings = Settings(terms, lambda x: losses.smooth_l0(x, 0.5), 1.0, "site", 0.1, 0.2, 8.0, 3.0)
    return model, settings, params, _tokens(rng), raw


def test_surrogate_equals_total_where_no_backward_is_replaced() -> None:
    """All pre-activations inside (0, 1) and no average: the surrogate is the total itself, off the base point too."""
    model, settings, params, tokens, raw = _tiny()
    settings = Settings(settings.terms, settings.psi, 1.0, "site", 0.1)
    for chunk_params in params["ci"].values():
        for head in chunk_params["heads"].values():
            head["w"], head["b"] = 0.02 * head["w"], np.full_like(head["b"], 0.5)
    clean = clean_forward(model, tokens)
    inside = pre_activations(model, params["ci"], clean).values()
    assert all(np.all((a > 0.1) & (a < 0.9)) for a in inside)
    raws = {"persistent": [raw]}
    loss = surrogate(model, settings, params, clean, raws, None)
    moved = tree.zip_map(lambda p, d: p + 0.01 * d, params, tree.directions(params, 1)[0])
    expected, _ = values(model, settings, moved, clean, raws, None)
    assert loss(moved) == pytest.approx(expected["total"], rel=1e-12)


def _components_only(loss: Callable[[tree.Tree], float], params: tree.Tree) -> tree.Tree:
    """The gradient in V and U; the CI function's left at zero to save evaluations."""
    factors = tree.full_gradient(lambda part: loss({**params, "components": part}), params["components"])
    return {"components": factors, "ci": tree.zip_map(np.zeros_like, params["ci"])}


def test_one_step_lowers_total_and_raises_the_bare_adversarial_term() -> None:
    """SPEC 7, A2, A3 on the smallest model; gradients entry by entry."""
    model, settings, params, tokens, raw = _tiny()
    groups = {"all": Group(lambda path: True, "adamw", 1e-3, clip=1.0)}
    state = init_state(params, groups, {"persistent": raw}, {name: np.zeros(2) for name in params["components"]})
    new, before = step(model, settings, groups, state, tokens, _components_only)
    clean = clean_forward(model, tokens)
    moved, _ = values(model, settings, new.params, clean, {"persistent": [raw]}, state.average)
    attacked, _ = values(model, settings, params, clean, {"persistent": [new.sources["persistent"]]}, state.average)
    assert moved["total"] < before["total"]
    assert attacked["persistent"] > before["persistent"]
    assert (new.step, new.updates, new.guard.total) == (1, 1, 0)


def test_a_step_with_a_gradient_that_is_not_finite_keeps_everything_but_the_step() -> None:
    """T7."""
    model, settings, params, tokens, _ = _tiny()
    settings = Settings({"stochastic": settings.terms["stochastic"]}, settings.psi, 1.0)
    groups = {"all": Group(lambda path: True, "adamw", 1e-3)}
    state = init_state(params, groups, {}, {})
    new, _ = step(model, settings, groups, state, tokens, lambda _, p: tree.zip_map(lambda x: x * np.nan, p))
    assert new.params is state.params and new.moments is state.moments
    assert (new.step, new.guard.in_a_row, new.guard.total) == (1, 1, 1)
