"""The small models that every layout is tried on, their rows, and their values.

Sizes are chosen to divide badly: a vocabulary of 67, 6 heads or 6 groups of the feed-forward layer over 4 ranks, 5 layers,
22 rows a step. Biases and norms start away from 0 and 1, so that a bias that is added twice is seen in the first loss.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from meshwright.config.schema import Config
from meshwright.data.batch import IGNORE
from meshwright.data.dataset import Dataset, Row, RowDataset, build_datasets
from meshwright.models import initialize
from meshwright.models.initialize import materialise
from meshwright.models.trunk import Trunk
from meshwright.verify.cases import Case
from tests.unit.data_stores import FakeStore, Words

VOCAB, SPECIAL = 67, 7
ROWS, LENGTH = 22, 16
STEPS = 3

_DECODER: dict[str, Any] = {
    "arch": "decoder",
    "layers": 4,
    "width": 32,
    "heads": 4,
    "ffn": 96,
    "vocab": VOCAB,
    "max_len": 32,
    "init_std": 0.15,
}
_ENCODER: dict[str, Any] = {
    **_DECODER,
    "arch": "encoder",
    "positions": "learned",
    "norm": "layer",
    "norm_order": "post",
    "final_norm": False,
    "activation": "gelu",
    "qkv_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
}
_BERT = {**_ENCODER, "embed_norm": True, "token_types": 2}

MODELS: dict[str, dict[str, Any]] = {
    "decoder": {"model": _DECODER},
    "tied": {
        "model": {**_DECODER, "layers": 5, "width": 48, "heads": 6, "tied": True, "mlp_bias": True},
        "objective": {"label_smoothing": 0.1, "z_loss": 1e-3},
    },
    "gqa": {"model": {**_DECODER, "heads": 8, "kv_heads": 2, "qk_norm": True, "qkv_bias": True}},
    "mqa": {"model": {**_DECODER, "kv_heads": 1, "norm": "layer", "activation": "gelu_tanh"}},
    "dropout": {"model": {**_DECODER, "kv_heads": 2, "tied": True, "dropout": 0.1}},
    "moe": {
        "model": {
            **_DECODER,
            "kv_heads": 2,
            "moe_ffn": 64,
            "experts": 8,
            "experts_per_token": 2,
            "balance_coefficient": 0.1,
            "router_z_loss": 1e-2,
        },
    },
    "mlm": {
        "model": {**_BERT, "tied": True, "head_bias": True, "head_transform": True},
        "objective": {"kind": "masked_lm", "mask_fraction": 0.2},
        "data": {"packing": "none"},
    },
    "classifier": {
        "model": {**_BERT, "classes": 3},
        "objective": {"kind": "classify"},
        "data": {"packing": "none"},
    },
    "plain": {
        "model": {**_ENCODER, "width": 40, "ffn": 80, "activation": "relu", "final_norm": True},
        "objective": {"kind": "masked_lm", "mask_fraction": 0.2, "label_smoothing": 0.1},
    },
}
"""`plain` is `nn.TransformerEncoder` of `nn.TransformerEncoderLayer(activation="relu", norm_first=False)`, with a norm."""


APART: dict[str, dict[str, Any]] = {
    "moe-bias": {
        "model": {
            **_DECODER,
            "ffn": 48,
            "experts": 4,
            "experts_per_token": 2,
            "router_normalised": False,
            "balance": "bias",
            "balance_coefficient": 0.02,
            "capacity": 0.8,
            "activation": "gelu",
        },
        "data": {"packing": "none"},
    },
}
"""What the array does not try on every layout."""
_ALL = {**MODELS, **APART}


def config_of(model: str, precision: str = "fp64", clip: bool = True, **sections: Any) -> Config:
    """fp64 trains with AdamW; fp32 and below with SGD, since AdamW makes rounding of a small gradient as large as an update.

    The bias of keys has no gradient but rounding, 1e-17 here; with AdamW's usual eps of 1e-8 its update would be 1e-9 of one.
    """
    exact = precision == "fp64"
    optimizer = (
        {"kind": "adamw", "weight_decay": 0.1, "eps": 1e-6} if exact else {"kind": "sgd", "weight_decay": 0.1, "momentum": 0.5}
    )
    values: dict[str, Any] = {
        "data": {"train": [{"path": "corpus"}], "valid_fraction": 0.0, "seq_len": LENGTH, "prefetch": 0},
        "train": {"batch": ROWS, "lr": 3e-3 if exact else 5e-2, "clip": 0.3 if clip else 0.0, "optimizer": optimizer},
        "precision": precision,
    }
    causal = _ALL[model]["model"]["arch"] == "decoder"
    for source in ({"objective": {"response_only": causal}}, _ALL[model], sections):
        for name, section in source.items():
            values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return Config.model_validate(values)


@functools.cache
def _store(prompts: bool) -> FakeStore:
    """Documents of 1 to 30 tokens, each with a label, and with leading tokens that are no targets: often all of them."""
    draw = np.random.default_rng(3)
    parts = [draw.integers(SPECIAL, VOCAB, draw.integers(1, 30)).tolist() for _ in range(90)]
    parts[4:4] = [[4, 5]] * 3  # special tokens alone: a row of them has nothing to predict
    labels = np.array([part[0] % 3 for part in parts])
    leading = np.array([len(part) if number % 3 else number % len(part) for number, part in enumerate(parts)])
    return FakeStore(parts, labels, leading if prompts else None, ["0", "1", "2"], vocab_size=VOCAB)


@dataclass(frozen=True, eq=False)
class Unlabelled:
    """Rows of which every fifth has no target at all."""

    whole: RowDataset
    made: dict[int, Row] = field(default_factory=dict)
    """The cells of a model all ask for the same."""

    @property
    def rows(self) -> int:
        return self.whole.rows

    @property
    def seq_len(self) -> int:
        return self.whole.seq_len

    def row(self, sample: int) -> Row:
        if sample not in self.made:
            row = self.whole.row(sample)
            self.made[sample] = replace(row, labels=np.full_like(row.labels, IGNORE)) if sample % 5 == 3 else row
        return self.made[sample]


def rows_of(config: Config) -> Dataset:
    key = config.model_dump_json()
    if key not in _datasets:
        _datasets[key] = Unlabelled(build_datasets(config, [_store(config.objective.response_only)], [], Words(VOCAB))[0])
    return _datasets[key]


_datasets: dict[str, Dataset] = {}


def case_of(model: str, precision: str = "fp64", clip: bool = True, steps: int = STEPS, **sections: Any) -> Case:
    config = config_of(model, precision, clip, **sections)
    return Case(config, rows_of(config), steps, fill)


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Values from the run's own generator, then every element moved a little."""
    key = f"{model.config.model_dump_json()} {model.task}" if isinstance(model, Trunk) else ""
    if key and key in _filled:
        materialise(model, "cpu")
        for name, parameter in model.named_parameters():
            parameter.copy_(_filled[key][name])
        return
    initialize(model, 0, "cpu")
    generator = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    if key:
        _filled[key] = {name: parameter.clone() for name, parameter in model.named_parameters()}


_filled: dict[str, dict[str, torch.Tensor]] = {}
"""The cells of a model all begin alike; drawing is a seventh of a small cell."""
