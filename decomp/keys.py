"""Randomness by name (SPEC R1, R2): keys folded from names and numbers, draws indexed by global position.

A draw depends on (seed, names, numbers, global example, position, component) and on nothing else: not on the order of
terms or sites, not on the mesh. It is a hash of the element's global index under a key, so a shard draws its own part,
nothing is stored, and XLA fuses the draw into what uses it. The hash is the three-round 32-bit avalanche function
``triple32`` (C. Wellons, 2018, "Prospecting for hash functions"), applied twice.

``jax.random`` is not used: its Threefry costs over a second of compile time on CPU for every distinct draw, and some
fifteen passes over memory at run time.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

Key = UInt32[Array, "2"] | np.ndarray
_SALTS = np.array([0x9E3779B9, 0x85EBCA6B], np.uint32)
_GOLDEN = 0x9E3779B1


def mix(x: Any) -> Any:
    """A bijection of uint32 whose every output bit depends on every input bit; numpy or jax arrays."""
    u = np.uint32
    x = (x ^ (x >> u(17))) * u(0xED5AD4BB)
    x = (x ^ (x >> u(11))) * u(0xAC4C1B51)
    x = (x ^ (x >> u(15))) * u(0x31848BAB)
    return x ^ (x >> u(14))


def name_hash(name: str) -> int:
    return zlib.crc32(name.encode())


def fold(key: Key, part: str | int | Array) -> Key:
    """A new key from a key and a name or a number; computed on the host unless the number is traced."""
    number = name_hash(part) if isinstance(part, str) else part
    word = np.array([number], np.uint32) if isinstance(number, int) else jnp.asarray(number).astype(jnp.uint32)[None]
    return _fold_words(key, word)


def _fold_words(key: Any, words: Any) -> Any:
    """``key`` [2] folded with words [..., 1]: keys [..., 2]."""
    x = mix(key ^ mix(words + _SALTS))
    return mix(x ^ (x[..., ::-1] * np.uint32(_GOLDEN)))


def key_of(seed: int, *parts: str | int | Array) -> Key:
    """The key of a seed and of names and numbers, in the order given."""
    key: Key = _fold_words(np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32), _SALTS[:1])
    for part in parts:
        key = fold(key, part)
    return key


def site_keys(key: Key, names: Sequence[str]) -> UInt32[Array, "n 2"]:
    """One key per site, folded from the site's name."""
    hashes = np.array([[name_hash(n)] for n in names], np.uint32)
    return jnp.asarray(_fold_words(key, hashes))


def uniform_block(
    key: Key, example0: Array | int, shape: tuple[int, int, int], width: int, offset: Array | int = 0
) -> Float[Array, "b t c"]:
    """U[0, 1) of ``shape`` [b, T, c]: examples from ``example0`` on, columns ``offset`` to ``offset + c`` of ``width``.

    Multiples of 2^-24 in float32, the same in every precision mode.
    """
    return to_uniform(bits_block(key, example0, shape, width, offset))


def bits_block(
    key: Key, example0: Array | int, shape: tuple[int, int, int], width: int, offset: Array | int = 0
) -> UInt32[Array, "b t c"]:
    """32 random bits per element of the block that ``uniform_block`` describes."""
    index = lambda dim: jax.lax.broadcasted_iota(jnp.uint32, shape, dim)  # noqa: E731
    low = index(1) * jnp.uint32(width) + (index(2) + _word(offset))
    high = (index(0) + _word(example0)) * jnp.uint32(_GOLDEN)
    return mix(mix(low ^ key[0]) ^ (high + key[1]))


def to_uniform(bits: UInt32[Array, "*n"]) -> Float[Array, "*n"]:
    """U[0, 1) in multiples of 2^-24 from the upper 24 bits."""
    return (bits >> 8).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-24)


def _word(x: Array | int) -> Array:
    return jnp.asarray(x).astype(jnp.uint32)


def normals(key: Key, shape: tuple[int, int], dtype: Any) -> Float[Array, "a b"]:
    """N(0, 1) matrix, drawn in float32 in every precision mode: fp32 and fp64 runs start from the same numbers."""
    return to_normal(uniform_block(key, 0, (1, *shape), shape[1])[0]).astype(dtype)


def to_normal(u: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """N(0, 1) from U[0, 1) by the inverse distribution function."""
    half_step = jnp.asarray(2.0**-25, u.dtype)  # moves the grid of multiples of 2^-24 off 0, whose inverse is infinite
    return jnp.asarray(math.sqrt(2.0), u.dtype) * jax.lax.erf_inv(2 * (u + half_step) - 1)
