"""Two conventions every formula shares: what "at least float32" is, and how activations meet a matrix."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def wide(dtype: Any) -> Any:
    """float64 stays, everything else is float32: what norms, softmax, KL and sums are computed in (SPEC P1)."""
    return jnp.dtype(np.float64 if jnp.dtype(dtype) == np.float64 else np.float32)


def matmul(x: Float[Array, "*batch a"], w: Float[Array, "a b"]) -> Float[Array, "*batch b"]:
    """x @ w with the leading dims of x as one: XLA's fast CPU matmul takes rank 2 alone, forward and backward."""
    return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[-1])
