"""A trained model for use on one device: from a run folder (its newest or best checkpoint), one of its checkpoints, a model
folder or a Hugging Face folder."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from meshwright.checkpoint import CheckpointStore, Piece, inspect
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.config.schema import Config, ModelConfig
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import CheckpointError, Finding
from meshwright.models import build, generate
from meshwright.models.files import DESCRIPTION, load_model, model_tensors, read_description
from meshwright.models.hf import CONFIG, HfFolder, load_hf
from meshwright.models.initialize import materialise
from meshwright.models.shards import Shards
from meshwright.runtime.corpus import Corpus
from meshwright.runtime.folder import RunFolder
from meshwright.runtime.modules import load_modules
from meshwright.train.objectives import make_objective

__all__ = ["Trained", "continue_text", "described", "label_names", "load_trained", "run_folder", "stored_dtype"]


@dataclass(frozen=True)
class Trained:
    """config: of the run, None for a model folder. source: the checkpoint or folder the weights come from."""

    model: nn.Module
    model_config: ModelConfig
    task: str
    tokenizer: Tokenizer
    config: Config | None
    source: Path


def load_trained(
    path: str | Path, *, best: bool = False, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Trained:
    """dtype: of the weights; default: as stored. The averaged weights are used where the run kept them.

    path: a run folder, a folder of its checkpoints, a model folder of ours or of Hugging Face.
    Raises CheckpointError when there is no run, no whole checkpoint, or no tokenizer.
    """
    folder = run_folder(path)
    if folder is None:
        return _load_folder(Path(path), device, dtype)
    with CheckpointStore(folder.checkpoints, write=False, report=_skipped) as store:
        found = _checkpoint(store, folder, Path(path), best)
        held = inspect(found)
        names, meta = held["tensors"], held["meta"]
        config = Config.model_validate(meta["config"])  # not the file in the run folder, which anybody may have edited
        load_modules(config.run.modules)
        task = make_objective(config.objective, config.model.classes or 0).task
        kind = "ema" if any(name.startswith("ema/") for name in names) else "model"
        model = build(config.model, task)
        materialise(model, device, _stored(config))
        pieces = []
        for name, tensor in model_tensors(model):
            stored_name = f"{kind}/{name}" if f"{kind}/{name}" in names else f"model/{name}"
            pieces.append(Piece(stored_name, tensor, tuple(tensor.shape), (0,) * tensor.dim()))
        store.load(found, pieces, ignore=["*"])
    if dtype is not None:
        model = model.to(dtype)
    corpus = Corpus.load(folder.data)
    tokenizer = corpus.tokenizer()
    if tokenizer.fingerprint != meta["identity"]["tokenizer"]:
        what = f"its tokenizer at {corpus.tokenizer_path} is not the one that {found.name} was trained with"
        raise CheckpointError(findings=[Finding(str(folder.path), what, "Put the run's own tokenizer back")])
    return Trained(model.eval(), config.model, task, tokenizer, config, found)


def _load_folder(path: Path, device: torch.device | str, dtype: torch.dtype | None) -> Trained:
    """A model folder of ours, or one of Hugging Face."""
    if (path / DESCRIPTION).is_file():
        model, model_config, task = load_model(path, device, dtype)
        return Trained(model.eval(), model_config, task, Tokenizer.load(path), None, path)
    if (path / CONFIG).is_file():
        model, hf = load_hf(path, None, device, dtype)
        return Trained(model.eval(), hf.config, hf.task, Tokenizer.load(path), None, path)
    raise _no_model(path)


def _no_model(path: Path) -> CheckpointError:
    what = f"is neither a run folder (no config.yaml) nor a model folder (no {DESCRIPTION}, no {CONFIG})"
    return CheckpointError(findings=[Finding(str(path), what, "Name a run.dir, or what `meshwright convert` wrote")])


def _checkpoint(store: CheckpointStore, run: RunFolder, path: Path, best: bool = False) -> Path:
    """`path` where it is one itself, else the best or newest one of the run. Raises CheckpointError where there is none."""
    found = path if (path / MANIFEST).is_file() else store.best() if best else store.newest()
    if found is None:
        what = "has no best checkpoint" if best else "has no whole checkpoint"
        raise CheckpointError(findings=[Finding(str(run.path), what, "Train it first")])
    return found


def run_folder(path: str | Path) -> RunFolder | None:
    """The run that a folder is, or is a checkpoint of."""
    path = Path(path)
    folder = RunFolder(path.absolute().parent.parent if (path / MANIFEST).is_file() else path)
    return folder if folder.config.is_file() else None


def label_names(path: str | Path) -> tuple[str, ...]:
    """Names of the classes of a classifier that `load_trained` reads, in the order of their numbers; empty where none are
    known."""
    path, run = Path(path), run_folder(path)
    if run is not None:
        return Corpus.load(run.data).label_names()
    if (path / DESCRIPTION).is_file():
        kept = read_description(path).huggingface.get("kept", {})
    else:
        with HfFolder.open(path) as folder:
            kept = folder.hf.kept
    named = kept.get("id2label") or {}
    return tuple(named[key] for key in sorted(named, key=int))


def described(path: str | Path) -> tuple[ModelConfig, str]:
    """Shape and task of what `load_trained` would load, without its weights. Raises CheckpointError as that does."""
    path, run = Path(path), run_folder(path)
    if run is not None:
        with CheckpointStore(run.checkpoints, write=False, report=_skipped) as store:
            found = _checkpoint(store, run, path)
        config = Config.model_validate(inspect(found)["meta"]["config"])
        load_modules(config.run.modules)
        return config.model, make_objective(config.objective, config.model.classes or 0).task
    if (path / DESCRIPTION).is_file():
        description = read_description(path)
        return description.config, description.task
    if (path / CONFIG).is_file():
        with HfFolder.open(path) as source:
            return source.hf.config, source.hf.task
    raise _no_model(path)


def stored_dtype(path: str | Path) -> torch.dtype:
    """Of the weights that `load_trained` would load where nothing is said, without reading them. Raises CheckpointError as
    that does."""
    path, run = Path(path), run_folder(path)
    if run is not None:
        with CheckpointStore(run.checkpoints, write=False, report=lambda line: None) as store:
            return _stored(Config.model_validate(inspect(_checkpoint(store, run, path))["meta"]["config"]))
    if (path / DESCRIPTION).is_file() or (path / CONFIG).is_file():
        with Shards(path) as shards:
            return shards.widest()
    raise _no_model(path)


def _stored(config: Config) -> torch.dtype:
    return torch.float64 if config.precision == "fp64" else torch.float32


def _skipped(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # a command's answers go to the other stream


def continue_text(
    trained: Trained,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> str:
    """The prompt and its continuation. An empty prompt begins with the tokenizer's first token of a text."""
    if trained.task != "lm":
        what = f"was trained for {trained.task!r}, which does not predict a next token"
        raise CheckpointError(findings=[Finding(str(trained.source), what, "Use a language model")])
    tokenizer = trained.tokenizer
    ids = list(tokenizer.encode(prompt)) or [i for i in (tokenizer.bos, tokenizer.eos) if i is not None][:1]
    new = generate(
        trained.model,
        ids,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        eos=tokenizer.eos,
    )
    return tokenizer.decode([*ids, *new])
