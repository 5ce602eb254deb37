"""Where the launchers of one run meet: checked before anything is started, so that a wrong address fails at once."""

from __future__ import annotations

import errno
import hashlib
import socket
import subprocess
import sys
import uuid
from dataclasses import dataclass

from meshwright.errors import DeviceError, Finding

__all__ = ["Rendezvous", "parse_endpoint", "prepare"]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Rendezvous:
    """endpoint: host:port for the agent; port 0 lets the kernel choose. host: whether this machine holds the store.
    address: by which the other machines reach this one. interface: the network interface that has it ("" if unknown).
    """

    endpoint: str
    host: bool
    address: str
    interface: str
    run_id: str


def parse_endpoint(text: str) -> tuple[str, int]:
    """ "HOST:PORT" or "[v6]:PORT" as (host, port); DeviceError if it is neither."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise DeviceError(
            findings=[Finding(f"--rdzv {text}", "is no HOST:PORT with a port in 1..65535", "For example node0:29400")]
        )
    return host, int(port)


def prepare(nnodes: int, endpoint: str | None) -> Rendezvous:
    """Check the meeting place and say how this machine takes part.

    One machine: a free port of the loopback unless one is named. Raises DeviceError if the named port is taken, the host is
    unknown, or what answers there is no rendezvous.
    """
    if endpoint is None:
        if nnodes > 1:
            fix = "Give --rdzv HOST:PORT, with an address of one of the machines that all of them reach"
            raise DeviceError(findings=[Finding("--rdzv", f"{nnodes} machines have to meet somewhere", fix)])
        return Rendezvous(f"{LOOPBACK}:0", True, LOOPBACK, _interface(LOOPBACK), uuid.uuid4().hex)
    host, port = parse_endpoint(endpoint)
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise DeviceError(findings=[Finding(f"--rdzv {endpoint}", f"the host {host!r} is not known here: {error}")]) from None
    mine = _route(str(address), port)
    here = mine == address or str(address).startswith("127.")
    if here and (taken := _taken(port)) is not None:
        if nnodes == 1 or not _is_store(host, port):
            fix = "Choose another port, or leave --rdzv out on one machine: a free one is taken then"
            raise DeviceError(
                findings=[Finding(f"--rdzv {endpoint}", f"port {port} is taken by another program ({taken})", fix)]
            )
        here = False  # another launcher of this run holds the store on this machine
    run_id = uuid.uuid4().hex if nnodes == 1 else hashlib.sha256(f"{endpoint} {nnodes}".encode()).hexdigest()[:32]
    return Rendezvous(endpoint, here, mine, _interface(mine), run_id)


def _route(address: str, port: int) -> str:
    """This machine's own address on the way to `address`. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            where = f"--rdzv {address}:{port}"
            raise DeviceError(findings=[Finding(where, f"there is no way to it from here: {error.strerror}")]) from None
        return str(probe.getsockname()[0])


def _interface(address: str) -> str:
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return ""


def _taken(port: int) -> str | None:
    """Why the port cannot be listened on, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            return "address in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
    return None


_ASK = """
import datetime, signal, sys
from torch.distributed import TCPStore
signal.alarm(6)
TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, timeout=datetime.timedelta(seconds=5), wait_for_workers=False)
"""
"""The store's own timeout does not end a wait for somebody who listens and says nothing; the alarm does."""


def _is_store(host: str, port: int) -> bool:
    """Asked by a process of its own, for torch writes pages to stderr where something else answers."""
    asked = subprocess.run([sys.executable, "-c", _ASK, host, str(port)], stdin=subprocess.DEVNULL, capture_output=True)
    return asked.returncode == 0
