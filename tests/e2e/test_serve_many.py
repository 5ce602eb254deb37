"""Many clients at once, and clients that send anything: no answer is lost, none is ours to blame, and memory stays."""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.live import KEY, Live, live
from tests.e2e.test_serve_command import folder
from tests.unit.serve_fakes import byte_tokenizer, chunks

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
STREAMS = 500
PER_SEED = 1000


def client(here: Live, connections: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{here.port}", timeout=60, limits=limits, headers=headers)


def resident(here: Live) -> float:
    """MiB of the server's process."""
    return psutil.Process(here.process.pid).memory_info().rss / 2**20


# ---- many streams


async def letters(http: httpx.AsyncClient, number: int) -> tuple[str, int]:
    """(what is wrong with a stream that can only be of one letter, tokens it had)."""
    letter, length = string.ascii_letters[number % 52], 20 + number % 40
    body = {
        "prompt": f"stream {number}", "max_tokens": length, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "logit_bias": {str(byte_tokenizer().encode(letter)[0]): 100},
    }  # fmt: skip
    text = (await http.post(COMPLETE, json=body)).text
    *parts, last, done = chunks(text) or [None, None]
    if done != "[DONE]" or last["usage"]["completion_tokens"] != length:
        return f"stream {number} ended with {text[-300:]!r}", 0
    joined = "".join(part["choices"][0]["text"] for part in parts)
    return ("", length) if joined == letter * length else (f"stream {number} was {joined!r}", length)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_500_streams_at_once(tmp_path: Path):
    """Every stream has its own letter and length, so that one that is lost, cut or mixed with another is seen. Memory: after
    the first round, which fills caches of the allocator, three more add less than 16 MiB.
    """

    async def round_(here: Live) -> int:
        async with client(here, STREAMS) as http:
            found = await asyncio.gather(*(letters(http, number) for number in range(STREAMS)))
        wrong = [what for what, _ in found if what]
        assert not wrong, wrong[:3]
        return sum(tokens for _, tokens in found)

    with live(folder(tmp_path / "tiny", max_len=128), "--max-queue", str(STREAMS), blocks=1000) as here:
        tokens = asyncio.run(round_(here))
        first = resident(here)
        for _ in range(3):
            tokens += asyncio.run(round_(here))
        assert here.metric("output_tokens_total") == tokens and here.metric("requests_aborted_total") == 0
        assert here.metric("requests_running") == 0 and here.metric("kv_cache_used_ratio") == 0
        grown = resident(here) - first
        print(f"resident after the first round {first:.0f} MiB, after three more {grown:+.1f} MiB")
        assert grown < 16
        assert not here.said


# ---- anything

ROUTES: dict[str, dict[str, Any]] = {
    COMPLETE: {"prompt": "hi", "max_tokens": 4, "temperature": 0.5, "n": 2, "stop": ["q"], "logprobs": 2, "seed": 1},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "logprobs": True, "top_logprobs": 2},
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "float"},
    "/v1/classify": {"input": ["a"]},
    "/v1/fill-mask": {"input": "a [MASK] b", "top_k": 3},
}
MORE = [
    "stream", "stream_options", "echo", "best_of", "top_k", "top_p", "min_p", "min_tokens", "stop_token_ids", "ignore_eos",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "tools", "response_format", "user", "model",
    "chat_template_kwargs", "add_generation_prompt", "max_completion_tokens", "suffix", "dimensions", "", "__class__", "\u0000",
]  # fmt: skip
TEXTS = ["", "a", "\ud800", "\u0000", "[MASK]", "<s>", "你好😀", "text", "float"]
NUMBERS = [0, 1, 2, -1, 0.5, 1e-300, 1e308, float("nan"), float("inf"), 2**31, 2**63, 10**40]
ELSEWHERE = [
    "/", "/v1/models", "/v1/models/%00", "/v1/models/a/b?c", "/metrics", "/v1/%ff", "/health", "/..//v1", "//", "/v1/",
]  # fmt: skip
ALLOWED = {200, 400, 401, 404, 405, 413, 415, 429}


class Fuzz:
    """Requests from valid ones by chance: `seed` decides all of them."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def value(self, depth: int = 0) -> Any:
        pick = self.random.choice
        kind = self.random.randrange(10 if depth < 3 else 8)
        if kind == 8:
            return [self.value(depth + 1) for _ in range(self.random.randrange(4))]
        if kind == 9:
            return {
                pick([*MORE, "role", "content", "type", "7"]): self.value(depth + 1) for _ in range(self.random.randrange(4))
            }
        if kind in (6, 7):
            return pick(
                ["", "a", "x" * self.random.randrange(200), "\ud800", "\u0000", "[MASK]", "<s>", "你好😀", "text", "float"]
            )
        numbers = [
            0,
            1,
            2,
            -1,
            0.5,
            1e-300,
            1e308,
            float("nan"),
            float("inf"),
            2**31,
            2**63,
            10**40,
            self.random.randrange(300),
        ]
        return pick([None, True, False, *numbers])

    def body(self, path: str) -> Any:
        body = json.loads(json.dumps(ROUTES[path]))
        for _ in range(self.random.randrange(4)):
            change = self.random.randrange(4)
            if change == 0 and body:
                del body[self.random.choice(list(body))]
            elif change == 1 and body:
                body[self.random.choice(list(body))] = self.value()
            else:
                body[self.random.choice([*MORE, *ROUTES[path]])] = self.value()
        return body if self.random.random() < 0.97 else self.value()

    def content(self, path: str) -> bytes:
        data = bytearray(json.dumps(self.body(path)).encode())
        if self.random.random() < 0.2:
            for _ in range(self.random.randrange(1, 5)):
                at = self.random.randrange(len(data) + 1)
                change = self.random.randrange(3)
                if change == 0:
                    data[at : at + 1] = bytes([self.random.randrange(256)])
                elif change == 1:
                    del data[at:]
                else:
                    data[at:at] = data[: self.random.randrange(len(data) + 1)]
        if self.random.random() < 0.01:
            data = bytearray(self.random.choice([b"[" * 100_000, b"1" * 10_000, b'{"prompt":"' + b"y" * 70_000 + b'"}']))
        return bytes(data)

    def request(self) -> dict[str, Any]:
        path = self.random.choice([*ROUTES, COMPLETE, CHAT])
        headers = {"content-type": "application/json"}
        method, content = "POST", self.content(path)
        if self.random.random() < 0.1:
            odd = [("content-type", "text/plain"), ("authorization", "Bearer x"), ("accept", "\x7f"), ("range", "bytes=9-1")]
            headers |= [self.random.choice(odd)]
        if self.random.random() < 0.1:
            method = self.random.choice(["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH", "BREW"])
        if self.random.random() < 0.1:
            more = [
                "/",
                "/v1/models",
                "/v1/models/%00",
                "/v1/models/a/b?c",
                "/metrics",
                "/v1/%ff",
                "/health",
                "/..//v1",
                "//",
                "/v1/",
            ]
            path = self.random.choice(more)
        return {"method": method, "url": path, "headers": headers, "content": content}


async def sent(http: httpx.AsyncClient, request: dict[str, Any], seen: Counter[int]) -> str:
    """What is wrong with the answer, or nothing."""
    try:
        answer = await http.request(**request)
    except httpx.TransportError as error:
        return f"{error!r} and no answer to {str(request)[:300]} ({len(request['content'])} bytes)"
    seen[answer.status_code] += 1
    if answer.status_code not in ALLOWED:
        return f"{answer.status_code} for {request}: {answer.text[:200]}"
    if answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"):
        return "" if chunks(answer.text)[-1] == "[DONE]" else f"no end of the stream for {request}: {answer.text[-200:]}"
    if answer.status_code != 200 and request["method"] != "HEAD" and not answer.json()["error"]["message"]:
        return f"no message for {request}"
    return ""


@pytest.fixture(scope="module", params=["lm", "mlm"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Live]]:
    task = request.param
    with live(folder(tmp_path_factory.mktemp("fuzz") / task, task), "--max-body", "65536") as here:
        yield task, here


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(5))
def test_10_000_requests_of_any_kind(served: tuple[str, Live], seed: int):
    """1,000 of them in each: answered within a minute, never with our mistake; and the server is afterwards as it was."""
    task, here = served
    fuzz, seen, wrong = Fuzz(seed if task == "lm" else 100 + seed), Counter[int](), list[str]()

    async def worker(http: httpx.AsyncClient, todo: Iterator[int]) -> None:
        for _ in todo:
            if what := await sent(http, fuzz.request(), seen):
                wrong.append(what)

    async def all_of_them() -> None:
        todo = iter(range(PER_SEED))
        async with client(here, 32) as http:
            await asyncio.gather(*(worker(http, todo) for _ in range(32)))

    asyncio.run(asyncio.wait_for(all_of_them(), 400))
    assert not wrong, "\n".join(wrong[:5])
    assert seen.total() == PER_SEED and all(seen[status] for status in (200, 400, 401, 404, 405, 413, 415)), seen
    here.until(lambda: here.metric("requests_running") + here.metric("requests_waiting") == 0)
    assert task != "lm" or here.metric("kv_cache_used_ratio") == 0
    assert here.http.get("/ready").status_code == 200 and not [line for line in here.said if "Traceback" in line]
