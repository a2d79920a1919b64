"""The interface of a CI function, and the two squashings of its pre-activation (SPEC 3, C1-C3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from decomp.numerics import unit, wide

LEAK = 0.01


class CiFn(Protocol):
    """A CI function of one site table: clean activations to pre-activations by lane."""

    @property
    def captures(self) -> frozenset[str]:
        """What it taps from the clean forward (SPEC F4)."""
        ...

    def leaves(self) -> dict[str, Any]:
        """A Leaf per parameter: shape, semantic axes, layout."""
        ...

    def init(self, seed: int, dtype: Any) -> dict[str, Any]:
        """Parameters as SPEC 3 draws them; runs under jit with the leaves' shardings."""
        ...

    def __call__(
        self, params: Any, dims: Any, taps: Mapping[str, Array], components: Any
    ) -> dict[str, Float[Array, "n B T C"]]:
        """Pre-activations by lane. ``components`` are V and U, for functions that read them."""
        ...


@jax.custom_vjp
def lower(a: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """clip(a, 0, 1) for masks, with the one-sided leaky slope of SPEC C1."""
    return unit(a)


def _lower_fwd(a: Array) -> tuple[Array, Array]:
    return lower(a), a


def _lower_bwd(a: Array, g: Array) -> tuple[Array]:
    # wide for memory's sake: XLA's GPU program holds narrow zeros of this shape as an array (numerics.unit)
    a, wide_g = a.astype(wide(g.dtype)), g.astype(wide(g.dtype))
    zero = jnp.zeros((), wide_g.dtype)
    # below 0 only a gradient that would raise the importance gets through, so that dead components can return
    leak = jnp.where(wide_g < 0, jnp.asarray(LEAK, wide_g.dtype) * wide_g, zero)
    return (jnp.where(a > 1, zero, jnp.where(a > 0, wide_g, leak)).astype(g.dtype),)


lower.defvjp(_lower_fwd, _lower_bwd)


def upper(a: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """clip(a, 0, 1) below 1 and 1 + 0.01 (a - 1) above, for minimality (SPEC C2): slope 0 at a = 0, 1 at a = 1."""
    leaky = 1 + jnp.asarray(LEAK, a.dtype) * (a - 1)
    # where() instead of clip(): the ties at 0 and 1 take the slopes that the rule states, and NaN stays NaN (SPEC T7)
    return jnp.where(a > 1, leaky, jnp.where(a <= 0, jnp.zeros((), a.dtype), a))


def squash(a: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """(lower, upper) of every lane; upper at least in float32, where minimality is summed (SPEC P1)."""
    return {n: lower(x) for n, x in a.items()}, {n: upper(x.astype(wide(x.dtype))) for n, x in a.items()}
