"""The service around an engine: order, bounds, leaving, draining, failing."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from meshwright.errors import UserError
from meshwright.serve.contract import Busy, NotReady
from meshwright.serve.request import Request
from meshwright.serve.sampling import SamplingParams
from meshwright.serve.service import Service
from tests.unit.serve_fakes import FakeEngine, served


def ask(id: str, prompt: int = 4, max_tokens: int = 3, seed: int | None = None) -> Request:
    return Request(id, (1,) * prompt, SamplingParams(max_tokens=max_tokens, seed=seed))


def run(coroutine) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 10))


def test_outputs_of_a_group_come_in_order_and_from_one_thread():
    async def story() -> None:
        async with served(FakeEngine(("x", "y"), ends=False)) as here:
            async with here.service.submit([ask("a"), ask("b", max_tokens=5)]) as generation:
                got = [(index, output.text) async for index, output in generation]
            texts = ["".join(text for at, text in got if at == index) for index in (0, 1)]
            assert texts == ["xyx", "xyxyx"]
            assert here.engine.threads == {here.service._thread.ident} and threading.get_ident() not in here.engine.threads
            assert here.service.waiting == here.service.running == 0
        assert here.engine.closed

    run(story())


def test_the_queue_is_bounded_by_requests_and_by_tokens():
    async def story() -> None:
        engine = FakeEngine(ends=False)
        async with served(engine, max_waiting=3, max_waiting_tokens=20) as here:
            engine.gate.clear()
            here.service.submit([ask("long", prompt=60)])  # nobody waits: any length is taken
            with pytest.raises(Busy, match="1 requests with 60 tokens wait"):
                here.service.submit([ask("more")])
            assert here.service.waiting == 1
            engine.gate.set()
            await here.until(lambda: not here.service.waiting)
            engine.gate.clear()
            here.service.submit([ask("a"), ask("b")])
            with pytest.raises(Busy) as full:
                here.service.submit([ask("c"), ask("d")])  # all or none
            assert 1 <= full.value.retry_after <= 60 and here.service.waiting == 2
            here.service.submit([ask("c")])
            assert here.service.waiting == 3
            text = here.service.metrics.text().decode()
            assert "meshwright_requests_waiting 3.0" in text and "meshwright_tokens_waiting 12.0" in text
            assert 'meshwright_requests_refused_total{reason="busy"} 2.0' in text

    run(story())


def test_retry_after_grows_with_the_queue_and_the_pace():
    service = Service(FakeEngine())
    service._pace, service._waiting = 0.5, 9
    assert service._retry_after() == 5  # 9 requests at one each half second, rounded up
    service._waiting = 10_000
    assert service._retry_after() == 60


def test_leaving_a_group_aborts_it_within_a_step():
    """Mutation tried: without `_order` in `_abandon` the engine goes on for the whole of max_tokens."""

    async def story() -> None:
        engine = FakeEngine(ends=False)
        async with served(engine) as here:
            async with here.service.submit([ask("a", max_tokens=10**6), ask("b", max_tokens=2)]) as generation:
                async for index, output in generation:
                    if index == 1 and output.finish:
                        break
                engine.gate.clear()
                at = engine.steps
            engine.gate.set()
            await here.until(lambda: not engine.under)
            assert engine.aborted == ["a"] and engine.steps <= at + 2
            assert here.service.running == 0
            assert "meshwright_requests_aborted_total 1.0" in here.service.metrics.text().decode()

    run(story())


def test_a_request_that_the_engine_refuses_takes_only_its_own_group_along():
    async def story() -> None:
        engine = FakeEngine(ends=False)
        async with served(engine) as here:
            other = here.service.submit([ask("other", max_tokens=3)])
            bad = here.service.submit([ask("x", max_tokens=10**6), ask("bad", seed=13)])
            with pytest.raises(UserError, match="bad luck"):
                async for _ in bad:
                    pass
            assert [output.finish async for _, output in other][-1] == "length"
            await here.until(lambda: not engine.under)
            assert engine.aborted == ["x"] and here.service.trouble() is None

    run(story())


def test_a_failing_engine_ends_every_generation_with_the_cause():
    async def story() -> None:
        engine = FakeEngine(ends=False, fail=(3, RuntimeError("the device\nis gone")))
        async with served(engine) as here:
            told: list[str] = []
            here.service.on_failure(told.append)
            both = [here.service.submit([ask(name, max_tokens=100)]) for name in "ab"]
            for generation in both:
                with pytest.raises(NotReady, match="RuntimeError: the device is gone"):
                    async for _ in generation:
                        pass
            assert told == ["RuntimeError: the device is gone"]
            assert here.service.trouble() == "the engine failed: RuntimeError: the device is gone"
            with pytest.raises(NotReady):
                here.service.submit([ask("c")])
            await here.until(lambda: engine.closed)

    run(story())


def test_a_step_that_does_not_return_is_seen():
    async def story() -> None:
        engine = FakeEngine()
        async with served(engine, stall_s=0.05) as here:
            assert here.service.trouble() is None
            engine.gate.clear()
            here.service.submit([ask("a")])
            await here.until(lambda: here.service.trouble() is not None)
            assert "has not finished a step" in str(here.service.trouble())
            engine.gate.set()
            await here.until(lambda: here.service.trouble() is None)

    run(story())


def test_drain_waits_for_what_is_under_way_and_takes_no_more():
    async def story() -> None:
        async with served(FakeEngine(ends=False, step_s=0.01)) as here:
            generation = here.service.submit([ask("a", max_tokens=5)])
            draining = asyncio.create_task(here.service.drain(5.0))
            await asyncio.sleep(0)
            with pytest.raises(NotReady, match="stopping"):
                here.service.submit([ask("b")])
            assert len([output async for _, output in generation]) == 5
            assert await draining == 0

    run(story())


def test_drain_cuts_off_at_its_deadline():
    async def story() -> None:
        async with served(FakeEngine(ends=False, step_s=0.005)) as here:
            generation = here.service.submit([ask("a", max_tokens=10**6)])
            began = time.monotonic()
            assert await here.service.drain(0.1) == 1
            assert time.monotonic() - began < 2
            with pytest.raises(NotReady, match="stopping"):
                async for _ in generation:
                    pass
            await here.until(lambda: not here.engine.under)

    run(story())


def test_times_are_those_of_their_formulas(monkeypatch: pytest.MonkeyPatch):
    """First token 2 s after arrival, then three tokens in 3 s, so 1 s a token. Mutation tried: dividing by all tokens."""
    clock = [100.0]
    monkeypatch.setattr("meshwright.serve.service.time.monotonic", lambda: clock[0])

    class Parts:
        def __init__(self, finish: str | None):
            self.id, self.tokens, self.text, self.finish, self.logprobs = "a", (1,), "", finish, None

    async def story() -> None:
        service = Service(FakeEngine())
        monkeypatch.setattr(service, "trouble", lambda: None)
        service.submit([ask("a")])
        for now, finish in ((102.0, None), (103.0, None), (104.0, None), (105.0, "stop")):
            clock[0] = now
            service._deliver([Parts(finish)], {"kv_used": 0.25})
        text = service.metrics.text().decode()
        assert "meshwright_time_to_first_token_seconds_sum 2.0" in text
        assert "meshwright_time_per_output_token_seconds_sum 1.0" in text
        assert "meshwright_request_seconds_sum 5.0" in text
        assert "meshwright_kv_cache_used_ratio 0.25" in text and "meshwright_output_tokens_total 4.0" in text
        assert "meshwright_prompt_tokens_total 4.0" in text
        assert 'meshwright_requests_finished_total{reason="stop"} 1.0' in text

    asyncio.run(story())
