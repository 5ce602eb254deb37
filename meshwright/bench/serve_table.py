"""The table of `bench serving`. Pure: records in, text out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.bench.table import NONE, OURS, Result, combined, piped

__all__ = ["median_runs", "serve_lines", "serve_table"]

PEER = "hf"
HEADER = (
    "work",
    "GPUs",
    "engine",
    "tokens/s",
    "x hf",
    "x one GPU",
    "step ms",
    "limit ms",
    "of limit",
    "first token s",
)
ABOUT = (
    "Work: recipe with random weights, sequences at a time, tokens of prompt + answer; greedy, all asked for at once. "
    "Tokens/s: of answers, prompts computed in the same time. x hf, x one GPU: over transformers' continuous batching and over "
    "ours on one GPU, in this run; ± is half of both engines' (slowest − fastest run) ÷ median, where both ran more than once. "
    "Step: from a token to the next of the same answer, median while all answers are under way. Limit: the bytes of weights, "
    "keys and values of a step at the rate of copies in this run. First token: seconds to that of the median answer."
)
MEDIANS = ("decode_step", "step_limit", "ttft", "first_token")


def median_runs(results: Sequence[Result]) -> list[Result]:
    """As `combined`, with medians of the other figures too, and `runs`: how many gave figures."""
    made = []
    for one in combined(results):
        same = [r.figures for r in results if (r.workload, r.engine, r.gpus) == (one.workload, one.engine, one.gpus)]
        good = [figures for figures in same if figures is not None]
        if one.figures is not None:
            known = {name: [f[name] for f in good if f.get(name) is not None] for name in MEDIANS}
            medians = {name: statistics.median(values) for name, values in known.items() if values}
            one = replace(one, figures={**one.figures, **medians, "runs": len(good)})
        made.append(one)
    return made


def serve_table(results: Sequence[Result], machine: Mapping[str, Any] | None) -> str:
    where = [] if machine is None else [f"{machine['device']}, torch {machine['torch']}.", ""]
    return "\n".join([*where, *piped(serve_lines(median_runs(results))), "", ABOUT]) + "\n"


def serve_lines(results: Sequence[Result]) -> list[list[str]]:
    """Header first. results: one an engine and row, of `median_runs`."""
    known = {(r.workload, r.engine): r for r in results if r.figures is not None}
    lines = [list(HEADER)]
    for result in results:
        start = [result.workload, str(result.gpus), result.engine]
        if result.figures is None:
            lines.append([*start, result.reason, *[NONE] * (len(HEADER) - 4)])
            continue
        alone = known.get((result.workload, OURS))
        step, limit = result.figures.get("decode_step"), result.figures.get("step_limit")
        if limit is None and alone is not None and alone.figures is not None:  # of the same row, on as many devices
            limit = alone.figures.get("step_limit")
        lines.append(
            [
                *start,
                f"{result.figures['tokens_per_s']:,.0f}",
                _against(result, known.get((result.workload, PEER))),
                _against(result, alone) if result.gpus > 1 else NONE,
                NONE if step is None else f"{step * 1e3:.3g}",
                NONE if limit is None else f"{limit * 1e3:.3g}",
                NONE if step is None or limit is None else f"{limit / step:.1%}",
                f"{result.figures['ttft']:.3g}",
            ]
        )
    return lines


def _against(result: Result, other: Result | None) -> str:
    """All devices of one over all of the other."""
    if other is None or other.figures is None or result.figures is None:
        return NONE
    if other is result:
        return "1"
    value = result.figures["tokens_per_s"] / other.figures["tokens_per_s"]
    if min(result.figures["runs"], other.figures["runs"]) < 2:
        return f"{value:.2f}"
    return f"{value:.2f} ± {value * (result.spread + other.spread) / 2:.2f}"
