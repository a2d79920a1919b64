"""``decomp invariance``: proves that mesh and placement change nothing (SPEC D8), on simulated devices."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from decomp import aligned, mesh
from decomp.config import fields
from decomp.config.compose import Command, group_options
from decomp.config.errors import UserError
from decomp.config.schema import RunConfig
from decomp.verbs.meshes import Shape, named_mesh

MAX_DEVICES = 8
COLUMNS = (
    "precision", "optim", "placement", "mesh", "devices", "worst loss", "worst stack", "result", "seconds",
)  # fmt: skip
WIDTHS = (9, 16, 10, 10, 7, 10, 11, 12, 7)

# A short list in which every mesh, placement, optimizer and precision of the defaults occurs, for CI.
COVER = (
    ("fp32", "adamw", "owner", "2x2x1"),
    ("fp64", "adamw", "zero1", "2x4x1"),
    ("fp64", "adamw", "owner", "2x2x2"),
    ("fp64", "muon", "owner", "4x2x1"),
    ("fp64", "muon", "owner", "8x1x1"),
    ("fp64", "muon", "zero1", "2x1x1"),
    ("fp64", "muon", "replicated", "1x8x1"),
)


class Choice(NamedTuple):
    """One row of the table."""

    precision: str
    optim: str
    placement: str
    mesh: str


def main(command: Command) -> int:
    """0 if every case is within SPEC D8's tolerances, 1 otherwise."""
    choices = chosen(command)
    configs = {c: config_of(command, c) for c in choices}
    shapes = {c: mesh_shape(c.mesh) for c in choices}
    _prepare_environment(max(map(math.prod, shapes.values())))
    from decomp.invariance import tiny_config

    updates = command.options["updates"]
    typed = restricted(command, "placement")
    tiny = {
        c: tiny_config(cfg, precision=c.precision, placement=None if typed else c.placement, updates=updates)
        for c, cfg in configs.items()
    }
    _check(tiny, shapes)
    return _run(tiny, shapes)


# ---------------------------------------------------------------- which cases
def chosen(command: Command) -> list[Choice]:
    """The rows in the order they run: one precision and optimizer after the other. Raises UserError for what is no
    mesh, placement, optimizer or precision."""
    options = command.options
    if options["cases"] not in ("all", "cover"):
        raise UserError(f"cases={options['cases']}: no such choice; {fields.hint(options['cases'], ['all', 'cover'])}")
    if not isinstance(options["updates"], int) or options["updates"] < 2:
        raise UserError(f"updates={options['updates']}: must be a whole number of at least 2")
    lists = [_values(command, group) for group in ("precision", "optim", "placement", "mesh")]
    everything = [Choice(*values) for values in product(*lists)]
    if options["cases"] == "all":
        return everything
    cover = [c for c in map(Choice._make, COVER) if c in everything]
    if not cover:
        raise UserError("cases=cover: holds none of what was typed; leave cases=cover out")
    return cover


def _values(command: Command, group: str) -> list[str]:
    """The values of one column: what was typed for the group itself, or the verb's own list."""
    if restricted(command, group):
        cfg = command.config()
        shape = "x".join(str(n) for n in (cfg.mesh.replicate, cfg.mesh.fsdp, cfg.mesh.tp))
        typed = {"mesh": shape, "placement": cfg.placement.components, "precision": cfg.precision.kind}
        name = typed.get(group) or _option_typed(command, group)
        return [_known(group, name)]
    listed = [v.strip() for v in str(command.options[_plural(group)]).split(",") if v.strip()]
    if not listed:
        raise UserError(
            f"{_plural(group)}=: is empty; name at least one, such as {_plural(group)}={_known_ones(group)[0]}"
        )
    return [_known(group, v) for v in listed]


def _plural(group: str) -> str:
    return "meshes" if group == "mesh" else f"{group}s"


def restricted(command: Command, group: str) -> bool:
    """Whether a value of the group was typed as for a run: ``mesh=dp8``, ``optim.components.lr=1e-3``."""
    return any(re.match(rf"[+~]*{group}[.=]", text) for text in command.overrides)


def _option_typed(command: Command, group: str) -> str:
    found = [text.partition("=")[2] for text in command.overrides if text.startswith(f"{group}=")]
    return found[-1] if found else "adamw"


def _known_ones(group: str) -> list[str]:
    if group == "placement":
        return ["owner", "zero1", "replicated"]
    return ["fp32", "fp64"] if group == "precision" else list(group_options()[group])


def _known(group: str, name: str) -> str:
    """``name`` if there is such a value. Raises UserError with the nearest one."""
    if group == "mesh":
        mesh_shape(name)
    elif group == "precision" and name not in _known_ones(group):
        raise UserError(
            f"precision={name}: SPEC D8 gives tolerances for fp32 and fp64; leave precision out or take one"
        )
    elif name not in _known_ones(group):
        raise UserError(f"{_plural(group)}={name}: no such {group}; {fields.hint(name, _known_ones(group))}")
    return name


def mesh_shape(name: str) -> Shape:
    """(replicate, fsdp, tp). Raises UserError for more devices than are simulated to run."""
    shape = named_mesh(name)
    if math.prod(shape) > MAX_DEVICES:
        raise UserError(
            f"meshes={name}: {math.prod(shape)} devices; at most {MAX_DEVICES} are simulated, such as 2x2x2"
        )
    return shape


def config_of(command: Command, choice: Choice) -> RunConfig:
    """The composed config with the row's optimizer; mesh, placement and precision are set later."""
    if restricted(command, "optim"):
        return command.config()
    return Command(command.verb, (*command.texts, f"optim={choice.optim}"), command.config_dirs).config()


# ---------------------------------------------------------------- running them
def _prepare_environment(devices: int) -> None:
    """Simulated devices, and compiling for seconds instead of minutes: code quality does not matter here."""
    mesh.prepare_simulated(devices, {"xla_backend_optimization_level": "0"})


def _check(tiny: dict[Choice, RunConfig], shapes: dict[Choice, Any]) -> None:
    """Builds every case from shapes before the first one runs, so that a mesh that does not divide is said at once."""
    from decomp.invariance import make_step

    for choice, cfg in tiny.items():
        try:
            make_step(cfg, shapes[choice])
        except UserError as error:
            raise UserError(f"meshes={choice.mesh} placements={choice.placement}: {error}") from None


def _run(tiny: dict[Choice, RunConfig], shapes: dict[Choice, Any]) -> int:
    print(f"one device against {len(tiny)} cases, {next(iter(tiny.values())).steps} updates each")
    print(_row(COLUMNS))
    failed = 0
    for (precision, name), group in _by_reference(tiny):
        for cells, ok in _group(precision, name, {c: tiny[c] for c in group}, shapes):
            print(_row(cells), flush=True)
            failed += not ok
    print(f"{failed} of {len(tiny)} cases are above the tolerance" if failed else "all within the tolerance")
    return 1 if failed else 0


def _by_reference(tiny: dict[Choice, RunConfig]) -> Iterator[tuple[tuple[str, str], list[Choice]]]:
    keys = dict.fromkeys((c.precision, c.optim) for c in tiny)
    yield from ((key, [c for c in tiny if (c.precision, c.optim) == key]) for key in keys)


def _group(
    precision: str, name: str, tiny: dict[Choice, RunConfig], shapes: Any
) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Table rows of the cases that share one reference; a layout that another placement gives too runs once."""
    from decomp import invariance as inv

    began = time.monotonic()
    single = inv.make_case(next(iter(tiny.values())), (1, 1, 1))
    ref = inv.reference(single)
    yield _cells(precision, name, "any", "1x1x1", 1, None, "reference", began), True
    done: dict[Any, tuple[inv.Result, str]] = {}
    for c, cfg in tiny.items():
        began = time.monotonic()
        case = inv.make_case(cfg, shapes[c])
        key, said = (shapes[c], case.layout), ""
        if key in done:
            said = f"as {done[key][1]}"
        else:
            done[key] = inv.compare(case, ref), c.placement
        result = done[key][0]
        ok = result.ok(precision)
        verdict = (
            (said or "ok") if ok else f"ABOVE {inv.TOLERANCE[precision]}: {result.loss.where}; {result.stack.where}"
        )
        yield _cells(precision, name, c.placement, c.mesh, math.prod(shapes[c]), result, verdict, began), ok


def _cells(
    precision: str, name: str, placement: str, mesh_name: str, n: int, result: Any, verdict: str, began: float
) -> tuple[str, ...]:
    sizes = ("-", "-") if result is None else (f"{result.loss.size:.1e}", f"{result.stack.size:.1e}")
    return precision, name, placement, mesh_name, str(n), *sizes, verdict, f"{time.monotonic() - began:.0f}"


def _row(cells: tuple[str, ...]) -> str:
    return aligned.line(cells, WIDTHS)
