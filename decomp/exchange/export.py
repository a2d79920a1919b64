"""V and U of every site as safetensors beside a README.md: usable without this project, and a source of ``migrate``.

One stack is in memory at a time, and one shard.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from decomp.checkpoint import human, read_leaf, require_space
from decomp.config.errors import UserError
from decomp.config.schema import RunConfig
from decomp.exchange.names import FACTORS
from decomp.folder import explain, is_free, read_config, writing
from decomp.manifest import Whole, find_decomposition

STEM = "decomposition"
INDEX = f"{STEM}.safetensors.index.json"


@dataclass(frozen=True)
class Found(Whole):
    """A whole decomposition of a run, not yet read, and the run's config."""

    config: RunConfig

    @cached_property
    def stacks(self) -> dict[tuple[str, str], tuple[tuple[int, ...], np.dtype]]:
        """(group, factor) -> (shape, dtype)."""
        arrays = self.arrays("components").items()
        return {(group, factor): (shape, np.dtype(dtype)) for (group, factor), (shape, dtype) in arrays}

    @property
    def nbytes(self) -> int:
        return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.stacks.values())


def find(folder: Path, step: int | None) -> Found:
    """The newest whole decomposition of a run folder, or that of ``step``. UserError where there is none."""
    whole = find_decomposition(
        folder, step, lambda damaged: f"run={folder}: {'; '.join(damaged) or 'no checkpoint yet'}"
    )
    return Found(whole.folder, whole.step, whole.manifest, read_config(folder))


def write(found: Found, out: Path, limit: int) -> Iterator[str]:
    """Writes the folder ``out`` whole or not at all; yields what a person should see.

    ``limit`` is the bytes of a file; a larger matrix has one of its own. UserError for an ``out`` that exists, and
    for a disk that is too small.
    """
    if not is_free(out):
        raise UserError(f"out={out}: exists already: give a folder that does not, with out=...")
    part = out.with_name(f".{out.name}.exporting")
    with writing(part, "out"):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    require_space(part, found.nbytes)
    files = _files(_shards(found, limit))
    try:
        yield from _write_shards(found, part, files)
        index = {"metadata": {"total_size": found.nbytes}, "weight_map": _map(files)}
        (part / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        (part / "README.md").write_text(page(found), encoding="utf-8")
        os.rename(part, out)
    except OSError as error:
        raise explain(error, part, "out") from error
    yield f"{out}: step {found.step}, {len(found.sites)} sites, {human(found.nbytes)}; see README.md there"


def _shards(found: Found, limit: int) -> list[list[str]]:
    """Tensor names by file, in the order of the stacks, so that each stack is read once."""
    shards: list[list[str]] = [[]]
    held = 0
    for (group, factor), (shape, dtype) in found.stacks.items():
        nbytes = int(np.prod(shape[1:])) * dtype.itemsize
        for site in _by_slot(found, group):
            if shards[-1] and held + nbytes > limit:
                shards.append([])
                held = 0
            shards[-1].append(f"{site}.{factor}")
            held += nbytes
    return shards


def _by_slot(found: Found, group: str) -> list[str]:
    rows = {site: row["slot"] for site, row in found.sites.items() if row["group"] == group}
    return sorted(rows, key=rows.__getitem__)


def _files(shards: list[list[str]]) -> dict[str, list[str]]:
    n = len(shards)
    names = [f"{STEM}.safetensors"] if n == 1 else [f"{STEM}-{i:05}-of-{n:05}.safetensors" for i in range(1, n + 1)]
    return dict(zip(names, shards, strict=True))


def _map(files: Mapping[str, list[str]]) -> dict[str, str]:
    return {name: file for file, names in files.items() for name in names}


def _write_shards(found: Found, folder: Path, files: Mapping[str, list[str]]) -> Iterator[str]:
    tensors = _tensors(found)
    metadata = {"format": "np", "step": str(found.step), "target": str(found.manifest["identity"].get("target"))}
    for file, names in files.items():
        held = dict(next(tensors) for _ in names)
        assert list(held) == names
        try:
            save_file(held, folder / file, metadata)
        except SafetensorError as error:
            raise UserError(f"{folder / file}: cannot be written ({error}): free some space and repeat") from error
        yield f"{file}: {len(held)} tensors, {human(sum(x.nbytes for x in held.values()))}"


def _tensors(found: Found) -> Iterator[tuple[str, np.ndarray]]:
    """Every factor by name, copied out of its stack, which is then let go."""
    for (group, factor), spec in found.stacks.items():
        stack = read_leaf(found.item, ("components", group, factor), *spec)
        for slot, site in enumerate(_by_slot(found, group)):
            yield f"{site}.{factor}", stack[slot].copy()
        del stack


def page(found: Found) -> str:
    """README.md: what the files hold and how to read them with numpy and safetensors alone."""
    sites, target = found.sites, found.config.target
    rows = "\n".join(
        f"| `{s}` | {r['kind']} | {r['layer']} | {r['d_in']} | {r['d_out']} | {r['C']} |" for s, r in sites.items()
    )
    dtypes = ", ".join(sorted({str(dtype) for _, dtype in found.stacks.values()}))
    return _PAGE.format(
        experiment=found.config.experiment, run=found.folder.name, step=found.step, n_sites=len(sites),
        n_components=sum(r["C"] for r in sites.values()), target=target.path, kind=target.kind,
        hash=found.manifest["identity"].get("target"), rows=rows, dtypes=dtypes, index=INDEX, site=next(iter(sites)),
        factors=" and ".join(f"`<site>.{f}`" for f in FACTORS),
    )  # fmt: skip


_PAGE = """# Components of {experiment}

Each of {n_sites} weight matrices W of a frozen network is written as a sum of rank-one components and a rest:

    W = V[:, 0] U[0, :] + V[:, 1] U[1, :] + ... + V[:, C-1] U[C-1, :] + delta,    delta = W - V U

W [d_in, d_out] is used as `x @ W`. V [d_in, C] and U [C, d_out] are stored; delta is not, it follows from W. Hugging
Face folders store the same W as `<site>.weight` [d_out, d_in], its transpose.

| | |
|---|---|
| target | {target} ({kind}) |
| hash of the target's files | {hash} |
| run | {run}, after {step} updates |
| components | {n_components} in {n_sites} sites |
| stored as | {dtypes} |

`{index}` says which file holds {factors}. The function that gives each
component's causal importance on an input is not part of this export; it lies in the run's own checkpoint.

## Use

With numpy and safetensors (`pip install numpy safetensors`), in this folder:

```python
import json

import numpy as np
from safetensors import safe_open

with open("{index}") as file:
    files = json.load(file)["weight_map"]


def tensor(name):
    with safe_open(files[name], "numpy") as file:
        return file.get_tensor(name)


site = "{site}"
V, U = tensor(site + ".V"), tensor(site + ".U")  # [d_in, C], [C, d_out]
strength = np.linalg.norm(V, axis=0) * np.linalg.norm(U, axis=1)  # Frobenius norm of each component
strongest = np.argsort(-strength)[:3]
component = np.outer(V[:, strongest[0]], U[strongest[0]])  # its part of W, [d_in, d_out]

x = np.random.default_rng(0).standard_normal((5, len(V))).astype(V.dtype)  # five inputs of the matrix
mask = np.zeros(len(U), V.dtype)
mask[strongest] = 1  # keep these components, ablate the others and delta
y = (x @ V * mask) @ U  # with delta kept as well: + x @ (W - V @ U)
print(site, V.shape, U.shape, strongest, component.shape, y.shape)
```

## Sites

| site | kind | layer | d_in | d_out | C |
|---|---|---|---|---|---|
{rows}
"""
