"""Tensor and sequence parallelism compute what one process computes: loss, logits, norm, every gradient and block."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.config.schema import ModelConfig
from meshwright.errors import LayoutError
from meshwright.kernels.dropout import position_keys
from meshwright.models import build
from meshwright.models.initialize import initialize
from meshwright.parallel.compile import compile_blocks
from meshwright.parallel.sharing import Sharing
from meshwright.parallel.tensor import split_tensors
from meshwright.spec.box import Box
from meshwright.spec.labels import IGNORE
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from tests.ranks.pool import layout_mesh

ROWS, LENGTH, SELECTED = 3, 12, 5
TOLERANCE = 1e-12

BASE: dict[str, Any] = {"layers": 2, "width": 24, "heads": 6, "head_dim": 4, "ffn": 96, "vocab": 101, "max_len": 16}
BASE |= {"init_std": 0.2}
GPT = {"positions": "learned", "norm": "layer", "activation": "gelu_tanh", "ffn": 50, "tied": True}
GPT |= {"qkv_bias": True, "attention_bias": True, "mlp_bias": True}
BERT = {"arch": "encoder", "embed_norm": True, "token_types": 2, "norm_order": "post", "final_norm": False}
BERT |= {**GPT, "activation": "gelu"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "decoder": ("lm", {"kv_heads": 3}),
    "tied": ("lm", {"tied": True}),
    "one key head": ("lm", {"kv_heads": 1, "qkv_bias": True}),
    "two key heads": ("lm", {"kv_heads": 2, "heads": 4}),
    "gpt-2": ("lm", GPT),
    "query and key norm": ("lm", {"kv_heads": 2, "qk_norm": True}),
    "encoder": ("mlm", {**BERT, "head_transform": True, "head_bias": True}),
    "classifier": ("classify", {**BERT, "classes": 3}),
    "decoder classifier": ("classify", {"classes": 3, "kv_heads": 3}),
    "plain encoder": ("mlm", {"arch": "encoder", "norm": "layer", "norm_order": "post", "activation": "relu", "ffn": 50}),
}
"""None of the vocabularies divides by 2, 3 or 4; three key heads do not by 2 or 4, feed-forward rows not by 4."""


@dataclass(frozen=True)
class Case:
    model: str = "decoder"
    tp: int = 2
    sequence: bool = True
    dropout: float = 0.0
    smoothing: float = 0.0
    z_loss: float = 0.0
    compile: str = "off"
    dtype: torch.dtype = torch.float64
    fault: str = ""


@dataclass
class Difference:
    """Between this rank and one process, over the largest element of what is compared."""

    values: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, ours: torch.Tensor, whole: torch.Tensor) -> None:
        assert ours.shape == whole.shape, (name, ours.shape, whole.shape)
        ours, whole = ours.detach(), whole.detach()
        scale = float(whole.abs().max()) or 1.0
        self.values[name] = max(self.values.get(name, 0.0), float((ours - whole).abs().max()) / scale)

    @property
    def worst(self) -> tuple[float, str]:
        return max((value, name) for name, value in self.values.items())


def config_of(case: Case) -> tuple[ModelConfig, str]:
    task, numbers = MODELS[case.model]
    return ModelConfig(**{**BASE, "dropout": case.dropout, **numbers}), task


def inputs_of(config: ModelConfig, task: str, dropout: float) -> dict[str, Any]:
    """Rows of two documents and padding; masks differ from row to row, one row has no target."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, config.vocab, (ROWS, LENGTH), generator=generator)
    documents = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    documents[0, 5:], documents[1, 9:] = 1, -1
    inputs: dict[str, Any] = {"tokens": tokens, "documents": documents}
    if task == "classify":
        inputs["labels"] = torch.tensor([2, IGNORE, 0])
        return inputs | _dropped(dropout)
    seen = LENGTH
    if task == "mlm":
        seen = SELECTED
        inputs["select"] = torch.rand(ROWS, LENGTH, generator=generator).argsort(1)[:, :SELECTED]
    labels = torch.randint(0, config.vocab, (ROWS, seen), generator=generator)
    for row in range(ROWS):
        labels[row, : 2 * row] = IGNORE
    labels[1] = IGNORE
    return {**inputs, "labels": labels} | _dropped(dropout)


def _dropped(dropout: float) -> dict[str, Any]:
    if not dropout:
        return {}
    return {"dropout_key": position_keys(3, torch.arange(ROWS) + 70, torch.arange(LENGTH))}


def make(case: Case, *, split: bool) -> tuple[nn.Module, Sharing]:
    config, task = config_of(case)
    model = build(config, task, case.dtype)
    sharing = Sharing()
    if split:
        layout = Layout(tp=case.tp)
        sharing = split_tensors(model, Plan(layout, sequence_parallel=case.sequence), layout_mesh(layout))
        assert all(p.is_meta for p in model.parameters())
    initialize(model, 11, "cpu", placements=sharing.placements)
    _vary(model, sharing)
    return model, sharing


@torch.no_grad()
def _vary(model: nn.Module, sharing: Sharing) -> None:
    """Norms and biases away from 1 and 0, by a function of the place in the logical parameter."""
    for name, parameter in model.named_parameters():
        place = sharing.of(name, tuple(parameter.shape))
        if len(place.shape) == 1:
            count = torch.arange(place.shape[0], dtype=parameter.dtype)
            whole = torch.sin(count + len(place.name)) * 0.3
            parameter += whole[place.box.inside(Box.whole(place.shape))]


def compare(case: Case) -> Difference:
    """On every rank: the whole model beside the split one."""
    config, task = config_of(case)
    whole, _ = make(case, split=False)
    model, sharing = make(case, split=True)
    compile_blocks(model, case.compile)
    inputs = inputs_of(config, task, case.dropout)
    out = Difference()
    objective = {"smoothing": case.smoothing, "z_loss": case.z_loss}
    expected, parts = whole(**inputs, **objective), model(**inputs, **objective)
    assert int(parts.correct) == int(expected.correct)
    out.add("loss", parts.loss_sum, expected.loss_sum)
    out.add("z", parts.z_sum, expected.z_sum)
    (expected.loss_sum * 0.37).backward()
    (parts.loss_sum * 0.37).backward()
    square, counted = torch.zeros((), dtype=case.dtype), 0
    for name, parameter in model.named_parameters():
        place = sharing.of(name, tuple(parameter.shape))
        inside = place.box.inside(Box.whole(place.shape))
        other = whole.get_parameter(place.name)
        out.add(f"weight {name}", parameter, other[inside])
        gradient = parameter.grad
        if place.shared and case.fault != "partial gradients not summed":
            dist.all_reduce(gradient, group=sharing.groups[place.shared])
        out.add(f"gradient {name}", gradient, other.grad[inside])
        if place.counted or case.fault == "copies counted":
            square += gradient.square().sum()
            counted += gradient.numel()
    numbers = torch.stack((square, torch.tensor(counted, dtype=case.dtype)))
    dist.all_reduce(numbers)
    norm = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    out.add("norm", numbers[0].sqrt(), norm)
    if not case.fault:
        assert int(numbers[1]) == sum(p.numel() for p in whole.parameters())
    plain = {name: value for name, value in inputs.items() if name not in ("labels", "dropout_key")}
    with torch.no_grad():
        out.add("logits", model(**plain), whole(**plain))
    return out


def worst(ranks, case: Case) -> tuple[float, str]:
    return max(difference.worst for difference in ranks(case.tp).run(compare, case))


@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "whole"])
@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_that_of_one_process(ranks, model, tp, sequence):
    value, name = worst(ranks, Case(model, tp, sequence, dropout=0.2, smoothing=0.1, z_loss=1e-2))
    assert value < TOLERANCE, name
