"""Meshes by name, for verbs that take several."""

from __future__ import annotations

import re

from decomp.config import schema
from decomp.config.compose import conf_dir, group_options
from decomp.config.errors import UserError
from decomp.config.load import read_yaml

Shape = tuple[int, int, int]
WRITTEN = re.compile(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)")


def named_mesh(name: str) -> Shape:
    """(replicate, fsdp, tp) of ``4x8x1`` or of an option of conf/mesh. Raises UserError for what is neither."""
    if match := WRITTEN.fullmatch(name):
        return int(match[1]), int(match[2]), int(match[3])
    if name not in group_options()["mesh"]:
        raise UserError(f"meshes={name}: is no replicate x fsdp x tp; write it as 4x8x1, or name an option of mesh")
    return shape_of(schema.Mesh(**read_yaml(conf_dir() / "mesh" / f"{name}.yaml")))


def shape_of(cfg: schema.Mesh) -> Shape:
    """Raises UserError for ``auto``, which only the devices at hand could tell."""
    if cfg.auto:
        raise UserError("mesh=auto: stands for the devices that are found; name a mesh, such as dp8 or 1x8x1")
    return cfg.replicate, cfg.fsdp, cfg.tp
