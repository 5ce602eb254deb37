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

from meshwright.serve.strict_json import RepeatedKeyError, once

__all__ = ["BodyRoute", "RepeatedKey"]


class RepeatedKey(HTTPException):
    """An object of the body has `key` twice. FastAPI lets this type through, any other is one mistake of syntax to it."""

    def __init__(self, key: str):
        self.key = key
        super().__init__(400, f"{key} stands more than once in an object of the body: leave one of them out")


class _Body(Request):
    async def json(self) -> Any:
        """Raises RepeatedKey, and what json.loads raises."""
        text = (await self.body()).decode("utf-8-sig")
        try:
            return json.loads(text, object_pairs_hook=once)
        except RepeatedKeyError as error:
            raise RepeatedKey(error.key) from None


class BodyRoute(APIRoute):
    """A route whose handler reads its body in this way."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(_Body(request.scope, request.receive))

        return handler
