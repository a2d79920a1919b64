"""Numbers held in 16 bits: what they stand for, and rounding that is right on average (SPEC P1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import optim as ref

from decomp.keys import bits_block, key_of, to_uniform
from decomp.numerics import GRID, gelu, move_fixed, read_fixed, round_bfloat16

N = 1 << 18
BITS = bits_block(key_of(0, "rounding"), 0, (1, 1, N), N)[0, 0]
CODES = jnp.arange(GRID + 1).astype(jnp.uint16)


def within(mean: float, expected: float, spread: float, n: int = N) -> None:
    """A mean of ``n`` draws of standard deviation ``spread``: five of its own off by chance once in 10^6."""
    assert abs(mean - expected) <= 5 * spread / np.sqrt(n), f"{mean} is not {expected} +- {spread / np.sqrt(n)}"


def coin(fraction: float) -> float:
    """Standard deviation of rounding up with this probability, or down."""
    return np.sqrt(fraction * (1 - fraction))


# ---------------------------------------------------------------- GELU
def test_gelu_is_the_exact_one_with_its_slope():
    x, exact = jnp.linspace(-9, 9, 400), partial(jax.nn.gelu, approximate=False)
    np.testing.assert_allclose(gelu(x), exact(x), rtol=1e-6, atol=1e-7)
    slope = lambda f: jax.vmap(jax.grad(f))(x)  # noqa: E731
    np.testing.assert_allclose(slope(gelu), slope(exact), rtol=1e-6, atol=1e-7)


def test_gelu_has_a_slope_on_a_mesh(simulated: Callable[..., str]):
    """jax 0.12 cannot differentiate its own error function where varying axes are checked."""
    code = """
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, PartitionSpec as P
    from decomp.numerics import gelu
    slope = lambda x: jax.grad(lambda x: gelu(x).sum())(x)
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    x = jnp.linspace(-3, 3, 8)
    np.testing.assert_array_equal(jax.shard_map(slope, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))(x), slope(x))
    """
    simulated(code, devices=2, timeout=120)


# ---------------------------------------------------------------- fixed point
def test_every_code_is_read_to_the_last_bit_but_one():
    """XLA divides by a constant as it likes; 0 and 1 are exact, and no two codes read alike."""
    read = np.asarray(jax.jit(read_fixed)(CODES, jnp.zeros(CODES.shape)))
    np.testing.assert_allclose(read, np.arange(GRID + 1) / GRID, rtol=2**-23)
    assert (read[0], read[-1]) == (0.0, 1.0) and np.all(np.diff(read) > 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradient_by_an_integer_comes_out_beside_it(dtype: jnp.dtype):
    """d sum(w * source) = w, in the dtype the source is read in; the zeros that stand for it are not read."""
    w, zeros = jnp.linspace(-1, 1, 5).astype(dtype), jnp.zeros(5, dtype)
    grad = jax.jit(jax.grad(lambda by: jnp.sum(w * read_fixed(CODES[:5], by))))(zeros)
    assert grad.dtype == dtype
    np.testing.assert_array_equal(np.asarray(grad), np.asarray(w))
    np.testing.assert_array_equal(read_fixed(CODES, jnp.ones(CODES.shape)), read_fixed(CODES, jnp.zeros(CODES.shape)))


@pytest.mark.parametrize("steps", [0.001, 0.5, 655.35, -0.25, -1.0, -12.003])
def test_a_move_is_right_on_average(steps: float):
    """From the middle of the grid, where u / 65535 + by in float32 would keep 8 bits of the remainder."""
    u = np.asarray(move_fixed(jnp.full(N, 40000, jnp.uint16), jnp.full(N, steps / GRID), to_uniform(BITS)), np.float64)
    moved = u - 40000
    assert set(np.unique(moved)) <= {np.floor(steps), np.ceil(steps)}
    # float32 holds steps / 65535 to 2^-24 of itself, and its product with 65535 again
    within(moved.mean(), steps, coin(steps % 1) + abs(steps) * 2**-23 * np.sqrt(N))


def test_small_moves_add_up():
    """A hundredth of a grid step a hundred times: rounding to nearest would stay, this moves by one on average."""
    draws = [bits_block(key_of(1, i), 0, (1, 1, 4096), 4096)[0, 0] for i in range(100)]
    u = jnp.full(4096, 40000, jnp.uint16)
    for bits in draws:
        u = move_fixed(u, jnp.full(4096, 0.01 / GRID), to_uniform(bits))
    within(np.asarray(u, np.float64).mean() - 40000, 1.0, np.sqrt(100) * coin(0.01), 4096)


@pytest.mark.parametrize(("by", "expected"), [(0.0, None), (np.nan, None), (-0.0, None), (np.inf, GRID), (-3e30, 0)])
def test_what_must_not_be_rounded(by: float, expected: int | None):
    """No gradient, no move, for every code; far moves end at the bounds (A1); a NaN is left to T7."""
    moved = move_fixed(CODES, jnp.full(CODES.shape, by), to_uniform(BITS[: GRID + 1]))
    np.testing.assert_array_equal(moved, CODES if expected is None else np.full(GRID + 1, expected))


def test_moves_are_clipped_and_rounded_as_the_reference_does():
    rng = np.random.default_rng(0)
    by = rng.normal(0, 0.3, N) * rng.choice([1.0, 1e-3, 1e-5], N)
    r, u = rng.integers(0, 1 << 24, N) / 2**24, rng.integers(0, GRID + 1, N)
    with jax.enable_x64(True):
        got = move_fixed(jnp.asarray(u).astype(jnp.uint16), jnp.asarray(by), jnp.asarray(r))
    np.testing.assert_array_equal(got, ref.round_fixed(np.clip(u / GRID + by, 0, 1), r))
    in_float32 = move_fixed(jnp.asarray(u.astype(np.uint16)), jnp.asarray(by, jnp.float32), jnp.asarray(r, jnp.float32))
    off = np.asarray(in_float32, np.int64) - np.asarray(got, np.int64)
    assert np.abs(off).max() <= 1 and np.mean(off != 0) < 1e-3


# ---------------------------------------------------------------- bfloat16
@pytest.mark.parametrize("x", [1.001, -1.001, 3.14159, 1e-12, -7.7e-20, 0.99])
def test_bfloat16_is_right_on_average(x: float):
    got = np.asarray(round_bfloat16(jnp.full(N, x), BITS), np.float64)
    exact = float(np.float32(x))
    spacing = 2.0 ** (np.floor(np.log2(abs(exact))) - 7)
    low, up = np.floor(exact / spacing) * spacing, np.ceil(exact / spacing) * spacing
    assert set(np.unique(got)) <= {low, up}
    within(got.mean(), exact, spacing * coin((exact - low) / spacing))


def test_bfloat16_as_the_reference_rounds():
    rng = np.random.default_rng(1)
    x = (rng.normal(size=N) * 10.0 ** rng.uniform(-20, 3, N)).astype(np.float32)
    bits = rng.integers(0, 1 << 32, N, dtype=np.uint32)
    expected = ref.round_bfloat16(x.astype(np.float64), (bits & 0xFFFF) / 65536)
    np.testing.assert_array_equal(np.asarray(round_bfloat16(jnp.asarray(x), jnp.asarray(bits)), np.float64), expected)


def test_what_bfloat16_holds_stays():
    x = jnp.asarray([0.0, -0.0, 1.0, -1.5, 2.0**-126, jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
    got = np.asarray(round_bfloat16(x, jnp.full(8, 0xFFFFFFFF, jnp.uint32)), np.float32)
    np.testing.assert_array_equal(got, np.asarray(x))
    nan = jax.lax.bitcast_convert_type(jnp.uint32(0x7FFFFFFF), jnp.float32)
    assert np.isnan(np.asarray(round_bfloat16(nan, jnp.uint32(0xFFFF)), np.float32))
