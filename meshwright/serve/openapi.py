"""The OpenAPI document: what FastAPI makes of the routes, with all that is answered and without what never is."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from meshwright.serve.gate import OPEN
from meshwright.serve.replies import ErrorBody

__all__ = ["answers", "describe"]

TEXTS = {
    400: "Something is wrong with the request, or this model cannot do it; `param` and `code` say what",
    401: "No key, or not the right one",
    404: "No such model",
    408: "The body came too slowly",
    413: "The body is too large",
    415: "The content type is not application/json",
    429: "The queue is full",
    500: "The engine made a mistake",
    503: "The engine failed, or the server is stopping",
}

EVENT = {
    "description": "One event of the stream.",
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string", "description": "JSON of a chunk, at last [DONE]; JSON of an error in its place"}},
}


def answers(
    model: type[BaseModel] | None,
    *,
    stream: str | None = None,
    body: bool = True,
    missing: bool = False,
    other: str | None = None,
) -> dict[int | str, dict[str, Any]]:
    """FastAPI's `responses` of a route. model: of a success. stream, other: media types beside, and in place of, JSON.
    body: the route takes a request body and asks the engine. missing: it names a model in its path."""
    good: dict[str, Any] = {"description": "Success"}
    if model is not None:
        good["model"] = model
    if stream is not None:
        good["content"] = {stream: {"schema": EVENT}}
    if other is not None:
        good["content"] = {other: {"schema": {"type": "string"}}}
    found: dict[int | str, dict[str, Any]] = {200: good}
    statuses = [400, 401, 404, 408, 413, 415, 429, 500, 503] if body else [401, 408, 413]
    for status in sorted({*statuses, *([404] if missing else [])}):
        found[status] = {"model": ErrorBody, "description": TEXTS[status]}
        if status in (429, 503):
            seconds = {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds after which to try again"}
            found[status]["headers"] = {"Retry-After": seconds}
    return found


def describe(app: FastAPI, *, keyed: bool) -> None:
    """Replace the document that the application gives. keyed: the routes need a key."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes, tags=app.openapi_tags)
            for path, methods in made["paths"].items():
                for operation in methods.values():
                    _mend(operation, path, keyed)
            schemas = made["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            if keyed:
                made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _mend(operation: dict[str, Any], path: str, keyed: bool) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's own; ours is 400
    content = responses["200"].get("content", {})
    if any(kind.startswith("text/") and kind != "text/event-stream" for kind in content):
        content.pop("application/json", None)
    if keyed and path not in OPEN:
        operation["security"] = [{"key": []}]
    elif "401" in responses:
        del responses["401"]
