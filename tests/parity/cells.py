"""A cell: one model trained by one plan, and how far from one device it ends.

outcome = run_cell(ranks, Cell("tied", "zero2-tp", accumulation=3))      # ranks: the fixture of tests/conftest.py
assert not outcome.wrong
"""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.distributed.environment import World
from meshwright.distributed.world import init_world
from meshwright.errors import Finding
from meshwright.parallel.apply import Engine
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.plan_rules import refused_for
from meshwright.train.objectives import make_objective
from meshwright.verify.cases import CompiledBlocks, run
from meshwright.verify.cases import compiled_alike as plans_alike
from meshwright.verify.compare import Worst, compare_numbers, compare_pieces, geometry_of, uncovered
from meshwright.verify.layouts import CHUNKS
from meshwright.verify.reference import Reference, reference
from tests.parity.models import ROWS, STEPS, case_of, config_of
from tests.ranks.pool import Pools, joined, layout_mesh

LAYOUTS = {
    "data": Layout(dp_replicate=2),
    "zero1": Layout(dp_shard=2, zero=1),
    "zero2": Layout(dp_shard=2, zero=2),
    "zero3": Layout(dp_shard=2, zero=3),
    "hybrid1": Layout(dp_replicate=2, dp_shard=2, zero=1),
    "hybrid2": Layout(dp_replicate=2, dp_shard=2, zero=2),
    "hybrid3": Layout(dp_replicate=2, dp_shard=2, zero=3),
    "tp": Layout(tp=2),
    "tp4": Layout(tp=4),
    "pp": Layout(pp=2),
    "pp4": Layout(pp=4),
    "data-tp": Layout(dp_replicate=2, tp=2),
    "zero1-tp": Layout(dp_shard=2, zero=1, tp=2),
    "zero2-tp": Layout(dp_shard=2, zero=2, tp=2),
    "zero3-tp": Layout(dp_shard=2, zero=3, tp=2),
    "data-pp": Layout(dp_replicate=2, pp=2),
    "zero1-pp": Layout(dp_shard=2, zero=1, pp=2),
    "zero2-pp": Layout(dp_shard=2, zero=2, pp=2),
    "zero3-pp": Layout(dp_shard=2, zero=3, pp=2),
    "tp-pp": Layout(tp=2, pp=2),
    "data-tp-pp": Layout(dp_replicate=2, tp=2, pp=2),
    "zero1-tp-pp": Layout(dp_shard=2, zero=1, tp=2, pp=2),
    "zero2-tp-pp": Layout(dp_shard=2, zero=2, tp=2, pp=2),
    "zero3-tp-pp": Layout(dp_shard=2, zero=3, tp=2, pp=2),
    "hybrid3-tp": Layout(dp_replicate=2, dp_shard=2, zero=3, tp=2),
    "hybrid3-pp": Layout(dp_replicate=2, dp_shard=2, zero=3, pp=2),
    "tp4-pp": Layout(tp=4, pp=2),
    "cp": Layout(cp=2),
    "cp4": Layout(cp=4),
    "cp-tp": Layout(cp=2, tp=2),
    "cp-pp": Layout(cp=2, pp=2),
    "zero3-cp": Layout(dp_shard=2, cp=2, zero=3),
    "hybrid2-cp": Layout(dp_replicate=2, dp_shard=2, cp=2, zero=2),
    "zero1-cp4": Layout(dp_replicate=2, cp=4, zero=1),
    "zero3-cp-tp-pp": Layout(cp=2, zero=3, tp=2, pp=2),
    "ep2": Layout(dp_replicate=2, ep=2),
    "ep4": Layout(dp_replicate=4, ep=4),
    "data-ep2": Layout(dp_replicate=4, ep=2),
    "ep2-zero1": Layout(dp_shard=4, zero=1, ep=2),
    "ep2-zero2": Layout(dp_shard=4, zero=2, ep=2),
    "ep2-zero3": Layout(dp_shard=4, zero=3, ep=2),
    "ep4-zero3": Layout(dp_replicate=2, dp_shard=2, zero=3, ep=4),
    "ep2-hybrid2": Layout(dp_replicate=2, dp_shard=2, zero=2, ep=2),
    "ep2-tp2": Layout(dp_replicate=2, ep=2, tp=2),
    "ep2-pp2": Layout(dp_replicate=2, ep=2, pp=2),
    "ep2-zero3-pp2": Layout(dp_shard=2, zero=3, ep=2, pp=2),
    "ep2-zero3-tp-pp": Layout(dp_shard=2, zero=3, ep=2, tp=2, pp=2),
}
SCHEDULES = tuple(CHUNKS)

_lock = threading.Lock()

LIMITS = {
    "fp64": {"loss": 1e-12, "norm": 1e-12, "gradient": 1e-11, "weight": 1e-11, "moment": 1e-11},
    "fp32": {"loss": 1e-5, "norm": 1e-5, "gradient": 1e-5, "weight": 1e-5, "moment": 1e-5},
}


@dataclass(frozen=True)
class Cell:
    """schedule: of a pipeline, else "". sequence_parallel: true where nothing is tensor parallel. context: "auto" where rows
    are whole."""

    model: str
    layout: str
    schedule: str = ""
    accumulation: int = 1
    precision: str = "fp64"
    clip: bool = True
    recompute: str = "none"
    compile: str = "off"
    sequence_parallel: bool = True
    context: str = "auto"

    @property
    def world(self) -> int:
        return LAYOUTS[self.layout].world

    @property
    def id(self) -> str:
        parts = [self.model, self.layout, self.schedule, f"x{self.accumulation}", self.precision]
        parts += ["clip" if self.clip else "", "" if self.sequence_parallel else "whole"]
        parts += [self.context if self.context != "auto" else ""]
        parts += [self.recompute if self.recompute != "none" else "", "compiled" if self.compile != "off" else ""]
        return "-".join(filter(None, parts))

    @property
    def plan(self) -> Plan:
        layout = LAYOUTS[self.layout]
        rows = -(-ROWS // layout.dp)
        return Plan(
            layout=layout,
            micro_batch=-(-rows // self.accumulation),
            precision=self.precision,
            compile=self.compile,
            schedule=self.schedule or "1f1b",
            chunks=CHUNKS[self.schedule] if self.schedule else 1,
            recompute=self.recompute,
            sequence_parallel=self.sequence_parallel,
            context=self.context,
        )

    def refused(self) -> list[Finding]:
        config = config_of(self.model)
        task = make_objective(config.objective, config.model.classes or 0).task
        return refused_for(self.plan, config.model, task, config.data.seq_len)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Outcome:
    """worst: by kind, over all ranks. trouble: elements that nobody holds, steps that were skipped."""

    worst: dict[str, Worst] = field(default_factory=dict)
    trouble: list[str] = field(default_factory=list)

    def over(self, limits: Mapping[str, float]) -> list[str]:
        """What is beyond its limit, or missing."""
        far = [f"{k} {w.value:.1e} ({w.where})" for k, w in self.worst.items() if not w.value <= limits[k]]
        absent = [f"no {kind} was compared" for kind in limits if kind not in self.worst]
        return self.trouble + far + absent


def compiled_alike(cell: Cell) -> tuple[Any, ...]:
    """Cells of which this is the same run much the same compiled blocks, whatever else their layouts are."""
    return cell.model, *plans_alike(cell.plan)


def limits_of(cell: Cell) -> dict[str, float]:
    return LIMITS[cell.precision]


@functools.cache
def reference_of(model: str, precision: str, clip: bool, steps: int = STEPS) -> Reference:
    """Of one process and one micro-step; the same for every layout."""
    world = World()
    with init_world(world, "cpu") as ranks:
        return reference(case_of(model, precision, clip, steps), ranks, ROWS, gradients=steps)


@functools.lru_cache(maxsize=4)
def _read(path: Path) -> Reference:
    known: Reference = pickle.loads(path.read_bytes())
    return known


def run_cell(ranks: Pools, cell: Cell, fault: str = "", timeout: float = 120.0) -> Outcome:
    """fault: a name of tests/parity/faults.py that is planted in every rank. Safe in several threads, each with its ranks."""
    path = ranks.folder / f"reference-{cell.model}-{cell.precision}-{cell.clip}"
    with _lock:  # it is made in this process
        known = reference_of(cell.model, cell.precision, cell.clip)
    if not path.exists():  # ranks read it once each, instead of being sent megabytes with every cell
        path.write_bytes(pickle.dumps(known))
    results = ranks(cell.world).run(cell_on_rank, cell, path, fault, timeout=timeout)
    outcome = Outcome()
    for worst, _, trouble in results:
        outcome.trouble += [text for text in trouble if text not in outcome.trouble]
        for kind, found in worst.items():
            outcome.worst[kind] = outcome.worst.get(kind, Worst()).max(found)
    names = [*known.gradients[0], *known.state]
    outcome.trouble += uncovered([held for _, held, _ in results], names)
    return outcome


_compiled = CompiledBlocks()
"""Of a rank of the pool."""


def cell_on_rank(cell: Cell, path: Path, fault: str) -> tuple[dict[str, Worst], list[Any], list[str]]:
    """On every rank: largest differences by kind, what this rank holds, what is wrong beside numbers."""
    from tests.parity.faults import planted

    known = _read(path)
    _compiled.prepare_for(cell.plan, cell.model)
    found: dict[str, Worst] = {}
    held: list[Any] = []

    def take(worst: dict[str, Worst]) -> None:
        for kind, value in worst.items():
            found[kind] = found.get(kind, Worst()).max(value)

    def look(step: int, engine: Engine, scale: float) -> None:
        pieces = engine.gradient_state()
        take(compare_pieces(pieces, known.gradients[step], f"step {step + 1}", 1.0 / scale))
        if step == STEPS - 1:
            state = engine.parameters_state()
            take(compare_pieces(state, known.state))
            held.extend(geometry_of([*pieces, *state]))

    plan = cell.plan
    with planted(fault):
        trace = run(case_of(cell.model, cell.precision, cell.clip), plan, layout_mesh(plan.layout), joined(), look)
    take({"loss": compare_numbers(trace.losses, known.trace.losses), "norm": compare_numbers(trace.norms, known.trace.norms)})
    return found, held, [] if trace.skipped == known.trace.skipped else [f"skipped steps: {trace.skipped}"]
