"""Metrics and messages: metrics.jsonl is the truth, everything else is a sink beside it.

A metrics line is ``{"step": updates done, "time": Unix seconds, **metrics}`` (SPEC K3). The file is append-only
while training and cut back to the restored step on resume, so it is gapless and single (case 40).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

from decomp import processes
from decomp.config.errors import UserError
from decomp.folder import explain, write_text, writing

METRICS = "metrics.jsonl"
LOG = "run.log"


class Sink(Protocol):
    """Where a record or a message goes besides metrics.jsonl."""

    def metrics(self, record: Mapping[str, Any]) -> None: ...
    def say(self, text: str) -> None: ...
    def table(self, title: str, values: Mapping[str, Any]) -> None: ...
    def tick(self, step: int) -> None: ...
    def pause(self) -> None: ...
    def close(self) -> None: ...


class Logger:
    """metrics.jsonl and its sinks; used by one process of a run."""

    def __init__(self, folder: Path, sinks: tuple[Sink, ...]):
        self.folder, self.sinks = folder, sinks
        self.path = folder / METRICS
        heal(self.path)
        with writing(self.path):
            self._file = self.path.open("ab", buffering=0)

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends one line and flushes it. UserError when the disk is full or the folder is gone."""
        record = {"step": step, "time": round(time.time(), 3)} | {k: v for k, v in values.items() if k != "step"}
        self._append(record_line(record))
        for sink in self.sinks:
            sink.metrics(record)

    def say(self, text: str) -> None:
        """A message for the person, also kept in logs/run.log."""
        for sink in self.sinks:
            sink.say(text)

    def table(self, title: str, values: Mapping[str, Any]) -> None:
        """Names and figures in two columns."""
        for sink in self.sinks:
            sink.table(title, values)

    def note(self, text: str) -> None:
        """A line for logs/run.log alone, for what the console shows in another way."""
        for sink in self.sinks:
            if isinstance(sink, LogFile):
                sink.say(text)

    def tick(self, step: int) -> None:
        """``step`` updates are done; called once before the first."""
        for sink in self.sinks:
            sink.tick(step)

    def pause(self) -> None:
        """Something else than training begins: the pace shown leaves it out."""
        for sink in self.sinks:
            sink.pause()

    def sync(self) -> None:
        """Everything logged is on the disk, so that a checkpoint never knows more than metrics.jsonl."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def cut(self, step: int) -> None:
        """Drops all lines after ``step``: those updates will be done again."""
        self._file.close()
        kept = [line for line, record in _lines(self.path) if record["step"] <= step]
        write_text(self.path, "".join(kept))
        with writing(self.path):
            self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        self._file.close()
        for sink in self.sinks:
            sink.close()

    def _append(self, line: str) -> None:
        data = line.encode()
        end = self._file.seek(0, os.SEEK_END)
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise FileNotFoundError(2, "deleted while the run was writing it")
            if (written := self._file.write(data)) != len(data):
                raise OSError(28, f"{written} of {len(data)} bytes written")
        except OSError as error:
            self._file.truncate(end)  # no torn line stays behind
            raise explain(error, self.path) from error


class SideLogger(Logger):
    """A process that is not the primary: its messages go to a log of its own, its metrics are the primary's too."""

    def __init__(self, folder: Path, sinks: tuple[Sink, ...]):
        self.folder, self.sinks = folder, sinks

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        pass

    def sync(self) -> None:
        pass

    def cut(self, step: int) -> None:
        pass

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


# ---------------------------------------------------------------- the file
def record_line(record: Mapping[str, Any]) -> str:
    """One line of JSON that every reader takes: NaN and infinities become the texts ``float()`` reads."""
    return json.dumps({key: _plain(value) for key, value in record.items()}, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _number(value: Any) -> Any:
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All records, oldest first, with numbers as floats again; a torn last line is left out."""
    return [{k: _number(v) for k, v in record.items()} for _, record in _lines(folder / METRICS)]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise explain(error, path) from error
    for line in text.splitlines(keepends=True):
        record = _parse(line)
        if record is not None:
            yield line, record


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line) if line.endswith("\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def heal(path: Path) -> None:
    """Removes the line a killed process left half written: everything after the last whole line."""
    with writing(path):
        if not path.exists() or path.stat().st_size == 0:
            return
        with path.open("rb+") as file:
            data = file.read()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                file.truncate(whole)


# ---------------------------------------------------------------- sinks
class LogFile:
    """A file of logs/: every message with its time. It alone does not stop a run: metrics.jsonl tells of a full disk
    or a folder that is gone."""

    def __init__(self, folder: Path, name: str = LOG):
        path = folder / "logs" / name
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            self._file: TextIO = path.open("a", encoding="utf-8")

    def metrics(self, record: Mapping[str, Any]) -> None:
        pass

    def tick(self, step: int) -> None:
        pass

    def pause(self) -> None:
        pass

    def say(self, text: str) -> None:
        with suppress(OSError):
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            self._file.flush()

    def table(self, title: str, values: Mapping[str, Any]) -> None:
        self.say("\n  ".join(plain_table(title, values)))

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


class Pace:
    """Updates per second over the last ``window`` updates, compiles and evaluations left out."""

    def __init__(self, window: int = 50):
        self._last: tuple[float, int] | None = None
        self._recent: deque[tuple[float, int]] = deque(maxlen=window)  # (seconds, updates)

    def tick(self, step: int) -> None:
        now = time.monotonic()
        if self._last is not None:
            self._recent.append((now - self._last[0], step - self._last[1]))
        self._last = now, step

    def pause(self) -> None:
        """What happens up to the next tick is not training."""
        self._last = None

    def speed(self) -> float | None:
        seconds = sum(s for s, _ in self._recent)
        return sum(n for _, n in self._recent) / seconds if seconds > 0 else None

    def left(self, todo: int) -> str:
        """Time left as h:mm:ss; ``-:--:--`` while unknown."""
        speed = self.speed()
        if not speed:
            return "-:--:--"
        seconds = math.ceil(todo / speed)
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _loss_and_l0(record: Mapping[str, Any]) -> str:
    return f"loss {figure(record.get('loss/total'))}  L0 {figure(record.get('l0/mean'))}"


def figure(value: Any) -> str:
    """A number with four digits that count; ``-`` for what is none."""
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def plain_table(title: str, values: Mapping[str, Any]) -> list[str]:
    """The title, then one aligned line per figure."""
    width = max(map(len, values), default=0)
    return [title, *(f"{name:<{width}}  {figure(value):>10}" for name, value in values.items())]


class PlainConsole:
    """Plain lines: a log file, a pipe, or ``logger.progress=false``."""

    def __init__(self, steps: int, console: Console):
        self.steps, self.console, self.pace = steps, console, Pace()

    def metrics(self, record: Mapping[str, Any]) -> None:
        if "loss/total" not in record:
            return
        speed, step = self.pace.speed(), record["step"]
        rate = f"{speed:.3g} steps/s" if speed else "- steps/s"
        self.say(f"step {step}/{self.steps}  {_loss_and_l0(record)}  {rate}  {self.pace.left(self.steps - step)} left")

    def tick(self, step: int) -> None:
        self.pace.tick(step)

    def pause(self) -> None:
        self.pace.pause()

    def say(self, text: str) -> None:
        # soft_wrap: a log line is one line, however narrow the terminal; no markup: names may hold brackets.
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def table(self, title: str, values: Mapping[str, Any]) -> None:
        if not self.console.is_terminal:
            return self.say("\n  ".join(plain_table(title, values)))
        table = Table("figure", Column(header="value", justify="right"), title=Text(title), title_justify="left")
        for name, value in values.items():
            table.add_row(Text(name), figure(value))
        self.console.print(table)

    def close(self) -> None:
        pass


class _PaceColumn(ProgressColumn):
    def __init__(self, pace: Pace):
        super().__init__()
        self.pace = pace

    def render(self, task: Task) -> Text:
        speed = self.pace.speed()
        rate = f"{speed:.3g}" if speed else "-"
        return Text(f"{rate} steps/s  {self.pace.left(int((task.total or 0) - task.completed))} left")


class BarConsole(PlainConsole):
    """A progress bar with loss, L0, steps per second and time left, and messages above it."""

    def __init__(self, steps: int, console: Console):
        super().__init__(steps, console)
        what = TextColumn("{task.fields[what]}", markup=False)
        self.progress = Progress(MofNCompleteColumn(), BarColumn(None), what, _PaceColumn(self.pace), console=console)
        self.task = self.progress.add_task("", total=steps, what="compiling the step", start=False)

    def metrics(self, record: Mapping[str, Any]) -> None:
        if "loss/total" in record:
            self.progress.update(self.task, what=_loss_and_l0(record))

    def tick(self, step: int) -> None:
        if not self.progress.live.is_started:
            self.progress.start()
        super().tick(step)
        self.progress.update(self.task, completed=step)

    def close(self) -> None:
        self.progress.stop()


def console_sink(steps: int, progress: bool, console: Console | None = None) -> Sink:
    """The bar on a terminal, plain lines otherwise."""
    where = console or Console()
    return BarConsole(steps, where) if progress and where.is_terminal else PlainConsole(steps, where)


def open_logger(folder: Path, steps: int, progress: bool, console: Console | None = None) -> Logger:
    """The logger of a run folder. UserError where it cannot be written."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder")
    if not processes.is_primary():
        return SideLogger(folder, (LogFile(folder, f"{processes.index()}.log"),))
    return Logger(folder, (LogFile(folder), console_sink(steps, progress, console)))
