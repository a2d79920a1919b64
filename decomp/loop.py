"""The training loop: restore or begin, iterate, log, evaluate, save, stop (SPEC 7, 11; DESIGN 5).

Nothing here is numerics. The order at a step is log, evaluate, save: a checkpoint of step n means that the
lines of step n are written, which is what makes metrics.jsonl gapless after a resume.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from decomp import figures, init_from
from decomp.best import Best
from decomp.checkpoint import Checkpoints, Failed, Saved, human, tree_bytes
from decomp.config.errors import UserError
from decomp.config.schema import RunConfig
from decomp.folder import check_output, create, environment, record_launch, run_overrides, write_config, write_text
from decomp.lock import RunLock
from decomp.logger import Logger, open_logger, read_metrics
from decomp.manifest import good_steps
from decomp.mesh import peak_memory
from decomp.stop import Stop

DONE, DIVERGED, PREEMPTED = 0, 3, 75
WARMUP_CHUNK = 10  # faithfulness warm-up updates between two looks at the signals
GUARD = ("guard/in_a_row", "guard/skipped_total", "guard/bad_term")

State = Any  # state.State: NamedTuple(decomposition, progress)


class Data(Protocol):
    @property
    def corpus_hash(self) -> str: ...
    def batch(self, step: int, /) -> np.ndarray: ...


class Table(Protocol):
    def describe(self) -> str: ...
    def to_json(self) -> dict[str, Any]: ...


class Evaluation(Protocol):
    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def arrays(self) -> Mapping[str, np.ndarray]: ...


class Trainer(Protocol):
    """What the loop needs of build.Trainer."""

    @property
    def cfg(self) -> RunConfig: ...
    @property
    def term_names(self) -> Sequence[str]: ...
    @property
    def data(self) -> Data: ...
    @property
    def table(self) -> Table: ...
    def init_state(self) -> State: ...
    def abstract_state(self) -> State: ...
    def warmup(self, state: State, n: int, /) -> tuple[State, Mapping[str, Any]]: ...
    def end_warmup(self) -> None: ...
    def step(self, state: State, tokens: np.ndarray, /) -> tuple[State, Mapping[str, Any]]: ...
    def evaluate(self, state: State, step: int, /) -> Evaluation: ...
    def target_hash(self) -> str: ...
    def placement_report(self) -> str: ...
    def optimizer_report(self) -> str: ...
    def warnings(self) -> list[str]: ...


Build = Callable[[RunConfig], Trainer]


def start(cfg: RunConfig, overrides: Sequence[str], build: Build) -> int:
    """A new run: output folder checked, trainer built, folder minted, then ``run``. Returns the exit code."""
    check_output(cfg)
    cfg = init_from.pinned(cfg)
    trainer = build(cfg)  # before the folder: a target that does not load leaves nothing behind
    if (origin := init_from.find(cfg)) is not None:
        init_from.check(origin, trainer.table.to_json(), trainer.abstract_state().decomposition)
    return run(cfg, create(cfg, overrides), lambda _: trainer)


def resume(cfg: RunConfig, folder: Path, overrides: Sequence[str], build: Build) -> int:
    """Goes on with a stopped run; what was changed is written down once its checkpoint is found to fit."""

    def record() -> None:
        write_config(folder, cfg)
        record_launch(folder, "resume", overrides)

    return run(cfg, folder, build, record)


def run(cfg: RunConfig, folder: Path, build: Build, record: Callable[[], None] = lambda: None) -> int:
    """Trains in ``folder`` from its newest whole checkpoint, or from the beginning. Returns the exit code.

    ``record`` is called when the state is there and nothing has been trained.
    0: done, or stopped by ``stop_after``; 3: diverged; 75: a signal came and the state is saved. UserError for
    what a person can mend (exit code 2).
    """
    with RunLock(folder) as lock, contextlib.ExitStack() as stack:
        logger = stack.enter_context(contextlib.closing(open_logger(folder, cfg.steps, cfg.logger.progress)))
        stop = stack.enter_context(Stop(logger.say, lock.release))
        try:
            return Run(build(cfg), folder, lock, logger, stop, record).train()
        except UserError as error:
            logger.note(f"error: {error}")  # __main__ prints it; the log keeps it
            raise
        except Exception:
            logger.note(traceback.format_exc())
            raise


def identity(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint must agree on to be gone on from: sites, target and corpus (SPEC K2, case 25)."""
    return {"sites": trainer.table.to_json(), "target": trainer.target_hash(), "data": trainer.data.corpus_hash}


def evaluated(folder: Path, step: int) -> bool:
    """Whether metrics.jsonl holds the evaluation of ``step``."""
    return any(r["step"] == step and any(name.startswith("eval/") for name in r) for r in read_metrics(folder))


def complete(folder: Path, steps: int) -> str | None:
    """What to say of a run that has nothing left to do; None while it has."""
    saved = steps in good_steps(folder / "checkpoints")
    if not (saved and evaluated(folder, steps) and figures.is_reported(folder, steps)):
        return None
    return f"{folder}: complete, all {steps} updates are done; see {figures.REPORT} there"


class Run:
    """One process's work on a run folder, from restoring to the last table."""

    def __init__(
        self, trainer: Trainer, folder: Path, lock: RunLock, logger: Logger, stop: Stop, record: Callable[[], None]
    ):
        self.trainer, self.cfg = trainer, trainer.cfg
        self.folder, self.lock, self.logger, self.stop, self.record = folder, lock, logger, stop, record
        keep, self.best = self.cfg.checkpoint, Best(self.cfg.checkpoint, logger.say)
        self.checkpoints = Checkpoints(
            folder, keep.keep_last, keep.keep_every, identity(trainer), logger.say, self.best.of
        )
        self.retry = Retry()
        self.seen: tuple[int, dict[str, Any]] | None = None  # step and guard counters still on the device

    # ------------------------------------------------------------ the whole
    def train(self) -> int:
        try:
            state, step = self._begin()
            if state is None:
                return PREEMPTED
            return self._iterate(state, step)
        finally:
            self.checkpoints.close()
            self._report_saves(self.checkpoints.poll())

    def _iterate(self, state: State, step: int) -> int:
        cfg, trainer = self.cfg, self.trainer
        end = min(cfg.steps, cfg.stop_after or cfg.steps)
        with Prefetch(trainer.data.batch, step, end) as batches, Profiler(cfg.profile.steps, self.folder) as profiler:
            self.logger.tick(step)
            self.logger.pause()  # the first update compiles
            while step < end and not self.stop.requested:
                profiler.before(step + 1, state)
                state, metrics = trainer.step(state, batches.take(step))
                step += 1
                profiler.after(step, state)
                self.logger.tick(step)
                if self._diverged(step, metrics):
                    return DIVERGED
                self._at_step(step, state, metrics)
        return self._end(step, state)

    def _at_step(self, step: int, state: State, metrics: Mapping[str, Any]) -> None:
        """Log, evaluate, save: whatever is due after ``step`` updates."""
        cfg, last = self.cfg, step == self.cfg.steps
        if self.lock.lost:
            raise UserError(f"{self.folder}: another process has taken this run over: this one stops")
        if last or step % cfg.logger.every == 0:
            self._log(step, self._fetch(metrics))
        if not last and step % cfg.eval.every == 0 and not self.stop.requested:
            self._evaluate(step, state)
        self._report_saves(self.checkpoints.poll())
        again = self.retry.due()
        if not last and (again or step % cfg.checkpoint.every == 0):
            self._save(step, state)

    # ------------------------------------------------------------ beginning
    def _begin(self) -> tuple[State | None, int]:
        """(state, updates done); the state is None when a signal came before there was anything to save."""
        self._introduce()
        abstract = self.trainer.abstract_state()
        self.checkpoints.check_space(tree_bytes(abstract))
        found = self.checkpoints.restore(tuple(abstract))
        self.record()
        self.logger.cut(found[0] if found else 0)
        self.best.read(self.folder)
        if found is None:
            return self._fresh(abstract), 0
        step, pair = found
        self.logger.say(f"resumed from checkpoint {step}")
        state = type(abstract)(*pair)
        if step < self.cfg.steps and step % self.cfg.eval.every == 0 and not evaluated(self.folder, step):
            self._evaluate(step, state)  # a signal came between that checkpoint and its evaluation
        return state, step

    def _introduce(self) -> None:
        trainer, say = self.trainer, self.logger.say
        say(f"run folder: {self.folder}")
        write_text(self.folder / "placement.txt", trainer.placement_report().rstrip() + "\n")
        write_text(self.folder / "optimizer_groups.txt", trainer.optimizer_report().rstrip() + "\n")
        devices = [f"{d.id}: {d.device_kind} ({d.platform}, process {d.process_index})" for d in jax.devices()]
        write_text(self.folder / "environment.txt", environment(devices))
        for report in (trainer.table.describe(), trainer.optimizer_report(), trainer.placement_report()):
            say(report.rstrip())
        for warning in trainer.warnings():
            say(f"warning: {warning}")

    def _fresh(self, abstract: State) -> State | None:
        """The state before the first update; None when a signal came in the faithfulness warm-up."""
        state, origin = self.trainer.init_state(), init_from.find(self.cfg)
        if origin is None:
            return self._warm_up(state)
        init_from.tell(origin, self.trainer.target_hash(), self.logger.say)
        table = self.trainer.table.to_json()
        decomposition = init_from.restore(origin, table, abstract.decomposition, state.decomposition)
        init_from.record(origin, self.folder)
        return type(state)(decomposition, state.progress)

    def _warm_up(self, state: State) -> State | None:
        """Faithfulness warm-up (SPEC T6). A signal leaves nothing to save: its optimizer is not kept."""
        faithfulness = self.cfg.loss.faithfulness
        total = faithfulness.warmup.steps if faithfulness else 0
        if total:
            self.logger.say(f"faithfulness warm-up: {total} updates")
        for done in range(0, total, WARMUP_CHUNK):
            if self.stop.requested:
                self.logger.say(f"stopped in the faithfulness warm-up, before step 0: {self._again()}")
                return None
            state, _ = self.trainer.warmup(state, min(WARMUP_CHUNK, total - done))
        self.trainer.end_warmup()
        return state

    # ------------------------------------------------------------ at a step
    def _fetch(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {name: value.item() for name, value in jax.device_get(dict(metrics)).items()}
        if "guard/bad_term" in values:
            values["guard/bad_term"] = self._term(values["guard/bad_term"])
        return values

    def _term(self, index: float) -> str | None:
        return self.trainer.term_names[int(index)] if index >= 0 else None

    def _diverged(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Looks at the guard (SPEC T7) of the update BEFORE this one: by now it is done, so nothing waits."""
        seen, self.seen = self.seen, (step, {name: metrics[name] for name in GUARD if name in metrics})
        return seen is not None and self._judge(*seen)

    def _judge(self, step: int, guard: Mapping[str, Any]) -> bool:
        values = {name: int(value) for name, value in jax.device_get(dict(guard)).items()}
        if not values.get("guard/in_a_row"):
            return False
        name, row = self._term(values.get("guard/bad_term", -1)) or "a gradient", values["guard/in_a_row"]
        self.logger.say(f"step {step}: {name} was not finite: update skipped ({row} in a row)")
        if row < self.cfg.max_skipped:
            return False
        self._report_saves(self.checkpoints.wait())
        good = good_steps(self.checkpoints.root)
        where = f"the last good checkpoint is {self.checkpoints.root / str(good[-1])}" if good else "no checkpoint yet"
        self.logger.say(f"diverged: {name} was not finite in {row} updates in a row, the last one {step}; {where}")
        return True

    def _evaluate(self, step: int, state: State) -> Evaluation:
        result = self.trainer.evaluate(state, step)
        if not evaluated(self.folder, step):
            self._log(step, result.metrics)
        self.logger.pause()
        return result

    def _log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.logger.metrics(step, metrics)
        self.best.see(step, metrics)

    # ------------------------------------------------------------ saving
    def _save(self, step: int, state: State) -> None:
        self.logger.sync()
        self.checkpoints.save(step, tuple(state))
        self._report_saves(self.checkpoints.poll())

    def _report_saves(self, events: Sequence[Saved | Failed], then: str = "; trying again") -> None:
        for event in events:
            match event:
                case Saved(step, seconds, nbytes):
                    self.retry.succeeded()
                    self.logger.say(f"checkpoint {step} saved ({human(nbytes)}, {seconds:.1f} s)")
                case Failed(step, reason):
                    self.retry.failed()
                    good = good_steps(self.checkpoints.root)
                    kept = f"the last good checkpoint is {good[-1]}" if good else "there is no checkpoint yet"
                    self.logger.say(f"warning: checkpoint {step} was not saved: {reason}; {kept}{then}")

    def _save_for_good(self, step: int, state: State) -> str | None:
        """Saves and waits, twice if need be; the reason if ``step`` is still not a checkpoint."""
        reason = None
        for then in ("; trying again", ""):
            if step in good_steps(self.checkpoints.root):
                return None
            self.logger.sync()
            self.checkpoints.save(step, tuple(state))
            events = self.checkpoints.wait()
            self._report_saves(events, then)
            reason = next((e.reason for e in reversed(events) if isinstance(e, Failed)), reason)
        return None if step in good_steps(self.checkpoints.root) else reason or "unknown"

    # ------------------------------------------------------------ ending
    def _end(self, step: int, state: State) -> int:
        if self.seen and self._judge(*self.seen):
            return DIVERGED
        reason = self._save_for_good(step, state)
        if (peak := peak_memory(jax.local_devices())) is not None:
            self.logger.say(peak)
        complete = step == self.cfg.steps and not self.stop.requested
        if complete:
            # A disk that refused the checkpoint refuses the pictures too, and that is not the news.
            with contextlib.suppress(*([UserError] if reason else [])):
                self._finish(step, state)
        if reason is not None:
            good = good_steps(self.checkpoints.root)
            kept = f"the last good one is {good[-1]}" if good else "there is none"
            raise UserError(f"{self.checkpoints.root}: checkpoint {step} could not be saved: {reason}; {kept}")
        if complete:
            return DONE
        why = self.stop.requested or f"stop_after={self.cfg.stop_after}"
        self.logger.say(f"{why}: stopped after {step} of {self.cfg.steps} updates; go on with: {self._again()}")
        return PREEMPTED if self.stop.requested else DONE

    def _again(self) -> str:
        if good_steps(self.checkpoints.root):
            return f"python -m decomp resume run={figures.shell_path(self.folder)}"
        return f"python -m decomp {run_overrides(self.folder)}".rstrip()

    def _finish(self, step: int, state: State) -> None:
        """The final evaluation, its table, the figures and the report; of a complete run only what is missing."""
        if (said := complete(self.folder, step)) is not None:
            return self.logger.say(said)
        self.logger.say("final evaluation on held-out data")
        result = self._evaluate(step, state)
        figures.save_arrays(self.folder, step, result.arrays)
        self.logger.table(f"final evaluation after {step} updates, on held-out data", result.metrics)
        if (best := self.best.of(good_steps(self.checkpoints.root))) is not None:
            self.logger.say(f"best checkpoint by {self.best.metric}: {best} ({self.best.values[best]:.4g})")
        self.logger.say(f"report: {figures.report(self.folder)}")


class Retry:
    """When a failed save is tried again: at once, then after 2, 4, 8, ... 256 more updates."""

    def __init__(self) -> None:
        self._failures, self._left = 0, 0

    def failed(self) -> None:
        self._failures += 1
        self._left = min(256, 2 ** (self._failures - 1))

    def succeeded(self) -> None:
        self._failures = 0

    def due(self) -> bool:
        """Asked once per update."""
        self._left -= 1
        return self._failures > 0 and self._left == 0


class Prefetch:
    """The batch after the next is made while the device works. ``batch`` is pure, so only time is at stake (R3)."""

    def __init__(self, batch: Callable[[int], np.ndarray], first: int, end: int, ahead: int = 2):
        self._batch, self._end, self._ahead = batch, end, ahead
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._next = first
        self._futures: dict[int, Future[np.ndarray]] = {}

    def take(self, step: int) -> np.ndarray:
        """Batch ``step`` [B, T]."""
        while self._next < min(self._end, step + 1 + self._ahead):
            self._futures[self._next] = self._pool.submit(self._batch, self._next)
            self._next += 1
        return self._futures.pop(step).result()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class Profiler:
    """A jax.profiler trace of updates first..last (counted as metrics.jsonl counts them) in ``profile/``."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path):
        self.first, self.last = steps or (0, -1)
        self.path, self.on = folder / "profile", False

    def before(self, step: int, state: State) -> None:
        if not self.on and self.first <= step <= self.last:
            jax.block_until_ready(state)  # earlier updates stay out of the trace
            jax.profiler.start_trace(str(self.path))
            self.on = True

    def after(self, step: int, state: State) -> None:
        if self.on and step >= self.last:
            jax.block_until_ready(state)
            self._close()

    def _close(self) -> None:
        if self.on:
            self.on = False
            jax.profiler.stop_trace()

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
