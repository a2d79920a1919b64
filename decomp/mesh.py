"""The device mesh: three named axes, outermost first (SPEC 8)."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from decomp import processes
from decomp.config.errors import UserError
from decomp.config.schema import Mesh as MeshConfig

AXES = ("replicate", "fsdp", "tp")
DATA_AXES = ("replicate", "fsdp")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8  # malloc.h
_heap_is_kept = False
ACCELERATOR_FILES = ("nvidia[0-9]*", "kfd", "accel*", "vfio/[0-9]*")


def prepare_environment(cfg: MeshConfig) -> None:
    """Sets malloc up for CPU runs and asks XLA for simulated devices. Call it before jax is imported; afterwards it has
    no effect."""
    if cfg.simulate or not any(path for pattern in ACCELERATOR_FILES for path in Path("/dev").glob(pattern)):
        keep_heap()
    if not cfg.simulate:
        return
    wanted = f"--xla_force_host_platform_device_count={_devices_here(cfg)}"
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "force_host_platform_device_count" not in f]
    os.environ["XLA_FLAGS"] = " ".join([*flags, wanted])
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _devices_here(cfg: MeshConfig) -> int:
    """This process's share of the simulated devices."""
    needed, place = cfg.replicate * cfg.fsdp * cfg.tp, processes.place()
    count = place.count if place else 1
    if needed % count:
        raise UserError(f"mesh: its {needed} devices do not divide over DECOMP_PROCESSES={count}")
    return needed // count


def prepare_simulated(n_devices: int, flags: Mapping[str, str]) -> None:
    """``n_devices`` simulated CPU devices for programs that need not run fast, compiled under XLA ``flags``; those that
    are set by hand win. The persistent cache is off: it crashes programs of several CPU devices (DESIGN 6)."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    given = os.environ.get("XLA_FLAGS", "")
    added = [f"--{flag}={value}" for flag, value in flags.items() if flag not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()
    prepare_environment(MeshConfig(fsdp=n_devices, simulate=True))


def build_mesh(cfg: MeshConfig) -> Any:
    """A ``jax.sharding.Mesh`` of the configured shape over the first devices.

    Raises UserError when there are fewer devices than the shape needs, or idle ones would be left on an accelerator.
    """
    import jax

    devices = jax.devices()
    shape = (1, len(devices), 1) if cfg.auto else (cfg.replicate, cfg.fsdp, cfg.tp)
    needed = math.prod(shape)
    if needed > len(devices):
        raise UserError(
            f"mesh={shape[0]}x{shape[1]}x{shape[2]} needs {needed} devices and {len(devices)} were found: "
            "`decomp plan` needs none, launcher=slurm asks for them, mesh.simulate=true simulates them on CPU"
        )
    if processes.several() and needed < len(devices):
        raise UserError(
            f"mesh={shape[0]}x{shape[1]}x{shape[2]} takes {needed} of the {len(devices)} devices that "
            f"{jax.process_count()} processes have: a mesh of several processes takes all, or mesh=auto"
        )
    return mesh_of(devices, shape)


def mesh_of(devices: Sequence[Any], shape: tuple[int, int, int]) -> Any:
    """A ``jax.sharding.Mesh`` of ``shape`` over the first of ``devices``."""
    import jax
    import numpy as np

    return jax.sharding.Mesh(np.array(devices[: math.prod(shape)]).reshape(shape), AXES)


def connect(mesh: Any) -> None:
    """Lets every group of devices that a collective may span meet, so that the first step need not.

    The processes compile at their own pace, and gloo, which connects the CPUs of several processes, gives up where the
    first collective of a group finds one of them 30 seconds late; later ones may wait for as long as they like.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    live = [axis for axis in AXES if mesh.shape[axis] > 1]
    groups = [group for n in range(1, len(live) + 1) for group in itertools.combinations(live, n)]

    def sums(x: Any) -> Any:
        inner = [jax.lax.psum(x, group) for group in groups]
        rest = [tuple(axis for axis in live if axis not in group) for group in groups]
        return jnp.stack([jax.lax.psum(y, r) if r else y for y, r in zip(inner, rest, strict=True)])

    spec = jax.sharding.PartitionSpec
    sharded = jax.shard_map(sums, mesh=mesh, in_specs=spec(tuple(live)), out_specs=spec())
    ones = jax.ShapeDtypeStruct((mesh.size,), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, spec(tuple(live))))
    compiled = jax.jit(sharded).lower(ones).compile()
    here = jax.make_array_from_callback(ones.shape, ones.sharding, lambda index: np.ones(ones.shape, np.float32)[index])
    processes.meet()
    jax.block_until_ready(compiled(here))


def peak_memory(devices: Sequence[Any]) -> str | None:
    """The most that any of ``devices`` has held, and which one; None where they do not tell, as on CPU (case 19)."""
    told = [(stats, device) for device in devices if (stats := device.memory_stats()) and "peak_bytes_in_use" in stats]
    if not told:
        return None
    stats, device = max(told, key=lambda pair: pair[0]["peak_bytes_in_use"])
    limit = f" of {stats['bytes_limit'] / 1e9:.2f}" if "bytes_limit" in stats else ""
    used = f"{stats['peak_bytes_in_use'] / 1e9:.2f}{limit} GB"
    return f"peak memory: {used} on device {device.id}, the most of {len(told)} devices"


def keep_heap() -> None:
    """Tells glibc's malloc to keep what one step frees for the next one; without effect on other systems.

    XLA on CPU takes a step's temporaries from malloc. Left alone, malloc hands them back to the system, and the next
    step faults in every page again: ``python bench/step.py heap`` prints what that costs. Arenas that threads have
    made before stay as they are, so this belongs before jax.
    """
    global _heap_is_kept
    _heap_is_kept = True
    _mallopt({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1, M_ARENA_MAX: 1})


def return_heap() -> None:
    """The opposite, for work that reads and writes one large array after another: what is freed leaves the process."""
    # left alone, glibc raises the threshold to what it saw freed
    _mallopt({M_MMAP_THRESHOLD: 2**22, M_TRIM_THRESHOLD: 2**22})


@contextlib.contextmanager
def returning_large_blocks() -> Iterator[None]:
    """``return_heap`` for a while: malloc takes each large block from the system and gives it back when it is free.

    For reading much into arrays that stay: buffers in between would otherwise leave holes in the heap, of half the
    arrays' size and more, that nothing fills.
    """
    _mallopt({M_MMAP_MAX: 65536, M_MMAP_THRESHOLD: 2**20})
    try:
        yield
    finally:
        _mallopt({M_MMAP_THRESHOLD: 2**25, M_MMAP_MAX: 0 if _heap_is_kept else 65536})


def _mallopt(options: Mapping[int, int]) -> None:
    with contextlib.suppress(AttributeError, OSError):
        for option, value in options.items():
            ctypes.CDLL(None).mallopt(option, value)
