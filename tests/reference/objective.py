"""The losses of one step as functions of parameters, with every draw injected (SPEC 3 to 6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import ci as ci_fn
from . import losses
from .llama import Forward
from .masks import Routes, Sources, effective, expand, masked_sites, mixed
from .tree import Tree

Array = np.ndarray


@dataclass(frozen=True)
class Model:
    """Target and CI function: ``taps`` names, per CI chunk, the captures of ``Forward`` it reads."""

    shape: Any
    weights: Mapping[str, Array]
    taps: Mapping[str, tuple[str, ...]]
    ci_heads: int
    ci_eps: float


@dataclass(frozen=True)
class Draw:
    """One injected draw of a term.

    sources: what the term's masks are made from (``fresh_pgd``: where its ascents start; ``persistent``: None, the
    bundle is in the state; ``mixed``: the fresh uniform ones). adversarial [B]: ``mixed`` takes the bundle there.
    """

    sources: Sources | None = None
    routes: Routes | None = None
    adversarial: Array | None = None


@dataclass(frozen=True)
class Adversary:
    """``persistent`` (and ``mixed``) or ``fresh_pgd``; ``letters`` is M3's shape of its sources."""

    kind: str
    letters: str
    ascents: int
    lr: float
    optim: dict[str, Any]
    parametrize: str = "clip"


@dataclass(frozen=True)
class Term:
    """One recon term; ``hidden`` is (coefficient, capture names) of L7."""

    coeff: float
    draws: tuple[Draw, ...]
    adversary: Adversary | None = None
    hidden: tuple[float, tuple[str, ...]] | None = None


@dataclass(frozen=True)
class Settings:
    """Coefficients at this step. ``psi`` is L2's, with its schedule applied; a coefficient None leaves the loss out."""

    terms: Mapping[str, Term]
    psi: Callable[[Array], Array]
    faithfulness: float | None = None
    normalize: str = "site"
    minimality: float | None = None
    frequency: float | None = None
    count: float = 1.0
    halflife: float | None = None

    def coefficients(self) -> dict[str, float]:
        own = {name: getattr(self, name) for name in ("faithfulness", "minimality", "frequency")}
        return {name: c for name, c in own.items() if c is not None} | {k: t.coeff for k, t in self.terms.items()}


class Clean(NamedTuple):
    """The frozen model on this batch: a constant of the step (F3)."""

    tokens: Array
    logits: Array
    captures: dict[str, Array]


def clean_forward(model: Model, tokens: Array) -> Clean:
    """Logits and all captures of the clean model."""
    forward = Forward(model.shape, model.weights)
    return Clean(tokens, forward.logits(tokens), forward.captures)


def pre_activations(model: Model, ci_params: Tree, clean: Clean) -> dict[str, Array]:
    """The CI function on the clean taps, by site [B, T, C]."""
    taps = {name: [clean.captures[tap] for tap in names] for name, names in model.taps.items()}
    return ci_fn.chunk_transformer(ci_params, taps, model.ci_heads, model.ci_eps)


def recon(
    model: Model,
    clean: Clean,
    components: Tree,
    lower: Mapping[str, Array],
    sources: Sources,
    routes: Routes | None,
    hidden: tuple[float, tuple[str, ...]] | None = None,
) -> float:
    """L5 plus L7 of one draw, without the term's coefficient."""
    forward = Forward(model.shape, model.weights, masked_sites(components, lower, sources, routes))
    value = losses.kl(clean.logits, forward.logits(clean.tokens))
    if hidden is None:
        return value
    return value + hidden[0] * losses.hidden(clean.captures, forward.captures, hidden[1])


def bundle_sources(raw: Tree, adversary: Adversary) -> Sources:
    """Raw sources as masks read them: through the parametrisation, with an axis where a letter is left out."""
    out = effective(raw, adversary.parametrize)
    return {site: {k: expand(v, adversary.letters) for k, v in parts.items()} for site, parts in out.items()}


def term_value(
    model: Model, clean: Clean, components: Tree, lower: Mapping[str, Array], term: Term, raws: list[Tree] | None
) -> float:
    """L6: mean over draws. ``raws``: the adversary's raw sources, one per draw (the same one for ``persistent``)."""
    values = []
    for i, draw in enumerate(term.draws):
        sources, routes = draw.sources, draw.routes
        if term.adversary is not None:
            assert raws is not None
            sources = bundle_sources(raws[i], term.adversary)
        if draw.adversarial is not None:
            assert draw.sources is not None and sources is not None
            sources, routes = mixed(draw.adversarial, sources, draw.sources, draw.routes)
        assert sources is not None
        values.append(recon(model, clean, components, lower, sources, routes, term.hidden))
    return sum(values) / len(values)


def activity(settings: Settings, upper: Mapping[str, Array]) -> dict[str, Array]:
    """L2's f by site."""
    return losses.frequencies(upper, settings.psi)


def surrogate(
    model: Model,
    settings: Settings,
    params: Tree,
    clean: Clean,
    raws: Mapping[str, list[Tree]],
    average: Mapping[str, Array] | None,
    updates: int = 0,
) -> Callable[[Tree], float]:
    """A scalar of params whose ORDINARY gradient at ``params`` is the gradient training uses.

    Three backwards differ from the derivative of their forward: the squashings (C1, C2) and the averaged frequency
    (L3). Each is replaced by its value at ``params`` continued with the slope the SPEC gives. Sources are constants.
    """
    at = pre_activations(model, params["ci"], clean)
    components = params["components"]

    def weighted_recon(components: Tree, lower: Mapping[str, Array]) -> float:
        terms = settings.terms.items()
        return sum(t.coeff * term_value(model, clean, components, lower, t, raws.get(k)) for k, t in terms)

    cotangent = _cotangent_sign(lambda lower: weighted_recon(components, lower), at)
    base = activity(settings, {site: ci_fn.upper(a) for site, a in at.items()})
    f_hat = base if settings.halflife is None else losses.ema(average or {}, updates, base, settings.halflife)[1]

    def loss(params: Tree) -> float:
        a = pre_activations(model, params["ci"], clean)
        lower = {site: ci_fn.lower_linear(a[site], at[site], cotangent[site]) for site in a}
        f = activity(settings, {site: ci_fn.upper_linear(a[site], at[site]) for site in a})
        value = weighted_recon(params["components"], lower)
        if settings.faithfulness is not None:
            weights = {site: model.weights[f"{site}.weight"] for site in at}
            value += settings.faithfulness * losses.faithfulness(weights, params["components"], settings.normalize)
        if settings.minimality is not None:
            value += settings.minimality * losses.minimality(f)
        if settings.frequency is not None:
            value += settings.frequency * losses.frequency_linear(f, f_hat, settings.count)
        return value

    return loss


def _cotangent_sign(recon_of: Callable[[dict[str, Array]], float], at: Mapping[str, Array]) -> dict[str, Array]:
    """d recon / d lower where C1 asks for its sign (a <= 0), by central differences; 0 elsewhere."""
    lower = {site: ci_fn.lower(a) for site, a in at.items()}
    out = {site: np.zeros_like(a) for site, a in at.items()}
    for site, a in at.items():
        for index in zip(*np.nonzero(a <= 0.0), strict=True):
            here, values = lower[site][index], []
            for step in (1e-5, -1e-5):
                lower[site][index] = here + step
                values.append(recon_of(lower))
            lower[site][index] = here
            out[site][index] = (values[0] - values[1]) / 2e-5
    return out


def values(
    model: Model,
    settings: Settings,
    params: Tree,
    clean: Clean,
    raws: Mapping[str, list[Tree]],
    average: Mapping[str, Array] | None,
    updates: int = 0,
) -> tuple[dict[str, float], dict[str, Array]]:
    """Every loss by name, unweighted, ``total`` included; and L2's f."""
    a = pre_activations(model, params["ci"], clean)
    lower = {site: ci_fn.lower(x) for site, x in a.items()}
    f = activity(settings, {site: ci_fn.upper(x) for site, x in a.items()})
    out: dict[str, float] = {}
    if settings.faithfulness is not None:
        weights = {site: model.weights[f"{site}.weight"] for site in a}
        out["faithfulness"] = losses.faithfulness(weights, params["components"], settings.normalize)
    if settings.minimality is not None:
        out["minimality"] = losses.minimality(f)
    if settings.frequency is not None:
        f_hat = f if settings.halflife is None else losses.ema(average or {}, updates, f, settings.halflife)[1]
        out["frequency"] = losses.phi(f_hat, settings.count)
    for name, term in settings.terms.items():
        out[name] = term_value(model, clean, params["components"], lower, term, raws.get(name))
    out["total"] = losses.total(out, settings.coefficients())
    return out, f
