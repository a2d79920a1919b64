"""Pictures of a run and its report.html, made from what lies in the run folder alone."""

from __future__ import annotations

import base64
import html
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from decomp.folder import CONFIG, write_text, writing
from decomp.logger import figure as number
from decomp.logger import read_metrics

matplotlib.use("Agg")

REPORT = "report.html"
ARRAYS = Path("figures") / "evaluation.npz"
MEAN_CI, HISTOGRAM, EDGES = "mean_ci/", "ci_hist/", "ci_hist_edges"
SMALLEST_CI = 1e-6  # where the log axis of the spectrum ends: components below it are drawn there

Records = list[dict[str, Any]]
Arrays = Mapping[str, np.ndarray]
Panels = Iterator[tuple[Any, tuple[str, dict[str, np.ndarray]]]]  # (axes, (kind, {site: values}))

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #222 }
img { max-width: 100%; display: block; margin: 1em 0 } table { border-collapse: collapse }
td, th { padding: .15em 1.2em .15em 0; text-align: left }
td + td { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f5f5f5; padding: 1em; overflow-x: auto; font-size: 13px }
"""


def save_arrays(folder: Path, step: int, arrays: Arrays) -> None:
    """Keeps the arrays of the evaluation after ``step`` updates, so that ``report`` can draw them again."""
    with writing(folder / ARRAYS):
        (folder / ARRAYS).parent.mkdir(exist_ok=True)
        np.savez_compressed(folder / ARRAYS, **dict(arrays), step=np.int64(step))  # type: ignore[arg-type]


def report(folder: Path) -> Path:
    """Draws every figure there is data for, writes figures/*.png and report.html; returns the report's path."""
    records, arrays = read_metrics(folder), _load_arrays(folder)
    images = []
    for name, title, picture in draw(records, arrays):
        path = folder / "figures" / f"{name}.png"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            picture.savefig(path, dpi=110)
        images.append((title, path.read_bytes()))
    write_text(folder / REPORT, _page(folder, records, images))
    return folder / REPORT


def is_reported(folder: Path, step: int) -> bool:
    """Whether report.html shows the evaluation after ``step`` updates: a report drawn before it is older than its
    arrays."""
    page, arrays = folder / REPORT, folder / ARRAYS
    if not (page.exists() and arrays.exists() and page.stat().st_mtime_ns >= arrays.stat().st_mtime_ns):
        return False
    with np.load(arrays) as file:
        return "step" not in file or int(file["step"]) == step


def _load_arrays(folder: Path) -> dict[str, np.ndarray]:
    if not (folder / ARRAYS).exists():
        return {}
    with np.load(folder / ARRAYS) as file:
        return dict(file)


def shell_path(path: Path) -> str:
    """``path`` as typed in a shell: relative where the run lies below the present folder."""
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


# ---------------------------------------------------------------- the pictures
def draw(records: Records, arrays: Arrays) -> Iterator[tuple[str, str, Figure]]:
    """(file name, title, figure) for each picture that the data allow."""
    if any("loss/total" in r for r in records):
        yield "losses", "Training losses", _losses(records)
    if any("eval/l0_mean" in r or _eval_curves(r) for r in records):
        yield "evaluation", "Evaluation on held-out data", _evaluation(records)
    if l0 := _l0_by_site(records):
        yield "l0_per_site", "Mean L0 per site, at the last evaluation", _l0_bars(l0)
    if spectra := _by_site(arrays, MEAN_CI):
        yield "mean_ci", "Mean causal importance of each component, sorted", _spectrum(spectra)
    if (histograms := _by_site(arrays, HISTOGRAM)) and EDGES in arrays:
        yield "ci_histograms", "Causal importances of all positions", _histograms(histograms, arrays[EDGES])


def _losses(records: Records) -> Figure:
    fig = _figure(9, 6)
    names = [n for n in dict.fromkeys(k for r in records for k in r) if n.startswith("loss/")]
    total, terms = fig.subplots(2, 1, sharex=True, height_ratios=[1, 2])
    _curve(total, records, "loss/total", "total")
    for name in names:
        if name != "loss/total":
            _curve(terms, records, name, name.removeprefix("loss/"))
    total.set_ylabel("total loss")
    terms.set_ylabel("terms, unweighted")
    terms.set_xlabel("updates")
    _legend(terms)
    for axes in (total, terms):
        _log_if_positive(axes)
    return fig


def _evaluation(records: Records) -> Figure:
    fig = _figure(9, 6)
    recon, l0 = fig.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for name in dict.fromkeys(n for r in records for n in _eval_curves(r)):
        _curve(recon, records, name, name.removeprefix("eval/kl_"), marker=".")
    _curve(l0, records, "eval/l0_mean", "L0", marker=".")
    recon.set_ylabel("KL to the target (nats)")
    l0.set_ylabel("mean L0 per site")
    l0.set_xlabel("updates")
    _legend(recon)
    _log_if_positive(recon)
    return fig


def _l0_bars(l0: Mapping[str, float]) -> Figure:
    fig = _figure(9, max(2.5, 0.8 + 0.24 * len(l0)))
    axes = fig.subplots()
    bars = axes.barh(list(l0), list(l0.values()), color=[_colour(_kind(site)) for site in l0])
    axes.bar_label(bars, [number(v) for v in l0.values()], padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("mean number of components with CI > 0 per position")
    axes.margins(x=0.1, y=0.01)
    return fig


def _spectrum(spectra: Mapping[str, np.ndarray]) -> Figure:
    """One panel per kind, one line per site: components sorted by mean CI, log scale."""
    fig, panels = _panels(spectra)
    for axes, (kind, sites) in panels:
        for i, (site, values) in enumerate(sites.items()):
            sorted_ci = np.sort(np.maximum(values, SMALLEST_CI))[::-1]
            shade = 0.25 + 0.75 * (i + 1) / len(sites)
            axes.plot(np.arange(1, len(values) + 1), sorted_ci, color=_colour(kind), alpha=shade, label=_layer(site))
        axes.set(title=kind, ylim=(SMALLEST_CI, 1.5), xlabel="component, by rank", ylabel="mean CI")
        _log(axes)
        if len(sites) <= 8:
            _legend(axes)
    return fig


def _histograms(histograms: Mapping[str, np.ndarray], edges: np.ndarray) -> Figure:
    """One panel per kind, one line per site: share of (position, component) pairs in each bin, log scale."""
    fig, panels = _panels(histograms)
    for axes, (kind, sites) in panels:
        for i, (site, counts) in enumerate(sites.items()):
            share = counts / max(counts.sum(), 1)
            axes.stairs(share, edges, color=_colour(kind), alpha=0.25 + 0.75 * (i + 1) / len(sites), label=_layer(site))
        axes.set(title=kind, xlabel="causal importance", ylabel="share of all entries")
        _log(axes)
        if len(sites) <= 8:
            _legend(axes)
    return fig


# ---------------------------------------------------------------- parts of pictures
def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _panels(
    by_site: Mapping[str, np.ndarray],
) -> tuple[Figure, Panels]:
    kinds: dict[str, dict[str, np.ndarray]] = {}
    for site, values in by_site.items():
        kinds.setdefault(_kind(site), {})[site] = values
    columns = min(3, len(kinds))
    rows = -(-len(kinds) // columns)
    fig = _figure(3.4 * columns + 0.4, 2.7 * rows)
    grid = fig.subplots(rows, columns, squeeze=False, sharey=True).flat
    for unused in list(grid)[len(kinds) :]:
        unused.set_axis_off()
    return fig, zip(fig.axes, kinds.items(), strict=False)


def _curve(axes: Any, records: Records, name: str, label: str, **style: Any) -> None:
    points = [(r["step"], r[name]) for r in records if isinstance(r.get(name), int | float)]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, linewidth=1.2, **style)


def _log_if_positive(axes: Any) -> None:
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines] or [np.zeros(1)])
    finite = values[np.isfinite(values)]
    if finite.size and finite.min() > 0:
        _log(axes)


def _log(axes: Any) -> None:
    axes.set_yscale("log")
    axes.minorticks_off()  # eight to a decade: they take most of the drawing time


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False)


def _kind(site: str) -> str:
    return site.rsplit(".", 1)[-1]


def _layer(site: str) -> str:
    return next((f"layer {part}" for part in site.split(".") if part.isdigit()), site)


def _colour(kind: str) -> str:
    """The same colour for a kind in every picture of every run."""
    known = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "c_fc")
    return f"C{known.index(kind) if kind in known else 8}"


def _eval_curves(record: Mapping[str, Any]) -> list[str]:
    return [name for name in record if name.startswith("eval/kl_")]


def _l0_by_site(records: Records) -> dict[str, float]:
    last = next((r for r in reversed(records) if any(k.startswith("eval/l0/") for k in r)), {})
    return {k.removeprefix("eval/l0/"): v for k, v in last.items() if k.startswith("eval/l0/")}


def _by_site(arrays: Arrays, prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


# ---------------------------------------------------------------- the page
def _page(folder: Path, records: Records, images: list[tuple[str, bytes]]) -> str:
    """One self-contained page: pictures are embedded, every text is escaped."""
    title = f"{folder.parent.name} / {folder.name}"
    last = next((r for r in reversed(records) if any(k.startswith("eval/") for k in r)), {})
    body = [f"<h1>{_text(title)}</h1>", _summary(folder, records)]
    if last:
        figures = {k.removeprefix("eval/"): v for k, v in last.items() if k.startswith("eval/")}
        body += [f"<h2>Evaluation after {last['step']} updates</h2>", _table(figures)]
    for caption, png in images:
        data = base64.b64encode(png).decode()
        body.append(f'<h2>{_text(caption)}</h2><img alt="{_text(caption)}" src="data:image/png;base64,{data}">')
    for name in (CONFIG, "overrides.txt", "lineage.txt", "optimizer_groups.txt", "placement.txt", "revision.txt"):
        if (folder / name).is_file():
            body.append(f"<h2>{name}</h2><pre>{_text((folder / name).read_text(errors='replace'))}</pre>")
    head = f'<meta charset="utf-8"><title>{_text(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>' + "\n".join(body) + "</body></html>\n"


def _summary(folder: Path, records: Records) -> str:
    losses = [r for r in records if "loss/total" in r]
    if not losses:
        return "<p>No update has been logged yet.</p>"
    end = losses[-1]
    skipped = end.get("guard/skipped_total") or 0
    text = f"{end['step']} updates, loss {number(end['loss/total'])}, {skipped:.0f} skipped as not finite"
    return f"<p>{_text(text)}. Run folder: <code>{_text(str(folder))}</code></p>"


def _table(figures: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><td>{_text(name)}</td><td>{_text(number(value))}</td></tr>" for name, value in figures.items())
    return f"<table><tr><th>figure</th><th>value</th></tr>{rows}</table>"


def _text(text: str) -> str:
    return html.escape(text, quote=True)
