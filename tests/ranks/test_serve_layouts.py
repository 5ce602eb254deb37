"""Every tp x pp x dp of up to four ranks answers as one engine does: real engines, and replicas over real lines."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.config.schema import ModelConfig
from meshwright.models import build, initialize
from meshwright.models.trunk import Trunk
from meshwright.serve.engine import LLMEngine
from meshwright.serve.layout import Serving
from meshwright.serve.ranks import ServingGroup, replica_rows
from meshwright.serve.replicas import Replicas, follow_line
from meshwright.serve.request import Request
from meshwright.serve.sampling import SamplingParams
from meshwright.serve.wire import meet
from meshwright.spec.layout import Layout
from tests.ranks.pool import layout_mesh

OPTIONS: dict[str, Any] = {"block_size": 4, "token_budget": 9}


@functools.cache
def deep() -> Trunk:
    """Four layers for four stages, and two key/value heads, which four ranks share."""
    shape = {"layers": 4, "width": 24, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 61, "max_len": 128, "init_std": 0.4}
    model = build(ModelConfig(**shape), "lm")  # type: ignore[arg-type]
    initialize(model, 0, "cpu")
    assert isinstance(model, Trunk)
    return model.to(torch.float64)


def requests() -> list[Request]:
    """Greedy and seeded ones; some begin alike, for longer than replicas remember."""
    generator = torch.Generator().manual_seed(5)
    start = torch.randint(0, 61, (66,), generator=generator).tolist()
    found = []
    for n in range(10):
        own = torch.randint(0, 61, (1 + 5 * n % 17,), generator=generator).tolist()
        drawn = SamplingParams(max_tokens=6 + n) if n % 2 else SamplingParams(temperature=0.0, max_tokens=9, logprobs=1)
        drawn = SamplingParams(**{**vars(drawn), "seed": n, "top_k": 20 * (n % 3)})
        found.append(Request(str(n), tuple([*start, *own] if n % 4 < 2 else own), drawn))
    return found


def answers(engine: Any) -> dict[str, list[Any]]:
    """Tokens, and why it ended, of each."""
    found: dict[str, list[Any]] = {request.id: [] for request in requests()}
    for request in requests():
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            found[output.id] += output.tokens + ([output.finish] if output.finish else [])
    return found


@functools.cache
def alone() -> dict[str, list[Any]]:
    return answers(LLMEngine(copy.deepcopy(deep()), blocks=100, **OPTIONS))


@functools.cache
def group_of(tp: int, pp: int, dp: int) -> ServingGroup:
    return ServingGroup.of(layout_mesh(Layout(tp=tp, pp=pp, dp_replicate=dp)))


def answered(tp: int, pp: int, dp: int) -> Any:
    """Of the first rank (answers, figures); of each other its number of blocks."""
    group, serving = copy.copy(group_of(tp, pp, dp)), Serving(tp, pp, dp)
    assert tuple(row[0] for row in replica_rows(group.mesh)) == serving.leads
    rank, model = dist.get_rank(), copy.deepcopy(deep())
    if not group.alone:
        model = group.split(model)
    engine = LLMEngine(model, blocks=61 - (rank == dist.get_world_size() - 1), group=group, **OPTIONS)
    lines = meet(dist.group.WORLD, rank, serving.leads[1:]) if dp > 1 else []  # type: ignore[arg-type]
    if rank:
        if lines:
            follow_line(engine, lines[0])
        else:
            engine.follow()
        return engine.pool.blocks
    whole = Replicas(engine, lines) if dp > 1 else engine  # type: ignore[arg-type]
    try:
        return answers(whole), whole.stats()
    finally:
        whole.close()


LAYOUTS = [(tp, pp, dp) for n in (2, 3, 4) for tp in range(1, n + 1) for pp in range(1, n + 1) for dp in range(1, n + 1)
           if tp * pp * dp == n]  # fmt: skip
QUICK = [(1, 1, 2), (2, 1, 2), (1, 2, 2)]


@pytest.mark.parametrize(
    ("tp", "pp", "dp"), [pytest.param(*one, marks=[] if one in QUICK else pytest.mark.slow) for one in LAYOUTS]
)
def test_every_layout_answers_as_one_engine(ranks, tp: int, pp: int, dp: int):
    """Mutations tried, each red: the ranks of a replica are neighbours along pp instead of tp; the last rank's smaller cache is
    not the others' limit; settings that went over a line lose their seed."""
    (found, figures), *others = ranks(tp * pp * dp).run(answered, tp, pp, dp)
    assert found == alone()
    assert others == [60] * (tp * pp * dp - 1) and figures["kv_blocks"] == 60 * dp
    if dp > 1:
        assert figures["requests"] == 10 and all(figures[f"replica.{n}.tokens"] == 0 for n in range(dp))


def spread() -> Any:
    """How many requests each of two replicas had."""
    group = group_of(1, 1, 2)
    engine = LLMEngine(copy.deepcopy(deep()), blocks=60, group=group, **OPTIONS)
    lines = meet(dist.group.WORLD, dist.get_rank(), (1,))  # type: ignore[arg-type]
    if dist.get_rank():
        follow_line(engine, lines[0])
        return engine.stats()["requests"]
    whole = Replicas(engine, lines)  # type: ignore[arg-type]
    answers(whole)
    whole.close()
    return engine.stats()["requests"]


def test_replicas_share_the_work(ranks):
    first, second = ranks(2).run(spread)
    assert first + second == 10 and min(first, second) >= 3


def lost() -> Any:
    """The second replica's process ends while it has a request."""
    lines = meet(dist.group.WORLD, dist.get_rank(), (1,))  # type: ignore[arg-type]
    engine = LLMEngine(copy.deepcopy(deep()), blocks=60, **OPTIONS)
    if dist.get_rank():
        next(lines[0].commands())
        raise RuntimeError("the replica is gone")
    answers(Replicas(engine, lines))  # type: ignore[arg-type]


def test_a_replica_that_dies_ends_the_others(ranks):
    from tests.ranks.pool import RankError

    with pytest.raises(RankError, match="the replica is gone"):
        ranks(2).run(lost, timeout=20)
