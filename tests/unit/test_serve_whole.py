"""The engine behind the routes: what it computes arrives, alone and under load, whole and in pieces; leaving frees it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.config.schema import ModelConfig
from meshwright.models import build, generate, initialize
from meshwright.serve.engine import LLMEngine
from tests.unit.serve_fakes import TEMPLATE, byte_tokenizer, call, chunks, served

COMPLETE = "/v1/completions"


def model() -> nn.Module:
    """A decoder with random weights over bytes."""
    shape = {"arch": "decoder", "layers": 2, "width": 16, "heads": 2, "ffn": 32, "vocab": 262, "max_len": 256}
    made = build(ModelConfig(**shape), "lm", torch.float64)  # type: ignore[arg-type]
    initialize(made, 1, torch.device("cpu"))
    return made.eval()


def engine(blocks: int = 200, **options: Any) -> LLMEngine:
    return LLMEngine(model(), byte_tokenizer(TEMPLATE), blocks=blocks, block_size=4, name="tiny", **options)  # type: ignore[arg-type]


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 30))


def test_greedy_answers_are_those_of_the_model_alone_and_under_load():
    """Mutation tried: a `sampling` that forgets the temperature draws at random."""

    async def story() -> None:
        made = engine(token_budget=16)
        prompts = [f"prompt {'x' * n}" for n in range(8)]
        ids = [made.tokenizer.encode(prompt) for prompt in prompts]  # type: ignore[union-attr]
        free = model()  # an engine puts the cache into its own
        wanted = [generate(free, one, max_tokens=6) for one in ids]
        async with served(made) as here:
            asks = [here.post(COMPLETE, prompt=one, temperature=0, max_tokens=6, logprobs=0, ignore_eos=True) for one in ids]
            for answer, tokens in zip(await asyncio.gather(*asks), wanted, strict=True):
                choice = answer.json()["choices"][0]
                assert choice["logprobs"]["tokens"] == [byte_tokenizer().decode([token], False) for token in tokens]
                assert choice["finish_reason"] == "length"
            alone = (await here.post(COMPLETE, prompt=prompts[3], temperature=0, max_tokens=6, ignore_eos=True)).json()
            assert alone["choices"][0]["text"] == made.tokenizer.decode(wanted[3])  # type: ignore[union-attr]

    run(story())


def biased(text: str) -> dict[str, Any]:
    """Settings under which every answer of the model is of these bytes."""
    return {"logit_bias": {str(token): 100 for token in byte_tokenizer().encode(text)}, "temperature": 1, "seed": 5}


@pytest.mark.parametrize("letters", ["你", "😀好"])
def test_streamed_characters_are_never_cut(letters: str):
    """Bytes drawn at random, so mostly no characters: joined, the stream is the whole answer all the same."""

    async def story() -> None:
        async with served(engine()) as here:
            settings = {"prompt": "x", "max_tokens": 40, "ignore_eos": True, **biased(letters)}
            whole = (await here.post(COMPLETE, **settings)).json()["choices"][0]["text"]
            parts = chunks((await here.post(COMPLETE, stream=True, **settings)).text)[:-1]
            assert "".join(part["choices"][0]["text"] for part in parts) == whole and len(parts) > 1

    run(story())


def test_a_stop_string_over_several_tokens_is_never_shown():
    async def story() -> None:
        async with served(engine()) as here:
            settings = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, **biased("ab")}
            plain = (await here.post(COMPLETE, **settings)).json()["choices"][0]["text"]
            stop = next(word for word in ("aba", "bab", "abb") if word in plain[20:])
            whole = (await here.post(COMPLETE, stop=stop, **settings)).json()["choices"][0]
            assert whole == {"index": 0, "text": plain[: plain.index(stop)], "logprobs": None, "finish_reason": "stop"}
            parts = chunks((await here.post(COMPLETE, stop=[stop], stream=True, **settings)).text)[:-1]
            assert "".join(part["choices"][0]["text"] for part in parts) == whole["text"]
            assert parts[-1]["choices"][0]["finish_reason"] == "stop" and not here.engine.has_work

    run(story())


def test_a_client_that_leaves_frees_its_cache():
    async def story() -> None:
        made = engine()
        async with served(made) as here:
            body = json.dumps({"prompt": "x" * 20, "max_tokens": 230, "ignore_eos": True, "stream": True}).encode()
            await asyncio.gather(*(call(here.app, COMPLETE, body, leave_after=1) for _ in range(5)))
            await here.until(lambda: not made.has_work)
            assert made.pool.held == 0 and made.stats()["finished_abort"] == 5
            answer = await here.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=3)
            assert answer.status_code == 200 and "meshwright_kv_cache_used_ratio 0.0" in (await here.http.get("/metrics")).text

    run(story())


def test_what_the_cache_can_never_hold_is_refused_by_the_engine():
    async def story() -> None:
        async with served(engine(blocks=10)) as here:
            answer = await here.post(COMPLETE, prompt="x" * 30, max_tokens=100)
            assert answer.status_code == 400 and "the cache holds 40" in answer.json()["error"]["message"]
            assert (await here.post(COMPLETE, prompt="x", max_tokens=3)).status_code == 200

    run(story())
