"""FLOPs that one step needs, each needed product counted once, over all devices.

Counted: forwards, gradients by inputs and by weights, faithfulness, Newton-Schulz. Not counted: what is computed again
(rematerialisation, the clean logits of every further term), and everything that is no matrix product. Attention counts
all T x T scores, as they are computed.
"""

from __future__ import annotations

from collections.abc import Iterator

from decomp.config.schema import ComponentMlp, FreshPgdSource, Muon, Recon, RoutePerSite
from decomp.loss import adversary
from decomp.sites import Matrix
from decomp.step import Step

# Order within a block: a later product's gradient passes through it to an earlier site.
RANK = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 2, "up_proj": 2, "c_fc": 2, "down_proj": 3}


def useful(step: Step) -> dict[str, float]:
    """FLOPs by part of the step."""
    tokens = step.model.n_positions
    out = {
        "clean forward": tokens * clean_forward(step),
        "CI function": tokens * ci_function(step),
        "faithfulness": faithfulness(step),
        "Newton-Schulz": newton_schulz(step),
    }
    for name, term in step.terms.items():
        ascents, backwards = passes(term)
        backwards *= len(step.model.table.sites) if isinstance(term.routing, RoutePerSite) else 1
        forward, by_input, by_factor = masked_parts(step)
        again = (ascents + backwards) * (forward + by_input)
        out[f"recon {name}"] = tokens * (again + backwards * by_factor)
    return out


def passes(term: Recon) -> tuple[int, int]:
    """(gradients by sources alone, gradients by everything) of one term in one step."""
    ascents = term.draws * term.source.steps if isinstance(term.source, FreshPgdSource) else 0
    if (source := adversary.persistent_of(term)) is not None:
        ascents += source.num_warmup_steps
    return ascents, term.draws


def clean_forward(step: Step) -> float:
    """Per token, with the clean logits."""
    shape = step.model.llama.shape
    matrices = sum(2.0 * m.d_in * m.d_out for m in shape.matrices())
    return matrices + shape.n_layers * attention_scores(step) + head(step)


def attention_scores(step: Step) -> float:
    """Scores and their use, per token and layer."""
    shape = step.model.llama.shape
    return 4.0 * step.cfg.data.seq_len * shape.n_heads * shape.head_dim


def head(step: Step) -> float:
    shape = step.model.llama.shape
    return 2.0 * shape.d_model * shape.vocab


def masked_parts(step: Step) -> tuple[float, float, float]:
    """Per token of one masked pass: forward with logits, gradients by inputs, gradients by V and U."""
    forward = by_input = head(step)
    by_factor = 0.0
    delta = step.loss.delta
    for m in executed_matrices(step):
        site = step.model.table.by_name.get(m.name)
        factors = 2.0 * site.C * (m.d_in + m.d_out) if site else 0.0
        frozen = 2.0 * m.d_in * m.d_out if delta or not site else 0.0
        forward += factors + frozen
        by_factor += factors
        if reaches_a_site(step, m):
            by_input += factors + frozen
        elif site:
            by_input += 2.0 * site.C * m.d_out  # from the output to the mask alone
    layers = [m for m in executed_matrices(step) if m.kind == "o_proj"]
    scores = attention_scores(step)
    return (
        forward + len(layers) * scores,
        by_input + 2 * scores * sum(reaches_a_site(step, m) for m in layers),
        by_factor,
    )


def executed_matrices(step: Step) -> Iterator[Matrix]:
    """Those of a masked forward: from the first chosen layer on (SPEC F7)."""
    table = step.model.table
    first = min(s.matrix.layer for s in table.sites)
    yield from (m for m in table.matrices if m.layer >= first)


def reaches_a_site(step: Step, m: Matrix) -> bool:
    """Whether a chosen matrix lies before ``m``, so that the gradient has to pass through ``m`` to its input."""
    place = lambda x: (x.layer, RANK[x.kind])  # noqa: E731
    return any(place(s.matrix) < place(m) for s in step.model.table.sites)


def ci_function(step: Step) -> float:
    """Per token: forward, by inputs and by weights; the taps need no gradient."""
    if isinstance(cfg := step.cfg.ci_fn, ComponentMlp):  # x V and its gradient by V; two vectors a component
        return sum(4.0 * s.matrix.d_in * s.C + 12.0 * s.C * cfg.d_gate for s in step.model.table.sites)
    total = 0.0
    for leaves in step.leaves.decomposition["ci_fn"].values():
        matrices = {k: v for k, v in leaves.items() if not isinstance(v, dict) and len(v.shape) == 3}
        matrices |= leaves["heads"]
        for name, leaf in matrices.items():
            n, d_in, d_out = leaf.shape
            total += (2 if name == "w_in" else 3) * 2.0 * n * d_in * d_out
        blocks, d = leaves["q"].shape[0], leaves["q"].shape[2]
        total += 3 * blocks * 4.0 * step.cfg.data.seq_len * d
    return total


def faithfulness(step: Step) -> float:
    """V U of every site, its gradients by V and by U."""
    if step.loss.faithfulness is None:
        return 0.0
    return sum(3 * 2.0 * s.matrix.d_in * s.matrix.d_out * s.C for s in step.model.table.sites)


def newton_schulz(step: Step) -> float:
    """Three products an iteration, on the shorter side's Gram matrix."""
    total = 0.0
    for name, group in step.groups.group.items():
        cfg = step.groups.cfg[group]
        if isinstance(cfg, Muon) and step.groups.rule(name) == "muon":
            n, *matrix = step.groups.leaves[name].shape
            a, b = sorted(matrix)
            total += cfg.ns_steps * n * (4.0 * a * a * b + 2.0 * a**3)
    return total
