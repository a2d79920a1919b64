"""One compiler and one kind of device: from a config and a mesh to a plan, with word on what takes so long."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from decomp.config.errors import UserError
from decomp.config.schema import RunConfig
from decomp.plan import backend, program
from decomp.plan.device import Device
from decomp.plan.report import Plan
from decomp.step import Step
from decomp.target.shape import LlamaShape

MeshShape = tuple[int, int, int]


@dataclass(frozen=True)
class Planner:
    """``target`` is the frozen model's shape; ``say`` takes one line of progress."""

    compiler: backend.Name
    device: Device
    target: LlamaShape
    say: Callable[[str], None]

    def step(self, cfg: RunConfig, shape: MeshShape) -> tuple[Step, Any]:
        """(step, master dtype) from shapes, not compiled. Raises UserError where something does not divide."""
        return program.make_step(cfg, self.target, backend.make_mesh(self.compiler, shape, self.device.gpu))

    def check(self, cfg: RunConfig, shapes: dict[str, MeshShape]) -> None:
        """Every mesh before the first is compiled, so that a mistake is said at once."""
        for name, shape in shapes.items():
            try:
                self.step(cfg, shape)
            except UserError as error:
                raise UserError(str(error) if len(shapes) == 1 else f"meshes={name}: {error}") from None

    def plan(self, name: str, cfg: RunConfig, shape: MeshShape) -> Plan:
        """Compiles one program."""
        step, masters = self.step(cfg, shape)
        what = "GPUs, none of them here" if self.compiler == "gpu" else "simulated devices"
        self.say(f"{name}: compiling for {math.prod(shape)} {what} ...")
        found = Plan(program.compile_step(step, masters), masters, self.device)
        self.say(f"{name}: traced in {found.program.traced_s:.0f} s, compiled in {found.program.compiled_s:.0f} s")
        return found
