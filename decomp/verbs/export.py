"""``decomp export run=...``: V and U of every site as safetensors, with a page that says how to use them."""

from __future__ import annotations

import os
from pathlib import Path

from decomp import mesh
from decomp.config.compose import Command
from decomp.config.errors import UserError
from decomp.verbs.values import positive, whole

FORMATS = ("safetensors",)


def main(command: Command) -> int:
    """Returns the exit code; needs no accelerator and no target. A run that is still training may be exported.

    Raises UserError for a folder that is no run, a step that is not whole, an ``out`` that exists, no space.
    """
    if command.overrides:
        raise UserError(f"{command.overrides[0]}: export takes run, step, out, format and shard_gb only")
    options = command.options
    if options["format"] not in FORMATS:
        raise UserError(f"format={options['format']}: no such format; there is {', '.join(FORMATS)}")
    step, limit = whole("step", options["step"]), max(1, int(positive("shard_gb", options["shard_gb"]) * 1e9))
    mesh.return_heap()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from decomp.exchange import export
    from decomp.folder import open_folder

    found = export.find(open_folder(options["run"]), step)
    out = found.folder / "export" / str(found.step) if options["out"] is None else Path(str(options["out"]))
    out = out.expanduser().absolute()
    for line in export.write(found, out, limit):
        print(line)
    return 0
