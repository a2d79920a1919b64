"""A trainer with the real one's interface and state tree, and a quadratic for a model: the loop's test double.

As a script it runs one launch: ``python fake_trainer.py OUTPUT_DIR key=value ...`` (dotted config keys and the
trainer's own: delay, poison, megabytes, resume, pause, act). With ``pause`` the primary sleeps for so many seconds
whenever it has begun a save: it knows sooner than the others what became of it. ``act=WHERE:AT:PROCESS:WHAT`` does
something to one process as it is built (AT is 0), or comes to an update, a warm-up or an evaluation: a signal by its
name, ``raise``, or ``refuse`` (its files may not grow for three updates).
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jax.sharding import NamedSharding, PartitionSpec

from decomp import loop, processes
from decomp.checkpoint import Checkpoints
from decomp.config.errors import UserError
from decomp.config.schema import RunConfig
from decomp.folder import read_config

SITES = ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")


def config(output_dir: Path | str, **changes: Any) -> RunConfig:
    """A small run; ``changes`` are dotted keys with __ for the dots."""
    data: dict[str, Any] = {
        "experiment": "fake",
        "steps": 20,
        "output_dir": str(output_dir),
        "target": {"kind": "llama", "path": "nowhere"},
        "sites": {},
        "mesh": {},
        "placement": {},
        "ci_fn": {"kind": "chunk_transformer"},
        "loss": {"faithfulness": {"warmup": {"steps": 3}}},
        "optim": {"all": {"kind": "adamw", "match": "*", "lr": 0.1}},
        "data": {"batch_size": 4, "seq_len": 8},
        "eval": {"every": 10},
        "checkpoint": {"every": 5},
        "logger": {"every": 2},
        "launcher": {"kind": "local"},
        "precision": {},
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        section = data
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return RunConfig.model_validate(data)


class State(NamedTuple):
    decomposition: dict[str, Any]
    progress: dict[str, Any]


class Evaluation(NamedTuple):
    metrics: dict[str, float]
    arrays: dict[str, np.ndarray]


class Data:
    corpus_hash = "corpus-1"

    def __init__(self, cfg: RunConfig):
        self.cfg = cfg

    def batch(self, step: int) -> np.ndarray:
        shape = (self.cfg.data.batch_size, self.cfg.data.seq_len)
        return np.random.default_rng([self.cfg.seed, step]).integers(0, 97, shape, np.int32)


class Table:
    def describe(self) -> str:
        return "2 sites in 1 stack group, 6 components"

    def to_json(self) -> dict[str, Any]:
        return {s: {"C": 3, "d_in": 4, "d_out": 4, "group": "4x4_C3", "slot": i} for i, s in enumerate(SITES)}


class FakeTrainer:
    """Momentum descent towards a target that the batch shifts; updates in ``poison`` are not finite."""

    term_names = ("faithfulness", "recon/stochastic")
    table = Table()

    def __init__(self, cfg: RunConfig, poison: tuple[int, ...] = (), delay: float = 0.0, megabytes: float = 0.0):
        self.cfg, self.data, self.delay = cfg, Data(cfg), delay
        self.poison = jnp.asarray(poison or (-1,), jnp.int32)
        self.rows = 2 * max(1, int(megabytes * 1e6 / 4 / 12 / 6))
        self.hash = "target-1"
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("device",))
        self.everywhere = NamedSharding(mesh, PartitionSpec())
        self.shapes = jax.eval_shape(self._init)
        axes = {3: PartitionSpec("device")}  # stacks are split by row, as many processes write them
        self.placed = jax.tree.map(lambda x: NamedSharding(mesh, axes.get(x.ndim, PartitionSpec())), self.shapes)
        self._step = jax.jit(self._update, donate_argnums=0, out_shardings=(self.placed, self.everywhere))
        self._whole = jax.jit(lambda x: x, out_shardings=self.everywhere)

    def init_state(self) -> State:
        return jax.jit(self._init, out_shardings=self.placed)()

    def _init(self) -> State:
        key = jax.random.key(self.cfg.seed)
        v = jax.random.normal(key, (self.rows, 4, 3), jnp.float32)
        zero = jnp.zeros((), jnp.int32)
        decomposition = {
            "components": {"4x4_C3": {"V": v, "U": jnp.ones((self.rows, 3, 4), jnp.float32)}},
            "ci_fn": {"head.weight": jnp.zeros((5,), jnp.float32)},
        }
        progress = {
            "step": zero,
            "optim": {"components": {"mu": jnp.zeros_like(v)}},
            "sources": {},
            "frequency": {},
            "guard": {"in_a_row": zero + 0, "total": zero + 0},
        }
        return State(decomposition, progress)

    def abstract_state(self) -> State:
        return jax.tree.map(
            lambda x, placed: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), self.shapes, self.placed
        )

    def warmup(self, state: State, n: int) -> tuple[State, dict[str, Any]]:
        stacks = dict(state.decomposition["components"]["4x4_C3"])
        stacks["U"] = stacks["U"] * jnp.asarray(0.9**n, jnp.float32)
        time.sleep(self.delay)
        return state._replace(decomposition=state.decomposition | {"components": {"4x4_C3": stacks}}), {}

    def step(self, state: State, tokens: np.ndarray) -> tuple[State, dict[str, Any]]:
        time.sleep(self.delay)
        return self._step(state, tokens)

    def _update(self, state: State, tokens: jax.Array) -> tuple[State, dict[str, Any]]:
        d, p = state
        v, mu, step = d["components"]["4x4_C3"]["V"], p["optim"]["components"]["mu"], p["step"] + 1
        gradient = v - jnp.mean(tokens.astype(jnp.float32)) / jnp.float32(50)
        bad = jnp.any(step == self.poison)
        mu = jnp.where(bad, mu, jnp.float32(0.9) * mu + gradient)
        v = jnp.where(bad, v, v - jnp.float32(0.05) * mu)
        row = jnp.where(bad, p["guard"]["in_a_row"] + 1, 0)
        total = p["guard"]["total"] + bad.astype(jnp.int32)
        loss = jnp.where(bad, jnp.float32(jnp.nan), jnp.mean(gradient**2))
        stacks = d["components"]["4x4_C3"] | {"V": v}
        new = State(
            d | {"components": {"4x4_C3": stacks}},
            p | {"step": step, "optim": {"components": {"mu": mu}}, "guard": {"in_a_row": row, "total": total}},
        )
        metrics = {
            "loss/total": loss,
            "loss/recon/stochastic": loss,
            "l0/mean": jnp.mean(jnp.abs(v)),
            "guard/in_a_row": row,
            "guard/skipped_total": total,
            "guard/bad_term": jnp.where(bad, 1, -1),
        }
        return new, metrics

    def evaluate(self, state: State, step: int, stopping: Callable[[], bool] = lambda: False) -> Evaluation | None:
        for _ in range(self.cfg.eval.batches):
            if stopping():
                return None
            time.sleep(self.delay)
        v = np.asarray(self._whole(state.decomposition["components"]["4x4_C3"]["V"]))
        metrics = {"eval/kl_ci": float(np.mean(v**2)), "eval/l0_mean": 2.0, "eval/ce_target": 1.5}
        metrics |= {f"eval/l0/{site}": float(i + 1) for i, site in enumerate(SITES)}
        arrays = {f"mean_ci/{site}": np.abs(v[i, 0]) for i, site in enumerate(SITES)}
        arrays |= {f"ci_hist/{site}": np.asarray([5, 3, 1, 9]) for site in SITES}
        return Evaluation(metrics, arrays | {"ci_hist_edges": np.linspace(0, 1, 5)})

    def end_warmup(self) -> None:
        pass

    def target_hash(self) -> str:
        return self.hash

    def placement_report(self) -> str:
        return "4x4_C3  replicated"

    def optimizer_report(self) -> str:
        return "all  adamw  3 leaves"

    def warnings(self) -> list[str]:
        return ["C 3 is below the rank 4 of model.layers.0.mlp.down_proj"]


class Acting(FakeTrainer):
    """Something happens to process ``process`` as it is built, or comes to update ``at``, or to the warm-up or
    evaluation there."""

    where, at, process, what = "step", 0, 0, ""
    done = 0

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self._maybe("build", 0)

    def _maybe(self, where: str, at: int) -> None:
        if (where, at, processes.index()) == (self.where, self.at, self.process):
            self._act()
        if self.what == "refuse" and where == "step" and at == self.at + 3:
            _limit(resource.RLIM_INFINITY)

    def _act(self) -> None:
        if self.what == "raise":
            raise ArithmeticError("what a bug says")
        if self.what == "refuse":
            return _limit(8192)
        for name in self.what.split("+"):
            os.kill(os.getpid(), signal.Signals[name])
            time.sleep(0.3)  # the watching thread runs

    def step(self, state: State, tokens: np.ndarray) -> tuple[State, dict[str, Any]]:
        self.done = int(state.progress["step"]) + 1
        self._maybe("step", self.done)
        return super().step(state, tokens)

    def warmup(self, state: State, n: int) -> tuple[State, dict[str, Any]]:
        self._maybe("warmup", n)
        return super().warmup(state, n)

    def evaluate(self, state: State, step: int, stopping: Callable[[], bool] = lambda: False) -> Evaluation | None:
        self._maybe("evaluate", step)
        return super().evaluate(state, step, stopping)


def _limit(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def acting(text: str) -> type[FakeTrainer]:
    where, at, process, what = text.split(":")
    return type("Here", (Acting,), {"where": where, "at": int(at), "process": int(process), "what": what})


def _pause_after_saves(seconds: float) -> None:
    real = Checkpoints.save

    def save(self: Checkpoints, step: int, state: Any) -> int:
        ended = real(self, step, state)
        time.sleep(seconds if processes.is_primary() else 0)
        return ended

    Checkpoints.save = save


def main(output_dir: str, *arguments: str) -> int:
    given = dict(text.split("=", 1) for text in arguments)
    own = {"delay": float(given.pop("delay", 0)), "megabytes": float(given.pop("megabytes", 0))}
    poison = tuple(int(p) for p in given.pop("poison", "").split(",") if p)
    resumed = given.pop("resume", None)
    _pause_after_saves(float(given.pop("pause", 0)))
    trainer = acting(given.pop("act")) if "act" in given else FakeTrainer
    cfg = config(output_dir, **{key.replace(".", "__"): yaml.safe_load(value) for key, value in given.items()})
    try:
        with processes.joined():
            if resumed:
                stored = read_config(Path(resumed)).model_copy(update={"stop_after": None})
                return loop.resume(stored, Path(resumed), [], lambda c: trainer(c, poison, **own))
            return loop.start(cfg, list(arguments), lambda c: trainer(c, poison, **own))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
