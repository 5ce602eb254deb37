"""A model as a folder: `model.json` (what it is), safetensors under our names (its weights), tokenizer files.

model.json: {"format": "meshwright-model", "version": 1, "task": ..., "config": {ModelConfig}, "huggingface": {...}}; the
last one only for a model that came from there: its `model_type` and the fields of its config.json that we do not read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from meshwright.config.schema import ModelConfig
from meshwright.errors import CheckpointError, Finding
from meshwright.models.initialize import materialise
from meshwright.models.registry import build
from meshwright.models.shards import SHARD_BYTES, Shards, new_folder, read_json, write_shards

__all__ = ["DESCRIPTION", "Description", "copy_tokenizer", "load_model", "read_description", "save_model", "write_model"]

DESCRIPTION = "model.json"
FORMAT, VERSION = "meshwright-model", 1
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class Description:
    """What a model folder says of itself. huggingface: `model_type` and `kept` of the config.json it came from."""

    config: ModelConfig
    task: str
    huggingface: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {"format": FORMAT, "version": VERSION, "task": self.task}
        values["config"] = self.config.model_dump(mode="json")
        if self.huggingface:
            values["huggingface"] = dict(self.huggingface)
        return values


def read_description(folder: str | Path) -> Description:
    """The model.json of a folder. Raises CheckpointError when it is missing, foreign or wrong."""
    path = Path(folder) / DESCRIPTION
    values = read_json(path)
    if values.get("format") != FORMAT:
        raise CheckpointError(findings=[Finding(str(path), f"format is {values.get('format')!r}, not {FORMAT!r}")])
    if values.get("version") != VERSION:
        what = f"version is {values.get('version')!r}, and {VERSION} is the one that is read"
        raise CheckpointError(findings=[Finding(str(path), what, "Use the version of meshwright that wrote it")])
    try:
        config = ModelConfig.model_validate(values.get("config"))
    except ValidationError as error:
        findings = [Finding(f"{path}: config.{'.'.join(map(str, e['loc']))}", e["msg"]) for e in error.errors()]
        raise CheckpointError(findings=findings) from None
    return Description(config, str(values.get("task")), values.get("huggingface") or {})


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer files (and generation settings) that a folder has; their names."""
    copied = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    for name in copied:
        shutil.copyfile(source / name, target / name)
    return copied


def write_model(
    folder: str | Path,
    description: Description,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    needed_bytes: int,
    tokenizer_folder: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """A model folder from tensors that come one by one; it appears under its name when it is whole.

    needed_bytes  of the tensors, asked of the disk before anything is written
    """
    with new_folder(Path(folder), needed_bytes) as partial:
        write_shards(partial, tensors, shard_bytes)
        if tokenizer_folder is not None:
            copy_tokenizer(Path(tokenizer_folder), partial)
        text = json.dumps(description.to_json(), indent=2, ensure_ascii=False)
        (partial / DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def model_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers by name, each once: a tied parameter under its first name."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


def save_model(
    folder: str | Path,
    model: nn.Module,
    config: ModelConfig,
    task: str,
    tokenizer_folder: str | Path | None = None,
    *,
    huggingface: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model (whole, on any device) as a folder that `load_model` reads.

    tokenizer_folder  its tokenizer files are copied along
    huggingface       `Description.huggingface` of the folder that the model came from
    Raises DeviceError when the folder is not empty, cannot be written or the disk is too small.
    """
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in model_tensors(model))
    description = Description(config, task, huggingface or {})
    write_model(
        folder,
        description,
        model_tensors(model),
        needed_bytes=size,
        tokenizer_folder=tokenizer_folder,
        shard_bytes=shard_bytes,
    )


def load_model(
    folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple[nn.Module, ModelConfig, str]:
    """(model, config, task) of a folder of `save_model`. Memory: the model and one tensor.

    dtype: of the weights; default: the widest in the files.
    Raises CheckpointError when files, names or shapes do not fit, before a weight is read.
    """
    folder = Path(folder)
    description = read_description(folder)
    with Shards(folder) as shards:
        model = build(description.config, description.task)
        wanted = dict(model_tensors(model))
        findings = [Finding(str(folder), f"no file has tensor {name}") for name in sorted(wanted.keys() - shards.names())]
        for name in sorted(shards.names()):
            if name not in wanted:
                findings.append(Finding(str(shards.file(name)), f"{name} is no tensor of this model"))
            elif shards.shape(name) != tuple(wanted[name].shape):
                what = f"{name} is {list(shards.shape(name))}, {DESCRIPTION} asks for {list(wanted[name].shape)}"
                findings.append(Finding(str(shards.file(name)), what))
        if findings:
            raise CheckpointError(f"{folder}: the weights do not fit {DESCRIPTION}", findings)
        fill_model(model, ((name, shards.get(name)) for name in wanted), device, dtype or shards.widest())
    return model, description.config, description.task


@torch.no_grad()
def fill_model(
    model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device | str, dtype: torch.dtype
) -> None:
    """Give a model on meta memory and these values, one tensor after the other."""
    materialise(model, device, dtype)
    own = dict(model_tensors(model))
    for name, tensor in tensors:
        own[name].copy_(tensor)
