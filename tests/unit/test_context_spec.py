"""Who has which positions under context parallelism, by which method, and what is refused with the nearest that runs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config.schema import ModelConfig
from meshwright.spec.context import chunks_of, context_method, heads_divide, length_finding, resolved
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.plan_rules import refused_for


def model(heads: int = 4, kv_heads: int | None = None, **more) -> ModelConfig:
    return ModelConfig(layers=2, width=heads * 16, heads=heads, kv_heads=kv_heads, ffn=128, vocab=256, **more)


@given(st.integers(1, 9), st.integers(1, 7), st.booleans())
def test_every_position_has_one_rank_and_a_causal_ring_is_balanced(ranks, size, pairs):
    length = size * ranks * (2 if pairs else 1)
    here = [
        [position for start, count in chunks_of(length, ranks, rank, pairs) for position in range(start, start + count)]
        for rank in range(ranks)
    ]
    assert sorted(itertools.chain(*here)) == list(range(length)) and all(mine == sorted(mine) for mine in here)
    assert {len(mine) for mine in here} == {length // ranks}
    if pairs:  # keys that the queries of a rank see, themselves included
        assert len({sum(position + 1 for position in mine) for mine in here}) == 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "cp", "divide"),
    [
        (8, 8, 1, 4, True),
        (8, 2, 1, 4, True),  # two key/value heads, each for two ranks
        (8, 2, 2, 4, True),
        (8, 2, 4, 2, True),  # two tensor ranks a key/value head, two queries each
        (6, 6, 1, 4, False),
        (6, 2, 1, 4, False),
        (12, 3, 1, 2, False),  # neither divides the other
        (6, 6, 4, 2, False),  # tensor ranks have two heads or one
        (4, 4, 1, 8, False),
    ],
)
def test_the_method_follows_from_the_heads_of_every_rank(heads, kv_heads, tp, cp, divide):
    config = model(heads, kv_heads)
    assert heads_divide(config, tp, cp) == divide
    assert context_method("auto", config, tp, cp) == ("all_to_all" if divide else "ring")
    plan = Plan(Layout(tp=tp, cp=cp), context="all_to_all")
    found = [finding for finding in refused_for(plan, config, "lm", 960) if finding.where == "plan.context"]
    assert len(found) == (0 if divide else 1) and resolved(plan, config) == "all_to_all"
    assert all(f"cp {cp}" in finding.what and "ring" in finding.fix for finding in found)


@pytest.mark.parametrize(
    ("plan", "length", "words"),
    [
        (Plan(Layout(cp=4), context="ring"), 60, ["8 chunks, two a rank, of cp 4", "56 or 64"]),
        (Plan(Layout(cp=4), context="all_to_all"), 62, ["cp 4 ranks", "60 or 64"]),
        (Plan(Layout(cp=2, tp=2), context="all_to_all"), 62, ["each over tp 2", "60 or 64"]),
        (Plan(Layout(cp=2, tp=2), context="ring"), 6, ["4 chunks", "4 or 8"]),
        (Plan(Layout(cp=4), context="ring"), 4, ["Use data.seq_len 8,"]),
        (Plan(Layout(cp=4), context="ring"), 64, []),
        (Plan(Layout(cp=2, tp=2), context="all_to_all", sequence_parallel=False), 62, []),
    ],
)
def test_a_length_that_does_not_divide_is_refused_with_the_nearest_that_do(plan, length, words):
    # Red when the two chunks of a rank, or the tensor ranks behind it, are forgotten.
    found = refused_for(plan, model(), "lm", length)
    assert len(found) == bool(words)
    said = " ".join(map(str, found))
    assert all(word in said for word in words), said
    for near in (int(word) for finding in found for word in finding.fix.replace(",", "").split() if word.isdigit()):
        assert refused_for(plan, model(), "lm", near) == []


def test_an_encoder_has_one_run_a_rank():
    encoder = model(6, arch="encoder", positions="learned")
    assert refused_for(Plan(Layout(cp=4), context="ring"), encoder, "mlm", 60) == []
    assert length_finding(60, 4, pairs=True) is not None


def test_what_else_is_refused():
    (dropped,) = refused_for(Plan(Layout(cp=2), context="ring"), model(attention_dropout=0.1), "lm", 64)
    assert dropped.where == "plan.context" and "0.1" in dropped.what and "all_to_all" in dropped.fix
    assert refused_for(Plan(Layout(cp=2)), model(attention_dropout=0.1), "lm", 64) == []
    (mine,) = refused_for(Plan(Layout(cp=2)), model(arch="mine"), "lm", 64)
    assert "'mine'" in mine.what and "cp 2" in mine.what
