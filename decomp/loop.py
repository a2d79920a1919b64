"""The training loop: restore or begin, iterate, log, evaluate, save, stop (SPEC 7, 11; DESIGN 5).

Nothing here is numerics. The order at a step is log, evaluate, save: a checkpoint of step n means that the
lines of step n are written, which is what makes metrics.jsonl gapless after a resume.

With several processes each runs this loop. What decides where it goes is the same on all of them: numbers of the step,
``Agreement``, or ``from_primary``; and the primary alone writes.
"""

from __future__ import annotations

import contextlib
import shlex
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from decomp import figures, init_from, processes
from decomp.agreement import Agreement
from decomp.best import Best
from decomp.checkpoint import Checkpoints, Failed, Saved, human, tree_bytes
from decomp.config.errors import UserError
from decomp.config.schema import RunConfig
from decomp.data.prefetch import Prefetch
from decomp.folder import check_output, create, environment, record_launch, run_overrides, write_config, write_text
from decomp.lock import RunLock
from decomp.logger import Logger, open_logger, read_metrics
from decomp.manifest import good_steps
from decomp.mesh import peak_memory
from decomp.profiler import Profiler
from decomp.retry import Retry
from decomp.stop import ASKS, Stop, early
from decomp.trainer import Evaluation, State, Trainer

DONE, DIVERGED, PREEMPTED = 0, 3, 75
WARMUP_CHUNK = 10  # faithfulness warm-up updates between two looks at the signals
ASKS_BY_NAME = {sign.name: number for number, sign in enumerate(ASKS, 1)}
GUARD = ("guard/in_a_row", "guard/skipped_total", "guard/bad_term")

Build = Callable[[RunConfig], Trainer]


def start(cfg: RunConfig, overrides: Sequence[str], build: Build) -> int:
    """A new run: output folder checked, trainer built, folder minted, then ``run``. Returns the exit code.

    A signal before the folder is minted leaves none behind.
    """
    again = f"python -m decomp {shlex.join(overrides)}".rstrip()
    with early(processes.tell_interrupted) as stop:
        if processes.is_primary():
            check_output(cfg)
        cfg = init_from.pinned(cfg)
        origin = init_from.of_pinned(cfg)
        if _asked_early(stop, again):  # while modules were imported and processes joined
            return PREEMPTED
        trainer = build(cfg)  # before the folder: a target that does not load leaves nothing behind
        if origin is not None:
            init_from.check(origin, trainer.table.to_json(), trainer.abstract_state().decomposition)
        if _asked_early(stop, again):
            return PREEMPTED
        folder = processes.from_primary(lambda: str(create(cfg, overrides)))
        return run(cfg, Path(folder), lambda _: trainer, origin=origin)


def _asked_early(stop: Stop, again: str) -> bool:
    """Whether a signal came to any process before there is a run folder; the primary says so."""
    asked = processes.any_of(stop.requested)
    if asked is not None and processes.is_primary():
        print(f"{asked}: stopped before the first update, nothing to save; start again with: {again}", flush=True)
    return asked is not None


def resume(cfg: RunConfig, folder: Path, overrides: Sequence[str], build: Build) -> int:
    """Goes on with a stopped run; what was changed is written down once its checkpoint is found to fit."""

    def record() -> None:
        write_config(folder, cfg)
        record_launch(folder, "resume", overrides)

    return run(cfg, folder, build, record)


def run(
    cfg: RunConfig,
    folder: Path,
    build: Build,
    record: Callable[[], None] = lambda: None,
    origin: init_from.Origin | None = None,
) -> int:
    """Trains in ``folder`` from its newest whole checkpoint, or from the beginning. Returns the exit code.

    ``record`` is called, on the primary, when the state is there and nothing has been trained. ``origin`` is what
    ``cfg.init_from`` names, where it is checked already.
    0: done, or stopped by ``stop_after``; 3: diverged; 75: a signal came and what there is to save is saved.
    UserError for what a person can mend (exit code 2).
    """
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(RunLock(folder)) if processes.is_primary() else None
        logger = stack.enter_context(contextlib.closing(open_logger(folder, cfg.steps, cfg.logger.progress)))
        stack.enter_context(processes.farewell(lambda reason: _farewell(reason, logger, lock)))
        stop = stack.enter_context(Stop(logger.say, lambda: _at_once(lock)))
        try:
            if _stays(folder, logger, stop):
                return PREEMPTED
            trainer = build(cfg)
            if _stays(folder, logger, stop):
                return PREEMPTED
            return Run(trainer, folder, lock, logger, stop, record, origin).train()
        except UserError as error:
            logger.note(f"error: {error}")  # __main__ prints it; the log keeps it
            raise
        except Exception:
            logger.note(traceback.format_exc())
            raise


def _stays(folder: Path, logger: Logger, stop: Stop) -> bool:
    """Whether a signal came before a run that has checkpoints is gone on with: it stays as it is. A run that has none
    makes one."""
    if not processes.from_primary(lambda: bool(good_steps(folder / "checkpoints"))):
        return False
    if (asked := processes.any_of(stop.requested)) is None:
        return False
    logger.say(f"{asked}: stopped before an update was made; go on with: {_going_on(folder)}")
    return True


def _going_on(folder: Path) -> str:
    return f"python -m decomp resume run={figures.shell_path(folder)}"


def _farewell(reason: str, logger: Logger, lock: RunLock | None) -> None:
    logger.note(f"error: {reason}")
    if lock is not None:
        lock.release()


def _at_once(lock: RunLock | None) -> None:
    if lock is not None:
        lock.release()
    processes.tell_interrupted()


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
        self,
        trainer: Trainer,
        folder: Path,
        lock: RunLock | None,
        logger: Logger,
        stop: Stop,
        record: Callable[[], None],
        origin: init_from.Origin | None,
    ):
        self.trainer, self.cfg = trainer, trainer.cfg
        self.folder, self.lock, self.logger, self.stop, self.record = folder, lock, logger, stop, record
        self.origin = origin
        keep, self.best = self.cfg.checkpoint, Best(self.cfg.checkpoint, logger.say)
        self.checkpoints = Checkpoints(
            folder, keep.keep_last, keep.keep_every, identity(trainer), logger.say, self.best.of
        )
        self.agreement = Agreement((0, 0))
        self.asked: str | None = None  # the signal that stops the run, once all processes know of it
        self.retry = Retry()
        self.seen: tuple[int, dict[str, Any]] | None = None  # step and guard counters still on the device
        self.owed = False  # whether a save is due that waits for an update that is not skipped

    # ------------------------------------------------------------ the whole
    def train(self) -> int:
        with contextlib.ExitStack() as stack:
            if not processes.several():  # else a failure is not delayed by a save that waits for other processes
                stack.callback(self._close)
            state, step = self._begin()
            code = PREEMPTED if state is None else self._iterate(state, step)
            if processes.several():
                self._close()
            return code

    def _close(self) -> None:
        self.checkpoints.close()
        self._report_saves(self.checkpoints.poll())

    def _iterate(self, state: State, step: int) -> int:
        cfg, trainer = self.cfg, self.trainer
        end = min(cfg.steps, cfg.stop_after or cfg.steps)
        traced = cfg.profile.steps if processes.is_primary() else None
        with Prefetch(trainer.data.batch, step, end) as batches, Profiler(traced, self.folder) as profiler:
            self.logger.tick(step)
            self.logger.pause()  # the first update compiles
            while step < end and not self.asked:
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
        self._look()
        if self.lock is not None and self.lock.lost:
            raise UserError(f"{self.folder}: another process has taken this run over: this one stops")
        if last or step % cfg.logger.every == 0:
            self._log(step, self._fetch(metrics))
        if not last and step % cfg.eval.every == 0 and not self.asked:
            self._evaluate(step, state)
        again = self.retry.due()
        self.owed = self.owed or again or step % cfg.checkpoint.every == 0
        if not last and self.owed and not self._skipped():
            self._save(step, state)
            self.owed = False

    def _look(self) -> bool:
        """Whether the run stops, as all processes know it; and what has become of saves on all of them."""
        mine = self.stop.requested
        sign, unended = self.agreement(ASKS_BY_NAME.get(mine or "", 0), -self.checkpoints.ended)
        if sign and not self.asked:
            self.asked = ASKS[sign - 1].name
            if self.asked != mine:
                self.logger.say(f"{self.asked} reached another process: finishing this step and saving")
        self._report_saves(self.checkpoints.poll(-unended))
        return self.asked is not None

    # ------------------------------------------------------------ beginning
    def _begin(self) -> tuple[State | None, int]:
        """(state, updates done); the state is None when a signal came before there was anything to save."""
        self._introduce()
        abstract = self.trainer.abstract_state()
        self.checkpoints.check_space(tree_bytes(abstract))
        found = self.checkpoints.restore(tuple(abstract))
        if processes.is_primary():
            self.record()
        self.logger.cut(found[0] if found else 0)
        self.best.read(self.folder)
        if found is None:
            return self._fresh(abstract), 0
        step, pair = found
        self.logger.say(f"resumed from checkpoint {step}")
        state = type(abstract)(*pair)
        due = step < self.cfg.steps and step % self.cfg.eval.every == 0
        if due and not processes.from_primary(lambda: evaluated(self.folder, step)):
            self._evaluate(step, state)  # a signal came between that checkpoint and its evaluation
        return state, step

    def _introduce(self) -> None:
        trainer, say = self.trainer, self.logger.say
        say(f"run folder: {self.folder}")
        if processes.is_primary():
            self._describe()
        for report in (trainer.table.describe(), trainer.optimizer_report(), trainer.placement_report()):
            say(report.rstrip())
        for warning in trainer.warnings():
            say(f"warning: {warning}")

    def _describe(self) -> None:
        write_text(self.folder / "placement.txt", self.trainer.placement_report().rstrip() + "\n")
        write_text(self.folder / "optimizer_groups.txt", self.trainer.optimizer_report().rstrip() + "\n")
        devices = [f"{d.id}: {d.device_kind} ({d.platform}, process {d.process_index})" for d in jax.devices()]
        write_text(self.folder / "environment.txt", environment(devices))

    def _fresh(self, abstract: State) -> State | None:
        """The state before the first update; None when a signal came in the faithfulness warm-up."""
        origin = self.origin or init_from.of_pinned(init_from.pinned(self.cfg))
        state = self.trainer.init_state()
        if origin is None:
            return self._warm_up(state)
        init_from.tell(origin, self.trainer.target_hash(), self.logger.say)
        table = self.trainer.table.to_json()
        decomposition = init_from.restore(origin, table, abstract.decomposition, state.decomposition)
        if processes.is_primary():
            init_from.record(origin, self.folder)
        return type(state)(decomposition, state.progress)

    def _warm_up(self, state: State) -> State | None:
        """Faithfulness warm-up (SPEC T6). A signal leaves nothing to save: its optimizer is not kept."""
        faithfulness = self.cfg.loss.faithfulness
        total = faithfulness.warmup.steps if faithfulness else 0
        if total:
            self.logger.say(f"faithfulness warm-up: {total} updates")
        before = None
        for done in range(0, total, WARMUP_CHUNK):
            jax.block_until_ready(before)  # the host would run ahead of the devices, and of what it hears meanwhile
            if self._look():
                self.logger.say(f"stopped in the faithfulness warm-up, before step 0: {self._again()}")
                return None
            state, before = self.trainer.warmup(state, min(WARMUP_CHUNK, total - done))
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

    def _skipped(self) -> bool:
        """Whether the update just made was skipped (SPEC T7): saves of one state that is stuck would take the place of
        those from before it. Waits for the update, as the save would."""
        return self.seen is not None and jax.device_get(self.seen[1]).get("guard/in_a_row", 0) > 0

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

    def _evaluate(self, step: int, state: State) -> Evaluation | None:
        """None where a signal came: the evaluation is done again on resume, for it can be long."""
        result = self.trainer.evaluate(state, step, self._look)
        if result is None:
            self.logger.say(f"the evaluation after {step} updates is left for the resumed run")
        elif not evaluated(self.folder, step):
            self._log(step, result.metrics)
        self.logger.pause()
        return result

    def _log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.logger.metrics(step, metrics)
        self.best.see(step, metrics)

    # ------------------------------------------------------------ saving
    def _save(self, step: int, state: State) -> None:
        self.logger.sync()
        ended = self.checkpoints.save(step, tuple(state))
        self._report_saves(self.checkpoints.poll(ended))  # this one is told later, at the same step everywhere

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
            if self._is_saved(step):
                return None
            self.logger.sync()
            self.checkpoints.save(step, tuple(state))
            events = self.checkpoints.wait()
            self._report_saves(events, then)
            reason = next((e.reason for e in reversed(events) if isinstance(e, Failed)), reason)
        return None if self._is_saved(step) else reason or "unknown"

    def _is_saved(self, step: int) -> bool:
        return processes.from_primary(lambda: step in good_steps(self.checkpoints.root))

    # ------------------------------------------------------------ ending
    def _end(self, step: int, state: State) -> int:
        if self.seen and self._judge(*self.seen):
            return DIVERGED
        reason = self._save_for_good(step, state)
        if (peak := peak_memory(jax.local_devices())) is not None:
            self.logger.say(peak)
        complete = step == self.cfg.steps and not self.asked
        if complete:
            # A disk that refused the checkpoint refuses the pictures too, and that is not the news.
            with contextlib.suppress(*([UserError] if reason else [])):
                complete = self._finish(step, state)
        if reason is not None:
            good = good_steps(self.checkpoints.root)
            kept = f"the last good one is {good[-1]}" if good else "there is none"
            raise UserError(f"{self.checkpoints.root}: checkpoint {step} could not be saved: {reason}; {kept}")
        if complete:
            return DONE
        why = self.asked or f"stop_after={self.cfg.stop_after}"
        self.logger.say(f"{why}: stopped after {step} of {self.cfg.steps} updates; go on with: {self._again()}")
        return PREEMPTED if self.asked else DONE

    def _again(self) -> str:
        if good_steps(self.checkpoints.root):
            return _going_on(self.folder)
        return f"python -m decomp {run_overrides(self.folder)}".rstrip()

    def _finish(self, step: int, state: State) -> bool:
        """The final evaluation, its table, the figures and the report; of a complete run only what is missing. False
        where a signal came before the end."""
        if (said := processes.from_primary(lambda: complete(self.folder, step))) is not None:
            self.logger.say(said)
            return True
        self.logger.say("final evaluation on held-out data")
        result = self._evaluate(step, state)
        if result is not None and processes.is_primary():
            self._report(step, result)
        return result is not None

    def _report(self, step: int, result: Evaluation) -> None:
        figures.save_arrays(self.folder, step, result.arrays)
        self.logger.table(f"final evaluation after {step} updates, on held-out data", result.metrics)
        if (best := self.best.of(good_steps(self.checkpoints.root))) is not None:
            self.logger.say(f"best checkpoint by {self.best.metric}: {best} ({self.best.values[best]:.4g})")
        self.logger.say(f"report: {figures.report(self.folder)}")
