"""A plan: how to run a config on a machine. JSON, hand-editable, recorded in every checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from meshwright.errors import Finding, LayoutError
from meshwright.spec.layout import Layout

__all__ = ["Plan", "read_plan"]

_CHOICES = {
    "precision": ("fp32", "fp64", "bf16", "fp16", "fp8"),
    "compile": ("off", "eager", "inductor"),
    "schedule": ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"),
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "optimizer", "parameters"),
    "gather": ("once", "twice"),
    "context": ("auto", "ring", "all_to_all"),
}


LARGEST = 2**31


@dataclass(frozen=True)
class Plan:
    """Layout and the knobs that change speed and memory but never the result (up to rounding).

    micro_batch: rows a forward on one rank. bucket_mib: gradients reduced together, in MiB of the reduce dtype.
    graphs: forward and backward of each block are launched as one recording each, where batches have the same shapes.
    sequence_parallel: between the matrices of tensor-parallel layers a rank holds its share of the positions, not all.
    gather: ZeRO-3 gathers the weights of a block for forward and again for backward ("twice"), or keeps them from the first
    forward of a step to its last backward ("once").
    context: how attention sees the positions of the other context-parallel ranks: keys and values go round ("ring"), or each
    rank gets all positions of a part of the heads ("all_to_all"); "auto": the latter where heads divide.
    schedule: order of the micro-batches in a pipeline. chunks: pipeline stages on a rank (interleaved, zbv). split: layers
    of each pipeline stage, in the order of the model; empty: balanced.
    recompute: what backward computes again instead of keeping: nothing, all but the outputs of matrix products and
    attention ("selective"), or whole blocks ("full"), of every `recompute_every`-th block. offload_activations: what blocks
    keep for backward waits in host memory. offload: optimizer state, or parameters and optimizer state, live in host memory.
    """

    layout: Layout = field(default_factory=Layout)
    micro_batch: int = 1
    precision: str = "fp32"
    compile: str = "off"
    graphs: bool = False
    overlap: bool = True
    bucket_mib: int = 32
    sequence_parallel: bool = True
    gather: str = "twice"
    context: str = "auto"
    schedule: str = "1f1b"
    chunks: int = 1
    split: tuple[int, ...] = ()
    recompute: str = "none"
    recompute_every: int = 1
    offload_activations: bool = False
    offload: str = "none"
    reason: str = ""

    def __post_init__(self) -> None:
        findings = [
            Finding(f"plan.{key}", f"{getattr(self, key)!r} is not one of {', '.join(choices)}")
            for key, choices in _CHOICES.items()
            if getattr(self, key) not in choices
        ]
        for key in ("micro_batch", "bucket_mib", "chunks", "recompute_every"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < LARGEST:
                findings.append(Finding(f"plan.{key}", f"{value!r} is not a whole number from 1 to {LARGEST - 1}"))
        if not isinstance(self.reason, str):
            findings.append(Finding("plan.reason", f"{self.reason!r} is no text"))
        for key in ("graphs", "overlap", "sequence_parallel", "offload_activations"):
            if not isinstance(getattr(self, key), bool):
                findings.append(Finding(f"plan.{key}", f"{getattr(self, key)!r} is neither true nor false"))
        if findings:
            raise LayoutError(findings=findings)

    def accumulation(self, rows: int) -> int:
        """Micro-steps for a global batch of `rows`: every data rank runs the same number, the last ones may be padded."""
        per_rank = -(-rows // self.layout.dp)
        return max(1, -(-per_rank // self.micro_batch))

    def described(self) -> list[str]:
        """What it does beside data parallelism, in words, then precision, dtype of reductions, and compilation."""
        layout = self.layout
        ways = {"auto": "by its heads", "ring": "ring", "all_to_all": "all-to-all"}
        said = [
            f"ZeRO-{layout.zero} over {layout.shards}" if layout.zero else "",
            f"tensor {layout.tp}" + (" with sequence parallelism" if self.sequence_parallel else "") if layout.tp > 1 else "",
            f"context {layout.cp} ({ways[self.context]})" if layout.cp > 1 else "",
            f"experts over {layout.ep}" if layout.ep > 1 else "",
            f"pipeline {layout.pp} x {self.chunks} ({self.schedule})" if layout.pp > 1 else "",
            f"recompute {self.recompute}" if self.recompute != "none" else "",
            "activations in host memory" if self.offload_activations else "",
            "blocks replayed from recordings" if self.graphs else "",
            f"{self.offload} in host memory" if self.offload != "none" else "",
        ]
        summed = "fp64" if self.precision == "fp64" else "fp32"
        return [part for part in said if part] + [f"{self.precision}, gradients summed in {summed}", f"compile {self.compile}"]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "plan") -> Plan:
        """What is missing gets its default. Raises LayoutError that names every unknown key."""
        check_keys(data, where)
        return cls(**{**data, "layout": Layout(**data.get("layout", {})), "split": tuple(data.get("split", ()))})

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        return cls.from_dict(read_plan(str(path)), where=str(path))


def read_plan(source: str) -> dict[str, Any]:
    """Keys of a plan, all or some, from a JSON file or from JSON text (`{"layout": {"tp": 2}}`). Raises LayoutError."""
    where = "--plan" if source.lstrip().startswith(("{", "[")) else source
    try:
        text = source if where == "--plan" else Path(source).read_text(encoding="utf-8")
        data = json.loads(text)
    except OSError as error:
        raise LayoutError(findings=[Finding(where, f"cannot be read: {error.strerror}")]) from None
    except (ValueError, RecursionError) as error:
        raise LayoutError(findings=[Finding(where, f"is not JSON: {error}")]) from None
    Plan.from_dict(data, where)  # refuses what is wrong with the values, whatever is filled in later
    return data


def check_keys(data: Any, where: str) -> None:
    """Raises LayoutError that names every key which a plan does not have, and a split that is no list."""
    known = {f.name for f in fields(Plan)}
    layout_known = {f.name for f in fields(Layout)}
    layout = data.get("layout", {}) if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(layout, dict):
        raise LayoutError(findings=[Finding(where, "a plan is a JSON object with a layout object inside")])
    findings = [Finding(where, f"unknown key {k!r}", f"Known: {', '.join(sorted(known))}") for k in data if k not in known]
    findings += [
        Finding(where, f"unknown key 'layout.{k}'", f"Known: {', '.join(sorted(layout_known))}")
        for k in layout
        if k not in layout_known
    ]
    split = data.get("split", [])
    if not isinstance(split, list | tuple) or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in split):
        findings.append(Finding(where, f"split {split!r} is not a list of layers a stage", "Write it like [7, 9]"))
    if findings:
        raise LayoutError(findings=findings)
