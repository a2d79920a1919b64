"""decomp/figures.py: what is drawn from which data, and a page that is whole in itself."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from decomp import figures
from decomp.config.errors import UserError

SITES = [f"model.layers.{layer}.{kind}" for layer in (0, 1) for kind in ("self_attn.q_proj", "mlp.down_proj")]


def _lines(folder: Path, records: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def _records() -> list[dict[str, Any]]:
    training: list[dict[str, Any]] = [
        {"step": s, "loss/total": 1 / s, "loss/minimality": 2 / s, "loss/x": 0.0} for s in range(1, 30)
    ]
    training[4]["loss/total"] = "NaN"
    evaluation = {"step": 29, "eval/kl_ci": 0.25, "eval/kl_zero": 3.0, "eval/l0_mean": 2.5, "eval/ce_target": 1.75}
    return [*training, evaluation | {f"eval/l0/{site}": i + 0.5 for i, site in enumerate(SITES)}]


def _arrays() -> dict[str, np.ndarray]:
    arrays = {f"mean_ci/{site}": np.asarray([0.5, 0.0, 1e-3]) for site in SITES}
    arrays |= {f"ci_hist/{site}": np.asarray([10, 0, 3]) for site in SITES}
    return arrays | {"ci_hist_edges": np.linspace(0, 1, 4)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "tricky & <b>experiment</b>" / "20260101-000000"
    _lines(folder, _records())
    (folder / "config.yaml").write_text("experiment: '<script>alert(1)</script>'\n")
    figures.save_arrays(folder, 20, _arrays())
    figures.report(folder)
    return folder


def test_every_picture_is_there_and_shows_something(made: Path) -> None:
    names = {"losses", "evaluation", "l0_per_site", "mean_ci", "ci_histograms"}
    assert {p.stem for p in (made / "figures").glob("*.png")} == names
    for name in names:
        pixels = np.asarray(Image.open(made / "figures" / f"{name}.png").convert("L"))
        assert pixels.shape[0] > 150 and (pixels < 200).mean() > 0.005, name


def test_page_is_self_contained_and_escaped(made: Path) -> None:
    page = (made / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 5
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert "<b>experiment" not in page and "tricky &amp; &lt;b&gt;" in page
    for part in ("kl_ci", "0.25", "ce_target", "1.75", "29 updates", "config.yaml"):
        assert part in page, part


def test_report_is_drawn_again_from_the_folder_alone(made: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(made, copy)
    shutil.rmtree(copy / "figures")
    shutil.copytree(made / "figures", copy / "figures", ignore=shutil.ignore_patterns("*.png"))
    assert figures.report(copy) == copy / "report.html"
    assert len(list((copy / "figures").glob("*.png"))) == 5


def test_a_report_from_before_the_final_evaluation_is_not_the_last(made: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(made, copy)
    assert figures.is_reported(copy, 20) and not figures.is_reported(copy, 30)
    os.utime(copy / figures.REPORT, (1, 1))
    assert not figures.is_reported(copy, 20)


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    _lines(tmp_path, [])
    assert "No update has been logged yet" in figures.report(tmp_path).read_text()
    assert "data:image" not in (tmp_path / "report.html").read_text()


def test_spectrum_sorts_and_keeps_dead_components_in_view() -> None:
    drawn = figures._spectrum({SITES[0]: np.asarray([0.0, 0.5, 1e-3])})
    (axes,) = drawn.axes
    assert np.asarray(axes.lines[0].get_ydata()).tolist() == [0.5, 1e-3, figures.SMALLEST_CI]
    assert axes.get_yscale() == "log" and axes.get_title() == "q_proj"


def test_one_panel_per_kind_one_line_per_layer() -> None:
    drawn = figures._spectrum({site: np.asarray([0.5]) for site in SITES})
    assert [axes.get_title() for axes in drawn.axes if axes.axison] == ["q_proj", "down_proj"]
    assert [line.get_label() for line in drawn.axes[0].lines] == ["layer 0", "layer 1"]


def test_curves_skip_what_is_not_a_number() -> None:
    records = [{"step": 1, "loss/total": 1.0}, {"step": 2, "loss/total": math.nan}, {"step": 3, "loss/total": None}]
    drawn = figures._losses([*records, {"step": 4, "loss/total": 2.0}])
    assert np.asarray(drawn.axes[0].lines[0].get_xdata()).tolist() == [1, 2, 4]


def test_an_unwritable_folder_is_one_line(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figures.Figure, "savefig", refuse)
    with pytest.raises(UserError, match="disk is full"):
        figures.report(made)


def test_shell_path_is_short_below_the_present_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert figures.shell_path(tmp_path / "outputs" / "a b") == "'outputs/a b'"
    assert figures.shell_path(Path("/elsewhere/x")) == "/elsewhere/x"
