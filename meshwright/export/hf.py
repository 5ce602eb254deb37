"""Between folders of Hugging Face and ours: convert, read back what was written, compare. `convert` and `export --to hf`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn

from meshwright.checkpoint.manifest import MANIFEST
from meshwright.config.schema import ModelConfig
from meshwright.errors import CheckpointError, ConfigError, Finding
from meshwright.export.source import LoadRun, Source
from meshwright.models.files import (
    DESCRIPTION,
    Description,
    load_model,
    model_tensors,
    read_description,
    write_model,
)
from meshwright.models.hf import CONFIG, HfFolder, export_tensors, load_hf
from meshwright.models.hf_weights import weight_map
from meshwright.models.registry import build
from meshwright.models.shards import SHARD_BYTES, Shards

__all__ = ["Comparison", "Converted", "check_comparison", "compare", "convert", "source_kind", "to_huggingface"]

_LOGIT_LIMIT_PARAMETERS = 2e9
"""Above this, two fp32 copies of the model are more than a comparison is worth: weights are compared instead."""
_ROWS, _LENGTH = 2, 256


@dataclass(frozen=True)
class Comparison:
    """kind       "logits" or "weights"
    difference    largest |difference| of the logits in fp32; or number of weights that are not bitwise equal
    scale         largest |logit|; or number of weights
    """

    kind: str
    difference: float
    scale: float

    @property
    def good(self) -> bool:
        """Weights bitwise; logits to 1e-5 of the largest one (or of 1)."""
        return self.difference <= (1e-5 * max(1.0, self.scale) if self.kind == "logits" else 0)

    def __str__(self) -> str:
        if self.kind == "logits":
            return (
                f"max |difference of logits| against transformers {self.difference:.2e} (largest logit {self.scale:.2f}, fp32)"
            )
        if self.difference:
            return f"{int(self.difference)} of {int(self.scale)} tensors differ after the way back"
        return f"{int(self.scale)} tensors read back and are bitwise equal (no logits were compared)"


@dataclass(frozen=True)
class Converted:
    """What `convert` did. unused: tensors of the source that the model has no place for."""

    direction: str
    family: str
    task: str
    config: ModelConfig
    notes: tuple[str, ...]
    unused: tuple[str, ...] = ()


def source_kind(folder: Path) -> str:
    """ "run", "ours" or "huggingface". Raises CheckpointError for anything else."""
    if (folder / DESCRIPTION).is_file():
        return "ours"
    if ((folder / "checkpoints").is_dir() and (folder / "config.yaml").is_file()) or (folder / MANIFEST).is_file():
        return "run"
    if (folder / CONFIG).is_file():
        return "huggingface"
    what = (
        f"has neither {CONFIG} (Hugging Face), {DESCRIPTION} (a model of ours), {MANIFEST} (a checkpoint) nor config.yaml and "
    )
    what += "checkpoints/ (a run)"
    raise CheckpointError(findings=[Finding(str(folder), what if folder.is_dir() else "is no folder")])


def convert(
    source: str | Path,
    target: str | Path,
    *,
    task: str | None = None,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    load_run: LoadRun | None = None,
) -> Converted:
    """Convert a folder; the direction follows from what it holds.

    task    from Hugging Face only: "lm", "mlm" or "classify" where config.json leaves it open
    family  to Hugging Face only: `model_type`
    dtype   of the weights that are written; default: as they are
    load_run  reads a run folder; without it runs are refused
    """
    source, target = Path(source), Path(target)
    if source_kind(source) == "huggingface":
        return _from_hf(source, target, task, dtype, shard_bytes)
    return to_huggingface(source, target, family=family, dtype=dtype, shard_bytes=shard_bytes, load_run=load_run)


def to_huggingface(
    source: str | Path,
    target: str | Path,
    *,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    load_run: LoadRun | None = None,
) -> Converted:
    """Write any folder that holds a model, one of Hugging Face too, as one that `transformers` and vLLM load. As `convert`."""
    with _our_tensors(Path(source), load_run) as given:
        kind = dtype or given.dtype
        hf = export_tensors(
            lambda name: given.tensor(name).to(kind),
            kind,
            given.description,
            target,
            family=family,
            labels=given.labels,
            tokenizer_folder=given.tokenizer,
            shard_bytes=shard_bytes,
        )
    return Converted("to Hugging Face", hf.family, hf.task, hf.config, hf.notes)


def _from_hf(source: Path, target: Path, task: str | None, dtype: torch.dtype | None, shard_bytes: int) -> Converted:
    with HfFolder.open(source, task) as opened:
        tensors = ((name, tensor.to(dtype or tensor.dtype)) for name, tensor in opened.weights.load(opened.shards))
        size = opened.shards.total_bytes() * (dtype.itemsize / opened.shards.widest().itemsize if dtype else 1)
        write_model(
            target,
            opened.description,
            tensors,
            needed_bytes=int(size),
            tokenizer_folder=source,
            shard_bytes=shard_bytes,
        )
        hf = opened.hf
        return Converted("from Hugging Face", hf.family, hf.task, hf.config, hf.notes, tuple(opened.unused))


@dataclass(frozen=True)
class _Given:
    """tensor: by its name here. tokenizer: folder of its files. labels: of a run; those of a folder stand in its files."""

    description: Description
    tensor: Callable[[str], torch.Tensor]
    dtype: torch.dtype
    tokenizer: Path
    labels: tuple[str, ...] = ()


@contextmanager
def _our_tensors(source: Path, load_run: LoadRun | None) -> Iterator[_Given]:
    kind = source_kind(source)
    if kind == "ours":
        with Shards(source) as shards:
            yield _Given(read_description(source), shards.get, shards.widest(), source)
        return
    if kind == "huggingface":
        model, hf = load_hf(source)
        described = Description(hf.config, hf.task, {"model_type": hf.family, "kept": dict(hf.kept)})
        yield _Given(described, *_tensors(model), source)
        return
    run = _run(source, load_run)
    with tempfile.TemporaryDirectory() as folder:
        run.tokenizer.save(folder)
        yield _Given(Description(run.config, run.task), *_tensors(run.model), Path(folder), run.labels)


def _tensors(model: nn.Module) -> tuple[Callable[[str], torch.Tensor], torch.dtype]:
    tensors: Mapping[str, torch.Tensor] = dict(model_tensors(model))
    return tensors.__getitem__, next(iter(tensors.values())).dtype


def _run(source: Path, load_run: LoadRun | None) -> Source:
    if load_run is None:
        raise CheckpointError(
            findings=[Finding(str(source), "is a run, and nothing here reads runs", "Export its model first")]
        )
    return load_run(source, None)


def check_comparison(how: str) -> None:
    """Refuse, before anything is written, a comparison that cannot be made here. Raises ConfigError."""
    if how == "logits" and not find_spec("transformers"):
        what = "needs transformers, which is not installed"
        raise ConfigError(findings=[Finding("--compare logits", what, "pip install 'meshwright[hf]', or compare weights")])


def compare(
    converted: Converted, source: str | Path, target: str | Path, how: str = "auto", load_run: LoadRun | None = None
) -> Comparison:
    """Read back what was written and hold it against its other side.

    how  "logits": transformers' own model on the Hugging Face side, both in fp32 from the weights as written;
         "weights": the way back, bitwise; "auto": logits where transformers is installed and the model is small enough
    """
    source, target = Path(source), Path(target)
    ours, theirs = (target, source) if converted.direction == "from Hugging Face" else (source, target)
    if how == "auto":
        small = sum(p.numel() for p in build(converted.config, converted.task).parameters()) <= _LOGIT_LIMIT_PARAMETERS
        how = "logits" if small and find_spec("transformers") else "weights"
    check = _compare_logits if how == "logits" else _compare_weights
    return check(converted, ours, theirs, target, load_run)


def _compare_weights(converted: Converted, ours: Path, theirs: Path, target: Path, load_run: LoadRun | None) -> Comparison:
    model = build(converted.config, converted.task)
    weights = weight_map(model, converted.family, converted.task, converted.config.tied)
    different = count = 0
    with _our_tensors(ours, load_run) as given, Shards(theirs) as shards:
        kind = given.dtype if ours == target else shards.widest()
        for name, value in weights.load(shards):
            count += 1
            different += not torch.equal(given.tensor(name).to(kind), value.to(kind))
    return Comparison("weights", different, count)


@torch.no_grad()
def _compare_logits(converted: Converted, ours: Path, theirs: Path, target: Path, load_run: LoadRun | None) -> Comparison:
    check_comparison("logits")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with Shards(target) as shards:
        kind = shards.widest()  # both sides start from the weights as they were written
    model = _model(ours, kind, load_run)
    auto = {
        "lm": transformers.AutoModelForCausalLM,
        "mlm": transformers.AutoModelForMaskedLM,
        "classify": transformers.AutoModelForSequenceClassification,
    }[converted.task]
    other = auto.from_pretrained(theirs, dtype=kind).float().eval()
    length = min(_LENGTH, converted.config.max_len)
    pad = other.config.pad_token_id  # RoBERTa counts positions around it
    vocab = np.array([token for token in range(converted.config.vocab or 0) if token != pad])
    tokens = torch.from_numpy(np.random.default_rng(0).choice(vocab, (_ROWS, length)))
    logits = model.float()(tokens)
    expected = other(tokens).logits
    return Comparison("logits", float((logits - expected).abs().max()), float(expected.abs().max()))


def _model(folder: Path, dtype: torch.dtype, load_run: LoadRun | None) -> nn.Module:
    kind = source_kind(folder)
    if kind == "ours":
        return load_model(folder, dtype=dtype)[0]
    return load_hf(folder, dtype=dtype)[0] if kind == "huggingface" else _run(folder, load_run).model.to(dtype)
