"""An engine that says what it is told to, and a server around it in this process."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI

from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import Finding, UserError
from meshwright.serve.contract import Engine
from meshwright.serve.gate import Keys
from meshwright.serve.http import Limits, create_app
from meshwright.serve.request import Logprob, Output, Request
from meshwright.serve.service import Service

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system speaks first') }}{% endif %}[{{ message.role }}]{{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@functools.cache
def byte_tokenizer(template: str | None = None) -> Tokenizer:
    """A token a byte, and six special ones before them."""
    made = Tokenizer.train([], 262)
    return made if template is None else Tokenizer(made._backend, {**made._config, "chat_template": template})


@dataclass
class _Under:
    request: Request
    at: int = 0


class FakeEngine:
    """Answers each request with the pieces of `reply` again and again, a piece and a token a step, until max_tokens.

    ends     the answer ends with "stop" after the last piece of the reply
    gate     steps wait while it is not set
    fail     raised by the step with this number (from 1)
    step_s   seconds of a step
    running  most requests that a step moves; others wait
    """

    def __init__(
        self,
        reply: Sequence[str] = ("a", "b", "c"),
        *,
        ends: bool = True,
        max_len: int = 64,
        template: str | None = TEMPLATE,
        step_s: float = 0.0,
        running: int = 1000,
        fail: tuple[int, BaseException] | None = None,
    ):
        self.reply, self.ends, self.max_len, self.step_s, self.fail, self.most = (
            list(reply),
            ends,
            max_len,
            step_s,
            fail,
            running,
        )
        self.tokenizer, self.model_name = byte_tokenizer(template), "fake"
        self.under: dict[str, _Under] = {}
        self.seen: list[Request] = []
        self.aborted: list[str] = []
        self.steps = 0
        self.closed = False
        self.gate = threading.Event()
        self.gate.set()
        self.threads: set[int] = set()

    @property
    def has_work(self) -> bool:
        return bool(self.under)

    def check(self, request: Request) -> None:
        if request.params.seed == 13:
            raise UserError(findings=[Finding("seed", "13 brings bad luck")])

    def add(self, request: Request) -> None:
        self.threads.add(threading.get_ident())
        self.check(request)
        self.seen.append(request)
        self.under[request.id] = _Under(request)

    def abort(self, id: str) -> None:
        self.aborted.append(id)
        del self.under[id]

    def step(self) -> list[Output]:
        self.threads.add(threading.get_ident())
        self.gate.wait(10)
        if self.step_s:
            time.sleep(self.step_s)
        self.steps += 1
        if self.fail is not None and self.steps >= self.fail[0]:
            raise self.fail[1]
        return [self._output(one) for one in list(self.under.values())[: self.most]]

    def _output(self, under: _Under) -> Output:
        request, text = under.request, self.reply[under.at % len(self.reply)]
        under.at += 1
        finish: Any = None
        if self.ends and under.at == len(self.reply):
            finish = "stop"
        elif under.at == request.params.max_tokens:
            finish = "length"
        if finish is not None:
            del self.under[request.id]
        token = self.tokenizer.encode(text or "?")[0]
        tops = request.params.logprobs
        value = -0.5 / (1 + self.seen.index(request))  # later requests are likelier
        logprobs = None if tops is None else [Logprob(token, value, tuple((token + i, value - i) for i in range(tops)))]
        return Output(request.id, [token], text, finish, logprobs)

    def stats(self) -> Mapping[str, float]:
        return {"kv_used": len(self.under) / 100}

    def close(self) -> None:
        self.closed = True


@dataclass
class Served:
    """A service that runs, its application, and a client of it."""

    engine: Any
    service: Service
    app: FastAPI
    http: httpx.AsyncClient

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def until(self, true: Callable[[], Any], seconds: float = 3.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "it never came"
            await asyncio.sleep(0.002)


@asynccontextmanager
async def served(
    engine: Engine | None = None, *, keys: Keys | None = None, limits: Limits | None = None, **options: Any
) -> AsyncIterator[Served]:
    """options: of Service."""
    engine = engine or FakeEngine()
    service = Service(engine, **options)
    app = create_app(service, keys=keys, limits=limits)
    service.start()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield Served(engine, service, app, http)
    finally:
        gate = getattr(engine, "gate", None)
        if gate is not None:
            gate.set()
        await service.close()


def chunks(text: str) -> list[Any]:
    """Data of the events of a stream: objects, and "[DONE]"."""
    found = []
    for part in text.split("\n\n"):
        if part.startswith("data: "):
            data = part[len("data: ") :]
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


async def call(
    app: FastAPI, path: str, body: bytes, *, leave_after: int | None = None, headers: Sequence[tuple[bytes, bytes]] = ()
) -> tuple[int | None, list[bytes]]:
    """POST by hand, as a server would: (status, pieces of the body). leave_after: the client goes after so many pieces."""
    gone = asyncio.Event()
    status: int | None = None
    pieces: list[bytes] = []
    asked = 0

    async def receive() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        if asked == 1:
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message.get("body"):
            pieces.append(message["body"])
        if leave_after is not None and len(pieces) >= leave_after:
            gone.set()
        await asyncio.sleep(0)

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json"), *headers], "client": ("127.0.0.1", 1), "server": ("test", 80),
    }  # fmt: skip
    await app(scope, receive, send)  # type: ignore[arg-type]
    return status, pieces
