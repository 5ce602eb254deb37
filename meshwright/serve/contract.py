"""What a service asks of an engine, and what it says when it cannot serve. `LLMEngine`, `EncoderEngine`, `Replicas` fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import MeshwrightError

__all__ = ["Busy", "Engine", "NotReady", "Output", "Work", "reason_of"]


class Work(Protocol):
    """What an engine is given: a request for text, or a row for an encoder."""

    @property
    def id(self) -> str: ...

    @property
    def tokens(self) -> Sequence[int]: ...


class Output(Protocol):
    """What a step gave a request. tokens, text: new ones only. finish: why it ended, None while it goes on."""

    @property
    def id(self) -> str: ...

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def text(self) -> str: ...

    @property
    def finish(self) -> str | None: ...

    @property
    def logprobs(self) -> Any: ...


class Engine(Protocol):
    """What a service drives. All methods are called from one thread, `check` from any.

    check  raises UserError for a request that it cannot have
    add    takes a request, after the same check
    abort  forgets a request and frees what it held
    step   one round of work; the outputs of the requests that moved
    stats  figures after the last step: `kv_used`, the share of the KV cache in use; where its work is done elsewhere,
           `silent_s`, how long nothing was heard of it
    close  ends whatever runs for the engine
    """

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def model_name(self) -> str: ...

    @property
    def max_len(self) -> int: ...

    @property
    def has_work(self) -> bool: ...

    def check(self, request: Any) -> None: ...

    def add(self, request: Any) -> None: ...

    def abort(self, id: str) -> None: ...

    def step(self) -> Sequence[Any]: ...

    def stats(self) -> Mapping[str, float]: ...

    def close(self) -> None: ...


class Busy(MeshwrightError):
    """The queue is full. retry_after: whole seconds after which it is worth trying again."""

    def __init__(self, message: str, retry_after: int):
        super().__init__(message)
        self.retry_after = retry_after


class NotReady(MeshwrightError):
    """The service takes no requests, or cannot finish the ones that it has: it stops, or its engine failed."""


def reason_of(error: BaseException) -> str:
    """One line: what went wrong, and for a failure of ours its type."""
    text = " ".join(str(error).split())
    if isinstance(error, MeshwrightError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
