"""Which site a tensor of another layout belongs to, and the ``sites`` config that says what was found (SPEC F6).

A factor's name is ``[<anything>.][_]components.<site>.V`` (or ``.U``), or ``<site>.V`` alone. Site names are the
target's own; ``-`` and ``/`` stand for ``.`` (PyTorch allows no dot in a module's name), and the short forms of other
code bases are known: ``h.0.attn.q_proj`` and ``layers.0.self_attn.q_proj`` are ``model.layers.0.self_attn.q_proj``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from decomp.config.errors import UserError
from decomp.config.fields import nearest
from decomp.config.schema import Sites
from decomp.sites import Matrix

FACTORS = ("V", "U")
Shape = tuple[int, ...]
Factor = tuple[str, str]  # (site, "V" or "U")

_FACTOR = re.compile(r"(?:(?:.*\.)?_?components\.)?(?P<site>.+)\.(?P<factor>[VU])")
_BLOCK = re.compile(r"(?:model\.|transformer\.|model\.transformer\.)?(?:layers|h|blocks)\.(?=\d+\.)")


def factors_of(names: Iterable[str], matrices: Sequence[Matrix], src: str) -> dict[Factor, str]:
    """(site, factor) -> tensor name, of every name that is a factor's; other tensors are passed over.

    Raises UserError, a line each, for a site that the target does not have, a factor that stands there twice, and a
    partner that is missing; and where there is no factor at all.
    """
    known = {_plain(m.name): m.name for m in matrices}
    out: dict[Factor, str] = {}
    wrong = []
    for name in sorted(names):
        match = _FACTOR.fullmatch(name)
        if match is None:
            continue
        site = known.get(_plain(match["site"]))
        if site is None:
            close = nearest(_plain(match["site"]), known) or matrices[0].name
            wrong.append(f"{name}: {match['site']} is no matrix of the target; a name there is {close}")
        elif (site, match["factor"]) in out:
            wrong.append(f"{name}: is {site}.{match['factor']} once more, after {out[site, match['factor']]}")
        else:
            out[site, match["factor"]] = name
    for site in dict.fromkeys(site for site, _ in out):
        wrong += [f"{site}: has no {f}; a site needs both V and U" for f in FACTORS if (site, f) not in out]
    if not out and not wrong:
        raise UserError(f"src={src}: holds no factors; each site has two tensors, <site>.V and <site>.U")
    _refuse(src, wrong)
    return out


def _plain(name: str) -> str:
    """One spelling for all spellings of a matrix."""
    text = re.sub("[-/]", ".", name)
    text = _BLOCK.sub("model.layers.", text, count=1) if _BLOCK.match(text) else text
    return text.replace(".attn.", ".self_attn.")


def components_of(factors: Mapping[Factor, Shape], matrices: Sequence[Matrix], src: str) -> dict[str, int]:
    """Site -> C from the shapes of its V [d_in, C] and U [C, d_out]. UserError, a line per site, for others."""
    out, wrong = {}, []
    for m in matrices:
        if (m.name, "V") not in factors:
            continue
        v, u = (factors[m.name, f] for f in FACTORS)
        C = v[-1] if v else 0
        if v == (m.d_in, C) and u == (C, m.d_out) and C > 0:
            out[m.name] = C
        else:
            wrong.append(
                f"{m.name}: has V {list(v)} and U {list(u)}; the target's matrix needs [{m.d_in}, C], [C, {m.d_out}]"
            )
    _refuse(src, wrong)
    return out


def sites_config(C: Mapping[str, int], matrices: Sequence[Matrix], src: str) -> Sites:
    """``sites`` as layers x kinds with C per kind: what the configuration can say.

    Raises UserError for a selection that is no such product, and for a kind whose C differs between layers.
    """
    chosen = [m for m in matrices if m.name in C]
    layers = sorted({m.layer for m in chosen})
    kinds = [k for k in dict.fromkeys(m.kind for m in matrices) if any(m.kind == k for m in chosen)]
    absent = [m.name for m in matrices if m.layer in layers and m.kind in kinds and m.name not in C]
    if absent:
        raise UserError(
            f"src={src}: sites are chosen as layers x kinds, and {absent[0]} is not there while others of its layer "
            f"and of its kind are ({len(absent)} such): migrate a source that has them, or one without that kind"
        )
    per_kind: dict[str, int] = {}
    for m in chosen:
        first = per_kind.setdefault(m.kind, C[m.name])
        if first != C[m.name]:
            raise UserError(
                f"src={src}: C of {m.kind} is {first} in layer {layers[0]} and {C[m.name]} in layer {m.layer}: a kind "
                "has one C in all layers (sites.C); pad V and U of the smaller ones with zeros, which changes no output"
            )
    return Sites(
        layers="all" if layers == list(range(1 + max(m.layer for m in matrices))) else tuple(layers),
        kinds="all" if len(kinds) == len({m.kind for m in matrices}) else tuple(kinds),
        C=per_kind,
    )


def _refuse(src: str, wrong: Sequence[str]) -> None:
    if wrong:
        more = [f"src={src}: and {len(wrong) - 5} more"] if len(wrong) > 5 else []
        raise UserError("\n".join([*(f"src={src}: {line}" for line in wrong[:5]), *more]))
