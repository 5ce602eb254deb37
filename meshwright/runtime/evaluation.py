"""Figures of a trained run on data that it was not given."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from meshwright.config.schema import Source
from meshwright.data.loader import Loader
from meshwright.distributed import device as devices
from meshwright.errors import CheckpointError, Finding
from meshwright.runtime.corpus import Corpus, prepare_corpus
from meshwright.runtime.folder import RunFolder
from meshwright.runtime.trained import load_trained
from meshwright.train.evaluate import sum_batches
from meshwright.train.objectives import make_objective

__all__ = ["evaluate_run"]


def evaluate_run(
    run: str | Path, data: Sequence[str], *, best: bool = False, micro_batch: int = 8, keys: Mapping[str, str] | None = None
) -> tuple[dict[str, float], list[str]]:
    """Figures as in training (`Objective.figures`) and notes about the rows. Every row of `data` counts once.

    keys: text_key, label_key and encoding where they differ from the run's. Raises CheckpointError and DataError.
    """
    device = devices.rank_device(devices.pick(), 0)
    trained = load_trained(run, best=best, device=device)
    config = trained.config
    if config is None:
        raise CheckpointError(
            findings=[Finding(str(run), "is no run folder: it does not say how its data is read", "Name a run")]
        )
    template = config.data.train[0].model_copy(update={"weight": None, "format": "auto", **(keys or {})})
    sources = [Source(**{**template.model_dump(), "path": path}) for path in data]
    objective = make_objective(config.objective, config.model.classes or 0)
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="meshwright-evaluate-") as scratch:
        tokenizer_folder = Path(scratch) / "tokenizer"
        trained.tokenizer.save(tokenizer_folder)
        changed = config.data.model_copy(
            update={
                "train": sources,
                "valid": sources,
                "cache": None,
                "tokenizer": config.data.tokenizer.model_copy(update={"path": str(tokenizer_folder)}),
            }
        )
        small = config.train.model_copy(update={"batch": 1, "micro_batch": None, "ramp": None, "tail": "step"})
        config = config.model_copy(update={"data": changed, "train": small})
        names = Corpus.load(RunFolder(run).data).label_names() if trained.task == "classify" else None
        corpus = prepare_corpus(config, Path(scratch) / "data", task=trained.task, say=notes.append, label_names=names)
        _, rows = corpus.datasets(config, trained.tokenizer, trained.task, verify=True)
        assert rows is not None, "data.valid is given"
        loader = Loader(rows, micro_batch=micro_batch)
        sums = sum_batches(trained.model, objective, loader, rows=0, device=torch.device(device))
        return objective.figures(sums), [*dict.fromkeys(notes), *rows.notes]
