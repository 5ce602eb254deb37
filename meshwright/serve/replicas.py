"""Several copies of a model behind one queue: each computes on its own, and a new request goes to the one with the least to do.

    step of a service ── add, abort ──> replica 0: a thread of this process
                                        replica 1: another rank, over a `Line`
                      <── what the steps gave, in the order of their coming ──

No replica waits for another one, or for this process: it carries out what it was told since its last step, steps, says what
that gave, and is silent when it has nothing to do.

Which one gets a request: the one with the fewest outstanding tokens, prompts that are not computed and tokens that answers may
still have; a replica that had a prompt with the same beginning counts as having so many tokens less, as it may have them in its
cache. So a prefix is worth the tokens that it saves, and no more; of equals the first.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from meshwright.errors import Finding, MeshwrightError, UserError
from meshwright.serve.contract import Engine, reason_of
from meshwright.serve.request import Request
from meshwright.serve.wire import Command, Line, Said, asked_tokens

__all__ = ["Prefixes", "Replicas", "converse", "follow_line"]

WAIT_S = 0.005
"""A step without news ends after it, so that what was ordered meanwhile does not wait for a replica's long step."""
CLOSE_S = 5.0
"""For the last step of the replica in this process, when all are told to end."""
UNIT = 64
"""Tokens in which beginnings of prompts are remembered."""
KNOWN = 1 << 16
"""Beginnings that are remembered."""
SHARES = ("kv_used",)
"""Figures of an engine that are no sums."""


def converse(engine: Engine, inbox: SimpleQueue[Command], tell: Callable[[Said], None]) -> None:
    """A replica's life: commands, a step, what it gave, and again, until the command "end". The engine is closed at the end.

    A failure is told, and raised.
    """
    seen = 0
    try:
        while True:
            for kind, value in _ordered(inbox, wait=not engine.has_work):
                seen += 1
                if kind == "end":
                    engine.close()
                    return
                if kind == "add":
                    engine.add(value)
                else:
                    engine.abort(value)
            outputs = engine.step() if engine.has_work else ()
            tell(Said(seen, outputs, dict(engine.stats())))
    except BaseException as error:
        with contextlib.suppress(Exception):  # what its ranks died of is told; nobody may be there to hear it
            tell(Said(failure=reason_of(error)))
        with contextlib.suppress(Exception):
            engine.close()
        raise


def follow_line(engine: Engine, line: Line) -> None:
    """`converse` with the first replica's process, until that says so or is gone."""
    inbox: SimpleQueue[Command] = SimpleQueue()

    def listen() -> None:
        for command in line.commands():
            inbox.put(command)
        inbox.put(("end", None))

    threading.Thread(target=listen, name="commands", daemon=True).start()
    try:
        converse(engine, inbox, line.say)
    finally:
        line.close()


def _ordered(inbox: SimpleQueue[Command], wait: bool) -> list[Command]:
    """What is there; with `wait` at least one."""
    found = [inbox.get()] if wait else []
    while not inbox.empty():
        found.append(inbox.get())
    return found


class Prefixes:
    """Which replica last had a prompt that begins in the same way, in whole units of UNIT tokens."""

    def __init__(self, most: int = KNOWN):
        self.most = most
        self._had: OrderedDict[int, int] = OrderedDict()

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(replica, tokens of the longest beginning that is known); (-1, 0) where none is."""
        found = -1, 0
        for count, key in enumerate(self._keys(tokens), 1):
            replica = self._had.get(key)
            if replica is None:
                break
            found = replica, count * UNIT
        return found

    def note(self, tokens: Sequence[int], replica: int) -> None:
        for key in self._keys(tokens):
            self._had[key] = replica
            self._had.move_to_end(key)
        while len(self._had) > self.most:
            self._had.popitem(last=False)

    @staticmethod
    def _keys(tokens: Sequence[int]) -> list[int]:
        """Hashes, each of all tokens up to there. Two that are equal by chance send a request to a busier replica at worst."""
        keys, before = [], 0
        for start in range(0, len(tokens) - UNIT + 1, UNIT):
            before = hash((before, *tokens[start : start + UNIT]))
            keys.append(before)
        return keys


@dataclass(eq=False)
class _Replica:
    """What is known of one here. told, seen: commands sent, and carried out. load: outstanding tokens of `requests` requests.
    since: when it last said something, or got work while it had none."""

    post: Callable[[Command], None]
    told: int = 0
    seen: int = 0
    load: int = 0
    requests: int = 0
    since: float = 0.0
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        return self.requests > 0 or self.told > self.seen


@dataclass(eq=False)
class _Under:
    """A request under way. number: of the command that added it. left: its outstanding tokens."""

    replica: _Replica
    number: int
    prompt: int
    left: int
    first: bool = True


class Replicas:
    """An engine of the service's contract over the engine of this process and those at the other ends of `lines`.

    All are alike: what this process's engine can have, every one can. `stats` has the sums of their figures, and of replica N
    replica.N.requests, replica.N.tokens (outstanding), replica.N.kv_used; silent_s: how long one that has work has said
    nothing. A replica that fails or goes away raises MeshwrightError at the next step; `failure` says why.
    """

    def __init__(self, engine: Engine, lines: Sequence[Line] = ()):
        self.tokenizer, self.model_name, self.max_len = engine.tokenizer, engine.model_name, engine.max_len
        self.tasks = getattr(engine, "tasks", frozenset({"generate"}))
        self.labels = getattr(engine, "labels", ())
        self._engine, self._lines = engine, lines
        self._news = threading.Condition()
        self._heard: list[tuple[_Replica, Said]] = []
        self.failure: str | None = None
        self._closing = False
        self._under: dict[str, _Under] = {}
        self._prefixes = Prefixes()
        inbox: SimpleQueue[Command] = SimpleQueue()
        self._replicas = [_Replica(inbox.put)] + [_Replica(line.command) for line in lines]
        self._local = threading.Thread(target=self._converse, args=(inbox,), name="replica 0", daemon=True)
        self._local.start()
        for index, line in enumerate(lines, 1):
            threading.Thread(target=self._listen, args=(index, line), name=f"replica {index}", daemon=True).start()

    # ---- the contract of an engine

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to say, or may have: also where a replica failed that had nothing to do."""
        return bool(self._under) or self.failure is not None or any(replica.busy for replica in self._replicas)

    def check(self, request: Any) -> None:
        """Raises UserError for a request that no replica can have."""
        if request.id in self._under:
            raise UserError(findings=[Finding("id", f"{request.id!r} is under way", "Give every request an id of its own")])
        self._engine.check(request)

    def add(self, request: Any) -> None:
        """Send it to the replica that has the least to do. Raises UserError."""
        self.check(request)
        index = self._choice(request)
        replica, cost = self._replicas[index], asked_tokens(request)
        if isinstance(request, Request):
            self._prefixes.note(request.tokens, index)
        self._tell(index, ("add", request))
        self._under[request.id] = _Under(replica, replica.told, len(request.tokens), cost)
        replica.load += cost
        replica.requests += 1

    def abort(self, id: str) -> None:
        """No output of it comes any more. Nothing happens where it is not under way."""
        under = self._under.pop(id, None)
        if under is not None:
            self._forget(under)
            self._tell(self._replicas.index(under.replica), ("abort", id))

    def step(self) -> list[Any]:
        """What replicas have said since; where they said nothing, what they say within WAIT_S."""
        with self._news:
            if not self._heard and self.failure is None:
                self._news.wait(WAIT_S)
            if self.failure is not None:
                raise MeshwrightError(self.failure)
            heard, self._heard = self._heard, []
        return [output for replica, said in heard for output in self._taken(replica, said)]

    def stats(self) -> dict[str, float]:
        now, found = time.monotonic(), dict[str, float]()
        for replica in self._replicas:
            for name, value in replica.stats.items():
                found[name] = found.get(name, 0) + value
        for name in SHARES:
            if name in found:
                found[name] /= len(self._replicas)  # all have a cache of the same size
        found["silent_s"] = max(now - replica.since if replica.busy else 0.0 for replica in self._replicas)
        for index, replica in enumerate(self._replicas):
            figures = {"requests": replica.requests, "tokens": replica.load, "kv_used": replica.stats.get("kv_used", 0.0)}
            found.update({f"replica.{index}.{name}": value for name, value in figures.items()})
        return found

    def close(self) -> None:
        """Every replica ends after at most one more step; of those in other processes that is not waited for."""
        self._closing = True
        for index in range(len(self._replicas)):
            self._tell(index, ("end", None))
        self._local.join(CLOSE_S)

    # ---- the rest is between this process and the replicas

    def _choice(self, request: Any) -> int:
        holder, known = self._prefixes.find(request.tokens) if isinstance(request, Request) else (-1, 0)
        loads = [replica.load - (known if index == holder else 0) for index, replica in enumerate(self._replicas)]
        return loads.index(min(loads))

    def _tell(self, index: int, command: Command) -> None:
        replica = self._replicas[index]
        if not replica.busy:
            replica.since = time.monotonic()
        replica.told += 1
        try:
            replica.post(command)
        except OSError:
            self._lost(index)

    def _taken(self, replica: _Replica, said: Said) -> list[Any]:
        """Its outputs but those that nobody waits for any more, with the books brought up to date."""
        replica.seen, replica.stats, replica.since = said.seen, dict(said.stats), time.monotonic()
        outputs = []
        for output in said.outputs:
            under = self._under.get(output.id)
            if under is None or under.replica is not replica or under.number > said.seen:  # of one that was aborted
                continue
            outputs.append(output)
            done = len(output.tokens) + (under.prompt if under.first else 0)
            under.first = False
            under.left -= done
            replica.load -= done
            if output.finish is not None:
                self._forget(self._under.pop(output.id))
        return outputs

    def _forget(self, under: _Under) -> None:
        under.replica.load -= under.left
        under.replica.requests -= 1

    def _converse(self, inbox: SimpleQueue[Command]) -> None:
        with contextlib.suppress(BaseException):  # it is told
            converse(self._engine, inbox, lambda said: self._hear(0, said))

    def _listen(self, index: int, line: Line) -> None:
        for said in line.heard():
            self._hear(index, said)
        self._lost(index)
        line.close()

    def _hear(self, index: int, said: Said) -> None:
        if said.failure is not None:
            self._fail(f"replica {index}: {said.failure}")
            return
        with self._news:
            self._heard.append((self._replicas[index], said))
            self._news.notify()

    def _lost(self, index: int) -> None:
        self._fail(f"replica {index} is gone: connection closed by peer")

    def _fail(self, reason: str) -> None:
        """The first reason counts."""
        with self._news:
            if self.failure is None and not self._closing:
                self.failure = reason
            self._news.notify()
