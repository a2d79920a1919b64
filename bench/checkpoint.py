"""How long a save keeps the training loop, as a share of a synchronous save of the same state (SPEC 11).

python bench/checkpoint.py                # 300 MB, 8 saves
python bench/checkpoint.py 1000 5 /scratch/somewhere

A state as a run has it: a third is the decomposition, two thirds are moments. Between two saves an update changes every
array in donated buffers. The first save opens files and threads, and does not count.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from decomp.checkpoint import Checkpoints, Saved, tree_bytes

GROUPS, WIDTH = 8, 512


def make_state(megabytes: float) -> tuple[dict[str, Any], dict[str, Any]]:
    rows = max(1, round(megabytes * 1e6 / (3 * GROUPS * 4 * WIDTH * WIDTH)))

    def stacks(seed: int) -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(seed), GROUPS)
        return {f"group {i}": jax.random.normal(key, (rows, WIDTH, WIDTH)) for i, key in enumerate(keys)}

    return {"components": stacks(0)}, {"m": stacks(1), "v": stacks(2), "step": jnp.int32(0)}


def main(argv: list[str]) -> None:
    megabytes, saves = float(argv[0]) if argv else 300.0, int(argv[1]) if argv[1:] else 8
    update = jax.jit(lambda s: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), s), donate_argnums=0)
    state = make_state(megabytes)
    root = Path(tempfile.mkdtemp(dir=argv[2] if argv[2:] else None, prefix="checkpoint-"))
    checkpoints = Checkpoints(root, 2, None, {})
    print(f"{tree_bytes(state) / 1e6:.0f} MB on {jax.devices()[0].device_kind}, saved to {root}")
    print("save   blocked s   whole s   blocked / whole")
    rows = []
    try:
        for i in range(1, saves + 1):
            state = jax.block_until_ready(update(state))
            began = time.perf_counter()
            checkpoints.save(i, state)
            blocked = time.perf_counter() - began
            (event,) = checkpoints.wait()
            whole = time.perf_counter() - began
            assert isinstance(event, Saved), event
            rows.append((blocked, whole))
            print(f"{i:4} {blocked:11.3f} {whole:9.3f} {blocked / whole:17.1%}")
    finally:
        checkpoints.close()
        shutil.rmtree(root)
    shares = [blocked / whole for blocked, whole in rows[1:]]
    print(f"from the second save on: median {statistics.median(shares):.1%}, largest {max(shares):.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
