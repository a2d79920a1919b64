"""What Python users call: a run's decomposition as arrays, without optimizer, target or accelerator (SPEC K1)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from decomp.checkpoint import restore_decomposition
from decomp.config.errors import UserError
from decomp.config.schema import RunConfig
from decomp.folder import open_folder, read_config


@dataclass(frozen=True)
class OpenRun:
    """The decomposition of one checkpoint. ``arrays`` is {components: {group: {V, U}}, ci_fn: ...} as stored.

    ``origin`` is None for a checkpoint of training; of a migrated one it is {src, layout}.
    """

    folder: Path
    step: int
    config: RunConfig
    table: dict[str, dict[str, Any]]
    arrays: dict[str, Any]
    origin: dict[str, str] | None = None

    @property
    def sites(self) -> tuple[str, ...]:
        """The decomposed matrices by their tensor path."""
        return tuple(self.table)

    def V(self, site: str) -> Float[np.ndarray, "d_in C"]:
        """The site's input directions, one column per component."""
        return self._factor(site, "V")

    def U(self, site: str) -> Float[np.ndarray, "C d_out"]:
        """The site's output directions, one row per component."""
        return self._factor(site, "U")

    @property
    def ci_fn(self) -> dict[str, Any]:
        """The CI function's arrays. UserError where there is none: other layouts hold components alone."""
        if "ci_fn" not in self.arrays:
            src = self.origin["src"] if self.origin else "elsewhere"
            raise UserError(f"{self.folder}: has no CI function: its components come from {src}, which has none")
        return self.arrays["ci_fn"]

    def _factor(self, site: str, factor: str) -> np.ndarray:
        if site not in self.table:
            raise UserError(f"{site!r} is not a site of {self.folder}; its first is {self.sites[0]!r}")
        row = self.table[site]
        return self.arrays["components"][row["group"]][factor][row["slot"]]


def open_run(path: str | Path, step: int | None = None) -> OpenRun:
    """The decomposition of a run folder, at its newest whole checkpoint or at ``step``.

    Reads the decomposition's own bytes and no others. UserError where the folder is no run or has no whole checkpoint.
    """
    folder = open_folder(path)
    found, arrays, manifest = restore_decomposition(folder, step)
    return OpenRun(folder, found, read_config(folder), manifest["identity"]["sites"], arrays, manifest.get("origin"))
