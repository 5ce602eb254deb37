"""Placements under tensor parallelism: blocks tile every parameter, roles are those of the computation, numbers are named.

`tensor_placements.txt` holds the placements of every shipped recipe. After a wanted change write it anew with
`python -m tests.unit.test_sharding`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config.recipes import recipe, recipes
from meshwright.config.schema import ModelConfig
from meshwright.models import build
from meshwright.spec.placement import Placement
from meshwright.spec.sharding import (
    head_split,
    parameter_shapes,
    spread,
    tensor_findings,
    tensor_placements,
    vocabulary_split,
)

SNAPSHOT = Path(__file__).with_name("tensor_placements.txt")
WAYS = (1, 2, 4, 8)
SMALL: dict[str, Any] = {"layers": 2, "width": 24, "heads": 6, "head_dim": 4, "ffn": 96, "vocab": 101, "max_len": 16}
BERT = {"arch": "encoder", "positions": "learned", "embed_norm": True, "token_types": 2, "norm": "layer", "final_norm": False}
BERT |= {"activation": "gelu", "qkv_bias": True, "attention_bias": True, "mlp_bias": True, "norm_order": "post"}
MODELS = {
    "decoder": ("lm", {"kv_heads": 3}),
    "tied": ("lm", {"tied": True, "qk_norm": True, "kv_heads": 2, "qkv_bias": True}),
    "encoder": ("mlm", {**BERT, "head_transform": True, "head_bias": True}),
    "classifier": ("classify", {**BERT, "classes": 3}),
    "no pooler": ("classify", {**BERT, "classes": 3, "pooler": False, "tied": True}),
}


@pytest.mark.parametrize("name", MODELS)
def test_shapes_are_those_of_the_model(name):
    # Red with: a bias forgotten, a norm out of order, a tied head listed.
    task, numbers = MODELS[name]
    config = ModelConfig(**{**SMALL, **numbers})
    model = build(config, task)
    assert parameter_shapes(config, task) == {n: tuple(p.shape) for n, p in model.named_parameters()}
    whole = tensor_placements(config, task, tp=1, rank=0, sequence_parallel=True)
    assert whole == {n: Placement.whole(n, p.shape) for n, p in model.named_parameters()}
    assert all(rule.partial in ("", "heads", "positions") for rule in model.table.rules)


@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from(sorted(MODELS)),
    kv_heads=st.sampled_from([1, 2, 3, 6]),
    tp=st.integers(2, 6),
    ffn=st.sampled_from([96, 50, 33, 4096]),
    vocab=st.sampled_from([6, 101, 128, 5000]),
    sequence=st.booleans(),
)
def test_counted_blocks_tile_every_parameter(model, kv_heads, tp, ffn, vocab, sequence):
    # Red with: kv blocks counted on each holder; the query rows of a group shifted by one head; a rank's rows left out.
    task, numbers = MODELS[model]
    config = ModelConfig(**{**SMALL, **numbers, "kv_heads": kv_heads, "ffn": ffn, "vocab": vocab})
    if tensor_findings(config, tp):
        return
    ranks = [tensor_placements(config, task, tp=tp, rank=r, sequence_parallel=sequence) for r in range(tp)]
    assert len({tuple(placements) for placements in ranks}) == 1  # the same names in the same order
    counts = {name: torch.zeros(shape, dtype=torch.int8) for name, shape in parameter_shapes(config, task).items()}
    for placements in ranks:
        for place in placements.values():
            assert place.shape == tuple(counts[place.name].shape) and place.box.fits(place.shape) and place.box.numel
            if place.counted:
                counts[place.name][tuple(slice(o, o + n) for o, n in zip(place.box.offset, place.box.shape, strict=True))] += 1
    assert all(bool((count == 1).all()) for count in counts.values())
    for rank, placements in enumerate(ranks):
        for name, place in placements.items():
            holders = range(tp) if place.shared != "kv" else head_split(config.heads, kv_heads, tp, rank).holders
            if place.shared:
                assert [ranks[r][name].box for r in holders] == [place.box] * len(holders)
                assert [ranks[r][name].counted for r in holders] == [r == holders[0] for r in holders]


def test_roles():
    # Red with: the rule of `*.bias` before that of the classifier; q_norm shared only with sequence parallelism.
    config = ModelConfig(**{**SMALL, **BERT, "head_transform": True, "head_bias": True, "qk_norm": True, "kv_heads": 2})
    partial = {"attention_norm", "mlp_norm", "embedding_norm", "position_embedding", "type_embedding"}
    for sequence in (True, False):
        placements = tensor_placements(config, "mlm", tp=4, rank=1, sequence_parallel=sequence)
        for name, place in placements.items():
            owner, leaf = name.split(".")[-2:]
            if owner in ("q_norm", "k_norm"):
                assert place.shared == "tp"
            elif owner == "qkv":
                assert place.shared == ("kv" if leaf.startswith("kv_") else "")
            elif owner in partial or (owner in ("out", "down") and leaf == "bias"):
                assert place.shared == ("tp" if sequence else "")
            else:
                assert place.shared == "", name
            whole = place.box.shape == place.shape
            assert place.counted != (whole or leaf.startswith("kv_")), name
    classifier = tensor_placements(
        ModelConfig(**{**SMALL, **BERT, "classes": 3}), "classify", tp=2, rank=1, sequence_parallel=True
    )
    assert {classifier[f"{name}.{leaf}"].shared for name in ("pooler", "classifier") for leaf in ("weight", "bias")} == {""}


def test_heads():
    assert [head_split(6, 3, 2, r).queries for r in range(2)] == [(0, 4), (4, 2)]
    assert [head_split(6, 3, 2, r).keys for r in range(2)] == [(0, 2), (2, 1)]
    split = [head_split(12, 2, 5, r) for r in range(5)]  # three ranks for the first key head, two for the second
    assert [s.queries for s in split] == [(0, 2), (2, 2), (4, 2), (6, 3), (9, 3)]
    assert [s.keys for s in split] == [(0, 1)] * 3 + [(1, 1)] * 2
    assert [s.holders for s in split] == [(0, 1, 2)] * 3 + [(3, 4)] * 2
    assert [s.group for s in split] == [2, 2, 2, 3, 3] and all(s.shared for s in split)
    with pytest.raises(ValueError, match="rank 5"):
        head_split(12, 2, 5, 5)


def test_runs_are_whole_units_where_there_are_enough():
    assert spread(10, 3) == [(0, 4), (4, 3), (7, 3)]
    assert vocabulary_split(128_256, 4) == [(0, 32_064), (32_064, 32_064), (64_128, 32_064), (96_192, 32_064)]
    assert [size for _, size in vocabulary_split(50_257, 4)] == [12_608, 12_608, 12_544, 12_497]
    assert [size for _, size in vocabulary_split(101, 2)] == [51, 50]  # units of 64 would leave 37 to the second
    mlp = tensor_placements(ModelConfig(**{**SMALL, "ffn": 4096}), "lm", tp=3, rank=1, sequence_parallel=True)
    up, down = mlp["layers.0.mlp.up.weight"].box, mlp["layers.0.mlp.down.weight"].box
    assert up.shape[0] == 2 * down.shape[1] and up.offset[0] == 2 * down.offset[1] and down.offset[1] % 16 == 0


def test_what_cannot_be_split_is_named_with_numbers():
    config = ModelConfig(**{**SMALL, "ffn": 48, "vocab": 5})
    assert tensor_findings(config, 1) == tensor_findings(config, 3) == []
    assert [str(f) for f in tensor_findings(config, 7)] == [
        "layout.tp: 7 ranks, but only 6 query heads (model.heads): a rank would have none. Use tp: 3 or less",
        "layout.tp: 7 ranks, but only 3 groups of feed-forward rows (model.ffn 48 in runs of 16): a rank would have none. "
        "Use tp: 3 or less",
        "layout.tp: 7 ranks, but only 5 rows of the vocabulary (model.vocab): a rank would have none. Use tp: 3 or less",
    ]
    assert "nothing says how" in str(tensor_findings(ModelConfig(arch="mine"), 2)[0])
    plain = ModelConfig(**{**SMALL, "activation": "gelu", "ffn": 3})
    assert "3 groups of feed-forward rows (model.ffn)" in str(tensor_findings(plain, 4)[0])


def _runs(sizes: list[int]) -> str:
    """`3*64 1*32`: runs of equal sizes."""
    out: list[list[int]] = []
    for size in sizes:
        if out and out[-1][1] == size:
            out[-1][0] += 1
        else:
            out.append([1, size])
    return " ".join(f"{count}*{size}" for count, size in out)


def _line(name: str, ways: int, ranks: list[Placement]) -> str:
    first = ranks[0]
    if all(place.box.shape == first.shape for place in ranks):
        return f"{ways}: {first.shared or 'whole'}"
    dim = next(d for d, n in enumerate(first.shape) if any(place.box.shape[d] != n for place in ranks))
    starts = "" if not first.shared else f" {first.shared} at {' '.join(str(place.box.offset[dim]) for place in ranks)}"
    return f"{ways}: {'rows' if dim == 0 else 'columns'} {_runs([place.box.shape[dim] for place in ranks])}{starts}"


def snapshot() -> Iterator[str]:
    """A line for each pattern of a parameter's name: shape, then what the ranks hold for each number of ranks."""
    for name in recipes():
        config = ModelConfig(**{"vocab": 32_000, **recipe(name)})
        task = "lm" if config.arch == "decoder" else "mlm"
        yield f"{name} ({task})"
        lines: dict[str, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for ways in WAYS:
            if findings := tensor_findings(config, ways):
                yield from (f"  {ways}: {finding.what}" for finding in findings)
                continue
            ranks = [tensor_placements(config, task, tp=ways, rank=r, sequence_parallel=True) for r in range(ways)]
            seen: dict[str, str] = {}
            for parameter in ranks[0]:
                pattern = re.sub(r"\.\d+\.", ".*.", parameter)
                text = _line(parameter, ways, [placements[parameter] for placements in ranks])
                assert seen.setdefault(pattern, text) == text, f"{parameter} is dealt otherwise than in other layers"
                shapes[pattern] = ranks[0][parameter].shape
            for pattern, text in seen.items():
                lines[pattern] = f"{lines[pattern]}, {text}" if pattern in lines else text
        yield from (f"  {pattern} {list(shapes[pattern])}: {text}" for pattern, text in lines.items())


def test_placements_of_every_recipe_are_those_on_record():
    recorded = SNAPSHOT.read_text(encoding="utf-8").splitlines()
    changed = [(a, b) for a, b in zip(recorded, snapshot(), strict=False) if a != b]
    assert changed == [] and len(recorded) == len(list(snapshot()))


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(snapshot()) + "\n", encoding="utf-8")
