"""The repeated blocks of any module are found, and their parameters know them."""

from __future__ import annotations

import pytest
from torch import nn

from meshwright.parallel.blocks import find_blocks
from tests.ranks.foreign_models import KINDS


# Mutation, red: a list of lists is taken for a list of blocks.
@pytest.mark.parametrize(
    ("kind", "name", "count"),
    [
        ("gpt2", "transformer.h", 3),
        ("llama", "model.layers", 3),
        ("bert", "bert.encoder.layer", 3),
        ("encoder", "transformer.layers", 3),
        ("odd", "inner.body", 3),
        ("signals", "stages", 3),
        ("crnn", "features", 2),
    ],
)
def test_the_list_with_most_parameters_is_found(kind: str, name: str, count: int) -> None:
    model = KINDS[kind].make()
    blocks = find_blocks(model)
    assert (blocks.name, len(blocks.here)) == (name, count)
    inside = {block: {id(p) for p in module.parameters()} for block, module in enumerate(blocks.here)}
    for parameter_name, parameter in model.named_parameters():
        expected = next((block for block, members in inside.items() if id(parameter) in members), -1)
        assert blocks.unit(parameter_name) == (0, expected), parameter_name


def test_what_says_itself_or_has_none() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert find_blocks(model).name == "" and find_blocks(model).unit("2.weight") == (0, 1)
    assert find_blocks(model).unit("3.0.bias") == (0, 2) and not find_blocks(model).declared
    model.gather_whole = True  # type: ignore[assignment]
    assert find_blocks(model).name is None and find_blocks(model).unit("2.weight") == (0, -1)
    assert find_blocks(nn.Linear(2, 2)).here == []
    nested = nn.ModuleList([nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), nn.ModuleList([nn.Linear(9, 9)])])
    assert find_blocks(nn.ModuleDict({"outer": nested})).name == "outer.0"
    ours = nn.Module()
    ours.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    ours.more = nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 9)])
    ours.layers[0] = None  # type: ignore[assignment]
    assert find_blocks(ours).declared and len(find_blocks(ours).here) == 1 and find_blocks(ours).unit("layers.1.bias") == (0, 1)
