"""Results of a benchmark as one table, and the arithmetic behind its columns. Pure: records in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["OURS", "Ratio", "Result", "best_peer", "markdown", "ratio", "scaling"]

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
    limits = {record["workload"]: record for record in ceilings if record["what"] == "limit"}
    peak = machine["peak"] if machine else None
    known = {name: record["limit"] for name, record in limits.items()}
    lines = [list(HEADER), *(cells(results, result, peak, known.get(result.workload)) for result in results)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    lines.insert(1, ["-" * width for width in widths])
    table = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([*head(machine, ceilings), *table, "", *notes(machine, limits)]) + "\n"


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
