"""Two results of a benchmark: what changed, and whether it is more than the steps vary by themselves. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.bench.host.measures import Measure, shown
from meshwright.bench.table import NONE, OURS, Result, combined, piped, ratio
from meshwright.errors import Finding, UserError, not_json

__all__ = ["compare", "load", "measures_of"]


def load(path: Path) -> dict[str, Any]:
    """results.json, or the folder with it. Raises UserError with everything for which it is neither."""
    file = path / "results.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(findings=[Finding(str(path), f"cannot be read: {error.strerror}", "Give what --out named")]) from None
    except (ValueError, RecursionError) as error:
        raise UserError(findings=[Finding(str(file), not_json(error), "Give what --out named")]) from None
    if not isinstance(found, dict) or not isinstance(found.get("results"), list):
        raise UserError(findings=[Finding(str(file), "holds no results of a benchmark", "Give what --out named")])
    if findings := [Finding(str(file), what, "Keep what --out wrote as it is") for what in _damage(found)]:
        raise UserError(findings=findings)
    return found


_ROW = {"workload": str, "gpus": int, "engine": str, "unit": str, "flops": float}
_MEASURE = {"name": str, "value": float, "unit": str}
_KNOWN = {"ranks": int, "spread": float, "seconds": float}
"""Beside them, where they are there."""


def _damage(found: dict[str, Any]) -> Iterator[str]:
    """What tables, comparisons and the history read, and is not there or of another kind."""
    if not isinstance(found.get("machine") or {}, dict):
        yield "machine: is no object"
    if not isinstance(found.get("measures", []), list):
        yield "measures: is no list"
        return
    for key, fields in (("results", _ROW), ("measures", _MEASURE)):
        for number, entry in enumerate(found.get(key, [])):
            yield from (f"{key}.{number}{what}" for what in _damage_of(entry, fields))


def _damage_of(entry: Any, fields: dict[str, type]) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield ": is no object"
        return
    yield from (f".{name}: is no {_SAID[kind]}" for name, kind in fields.items() if not _is(entry.get(name), kind))
    yield from (f".{name}: is no {_SAID[kind]}" for name, kind in _KNOWN.items() if not _is(entry.get(name, 1), kind))
    figures = entry.get("figures")
    if figures is None:
        return
    if not isinstance(figures, dict):
        yield ".figures: is no object"
        return
    rate = f"{entry.get('unit')}_per_s"
    if not _is(figures.get(rate), float) or figures[rate] <= 0:
        yield f".figures.{rate}: is no rate"
    yield from (f".figures.{name}: is no {_SAID[kind]}" for name, kind in _KNOWN.items() if not _is(figures.get(name, 1), kind))


_SAID = {str: "text", int: "whole number above 0", float: "number"}


def _is(value: Any, kind: type) -> bool:
    if kind is str:
        return isinstance(value, str)
    whole = isinstance(value, int) and not isinstance(value, bool)
    return (whole and value > 0) if kind is int else whole or (isinstance(value, float) and math.isfinite(value))


def compare(before: dict[str, Any], after: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Rows, and the table. ratio: rate after over before. noise: half of both spreads, added, on the ratio; a change within it
    is none."""
    old, new = (_results(found) for found in (before, after))
    rows: list[dict[str, Any]] = []
    for key in [*old, *(key for key in new if key not in old)]:
        first, second = old.get(key), new.get(key)
        row: dict[str, Any] = {"workload": key[0], "engine": key[1], "gpus": key[2], "ratio": None, "noise": None}
        if first is None or second is None:
            rows.append({**row, "verdict": "only in the second" if first is None else "only in the first"})
        elif first.figures is None or second.figures is None:
            reason = first.reason if first.figures is None else second.reason
            rows.append({**row, "verdict": f"not measured: {reason}"})
        else:
            rates = {"before": first.rate, "after": second.rate, "unit": first.unit}
            if not all("spread" in figures for figures in (first.figures, second.figures)):  # entered by hand
                rows.append({**row, **rates, "ratio": second.rate / first.rate, "verdict": "noise not known"})
                continue
            against = ratio(second, first)
            change = against.value - 1
            verdict = "same" if abs(change) <= against.spread else ("faster" if change > 0 else "slower")
            rows.append({**row, **rates, "ratio": against.value, "noise": against.spread, "verdict": verdict})
    rows += _measured(before, after)
    return rows, _table(rows, before, after)


def _measured(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the host's side: figure by figure, where less may be better. ratio: value after over before."""
    old, new = ({(one.name, one.ranks): one for one in measures_of(found)} for found in (before, after))
    rows: list[dict[str, Any]] = []
    for key in [*old, *(key for key in new if key not in old)]:
        first, second = old.get(key), new.get(key)
        row: dict[str, Any] = {"workload": key[0], "engine": OURS, "gpus": key[1], "ratio": None, "noise": None}
        if first is None or second is None:
            rows.append({**row, "verdict": f"only in the {'second' if first is None else 'first'}"})
            continue
        sides = {"before": first.value, "after": second.value, "unit": first.unit}
        if not first.value:
            rows.append({**row, **sides, "verdict": "same" if not second.value else f"{first.value:g} -> {second.value:g}"})
            continue
        value = second.value / first.value
        noise = value * (first.spread + second.spread) / 2
        better = "better" if (value > 1) == second.higher else "worse"
        verdict = "same" if abs(value - 1) <= noise else better
        rows.append({**row, **sides, "ratio": value, "noise": noise, "verdict": verdict})
    return rows


def measures_of(found: dict[str, Any]) -> list[Measure]:
    """Figures of the host's side in a file of results."""
    known = Measure.__dataclass_fields__
    entries = found.get("measures", [])
    return [Measure(**{name: value for name, value in entry.items() if name in known}) for entry in entries]


def _results(found: dict[str, Any]) -> dict[tuple[str, str, int], Result]:
    known = Result.__dataclass_fields__
    made = [Result(**{name: value for name, value in entry.items() if name in known}) for entry in found["results"]]
    return {(result.workload, result.engine, result.gpus): result for result in combined(made)}


def _table(rows: list[dict[str, Any]], before: dict[str, Any], after: dict[str, Any]) -> str:
    lines = [["workload", "engine", "GPUs", "before", "after", "ratio", "verdict"]]
    for row in rows:
        if row["ratio"] is None:
            lines.append([row["workload"], row["engine"], str(row["gpus"]), NONE, NONE, NONE, row["verdict"]])
            continue
        rates = [_rate(row[side], row["unit"]) for side in ("before", "after")]
        amount = f"{row['ratio']:.3f}" + ("" if row["noise"] is None else f" ± {row['noise']:.3f}")
        lines.append([row["workload"], row["engine"], str(row["gpus"]), *rates, amount, row["verdict"]])
    sides = [f"{side}: {_where(found)}" for side, found in (("before", before), ("after", after))]
    if _device(before) != _device(after):
        sides.append("The two were measured on different machines: their ratio is not only that of the code.")
    return "\n".join([*piped(lines), "", *sides]) + "\n"


def _rate(value: float, unit: str) -> str:
    """A throughput of `unit` a second, or a figure of the host's side in its own unit."""
    return f"{value:,.1f} {unit}/s" if unit in ("tokens", "samples") else shown(value, unit)


def _device(found: dict[str, Any]) -> str:
    return str((found.get("machine") or {}).get("device", "unknown"))


def _where(found: dict[str, Any]) -> str:
    machine = found.get("machine") or {}
    parts = [_device(found), f"torch {machine.get('torch', '?')}", f"commit {found.get('commit') or 'unknown'}"]
    return ", ".join([*parts, str(found.get("date", ""))]).rstrip(", ")
