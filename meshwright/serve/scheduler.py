"""What the next step computes. Pure bookkeeping: no torch, no clock.

Requests wait in the order of (priority, arrival). A step has a budget of tokens:

    1. every sequence that has its prompt behind it gets its next token
    2. prompts that are under way get as many tokens as the budget leaves (a long one takes several steps)
    3. waiting ones begin, where there is room for all of their tokens at once, and a block more for each running one

A sequence that needs a block where none is left takes those of the running one that comes last, which waits again and later
computes anew what the prefix cache has not kept. The first in the order always gets on, so everyone ends, unless requests of
a smaller priority number never cease to come.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

from meshwright.errors import Finding, UserError
from meshwright.serve.cache import BlockPool, block_digest
from meshwright.serve.request import Request

__all__ = ["Scheduler", "Sequence", "Work"]


@dataclass(eq=False)
class Sequence:
    """A request under way.

    tokens    prompt and answer so far
    computed  of them have keys and values in `blocks`
    digests   of the full blocks among those
    seat      number among those that run, of no two the same; -1 while it waits
    out       steps that are not done and have work of it
    """

    request: Request
    number: int
    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    seat: int = -1
    out: int = 0

    @property
    def order(self) -> tuple[int, float, int]:
        return self.request.priority, self.request.arrival, self.number

    @property
    def prompt_len(self) -> int:
        return len(self.request.tokens)

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def answered(self) -> int:
        return len(self.tokens) - self.prompt_len


@dataclass(frozen=True)
class Work:
    """Tokens [start, start + count) of a sequence.

    last  the newest token is among them, so its logits give the next
    feed  of a token that nobody knows yet, which of those it is that the step before chooses; -1: known
    """

    sequence: Sequence
    start: int
    count: int
    last: bool
    feed: int = -1


class Scheduler:
    """waiting: sequences in their order. running: those that have blocks. preemptions: how often one had to give them back.
    lanes: steps that are computed at the same time, as by the stages of a pipeline; each then has its share of the sequences.
    """

    def __init__(self, pool: BlockPool, *, max_running: int, token_budget: int, lanes: int = 1):
        findings = [
            Finding(name, f"{value!r} is not a whole number >= 1")
            for name, value in (("max_running", max_running), ("token_budget", token_budget), ("lanes", lanes))
            if not isinstance(value, int) or isinstance(value, bool) or value < 1
        ]
        if findings:
            raise UserError(findings=findings)
        self.pool, self.max_running, self.token_budget, self.lanes = pool, max_running, token_budget, lanes
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._numbers = 0
        self._seats = list(range(max_running - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> Sequence:
        """Queue it. The pool must be able to hold its prompt and answer: whoever adds checks that."""
        sequence = Sequence(request, self._numbers, list(request.tokens))
        self._numbers += 1
        self._wait(sequence)
        return sequence

    def schedule(self) -> list[Work]:
        """The work of a step; empty only where nothing can be done before the work that is out is `done`. Blocks for it are in
        `Sequence.blocks`."""
        plan: list[Work] = []
        left, before = self.token_budget, self.preemptions
        most = -(-min(len(self.running) + len(self.waiting), self.max_running) // self.lanes)
        running = sorted((s for s in self.running if not s.out), key=lambda sequence: sequence.order)
        for decoding in (True, False):
            for sequence in running:
                missing = len(sequence.tokens) - sequence.computed
                count = min(missing, left)
                if len(plan) == most or not count or (missing == 1) is not decoding:
                    continue
                if self._make_room(sequence, sequence.computed + count):
                    plan.append(self._send_out(sequence, count))
                    left -= count
        if self.preemptions == before:  # what was just given up is for those that run
            while left and self.waiting and len(plan) < most and len(self.running) < self.max_running:
                sequence = self.waiting[0]
                if not self._begin(sequence):
                    break
                count = min(len(sequence.tokens) - sequence.computed, left)
                plan.append(self._send_out(sequence, count))
                left -= count
        return plan

    def ahead(self, work: list[Work]) -> list[Work]:
        """The step after `work`, which is out, as far as it is certain before that is done: one token more of each sequence.
        For one that turns out to end it is computed for nothing. Empty where something else comes first: a prompt is not done
        or could begin, or blocks are short."""
        fed = [(row, item) for row, item in enumerate(work) if item.sequence.blocks]
        if len(fed) != len(self.running) or not all(item.last for item in work):
            return []
        if self.waiting and len(self.running) < self.max_running and self._fits(self.waiting[0]) is not None:
            return []
        fed = [(row, item) for row, item in fed if item.sequence.answered + 1 < item.sequence.request.params.max_tokens]
        needed = [self.pool.needed(item.start + item.count + 1) - len(item.sequence.blocks) for _, item in fed]
        if sum(needed) > self.pool.available:
            return []
        for (_, item), count in zip(fed, needed, strict=True):
            if count:
                item.sequence.blocks += self.pool.take(count) or []
            item.sequence.out += 1
        return [Work(item.sequence, item.start + item.count, 1, True, row) for row, item in fed]

    def _send_out(self, sequence: Sequence, count: int) -> Work:
        sequence.out += 1
        return Work(sequence, sequence.computed, count, sequence.computed + count == len(sequence.tokens))

    def done(self, work: Work) -> None:
        """The keys and values of this work are in the cache."""
        sequence, size = work.sequence, self.pool.block_size
        sequence.out -= 1
        sequence.computed = work.start + work.count
        while (len(sequence.digests) + 1) * size <= sequence.computed:
            index = len(sequence.digests)
            before = sequence.digests[-1] if index else b""
            sequence.digests.append(block_digest(before, sequence.tokens[index * size : (index + 1) * size]))
            self.pool.learn(sequence.blocks[index], sequence.digests[-1])

    def remove(self, sequence: Sequence) -> None:
        """It ended, or nobody wants it any more: its blocks are free at once."""
        self._release(sequence)
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    def check(self) -> None:
        """Raises AssertionError where sequences and blocks do not fit each other."""
        self.pool.check([sequence.blocks for sequence in self._all()])
        for sequence in self._all():
            assert sequence.computed <= len(sequence.blocks) * self.pool.block_size, "tokens without a block"
            assert len(sequence.digests) <= len(sequence.blocks)
        assert not any(sequence.blocks for sequence in self.waiting), "a waiting sequence has blocks"
        assert len(self.running) <= self.max_running
        assert len({sequence.seat for sequence in self.running}) == len(self.running), "two have one seat"

    def _all(self) -> Iterator[Sequence]:
        yield from self.waiting
        yield from self.running

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for so many tokens, at the cost of those that come last. False where it came last itself, or where the last
        one is out and must be waited for."""
        while sequence.blocks:
            taken = self.pool.take(self.pool.needed(tokens) - len(sequence.blocks))
            if taken is not None:
                sequence.blocks.extend(taken)
                return True
            last = max(self.running, key=lambda other: other.order)
            if last.out:
                break
            self._preempt(last)
        return False

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._release(sequence)
        self.running.remove(sequence)
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=lambda sequence: sequence.order)

    def _release(self, sequence: Sequence) -> None:
        self.pool.give_back(sequence.blocks)
        sequence.blocks, sequence.digests, sequence.computed = [], [], 0
        if sequence.seat >= 0:
            self._seats.append(sequence.seat)
            sequence.seat = -1

    def _fits(self, sequence: Sequence) -> list[tuple[int, bytes]] | None:
        """What is known of its tokens, where there is room for it; else None."""
        found = self.pool.find(sequence.tokens)
        fresh = self.pool.needed(len(sequence.tokens)) - len(found)
        room = self.pool.available - self.pool.idle_among(block for block, _ in found) - len(self.running)
        return found if fresh <= room else None

    def _begin(self, sequence: Sequence) -> bool:
        """Moves it to the running ones with blocks for all of its tokens; False where there is no room."""
        pool, found = self.pool, self._fits(sequence)
        if found is None:
            return False
        known = [block for block, _ in found]
        pool.hold(known)
        taken = pool.take(pool.needed(len(sequence.tokens)) - len(known))
        assert taken is not None
        sequence.seat = self._seats.pop()
        sequence.blocks = known + taken
        sequence.digests = [digest for _, digest in found]
        sequence.computed = len(known) * pool.block_size
        pool.hits += sequence.computed
        pool.asked += len(sequence.tokens)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True
