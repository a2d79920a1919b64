"""From two tensors per site to a run folder with stacks (SPEC K5)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from decomp import build, manifest
from decomp.checkpoint import human
from decomp.config import load
from decomp.config.errors import UserError
from decomp.config.schema import RunConfig, Sites
from decomp.exchange import names, staging
from decomp.exchange.names import FACTORS, Factor
from decomp.exchange.sources import Source, fingerprint
from decomp.folder import record_launch, write_config
from decomp.manifest import differences
from decomp.sites import Group, SiteTable
from decomp.target import pretrained
from decomp.target.shape import LlamaShape


def job(cfg: RunConfig, source: Source, step: int, overrides: tuple[str, ...]) -> staging.Job:
    """Sites, kinds, layers and C from the tensors of ``source``, checked against the target of ``cfg``.

    The checkpoint holds ``components`` and no CI function, as the source does; ``cfg.sites`` is replaced by what was
    found, unless sites were typed and differ: then UserError, as for every tensor that does not fit the target.
    """
    folder = build.target_folder(cfg.target)
    shape = build.known_shape(cfg.target) or pretrained.read_shape(folder)
    found = names.factors_of(source.specs, shape.matrices(), str(source.path))
    shapes = {factor: source.specs[name][0] for factor, name in found.items()}
    C = names.components_of(shapes, shape.matrices(), str(source.path))
    sites = names.sites_config(C, shape.matrices(), str(source.path))
    cfg = _chosen(cfg, sites, C, shape, overrides)
    table, dtype = build.site_table(cfg, shape), _master_dtype(cfg, source, found)
    arrays = tuple(_stack(source, found, g, factor, dtype) for g in table.groups.values() for factor in FACTORS)
    target = pretrained.content_hash(folder)
    record = {
        "src": str(source.path), "layout": source.layout, "files": fingerprint(source.path), "format": manifest.FORMAT,
        "step": step, "target": target, "config": load.to_dict(cfg),
    }  # fmt: skip

    def fill(folder: Path) -> None:
        for name in ("figures", "logs"):
            (folder / name).mkdir(exist_ok=True)
        write_config(folder, cfg)
        if not (folder / "overrides.txt").exists():
            record_launch(folder, "migrate", overrides)

    identity = {"sites": table.to_json(), "target": target, "data": None}
    return staging.Job(step, arrays, identity, record, fill, _told(source, found, table, sites, arrays))


def _chosen(
    cfg: RunConfig, sites: Sites, C: dict[str, int], shape: LlamaShape, overrides: tuple[str, ...]
) -> RunConfig:
    """The config with the sites that were found. UserError where others were typed."""
    if any(text.lstrip("+~").startswith("sites") for text in overrides):
        typed = {s.name: s.C for s in build.site_table(cfg, shape).sites}
        for line in differences(C, typed):
            raise UserError(f"sites: {line.replace('in the checkpoint', 'in the source')}: leave sites out, or mend it")
    return cfg.model_copy(update={"sites": sites})


def _master_dtype(cfg: RunConfig, source: Source, found: dict[Factor, str]) -> np.dtype:
    """What masters rest in (SPEC P1). A wider source would lose bits, and is refused."""
    dtype = np.dtype(np.float64 if cfg.precision.kind == "fp64" else np.float32)
    wider = [name for name in found.values() if source.specs[name][1].itemsize > dtype.itemsize]
    if wider:
        raise UserError(
            f"src={source.path}: {wider[0]} is {source.specs[wider[0]][1]}, and masters are {dtype}: give "
            "precision=fp64, or a source in float32"
        )
    return dtype


def _stack(source: Source, found: dict[Factor, str], g: Group, factor: str, dtype: np.dtype) -> staging.Array:
    shape = (g.d_in, g.C) if factor == "V" else (g.C, g.d_out)
    parts = partial(_slots, source, [found[site.name, factor] for site in g.sites], dtype)
    return staging.Array(("decomposition", "components", g.name, factor), (len(g.sites), *shape), dtype, parts)


def _slots(source: Source, tensors: list[str], dtype: np.dtype) -> staging.Parts:
    for slot, name in enumerate(tensors):
        yield slot, source.read(name).astype(dtype, copy=False)


def _told(
    source: Source, found: dict[Factor, str], table: SiteTable, sites: Sites, arrays: tuple[staging.Array, ...]
) -> tuple[str, ...]:
    others = len(source.specs) - len(found)
    return (
        f"source: {source.path} ({source.layout}), {len(found)} factors"
        + (f"; {others} other tensors are passed over" if others else ""),
        *table.describe().splitlines(),
        f"sites: layers {sites.layers}, kinds {sites.kinds}, C {sites.C}".replace("'", ""),
        *(f"array: {a.label}" for a in arrays),
        f"in all: {human(sum(a.nbytes for a in arrays))}; components alone: no CI function, no progress",
    )
