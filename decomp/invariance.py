"""The real step of a tiny Llama on several meshes and placements, and how far the trajectories differ (SPEC D8).

One device is the reference. Everything a run reads except its sizes is the configured one: losses, CI function,
optimizers, placement rules. The target is random; its weights and the tokens do not depend on the mesh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from decomp import build, optim, state
from decomp import placement as pl
from decomp.config.load import run_config, to_dict
from decomp.config.schema import RunConfig
from decomp.keys import name_hash
from decomp.mesh import mesh_of
from decomp.state import State
from decomp.step import Step
from decomp.target.shape import LlamaShape

SHAPE = LlamaShape(
    n_layers=4, d_model=16, n_heads=4, n_kv_heads=2, head_dim=4, d_mlp=32, vocab=64, tied=False, max_positions=64
)
# relative difference of any loss, and relative norm of any parameter stack
TOLERANCE = {"fp64": (1e-9, 1e-9), "fp32": (1e-5, 5e-5)}
MeshShape = tuple[int, int, int]
Losses = dict[str, float]
Arrays = dict[str, np.ndarray]


class Difference(NamedTuple):
    """A relative difference and where it was found."""

    size: float
    where: str


class Result(NamedTuple):
    """The worst differences of one case from one device's trajectory."""

    loss: Difference
    stack: Difference

    def ok(self, precision: str) -> bool:
        # "not above" would let a NaN through
        return all(d.size <= limit for d, limit in zip(self, TOLERANCE[precision], strict=True))


class Trajectory(NamedTuple):
    """Losses of every update and the decomposition after the last; the whole state halfway, and what one update makes
    of its decomposition."""

    losses: list[Losses]
    end: Arrays
    halfway: State
    after_one: Arrays


@dataclass(frozen=True)
class Case:
    """One training step on one mesh, and the frozen weights it reads."""

    step: Step
    target: Any

    @property
    def layout(self) -> str:
        """Where every array rests: cases of one layout are one program."""
        return str((self.step.dims, pl.tree_dims(self.step.target_leaves, self.step.ax.sizes)))

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.step.compute_dtype)

    def start(self) -> State:
        s = self.step
        out = state.init(s.mesh, s.model.table, s.ci_fn, s.groups, s.cfg, s.leaves, self.dtype)
        pl.audit(s.leaves, out, dict(s.mesh.shape))
        return out

    def placed(self, arrays: State) -> State:
        return jax.device_put(arrays, pl.tree_shardings(self.step.mesh, self.step.leaves))

    def run(self, s: State, first: int, n: int) -> tuple[State, list[Losses]]:
        """``n`` updates from update ``first`` on, and their losses."""
        logs = []
        for i in range(first, first + n):
            s, metrics = self.step.compiled(s, self.target, self.tokens(i))
            logs.append({k: float(v) for k, v in metrics.items() if k.startswith("loss/")})
        return s, logs

    def tokens(self, index: int) -> jax.Array:
        data = self.step.cfg.data
        rng = np.random.default_rng([self.step.cfg.seed, index])
        tokens = rng.integers(0, SHAPE.vocab, (data.batch_size, data.seq_len), dtype=np.int32)
        return jax.device_put(tokens, NamedSharding(self.step.mesh, self.step.batch_spec))


def tiny_config(cfg: RunConfig, *, precision: str, placement: str | None, updates: int) -> RunConfig:
    """``cfg`` with sizes that compile in seconds; ``placement`` null keeps the configured one."""
    raw = to_dict(cfg)
    raw |= {
        "steps": updates,
        "schedule_steps": None,
        "stop_after": None,
        "profile": {},
        "precision": {"kind": precision},
    }
    raw["target"] = {"kind": "llama", "path": "random"}
    raw["sites"] |= {"C": {"q_proj": 8, "down_proj": 24}, "C_per_rank": 1.0}
    small = {"chunk_transformer": {"d_model": 8, "n_heads": 2, "d_mlp": 16}, "component_mlp": {"d_gate": 4}}
    raw["ci_fn"] |= small[cfg.ci_fn.kind]
    raw["data"] |= {"batch_size": 8 * cfg.data.microbatches, "seq_len": 6}
    if placement is not None:
        raw["placement"] |= {"components": placement, "ci_fn": placement}
    for term in raw["loss"]["recon"].values():
        if term and "num_warmup_steps" in term["source"]:  # each is one more copy of the masked forward to compile
            term["source"]["num_warmup_steps"] = min(1, term["source"]["num_warmup_steps"])
    if precision == "fp64":
        for group in raw["optim"].values():
            if group and group["kind"] == "muon":
                group["ns_dtype"] = "float64"
    return run_config(raw)


def make_step(cfg: RunConfig, mesh_shape: MeshShape) -> Step:
    """The step from shapes. Raises UserError where the tiny sizes do not divide over the mesh."""
    jax.config.update("jax_enable_x64", False)  # an earlier case may have been fp64
    _, compute = build.configure_precision(cfg.precision)
    mesh = mesh_of(jax.devices("cpu"), mesh_shape)
    build.check_batch(cfg, mesh, SHAPE)
    return build.build_step(cfg, mesh, SHAPE, build.site_table(cfg, SHAPE), compute)


def make_case(cfg: RunConfig, mesh_shape: MeshShape) -> Case:
    """The step and a random target in its placement."""
    step = make_step(cfg, mesh_shape)
    return Case(step, jax.device_put(random_target(step), pl.tree_shardings(step.mesh, step.target_leaves)))


def random_target(step: Step) -> Any:
    """Norms near 1, matrices N(0, 1/d_in), the unembedding twice that: logits whose KL is well above rounding."""

    def one(path: Any, leaf: pl.Leaf) -> np.ndarray:
        name = pl.path_name(path)
        x = np.random.default_rng([step.cfg.seed, name_hash(name)]).normal(size=leaf.shape)
        scale = 2.0 if name == "head" else 1.0
        x = 1 + 0.1 * x if "norm" in name else scale * x / np.sqrt(leaf.shape[-2])
        return x.astype(step.compute_dtype)

    return jax.tree_util.tree_map_with_path(one, step.target_leaves, is_leaf=pl.is_leaf)


def reference(case: Case) -> Trajectory:
    """The trajectory that others are held against."""
    total = case.step.cfg.steps
    half = total // 2
    s, early = case.run(case.start(), 0, half)
    halfway = jax.tree.map(np.asarray, s)
    s, one = case.run(s, half, 1)
    after_one = host(s)
    s, late = case.run(s, half + 1, total - half - 1)
    return Trajectory([*early, *one, *late], host(s), halfway, after_one)


def compare(case: Case, ref: Trajectory) -> Result:
    """The whole trajectory from the start, and one update from the reference's state halfway.

    The one update is for fp32, where ten add rounding to rounding and blur what a single one shows.
    """
    total = case.step.cfg.steps
    half = total // 2
    one, after = case.run(case.placed(ref.halfway), half, 1)
    alone = differences([ref.losses[half]], ref.after_one, after, host(one), first=half)
    end, losses = case.run(case.start(), 0, total)
    whole = differences(ref.losses, ref.end, losses, host(end))
    return Result(_worst([alone.loss, whole.loss]), _worst([alone.stack, whole.stack]))


def differences(ref: list[Losses], ref_end: Arrays, found: list[Losses], end: Arrays, first: int = 0) -> Result:
    """Worst relative differences of losses, by update, and of stacks, in norm."""
    losses = [
        Difference(relative(b[name], a[name]), f"{name} in update {first + i}")
        for i, (a, b) in enumerate(zip(ref, found, strict=True))
        for name in a
    ]
    stacks = [Difference(relative(end[n], ref_end[n]), f"{n} after update {first + len(ref) - 1}") for n in ref_end]
    return Result(_worst(losses), _worst(stacks))


def relative(x: Any, ref: Any) -> float:
    """||x - ref|| / ||ref||; 0 where both are 0."""
    size, distance = np.linalg.norm(np.ravel(ref)), np.linalg.norm(np.ravel(x) - np.ravel(ref))
    return 0.0 if distance == 0 else float(distance / size) if size else math.inf


def _worst(found: list[Difference]) -> Difference:
    """The largest; a NaN is larger than everything."""
    return max(found, key=lambda d: math.inf if math.isnan(d.size) else d.size)


def host(s: State) -> Arrays:
    return {n: np.asarray(x) for n, x in optim.flatten(s.decomposition).items()}
