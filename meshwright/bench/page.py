"""results.html: the table of a benchmark with bars of rates and memory, in one file that needs no network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from meshwright.bench.host.measures import Measure
from meshwright.bench.table import Result, combined
from meshwright.disk import write_whole

__all__ = ["write_measures", "write_page"]

_STYLE = "body{font-family:system-ui,sans-serif;margin:2rem;max-width:1200px}pre{overflow-x:auto;font-size:.8rem}"
_LAYOUT = {"template": "plotly_white", "height": 360, "margin": {"l": 64, "r": 16, "t": 48, "b": 80}}


def write_page(path: Path, table: str, results: Sequence[Result]) -> None:
    """results: as measured; what gave no figures has no bar, and its reason stands in the table."""
    parts, script = [], True
    for workload in dict.fromkeys(result.workload for result in results):
        mine = [r for r in combined(results) if r.workload == workload and r.figures is not None]
        for figure in _figures(workload, mine):
            parts.append(figure.to_html(full_html=False, include_plotlyjs=script))
            script = False
    _write(path, table, parts)


def write_measures(path: Path, table: str, measures: Sequence[Measure]) -> None:
    """The table of a suite of the host's side, and a bar for each figure that has a limit: its share of it."""
    shown = [one for one in measures if one.share is not None]
    bars = go.Figure(go.Bar(x=[one.share for one in shown], y=[f"{one.name} x {one.ranks}" for one in shown], orientation="h"))
    height = 120 + 28 * len(shown)
    bars.update_layout(title="share of the limit", **{**_LAYOUT, "height": height, "margin": {"l": 360, "t": 48}})
    bars.update_xaxes(tickformat=".0%")
    _write(path, table, [bars.to_html(full_html=False, include_plotlyjs=True)] if shown else [])


def _write(path: Path, table: str, parts: Sequence[str]) -> None:
    body = "".join(parts) or "<p>Nothing gave a result.</p>"
    page = f"<meta charset='utf-8'><title>benchmark</title><style>{_STYLE}</style><pre>{html.escape(table)}</pre>{body}"
    write_whole(path, f"<!doctype html><html lang='en'>{page}</html>\n")


def _figures(workload: str, results: Sequence[Result]) -> list[go.Figure]:
    if not results:
        return []
    names = [f"{result.engine} x {result.gpus}" for result in results]
    figures = [result.figures or {} for result in results]
    rates = go.Figure(
        go.Bar(
            x=names,
            y=[result.rate * result.gpus for result in results],
            error_y={"type": "data", "array": [r.rate * r.gpus * r.spread / 2 for r in results]},
        )
    )
    rates.update_layout(title=f"{workload}: {results[0].unit}/s of all devices (bars: fastest to slowest step)", **_LAYOUT)
    memory = go.Figure(
        [
            go.Bar(name="held between steps", x=names, y=[found.get("mean_gib") for found in figures]),
            go.Bar(name="peak", x=names, y=[found.get("peak_gib") for found in figures]),
        ]
    )
    memory.update_layout(title=f"{workload}: GiB of the first device", barmode="group", **_LAYOUT)
    return [rates, memory]
