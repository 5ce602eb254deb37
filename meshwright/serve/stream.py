"""Waiting for an answer while watching whether anybody still wants it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from meshwright.serve.service import Generation

__all__ = ["DONE", "EventStream", "Gone", "event", "until_gone"]

PING_S = 15.0
"""A comment line is sent after so many silent seconds, so that nothing in between takes the connection for dead."""
SEND_S = 30.0
"""A client that takes nothing for so long has left."""

DONE = b"data: [DONE]\n\n"

Result = TypeVar("Result")


class Gone(Exception):
    """The client closed the connection."""


def event(model: BaseModel) -> bytes:
    """One server-sent event. Fields that were not set are left out."""
    return f"data: {model.model_dump_json(exclude_unset=True)}\n\n".encode()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_gone(request: Request, work: Awaitable[Result]) -> Result:
    """What `work` gives; it is cancelled, and Gone raised, when the client leaves before."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. When they end, the client leaves or takes nothing any more, the generation behind them is closed."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], generation: Generation):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._generation = events, generation
        self._sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [asyncio.ensure_future(one) for one in (self._pump(send), self._ping(send), _gone(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._generation.close()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, TimeoutError | OSError):
                raise result

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            await self._put(send, data)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _put(self, send: Send, data: bytes) -> None:
        self._sent = asyncio.get_running_loop().time()
        async with asyncio.timeout(SEND_S):
            await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _ping(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._sent = loop.time()
        while True:
            await asyncio.sleep(max(self._sent + PING_S - loop.time(), 0.0))
            if loop.time() - self._sent >= PING_S:
                await self._put(send, b": waiting\n\n")
