"""Padded steps over memory that stays, and steps that are launched before the last one is seen: the answers are the same."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.distributed import device as devices
from meshwright.serve.engine import LLMEngine
from meshwright.serve.graphs import padded_length, padded_rows
from meshwright.serve.packed import Packed, Packer
from meshwright.serve.request import Output, Request
from meshwright.serve.runner import Runner
from meshwright.serve.sampling import SamplingParams
from meshwright.serve.scheduler import Sequence, Work
from tests.unit.test_serve_engine import FAMILIES, answers, check, engine_of, expected, greedy, prompts, tokens_of

replayed = functools.partial(engine_of, graphs=True)


class Replaying(devices.Recorder):
    """As a graph would: calls again what was recorded, over the memory of then."""

    def __init__(self, device: torch.device):
        self.recorded = self.replayed = 0

    def record(self, call: Any) -> Any:
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            call()

        return replay


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> list[Replaying]:
    """The recorders that engines make on a CPU."""
    made: list[Replaying] = []

    def make(device: torch.device) -> Replaying:
        made.append(Replaying(device))
        return made[-1]

    monkeypatch.setattr(devices, "Recorder", make)
    monkeypatch.setattr(devices, "records", lambda device: True)
    return made


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_steps_of_every_family(family: str, ahead: bool):
    """Five sequences in rows for eight. Mutations tried, each red: the tokens of the step before are taken in another order;
    nothing is fed; a sequence that runs again writes its blocks behind those that it had."""
    check(replayed(family, token_budget=6, ahead=ahead), family)


@pytest.mark.parametrize("family", ["mistral", "gpt-2", "mixtral"])
def test_preemption(family: str):
    engine = replayed(family, blocks=8, token_budget=7, ahead=True)
    check(engine, family, count=6, length=14)
    assert engine.stats()["preemptions"] > 3


def test_a_known_prefix():
    engine, prefix = replayed(ahead=True), list(range(20, 37))
    for n in range(3):
        request = Request(str(n), (*prefix[: 17 - 4 * n], n), greedy())
        assert tokens_of(answers(engine, [request])[str(n)]) == expected("llama", request.tokens, 8)
    assert engine.stats()["prefix_hits"] > 16


def test_steps_are_recorded_once_and_replayed(recorder: list[Replaying]):
    engine = engine_of()
    for _ in range(2):
        check(engine, "llama", count=3)
    assert [(one.recorded, one.replayed > 8) for one in recorder] == [(1, True)]
    check(engine, "llama", count=6)
    assert recorder[0].recorded == 2
    assert engine_of(graphs=False).runner._decoding is None  # type: ignore[union-attr]


def test_experts_that_wait_for_the_device_are_not_recorded(recorder: list[Replaying]):
    assert engine_of("mixtral").runner._decoding is None  # type: ignore[union-attr]
    assert recorder == []


def test_padding():
    assert [padded_rows(n) for n in (1, 2, 3, 5, 9, 17, 33, 49, 65, 97, 129, 193, 257, 321, 400, 449, 513)] == [
        *(1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640)
    ]
    assert [padded_length(n) for n in (1, 1024, 1025, 5000)] == [1024, 1024, 2048, 8192]
    assert all(padded_rows(n) >= n and padded_rows(padded_rows(n)) == padded_rows(n) for n in range(1, 600))


def test_rows_of_padding_touch_nobodys_page():
    """Mutation tried: they write to page 0: red."""
    runner = engine_of(graphs=True, max_running=8).runner
    assert isinstance(runner, Runner)
    for pools in runner._forward.cache:
        for pool in pools:
            pool.fill_(7.0)
    fields = np.array([[3, 4, 5], [-1, -1, -1], [0, 0, 0], [20, 24, 28]])
    runner.run(Packed.of(fields, np.ones((2, 3)), np.arange(3), np.array([[5], [6], [7]])))
    for pools in runner._forward.cache:
        for pool in pools:
            changed = (pool != 7.0).flatten(2).any(2).nonzero().tolist()
            assert changed == [[5, 0], [6, 0], [7, 0], [runner.blocks, 0]]


# ---- the next step before the last one is seen


def story(**options: Any) -> tuple[dict[str, list[Output]], list[str]]:
    """Requests of all kinds, some of which come or are aborted on the way, in fp64; and the order in which steps were started
    and seen."""
    engine = engine_of(blocks=45, max_running=5, token_budget=16, **options)
    said = launches(engine)
    first = expected("llama", tuple(prompts(9)[0]), 12)
    kinds = {
        0: greedy(12, stop_ids=(first[8],), min_tokens=8),
        1: SamplingParams(seed=1, max_tokens=14, logprobs=2),
        2: SamplingParams(seed=2, max_tokens=17, top_k=5, top_p=0.9),
        4: greedy(15, logprobs=0),
        5: greedy(9, stop_ids=(expected("llama", tuple(prompts(9)[5]), 2)[1],), min_tokens=2),
        6: greedy(8, logit_bias={7: 3.0}),
        8: greedy(10, repetition_penalty=6.0),
    }
    requests = [Request(str(n), tuple(p), kinds.get(n, greedy(16))) for n, p in enumerate(prompts(9))]
    found: dict[str, list[Output]] = {request.id: [] for request in requests}
    late = requests[5:]
    for request in requests[:5]:
        engine.add(request)
    while engine.has_work or late:
        if late and sum(map(len, found.values())) > 16 * (5 - len(late)):
            engine.add(late.pop(0))
        for output in engine.step():
            found[output.id].append(output)
        if len(found["7"]) == 4:
            engine.abort("7")
        engine.scheduler.check()
    assert engine.pool.held == 0
    return found, said


def told(outputs: list[Output]) -> tuple[list[int], list[Any], str | None]:
    logprobs = [(p.token, [t for t, _ in p.top]) for output in outputs for p in output.logprobs or ()]
    return tokens_of(outputs), logprobs, outputs[-1].finish


@pytest.mark.parametrize("graphs", [False, True])
def test_ahead_or_not_the_answers_are_the_same(graphs: bool):
    """Mutations tried, each red: a random number of the position before; the next step goes on with the largest logit where a
    token was drawn; penalties do not count as needing the host; min_tokens counted without the token that is not here yet."""
    plain, one_by_one = story(graphs=False, ahead=False)
    found, said = story(graphs=graphs, ahead=True)
    assert one_by_one == ["start", "seen"] * (len(one_by_one) // 2)
    under_way = list(itertools.accumulate(1 if what == "start" else -1 for what in said))
    assert max(under_way) == 2 and under_way.count(2) >= 10
    assert {id: told(outputs) for id, outputs in found.items()} == {id: told(outputs) for id, outputs in plain.items()}
    assert plain["7"][-1].finish == "abort" and plain["0"][-1].finish == "stop"


def launches(engine: LLMEngine) -> list[str]:
    """What it does from now on: steps are started, and their results are seen."""
    said: list[str] = []
    start, postprocess = engine.runner.start, engine._postprocess

    def started(packed: Packed) -> None:
        said.append("start")
        start(packed)

    def seen(*args: Any) -> list[Output]:
        said.append("seen")
        return postprocess(*args)

    engine.runner.start, engine._postprocess = started, seen  # type: ignore[method-assign]
    return said


def test_the_next_step_is_launched_before_the_last_one_is_seen():
    """One more than needed where only the host sees the end; none where it is known. Mutation tried: `ahead` always empty."""
    engine = engine_of(ahead=True)
    said = launches(engine)
    answers(engine, [Request("a", (5, 6), greedy(4))])
    assert said == ["start", "start", "seen", "start", "seen", "start", "seen", "seen"]
    said.clear()
    answers(engine, [Request("a", (5, 6), greedy(4, stop_ids=(expected("llama", (5, 6), 2)[1],)))])
    assert said == ["start", "start", "seen", "start", "seen", "seen"]
    said.clear()
    answers(engine, [Request("a", (5, 6), greedy(3, presence_penalty=0.5))])
    assert said == ["start", "seen"] * 3


def test_a_step_that_was_ahead_writes_where_nobody_looks():
    """The one that ended gives its blocks back while its last step is under way; they go to the next prompt at once."""
    end = expected("llama", (5, 6), 3)[2]
    engine = engine_of(graphs=True, ahead=True, blocks=3, prefix=False)
    requests = [Request("ends", (5, 6), greedy(9, stop_ids=(end,))), Request("next", tuple(range(9)), greedy(3))]
    found = answers(engine, requests)
    assert tokens_of(found["next"]) == expected("llama", tuple(range(9)), 3)


def test_a_seat_that_changes_hands():
    """Mutation tried: blocks are written down where their number differs, whoever has them: red."""
    packer = Packer(1, 2, 4)
    for blocks in ([3, 1], [0, 2]):
        sequence = Sequence(Request("a", (7, 8, 9), greedy()), 0, [7, 8, 9], blocks=blocks, seat=0)
        packed = packer.pack([Work(sequence, 0, 3, True)])
        assert packed.tables.tolist() == [blocks] and packed.slots.tolist() == [2 * blocks[0], 2 * blocks[0] + 1, 2 * blocks[1]]
        assert packed.tokens.tolist() == [7, 8, 9] and packed.positions.tolist() == [0, 1, 2] and not packed.single


def test_a_prompt_does_not_wait_for_steps_ahead():
    engine = engine_of(ahead=True)
    engine.add(Request("runs", (1, 2, 3), greedy(20)))
    engine.step()
    engine.add(Request("comes", (4, 5), greedy(2)))
    assert [[output.id for output in engine.step()] for _ in range(2)] == [["runs"], ["runs", "comes"]]
