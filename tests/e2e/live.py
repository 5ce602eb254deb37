"""A server of a tiny model, started as a user starts it: `with live(folder(path), "--max-queue", "2") as here:`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.e2e.test_serve_command import serve
from tests.e2e.test_serve_process import Server

__all__ = ["KEY", "live"]

KEY = "s3cret"
"""The key that `serve` puts into the environment of the command."""


@contextmanager
def live(model: Path, *options: str, blocks: int | None = None) -> Iterator[Server]:
    """options: of `meshwright serve`. blocks: of the KV cache, for a decoder."""
    process, address = serve(model, *options, blocks=blocks)
    try:
        with httpx.Client(base_url=address, timeout=30, headers={"authorization": f"Bearer {KEY}"}) as http:
            yield Server(process, http, int(address.rpartition(":")[2]), None)
    finally:
        process.kill()
        process.communicate()
