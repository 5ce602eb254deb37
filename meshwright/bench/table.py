"""Results of a benchmark as one table, and the arithmetic behind its columns. Pure: records in, text out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "NONE",
    "OURS",
    "Ratio",
    "Result",
    "best_peer",
    "combined",
    "limits_of",
    "markdown",
    "piped",
    "ratio",
    "scaling",
    "scaling_lines",
]

OURS = "meshwright"
HEADER = (
    "workload",
    "GPUs",
    "engine",
    "per GPU",
    "x best peer",
    "of limit",
    "MFU",
    "peak / reserved GiB",
    "exposed comm.",
    "scaling",
    "first loss",
)
NONE = "–"


@dataclass(frozen=True)
class Result:
    """One engine on one workload. unit: tokens or samples. flops: operations of a step of one GPU, the same for every engine.
    figures: what the engine printed; None when it gave no result, and `reason` says why."""

    workload: str
    gpus: int
    engine: str
    unit: str
    flops: float
    figures: Mapping[str, Any] | None = None
    reason: str = ""

    @property
    def rate(self) -> float:
        """Tokens/s or samples/s of one GPU. Only where there are figures."""
        assert self.figures is not None
        return self.figures[f"{self.unit}_per_s"] / self.gpus

    @property
    def spread(self) -> float:
        """(slowest - fastest step) / median, of the counted steps."""
        assert self.figures is not None
        return self.figures["spread"]


@dataclass(frozen=True)
class Ratio:
    """value: one rate over another. spread: half of each side's spread, added, on the value: the steps of both lie inside."""

    value: float
    spread: float


def ratio(result: Result, other: Result) -> Ratio:
    value = result.rate / other.rate
    return Ratio(value, value * (result.spread + other.spread) / 2)


def best_peer(results: Sequence[Result], workload: str, gpus: int) -> Result | None:
    """The fastest other engine that gave a result on as many GPUs."""
    peers = [r for r in results if (r.workload, r.gpus) == (workload, gpus) and r.figures is not None and r.engine != OURS]
    return max(peers, key=lambda r: r.rate, default=None)


def scaling(results: Sequence[Result], result: Result) -> float | None:
    """Rate on n GPUs over n times the same engine's on one; None on one GPU or when that one was not measured."""
    if result.gpus == 1:
        return None
    for one in results:
        if (one.workload, one.engine, one.gpus) == (result.workload, result.engine, 1) and one.figures is not None:
            return result.rate / one.rate
    return None


SCALING_HEADER = ("workload", "kind", "GPUs", "rate", "scaling", "lost to compute", "to communication", "to data", "idle")


def scaling_lines(results: Sequence[Result]) -> list[list[str]]:
    """The table of strong and weak scaling, header first: the rate of all devices, over as many times that of one, and of what
    is lost how much each part of a step took.

    A step on n devices could take T = the step of one (weak), or that / n (strong). What it takes beyond is the sum of what
    its parts take beyond theirs on one device: compute (weak: as on one; strong: / n), waiting for communication, data, and
    idle time. Each is shown as a share of the step.
    """
    one = {r.workload: r for r in results if r.gpus == 1 and r.figures is not None}
    lines = [list(SCALING_HEADER)]
    for result in results:
        base = one.get(result.workload)
        if result.figures is None:
            lines.append([result.workload, result.engine, str(result.gpus), result.reason, *[NONE] * 5])
            continue
        rate = f"{result.rate * result.gpus:,.1f} {result.unit}/s"
        if base is None or base.figures is None or result is base:
            lines.append([result.workload, result.engine, str(result.gpus), rate, *[NONE] * 5])
            continue
        ways = result.gpus if result.engine == "strong" else 1
        mine, theirs = result.figures["parts"], base.figures["parts"]
        shares = [(mine[part] - theirs[part] / ways) / mine["wall"] for part in ("compute", "communication", "data", "idle")]
        line = [result.workload, result.engine, str(result.gpus), rate, f"{result.rate / base.rate:.1%}"]
        lines.append([*line, *(f"{share:.1%}" for share in shares)])
    return lines


def share_of_peak(result: Result, peak: float) -> float:
    """MFU: operations of a step of one GPU / (seconds of the step x peak of one GPU)."""
    assert result.figures is not None
    return result.flops / (result.figures["seconds"] * peak)


def cells(results: Sequence[Result], result: Result, peak: float | None, limit: float | None) -> list[str]:
    """One line of the table. peak: FLOP/s of one GPU; limit: rate of one GPU in the workload's unit."""
    start = [result.workload, str(result.gpus), result.engine]
    if result.figures is None:
        return [*start, result.reason, *[NONE] * (len(HEADER) - 4)]
    short = "tok/s" if result.unit == "tokens" else "samples/s"
    best = best_peer(results, result.workload, result.gpus)
    against = ratio(result, best) if best is not None else None
    grown = scaling(results, result)
    peaks = [result.figures[name] for name in ("peak_gib", "reserved_gib")]
    exposed = result.figures.get("communication")
    return [
        *start,
        f"{result.rate:,.0f} {short}" if result.rate >= 1000 else f"{result.rate:,.1f} {short}",
        NONE if against is None else ("1" if best is result else f"{against.value:.3f} ± {against.spread:.3f}"),
        NONE if limit is None else f"{result.rate / limit:.1%}",
        NONE if peak is None else f"{share_of_peak(result, peak):.1%}",
        " / ".join(f"{gib:.1f}" for gib in peaks) if any(peaks) else NONE,
        NONE if exposed is None else f"{exposed:.1%}",
        NONE if grown is None else f"{grown:.1%}",
        f"{result.figures['first_loss']:.3f}",
    ]


def markdown(results: Sequence[Result], machine: Mapping[str, Any] | None, ceilings: Sequence[Mapping[str, Any]]) -> str:
    """The table with what its columns mean, ready to be pasted into a document; it reads as well on a terminal."""
    limits = limits_of(ceilings)
    peak = machine["peak"] if machine else None
    known = {name: record["limit"] for name, record in limits.items()}
    lines = [list(HEADER), *(cells(results, result, peak, known.get(result.workload)) for result in results)]
    return "\n".join([*head(machine, ceilings), *piped(lines), "", *notes(machine, limits)]) + "\n"


def piped(lines: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table, columns padded to their width; the first line is the header."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rows = [lines[0], ["-" * width for width in widths], *lines[1:]]
    return ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]


def limits_of(ceilings: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The records of the floors of workloads, by name."""
    return {record["workload"]: record for record in ceilings if record["what"] == "limit"}


def combined(results: Sequence[Result]) -> list[Result]:
    """One result for each workload, engine and number of devices: where several gave figures, rates from the median of their
    step times, and a spread that reaches from the fastest to the slowest step of all."""
    by_key: dict[tuple[str, str, int], list[Result]] = {}
    for result in results:
        by_key.setdefault((result.workload, result.engine, result.gpus), []).append(result)
    return [_one(same) for same in by_key.values()]


def _one(results: Sequence[Result]) -> Result:
    good = [dict(result.figures) for result in results if result.figures is not None]
    if len(good) < 2:
        return next((result for result in results if result.figures is not None), results[0])
    seconds = statistics.median(figures["seconds"] for figures in good)
    ends = [figures["seconds"] * (1 + side * figures["spread"] / 2) for figures in good for side in (-1, 1)]
    first = good[0]
    rates = {
        name: first[name] * first["seconds"] / seconds for name in ("tokens_per_s", "samples_per_s", "mfu") if first.get(name)
    }
    return replace(
        results[0], figures={**first, **rates, "seconds": seconds, "spread": (max(ends) - min(ends)) / seconds}, reason=""
    )


def head(machine: Mapping[str, Any] | None, ceilings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The machine, and what it reaches at best."""
    lines = []
    if machine:
        lines += [f"{machine['device']}, torch {machine['torch']}, Python {machine['python']}.", ""]
    found = []
    for record in ceilings:
        if record["what"] == "matmul":
            found.append(f"{record['precision']} matmul {record['size']}³ {record['flops_per_s'] / 1e12:,.2f} TFLOP/s")
        elif record["what"] == "copy":
            found.append(f"copy {record['bytes_per_s'] / 1e9:,.0f} GB/s (read and written)")
    return [*lines, *(["Ceilings: " + ", ".join(found) + ".", ""] if found else [])]


def notes(machine: Mapping[str, Any] | None, limits: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = [
        "Per GPU: median step after warm-up. x best peer: ratio of these; ± is half of both engines' "
        "(slowest − fastest step) ÷ median. Scaling: rate per GPU on n over that on one."
    ]
    if limits:
        floors = [
            f"{name} {record['limit']:,.0f} {record['unit']}/s ({record['matmul_seconds'] * 1e3:.1f} ms matmuls + "
            f"{record['attention_seconds'] * 1e3:.1f} ms attention, {record['attention_backend']})"
            for name, record in limits.items()
        ]
        lines.append(f"Limit of a GPU, from its matmuls and attention alone, each measured here: {'; '.join(floors)}.")
    if machine:
        lines.append(
            "MFU: operations of the step (6 a weight and position, 12 × heads × head size a pair, the causal half, logits only "
            f"where needed) ÷ (seconds × {machine['peak'] / 1e12:,.4g} TFLOP/s: {machine['peak_source']})."
        )
    return lines
