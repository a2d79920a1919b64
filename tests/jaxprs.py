"""Reading a traced program: its equations, those of inner jaxprs included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax


def equations(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Every equation of ``fn`` traced at ``args``; a scan's or a call's body counts once."""
    return list(_walk(jax.make_jaxpr(fn)(*args).jaxpr))


def _walk(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from _walk(inner)


def shapes(eqn: Any) -> list[tuple[int, ...]]:
    """Shapes of an equation's operands and results."""
    return [v.aval.shape for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "shape")]
