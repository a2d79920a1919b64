"""One training step in the order of SPEC 7, nothing stacked, nothing drawn, gradients by central differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from . import ci as ci_fn
from . import losses, optim
from .objective import (
    Adversary,
    Clean,
    Model,
    Settings,
    Term,
    bundle_sources,
    clean_forward,
    pre_activations,
    recon,
    surrogate,
    term_value,
    values,
)
from .tree import Tree, full_gradient, leaves, zip_map

Array = np.ndarray
Gradient = Callable[[Callable[[Tree], float], Tree], Tree]


@dataclass(frozen=True)
class Group:
    """One optimizer group with its learning rate at this step; ``owns(path)`` picks leaves, ``kind`` adamw | muon.

    ``options`` go to the group's rule. In a muon group matrices take Muon and vectors Adam at ``adam_lr`` (T5).
    """

    owns: Callable[[str], bool]
    kind: str
    lr: float
    clip: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    adam_lr: float = 0.0

    def takes_muon(self, leaf: Array) -> bool:
        return self.kind == "muon" and leaf.ndim >= 2

    def update(self, param: Array, grad: Array, moments: Any) -> tuple[Array, Any]:
        if self.takes_muon(param):
            return optim.muon(param, grad, moments, self.lr, **self.options)
        if self.kind == "muon":
            return optim.adamw(param, grad, moments, self.adam_lr, weight_decay=self.options.get("weight_decay", 0.0))
        return optim.adamw(param, grad, moments, self.lr, **self.options)


@dataclass(frozen=True)
class State:
    """Everything one step reads and writes.

    params: {"components": {site: {"V", "U"}}, "ci": {chunk: ...}}. moments: per leaf path an optim.Moments (adamw) or a
    optim.Momentum (muon). sources, source_moments: per persistent term, by site. average, updates: L3's.
    """

    params: Tree
    moments: dict[str, Any]
    sources: dict[str, Tree]
    source_moments: dict[str, Tree]
    average: dict[str, Array]
    updates: int = 0
    step: int = 0
    guard: optim.Guard = field(default_factory=optim.Guard)


def init_state(params: Tree, groups: Mapping[str, Group], sources: dict[str, Tree], f_like: dict[str, Array]) -> State:
    """Zero moments and averages around given params and raw sources; ``f_like`` has [C] per site."""
    moments = {
        path: optim.zero_momentum(leaf) if _group(groups, path).takes_muon(leaf) else optim.zero_moments(leaf)
        for path, leaf in leaves(params)
    }
    source_moments = {name: zip_map(optim.zero_moments, raw) for name, raw in sources.items()}
    return State(params, moments, sources, source_moments, {site: np.zeros_like(f) for site, f in f_like.items()})


def _group(groups: Mapping[str, Group], path: str) -> Group:
    owners = [group for group in groups.values() if group.owns(path)]
    if len(owners) != 1:
        raise ValueError(f"{path} is in {len(owners)} groups")  # T3
    return owners[0]


def warm_up_ascents(
    model: Model, clean: Clean, components: Tree, lower: Mapping[str, Array], term: Term, raw: Tree, state: Tree
) -> tuple[Tree, Tree]:
    """A2: ``ascents`` updates of a persistent bundle, every site routed (M5), components and CI constants."""
    adversary = term.adversary
    assert adversary is not None

    def value(raw: Tree) -> float:
        return recon(model, clean, components, lower, bundle_sources(raw, adversary), None, term.hidden)

    for _ in range(adversary.ascents):
        grad = full_gradient(value, raw)
        raw, state = optim.source_ascent(raw, grad, state, adversary.lr, adversary.optim, adversary.parametrize)
    return raw, state


def fresh_pgd(model: Model, clean: Clean, components: Tree, lower: Mapping[str, Array], term: Term, index: int) -> Tree:
    """M2, M5: sign ascents from draw ``index``'s sources under that draw's routing."""
    adversary, draw = term.adversary, term.draws[index]
    assert adversary is not None and draw.sources is not None
    raw: Tree = {site: dict(parts) for site, parts in draw.sources.items()}

    def value(raw: Tree) -> float:
        return recon(model, clean, components, lower, bundle_sources(raw, adversary), draw.routes, term.hidden)

    for _ in range(adversary.ascents):
        grad = full_gradient(value, raw)
        raw = zip_map(lambda x, g: np.clip(x + adversary.lr * np.sign(g), 0.0, 1.0), raw, grad)
    return raw


def final_ascent(
    model: Model, clean: Clean, components: Tree, lower: Mapping[str, Array], term: Term, raw: Tree, state: Tree
) -> tuple[Tree, Tree]:
    """A2, A3: the ascent on d term / d sources of the loss itself, its coefficient left out."""
    adversary = term.adversary
    assert adversary is not None
    grad = full_gradient(lambda raw: term_value(model, clean, components, lower, term, [raw] * len(term.draws)), raw)
    return optim.source_ascent(raw, grad, state, adversary.lr, adversary.optim, adversary.parametrize)


def apply_groups(
    params: Tree, grads: Tree, moments: dict[str, Any], groups: Mapping[str, Group]
) -> tuple[Tree, dict[str, Any]]:
    """T1, T3 to T5: clip every group by its own global norm, then update its leaves."""
    by_path, grad_of, new_moments = dict(leaves(params)), dict(leaves(grads)), dict(moments)
    updated: dict[str, Array] = {}
    for group in groups.values():
        own = optim.clip({path: grad_of[path] for path in by_path if group.owns(path)}, group.clip)
        for path, grad in own.items():
            updated[path], new_moments[path] = group.update(by_path[path], grad, moments[path])
    return _rebuild(params, updated), new_moments


def _rebuild(tree: Tree, by_path: Mapping[str, Array], path: str = "") -> Tree:
    out: Tree = {}
    for name, value in tree.items():
        here = f"{path}/{name}" if path else str(name)
        out[name] = _rebuild(value, by_path, here) if isinstance(value, dict) else by_path[here]
    return out


def adversaries(settings: Settings, kind: str) -> dict[str, tuple[Term, Adversary]]:
    """The terms that have an adversary of this kind."""
    found = {name: (term, term.adversary) for name, term in settings.terms.items() if term.adversary is not None}
    return {name: (term, adversary) for name, (term, adversary) in found.items() if adversary.kind == kind}


def step(
    model: Model,
    settings: Settings,
    groups: Mapping[str, Group],
    state: State,
    tokens: Array,
    gradient: Gradient = full_gradient,
) -> tuple[State, dict[str, float]]:
    """SPEC 7, line by line. ``gradient(loss, params)`` may be replaced where params are many.

    Returns the new state and every loss by name.
    """
    components = state.params["components"]
    clean = clean_forward(model, tokens)
    a = pre_activations(model, state.params["ci"], clean)
    lower = {site: ci_fn.lower(x) for site, x in a.items()}

    sources, source_moments = dict(state.sources), dict(state.source_moments)
    raws: dict[str, list[Tree]] = {}
    for name, (term, _) in adversaries(settings, "persistent").items():
        sources[name], source_moments[name] = warm_up_ascents(
            model, clean, components, lower, term, sources[name], source_moments[name]
        )
        raws[name] = [sources[name]] * len(term.draws)
    for name, (term, _) in adversaries(settings, "fresh_pgd").items():
        raws[name] = [fresh_pgd(model, clean, components, lower, term, i) for i in range(len(term.draws))]

    metrics, f = values(model, settings, state.params, clean, raws, state.average, state.updates)
    loss = surrogate(model, settings, state.params, clean, raws, state.average, state.updates)
    grads = gradient(loss, state.params)

    for name, (term, _) in adversaries(settings, "persistent").items():
        sources[name], source_moments[name] = final_ascent(
            model, clean, components, lower, term, sources[name], source_moments[name]
        )
    params, moments = apply_groups(state.params, grads, state.moments, groups)
    average = state.average if settings.halflife is None else losses.ema(state.average, 0, f, settings.halflife)[0]

    finite = np.isfinite(metrics["total"]) and all(np.all(np.isfinite(leaf)) for _, leaf in leaves(grads))
    new = replace(
        state,
        params=params,
        moments=moments,
        sources=sources,
        source_moments=source_moments,
        average=average,
        updates=state.updates + 1,
    )
    kept, guard = optim.guard(state, new, bool(finite), state.guard)
    return replace(kept, step=state.step + 1, guard=guard), metrics
