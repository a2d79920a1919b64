"""Nested dictionaries of arrays, and derivatives by central differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Tree = dict[str, Any]


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """``path/to/leaf`` and array, in the dictionaries' own order."""
    for name, value in tree.items():
        here = f"{path}/{name}" if path else str(name)
        if isinstance(value, dict):
            yield from leaves(value, here)
        else:
            yield here, value


def zip_map(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """``function`` over equal trees, leaf by leaf."""
    out: Tree = {}
    for name, value in tree.items():
        rest = [other[name] for other in others]
        out[name] = zip_map(function, value, *rest) if isinstance(value, dict) else function(value, *rest)
    return out


def dot(left: Tree, right: Tree) -> float:
    """Inner product of two equal trees."""
    return sum(float(np.sum(value)) for _, value in leaves(zip_map(np.multiply, left, right)))


def directions(tree: Tree, count: int = 8, seed: int = 0) -> list[Tree]:
    """``count`` random directions whose entries are N(0, 1) (SPEC 12 asks for 8)."""
    rng = np.random.default_rng(seed)
    return [zip_map(lambda leaf: rng.standard_normal(np.shape(leaf)), tree) for _ in range(count)]


def directional_derivative(loss: Callable[[Tree], float], params: Tree, direction: Tree, step: float = 1e-5) -> float:
    """d loss(params + t direction) / dt at t = 0 by the five-point central difference, error O(step^4)."""

    def at(multiple: float) -> float:
        return loss(zip_map(lambda leaf, along: leaf + multiple * step * along, params, direction))

    return (8.0 * (at(1.0) - at(-1.0)) - (at(2.0) - at(-2.0))) / (12.0 * step)


def full_gradient(loss: Callable[[Tree], float], params: Tree, step: float = 1e-5) -> Tree:
    """The gradient entry by entry (two evaluations each): for adversary sources and other small trees."""
    work = zip_map(lambda leaf: np.array(leaf, np.float64), params)
    grad = zip_map(np.zeros_like, work)
    for (_, leaf), (_, out) in zip(leaves(work), leaves(grad), strict=True):
        for index in np.ndindex(leaf.shape):
            here = leaf[index]
            leaf[index] = here + step
            above = loss(work)
            leaf[index] = here - step
            out[index] = (above - loss(work)) / (2.0 * step)
            leaf[index] = here
    return grad
