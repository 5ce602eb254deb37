"""Results that are kept in a folder, over time: each row's rate by date, with the commit that it was measured at. No torch."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from meshwright.bench.compare import load, measures_of
from meshwright.bench.host.measures import shown
from meshwright.bench.serve_table import median_runs
from meshwright.bench.table import NONE, OURS, Result, piped
from meshwright.disk import write_whole
from meshwright.errors import Finding, UserError

__all__ = ["Kept", "Point", "history_table", "points", "read_folder", "results_of", "write_history"]

_STYLE = "body{font-family:system-ui,sans-serif;margin:2rem;max-width:1200px}pre{overflow-x:auto;font-size:.8rem}"


@dataclass(frozen=True)
class Kept:
    """A file of results, as `meshwright bench SUITE --out` writes it."""

    file: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Point:
    """One row of one file. value: rate of all devices in `unit`, or a figure of the host's side. spread: (slowest - fastest)
    / median, as far as it is known. higher: whether more is better."""

    row: str
    engine: str
    gpus: int
    device: str
    date: str
    commit: str
    file: str
    value: float
    unit: str
    spread: float
    higher: bool = True

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.row, self.engine, self.gpus, self.device


def read_folder(folder: Path) -> list[Kept]:
    """Its JSON files, by date. Raises UserError with everything that is no result, or has no date."""
    kept: list[Kept] = []
    findings: list[Finding] = []
    for file in sorted(folder.glob("*.json")):
        try:
            data = load(file)
        except UserError as error:
            findings += error.findings
            continue
        if not isinstance(data.get("date"), str) or not data["date"]:
            findings.append(Finding(str(file), "has no date", "Keep what --out wrote as it is"))
        kept.append(Kept(file.name, data))
    if not kept and not findings:
        what = "holds no JSON file" if folder.is_dir() else "is no folder" if folder.exists() else "there is no such folder"
        findings.append(Finding(str(folder), what, "Give a folder with results that were kept"))
    if findings:
        raise UserError(findings=findings)
    return sorted(kept, key=lambda one: (one.data["date"], one.file.removesuffix(".json")))


def results_of(data: dict[str, Any]) -> list[Result]:
    """One a row, of all runs that the file has of it."""
    known = Result.__dataclass_fields__
    return median_runs([Result(**{name: entry[name] for name in known if name in entry}) for entry in data["results"]])


def points(kept: Sequence[Kept]) -> list[Point]:
    """Every figure of every file, in their order; a row without figures is none."""
    found = []
    for one in kept:
        machine = one.data.get("machine") or {}
        where = (str(machine.get("device", "unknown")), one.data["date"], str(one.data.get("commit") or ""), one.file)
        for r in results_of(one.data):
            if r.figures is not None:
                spread = float(r.figures.get("spread", 0.0))
                found.append(Point(r.workload, r.engine, r.gpus, *where, r.rate * r.gpus, f"{r.unit}/s", spread))
        for m in measures_of(one.data):
            found.append(Point(m.name.strip(), OURS, m.ranks, *where, m.value, m.unit, m.spread, m.higher))
    return found


def history_table(found: Sequence[Point]) -> str:
    """The latest figure of each row, the one before it, and their ratio."""
    lines = [["row", "engine", "devices", "latest", "of", "commit", "before", "ratio"]]
    for series in _series(found).values():
        last = series[-1]
        line = [last.row, last.engine, str(last.gpus), _shown(last), last.date[:10], last.commit[:10] or NONE]
        if len(series) > 1:
            before = series[-2]
            line += [_shown(before), f"{last.value / before.value:.3f}" if before.value else NONE]
        else:
            line += [NONE, NONE]
        lines.append(line)
    return "\n".join(piped(lines)) + "\n"


def write_history(path: Path, found: Sequence[Point]) -> None:
    """A page that needs no network: a plot for each row and unit, a line for each engine, number of devices and machine."""
    by_row: dict[tuple[str, str], list[list[Point]]] = {}
    for series in _series(found).values():
        by_row.setdefault((series[0].row, series[0].unit), []).append(series)
    parts: list[str] = []
    for (row, unit), lines in by_row.items():
        better = "" if lines[0][0].higher else ", less is better"
        figure = go.Figure([_line(series) for series in lines])
        figure.update_layout(title=f"{row}: {unit or 'ratio'}{better}", template="plotly_white", height=380, showlegend=True)
        figure.update_yaxes(rangemode="tozero")
        parts.append(figure.to_html(full_html=False, include_plotlyjs=not parts))
    table = html.escape(history_table(found))
    page = f"<meta charset='utf-8'><title>history</title><style>{_STYLE}</style><pre>{table}</pre>{''.join(parts)}"
    write_whole(path, f"<!doctype html><html lang='en'>{page}</html>\n")


def _series(found: Sequence[Point]) -> dict[tuple[Any, ...], list[Point]]:
    made: dict[tuple[Any, ...], list[Point]] = {}
    for point in found:
        made.setdefault((*point.key, point.unit), []).append(point)
    return made


def _line(series: Sequence[Point]) -> go.Scatter:
    first = series[0]
    return go.Scatter(
        x=[point.date for point in series],
        y=[point.value for point in series],
        error_y={"type": "data", "array": [point.value * point.spread / 2 for point in series]},
        text=[f"{point.commit[:10] or 'commit unknown'}, {point.file}" for point in series],
        hovertemplate="%{y:,.5g}<br>%{x}<br>%{text}",
        mode="lines+markers",
        name=f"{first.engine} x {first.gpus}, {first.device}",
    )


def _shown(point: Point) -> str:
    return shown(point.value, point.unit)
