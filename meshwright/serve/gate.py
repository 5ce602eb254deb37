"""What stands before every route: the key, the size of a body, the time that it may take, and the count of answers."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.errors import Finding, UserError
from meshwright.serve.faults import ApiError
from meshwright.serve.metrics import Metrics

__all__ = ["OPEN", "VARIABLE", "Gate", "Keys", "read_keys", "response_of"]

OPEN = ("/health", "/ready")
"""Routes that need no key."""
VARIABLE = "MESHWRIGHT_API_KEY"
UNREAD = (401, 413)
"""Refused before the body was read. What comes of it is thrown away for as long as a body may take: a client whose connection
is closed while it sends sees a broken connection and no answer."""


def response_of(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, headers=error.headers)


class Keys:
    """Keys that open the server. Only their digests are kept, and the comparison takes the same time whatever is given."""

    def __init__(self, keys: Iterable[str]):
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def accept(self, header: bytes | None) -> bool:
        """Of an Authorization header: `Bearer KEY`, or Basic with the key as its password, which is what a browser sends."""
        kind, _, value = (header or b"").partition(b" ")
        given = value.strip()
        if kind.lower() == b"basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                return False
        elif kind.lower() != b"bearer":
            return False
        digest = hashlib.sha256(given).digest()
        right = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them: no early end
        return any(right)


def read_keys(file: str | Path | None, environment: Mapping[str, str] = os.environ) -> Keys | None:
    """From a file (a key a line; empty lines and those that begin with # do not count), else from MESHWRIGHT_API_KEY.

    None where there is neither. Raises UserError for a file that has none, and for a key that no header can carry.
    """
    if file is not None:
        where = str(file)
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            what = getattr(error, "strerror", None) or "is not UTF-8 text"
            raise UserError(findings=[Finding(where, f"cannot be read: {what}")]) from None
        keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    elif VARIABLE in environment:
        where, keys = VARIABLE, [environment[VARIABLE].strip()]
    else:
        return None
    findings = [
        Finding(where, f"key {number} has characters that a header cannot carry", "Use visible ASCII without spaces")
        for number, key in enumerate(keys, 1)
        if not all("!" <= c <= "~" for c in key)
    ]
    if not any(keys):
        findings.append(Finding(where, "has no key", "Write one a line, for instance what `openssl rand -hex 32` prints"))
    if findings:
        raise UserError(findings=findings)
    return Keys(keys)


class Gate:
    """ASGI middleware. max_body: bytes. body_s: seconds for a whole body. Answers by itself with 401, 408, 413 and 415."""

    def __init__(self, app: ASGIApp, *, keys: Keys | None, max_body: int, body_s: float, metrics: Metrics):
        self.app, self.keys, self.max_body, self.body_s, self.metrics = app, keys, max_body, body_s, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            headers = dict(scope["headers"])
            self._check_key(scope["path"], headers)
            body = await self._body(scope["method"], headers, receive)
        except ApiError as error:
            await self._refuse(error, receive, counted)
        else:
            if body is not None:
                await self.app(scope, _replay(body, receive), counted)
        route = getattr(scope.get("route"), "path", "other")
        self.metrics.answers.labels(route, str(status or 499)).inc()

    def _check_key(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        if self.keys is None or path in OPEN or self.keys.accept(headers.get(b"authorization")):
            return
        # Basic makes a browser ask for it, and send it with what the page asks for later
        scheme = "Basic" if path == "/" else "Bearer"
        raise ApiError(
            401,
            "a key is needed: Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"www-authenticate": f'{scheme} realm="meshwright"'},
        )

    async def _body(self, method: str, headers: Mapping[bytes, bytes], receive: Receive) -> bytes | None:
        """The whole body; None where the client left while sending it."""
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.max_body:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self.max_body:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            text = f"the body did not come within {self.body_s:g} s"
            raise ApiError(408, text, code="body_timeout", headers={"connection": "close"}) from None
        except asyncio.CancelledError:  # the server ends, and waits for the rest no longer
            raise ApiError(503, "the server is stopping", code="not_ready", headers={"connection": "close"}) from None
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        # a page of another origin can send any text, but not this type: that is what protects a server without a key
        if method == "POST" and body and kind != b"application/json":
            raise ApiError(415, "the content type must be application/json", code="unsupported_media_type")
        return bytes(body)

    def _too_large(self) -> ApiError:
        text = f"the body has more than {self.max_body} bytes"
        return ApiError(413, text, code="body_too_large", headers={"connection": "close"})

    async def _refuse(self, error: ApiError, receive: Receive, send: Send) -> None:
        response = response_of(error)
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        lingering = error.status in UNREAD
        await send({"type": "http.response.body", "body": response.body, "more_body": lingering})
        if not lingering:
            return
        try:
            async with asyncio.timeout(self.body_s):
                while (message := await receive())["type"] != "http.disconnect" and message.get("more_body", False):
                    pass
        except (TimeoutError, asyncio.CancelledError):  # the second one: the server ends
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _replay(body: bytes, receive: Receive) -> Receive:
    given = False

    async def again() -> dict[str, Any]:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return dict(await receive())

    return again
