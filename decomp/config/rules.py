"""Every rule that needs more than one field, or more than a field's type, in one place.

A rule looks at a whole ``RunConfig`` and yields problems; ``reads`` names the fields it looked at, so that a rule that
rests on a value already refused stays silent. Rules that need the target or the devices are where those are known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from decomp.config import fields, schema
from decomp.config.schema import RunConfig

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
LOSS_NAMES = ("faithfulness", "minimality", "frequency", "total")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where, and what mends it."""

    path: str
    fix: str
    reads: tuple[str, ...] = ()


Rule = Callable[[RunConfig], Iterator[Problem]]


def problems(cfg: RunConfig) -> list[Problem]:
    """All broken rules of a config whose fields are valid one by one."""
    return [problem for rule in RULES for problem in rule(cfg)]


def attention_heads(cfg: RunConfig) -> Iterator[Problem]:
    """Heads split d_model evenly, and rotate-half RoPE needs pairs in each head (SPEC 3)."""
    if not isinstance(cfg.ci_fn, schema.ChunkTransformer):
        return
    d, n = cfg.ci_fn.d_model, cfg.ci_fn.n_heads
    if d % n or (d // n) % 2:
        fit = max(2 * n, round(d / (2 * n)) * 2 * n)
        reads = ("ci_fn.d_model", "ci_fn.n_heads")
        yield Problem("ci_fn.d_model", f"{d} over n_heads={n} gives no even head size; try ci_fn.d_model={fit}", reads)


def microbatches(cfg: RunConfig) -> Iterator[Problem]:
    batch, k = cfg.data.batch_size, cfg.data.microbatches
    if batch % k:
        fit = max(i for i in range(1, min(k, batch) + 1) if batch % i == 0)
        reads = ("data.batch_size", "data.microbatches")
        yield Problem(
            "data.microbatches", f"{k} does not divide data.batch_size={batch}; try data.microbatches={fit}", reads
        )


def fresh_pgd_in_windows(cfg: RunConfig) -> Iterator[Problem]:
    """A fresh source that examples share must see them all, and microbatches show it one window at a time (SPEC T8)."""
    if cfg.data.microbatches == 1:
        return
    for name, term in cfg.loss.recon.items():
        source = term.source if term else None
        if isinstance(source, schema.FreshPgdSource) and "b" not in source.shape:
            path = f"loss.recon.{name}.source.shape"
            fix = (
                f"{source.shape} is shared by the batch, of which data.microbatches={cfg.data.microbatches} shows one "
                f"window at a time; use data.microbatches=1 or {path}=b{source.shape}"
            )
            yield Problem(path, fix, ("data.microbatches", path))


def sources_in_a_box(cfg: RunConfig) -> Iterator[Problem]:
    """Fixed point holds [0, 1]; the raw value of a sigmoid has no bounds (SPEC A1, P1)."""
    for name, term in cfg.loss.recon.items():
        source, path = term.source if term else None, f"loss.recon.{name}.source"
        if isinstance(source, schema.MixedSource):
            source, path = source.persistent, f"{path}.persistent"
        if isinstance(source, schema.PersistentSource) and (source.dtype, source.parametrize) == ("uint16", "sigmoid"):
            fix = f"uint16 holds [0, 1], which raw values under a sigmoid leave; use float32 or {path}.parametrize=clip"
            yield Problem(f"{path}.dtype", fix, (f"{path}.dtype", f"{path}.parametrize"))


def sources_site_by_site(cfg: RunConfig) -> Iterator[Problem]:
    """An adversary ascends one forward, and ``per_site`` has one for each site (SPEC M4, M5)."""
    for name, term in cfg.loss.recon.items():
        if not (term and isinstance(term.routing, schema.RoutePerSite)):
            continue
        if not isinstance(term.source, schema.UniformSource | schema.ConstantSource):
            path = f"loss.recon.{name}.routing"
            fix = (
                f"per_site has no one forward for source={term.source.kind} to ascend; use uniform_k, or source=uniform"
            )
            yield Problem(path, fix, (path, f"loss.recon.{name}.source"))


def profile_window(cfg: RunConfig) -> Iterator[Problem]:
    if cfg.profile.steps is None:
        return
    first, last = cfg.profile.steps
    if first > last:
        yield Problem("profile.steps", f"[{first}, {last}] is not in order; try profile.steps=[{last},{first}]")
    elif last >= cfg.steps:
        fix = (
            f"[{first}, {last}] is beyond the last update {cfg.steps - 1} of steps={cfg.steps}; lower it or raise steps"
        )
        yield Problem("profile.steps", fix, ("profile.steps", "steps"))


def stops_within(cfg: RunConfig) -> Iterator[Problem]:
    if cfg.stop_after is not None and cfg.stop_after > cfg.steps:
        fix = f"{cfg.stop_after} is more than steps={cfg.steps}; lower it or leave it out"
        yield Problem("stop_after", fix, ("stop_after", "steps"))


def starts_somewhere(cfg: RunConfig) -> Iterator[Problem]:
    if cfg.init_from_step is not None and cfg.init_from is None:
        yield Problem("init_from_step", "is a step of no run; give init_from=<run folder> too, or leave it out")


def frequency_needs_minimality(cfg: RunConfig) -> Iterator[Problem]:
    """Frequency is a function of minimality's f (SPEC L3)."""
    if cfg.loss.frequency is not None and cfg.loss.minimality is None:
        yield Problem(
            "loss.frequency",
            "needs loss.minimality, whose per-component means it reads; set loss.frequency=null too",
            ("loss.frequency", "loss.minimality"),
        )


def something_to_learn(cfg: RunConfig) -> Iterator[Problem]:
    if cfg.loss.faithfulness is None and not any(cfg.loss.recon.values()):
        yield Problem(
            "loss", "has neither faithfulness nor a recon term: nothing ties the components to the target; keep one"
        )


def gamma_stays_positive(cfg: RunConfig) -> Iterator[Problem]:
    """ci^2 / (ci^2 + gamma^2) is 0/0 at ci = gamma = 0 (SPEC L2)."""
    penalty = cfg.loss.minimality.penalty if cfg.loss.minimality else None
    if isinstance(penalty, schema.SmoothL0) and _lowest(penalty.gamma) <= 0:
        yield Problem("loss.minimality.penalty.gamma", "reaches 0; keep max and every frac above 0")


def _lowest(value: schema.Schedule) -> float:
    return value.max * min(k.frac for k in value.knots) if isinstance(value, schema.Curve) else value


def curves(cfg: RunConfig) -> Iterator[Problem]:
    """Knots run from t = 0 to t = 1 in order; a geometric segment has no end at 0 (SPEC T2)."""
    for path, curve in every_curve("", cfg):
        at = [k.at for k in curve.knots]
        if at != sorted(at) or len(set(at)) != len(at):
            yield Problem(f"{path}.knots", f"are at {at}; list them in rising order, each once")
        elif at[0] != 0.0 or (len(at) > 1 and at[-1] != 1.0):
            yield Problem(f"{path}.knots", f"run from {at[0]} to {at[-1]}; the first is at 0.0, the last at 1.0")
        for before, knot in zip(curve.knots, curve.knots[1:], strict=False):
            if knot.interp == "log" and min(before.frac, knot.frac) <= 0:
                fix = f"the log segment that ends at {knot.at} touches 0; use a frac above 0 or interp: linear"
                yield Problem(f"{path}.knots", fix)


def every_curve(path: str, value: object) -> Iterator[tuple[str, schema.Curve]]:
    """Every curve of the config with its dotted path."""
    if isinstance(value, schema.Curve):
        yield path, value
    elif isinstance(value, schema.Model):
        for name in type(value).model_fields:
            yield from every_curve(f"{path}.{name}".lstrip("."), getattr(value, name))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from every_curve(f"{path}.{name}", item)


def names(cfg: RunConfig) -> Iterator[Problem]:
    """Names become keys of metrics.jsonl and of the command line (case 42)."""
    mappings = (("loss.recon", cfg.loss.recon), ("optim", cfg.optim), ("eval.metrics", cfg.eval.metrics))
    for section, mapping in mappings:
        for name in mapping:
            if not NAME.fullmatch(name):
                yield Problem(f"{section}.{name}", "is no name; use letters, digits and _, a letter first")
    for name in cfg.loss.recon:
        if name in LOSS_NAMES:
            yield Problem(f"loss.recon.{name}", f"is the metric name of another loss; try loss.recon.{name}_recon")


def metric_names(cfg: RunConfig) -> Iterator[Problem]:
    """Two evaluation metrics never write one key (case 42); eval/ce_target is the target's own loss."""
    owner = {"ce_target": "the target's own loss"}
    for name, metric in cfg.eval.metrics.items():
        for key in _metric_keys(name, metric):
            if key in owner:
                yield Problem(f"eval.metrics.{name}", f"would write eval/{key}, as {owner[key]} does; use another name")
                break
            owner[key] = f"eval.metrics.{name}"


def _metric_keys(name: str, metric: schema.EvalMetric | None) -> tuple[str, ...]:
    """The keys a metric writes below eval/, sites left out."""
    match metric:
        case None:
            return ()
        case schema.EvalL0():
            return tuple(f"{name}_{what}" for what in ("mean", "per_rank_mean", "per_rank_max"))
        case _:
            return f"kl_{name}", f"ce_{name}"


def best_metric(cfg: RunConfig) -> Iterator[Problem]:
    """``checkpoint.keep_best`` names a metric that the run will write, as far as that is known without the target."""
    name = cfg.checkpoint.keep_best
    if name is None:
        return
    known = set(_judging(cfg))
    if name not in known and not any(name.startswith(f"{k}/") for k in _by_site(cfg)):
        best = fields.nearest(name, known)
        meant = f"did you mean {best}? " if best else ""
        fix = f"no metric of this run that tells good from bad; {meant}there are {', '.join(sorted(known))}"
        yield Problem("checkpoint.keep_best", f"{name}: {fix}", ("checkpoint.keep_best", "eval.metrics", "loss"))


def _judging(cfg: RunConfig) -> Iterator[str]:
    """Keys of metrics.jsonl that say how good a decomposition is, those of single sites left out."""
    loss = cfg.loss
    own = [n for n in ("faithfulness", "minimality", "frequency") if getattr(loss, n) is not None]
    terms = [*own, *(n for n, term in loss.recon.items() if term)]
    yield from ("loss/total", "l0/mean", "eval/ce_target")
    yield from (f"{kind}/{n}" for kind in ("loss", "weighted") for n in terms)
    yield from (f"eval/{key}" for n, metric in cfg.eval.metrics.items() for key in _metric_keys(n, metric))


def _by_site(cfg: RunConfig) -> Iterator[str]:
    """What a site's name may follow in a key."""
    yield "l0"
    yield from (f"eval/{n}" for n, metric in cfg.eval.metrics.items() if isinstance(metric, schema.EvalL0))


RULES: tuple[Rule, ...] = (
    attention_heads,
    microbatches,
    fresh_pgd_in_windows,
    sources_in_a_box,
    sources_site_by_site,
    profile_window,
    stops_within,
    starts_somewhere,
    frequency_needs_minimality,
    something_to_learn,
    gamma_stays_positive,
    curves,
    names,
    metric_names,
    best_metric,
)


def warnings(cfg: RunConfig) -> list[str]:
    """What is allowed but said aloud, one line each."""
    return [*_reference_count(cfg), *_checkpoint_gap(cfg), *_best_gap(cfg)]


def _reference_count(cfg: RunConfig) -> Iterator[str]:
    """Case 8: a reference count that follows another batch scales the frequency term without a word."""
    frequency, positions = cfg.loss.frequency, cfg.data.batch_size * cfg.data.seq_len
    if frequency and frequency.reference_count is not None and frequency.reference_count != positions:
        yield (
            f"loss.frequency.reference_count={frequency.reference_count:g} is not batch x length = {positions}; "
            "set it to null to follow the batch"
        )


def _checkpoint_gap(cfg: RunConfig) -> Iterator[str]:
    if cfg.checkpoint.keep_every is not None and cfg.checkpoint.keep_every % cfg.checkpoint.every:
        yield (
            f"checkpoint.keep_every={cfg.checkpoint.keep_every} is no multiple of checkpoint.every="
            f"{cfg.checkpoint.every}: only updates that are multiples of both are kept for good"
        )


def _best_gap(cfg: RunConfig) -> Iterator[str]:
    """A checkpoint is judged by a metric of its own step, or not at all."""
    name, every = cfg.checkpoint.keep_best, cfg.checkpoint.every
    if name is None:
        return
    key = "eval.every" if name.startswith("eval/") else "logger.every"
    period = cfg.eval.every if key == "eval.every" else cfg.logger.every
    if every % period:
        yield (
            f"checkpoint.keep_best={name} is known every {key}={period} updates and checkpoint.every={every}: "
            "only checkpoints at multiples of both can be the best"
        )
