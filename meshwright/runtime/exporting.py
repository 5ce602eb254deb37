"""`meshwright export`: what a folder holds, and the labelled rows that a written classifier is tried on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from meshwright.config.schema import Source as DataSource
from meshwright.data.readers import documents
from meshwright.errors import ConfigError, DataError, Finding
from meshwright.export.source import Source, framed
from meshwright.runtime.trained import label_names, load_trained

__all__ = ["check_target", "labelled_rows", "load_source"]


def load_source(path: str | Path, dtype: torch.dtype | None = None) -> Source:
    """From a run folder, a checkpoint, a model folder or a Hugging Face folder. dtype: of the weights; default: as stored.

    Raises CheckpointError as `load_trained`, and DataError where the names of the classes do not fit the model.
    """
    trained = load_trained(path, dtype=dtype)
    labels = label_names(path) if trained.task == "classify" else ()
    classes = trained.model_config.classes
    if labels and len(labels) != classes:
        raise DataError(findings=[Finding(str(path), f"has {classes} classes, and its data names {len(labels)}")])
    return Source(trained.model, trained.model_config, trained.task, trained.tokenizer, labels, Path(path).absolute().name)


def check_target(folder: str | Path, others: Sequence[Finding] = ()) -> None:
    """Raises ConfigError for a folder that cannot be written to, and with what else was found, before a model is read."""
    folder, findings = Path(folder), list(others)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        findings.append(Finding(f"--out {folder}", "exists and is not empty", "Give another name or remove it"))
    if findings:
        raise ConfigError(findings=findings)


def labelled_rows(source: Source, data: DataSource) -> tuple[tuple[tuple[int, ...], int], ...]:
    """(tokens, number of the class) of every row, cut to the model's length as in training.

    Raises DataError for a source that is no classifier, a row without a label, and a label that the model does not have.
    """
    if source.task != "classify":
        what = f"has labelled rows, and {source.name} is no classifier (task {source.task})"
        raise DataError(findings=[Finding(f"--data {data.path}", what, "Remove it")])
    numbers = {name: number for number, name in enumerate(source.class_names)}
    rows = tuple(_rows(source, data, numbers))
    if not rows:
        raise DataError(findings=[Finding(data.path, "has no documents")])
    return rows


def _rows(source: Source, data: DataSource, numbers: dict[str, int]) -> Iterator[tuple[tuple[int, ...], int]]:
    prefix, suffix = framed(source)
    room = source.config.max_len - len(prefix) - len(suffix)
    for document in documents(data):
        label = None if document.label is None else str(document.label)
        if label not in numbers:
            what = "has no label" if label is None else f"has the label {label!r}, and the model knows {_some(list(numbers))}"
            fix = f"The label is read from {data.label_key!r}; --label-key names another"
            raise DataError(findings=[Finding(f"{document.file}:{document.line}", what, fix)])
        yield (*prefix, *source.tokenizer.encode(document.text)[:room], *suffix), numbers[label]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
