"""The device mesh: three named axes, outermost first (SPEC 8)."""

from __future__ import annotations

import os
from typing import Any

from decomp.config.errors import UserError
from decomp.config.schema import Mesh as MeshConfig

AXES = ("replicate", "fsdp", "tp")
DATA_AXES = ("replicate", "fsdp")


def prepare_environment(cfg: MeshConfig) -> None:
    """Asks XLA for simulated CPU devices. Call it before jax is imported; afterwards it has no effect."""
    if not cfg.simulate:
        return
    wanted = f"--xla_force_host_platform_device_count={cfg.replicate * cfg.fsdp * cfg.tp}"
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "force_host_platform_device_count" not in f]
    os.environ["XLA_FLAGS"] = " ".join([*flags, wanted])
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def build_mesh(cfg: MeshConfig) -> Any:
    """A ``jax.sharding.Mesh`` of the configured shape over the first devices.

    Raises UserError when there are fewer devices than the shape needs, or idle ones would be left on an accelerator.
    """
    import jax
    import numpy as np

    devices = jax.devices()
    shape = (1, len(devices), 1) if cfg.auto else (cfg.replicate, cfg.fsdp, cfg.tp)
    needed = int(np.prod(shape))
    if needed > len(devices):
        raise UserError(
            f"mesh={shape[0]}x{shape[1]}x{shape[2]} needs {needed} devices and {len(devices)} were found: "
            "`decomp plan` needs none, launcher=slurm asks for them, mesh.simulate=true simulates them on CPU"
        )
    return jax.sharding.Mesh(np.array(devices[:needed]).reshape(shape), AXES)
