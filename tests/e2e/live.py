"""A server of a tiny model, started as a user starts it: `with live(folder(path), "--max-queue", "2") as here:`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.e2e.test_serve_command import serve
from tests.e2e.test_serve_process import Server

__all__ = ["KEY", "Live", "live"]

KEY = "s3cret"
"""The key that `serve` puts into the environment of the command."""


@dataclass
class Live(Server):
    """said: lines of its stderr since it was ready."""

    said: list[str] = field(default_factory=list)


@contextmanager
def live(model: Path, *options: str, blocks: int | None = None) -> Iterator[Live]:
    """options: of `meshwright serve`. blocks: of the KV cache, for a decoder."""
    process, address = serve(model, *options, blocks=blocks)
    try:
        with httpx.Client(base_url=address, timeout=30, headers={"authorization": f"Bearer {KEY}"}) as http:
            here = Live(process, http, int(address.rpartition(":")[2]), None)
            assert process.stderr is not None
            reader = threading.Thread(target=here.said.extend, args=(process.stderr,), daemon=True)
            reader.start()  # a pipe that nobody reads would stop a server that says much
            yield here
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            reader.join()
            process.stderr.close()
