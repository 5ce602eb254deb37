"""Replicas behind one queue: who gets what, nobody waits for another, what ends one is told, and their lines lose nothing."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest

from meshwright.errors import MeshwrightError, UserError
from meshwright.serve.contract import NotReady
from meshwright.serve.encoder_work import EncoderOutput, EncoderWork
from meshwright.serve.offline import complete
from meshwright.serve.replicas import UNIT, Prefixes, Replicas, follow_line
from meshwright.serve.request import Logprob, Output, Request
from meshwright.serve.sampling import SamplingParams
from meshwright.serve.wire import Line, Said, _accept, asked_tokens
from tests.unit.serve_fakes import FakeEngine, served


def ask(id: str, prompt: int = 4, max_tokens: int = 3, first: int = 1) -> Request:
    return Request(id, tuple(range(first, first + prompt)), SamplingParams(max_tokens=max_tokens))


def ends() -> tuple[Line, Line]:
    """The two ends of a connection over the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        calling = socket.create_connection(listener.getsockname())
        return Line(calling), Line(listener.accept()[0])


@contextmanager
def replicas(*engines: FakeEngine) -> Iterator[Replicas]:
    """The first engine in this process, each of the others behind a line, in a thread."""
    lines = []
    for engine in engines[1:]:
        here, there = ends()
        lines.append(here)

        def follow(engine: FakeEngine = engine, there: Line = there) -> None:
            with contextlib.suppress(RuntimeError):  # its process would end
                follow_line(engine, there)

        threading.Thread(target=follow, daemon=True).start()
    made = Replicas(engines[0], lines)
    try:
        yield made
    finally:
        for engine in engines:
            engine.gate.set()
        made.close()


def until(true: Callable[[], Any], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def engine(**options: Any) -> FakeEngine:
    return FakeEngine(ends=False, max_len=10**6, **options)


def loads(made: Replicas) -> list[tuple[float, float]]:
    """(requests, outstanding tokens) of each."""
    figures = made.stats()
    return [(figures[f"replica.{i}.requests"], figures[f"replica.{i}.tokens"]) for i in range(len(made._replicas))]


def test_a_request_goes_to_the_replica_with_the_least_to_do():
    """In tokens of prompt and answer, not in requests, of which those that were computed are over. Mutations tried, each red:
    the fewest requests instead; the prompt not counted; what has been answered never taken off."""
    one, two = engine(), engine()
    with replicas(one, two) as made:
        one.gate.clear()
        two.gate.clear()
        for id, prompt, tokens in (("a", 50, 50), ("b", 4, 30), ("c", 4, 30), ("d", 25, 9)):
            made.add(ask(id, prompt, tokens))
        assert loads(made) == [(1, 100), (3, 102)]
        made.add(ask("e", 1, 1))
        assert loads(made) == [(2, 102), (3, 102)]
    assert one.closed
    until(lambda: two.closed)
    with replicas(engine()) as made:
        made.add(ask("g", 50, 10**5))
        answered = 0
        while answered < 20:
            answered += len(made.step())
            assert loads(made) == [(1, 10**5 - answered if answered else 10**5 + 50)]


def test_a_known_beginning_is_worth_the_tokens_that_it_saves():
    """Mutations tried, each red: any beginning is followed whatever the load; the shortest known one counts."""
    one, two = engine(), engine()
    long, other = tuple(range(3 * UNIT)), tuple(range(1000, 1000 + 2 * UNIT))
    params = SamplingParams(max_tokens=100)
    with replicas(one, two) as made:
        one.gate.clear()
        two.gate.clear()
        made.add(Request("a", other, params))
        made.add(Request("b", long, params))
        assert loads(made) == [(1, 2 * UNIT + 100), (1, 3 * UNIT + 100)]
        made.add(Request("c", (*long, 7), params))  # 3 UNIT + 100 - 3 UNIT < 2 UNIT + 100
        assert loads(made)[1] == (2, 6 * UNIT + 201)
        made.add(Request("d", long, params))  # 3 UNIT + 201 > 2 UNIT + 100: the other one is so much freer
        assert loads(made) == [(2, 5 * UNIT + 200), (2, 6 * UNIT + 201)]


def test_beginnings_are_whole_units_and_the_oldest_are_forgotten():
    known = Prefixes(most=3)
    tokens = tuple(range(2 * UNIT + 9))
    known.note(tokens, 1)
    assert known.find(tokens) == (1, 2 * UNIT) and known.find(tokens[: UNIT + 1]) == (1, UNIT)
    assert known.find(tokens[: UNIT - 1]) == (-1, 0) and known.find((5, *tokens)) == (-1, 0)
    known.note(tokens[:UNIT], 0)
    assert known.find(tokens) == (1, 2 * UNIT) and known.find(tokens[:UNIT]) == (0, UNIT)
    known.note(tuple(range(500, 500 + 2 * UNIT)), 2)
    assert known.find(tokens) == (0, UNIT)  # its longer one was the oldest of four


def test_no_replica_waits_for_another():
    """Mutation tried: `step` waits until all that have work have said something."""
    for slow in (0, 1):
        both = engine(), engine()
        with replicas(*both) as made:
            both[slow].gate.clear()
            made.add(ask("a", max_tokens=9))
            made.add(ask("b", max_tokens=9))
            texts: dict[str, int] = {}

            def all_of_one(made: Replicas = made, texts: dict[str, int] = texts) -> bool:
                for output in made.step():
                    texts[output.id] = texts.get(output.id, 0) + 1
                return 9 in texts.values()

            until(all_of_one)
            assert texts == {"b" if slow == 0 else "a": 9}
            assert made.stats()["silent_s"] > 0


def test_an_aborted_request_says_no_more_and_its_name_is_free():
    """The replica is in a step of it meanwhile. Mutation tried: outputs are taken whatever the replica had seen."""
    one = engine()
    with replicas(one) as made:
        one.gate.clear()
        made.add(ask("a", max_tokens=50))
        until(lambda: one.under)
        with pytest.raises(UserError, match="under way"):
            made.add(ask("a"))
        made.abort("a")
        made.abort("none")
        assert loads(made) == [(0, 0)] and made.has_work
        made.add(ask("a", max_tokens=2))
        one.gate.set()
        outputs = []
        while made.has_work:
            outputs += made.step()
        assert [output.finish for output in outputs] == [None, "length"] and one.aborted == ["a"]
        assert loads(made) == [(0, 0)]


def test_what_no_replica_can_have_is_refused_at_once():
    with replicas(engine(), engine()) as made:
        with pytest.raises(UserError, match="bad luck"):
            made.add(replace(ask("a"), params=SamplingParams(seed=13)))
        assert not made.has_work


def test_a_file_of_prompts_over_three():
    with replicas(engine(), engine(running=1), engine(step_s=0.001)) as made:
        made.max_len = 64
        found = list(complete(made, (f"p{i}" for i in range(40)), SamplingParams(max_tokens=4)))
        assert [(done.index, done.text) for done in found] == [(i, "abca") for i in range(40)]


@pytest.mark.parametrize("where", [0, 1], ids=["here", "elsewhere"])
def test_a_replica_that_fails_ends_all_with_its_cause(where: int):
    """Also while another one answers on and on."""

    async def story() -> None:
        both = [engine(), engine()]
        both[where] = engine(fail=(3, RuntimeError("the device is gone")))
        with replicas(*both) as made:
            async with served(made) as here:  # type: ignore[arg-type]
                told: list[str] = []
                here.service.on_failure(told.append)
                generations = [here.service.submit([ask(name, max_tokens=10**5)]) for name in "ab"]
                for generation in generations:
                    with pytest.raises(NotReady, match=f"replica {where}: RuntimeError: the device is gone"):
                        async for _ in generation:
                            pass
                assert len(told) == 1 and "the device is gone" in str(here.service.trouble())
            until(lambda: all(one.closed for one in both))

    asyncio.run(asyncio.wait_for(story(), 20))


def test_a_replica_that_goes_away_is_missed_even_when_there_is_nothing_to_do():
    async def story() -> None:
        line, there = ends()
        made = Replicas(engine(), [line])
        async with served(made) as here:  # type: ignore[arg-type]
            assert here.service.trouble() is None
            there.close()
            await here.until(lambda: here.service.trouble() is not None, 5.0)
            assert "replica 1 is gone" in str(here.service.trouble())
            assert (await here.http.get("/ready")).status_code == 503

    asyncio.run(asyncio.wait_for(story(), 20))
    line, there = ends()
    made = Replicas(engine(), [line])
    there.close()
    until(lambda: made.failure is not None)
    with pytest.raises(MeshwrightError, match="replica 1 is gone"):
        made.step()
    made.close()


def test_metrics_tell_replicas_apart_and_a_silent_one_makes_the_server_not_ready():
    async def story() -> None:
        both = engine(), engine()
        with replicas(*both) as made:
            async with served(made, stall_s=0.1) as here:  # type: ignore[arg-type]
                both[1].gate.clear()
                first = here.service.submit([ask("a", prompt=2, max_tokens=4), ask("b", prompt=5, max_tokens=7)])
                await here.until(lambda: here.service.trouble() is not None)
                assert "a replica has not finished a step" in str(here.service.trouble())
                text = here.service.metrics.text().decode()
                assert 'meshwright_replica_outstanding_tokens{replica="1"} 12.0' in text
                assert 'meshwright_replica_requests{replica="0"} 0.0' in text
                both[1].gate.set()
                assert [index async for index, output in first if output.finish] == [0, 1]
                await here.until(lambda: here.service.trouble() is None)
                assert 'meshwright_replica_outstanding_tokens{replica="1"} 0.0' in here.service.metrics.text().decode()

    asyncio.run(asyncio.wait_for(story(), 20))


# ---- lines


REQUEST = Request(
    "ü\n",
    (5, 0, 261),
    SamplingParams(0.7, 3, 0.9, 0.01, 1.1, 0.1, -0.2, 2**63 - 1, {3: -100.0, 4: 0.1}, ("a\n", "\ud83d"), (7,), 9, 2, 5, True),
    priority=-2,
    arrival=12345.678901234567,
)


def test_lines_lose_nothing():
    """Every setting is another one than its default, so a field that is forgotten is seen."""
    assert not [f.name for f in fields(SamplingParams) if getattr(REQUEST.params, f.name) == getattr(SamplingParams(), f.name)]
    here, there = ends()
    works = [REQUEST, ask("b"), EncoderWork("e", (1, 2, 3), "fill-mask", 7)]
    for work in works:
        here.command(("add", work))
    here.command(("abort", "b"))
    here.command(("end", None))
    logprobs = [Logprob(3, -1.2345678901234567, ((3, -1.5), (4, -math.inf)))]
    outputs = [
        Output("ü", [3, 4], "\ud83d\n", None),
        Output("b", [3], "", "stop", logprobs),
        EncoderOutput("e", [0.1, 1e-30]),
    ]
    there.say(Said(4, outputs, {"kv_used": 0.1}))
    there.say(Said(failure="it\nbroke"))
    here_said, there_said = here.heard(), there.commands()
    assert [next(there_said) for _ in range(5)] == [*(("add", work) for work in works), ("abort", "b"), ("end", None)]
    assert next(here_said) == Said(4, outputs, {"kv_used": 0.1}) and next(here_said).failure == "it\nbroke"
    there.close()
    assert list(here_said) == [] and list(there_said) == []
    with pytest.raises(OSError):
        for _ in range(1000):
            here.command(("abort", "x"))
    here.close()


def test_outstanding_tokens_by_hand():
    assert asked_tokens(ask("a", 5, 7)) == 12 and asked_tokens(EncoderWork("e", (1, 2), "embed")) == 2


def test_who_does_not_know_the_secret_is_no_replica():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        words = (b"wrong 1\n", b"secret 2\n", b"\xff\n", b"secret x\n", b"secret 1\n", b"secret 3\n")
        calls = [socket.create_connection(listener.getsockname()) for _ in words]
        for call, word in zip(calls, words, strict=True):
            call.sendall(word)
        lines = _accept(listener, "secret", (1, 3))
        lines[0].command(("abort", "one"))
        lines[1].command(("abort", "three"))
        assert [call.recv(100) for call in calls] == [b"", b"", b"", b"", b'["abort","one"]\n', b'["abort","three"]\n']
        for end in (*calls, *lines):
            end.close()
        listener.settimeout(0.05)
        with pytest.raises(MeshwrightError, match=r"ranks \[3\] did not call"):
            _accept(listener, "secret", (3,))
