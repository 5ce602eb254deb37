"""One measured figure of the host's side beside its limit and its target, as a record and as a line of a table. No torch."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.bench.table import NONE, piped

__all__ = ["Measure", "lines", "measures_in", "of_repeats", "say", "shown"]

TEXTS = ("note", "limited_by")
HEADER = ("what", "ranks", "measured", "spread", "limit", "of limit", "target", "")


@dataclass(frozen=True)
class Measure:
    """value: the median of some repeats, in `unit` ("tokens/s", "bytes/s", "MiB", "s", or "" for a plain number or ratio).
    spread: (largest - smallest) / median of them. higher: whether more is better. limit: what the value could be at best, in
    its unit, and limited_by what that is. target: what it should reach. fails_at: where it is a regression, see `regressed`."""

    name: str
    value: float
    unit: str
    spread: float = 0.0
    ranks: int = 1
    higher: bool = True
    limit: float | None = None
    limited_by: str = ""
    target: float | None = None
    fails_at: float | None = None
    note: str = ""

    @property
    def share(self) -> float | None:
        """Of the limit, 1 at best: value / limit, or limit / value where less is better."""
        if not self.limit or not self.value:
            return None
        return self.value / self.limit if self.higher else self.limit / self.value

    @property
    def reached(self) -> bool | None:
        """None without a target."""
        if self.target is None:
            return None
        return self.value >= self.target if self.higher else self.value <= self.target

    @property
    def regressed(self) -> bool:
        """At or beyond `fails_at` by more than half the spread: what the repeats vary by themselves is no regression."""
        noise = self.value * self.spread / 2
        if self.fails_at is None:
            return False
        return self.value + noise <= self.fails_at if self.higher else self.value - noise >= self.fails_at


def of_repeats(name: str, values: Sequence[float], unit: str, **more: Any) -> Measure:
    """The median of `values` with its spread."""
    median = statistics.median(values)
    spread = (max(values) - min(values)) / median if median else 0.0
    return Measure(name, median, unit, spread, **more)


def say(measure: Measure) -> None:
    """One line of JSON, by which a subprocess hands a measure to the one that started it."""
    print(json.dumps({"measure": asdict(measure)}), flush=True)


def measures_in(records: Sequence[dict[str, Any]]) -> list[Measure]:
    """The measures among the records that a subprocess printed."""
    return [Measure(**record["measure"]) for record in records if "measure" in record]


def lines(measures: Sequence[Measure]) -> list[str]:
    """The table, and what each limit is."""
    rows = [list(HEADER)]
    rows += [
        [
            one.name,
            str(one.ranks),
            shown(one.value, one.unit),
            f"{one.spread:.0%}" if one.spread else NONE,
            NONE if one.limit is None else shown(one.limit, one.unit),
            NONE if one.share is None else f"{one.share:.0%}",
            NONE if one.target is None else f"{'>=' if one.higher else '<='} {shown(one.target, one.unit)}",
            {True: "reached", False: "missed", None: ""}[one.reached],
        ]
        for one in measures
    ]
    about = "Medians; spread: (largest - smallest) / median of the repeats. Of limit: 100% where nothing is left to gain."
    notes, limits = (_grouped([(text, one) for one in measures if (text := getattr(one, field))]) for field in TEXTS)
    return [*piped(rows), "", about, *notes, *(f"Limit of {line}" for line in limits)]


def _grouped(found: Sequence[tuple[str, Measure]]) -> list[str]:
    """Each text once, behind the names that it is said of."""
    by_text: dict[str, list[str]] = {}
    for text, one in found:
        by_text.setdefault(text, []).append(one.name.strip())
    return [f"{'; '.join(dict.fromkeys(names))}: {text}." for text, names in by_text.items()]


def shown(value: float, unit: str) -> str:
    """With its unit, in a size that reads well."""
    if unit in ("tokens/s", "bytes/s"):
        scale, name = next(((10**p, n) for p, n in ((9, "G"), (6, "M"), (3, "k")) if abs(value) >= 10**p), (1, ""))
        return f"{value / scale:,.3g} {name} {unit}".replace("  ", " ")
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"
    return f"{value:.4g} {unit}".rstrip()
