"""What makes a run that run: values that a resume must find unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.checkpoint import retain
from meshwright.config.load import flatten
from meshwright.config.schema import Config
from meshwright.errors import CheckpointError, Finding
from meshwright.spec.plan import Plan

__all__ = ["identity", "refuse_other_replicas", "refuse_other_run", "saved_meta"]


def identity(config: Config, rows: int, tokenizer: str, stores: Sequence[str]) -> dict[str, Any]:
    """JSON values. rows: training rows an epoch. tokenizer: its fingerprint. stores: digests of the corpora's manifests."""
    data, sync = config.data, config.train.sync
    kept: dict[str, Any] = {"method": sync.method, "overlap": sync.overlap, "compress": sync.compress}
    kept |= {"rank": sync.rank} if sync.compress == "powersgd" else {}
    kept |= {"outer_momentum": sync.outer_momentum > 0} if sync.method == "diloco" else {}
    return {
        "model": config.model.model_dump(mode="json"),
        "run": {"seed": config.run.seed},
        "objective": config.objective.model_dump(mode="json"),
        "data": {"rows": rows, "seq_len": data.seq_len, "packing": data.packing, "document_mask": data.document_mask},
        "tokenizer": tokenizer,
        "corpora": list(stores),
        "optimizer": config.train.optimizer.kind,
        "precision": "fp64" if config.precision == "fp64" else "fp32 masters",
        **({} if sync.plain else {"sync": kept}),
    }


def refuse_other_run(now: dict[str, Any], then: dict[str, Any], where: Path) -> None:
    """Raises CheckpointError that lists every value that must be the same and is not."""
    before, after = dict(flatten(then)), dict(flatten(now))
    findings = [
        Finding(key, f"is {after.get(key)!r}, but {where} was made with {before.get(key)!r}")
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    if findings:
        fix = "Undo the change, or start anew in another --run.dir"
        raise CheckpointError("This run cannot go on with other settings.", [*findings, Finding("", fix)])


def refuse_other_replicas(config: Config, plan: Plan, meta: dict[str, Any], where: Path) -> None:
    """A checkpoint of replicas that train apart has each one's own weights and moments, that of PowerSGD the error of every
    block that a rank held. Raises CheckpointError for a plan that has another number of them, or other blocks."""
    sync, then = config.train.sync, Plan.from_dict(meta["plan"], str(where))
    findings = []
    if sync.compress == "powersgd":
        keys = ("layout", "bucket_mib", "schedule", "chunks", "split")
        changed = [key for key in keys if getattr(plan, key) != getattr(then, key)]
        findings = [
            Finding(
                f"plan.{key}",
                f"is {getattr(plan, key)}, but {where} was made with {getattr(then, key)}, as what PowerSGD keeps",
                "Resume with the plan of the run, or start anew in another --run.dir",
            )
            for key in changed
        ]
    elif sync.local and plan.layout.dp_replicate != then.layout.dp_replicate:
        before = then.layout.dp_replicate
        what = f"is {plan.layout.dp_replicate}, but {where} has the weights and moments of {before} replicas, each its own"
        fix = f"Resume with dp_replicate: {before}, or start anew in another --run.dir"
        findings = [Finding("plan.layout.dp_replicate", what, fix)]
    if findings:
        raise CheckpointError(findings=findings)


def saved_meta(checkpoints: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest published checkpoint with a readable manifest, and its meta. Digests are not checked."""
    for found in retain.find(checkpoints):
        if found.manifest is not None:
            return found.path, found.manifest.meta
    return None
