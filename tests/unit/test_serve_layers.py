"""The forward of serving is the model's own."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from meshwright.kernels.paged_attention import Pages, Singles
from meshwright.models.moe import MoE
from meshwright.models.trunk import Trunk
from meshwright.serve.layers import Forward
from tests.unit.test_serve_engine import FAMILIES, made

LENGTH, PAGE = 19, 4


def forward_of(model: Trunk, span: tuple[int, int]) -> Forward:
    """With six pages, in fp64."""
    forward = Forward(model, span)
    attention = next(layer.attention for layer in model.layers if layer is not None)
    rows = attention.qkv.weight.shape[0] // attention.head_dim // (attention.group + 2)
    shape = (6, PAGE, rows, attention.head_dim)
    forward.cache = [(torch.zeros(shape).double(), torch.zeros(shape).double()) for _ in range(span[1] - span[0])]
    return forward


def pages_of(start: int, stop: int) -> Pages:
    table = torch.tensor([[4, 1, 5, 0, 2]])
    each = torch.arange(start, stop)
    return Pages(table[0, each // PAGE] * PAGE + each % PAGE, table, (stop - start,), (stop,))


def single_of(position: int) -> Singles:
    pages = pages_of(position, position + 1)
    return Singles(pages.slots, pages.tables, torch.tensor([position + 1], dtype=torch.int32))


def model_of(family: str) -> Trunk:
    model = copy.deepcopy(made(family)).eval().requires_grad_(False)
    for layer in model.layers:
        if isinstance(layer.mlp, MoE):
            layer.mlp.router.capacity = None
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family(family: str):
    """A prompt in two parts, and tokens one by one. Mutations tried, each red: a branch is kept behind a norm that added it;
    the norm of the first layer for all; keys are written before their rotation; no final norm; no norms of heads; no window;
    `select` ignored."""
    model = model_of(family)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 61, LENGTH))
    positions = torch.arange(LENGTH)
    with torch.inference_mode():
        expected = model(tokens[None], positions=positions[None])[0]
        forward, found = forward_of(model, (0, 2)), []
        for start, stop in ((0, 7), (7, 12)):
            found.append(forward(tokens[start:stop], positions[start:stop], pages_of(start, stop)))
        select = torch.tensor([2, 0])
        again = forward(tokens[7:12], positions[7:12], pages_of(7, 12), select=select)
        assert (again - expected[7:12][select]).abs().max() < 1e-13
        for at in range(12, LENGTH):
            out = torch.empty(1, 61, dtype=torch.float64)
            given = forward(tokens[at : at + 1], positions[at : at + 1], single_of(at), out=out)
            assert given.data_ptr() == out.data_ptr()
            found.append(out)
        assert (torch.cat(found) - expected).abs().max() < 1e-13


def test_without_a_final_norm():
    # Mutation tried: what the last layer adds is left out: red.
    model, tokens, positions = model_of("llama"), torch.arange(9), torch.arange(9)
    model.norm = None
    with torch.inference_mode():
        expected = model(tokens[None], positions=positions[None])[0]
        forward = forward_of(model, (0, 2))
        found = forward(tokens, positions, pages_of(0, 9))
        some = forward(tokens, positions, pages_of(0, 9), select=torch.tensor([4]))
    assert (found - expected).abs().max() < 1e-13 and (some - expected[4]).abs().max() < 1e-13


@pytest.mark.parametrize("family", ["llama", "mixtral", "post-norm"])
def test_some_layers(family: str):
    # Mutation tried: a span that ends early forgets what its last layer adds: red.
    model = model_of(family)
    tokens, positions = torch.arange(9), torch.arange(9)
    with torch.inference_mode():
        expected = model(tokens[None], positions=positions[None])[0]
        halves = []
        for kept in (0, 1):
            half = copy.deepcopy(model)
            half.layers[1 - kept] = None  # type: ignore[assignment]
            halves.append(forward_of(half, (kept, kept + 1)))
        hidden = halves[0](tokens, positions, pages_of(0, 9))
        assert hidden.shape == (9, 24)
        found = halves[1](tokens, positions, pages_of(0, 9), hidden=hidden)
    assert (found - expected).abs().max() < 1e-13
