"""Pipeline schedules: complete, free of deadlock, as lean as they promise, and in the order of torch's own."""

from __future__ import annotations

import collections
import functools
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from meshwright.spec.pipeline import (
    BACKWARD,
    FORWARD,
    INPUT,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    UNDER_WAY,
    WEIGHT,
    Action,
    alive,
    bubble,
    forward_actions,
    peer,
    pipeline_actions,
    rank_of,
    receipts,
    simulate,
    splits_backward,
    stage_of,
    with_messages,
)

RANKS, MICROS = range(2, 9), range(1, 33)
CHUNKS = {"gpipe": (1,), "1f1b": (1,), "interleaved": (2, 3), "zero_bubble": (1, 2, 3), "zbv": (2,)}
CASES = [(schedule, chunks) for schedule, counts in CHUNKS.items() for chunks in counts]
COMPUTED = (FORWARD, BACKWARD, INPUT, WEIGHT)
every_case = pytest.mark.parametrize(("schedule", "chunks"), CASES)


@functools.cache
def actions_of(schedule: str, ranks: int, micros: int, chunks: int) -> tuple[tuple[Action, ...], ...]:
    return pipeline_actions(schedule, ranks, micros, chunks)


@every_case
def test_every_action_once_and_on_the_rank_of_its_stage(schedule, chunks):
    kinds = (FORWARD, INPUT, WEIGHT) if splits_backward(schedule) else (FORWARD, BACKWARD)
    for ranks in RANKS:
        for rank, stages in enumerate(stage_of(schedule, ranks, chunks)):
            assert all(rank_of(schedule, ranks, stage) == rank for stage in stages)
        for micros in MICROS:
            for stages, actions in zip(
                stage_of(schedule, ranks, chunks), actions_of(schedule, ranks, micros, chunks), strict=True
            ):
                expected = {Action(kind, stage, micro) for kind in kinds for stage in stages for micro in range(micros)}
                assert len(actions) == len(expected) and set(actions) == expected


# interleaved with the last round's size in `ahead` instead of the first one's waits for ever
@every_case
def test_no_rank_waits_for_ever(schedule, chunks):
    for ranks in RANKS:
        for micros in MICROS:
            simulate(actions_of(schedule, ranks, micros, chunks), lambda action: 1.0)
            simulate(forward_actions(schedule, ranks, micros, chunks), lambda action: 1.0)


@every_case
def test_forwards_and_backwards_of_a_chunk_are_in_the_order_of_micro_batches(schedule, chunks):
    for ranks in (2, 5, 8):
        for micros in (1, 3, 8, 19):
            seen: collections.defaultdict[tuple[str, int], int] = collections.defaultdict(int)
            for actions in actions_of(schedule, ranks, micros, chunks):
                for kind, stage, micro in actions:
                    assert micro == seen[kind, stage]
                    seen[kind, stage] += 1


def arrival(sent: Action) -> Action:
    forward = sent.kind == SEND_ACTIVATION
    kind, step = (RECEIVE_ACTIVATION, 1) if forward else (RECEIVE_GRADIENT, -1)
    return Action(kind, sent.stage + step, sent.micro)


def run_messages(
    lists: Sequence[Sequence[Action]], schedule: str, ranks: int, told: Sequence[dict[Action, tuple[Action, ...]]] = ()
) -> None:
    """What links do: one queue a pair and direction, a message passes when both its ends have come to it, in order on both
    sides; computing waits for what it needs, and after a send for what `told` says.
    Raises AssertionError where nothing moves or a queue's ends do not match."""
    sends: dict[tuple[int, int], collections.deque[Action]] = collections.defaultdict(collections.deque)
    posted: dict[tuple[int, int], collections.deque[Action]] = collections.defaultdict(collections.deque)
    arrived: set[Action] = set()
    done: set[Action] = set()
    place = [0] * ranks
    open_: list[set[Action]] = [set() for _ in range(ranks)]
    """Receives of other ranks that this one waits for before it goes on."""

    def ready(rank: int, action: Action) -> bool:
        kind, stage, micro = action
        own = {at for at in lists[rank] if at.micro == micro}
        receives = {FORWARD: RECEIVE_ACTIVATION, INPUT: RECEIVE_GRADIENT, BACKWARD: RECEIVE_GRADIENT}
        needed = Action(receives[kind], stage, micro) if kind in receives else None
        if needed in own:
            return needed in arrived
        before = Action(FORWARD, stage - 1, micro) if kind == FORWARD else Action(kind, stage + 1, micro)
        return kind == WEIGHT or before not in own or before in done

    while any(place[rank] < len(lists[rank]) for rank in range(ranks)):
        moved = False
        for rank in range(ranks):
            while place[rank] < len(lists[rank]):
                action = lists[rank][place[rank]]
                if open_[rank] - arrived:
                    break
                if action.kind in (SEND_ACTIVATION, SEND_GRADIENT):
                    open_[rank] = {arrival(sent) for sent in told[rank].get(action, ())} if told else set()
                    sends[rank, peer(action, schedule, ranks)].append(action)
                elif action.kind in (RECEIVE_ACTIVATION, RECEIVE_GRADIENT):
                    posted[peer(action, schedule, ranks), rank].append(action)
                elif ready(rank, action):
                    done.add(action)
                else:
                    break
                place[rank] += 1
                moved = True
        for link in set(sends) & set(posted):
            while sends[link] and posted[link]:
                sent, receive = sends[link].popleft(), posted[link].popleft()
                assert receive == arrival(sent)
                arrived.add(receive)
                moved = True
        assert moved, [str(lists[rank][place[rank]]) for rank in range(ranks) if place[rank] < len(lists[rank])]
    assert not any(sends.values()) and not any(posted.values())


# receives in the order in which they are needed, instead of that of the sends, are red
@every_case
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_sends_and_receives_pair_up_and_no_link_blocks(schedule, chunks, ahead):
    for ranks in (2, 3, 4, 8):
        for micros in (1, 2, 3, 5, 8, 11):
            for actions in (actions_of(schedule, ranks, micros, chunks), forward_actions(schedule, ranks, micros, chunks)):
                lists = with_messages(actions, schedule, ranks, chunks, ahead)
                assert [tuple(a for a in each if a.kind in COMPUTED) for each in lists] == list(actions)
                run_messages(lists, schedule, ranks)


def past(computed: Sequence[Sequence[Action]]) -> dict[Action, set[Action]]:
    """All that a computation waits for, directly or not: what it takes from other stages, and what its rank does before."""
    every = {action for actions in computed for action in actions}
    previous = {after: action for actions in computed for action, after in itertools.pairwise(actions)}
    found: dict[Action, set[Action]] = {}

    def of(action: Action) -> set[Action]:
        if action not in found:
            kind, stage, micro = action
            taken = {Action(FORWARD, stage - 1, micro)} if kind == FORWARD else {Action(FORWARD, stage, micro)}
            if kind in (BACKWARD, INPUT):
                taken.add(Action(kind, stage + 1, micro))
            direct = (taken & every) | ({previous[action]} if action in previous else set())
            found[action] = direct.union(*map(of, direct))
        return found[action]

    for action in every:
        of(action)
    return found


def maker(receive: Action, every: set[Action]) -> Action:
    """The computation whose result a receive brings."""
    _, stage, micro = receive
    if receive.kind == RECEIVE_ACTIVATION:
        return Action(FORWARD, stage - 1, micro)
    whole = Action(BACKWARD, stage + 1, micro)
    return whole if whole in every else Action(INPUT, stage + 1, micro)


# red where `before` is left out of `soonest`, and where it counts what the sender itself takes, but not its rank's order
@every_case
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_receive_follows_what_its_message_depends_on_and_passes_meanwhile(schedule, chunks, ahead):
    """Behind it a device may have to be idle to load a kernel, which it is not before the message is there. Where nothing of
    this forbids it, `ahead` computations lie between a receive and the one that needs it."""
    for ranks, micros in itertools.product(range(2, 6), range(1, 10)):
        for computed in (actions_of(schedule, ranks, micros, chunks), forward_actions(schedule, ranks, micros, chunks)):
            before = past(computed)
            for actions in with_messages(computed, schedule, ranks, chunks, ahead):
                own = [action for action in actions if action.kind in COMPUTED]
                done = 0
                for action in actions:
                    if action.kind in COMPUTED:
                        done += 1
                    elif action.kind in (RECEIVE_ACTIVATION, RECEIVE_GRADIENT):
                        made = maker(action, set(before))
                        first = 1 + max((place for place, each in enumerate(own) if each in before[made]), default=-1)
                        kinds = (FORWARD,) if action.kind == RECEIVE_ACTIVATION else (BACKWARD, INPUT)
                        needed = next(place for place, each in enumerate(own) if each[0] in kinds and each[1:] == action[1:])
                        assert first <= done <= max(first, needed - ahead), (ranks, micros, action)


# red where a receive tells of one computation more than its sender depends on, where a send waits for all that is under way
# (deadlock), and where sends wait for nothing (count)
@every_case
def test_receipts_are_true_cannot_block_and_bound_what_is_kept(schedule, chunks):
    for ranks, micros in itertools.product(range(2, 6), (1, 2, 3, 5, 8, 24)):
        for computed in (actions_of(schedule, ranks, micros, chunks), forward_actions(schedule, ranks, micros, chunks)):
            lists, told, before = (
                with_messages(computed, schedule, ranks, chunks),
                receipts(computed, schedule, ranks, chunks),
                {},
            )
            if micros <= 8:
                before = past(computed)
            run_messages(lists, schedule, ranks, told)
            for rank, actions in enumerate(lists):
                kept: set[Action] = set()
                for action in actions:
                    key = action
                    if action.kind in (FORWARD, BACKWARD, INPUT):
                        key = Action(RECEIVE_ACTIVATION if action.kind == FORWARD else RECEIVE_GRADIENT, *action[1:])
                    elif action.kind in (SEND_ACTIVATION, SEND_GRADIENT):
                        kept.add(action)
                    else:
                        continue
                    closed = set(told[rank].get(key, ()))
                    assert closed <= kept
                    kept -= closed
                    if before and closed and key != action:
                        source = maker(key, set(before))
                        over = {(stage, micro, kind == FORWARD) for kind, stage, micro in before[source] | {source}}
                        assert {(arrival(sent).stage, sent.micro, sent.kind == SEND_ACTIVATION) for sent in closed} <= over
                    links = collections.Counter(peer(sent, schedule, ranks) for sent in kept)
                    assert all(count <= 2 * UNDER_WAY for count in links.values()), (ranks, micros, action)


def test_stages_that_are_neighbours_on_one_rank_send_nothing():
    lists = with_messages(pipeline_actions("zbv", 3, 5, 2), "zbv", 3, 2)
    assert not any(a.kind == SEND_ACTIVATION and a.stage == 2 for a in lists[2])
    assert not any(a.kind == SEND_GRADIENT and a.stage == 3 for a in lists[2])
    assert sum(a.kind == SEND_ACTIVATION for actions in lists for a in actions) == 4 * 5


def test_activations_alive():
    for ranks in RANKS:
        for micros in MICROS:
            assert all(alive(actions) == micros for actions in actions_of("gpipe", ranks, micros, 1))
            for rank, actions in enumerate(actions_of("1f1b", ranks, micros, 1)):
                assert alive(actions) == min(micros, ranks - rank)
            for actions in actions_of("zero_bubble", ranks, micros, 1):
                assert alive(actions) <= min(micros, ranks)
            for actions in actions_of("zbv", ranks, micros, 2):
                assert alive(actions) <= 2 * ranks


def test_bubbles_by_hand():
    """GPipe and 1F1B: (p - 1) / (m + p - 1). Interleaved: (p - 1) / (v m + p - 1). ZB-H1 with F = I = W: (p - 1) gaps of one
    unit in 3 m. The V with F = I = W fills everything but the ends: p - 1 in 6 m."""
    for ranks, micros in ((2, 4), (4, 8), (4, 16), (8, 32)):
        fill = (ranks - 1) / (micros + ranks - 1)
        assert bubble("gpipe", ranks, micros, 1, 1.0, 1.0, 1.0) == pytest.approx(fill)
        assert bubble("1f1b", ranks, micros, 1, 2.0, 1.5, 0.7) == pytest.approx(fill)
        assert bubble("interleaved", ranks, micros, 2, 1.0, 1.0, 1.0) == pytest.approx((ranks - 1) / (2 * micros + ranks - 1))
        assert bubble("zero_bubble", ranks, micros, 1, 1.0, 1.0, 1.0) == pytest.approx((ranks - 1) / (3 * micros + ranks - 1))
        assert bubble("zbv", ranks, micros, 2, 1.0, 1.0, 1.0) == pytest.approx((ranks - 1) / (6 * micros + ranks - 1))


def test_a_deadlock_is_found():
    actions = [[Action("B", 0, 0), Action("F", 0, 0)], [Action("F", 1, 0), Action("B", 1, 0)]]
    with pytest.raises(ValueError, match="wait for each other at 0B0, 1F0"):
        simulate(actions, lambda action: 1.0)


# ---- torch's own --------------------------------------------------------------------------------------------------------

TORCH = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}


class Recorder(SimpleNamespace):
    """A stage that has nobody to talk to and notes what it is asked to compute."""

    def __init__(self, stage: int, stages: int, ranks: int):
        super().__init__(
            stage_index=stage,
            num_stages=stages,
            group_rank=0,
            group_size=ranks,
            group=None,
            is_first=stage == 0,
            is_last=stage == stages - 1,
            device=torch.device("cpu"),
            submod=torch.nn.Identity(),
            has_backward=True,
            stage_index_to_group_rank=None,
        )
        self.seen: list[Action] = []

    def forward_one_chunk(self, micro: int, *_: Any, **__: Any) -> None:
        self.seen.append(Action(FORWARD, self.stage_index, micro))

    def backward_one_chunk(self, micro: int, **_: Any) -> None:
        self.seen.append(Action(BACKWARD, self.stage_index, micro))

    def perform_reduce_grad(self, _: int) -> None: ...

    def no_messages(self, _: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages


def torch_order(schedule: str, ranks: int, micros: int, chunks: int) -> list[tuple[Action, ...]] | None:
    """What torch's schedule of that name computes; None for numbers that it does not take.

    Schedules of several chunks say it in `pipeline_order`. Those of one chunk run by themselves; what they say there is not
    always what they do (2.13: the forwards of 1F1B's last stage begin at micro-batch 1), so they are watched."""
    kind: Any = getattr(pipelining, TORCH[schedule])
    single = schedule in ("gpipe", "1f1b")
    stages = [Recorder(stage, ranks * chunks, ranks) for stage in range(ranks * chunks)]
    try:
        made = [kind(stage, micros) for stage in stages] if single else kind([stages[rank] for rank in range(chunks)], micros)
    except ValueError as error:
        assert "microbatches" in str(error)
        return None
    if single:
        with mock.patch.object(kind, "_initialize_stage"), mock.patch.object(kind, "_check_inputs", lambda self, *_: NOTHING):
            for each in made:
                each._step_microbatches(NOTHING[0], NOTHING[1])
        return [tuple(stage.seen) for stage in stages]
    return [
        tuple(
            Action(action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in made.pipeline_order[rank]
            if action is not None and action.computation_type.value in COMPUTED
        )
        for rank in range(ranks)
    ]


NOTHING: tuple[list[Any], list[Any]] = ([()] * 32, [{}] * 32)


# a canary for `pipeline_order` as well: with one forward more ahead of the first backward it is red
@every_case
def test_the_order_is_torchs(schedule, chunks, monkeypatch):
    # placing its messages takes torch minutes for all cases, and only they depend on what is left out here
    runtime = schedules._PipelineScheduleRuntime
    monkeypatch.setattr(runtime, "_prepare_schedule_with_comms", lambda self, *_, **__: None)
    compared = 0
    for ranks in RANKS:
        for micros in MICROS:
            theirs = torch_order(schedule, ranks, micros, chunks)
            if theirs is not None:
                assert list(actions_of(schedule, ranks, micros, chunks)) == theirs, (ranks, micros)
                compared += 1
    assert compared >= (100 if schedule in ("interleaved", "zero_bubble") else 190)


def test_the_page_has_the_bubbles_and_what_is_alive():
    text = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d).* \| ([\d, ]+\d).* \| ([\d.]+)% \|$", text, flags=re.MULTILINE)
    assert [row[0] for row in rows] == list(CHUNKS)
    for schedule, chunks, counts, share in rows:
        assert [alive(actions) for actions in pipeline_actions(schedule, 4, 8, int(chunks))] == [
            int(n) for n in counts.split(",")
        ]
        assert f"{bubble(schedule, 4, 8, int(chunks), 1.0, 1.0, 1.0):.1%}" == f"{share}%"
