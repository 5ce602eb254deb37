"""A run in a few figures, from its metrics lines. No torch here: `meshwright report` reads a run without it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.disk import write_whole
from meshwright.observe.metrics import perplexity

__all__ = ["Summary", "duration", "load_facts", "rows_of", "save_facts", "summarise"]

MACHINE, SUMMARY = "machine.json", "summary.json"


@dataclass(frozen=True)
class Summary:
    """steps, tokens: of the whole run. seconds: wall time of its steps. split: seconds by part, summing to `seconds`.

    tokens_per_s, samples_per_s, mfu: over the time without evaluation, the first step of each process left out (kernels are
    compiled and caches filled there), i.e. the mean of the steps' own figures weighed by their seconds; mfu of the newest
    process alone, since a measured peak is another one in each.
    newest_tokens_per_s: the same of the newest process alone, where there are several: earlier ones may have had another number
    of devices.
    peak_rate: FLOP/s of one device behind `mfu`; peak_source: where it comes from; devices: how many.
    usage: means and peaks of `meshwright.observe.resources.Usage` of rank 0.
    """

    steps: int
    tokens: int
    seconds: float
    split: dict[str, float]
    tokens_per_s: float | None = None
    newest_tokens_per_s: float | None = None
    samples_per_s: float | None = None
    mfu: float | None = None
    peak_rate: float | None = None
    peak_source: str = ""
    devices: int = 1
    first_loss: float | None = None
    last_loss: float | None = None
    val_loss: float | None = None
    perplexity: float | None = None
    best_val_loss: float | None = None
    best_step: int | None = None
    skipped: int = 0
    usage: dict[str, float | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(
    records: list[dict[str, Any]],
    *,
    devices: int = 1,
    peak_rate: float | None = None,
    peak_source: str = "",
    usage: dict[str, float | None] | None = None,
) -> Summary:
    """Figures of a run from its metrics lines (of any number of processes, one after another)."""
    split: dict[str, float] = {}
    for record in records:
        for part, seconds in (record.get("split") or {}).items():
            split[part] = split.get(part, 0.0) + seconds
    wall = split.pop("wall", sum(split.values()))
    # a measured peak is another one in each process, so shares of it are those of the newest
    newest = [record for record in records if record.get("process") == records[-1].get("process")]
    losses = [record["loss"] for record in records if record.get("loss") is not None]
    held_out = [record["val_loss"] for record in records if record.get("val_loss") is not None]
    finite = [record for record in records if record.get("val_loss") is not None and math.isfinite(record["val_loss"])]
    best = min(finite, key=lambda record: record["val_loss"], default=None)
    return Summary(
        steps=records[-1]["step"] if records else 0,
        tokens=records[-1].get("tokens", 0) if records else 0,
        seconds=wall,
        split=split,
        tokens_per_s=_steady(records, "tokens_per_s"),
        newest_tokens_per_s=_steady(newest, "tokens_per_s") if len(newest) < len(records) else None,
        samples_per_s=_steady(records, "samples_per_s"),
        mfu=_steady(newest, "mfu"),
        peak_rate=peak_rate,
        peak_source=peak_source,
        devices=devices,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        val_loss=held_out[-1] if held_out else None,
        perplexity=perplexity(held_out[-1]) if any("val_perplexity" in record for record in records) else None,
        best_val_loss=best["val_loss"] if best and len(held_out) > 1 else None,
        best_step=best["step"] if best and len(held_out) > 1 else None,
        skipped=records[-1].get("skipped") or 0 if records else 0,
        usage=dict(usage or {}),
    )


def _steady(records: list[dict[str, Any]], key: str) -> float | None:
    """Mean of a rate, weighed by the seconds it is a rate over; without the first step of each process if others remain."""
    processes = [None, *(record.get("process") for record in records)]
    later = [r for before, r in zip(processes, records, strict=False) if r.get("process") == before] or records
    pairs = [(record[key], _training_seconds(record)) for record in later if record.get(key) is not None]
    seconds = sum(weight for _, weight in pairs)
    return sum(rate * weight for rate, weight in pairs) / seconds if seconds > 0 else None


def _training_seconds(record: dict[str, Any]) -> float:
    split = record.get("split")
    return split["wall"] - split.get("evaluate", 0.0) if split else 1.0


def duration(seconds: float) -> str:
    """h:mm:ss, or m:ss under an hour."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rows_of(summary: Summary) -> list[tuple[str, str]]:
    """Label and text of each line of the table at the end of a run; figures that are not known are left out."""
    rows = [("steps", f"{summary.steps:,} in {duration(summary.seconds)}"), ("tokens", f"{summary.tokens:,}")]
    if summary.skipped:
        rows.append(("skipped steps", f"{summary.skipped:,}"))
    if summary.first_loss is not None and summary.last_loss is not None:
        rows.append(("training loss", f"{summary.first_loss:.4f} -> {summary.last_loss:.4f}"))
    if summary.val_loss is not None:
        more = f" (perplexity {summary.perplexity:.4g})" if summary.perplexity is not None else ""
        rows.append(("held-out loss", f"{summary.val_loss:.4f}{more}"))
    if summary.best_val_loss is not None:
        rows.append(("best held-out loss", f"{summary.best_val_loss:.4f} at step {summary.best_step}"))
    if summary.tokens_per_s is not None:
        resumed = summary.newest_tokens_per_s
        alone = (summary.tokens_per_s if resumed is None else resumed) / summary.devices
        since = "" if resumed is None else " since the last resume"
        rows.append(("tokens/s", f"{summary.tokens_per_s:,.0f} ({alone:,.0f} a device{since})"))
    if summary.samples_per_s is not None:
        rows.append(("samples/s", f"{summary.samples_per_s:,.2f}"))
    if summary.mfu is not None:
        against = (
            f" of {summary.devices} x {summary.peak_rate / 1e12:,.4g} TFLOP/s: {summary.peak_source}"
            if summary.peak_rate
            else ""
        )
        rows.append(("MFU", f"{summary.mfu:.1%}{against}"))
    rows += _usage_rows(summary.usage)
    if summary.seconds > 0:
        rows += [
            (f"time: {part}", f"{seconds:,.2f} s, {seconds / summary.seconds:.1%}") for part, seconds in summary.split.items()
        ]
    return rows


def _usage_rows(usage: dict[str, float | None]) -> list[tuple[str, str]]:
    def gib(name: str) -> str:
        value = usage.get(name)
        return "?" if value is None else f"{value / 2**30:,.2f} GiB"

    rows = []
    if usage.get("gpu_percent") is not None:
        rows.append(("GPU utilisation", f"{usage['gpu_percent']:.0f}%"))
    if usage.get("cpu_percent") is not None:
        rows.append(("CPU of rank 0", f"{usage['cpu_percent']:.0f}% of one core"))
    for name, label in (("allocated", "memory allocated"), ("reserved", "memory reserved"), ("rss", "resident memory")):
        if usage.get(f"{name}_peak") is not None:
            rows.append((label, f"peak {gib(f'{name}_peak')}, mean {gib(f'{name}_mean')}"))
    return rows


def save_facts(run_dir: str | Path, *, machine: dict[str, Any] | None = None, summary: Summary | None = None) -> None:
    """Keep what a report needs beside metrics: machine.json (any flat facts: devices, versions) and summary.json."""
    for name, value in ((MACHINE, machine), (SUMMARY, summary.to_dict() if summary else None)):
        if value is not None:
            write_whole(Path(run_dir) / name, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def load_facts(run_dir: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(machine, summary) as saved; {} for one that is absent or damaged: a report without it is still a report."""
    found = []
    for name in (MACHINE, SUMMARY):
        try:
            value = json.loads((Path(run_dir) / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            value = {}
        found.append(value if isinstance(value, dict) else {})
    return found[0], found[1]
