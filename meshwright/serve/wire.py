"""What replicas of a model say to each other: a line of JSON each, over a connection of the loopback.

    to a replica     ["add", WORK] | ["abort", ID] | ["end"]
    from a replica   {"seen": N, "outputs": [...], "stats": {...}} after every step | {"failure": REASON}

WORK is [id, tokens, kind, top] of an encoder, [id, tokens, settings that are no defaults, priority, arrival] of a decoder; an
output is the list of its fields. The clock of `arrival` is the machine's, so it means the same to all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import MeshwrightError
from meshwright.serve.encoder_work import EncoderOutput, EncoderWork
from meshwright.serve.request import Logprob, Output, Request
from meshwright.serve.sampling import SamplingParams

__all__ = ["Command", "Line", "Said", "asked_tokens", "meet"]

Command = tuple[str, Any]
""" ("add", work), ("abort", id) or ("end", None)."""
MEET_S = 60.0
"""Seconds in which every replica must have called the first one; they do so at the same point of their start."""
HELLO_BYTES = 256
_DEFAULTS = SamplingParams()
_FIELDS = tuple(item.name for item in dataclasses.fields(SamplingParams))


@dataclass(frozen=True)
class Said:
    """What a replica says after a step. seen: commands that it had carried out before. failure: why it ends."""

    seen: int = 0
    outputs: Sequence[Any] = ()
    stats: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None


def asked_tokens(work: Any) -> int:
    """Tokens of the prompt, and the most that the answer may have."""
    return len(work.tokens) + (work.params.max_tokens if isinstance(work, Request) else 0)


class Line:
    """One end of a connection. Two threads may use it, one that sends and one that receives."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection

    def command(self, command: Command) -> None:
        """Raises OSError when the other end is gone."""
        kind, value = command
        self._send([kind, _work_row(value) if kind == "add" else value])

    def commands(self) -> Iterator[Command]:
        """Until the other end is gone."""
        for kind, value in self._lines():
            yield kind, _work(value) if kind == "add" else value

    def say(self, said: Said) -> None:
        """Raises OSError when the other end is gone."""
        if said.failure is not None:
            self._send({"failure": said.failure})
        else:
            rows = [_output_row(output) for output in said.outputs]
            self._send({"seen": said.seen, "outputs": rows, "stats": said.stats})

    def heard(self) -> Iterator[Said]:
        """Until the other end is gone."""
        for row in self._lines():
            if "failure" in row:
                yield Said(failure=row["failure"])
            else:
                yield Said(row["seen"], [_output(output) for output in row["outputs"]], row["stats"])

    def close(self) -> None:
        """Both ends' iterators end. Harmless where it is closed already."""
        with contextlib.suppress(OSError):  # the other end was faster
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _send(self, value: Any) -> None:
        self._connection.sendall(json.dumps(value, separators=(",", ":")).encode() + b"\n")

    def _lines(self) -> Iterator[Any]:
        try:
            with self._connection.makefile("rb") as file:
                for line in file:
                    if not line.endswith(b"\n"):  # the other end died while it wrote
                        return
                    yield json.loads(line)
        except (OSError, ValueError):  # reset; or closed by this end, in another thread
            return


def meet(control: dist.ProcessGroup, rank: int, callers: Sequence[int]) -> list[Line]:
    """Connections between the first rank and each of `callers`, in this order; on a caller its own one, elsewhere none.

    control: all ranks, over the CPU. Collective. The address and a secret go over it, so nobody else can answer or ask.
    Raises MeshwrightError where a caller does not come in time.
    """
    with socket.socket() as listener:
        word = torch.zeros(34, dtype=torch.uint8)
        if not rank:
            listener.bind(("127.0.0.1", 0))
            listener.listen(len(callers) + 8)
            listener.settimeout(MEET_S)
            port = listener.getsockname()[1]
            word = torch.tensor([port >> 8, port & 255, *secrets.token_bytes(32)], dtype=torch.uint8)
        dist.broadcast(word, group=control, group_src=0)
        high, low, *secret = word.tolist()
        if not rank:
            return _accept(listener, bytes(secret).hex(), callers)
    if rank not in callers:
        return []
    connection = socket.create_connection(("127.0.0.1", high << 8 | low), MEET_S)
    connection.sendall(f"{bytes(secret).hex()} {rank}\n".encode())
    connection.settimeout(None)
    return [Line(connection)]


def _accept(listener: socket.socket, secret: str, callers: Sequence[int]) -> list[Line]:
    lines: dict[int, Line] = {}
    while len(lines) < len(callers):
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            missing = [rank for rank in callers if rank not in lines]
            raise MeshwrightError(f"ranks {missing} did not call the first one within {MEET_S:g} s") from None
        rank = _caller(connection, secret)
        if rank in callers and rank not in lines:
            lines[rank] = Line(connection)
        else:
            connection.close()
    return [lines[rank] for rank in callers]


def _caller(connection: socket.socket, secret: str) -> int:
    """Rank of who called; -1 for one that does not know the secret."""
    connection.settimeout(5.0)
    hello = b""
    try:
        while not hello.endswith(b"\n") and len(hello) < HELLO_BYTES:
            part = connection.recv(HELLO_BYTES - len(hello))
            if not part:
                return -1
            hello += part
        known, _, rank = hello.decode("ascii").strip().partition(" ")
        connection.settimeout(None)
        return int(rank) if hmac.compare_digest(known, secret) else -1
    except (OSError, ValueError, TypeError):
        return -1


def _work_row(work: Any) -> list[Any]:
    if isinstance(work, EncoderWork):
        return [work.id, work.tokens, work.kind, work.top]
    params = work.params
    given = {key: value for key in _FIELDS if (value := getattr(params, key)) != getattr(_DEFAULTS, key)}
    if "logit_bias" in given:  # keys of a JSON object are text
        given["logit_bias"] = list(given["logit_bias"].items())
    return [work.id, work.tokens, given, work.priority, work.arrival]


def _work(row: list[Any]) -> EncoderWork | Request:
    if isinstance(row[2], str):
        return EncoderWork(row[0], tuple(row[1]), row[2], row[3])
    given = row[2]
    if "logit_bias" in given:
        given["logit_bias"] = dict(map(tuple, given["logit_bias"]))
    return Request(row[0], tuple(row[1]), SamplingParams(**given), row[3], row[4])


def _output_row(output: Any) -> list[Any]:
    if isinstance(output, EncoderOutput):
        return [output.id, output.value, output.finish]
    if output.logprobs is None:
        return [output.id, output.tokens, output.text, output.finish]
    logprobs = [(one.token, one.logprob, one.top) for one in output.logprobs]
    return [output.id, output.tokens, output.text, output.finish, logprobs]


def _output(row: list[Any]) -> EncoderOutput | Output:
    if len(row) == 3:
        return EncoderOutput(row[0], row[1], finish=row[2])
    if len(row) == 4:
        return Output(*row)
    logprobs = [Logprob(token, logprob, tuple(map(tuple, top))) for token, logprob, top in row[4]]
    return Output(row[0], row[1], row[2], row[3], logprobs)
