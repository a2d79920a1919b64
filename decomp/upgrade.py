"""Stored runs of older formats, brought to the present one by meaning (SPEC K2, case 27). Imports no jax.

``FORMAT`` of manifest.py counts the formats of a run folder: config.yaml, manifest, and names of arrays. Whoever raises
it adds ``UPGRADES[old]`` here and a run folder of the old format to tests/formats/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from decomp import manifest
from decomp.config.errors import UserError

Path = tuple[str, ...]


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Upgrade:
    """From one format to the next; what is not given stays as it was. Values in, new values out: none is changed.

    Attributes:
      config: the plain dict of config.yaml.
      identity: the manifest's identity (site table, hashes).
      leaf: the path of an array, item first: ("decomposition", "components", <group>, "V").
    """

    config: Callable[[dict[str, Any]], dict[str, Any]] = _same
    identity: Callable[[dict[str, Any]], dict[str, Any]] = _same
    leaf: Callable[[Path], Path] = _same


UPGRADES: dict[int, Upgrade] = {}
"""Format -> the way to the next one. Complete: one for every format below ``manifest.FORMAT``."""


def steps_from(version: int, what: str, table: Mapping[int, Upgrade] | None = None) -> list[Upgrade]:
    """The upgrades from ``version`` to the present format, in order.

    Raises UserError for a newer format than this version knows, naming ``what``.
    """
    table = UPGRADES if table is None else table
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= manifest.FORMAT:
        raise UserError(manifest.newer(what, version))
    return [table[v] for v in range(version, manifest.FORMAT)]


def config(data: dict[str, Any], what: str) -> dict[str, Any]:
    """A stored config.yaml as this version has it. ``format`` is taken out; a file without it is of format 1."""
    data = dict(data)
    for upgrade in steps_from(data.pop("format", 1), what):
        data = upgrade.config(data)
    return data


def identity(stored: dict[str, Any], version: int, what: str) -> dict[str, Any]:
    for upgrade in steps_from(version, what):
        stored = upgrade.identity(stored)
    return stored


def leaf(path: Path, version: int, what: str) -> Path:
    for upgrade in steps_from(version, what):
        path = upgrade.leaf(path)
    return path
