"""Which cells are tried: the committed covering array, and the whole product behind it.

`python -m tests.parity.array` writes array.json anew, from nothing but the factors here: every strategy alone on every model,
then the fewest cells that a greedy choice needs for every pair of values at up to 4 ranks, then full stacks on 8.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path

from meshwright.verify.cover import pairwise
from meshwright.verify.layouts import CHUNKS
from tests.parity.cells import LAYOUTS, SCHEDULES, Cell
from tests.parity.models import MODELS

__all__ = ["FILE", "alone", "candidates", "factors", "generate", "load", "stacks", "whole_product"]

FILE = Path(__file__).with_name("array.json")

ALONE = ("data", "zero1", "zero2", "zero3", "hybrid1", "hybrid2", "hybrid3", "tp")
SMALL = 4
RECOMPUTE = ("none", "selective", "full")
COMPILE = ("off", "eager")
CONTEXT = ("ring", "all_to_all")


def shapes(largest: int) -> Iterator[Cell]:
    """Every model on every layout of at most so many ranks, with each schedule and each kind of tensor and context
    parallelism."""
    for model, (name, layout) in product(MODELS, LAYOUTS.items()):
        layers = MODELS[model]["model"]["layers"]
        if layout.world > largest:
            continue
        for schedule in SCHEDULES if layout.pp > 1 else ("",):
            if schedule and layout.pp * CHUNKS[schedule] > layers:
                continue
            kinds = product((True, False) if layout.tp > 1 else (True,), CONTEXT if layout.cp > 1 else ("auto",))
            for sequence, context in kinds:
                cell = Cell(model, name, schedule, sequence_parallel=sequence, context=context)
                if not cell.refused():
                    yield cell


@functools.cache
def candidates() -> list[Cell]:
    """All cells at up to 4 ranks. What composes with all else without experts is not tried again with them: only each strategy
    alone, and all that deals experts."""
    rest = product((1, 3), ("fp64", "fp32"), (True, False), RECOMPUTE, COMPILE)
    every = list(rest)
    return [
        replace(shape, accumulation=steps, precision=precision, clip=clip, recompute=recompute, compile=how)
        for shape in shapes(SMALL)
        if shape.model != "moe" or LAYOUTS[shape.layout].ep > 1 or shape.layout in (*ALONE, "pp")
        for steps, precision, clip, recompute, how in every
    ]


def whole_product() -> list[Cell]:
    """Every model x layout x schedule x accumulation x precision x clipping; kinds of tensor and context parallelism, of
    recompute and of compilation take turns, so that each meets every one of these, in a fixed order."""
    cells = []
    alike = groupby(shapes(8), key=lambda shape: (shape.model, shape.layout, shape.schedule))
    for kinds in (list(same) for _, same in alike):
        for number, (steps, precision, clip) in enumerate(product((1, 3), ("fp64", "fp32"), (True, False))):
            # over the eight every kind comes with each value of the others
            kind = kinds[(number ^ number >> 1 ^ number >> 2) % len(kinds)]
            turn = {"recompute": RECOMPUTE[len(cells) % 3], "compile": COMPILE[len(cells) % 5 == 4]}
            cells.append(replace(kind, accumulation=steps, precision=precision, clip=clip, **turn))
    return cells


def alone() -> list[Cell]:
    """Every strategy by itself on every model; the other choices take turns."""
    cells = []
    for number, model in enumerate(MODELS):
        shapes = [Cell(model, layout) for layout in ALONE]
        shapes += [Cell(model, "tp", sequence_parallel=False)]
        shapes += [Cell(model, "pp", schedule) for schedule in SCHEDULES]
        shapes += [Cell(model, "cp", context=context) for context in CONTEXT]
        for shape in shapes:
            if shape.refused():
                continue
            turn = len(cells) + number  # there is an even number of strategies, so that they would fall into step
            cells.append(
                replace(
                    shape,
                    accumulation=(1, 3)[turn % 2],
                    precision=("fp64", "fp32")[turn // 2 % 2],
                    clip=turn // 3 % 2 == 0,
                    recompute=RECOMPUTE[turn // 2 % 3],
                    compile="eager" if turn % 11 == 5 else "off",
                )
            )
    return cells


def stacks() -> list[Cell]:
    """Full stacks on 8 ranks: every strategy, schedule and model, three micro-steps, clipped."""
    chosen = [
        Cell("decoder", "zero3-tp-pp", "1f1b"),
        Cell("tied", "zero3-tp-pp", "interleaved", recompute="full"),
        Cell("gqa", "zero2-tp-pp", "zero_bubble", recompute="selective"),
        Cell("mqa", "zero1-tp-pp", "gpipe", precision="fp32"),
        Cell("mlm", "zero3-tp-pp", "zbv"),
        Cell("classifier", "hybrid3-tp", recompute="full"),
        Cell("plain", "hybrid3-pp", "1f1b", compile="eager"),
        Cell("dropout", "zero2-tp-pp", "zbv", sequence_parallel=False),
        Cell("gqa", "tp4-pp", "interleaved"),
        Cell("tied", "data-tp-pp", "zero_bubble", precision="fp32"),
        Cell("tied", "zero3-cp-tp-pp", "1f1b", context="ring", recompute="selective"),
        Cell("gqa", "zero3-cp-tp-pp", "zero_bubble", context="all_to_all", sequence_parallel=False),
        Cell("mlm", "hybrid2-cp", context="ring", recompute="full"),
        Cell("dropout", "zero1-cp4", context="ring"),
        Cell("moe", "ep2-zero3-tp-pp", "1f1b", recompute="full"),
    ]
    return [replace(cell, accumulation=3) for cell in chosen]


def factors(cell: Cell) -> dict[str, Hashable]:
    """The values of a cell whose pairs are covered."""
    return {
        "model": cell.model,
        "layout": cell.layout,
        "schedule": cell.schedule,
        "accumulation": cell.accumulation,
        "precision": cell.precision,
        "clip": cell.clip,
        "recompute": cell.recompute,
        "compile": cell.compile,
        "sequence_parallel": cell.sequence_parallel,
        "context": cell.context,
    }


def generate() -> list[Cell]:
    every = candidates()
    place = {cell: number for number, cell in enumerate(every)}
    chosen = pairwise([factors(cell) for cell in every], [place[cell] for cell in alone()])
    return [every[index] for index in chosen] + stacks()


def load() -> list[Cell]:
    """The committed array."""
    return [Cell(**values) for values in json.loads(FILE.read_text(encoding="utf-8"))]


def main() -> None:
    lines = ",\n".join(json.dumps(cell.to_dict()) for cell in generate())
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
