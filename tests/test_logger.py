"""decomp/logger.py: SPEC K3, case 40."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from small_disk import fill, small_disk

from decomp import logger
from decomp.config.errors import UserError
from decomp.logger import Logger, Pace, open_logger, read_metrics


def _open(folder: Path) -> Logger:
    return Logger(folder, ())


def test_one_line_per_record_flushed_at_once(tmp_path: Path) -> None:
    log = _open(tmp_path)
    log.metrics(2, {"loss/total": 1.5})
    log.metrics(4, {"loss/total": 0.5, "guard/bad_term": None})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [r["step"] for r in records] == [2, 4] and records[1]["guard/bad_term"] is None
    assert list(records[0]) == ["step", "time", "loss/total"]
    log.close()


def test_what_is_not_finite_is_valid_json_and_comes_back(tmp_path: Path) -> None:
    log = _open(tmp_path)
    log.metrics(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e-300})
    log.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    (record,) = read_metrics(tmp_path)
    assert math.isnan(record["a"]) and record["b"] == math.inf and record["c"] == -math.inf and record["d"] == 1e-300


def test_resume_cuts_back_and_goes_on_without_a_gap(tmp_path: Path) -> None:
    """SPEC K3: lines after the restored step go, each step stands once."""
    log = _open(tmp_path)
    for step in range(1, 8):
        log.metrics(step, {"loss/total": step})
    log.metrics(7, {"eval/kl": 1})
    log.close()
    log = _open(tmp_path)
    log.cut(5)
    for step in (6, 7):
        log.metrics(step, {"loss/total": step})
    log.close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_torn_last_line_is_healed(tmp_path: Path) -> None:
    whole = '{"step": 1, "time": 0}\n'
    (tmp_path / "metrics.jsonl").write_text(whole + '{"step": 2, "ti')
    assert [r["step"] for r in read_metrics(tmp_path)] == [1]
    log = _open(tmp_path)
    log.metrics(2, {})
    log.close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]


def test_lines_that_are_no_records_do_not_survive_a_cut(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n[]\nnonsense\n{"loss": 1}\n{"step": 2}\n')
    log = _open(tmp_path)
    log.cut(2)
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_full_disk_is_one_line_and_tears_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "full", "256k") as disk:
        log = _open(disk)
        log.metrics(1, {"a": 1.0})
        ballast = fill(disk)
        with pytest.raises(UserError, match=r"metrics\.jsonl: the disk is full"):
            for step in range(2, 2000):
                log.metrics(step, {"text": "x" * 500})
        whole = read_metrics(disk)
        assert (disk / "metrics.jsonl").read_bytes().endswith(b"\n")
        assert [r["step"] for r in whole] == list(range(1, len(whole) + 1))
        ballast.unlink()
        log.metrics(len(whole) + 1, {})
        assert len(read_metrics(disk)) == len(whole) + 1
        log.close()


def test_a_partial_write_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a disk does whose last free bytes take half of a line."""
    log = _open(tmp_path)
    log.metrics(1, {})
    real = log._file

    class Half:
        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def write(self, data: bytes) -> int:
            return real.write(data[: len(data) // 2])

    monkeypatch.setattr(log, "_file", Half())
    with pytest.raises(UserError, match="disk is full"):
        log.metrics(2, {})
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1]
    real.close()


def test_a_run_folder_that_is_deleted_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    log = _open(folder)
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="moved or deleted"):
        log.metrics(1, {})
    log.close()


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    log = open_logger(tmp_path, 100, progress=True, console=Console(file=out, width=40))
    log.tick(0)
    log.metrics(10, {"loss/total": 1.23456, "l0/mean": 12.0})
    log.metrics(10, {"eval/kl": 1.0})
    log.say("run folder: /a/b [bold] " + "x" * 60)
    log.table("final [evaluation]", {"eval/kl": 0.123456, "eval/ce_target": math.nan})
    log.close()
    text = out.getvalue()
    assert text.splitlines()[:2] == [
        "step 10/100  loss 1.235  L0 12  - steps/s  -:--:-- left",
        "run folder: /a/b [bold] " + "x" * 60,
    ]
    assert "eval/kl             0.1235" in text and "\x1b" not in text
    assert "[bold]" in (tmp_path / "logs" / "run.log").read_text()


def test_bar_on_a_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    log = open_logger(tmp_path, 100, progress=True, console=console)
    for step in range(21):
        log.tick(step)
    log.metrics(20, {"loss/total": 1.25, "l0/mean": 3.0})
    log.say("a message [above] the bar")
    log.table("final", {"eval/kl": 0.5})
    log.close()
    text = out.getvalue()
    for part in ("20/100", "loss 1.25", "L0 3", "steps/s", "left", "compiling", "[above]", "eval/kl"):
        assert part in text, part
    out = io.StringIO()
    log = open_logger(tmp_path, 100, progress=False, console=Console(file=out, force_terminal=True, width=120))
    log.tick(0)
    log.close()
    assert out.getvalue() == ""


def test_pace_leaves_compiles_and_evaluations_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(logger.time, "monotonic", lambda: now[0])
    pace = Pace()
    for now[0], step in ((0.0, 100), (60.0, 101), (61.0, 103), (500.0, 104), (501.0, 106)):
        if step in (101, 104):
            pace.pause()
        pace.tick(step)
    assert pace.speed() == 2.0
    assert pace.left(2 * 3725) == "1:02:05"
    assert Pace().left(10) == "-:--:--"


def test_pace_follows_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(logger.time, "monotonic", lambda: now[0])
    pace = Pace(window=10)
    for step in range(100):
        now[0] += 1.0 if step < 50 else 0.25
        pace.tick(step)
    assert pace.speed() == 4.0
