"""What makes a run that run: values that a resume must find unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.checkpoint import retain
from meshwright.config.load import flatten
from meshwright.config.schema import Config
from meshwright.errors import CheckpointError, Finding

__all__ = ["identity", "refuse_other_run", "saved_meta"]


def identity(config: Config, rows: int, tokenizer: str, stores: Sequence[str]) -> dict[str, Any]:
    """JSON values. rows: training rows an epoch. tokenizer: its fingerprint. stores: digests of the corpora's manifests."""
    data = config.data
    return {
        "model": config.model.model_dump(mode="json"),
        "run": {"seed": config.run.seed},
        "objective": config.objective.model_dump(mode="json"),
        "data": {"rows": rows, "seq_len": data.seq_len, "packing": data.packing, "document_mask": data.document_mask},
        "tokenizer": tokenizer,
        "corpora": list(stores),
        "optimizer": config.train.optimizer.kind,
        "precision": "fp64" if config.precision == "fp64" else "fp32 masters",
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


def saved_meta(checkpoints: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest published checkpoint with a readable manifest, and its meta. Digests are not checked."""
    for found in retain.find(checkpoints):
        if found.manifest is not None:
            return found.path, found.manifest.meta
    return None
