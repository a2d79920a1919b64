"""``decomp migrate src=... dst=...``: another layout or an older format as a run folder (SPEC K5, case 27)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from decomp import mesh
from decomp.config.compose import Command
from decomp.config.errors import UserError
from decomp.folder import CONFIG
from decomp.verbs.values import flag, whole


def main(command: Command) -> int:
    """Returns the exit code; needs no accelerator. The source is only read; ``dst`` appears whole and verified.

    Raises UserError for a source that is none or does not fit the target, a ``dst`` that holds anything, no space.
    """
    options = command.options
    src, dst = _paths(options)
    step, dry = whole("step", options["step"]), flag("dry_run", options["dry_run"])
    mesh.return_heap()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # arrays go from disk to disk
    from decomp.exchange import staging

    job = _job(command, src, str(options["src"]), step)
    for line in job.told:
        print(line)
    if staging.occupied(dst, job.stored_record):
        print(f"{dst}: holds this migration already, whole and verified")
        return 0
    if dry:
        print(f"dry_run=true: {dst} would be written, step {job.step}; nothing is")
        return 0
    staging.carry_out(job, dst)
    print(f"{dst}: {len(job.arrays)} arrays, each read back from both sides, bit for bit the same")
    return 0


def _job(command: Command, src: Path, text: str, step: int | None) -> Any:
    if (src / CONFIG).is_file():
        if command.overrides:
            raise UserError(
                f"{command.overrides[0]}: a run folder brings its own config: migrate it as it is, and change values "
                "with resume or init_from"
            )
        from decomp.exchange import formats

        return formats.job(src, step)
    cfg = command.config()
    from decomp.exchange import factors, sources

    return factors.job(cfg, sources.open_source(text), step or 0, command.overrides)


def _paths(options: dict[str, Any]) -> tuple[Path, Path]:
    src, dst = (Path(str(options[name])).expanduser().absolute() for name in ("src", "dst"))
    if src.is_dir() and dst.resolve().is_relative_to(src.resolve()):
        raise UserError(f"dst={options['dst']}: lies inside src, where nothing is written: give another folder")
    return src, dst
