"""Ranks that were started with different things are named, on every rank, before they do anything."""

from __future__ import annotations

import time

import torch.distributed as dist

from meshwright.distributed.agreement import refuse_different, source_digests
from meshwright.errors import UserError
from meshwright.runtime.alike import code
from tests.ranks.pool import joined


def exchange(changes: dict[int, dict[str, dict[str, str]]]) -> str:
    """What this rank is told where some ranks have other parts."""
    parts = {"settings": {"train.lr": "0.1", "train.batch": "8"}, "code": {"a.py": "1111", "b.py": "2222"}}
    for name, values in changes.get(dist.get_rank(), {}).items():
        parts[name] = {**parts.get(name, {}), **values}
    try:
        refuse_different(parts, joined().control)
    except UserError as error:
        return str(error)
    return ""


def test_ranks_that_are_alike_go_on(ranks):
    assert ranks(4).run(exchange, {}) == [""] * 4


def test_the_one_that_differs_is_named_with_the_part_and_what_in_it(ranks):
    # Red when the first rank is believed against the others, and when only rank 0 raises.
    told = ranks(4).run(exchange, {0: {"settings": {"train.lr": "0.2"}}})
    assert len(set(told)) == 1
    assert "rank 0 on " in told[0] and "other settings than rank 1: train.lr (0.2, not 0.1)" in told[0]
    assert "train.batch" not in told[0] and "code" not in told[0]


def test_several_ranks_and_parts_are_named_at_once(ranks):
    other = {"code": {"b.py": "3333", "c.py": "4444"}}
    (told, *_) = ranks(4).run(exchange, {2: other, 3: {**other, "settings": {"train.batch": "4"}}})
    assert "ranks 2, 3 on " in told and "other code than rank 0: b.py (3333, not 2222), c.py (4444, not absent)" in told
    assert "rank 3 on " in told and "train.batch (4, not 8)" in told


def test_a_part_that_a_rank_lacks_is_a_difference(ranks):
    (told, *_) = ranks(2).run(exchange, {1: {"data": {"tokenizer": "5555"}}})
    assert "rank 1 on " in told and "other data than rank 0: tokenizer (5555, not absent)" in told


def test_long_lists_are_cut(ranks):
    (told, *_) = ranks(2).run(exchange, {1: {"code": {f"{i}.py": "0" for i in range(9)}}})
    assert "2.py" in told and "3.py" not in told and "and 6 more" in told


def seconds() -> float:
    """Of this rank's core."""
    dist.barrier(joined().control)
    begin = time.process_time()
    refuse_different({"code": code()}, joined().control)
    return time.process_time() - begin


def test_the_exchange_is_cheap(ranks):
    assert min(max(ranks(4).run(seconds)) for _ in range(3)) < 0.05


def test_a_changed_and_a_missing_file_have_other_digests(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("x = 1")
    before = source_digests({"a": file, "b": tmp_path / "b.py"})
    file.write_text("x = 2")
    after = source_digests({"a": file, "b": tmp_path / "b.py"})
    assert before["a"] != after["a"] and after["b"] == "absent"
