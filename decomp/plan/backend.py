"""The compiler that plans: XLA's for simulated CPU devices, or its GPU compiler, which needs no GPU.

A GPU is described to the compiler by a text (``description``), whose figures stand in conf/devices.yaml. What comes out
is the program that a GPU would run, so its temporaries are the real ones; kernels are not tuned, because that would
need the GPU to time them on. Checked with jaxlib 0.10.2 alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Literal, get_args

from decomp import mesh
from decomp.config import fields
from decomp.config.errors import UserError

Name = Literal["cpu", "gpu"]
COMPILER = ("jax-cuda12-plugin", "jax-cuda12-pjrt")  # of jaxlib's own version
ASSEMBLER = "nvidia-cuda-nvcc-cu12"
INSTALL = "pip install '.[plan-gpu]'"

# The program is read and never run, so poor machine code will do. Measured on a step of Llama-8B's form with Muon:
# 104 s of compilation with the first flag alone, 38 s with all. jaxlib 0.12 ends the process over the last one.
CPU_FLAGS = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": "true"}
CPU_FLAGS_0_10 = {"xla_cpu_use_fusion_emitters": "false"}
GPU_FLAGS = {"xla_gpu_autotune_level": "0"}


# ---------------------------------------------------------------- which one
def choose(wanted: str) -> Name:
    """``auto`` is the GPU's where it is installed. Raises UserError for ``gpu`` where it is not."""
    names = ("auto", *get_args(Name))
    if wanted not in names:
        raise UserError(f"backend={wanted}: no such choice; {fields.hint(wanted, names)}")
    lacking = lacks()
    if wanted == "gpu" and lacking:
        raise UserError(f"backend=gpu: {lacking}; {INSTALL} brings the compiler, backend=cpu does without")
    return "cpu" if wanted == "cpu" or lacking else "gpu"


def lacks() -> str | None:
    """What keeps the GPU compiler from being used, or None."""
    own = metadata.version("jaxlib")
    for package in (*COMPILER, ASSEMBLER):
        found = _version(package)
        if found is None:
            return f"{package} is not installed"
        if package in COMPILER and found != own:
            return f"{package} {found} stands beside jaxlib {own}"
    return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# ---------------------------------------------------------------- before jax is imported
def prepare_environment(name: Name, n_devices: int) -> None:
    """Flags, and ``n_devices`` simulated devices for the CPU's compiler. Without effect once jax is imported."""
    flags = CPU_FLAGS | (CPU_FLAGS_0_10 if metadata.version("jaxlib").startswith("0.10.") else {})
    if name == "gpu":
        # a GPU that is there is left alone, and one that is not there is no reason to stop
        os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        flags, n_devices = GPU_FLAGS, 1
    mesh.prepare_simulated(n_devices, flags)


# ---------------------------------------------------------------- devices to compile for
def make_mesh(name: Name, shape: tuple[int, int, int], gpu: Mapping[str, Any]) -> Any:
    """A ``jax.sharding.Mesh`` of simulated devices, or of GPUs as ``gpu`` of conf/devices.yaml describes them."""
    import jax

    replicate, fsdp, tp = shape
    n = replicate * fsdp * tp
    if name == "gpu":
        from jax.experimental import topologies

        nodes = f"1x{replicate}x{fsdp * tp}"  # slices, nodes, devices of a node
        found = topologies.get_topology_desc(platform="cuda", target_config=description(gpu), topology=nodes).devices
    else:
        found = jax.devices("cpu")
    if len(found) < n:
        raise ValueError(f"{n} devices are wanted and {len(found)} simulated: prepare_environment comes before jax")
    return mesh.mesh_of(found, shape)


def description(gpu: Mapping[str, Any]) -> str:
    """The GPU as XLA's text format has it. What is the same on every GPU of conf/devices.yaml stands here."""
    major = gpu["compute_capability"]
    info = {
        "threads_per_block_limit": 1024, "threads_per_warp": 32, "threads_per_core_limit": 2048, "fpus_per_core": 128,
        "shared_memory_per_block": 49152, "shared_memory_per_core": 233472, "shared_memory_per_block_optin": 232448,
        "registers_per_core_limit": 65536, "registers_per_block_limit": 65536,
        "block_dim_limit_x": 2147483647, "block_dim_limit_y": 65535, "block_dim_limit_z": 65535,
        **{key: gpu[key] for key in ("core_count", "l2_cache_size", "clock_rate_ghz")},
        "memory_bandwidth": int(gpu["memory_bandwidth"]), "device_memory_size": int(gpu["memory_size"]),
    }  # fmt: skip
    lines = [f"  {key}: {value}" for key, value in info.items()]
    return "\n".join([
        "gpu_device_info {", *lines, f"  cuda_compute_capability {{ major: {major} }}", "}", 'platform_name: "CUDA"',
        f"dnn_version_info {{ major: {major} minor: 10 }}", "runtime_version { major: 12 minor: 9 }",
        f'device_description_str: "{gpu["description"]}"',
    ])  # fmt: skip
