"""Tables of a document out of results that are kept as JSON, so that no number stands in two places.

python -m meshwright.bench.pages docs/performance.md [--check]

In the document a table lies between two comments, the first of which names the file, from the document's folder, and columns:

    <!-- rows of performance/2026-11-30-engines.json: work, engine, rate, of limit -->
    ...
    <!-- end of rows -->

The list of columns may go on in the next line. The rows are those of the file, in its order; a row without figures is left out.
--check writes nothing and fails where a table is not what its file gives.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.bench.compare import load, measures_of
from meshwright.bench.history import results_of
from meshwright.bench.host.measures import Measure, shown
from meshwright.bench.table import NONE, OURS, Result, limits_of, piped, ratio, scaling
from meshwright.disk import write_whole
from meshwright.errors import Finding, UserError

__all__ = ["BLOCK", "COLUMNS", "MEASURED", "filled", "table_of"]

BLOCK = re.compile(
    r"(<!-- rows of (?P<file>[^:]+):\s(?P<columns>[^>]+) -->\n)(?P<table>.*?)(\n?<!-- end of rows -->)", re.DOTALL
)
OPENED, CLOSED = "<!-- rows of ", "<!-- end of rows -->"


@dataclass(frozen=True)
class Row:
    """One row beside the others of its file."""

    result: Result
    others: list[Result]
    data: Mapping[str, Any]

    @property
    def figures(self) -> Mapping[str, Any]:
        assert self.result.figures is not None
        return self.result.figures

    @property
    def total(self) -> float:
        return self.result.rate * self.result.gpus


def _rate(row: Row) -> str:
    total = row.total
    text = f"{total:,.0f}" if total >= 1000 else f"{total:,.1f}"
    return f"{text} {row.result.unit}/s"


def _best_peer(row: Row) -> str:
    """Over the fastest other engine of the same work and devices. A file whose runs are not kept names the ± itself."""
    same = [r for r in row.others if (r.workload, r.gpus) == (row.result.workload, row.result.gpus) and r.figures is not None]
    best = max((r for r in same if not r.engine.startswith(OURS)), key=lambda r: r.rate, default=None)
    if best is None:
        return NONE
    if best is row.result:
        return "1"
    if "spread" in row.figures and best.figures is not None and "spread" in best.figures:
        found = ratio(row.result, best)
        return f"{found.value:.3f} ± {found.spread:.3f}"
    noise = row.figures.get("ratio_spread")
    return f"{row.result.rate / best.rate:.3f}" + (f" ± {noise:.3f}" if noise is not None else "")


def _of_limit(row: Row) -> str:
    known = limits_of(row.data.get("ceilings", []))
    if row.result.workload in known:
        return f"{row.result.rate / known[row.result.workload]['limit']:.1%}"
    step, limit = row.figures.get("decode_step"), row.figures.get("step_limit")
    return f"{limit / step:.1%}" if step and limit else _share("of_limit")(row)


def _scaling(row: Row) -> str:
    grown = scaling(row.others, row.result)
    return _share("scaling")(row) if grown is None else f"{grown:.1%}"


def _share(key: str) -> Callable[[Row], str]:
    return lambda row: NONE if row.figures.get(key) is None else f"{row.figures[key]:.1%}"


def _number(key: str, form: str, scale: float = 1.0) -> Callable[[Row], str]:
    return lambda row: NONE if row.figures.get(key) is None else format(row.figures[key] * scale, form)


def _pair(first: str, second: str) -> Callable[[Row], str]:
    return lambda row: " / ".join(_number(key, ".1f")(row) for key in (first, second))


COLUMNS: dict[str, Callable[[Row], str]] = {
    "work": lambda row: row.result.workload,
    "engine": lambda row: row.result.engine,
    "layout": lambda row: row.result.engine,
    "GPUs": lambda row: str(row.result.gpus),
    "rate": _rate,
    "tokens of answers/s": lambda row: f"{row.total:,.0f}",
    "x best peer": _best_peer,
    "of limit": _of_limit,
    "MFU": _share("mfu"),
    "scaling": _scaling,
    "exposed communication": _share("communication"),
    "peak GiB": _number("peak_gib", ".1f"),
    "peak / reserved GiB": _pair("peak_gib", "reserved_gib"),
    "mean / peak GiB": _pair("mean_gib", "peak_gib"),
    "last loss": _number("loss", ".3f"),
    "difference of the loss": _number("loss_difference", ".2f"),
    "step ms": _number("decode_step", ".3g", 1e3),
    "limit ms": _number("step_limit", ".3g", 1e3),
    "first token s": _number("ttft", ".3g"),
}
"""Columns of rows of engines. mean / peak GiB and the like: of the first device."""

MEASURED: dict[str, Callable[[Measure], str]] = {
    "what": lambda one: one.name.strip(),
    "ranks": lambda one: str(one.ranks),
    "measured": lambda one: shown(one.value, one.unit),
    "spread": lambda one: f"{one.spread:.0%}" if one.spread else NONE,
    "limit": lambda one: NONE if one.limit is None else shown(one.limit, one.unit),
    "share": lambda one: NONE if one.share is None else f"{one.share:.0%}",
    "target": lambda one: NONE if one.target is None else f"{'>=' if one.higher else '<='} {shown(one.target, one.unit)}",
    "reached": lambda one: {True: "yes", False: "no", None: NONE}[one.reached],
}
"""Columns of figures of the host's side."""


def table_of(data: dict[str, Any], columns: list[str]) -> list[str]:
    """Markdown. Raises UserError that names columns which are none."""
    measures = measures_of(data)
    known: Mapping[str, Any] = MEASURED if measures else COLUMNS
    unknown = [name for name in columns if name not in known]
    if unknown:
        raise UserError(findings=[Finding("columns", f"{name!r} is unknown", f"Known: {', '.join(known)}") for name in unknown])
    results = results_of(data)
    rows: list[Any] = [*measures] or [Row(result, results, data) for result in results if result.figures is not None]
    return piped([columns, *([known[name](row) for name in columns] for row in rows)])


def filled(text: str, folder: Path) -> str:
    """The document with its tables as the files have them. folder: that of the document. Raises UserError, also for a comment
    without the other one: what stands behind it would be taken for its table."""
    whole = len(BLOCK.findall(text))
    for comment in (OPENED, CLOSED):
        if (count := text.count(comment)) != whole:
            what = f"{comment.rstrip()!r} stands there {count} times, and {whole} tables have both comments"
            raise UserError(findings=[Finding("document", what, f"{OPENED}FILE: COLUMNS --> and {CLOSED}, each a line")])

    def block(found: re.Match[str]) -> str:
        columns = [name.strip() for name in found["columns"].split(",")]
        table = "\n".join(table_of(load(folder / found["file"]), columns))
        return f"{found[1]}\n{table}\n\n{CLOSED}"

    return BLOCK.sub(block, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("document", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    try:
        return _fill(args.document, args.check)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def _fill(document: Path, check: bool) -> int:
    try:
        before = document.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(findings=[Finding(str(document), f"cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError as error:
        raise UserError(findings=[Finding(str(document), f"is no UTF-8: {error.reason} at byte {error.start}")]) from None
    after = filled(before, document.parent)
    if before == after:
        return 0
    if check:
        print(f"{document}: tables are not what their files give; run it without --check", file=sys.stderr)
        return 1
    write_whole(document, after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
