"""The process: uvicorn in front of the application, signals that drain it, and an exit code that tells how it ended."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from meshwright.errors import DeviceError, Finding
from meshwright.serve.contract import Engine
from meshwright.serve.gate import Keys
from meshwright.serve.http import Limits, create_app
from meshwright.serve.service import Service

__all__ = ["ServerOptions", "reserve", "run_server"]

HEADER_S = 10.0
"""A connection that has not sent the head of a request within so many seconds is closed."""
LAST_S = 5.0
"""After the drain: for the last bytes of answers that are made."""
OTHER_HOST = "Name one that it has, as 127.0.0.1, or 0.0.0.0 for all"
OTHER_PORT = "Name another port; 0 takes a free one"


@dataclass(frozen=True)
class ServerOptions:
    """max_queue, max_queue_tokens, stall_s: of `Service`. drain_s: after SIGTERM, for requests that are under way.

    port 0 takes a free one.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: Keys | None = None
    max_queue: int = 256
    max_queue_tokens: int = 1 << 18
    drain_s: float = 30.0
    stall_s: float = 60.0
    limits: Limits = field(default_factory=Limits)


class Impatient(H11Protocol):
    """uvicorn's HTTP, which would wait for the head of a request for ever."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._forget()
        elif before is not None and before.response_complete:
            self._wait()  # the beginning of another request on a connection that is kept

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEADER_S, self.transport.close)

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class DrainingServer(uvicorn.Server):
    """First SIGTERM or SIGINT: take no more requests and finish those under way. A second one ends at once."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_s: float):
        super().__init__(config)
        self.service, self.drain_s = service, drain_s
        self.signal: int | None = None
        self.cut = 0
        """Requests that the deadline cut off."""
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # a signal handler runs between any two instructions: all else is left to the event loop
        asyncio.get_running_loop().call_soon_threadsafe(self.stop, sig)

    def stop(self, sig: int) -> None:
        if self._draining is None:
            self.signal = sig
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self.force_exit = self.should_exit = True

    def fail(self) -> None:
        """The engine failed: tell those who wait, and end."""
        self.should_exit = True

    async def _drain(self) -> None:
        print("stopping: no more requests are taken", file=sys.stderr, flush=True)
        self.cut = await self.service.drain(self.drain_s)
        self.should_exit = True


def run_server(engine: Engine, options: ServerOptions, listener: socket.socket, *, say: Callable[[str], None] = print) -> int:
    """Serve until a signal or a failure. The exit code: 0 all requests were answered after SIGTERM, 143 the deadline cut some
    off, 130 Ctrl-C, 1 the engine failed.

    listener: of `reserve`. It and the engine are closed at the end in any case. Raises DeviceError when another process was
    the first to listen there.
    """
    try:
        _listen(listener, options.host, options.port)
    except BaseException:
        engine.close()
        raise
    with listener:
        return asyncio.run(_serve(engine, options, listener, say))


async def _serve(engine: Engine, options: ServerOptions, listener: socket.socket, say: Callable[[str], None]) -> int:
    service = Service(
        engine, max_waiting=options.max_queue, max_waiting_tokens=options.max_queue_tokens, stall_s=options.stall_s
    )
    app = create_app(service, keys=options.keys, limits=options.limits)
    config = uvicorn.Config(
        app,
        http=Impatient,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(LAST_S),
    )
    server = DrainingServer(config, service, options.drain_s)
    service.on_failure(lambda reason: server.fail())
    service.start()
    host, port = listener.getsockname()[:2]
    who = "with a key" if options.keys else "open to all who reach it"
    say(f"ready: http://{_address(host, port)}  model {engine.model_name}  {who}")
    try:
        await server.serve(sockets=[listener])
    finally:
        await service.close()
    if service.failure is not None:
        print(f"the engine failed: {service.failure}", file=sys.stderr, flush=True)
        return 1
    if server.signal == signal.SIGINT:
        return 130
    if server.cut:
        print(f"{server.cut} requests were cut off after {options.drain_s:g} s", file=sys.stderr, flush=True)
        return 143
    return 0


def reserve(host: str, port: int) -> socket.socket:
    """A socket that has the address and does not listen yet: until it does, who connects is refused and need not wait.

    Raises DeviceError where the host is none of this machine or the port cannot be had.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, number)
    except (OSError, UnicodeError) as error:
        what = f"{host} is no address of this machine: {getattr(error, 'strerror', None) or error}"
        raise DeviceError(findings=[Finding("--host", what, OTHER_HOST)]) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _refused(host, port, error) from None
    return listener


def _listen(listener: socket.socket, host: str, port: int) -> None:
    """Of two that have reserved the same port the second one to listen is refused."""
    try:
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _refused(host, port, error) from None


def _refused(host: str, port: int, error: OSError) -> DeviceError:
    if error.errno == errno.EADDRNOTAVAIL:
        return DeviceError(findings=[Finding("--host", f"{host} is no address of this machine", OTHER_HOST)])
    why = "is in use by another process" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
    fix = "End that process, or name another port; 0 takes a free one" if error.errno == errno.EADDRINUSE else OTHER_PORT
    return DeviceError(findings=[Finding("--port", f"{_address(host, port)} {why}", fix)])


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
