"""From a config to the objects that run it: every ``match`` on a config kind stands here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from decomp import components as comp
from decomp import optim, processes, state
from decomp import placement as pl
from decomp import sites as st
from decomp.ci_fn.base import CiFn
from decomp.ci_fn.chunk_transformer import ChunkTransformer
from decomp.ci_fn.component_mlp import ComponentMlp
from decomp.config import schema
from decomp.config.errors import UserError
from decomp.config.load import warnings_for
from decomp.data.base import Data
from decomp.data.stdlib import StdlibData, cache_folder
from decomp.eval import EvalResult, Evaluator
from decomp.loss.objective import Model
from decomp.mesh import AXES, build_mesh, connect
from decomp.placement import Axes
from decomp.state import State
from decomp.step import Step
from decomp.target import llama, pretrained
from decomp.target.llama import Llama
from decomp.target.shape import LLAMA_8B, LlamaShape


@dataclass
class Trainer:
    """One run's parts: state, step, warm-up, evaluation, reports. Everything is placed on ``mesh``."""

    cfg: schema.RunConfig
    mesh: Mesh
    shape: LlamaShape
    table: st.SiteTable
    data: Data
    tokenizer: Any
    target: Any
    training: Step
    evaluator: Evaluator
    master_dtype: Any
    _warmup_moments: Any = field(default=None, repr=False)

    def init_state(self) -> State:
        """A fresh state, audited against the placement table."""
        out = state.init(*self._state_args())
        pl.audit(self.training.leaves, out, dict(self.mesh.shape))
        return out

    def abstract_state(self) -> State:
        return state.abstract(*self._state_args())

    def _state_args(self) -> tuple[Any, ...]:
        t = self.training
        return self.mesh, self.table, t.ci_fn, t.groups, self.cfg, t.leaves, self.master_dtype

    def step(self, s: State, tokens: np.ndarray) -> tuple[State, dict[str, jax.Array]]:
        """One training step on the global batch [B, T]; ``s`` is donated."""
        return self.training.compiled(s, self.target, self.training.put_batch(tokens))

    def warmup(self, s: State, n: int) -> tuple[State, dict[str, jax.Array]]:
        """``n`` more updates of the faithfulness warm-up (SPEC T6)."""
        run, init = self.training.warmup
        components = s.decomposition["components"]
        moments = init(components) if self._warmup_moments is None else self._warmup_moments
        components, self._warmup_moments, value = run(components, moments, self.target, n)
        return State({**s.decomposition, "components": components}, s.progress), {"loss/faithfulness": value}

    def end_warmup(self) -> None:
        """Throws the warm-up's optimizer away."""
        self._warmup_moments = None

    def evaluate(self, s: State, step: int, stopping: Callable[[], bool]) -> EvalResult | None:
        return self.evaluator.run(s, step, stopping)

    @property
    def term_names(self) -> tuple[str, ...]:
        return self.training.term_names

    def placement_report(self) -> str:
        sizes, t = dict(self.mesh.shape), self.training
        return pl.report({"state": t.leaves, "target": t.target_leaves}, sizes, waypoints(t, sizes))

    def optimizer_report(self) -> str:
        return self.training.groups.report()

    def target_hash(self) -> str:
        return pretrained.content_hash(target_folder(self.cfg.target))

    def warnings(self) -> list[str]:
        """Choices that are allowed and rarely meant (cases 8, 9), one line per choice."""
        below = [s for s in self.table.sites if s.matrix.rank > s.C]
        above = [s for s in self.table.sites if 16 * s.matrix.rank < s.C]
        out = warnings_for(self.cfg)
        if below:
            s = below[0]
            out.append(
                f"{len(below)} sites have fewer components than their rank "
                f"(first {s.name}: C={s.C}, rank {s.matrix.rank}): V U cannot equal W without the delta component"
            )
        if above:
            s = above[0]
            out.append(f"{len(above)} sites have over 16 components per rank (first {s.name}: C={s.C})")
        return out


def build(cfg: schema.RunConfig) -> Trainer:
    """Everything a run needs. Raises UserError for what only the target, the corpus or the devices can tell."""
    dtypes = configure_precision(cfg.precision)
    folder, shape = open_target(cfg.target)
    tensors = pretrained.open_tensors(folder, shape)
    table = site_table(cfg, shape)
    mesh = build_mesh(cfg.mesh)
    use_compilation_cache(mesh)
    if processes.several():
        connect(mesh)
    check_batch(cfg, mesh, shape)
    tokenizer = pretrained.load_tokenizer(folder, shape.vocab)
    data = build_data(cfg, tokenizer)
    training = build_step(cfg, mesh, shape, table, dtypes[1])
    target = place_target(tensors, shape, table, mesh, training.target_leaves, dtypes[1])
    evaluator = Evaluator(training, target, data, cfg)
    return Trainer(cfg, mesh, shape, table, data, tokenizer, target, training, evaluator, dtypes[0])


def check(cfg: schema.RunConfig) -> None:
    """What ``build`` can refuse without a device: target, sites, batch, tokenizer. The mesh is not ``auto``."""
    folder, shape = open_target(cfg.target)
    pretrained.open_tensors(folder, shape)
    site_table(cfg, shape)
    check_batch(cfg, AbstractMesh((cfg.mesh.replicate, cfg.mesh.fsdp, cfg.mesh.tp), AXES), shape)
    pretrained.load_tokenizer(folder, shape.vocab)


def open_target(cfg: schema.Target) -> tuple[Path, LlamaShape]:
    """Folder and shape. Raises UserError where the folder holds another model than ``target=`` says."""
    folder = target_folder(cfg)
    shape = pretrained.read_shape(folder)
    if known_shape(cfg) not in (None, shape):
        raise UserError(f"target.path={cfg.path}: has other sizes than target={cfg.kind}; use target=llama")
    return folder, shape


def target_folder(cfg: schema.Target) -> Path:
    """The folder with the weights. Raises UserError where there is none."""
    match cfg:
        case schema.Llama8bTarget(path=None):
            raise UserError("target.path: is required to run target=llama8b; give its folder, or try `decomp plan`")
        case schema.LlamaTarget(path=str(path)) | schema.Llama8bTarget(path=str(path)):
            return pretrained.resolve_path(path)
    raise AssertionError(cfg)


def known_shape(cfg: schema.Target) -> LlamaShape | None:
    """The shape of a target whose sizes need no folder."""
    match cfg:
        case schema.Llama8bTarget():
            return LLAMA_8B
        case schema.LlamaTarget():
            return None


def configure_precision(cfg: schema.Precision) -> tuple[Any, Any]:
    """(master dtype, compute dtype); sets jax's 64-bit mode for fp64 (SPEC P1)."""
    if cfg.kind == "fp64":
        jax.config.update("jax_enable_x64", True)
        return jnp.float64, jnp.float64
    on_cpu = jax.default_backend() == "cpu"
    bf16 = cfg.kind == "bf16" or (cfg.kind == "auto" and not on_cpu)
    if cfg.deterministic and not on_cpu:
        require_deterministic()
    return jnp.float32, jnp.bfloat16 if bf16 else jnp.float32


def use_compilation_cache(mesh: Mesh) -> None:
    """Keeps compiled programs between runs, in the user's cache folder unless JAX_COMPILATION_CACHE_DIR says where.

    Not for several CPU devices: loading such a program back crashes or hangs (DESIGN 6, measured on jax 0.10.2).
    """
    devices, config = mesh.devices.flat, cast(Any, jax.config)  # which makes an attribute of every flag
    if mesh.size > 1 and devices[0].platform == "cpu":
        config.update("jax_enable_compilation_cache", False)
    elif config.jax_compilation_cache_dir is None and (folder := cache_folder()) is not None:
        config.update("jax_compilation_cache_dir", str(folder / "xla"))


def require_deterministic() -> None:
    """Bit-for-bit resuming on a GPU needs XLA's deterministic kernels, which only an environment flag chooses."""
    import os

    if "--xla_gpu_deterministic_ops=true" not in os.environ.get("XLA_FLAGS", ""):
        raise UserError(
            "precision.deterministic=true: XLA_FLAGS lacks --xla_gpu_deterministic_ops=true; set it before starting"
        )


def site_table(cfg: schema.RunConfig, shape: LlamaShape) -> st.SiteTable:
    """The selection, with sites of different optimizer groups kept apart (SPEC T3, D1)."""
    matrices = shape.matrices()
    chosen = [s.name for s in st.select(matrices, cfg.sites).sites]
    return st.select(matrices, cfg.sites, optim.group_of_sites(optim_groups(cfg), chosen))


def optim_groups(cfg: schema.RunConfig) -> dict[str, schema.AdamW | schema.Muon]:
    return {n: g for n, g in cfg.optim.items() if g is not None}


def check_batch(cfg: schema.RunConfig, mesh: Mesh | AbstractMesh, shape: LlamaShape) -> None:
    """Raises UserError where batch, length or heads do not fit the mesh or the target."""
    sizes = dict(mesh.shape)
    ways = sizes["replicate"] * sizes["fsdp"] * cfg.data.microbatches
    if cfg.data.batch_size % ways:
        raise UserError(
            f"data.batch_size={cfg.data.batch_size}: it must be a multiple of replicate x fsdp x microbatches = {ways}"
        )
    if cfg.data.seq_len > shape.max_positions:
        raise UserError(f"data.seq_len={cfg.data.seq_len}: the target has at most {shape.max_positions} positions")
    heads = {f"the target's {shape.n_kv_heads} kv heads": shape.n_kv_heads}
    if isinstance(cfg.ci_fn, schema.ChunkTransformer):
        heads |= {f"ci_fn.n_heads={cfg.ci_fn.n_heads}": cfg.ci_fn.n_heads}
    if any(n % sizes["tp"] for n in heads.values()):
        raise UserError(f"mesh.tp={sizes['tp']}: it must divide {' and '.join(heads)}")


def build_data(cfg: schema.RunConfig, tokenizer: Any) -> Data:
    match cfg.data:
        case schema.StdlibData():
            return StdlibData(cfg.data, tokenizer, cfg.seed)


def build_ci_fn(cfg: schema.RunConfig, shape: LlamaShape, table: st.SiteTable, ax: Axes) -> CiFn:
    match cfg.ci_fn:
        case schema.ChunkTransformer():
            return ChunkTransformer(cfg.ci_fn, table, shape.d_model, ax, cfg.placement.ci_fn, cfg.placement.on_ragged)
        case schema.ComponentMlp():
            dims = comp.copy_dims(comp.leaves(table, cfg.placement, ax.sizes), ax.sizes)
            return ComponentMlp(cfg.ci_fn, table, dims, ax, cfg.placement.ci_fn, cfg.placement.on_ragged)


def build_step(cfg: schema.RunConfig, mesh: Mesh, shape: LlamaShape, table: st.SiteTable, compute: Any) -> Step:
    """The step from shapes alone: no weights, no data, no device memory."""
    ax = Axes.of(mesh)
    ci_fn = build_ci_fn(cfg, shape, table, ax)
    decomposition = state.decomposition_leaves(table, ci_fn, cfg, ax.sizes)
    groups = build_groups(cfg, table, decomposition)
    leaves = State(decomposition, state.progress_leaves(table, groups, cfg))
    target_layout = "replicated" if cfg.placement.components == "replicated" else "node"
    target_leaves = llama.leaves(shape, table, target_layout)
    for name, leaf in optim.flatten(target_leaves, pl.is_leaf).items():
        pl.check_divides(f"target {name}", leaf, ax.sizes)
    forward = Llama(shape, table, ax, cfg.loss.remat)
    dims = comp.copy_dims(decomposition["components"], ax.sizes), comp.copy_dims(decomposition["ci_fn"], ax.sizes)
    n_positions = cfg.data.batch_size * cfg.data.seq_len
    model = Model(
        ax, table, forward, cfg.loss, pl.tree_dims(target_leaves, ax.sizes),
        {"components": dims[0], "ci_fn": dims[1]}, n_positions, cfg.seed,
    )  # fmt: skip
    return Step(mesh, model, ci_fn, groups, leaves, target_leaves, cfg, compute)


def waypoints(step: Step, sizes: Mapping[str, int]) -> dict[str, dict[str, pl.Dims]]:
    """Mesh axes of what the step makes of each trainable leaf on its way, by the names of the placement table."""
    rest = {n: x.dims(sizes) for n, x in optim.flatten(step.leaves.decomposition, pl.is_leaf).items()}
    muon = {n: d for n, d in rest.items() if step.groups.rule(n) == "muon"}
    named = lambda of, some: {f"state/decomposition/{n}": of(d) for n, d in some.items()}  # noqa: E731
    return {"compute copy": named(pl.copied, rest), "Newton-Schulz": named(pl.whole_matrices, muon)}


def build_groups(cfg: schema.RunConfig, table: st.SiteTable, decomposition: Any) -> optim.GroupTable:
    groups = optim_groups(cfg)
    of_site = optim.group_of_sites(groups, list(table.by_name))
    of_stack = {g.name: of_site[g.sites[0].name] for g in table.groups.values()}
    return optim.group_table(groups, optim.flatten(decomposition, pl.is_leaf), of_stack)


def place_target(tensors: Any, shape: LlamaShape, table: st.SiteTable, mesh: Mesh, leaves: Any, dtype: Any) -> Any:
    """The frozen parameters in compute dtype, each device given its own part."""
    params = llama.load_params(tensors, shape, table)
    shardings = pl.tree_shardings(mesh, leaves)

    def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
        cast = array.astype(dtype)
        return jax.make_array_from_callback(cast.shape, sharding, lambda index: cast[index])

    return jax.tree.map(put, params, shardings)
