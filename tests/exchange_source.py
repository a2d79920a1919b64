"""A tiny target and factors of some of its sites in every layout that ``migrate`` reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from test_pretrained import SHAPE, folder_of

from decomp.config.compose import Command
from decomp.target.shape import LlamaShape

C = {"up_proj": 10, "down_proj": 10, "k_proj": 6}
PLAIN: LlamaShape = replace(SHAPE, n_layers=3)
Factors = dict[str, np.ndarray]


def target(path: Path) -> Path:
    return folder_of(path, PLAIN)


def factors(layers: tuple[int, ...] = (1, 2), dtype: Any = np.float32) -> Factors:
    """<site>.V and <site>.U, with bits that == does not see."""
    rng, out = np.random.default_rng(0), {}
    for m in PLAIN.matrices():
        if m.layer in layers and m.kind in C:
            out[f"{m.name}.V"] = rng.standard_normal((m.d_in, C[m.kind])).astype(dtype)
            out[f"{m.name}.U"] = rng.standard_normal((C[m.kind], m.d_out)).astype(dtype)
    for odd, x in zip((np.nan, -0.0, np.inf, 1e-42), out.values(), strict=False):
        x[0, 0] = odd
    return out


def safetensors(path: Path, tensors: Factors) -> Path:
    save_file(tensors, path)
    return path


def sharded(folder: Path, tensors: Factors) -> Path:
    """Two shards, and their index."""
    folder.mkdir()
    names = sorted(tensors)
    parts = {f"old-{i}.safetensors": names[i::2] for i in range(2)}
    for file, chosen in parts.items():
        save_file({n: tensors[n] for n in chosen}, folder / file)
    index = {"weight_map": {n: file for file, chosen in parts.items() for n in chosen}}
    (folder / "old.safetensors.index.json").write_text(json.dumps(index))
    return folder


def orbax(folder: Path, tensors: Factors) -> Path:
    """An orbax tree {components: {site: {V, U}}, step}."""
    import orbax.checkpoint as ocp

    tree: dict[str, Any] = {}
    for name, x in tensors.items():
        tree.setdefault(name[:-2], {})[name[-1]] = x
    with ocp.StandardCheckpointer() as door:
        door.save(folder.absolute(), {"components": tree, "step": np.asarray(7)})
    return folder


def torch_names(tensors: Factors) -> Factors:
    """As a published SPD model names them: modules with a dash for each dot."""
    return {f"components.{name[:-2].replace('.', '-')}{name[-2:]}": x for name, x in tensors.items()}


def command(src: Path, dst: Path, target: Path, *texts: str) -> Command:
    given = (f"src={src}", f"dst={dst}", "target=llama", f"target.path={target}", *texts)
    return Command("migrate", given)


def bits(run: Any) -> Factors:
    """<site>.V and <site>.U of an opened run."""
    return {f"{s}.{f}": getattr(run, f)(s) for s in run.sites for f in "VU"}


def same(a: Factors, b: Factors) -> bool:
    return set(a) == set(b) and all(a[n].dtype == b[n].dtype and a[n].tobytes() == b[n].tobytes() for n in a)


def frozen(path: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and modification time of every file at ``path``."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in files}
