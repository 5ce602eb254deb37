"""Hugging Face folders (config.json + safetensors) to our models and back, one tensor at a time.

Memory: reading into a model takes the model and one tensor, converting folder to folder one shard and one tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.config.schema import ModelConfig
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import ConfigError
from meshwright.models.files import TOKENIZER_FILES, Description, copy_tokenizer, fill_model, model_tensors, write_model
from meshwright.models.hf_config import HfConfig, from_hf, to_hf
from meshwright.models.hf_weights import WeightMap, weight_map
from meshwright.models.registry import build
from meshwright.models.shards import SHARD_BYTES, Shards, new_folder, read_json, write_shards

__all__ = ["HfFolder", "export_hf", "export_tensors", "load_hf"]

CONFIG = "config.json"
GENERATION = "generation_config.json"


@dataclass
class HfFolder:
    """An opened Hugging Face folder, proved to fit: `with HfFolder.open(folder) as source`.

    unused: tensors of the file that belong to heads or poolers which the task does not have.
    """

    folder: Path
    hf: HfConfig
    model: nn.Module
    shards: Shards
    weights: WeightMap
    unused: list[str]

    @classmethod
    def open(cls, folder: str | Path, task: str | None = None) -> HfFolder:
        """Raises ConfigError or CheckpointError with everything that is wrong, before a weight is read."""
        folder = Path(folder)
        raw = read_json(folder / CONFIG)
        shards = Shards(folder)
        try:
            hf = from_hf(raw, str(folder / CONFIG), task, shards.names())
            model = build(hf.config, hf.task)
            weights = weight_map(model, hf.family, hf.task, hf.config.tied)
            return cls(folder, hf, model, shards, weights, weights.check(shards))
        except BaseException:
            shards.close()
            raise

    @property
    def description(self) -> Description:
        return Description(self.hf.config, self.hf.task, {"model_type": self.hf.family, "kept": dict(self.hf.kept)})

    def save(self, target: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
        """Write it as a model folder of ours, tokenizer included."""
        write_model(
            target,
            self.description,
            self.weights.load(self.shards),
            needed_bytes=self.shards.total_bytes(),
            tokenizer_folder=self.folder,
            shard_bytes=shard_bytes,
        )

    def __enter__(self) -> HfFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.shards.close()


def load_hf(
    folder: str | Path, task: str | None = None, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple[nn.Module, HfConfig]:
    """A model with the weights of a Hugging Face folder. dtype: default the widest in the files."""
    with HfFolder.open(folder, task) as source:
        fill_model(source.model, source.weights.load(source.shards), device, dtype or source.shards.widest())
        return source.model, source.hf


def export_hf(
    model: nn.Module,
    config: ModelConfig,
    task: str,
    target: str | Path,
    *,
    family: str | None = None,
    huggingface: Mapping[str, Any] | None = None,
    tokenizer_folder: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> HfConfig:
    """Write a model (whole, on any device) as a folder that `transformers` loads. Arguments as in `export_tensors`."""
    tensors = dict(model_tensors(model))
    return export_tensors(
        tensors.__getitem__,
        next(iter(tensors.values())).dtype,
        Description(config, task, huggingface or {}),
        target,
        family=family,
        tokenizer_folder=tokenizer_folder,
        shard_bytes=shard_bytes,
    )


def export_tensors(
    ours: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
    description: Description,
    target: str | Path,
    *,
    family: str | None = None,
    labels: Sequence[str] = (),
    tokenizer_folder: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> HfConfig:
    """Write tensors of ours, asked for one by one, as a folder that `transformers` loads.

    dtype   of the tensors, written to config.json
    family  `model_type`; default: the one the model came from where it still computes the same, else the first that does
    labels  names of the classes; default: those of the folder that the model came from
    Returns how the written config.json reads back; its notes say what does not survive (dropout that a family lacks).
    Raises ConfigError where no family computes this model; DeviceError as `save_model`.
    """
    raw, hf = _choose(description, family)
    raw["torch_dtype"] = str(dtype).removeprefix("torch.")
    raw.pop("dtype", None)
    if tokenizer_folder is not None and not description.huggingface:
        raw |= _token_ids(Path(tokenizer_folder), hf.family)
    if labels:
        raw["id2label"] = {str(number): name for number, name in enumerate(labels)}
        raw["label2id"] = {name: number for number, name in enumerate(labels)}
    model = build(hf.config, hf.task)
    weights = weight_map(model, hf.family, hf.task, hf.config.tied)
    size = sum(torch.Size(shape).numel() for shape in weights.their_shapes().values()) * dtype.itemsize
    with new_folder(Path(target), size) as partial:
        write_shards(partial, weights.export(ours), shard_bytes)
        if tokenizer_folder is not None:
            copy_tokenizer(Path(tokenizer_folder), partial)
        text = json.dumps(raw, indent=2, sort_keys=True, ensure_ascii=False)
        (partial / CONFIG).write_text(text + "\n", encoding="utf-8")
        if hf.task == "lm" and not (partial / GENERATION).is_file():
            values = {key: raw[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if raw.get(key) is not None}
            (partial / GENERATION).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return hf


def _choose(description: Description, family: str | None) -> tuple[dict[str, Any], HfConfig]:
    kept, origin = description.huggingface.get("kept") or {}, description.huggingface.get("model_type")
    if family is None and origin is not None:
        try:
            return to_hf(description.config, description.task, family=origin, kept=kept)
        except ConfigError:  # changed since it came; another family may compute it, and the fields of the old one say nothing
            kept = {}
    return to_hf(description.config, description.task, family=family, kept=kept)


def _token_ids(folder: Path, family: str) -> dict[str, int | None]:
    """Special tokens for config.json, which generation reads; RoBERTa's pad token says where its positions start."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return {}
    tokenizer = Tokenizer.load(folder)
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}
    return ids if family == "roberta" else {**ids, "pad_token_id": tokenizer.pad}
