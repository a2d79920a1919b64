"""Masks from CI and sources, the delta mask, routing (SPEC 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .llama import Masked

Array = np.ndarray

# Sources by site: {"component": broadcasts to [B, T, C], "delta": broadcasts to [B, T]}; without "delta" no delta path.
Sources = Mapping[str, Mapping[str, Array]]
Routes = Mapping[str, Array]


def mask(ci: Array, source: Array) -> Array:
    """M1: ci + (1 - ci) source."""
    return ci + (1.0 - ci) * source


def expand(array: Array, letters: str) -> Array:
    """M3: put an axis of length 1 where ``letters`` has none of b, s; [.., C] or, for a delta source, [..] alike."""
    out = array
    for axis, letter in enumerate("bs"):
        if letter not in letters:
            out = np.expand_dims(out, axis)
    return out


def constant(ci: Mapping[str, Array], value: float) -> dict[str, dict[str, Array]]:
    """M2: one value everywhere and no delta path."""
    return {site: {"component": np.full(array.shape, value)} for site, array in ci.items()}


def effective(raw: Mapping[str, Any], parametrize: str) -> dict[str, dict[str, Array]]:
    """A1: raw sources as they are (``clip``) or through a sigmoid."""

    def one(array: Array) -> Array:
        return 1.0 / (1.0 + np.exp(-array)) if parametrize == "sigmoid" else array

    return {site: {part: one(array) for part, array in parts.items()} for site, parts in raw.items()}


def masked_sites(
    components: Mapping[str, Mapping[str, Array]], ci: Mapping[str, Array], sources: Sources, routes: Routes | None
) -> dict[str, Masked]:
    """What a masked forward needs of every site; ``routes`` None routes all (F1: sites must be the same)."""
    if set(components) != set(ci) or set(components) != set(sources):
        raise ValueError("components, CI and sources name different sites")
    return {
        site: Masked(
            V=factors["V"],
            U=factors["U"],
            mask=mask(ci[site], sources[site]["component"]),
            delta=sources[site].get("delta"),
            route=None if routes is None else routes[site],
        )
        for site, factors in components.items()
    }


def mixed(
    adversarial: Array, sources: Sources, fresh: Sources, routes: Routes | None
) -> tuple[dict[str, dict[str, Array]], dict[str, Array]]:
    """M2 ``mixed``: example b takes ``sources`` and every route where adversarial[b], else ``fresh`` and ``routes``."""
    out_sources: dict[str, dict[str, Array]] = {}
    out_routes: dict[str, Array] = {}
    for site, parts in fresh.items():
        batch, length = parts["component"].shape[:2]
        out_sources[site] = {name: _choose(adversarial, sources[site][name], array) for name, array in parts.items()}
        route = np.ones((batch, length), bool) if routes is None else np.array(routes[site])
        route[adversarial] = True
        out_routes[site] = route
    return out_sources, out_routes


def _choose(adversarial: Array, persistent: Array, fresh: Array) -> Array:
    out = np.array(fresh)
    out[adversarial] = np.broadcast_to(persistent, fresh.shape)[adversarial]
    return out
