"""What is answered when a request cannot be served: status, code and text in the shape of OpenAI's errors."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic.fields import FieldInfo

from meshwright.errors import MeshwrightError, UserError
from meshwright.serve.contract import Busy, NotReady
from meshwright.serve.protocol import UNIONS, UNSUPPORTED
from meshwright.serve.replies import ErrorBody, ErrorDetail, dumped

__all__ = ["ApiError", "from_engine", "from_validation", "mask_missing"]

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
SHOWN = 8
"""Findings of a body that are told; a body of garbage has thousands."""


class ApiError(MeshwrightError):
    """An answer that is no success. param: the field at fault. code: for programs."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ):
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return dumped(ErrorBody(error=ErrorDetail(message=str(self), type=kind, param=self.param, code=self.code)))


def from_engine(error: MeshwrightError) -> ApiError:
    """What `Service.submit` and a generation raise."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return ApiError(429, str(error), code="queue_full", headers={"retry-after": str(error.retry_after)})
    if isinstance(error, NotReady):
        return ApiError(503, str(error), code="not_ready", headers={"retry-after": "5"})
    if isinstance(error, UserError):
        param = error.findings[0].where if error.findings else None
        return ApiError(400, str(error), code="invalid_value", param=PARAMS.get(param, param) if param else None)
    return ApiError(500, str(error), code="engine_error")


PARAMS = {"stop_ids": "stop_token_ids"}
"""Names of settings where they differ from the fields."""


def mask_missing(token: str | None) -> ApiError:
    what = "has no mask to fill in" + (f": put {token} (or [MASK]) into the text" if token else "")
    return ApiError(400, f"input {what}", code="no_mask", param="input")


def from_validation(errors: Sequence[Mapping[str, Any]], fields: Mapping[str, FieldInfo]) -> ApiError:
    """One error of everything that is wrong with a body. fields: that it may have."""
    told: dict[str, tuple[str, str]] = {}
    for error in errors:
        place = [part for part in error["loc"] if part not in ("body", "query", "path")]
        field = str(place[0])[:80] if place else ""
        if error["type"] == "json_invalid":
            return ApiError(400, f"the body is not valid JSON: {error['msg']}", code="invalid_json")
        if field and field not in told:
            told[field] = _told(error, field, place, fields)
    if not told:
        return ApiError(400, "the body must be a JSON object", code="invalid_body")
    texts = [f"{field} {text}" for field, (text, _) in told.items()]
    if len(texts) > SHOWN:
        texts[SHOWN:] = [f"and {len(texts) - SHOWN} more"]
    field = next(iter(told))
    return ApiError(400, "; ".join(texts), code=told[field][1], param=field)


def _told(error: Mapping[str, Any], field: str, place: Sequence[Any], fields: Mapping[str, FieldInfo]) -> tuple[str, str]:
    if error["type"] == "missing" and len(place) == 1:
        return "is missing", "missing_field"
    if error["type"] == "extra_forbidden" and len(place) == 1:
        near = difflib.get_close_matches(field, fields, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return UNSUPPORTED_TEXT.format(UNSUPPORTED[field]) if field in UNSUPPORTED else f"is no field of this request{hint}", (
            "unsupported_field" if field in UNSUPPORTED else "unknown_field"
        )
    if field in UNSUPPORTED:
        return UNSUPPORTED_TEXT.format(UNSUPPORTED[field]), "unsupported_field"
    if field in UNIONS and len(place) > 1:  # elsewhere a field of this name has one type, and the checker's words are right
        return f"must be {fields[field].description}", "invalid_value"
    inner = ".".join(str(part)[:80] for part in place[1:])
    text = str(error["msg"]).removeprefix("Input ").removeprefix("Value error, ")
    return f"({inner}) {text}" if inner else text, "invalid_value"


UNSUPPORTED_TEXT = "is not supported: {}"
