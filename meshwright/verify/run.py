"""`meshwright verify` on the ranks: the reference on the first one, then every plan on all of them, compared as it runs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright.config.schema import Config, OptimizerConfig, SyncConfig
from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.piece import Piece
from meshwright.distributed.reduce import broadcast_json, gather_json
from meshwright.distributed.world import Ranks
from meshwright.errors import DeviceError, Finding, LayoutError, MeshwrightError
from meshwright.parallel.apply import Engine
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.verify.cases import Case, CompiledBlocks, run
from meshwright.verify.compare import Worst, compare_numbers, compare_pieces, geometry_of, uncovered
from meshwright.verify.reference import Reference, reference, shared_in_turn

__all__ = ["Row", "settled", "verify", "without_sync"]

GRADIENTS = 1
"""First steps whose gradients are kept and compared. A later one is in the weights after the last step."""
SGD_LR = 0.1
EPS = 1e-4
"""Least eps of AdamW: a gradient that is 1e-16 of rounding alone then moves its weight by 1e-12 of an update."""


def settled(config: Config, precision: str, steps: int) -> tuple[Config, list[str]]:
    """The config as it is verified, and what differs from the user's.

    AdamW divides by the size of the gradient: where that is rounding alone, as for the bias of keys, so is the update. Hence a
    larger eps in fp64, and SGD below. Attention dropout draws from a generator whose numbers depend on the layout.
    """
    optimizer, notes, lr = config.train.optimizer, [], config.train.lr
    if precision != "fp64" and optimizer.kind != "sgd":
        optimizer, lr = OptimizerConfig(kind="sgd", weight_decay=0.0), SGD_LR
        notes.append(f"weights are updated by SGD with lr {lr:g}: in {precision} AdamW makes rounding as large as an update")
    elif optimizer.kind == "adamw" and optimizer.eps < EPS:
        optimizer = optimizer.model_copy(update={"eps": EPS})
        notes.append(f"AdamW's eps is {EPS:g}: where a gradient is nothing but rounding, so is the update otherwise")
    model = config.model
    if model.attention_dropout:
        model = model.model_copy(update={"attention_dropout": 0.0})
        notes.append("attention dropout is off: its draws depend on the layout")
    config, said = without_sync(config)
    notes += said
    train = config.train.model_copy(
        update={"optimizer": optimizer, "lr": lr, "lr_scaling": "none", "steps": steps, "ramp": None, "noise_scale": False}
    )
    return config.model_copy(update={"train": train, "model": model, "precision": precision}), notes


def without_sync(config: Config) -> tuple[Config, list[str]]:
    """The config with gradients summed in full in every step, and what to say of that."""
    if config.train.sync.plain:
        return config, []
    said = (
        "train.sync is left out and not verified: it computes something else than one device, on purpose. What is verified is "
        "each layout with gradients summed in full in every step"
    )
    train = config.train.model_copy(update={"sync": SyncConfig()})
    return config.model_copy(update={"train": train}), [said]


@dataclass
class Row:
    """A plan and what came of it. worst: by kind (`compare.KINDS`). trouble: what is wrong beside numbers. refused: why this
    model cannot have the plan."""

    plan: Plan
    worst: dict[str, Worst] = field(default_factory=dict)
    trouble: list[str] = field(default_factory=list)
    refused: str = ""
    seconds: float = 0.0

    def verdict(self, tolerance: float) -> str:
        """ "same", "differs" or "refused"."""
        if self.refused:
            return "refused"
        good = not self.trouble and all(worst.value <= tolerance for worst in self.worst.values())
        return "same" if good and self.worst else "differs"

    def to_dict(self, tolerance: float) -> dict[str, Any]:
        worst = {kind: {"difference": found.value, "where": found.where} for kind, found in self.worst.items()}
        known = {"worst": worst, "trouble": self.trouble, "refused": self.refused, "seconds": round(self.seconds, 3)}
        return {"plan": self.plan.to_dict(), "verdict": self.verdict(tolerance), **known}


def verify(
    case: Case, plans: Sequence[Plan], ranks: Ranks, *, micro_batch: int, told: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """Every plan against one device, the first rank's. Collective; the same rows on every rank.

    micro_batch: rows at a time on the one device. told: called with each row as it is known.
    Raises DeviceError when the model does not fit the one device.
    """
    known = _reference(case, ranks, micro_batch)
    meshes: dict[Layout, DeviceMesh] = {}
    rows = []
    compiled = CompiledBlocks()
    for plan in plans:
        compiled.prepare_for(plan)
        key = replace(plan.layout, zero=0)
        if key not in meshes:
            meshes[key] = build_mesh(key, ranks.device.type)
        rows.append(_tried(case, plan, meshes[key], ranks, known))
        told(rows[-1])
    return rows


def _reference(case: Case, ranks: Ranks, micro_batch: int) -> Reference | None:
    """On the first rank; the others get None when it is there."""
    made, trouble = None, ""
    if ranks.rank == 0:
        try:
            made = reference(case, ranks, micro_batch, GRADIENTS, kinds=("model",))
        except torch.OutOfMemoryError as error:
            trouble = (str(error).splitlines() or ["out of memory"])[0]
        gc.collect()
    trouble = broadcast_json(trouble, ranks.control)
    if trouble:
        fix = "Verify the same shape with fewer layers (--model.layers=2), or in another --precision"
        raise DeviceError(findings=[Finding("one device", f"cannot hold the model: {trouble}", fix)])
    return made


def _tried(case: Case, plan: Plan, mesh: DeviceMesh, ranks: Ranks, known: Reference | None) -> Row:
    start = time.perf_counter()
    row = Row(plan)

    def look(step: int, engine: Engine, scale: float) -> None:
        usable = broadcast_json(known is not None and not known.trace.skipped[step], ranks.control)
        if step < GRADIENTS and usable:
            tensors = known.gradients[step] if known else None
            _compare(row, engine.gradient_state(), tensors, ranks, f"step {step + 1}", 1.0 / scale)
        if step == case.steps - 1:
            held = [piece for piece in engine.parameters_state() if piece.name.startswith("model/")]
            _compare(row, held, known.state if known else None, ranks)

    why = ""
    try:
        trace = run(case, plan, mesh, ranks, look)
    except LayoutError as error:  # from parallelize, before the ranks have exchanged anything, hence on all of them
        why = "; ".join(str(finding) for finding in error.findings) or str(error)
    gc.collect()  # the hooks of an engine are a ring
    reasons = gather_json(why, ranks.control)
    if any(reasons):
        if not all(reasons):
            raise MeshwrightError(f"only some ranks refuse {plan.layout}: {next(filter(None, reasons))}")
        row.refused = reasons[0]
        return row
    whole = known.trace if known else None
    losses, norms, skips = broadcast_json([whole.losses, whole.norms, whole.skipped] if whole else None, ranks.control)
    numbers = {"loss": compare_numbers(trace.losses, losses), "norm": compare_numbers(trace.norms, norms)}
    _merge(row, numbers, ranks)
    if any(gather_json(trace.skipped != skips, ranks.control)):
        row.trouble.append(f"skips {_steps(trace.skipped)}, one device skips {_steps(skips)}")
    row.seconds = time.perf_counter() - start
    return row


def _compare(
    row: Row,
    pieces: Iterable[Piece],
    tensors: dict[str, torch.Tensor] | None,
    ranks: Ranks,
    when: str = "",
    factor: float = 1.0,
) -> None:
    """Adds to the row what this rank's pieces and the first rank's tensors differ by. Collective."""
    pieces = list(pieces)
    found: dict[str, Worst] = {}
    for portion in shared_in_turn(tensors, ranks):
        for kind, worst in compare_pieces(pieces, portion, when, factor).items():
            found[kind] = found.get(kind, Worst()).max(worst)
    held = gather_json(geometry_of(pieces), ranks.control)
    missing = broadcast_json(uncovered(held, tensors or ()) if ranks.rank == 0 else None, ranks.control)
    row.trouble += missing
    _merge(row, found, ranks)


def _merge(row: Row, mine: dict[str, Worst], ranks: Ranks) -> None:
    for other in gather_json({kind: [worst.value, worst.where] for kind, worst in mine.items()}, ranks.control):
        for kind, (value, where) in other.items():
            row.worst[kind] = row.worst.get(kind, Worst()).max(Worst(value, where))


def _steps(skipped: Sequence[bool]) -> str:
    found = [str(step) for step, skip in enumerate(skipped, 1) if skip]
    return f"step {', '.join(found)}" if found else "none"
