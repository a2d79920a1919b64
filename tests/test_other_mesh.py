"""A checkpoint of one mesh and placement on others: SPEC K1, K3, cases 24 and 26."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = str(Path(__file__).parent)

# 12 attention matrices are owned, 6 and 3 of the MLP do not divide by 4 and fall back (SPEC D3); 0.4 GB with moments.
STATE = f"""
import sys
sys.path.insert(0, {TESTS!r})
import ctypes
from pathlib import Path
import jax, numpy as np, jax.numpy as jnp, tiny
from decomp import optim, state
from decomp.checkpoint import Checkpoints, Saved
from decomp.placement import is_leaf
from decomp.state import State
from decomp.target.shape import LlamaShape

SHAPE = LlamaShape(
    n_layers=3, d_model=512, n_heads=8, n_kv_heads=8, head_dim=64, d_mlp=1024, vocab=64, tied=False, max_positions=64
)

def abstract(mesh, layout):
    layouts = {{"components": layout, "ci_fn": layout}}
    ci_fn = {{"kind": "chunk_transformer", "d_model": 256, "n_heads": 2}}
    cfg = tiny.config(sites={{"C_per_rank": 2.5}}, placement=layouts, ci_fn=ci_fn)
    step, _ = tiny.make(cfg, mesh, SHAPE)
    out = state.abstract(step.mesh, step.model.table, step.ci_fn, step.groups, cfg, step.leaves, jnp.float32)
    return step, out

def value(path, x):
    rng = np.random.default_rng(list(jax.tree_util.keystr(path).encode()))
    return rng.standard_normal(x.shape, np.float32).astype(x.dtype)

def placed(path, x):
    return jax.device_put(value(path, x), x.sharding)
"""

SAVE = """
step, like = abstract((4, 2, 1), "owner")
layouts = {g: pair["V"].layout for g, pair in step.leaves.decomposition["components"].items()}
assert set(layouts.values()) == {"owner", "zero1"}, layouts
found = jax.tree_util.tree_map_with_path(placed, like)
checkpoints = Checkpoints(Path("run"), 2, None, {})
checkpoints.save(3, tuple(found))
(event,) = checkpoints.wait()
assert isinstance(event, Saved) and event.nbytes > 3e8, event
"""

# What a process gains while it restores, at its peak, as a multiple of the bytes it then holds. A small restore comes
# before: the first one loads libraries.
RESTORE = """
def memory(what):
    (line,) = [x for x in open("/proc/self/status") if x.startswith(what)]
    return int(line.split()[1]) * 1024

step, like = abstract({mesh}, {layout!r})
small = jax.tree_util.tree_map_with_path(placed, ({{"a": like.progress["step"]}}, {{"b": like.progress["step"]}}))
warm = Checkpoints(Path("small"), 1, None, {{}})
warm.save(1, small)
warm.wait()
warm.restore(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), small))
ctypes.CDLL(None).malloc_trim(0)
open("/proc/self/clear_refs", "w").write("5")
before = memory("VmRSS")
step_number, pair = Checkpoints(Path("run"), 2, None, {{}}).restore(tuple(like))
gained = memory("VmHWM") - before
kept = sum(shard.data.nbytes for x in jax.tree.leaves(pair) for shard in x.addressable_shards)
assert step_number == 3

def compare(path, x, a):
    assert x.sharding.is_equivalent_to(a.sharding, x.ndim), path
    assert np.asarray(x).tobytes() == value(path, a).tobytes(), path

jax.tree_util.tree_map_with_path(compare, State(*pair), like)
print("gained / kept", gained / kept)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_restores_anywhere_bit_for_bit_in_little_memory(simulated: Callable[..., str]):
    """SPEC K1, case 26: saved owned on 4x2x1 with ragged groups."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux to tell the peak of a process")
    simulated(STATE + SAVE, devices=8)
    for mesh, layout in (
        ((2, 2, 1), "owner"),
        ((2, 2, 1), "zero1"),
        ((1, 8, 1), "owner"),
        ((1, 1, 1), "owner"),
        ((2, 2, 1), "replicated"),
    ):
        out = simulated(STATE + RESTORE.format(mesh=mesh, layout=layout), devices=8)
        gained = float(out.split()[-1])
        assert gained <= 1.3, (mesh, layout, gained)
        print(mesh, layout, gained)


CONTINUE = f"""
import sys
sys.path.insert(0, {TESTS!r})
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, tiny
import test_step as t
from decomp import state
from decomp.checkpoint import Checkpoints
from decomp.state import State

def made(mesh, layout):
    return tiny.make(t.config(placement={{"components": layout, "ci_fn": layout}}), mesh)

here, target = made((1, 1, 1), "owner")
s, _ = tiny.run(here, target, jax.block_until_ready(tiny.init(here)), 5)
checkpoints = Checkpoints(Path("run"), 2, None, {{}})
checkpoints.save(5, tuple(s))
checkpoints.wait()
whole, logs = tiny.run(here, target, s, 5, first=5)

there, target = made((2, 2, 1), "zero1")
args = there.mesh, there.model.table, there.ci_fn, there.groups, there.cfg, there.leaves, jnp.float64
_, pair = checkpoints.restore(tuple(state.abstract(*args)))
resumed, again = tiny.run(there, target, State(*pair), 5, first=5)
t.same_metrics(again, logs, 1e-9)
t.same(resumed, jax.tree.map(np.asarray, whole), 1e-9)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_resumed_on_another_mesh_equals_uninterrupted(simulated: Callable[..., str]):
    """SPEC K3 to D8's tolerance, in float64: schedules, averages, clipping, two persistent sources, Adam's moments."""
    simulated(CONTINUE, devices=4, timeout=360)
