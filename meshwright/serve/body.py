"""How the body of a request is read: as UTF-8, and a key that stands twice in an object is a mistake, not the value that comes
last."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

__all__ = ["BodyRoute", "RepeatedKey", "once"]


class RepeatedKey(HTTPException):
    """An object of the body has `key` twice. FastAPI lets this type through, any other is one mistake of syntax to it."""

    def __init__(self, key: str):
        self.key = key[:80].encode("utf-8", "backslashreplace").decode()  # half of a surrogate pair cannot be answered
        super().__init__(400, f"{self.key} stands more than once in an object of the body: leave one of them out")


class _Body(Request):
    async def json(self) -> Any:
        """Raises RepeatedKey, and what json.loads raises."""
        return json.loads((await self.body()).decode("utf-8-sig"), object_pairs_hook=once)


class BodyRoute(APIRoute):
    """A route whose handler reads its body in this way."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(_Body(request.scope, request.receive))

        return handler


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads: an object. Raises RepeatedKey, and UnicodeEncodeError for a key that is no text."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        raise RepeatedKey(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    for key in found:
        key.encode()  # one with half of a surrogate pair could not be named in an answer
    return found
