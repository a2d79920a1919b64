"""``decomp plan``: what a step needs and costs on a mesh, from shapes alone, on a laptop."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decomp.config.compose import Command
from decomp.config.errors import UserError
from decomp.config.schema import RunConfig
from decomp.verbs.meshes import Shape, named_mesh, shape_of

MAX_DEVICES = 1024


def main(command: Command) -> int:
    """Prints a page for one mesh, a row each for several. 0 whatever the verdict: it is an answer, not a failure."""
    cfg, options = command.config(), command.options
    shapes = meshes(cfg, options["meshes"])
    remedy = options["remedy"] and len(shapes) == 1
    from decomp.plan import backend, device  # imports no jax

    chosen, compiler = device.find(str(options["device"])), backend.choose(str(options["backend"]))
    out = None if options["out"] is None else _page_to_be(str(options["out"]))
    # a remedy may take twice the nodes
    backend.prepare_environment(compiler, max(map(math.prod, shapes.values())) * (2 if remedy else 1))
    lines = list(_plan(cfg, shapes, compiler, chosen, remedy))
    if out is not None:
        out.write_text(_page(command, compiler, lines))
    return 0


def meshes(cfg: RunConfig, names: Any) -> dict[str, Shape]:
    """The meshes to plan for, by name: those listed, or the configured one. Raises UserError for what is none."""
    if names is None:
        shape = shape_of(cfg.mesh)
        found = {"x".join(map(str, shape)): shape}
    else:
        found = {name: named_mesh(name) for name in (n.strip() for n in str(names).split(",")) if name}
    if not found:
        raise UserError("meshes=: is empty; name some, such as meshes=dp32,dp64")
    for name, shape in found.items():
        if math.prod(shape) > MAX_DEVICES:
            what = "mesh" if names is None else "meshes"
            raise UserError(f"{what}={name}: {math.prod(shape)} devices; plan takes at most {MAX_DEVICES}")
    return found


def _page_to_be(text: str) -> Path:
    """Raises UserError now for a page that could not be written in some minutes."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise UserError(f"out={text}: {error.strerror}; give a file that can be written, such as plan.md") from None
    return path


def _plan(cfg: RunConfig, shapes: dict[str, Shape], compiler: Any, chosen: Any, remedy: bool) -> Iterator[str]:
    """Every line of the answer, printed as it is known."""
    import jax

    from decomp.build import known_shape, target_folder
    from decomp.plan import remedies, report
    from decomp.plan.planner import Planner
    from decomp.plan.program import planned
    from decomp.target import pretrained

    target = known_shape(cfg.target) or pretrained.read_shape(target_folder(cfg.target))
    planner, cfg = Planner(compiler, chosen, target, _progress), planned(cfg)
    planner.check(cfg, shapes)
    if len(shapes) > 1:
        yield from _said(report.columns(report.HEADINGS))
    for name, shape in shapes.items():
        found = planner.plan(name, cfg, shape)
        yield from _said(report.page(name, found) if len(shapes) == 1 else report.columns(report.row(name, found)))
        if remedy and found.verdict != "FITS":
            for line in remedies.search(found, planner):
                yield from _said(line)
        jax.clear_caches()  # a program of hundreds of MiB, not wanted again


def _said(text: str) -> list[str]:
    print(text, flush=True)
    return text.splitlines()


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _page(command: Command, compiler: str, lines: list[str]) -> str:
    texts = [text for text in command.texts if not text.startswith("out=")]
    program = "the program of the GPU's own compiler" if compiler == "gpu" else "the program of simulated CPU devices"
    return (
        f"# {shlex.join(['decomp', 'plan', *texts])}\n\nWritten by this command with `out=`: read from {program}, "
        "which was compiled and not run; times are predictions.\n\n```\n" + "\n".join(lines) + "\n```\n"
    )
