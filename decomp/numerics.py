"""Conventions that formulas share: "at least float32", how activations meet a matrix, and numbers held in 16 bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float, UInt16, UInt32

GRID = 65535  # uint16 fixed point: u stands for u / GRID (SPEC P1)


def wide(dtype: Any) -> Any:
    """float64 stays, everything else is float32: what norms, softmax, KL and sums are computed in (SPEC P1)."""
    return jnp.dtype(np.float64 if jnp.dtype(dtype) == np.float64 else np.float32)


def matmul(x: Float[Array, "*batch a"], w: Float[Array, "a b"]) -> Float[Array, "*batch b"]:
    """x @ w with the leading dims of x as one: XLA's fast CPU matmul takes rank 2 alone, forward and backward."""
    return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[-1])


def in_turn(x: Any, before: Any) -> Any:
    """``x``, not to be read until ``before`` is there: two halves of a program that XLA would otherwise run side by
    side, with what each keeps for its backward."""
    return jax.lax.optimization_barrier((x, before))[0]


def gelu(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """x Phi(x), with the exact error function."""
    return 0.5 * x * _erfc(-x * np.sqrt(0.5).astype(x.dtype))


@jax.custom_jvp
def _erfc(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """jax's own, whose derivative jax 0.12 cannot take inside a shard_map that checks varying axes."""
    return jax.lax.erfc(x)


@_erfc.defjvp
def _erfc_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    (x,), (t,) = primals, tangents
    return _erfc(x), (-2 / np.sqrt(np.pi)).astype(x.dtype) * (t * jnp.exp(-jnp.square(x)))


# ---------------------------------------------------------------- values made where they are read
# What rests is not what is differentiated: ``by`` stands for the value, in the dtype its gradient is to have. Only its
# gradient is used; its own values are not read, so that zeros will do, which then take no memory.
def unit(a: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """clip(a, 0, 1). Bounds are scalars in the program too: XLA would hold arrays of zeros and ones beside ``a``."""
    return jax.lax.clamp(jnp.zeros((), a.dtype), a, jnp.ones((), a.dtype))


@jax.custom_jvp
def read_unit(a: Float[Array, "*n"], by: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """clip(a, 0, 1), whose gradient comes out by ``by`` as it is."""
    return unit(a)


@jax.custom_jvp
def read_fixed(u: UInt16[Array, "*n"], by: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """u / 65535 in the dtype of ``by``, which its gradient comes out by: an integer has none."""
    return (u.astype(wide(by.dtype)) / GRID).astype(by.dtype)


read_unit.defjvp(lambda primals, tangents: (read_unit(*primals), tangents[1]))
read_fixed.defjvp(lambda primals, tangents: (read_fixed(*primals), tangents[1]))


# ---------------------------------------------------------------- 16 bits, rounded at random (SPEC P1)


def move_fixed(u: UInt16[Array, "*n"], by: Float[Array, "*n"], r: Float[Array, "*n"]) -> UInt16[Array, "*n"]:
    """clip(u / 65535 + by, 0, 1) on the grid: rounded up where ``r``, U[0, 1), is below the remainder.

    ``by`` is split into whole steps and a remainder before it meets ``u``: u / 65535 + by in float32 would round the
    remainder itself, and move a source whose gradient is 0. A NaN does not move it either.
    """
    steps = jnp.clip(jnp.where(jnp.isnan(by), 0, by) * GRID, -GRID - 1, GRID + 1)
    whole = jnp.floor(steps)
    up = r.astype(steps.dtype) < steps - whole
    moved = u.astype(jnp.int32) + whole.astype(jnp.int32) + up.astype(jnp.int32)
    return jnp.clip(moved, 0, GRID).astype(jnp.uint16)


def round_bfloat16(x: Float[Array, "*n"], bits: UInt32[Array, "*n"]) -> BFloat16[Array, "*n"]:
    """x in bfloat16, away from 0 with the probability of the 16 bits it loses; ``bits``: 16 random ones, low.

    The upper half of the sum is taken as bits: of a conversion to bfloat16 and back XLA would keep the float32.
    """
    whole = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    rounded = (whole + (bits & jnp.uint32(0xFFFF))) >> 16
    nan = jnp.uint32(0x7FC0)  # adding to a NaN could carry into its sign, and to 0
    return jax.lax.bitcast_convert_type(jnp.where(jnp.isnan(x), nan, rounded).astype(jnp.uint16), jnp.bfloat16)
