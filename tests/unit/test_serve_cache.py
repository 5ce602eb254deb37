"""Block pool and scheduler: no block is lost or given twice, a found prefix is the right one, everyone ends."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import UserError
from meshwright.serve.cache import BlockPool, block_digest
from meshwright.serve.request import Request
from meshwright.serve.sampling import SamplingParams
from meshwright.serve.scheduler import Scheduler, Sequence, Work


def test_blocks_come_back_and_the_oldest_idle_one_is_forgotten():
    pool = BlockPool(3, 2)
    first = pool.take(2)
    assert first is not None and pool.take(2) is None and pool.held == 2
    one = block_digest(b"", [1, 2])
    pool.learn(first[0], one)
    pool.learn(first[1], block_digest(one, [3, 4]))
    pool.give_back(first)
    assert pool.available == 3
    assert [block for block, _ in pool.find([1, 2, 3, 4, 5])] == first
    assert [block for block, _ in pool.find([1, 2, 3, 4])] == first[:1]  # the last token is always computed
    assert pool.find([1, 2]) == [] and pool.find([2, 1, 3]) == []
    pool.take(2)  # the free one, and the idle one that is useless without the other
    assert [block for block, _ in pool.find([1, 2, 3, 4, 5])] == first[:1]
    pool.check()


def test_the_digest_is_of_all_tokens_before():
    # Mutation tried: the digest of a block without the one before it: red.
    pool = BlockPool(4, 2)
    blocks = pool.take(2)
    assert blocks is not None
    one = block_digest(b"", [1, 2])
    pool.learn(blocks[0], one)
    pool.learn(blocks[1], block_digest(one, [7, 8]))
    assert pool.find([7, 8, 9]) == []
    assert block_digest(b"", [1, 2]) != block_digest(b"", [2, 1])


def test_without_prefix_cache_nothing_is_found():
    pool = BlockPool(4, 2, prefix=False)
    blocks = pool.take(1)
    assert blocks is not None
    pool.learn(blocks[0], block_digest(b"", [1, 2]))
    assert pool.find([1, 2, 3]) == []
    pool.give_back(blocks)
    pool.check([])


def test_refusals():
    with pytest.raises(UserError) as raised:
        BlockPool(0, True)
    assert [finding.where for finding in raised.value.findings] == ["blocks", "block_size"]
    with pytest.raises(UserError) as raised:
        Scheduler(BlockPool(1, 1), max_running=0, token_budget=0)
    assert [finding.where for finding in raised.value.findings] == ["max_running", "token_budget"]


class Store:
    """What a device would hold: of each slot, all tokens up to it. Notices when a sequence reads what is not its own."""

    def __init__(self, pool: BlockPool):
        self.size = pool.block_size
        self.slots: dict[int, tuple[int, ...]] = {}

    def compute(self, sequence: Sequence, start: int, count: int) -> None:
        slots = [sequence.blocks[p // self.size] * self.size + p % self.size for p in range(start + count)]
        for position in range(start):
            assert self.slots[slots[position]] == tuple(sequence.tokens[: position + 1]), "another sequence's keys"
        for position in range(start, start + count):
            self.slots[slots[position]] = tuple(sequence.tokens[: position + 1])


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[tuple[list[int], int, int, int]], int, int, int, int]:
    """(prompt, answer, priority, step it comes at) of requests; block size, blocks, running, budget. Two tokens only, so that
    prefixes meet."""
    size = draw(st.integers(1, 4))
    requests = draw(
        st.lists(
            st.tuples(
                st.lists(st.integers(0, 1), min_size=1, max_size=12), st.integers(1, 8), st.integers(0, 1), st.integers(0, 6)
            ),
            min_size=1,
            max_size=7,
        )
    )
    least = max(-(-(len(prompt) + answer - 1) // size) for prompt, answer, _, _ in requests)
    return requests, size, least + draw(st.integers(0, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 9))


@settings(max_examples=60, deadline=None)
@given(jobs(), st.booleans(), st.integers(1, 3), st.data())
def test_everyone_ends_and_no_block_is_lost(job, prefix: bool, lanes: int, data: st.DataObject):
    """Mutations tried: a preempted sequence keeps its blocks; `give_back` forgets a holder of a shared block; `_begin` counts
    an idle block of the prefix as free too, and keeps none for each running sequence; `find` may cover the whole prompt; a
    sequence that is out is scheduled again; `learn` of a block before it is full. Each is red."""
    requests, size, blocks, running, budget = job
    pool = BlockPool(blocks, size, prefix=prefix)
    scheduler = Scheduler(pool, max_running=running, token_budget=budget, lanes=lanes)
    store, answers, aborted = Store(pool), {}, set()
    wanted: dict[int, Sequence] = {}
    out: deque[list[Work]] = deque()
    step = 0
    while scheduler.has_work or step <= 6:
        for number, (prompt, answer, priority, at) in enumerate(requests):
            if at == step:
                params = SamplingParams(max_tokens=answer)
                wanted[number] = scheduler.add(Request(str(number), tuple(prompt), params, priority, float(number)))
        while len(out) < lanes and (work := scheduler.schedule()):
            scheduler.check()
            assert sum(item.count for item in work) <= budget and len({item.sequence for item in work}) == len(work)
            assert not {item.sequence for item in work} & {item.sequence for other in out for item in other}
            for item in work:
                assert item.start == item.sequence.computed and item.count > 0
                store.compute(item.sequence, item.start, item.count)
            out.append(work)
        assert bool(out) == scheduler.has_work, "something is under way, and nothing is done"
        for item in out.popleft() if out else ():
            sequence = item.sequence
            if sequence.request.id in aborted:
                continue
            scheduler.done(item)
            if item.last:
                sequence.tokens.append((sum(sequence.tokens) + len(sequence.tokens)) % 2)
                if sequence.answered >= sequence.request.params.max_tokens:
                    answers[sequence.request.id] = sequence.answer
                    scheduler.remove(sequence)
        if scheduler.has_work and data.draw(st.integers(0, 15)) == 0:
            gone = data.draw(st.sampled_from([*scheduler.running, *scheduler.waiting]))
            aborted.add(gone.request.id)
            scheduler.remove(gone)
        scheduler.check()
        if not scheduler.has_work:
            out.clear()  # of aborted ones alone
        step += 1
        assert step < 2000
    assert pool.held == 0
    assert answers.keys() | aborted == {str(number) for number in wanted}
    for number, (prompt, length, _, _) in enumerate(requests):
        if str(number) in answers:
            tokens = list(prompt)
            for _ in range(length):
                tokens.append((sum(tokens) + len(tokens)) % 2)
            assert answers[str(number)] == tokens[len(prompt) :]


def test_decoding_goes_before_prompts_and_the_first_keeps_its_place():
    pool = BlockPool(8, 2)
    scheduler = Scheduler(pool, max_running=4, token_budget=4)
    old = scheduler.add(Request("old", (1, 2), SamplingParams(), arrival=0.0))
    long = scheduler.add(Request("long", tuple(range(9)), SamplingParams(), arrival=1.0))
    work = scheduler.schedule()
    assert [(item.sequence, item.start, item.count, item.last) for item in work] == [(old, 0, 2, True), (long, 0, 2, False)]
    for item in work:
        scheduler.done(item)
    old.tokens.append(3)
    work = scheduler.schedule()
    assert [(item.sequence, item.start, item.count) for item in work] == [(old, 2, 1), (long, 2, 3)]


def test_priority_goes_before_arrival_and_the_last_one_gives_way():
    pool = BlockPool(3, 2)
    scheduler = Scheduler(pool, max_running=4, token_budget=8)
    late = scheduler.add(Request("late", (1, 2), SamplingParams(), priority=0, arrival=5.0))
    early = scheduler.add(Request("early", (3, 4), SamplingParams(), priority=1, arrival=0.0))
    assert scheduler.waiting == [late, early]
    for item in scheduler.schedule():
        scheduler.done(item)
        item.sequence.tokens.append(9)
    assert scheduler.running == [late, early]  # a block is left, and both need one
    assert [(item.sequence, item.start, item.count) for item in scheduler.schedule()] == [(late, 2, 1)]
    assert scheduler.waiting == [early] and early.blocks == [] and scheduler.preemptions == 1
    scheduler.check()
    scheduler.remove(late)
    (work,) = scheduler.schedule()
    assert (work.sequence, work.start, work.count) == (early, 2, 1)  # its first block was known


def test_known_blocks_that_nobody_holds_are_not_counted_as_free():
    scheduler = Scheduler(BlockPool(5, 2), max_running=4, token_budget=8)

    def add(id: str, *tokens: int) -> Sequence:
        return scheduler.add(Request(id, tokens, SamplingParams()))

    def step() -> list[Sequence]:
        work = scheduler.schedule()
        for item in work:
            scheduler.done(item)
        return [item.sequence for item in work]

    first = add("first", 1, 2, 3, 4)
    assert step() == [first]
    scheduler.remove(first)
    other = add("other", 9, 9)
    assert step() == [other]
    again = add("again", 1, 2, 3, 4, 5, 6, 7)  # four blocks, two of them known and idle, of the four that nobody holds
    assert step() == []  # one must stay for `other`, which waits for its token
    scheduler.remove(other)
    assert step() == [again] and again.computed == 7 and scheduler.pool.hits == 4
    scheduler.check()


def test_lanes_share_the_sequences():
    scheduler = Scheduler(BlockPool(20, 2), max_running=8, token_budget=8, lanes=2)
    sequences = [scheduler.add(Request(str(n), (n,), SamplingParams())) for n in range(4)]
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [[item.sequence for item in work] for work in (first, second)] == [sequences[:2], sequences[2:]]
    assert scheduler.schedule() == []
    for item in first:
        scheduler.done(item)
        item.sequence.tokens.append(7)
    assert [item.sequence for item in scheduler.schedule()] == sequences[:2]


def test_what_is_out_keeps_its_blocks():
    # Mutation tried: a sequence that is out can be preempted: red.
    scheduler = Scheduler(BlockPool(3, 2), max_running=4, token_budget=8, lanes=2)
    first, second = (scheduler.add(Request(str(n), (n, n), SamplingParams())) for n in range(2))
    (work,), (other,) = scheduler.schedule(), scheduler.schedule()
    assert (work.sequence, other.sequence) == (first, second)
    for _ in range(2):  # into the last block
        scheduler.done(work)
        first.tokens.append(9)
        (work,) = scheduler.schedule()
        assert work.sequence is first
    scheduler.done(work)
    first.tokens.append(9)
    assert scheduler.schedule() == [] and len(first.blocks) == 2 and len(second.blocks) == 1
    scheduler.done(other)
    (work,) = scheduler.schedule()
    assert work.sequence is first and second.blocks == [] and scheduler.preemptions == 1
    scheduler.check()
