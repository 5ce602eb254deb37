"""Pipeline schedules as data: what every rank computes and sends, in which order. Integers only.

The model is cut into stages; a rank holds `chunks` of them. Schedules:

    gpipe        all forwards, then all backwards (Huang et al., arXiv:1811.06965)
    1f1b         p - 1 - rank forwards, then one forward and one backward in turn (Narayanan et al., arXiv:2104.04473)
    interleaved  1f1b over several chunks a rank (the same paper). Micro-batches go in rounds of at least p; where p does not
                 divide them, rounds differ by one at most, the longer ones first, and fewer than p are one round
    zero_bubble  1f1b, or interleaved, with backward split in two: gradients of inputs, on which the rank before waits, and of
                 weights, on which nobody does and which fill gaps (ZB-H1, Qi et al., arXiv:2401.10241)
    zbv          two chunks a rank in the shape of a V, backward split (section 6 of that paper)

Stages lie on ranks in a loop, stage s on rank s mod p, but in zbv rank r has stages r and 2 p - 1 - r.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "BACKWARD",
    "FORWARD",
    "INPUT",
    "RECEIVE_ACTIVATION",
    "RECEIVE_GRADIENT",
    "SCHEDULES",
    "SEND_ACTIVATION",
    "SEND_GRADIENT",
    "WEIGHT",
    "Action",
    "Timeline",
    "alive",
    "bubble",
    "forward_actions",
    "peer",
    "pipeline_actions",
    "rank_of",
    "receipts",
    "simulate",
    "splits_backward",
    "stage_of",
    "with_messages",
]

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
SEND_ACTIVATION, RECEIVE_ACTIVATION = "SEND_F", "RECV_F"
SEND_GRADIENT, RECEIVE_GRADIENT = "SEND_B", "RECV_B"
UNDER_WAY = 3
"""Messages from one rank to another that are kept, beside the one that is sent, while nothing says that they are there."""


class Action(NamedTuple):
    """kind: F forward, B whole backward, I backward to the input, W backward to the weights; or a message of this stage:
    SEND_F its output to the stage after it, RECV_F its input from the one before, SEND_B the gradient of its input to the
    one before, RECV_B the gradient of its output from the one after."""

    kind: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


def splits_backward(schedule: str) -> bool:
    """Whether backward is two actions, I and W."""
    return schedule in ("zero_bubble", "zbv")


def stage_of(schedule: str, ranks: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Stages of every rank, in the order of the model."""
    if schedule == "zbv":
        return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))
    return tuple(tuple(range(rank, ranks * chunks, ranks)) for rank in range(ranks))


def rank_of(schedule: str, ranks: int, stage: int) -> int:
    """The rank that holds a stage."""
    return 2 * ranks - 1 - stage if schedule == "zbv" and stage >= ranks else stage % ranks


def pipeline_actions(schedule: str, ranks: int, micros: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
    """What each rank computes in a step of `micros` micro-batches, in order."""
    make: dict[str, Callable[[int], Iterator[Action]]] = {
        "gpipe": lambda rank: _gpipe(rank, micros),
        "1f1b": lambda rank: _one_by_one(rank, ranks, micros, 1, hop=1),
        "interleaved": lambda rank: _one_by_one(rank, ranks, micros, chunks, hop=2),
        "zero_bubble": lambda rank: _one_by_one(rank, ranks, micros, chunks, hop=1, split=True),
        "zbv": lambda rank: _v_shape(rank, ranks, micros),
    }
    return tuple(tuple(make[schedule](rank)) for rank in range(ranks))


def forward_actions(schedule: str, ranks: int, micros: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
    """What each rank computes where there is no backward: the forwards of `pipeline_actions`, in the order of stage and
    micro-batch in rounds."""
    stages = stage_of(schedule, ranks, chunks)
    rounds = _rounds(ranks, micros)
    return tuple(
        tuple(Action(FORWARD, stage, micro) for turn in rounds for stage in stages[rank] for micro in turn)
        for rank in range(ranks)
    )


def _gpipe(rank: int, micros: int) -> Iterator[Action]:
    yield from (Action(FORWARD, rank, micro) for micro in range(micros))
    yield from (Action(BACKWARD, rank, micro) for micro in range(micros))


def _rounds(ranks: int, micros: int) -> list[range]:
    """Micro-batches in runs of at least `ranks`, or one run of all."""
    count = max(1, micros // ranks)
    short, longer = divmod(micros, count)
    edges = [number * short + min(number, longer) for number in range(count + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]


def _one_by_one(rank: int, ranks: int, micros: int, chunks: int, *, hop: int, split: bool = False) -> Iterator[Action]:
    """Forwards ahead, then one forward and one backward in turn, then the backwards that are left.

    hop: forwards that a rank is ahead of the next one. Weight gradients follow `rank` backwards behind their inputs': the
    last rank, which waits for nobody, keeps the most.
    """
    rounds = _rounds(ranks, micros)
    forwards = [(chunk * ranks + rank, micro) for turn in rounds for chunk in range(chunks) for micro in turn]
    backwards = [(chunk * ranks + rank, micro) for turn in rounds for chunk in reversed(range(chunks)) for micro in turn]
    ahead = min((chunks - 1) * len(rounds[0]) + hop * (ranks - 1 - rank), len(forwards))
    yield from (Action(FORWARD, *unit) for unit in forwards[:ahead])
    for done, unit in enumerate(backwards):
        if ahead + done < len(forwards):
            yield Action(FORWARD, *forwards[ahead + done])
        yield Action(INPUT if split else BACKWARD, *unit)
        if split and done >= rank:
            yield Action(WEIGHT, *backwards[done - rank])
    if split:
        yield from (Action(WEIGHT, *unit) for unit in backwards[max(0, len(backwards) - rank) :])


def _v_shape(rank: int, ranks: int, micros: int) -> Iterator[Action]:
    """Written for 2 p - 1 micro-batches or more; those that are too many are left out, which changes no order."""
    down, up = rank, 2 * ranks - 1 - rank
    total = max(2 * ranks - 1, micros)
    counts: dict[tuple[str, int], int] = {}

    def following(kinds: str, stage: int) -> Iterator[Action]:
        for kind in kinds:
            micro = counts.get((kind, stage), 0)
            counts[kind, stage] = micro + 1
            if micro < micros:
                yield Action(kind, stage, micro)

    def count(kind: str, stage: int) -> int:
        return counts.get((kind, stage), 0)

    yield from following("F" * (2 * (ranks - rank) - 1), down)
    for _ in range(rank):
        yield from following("F", up)
        yield from following("F", down)
    for _ in range(ranks - rank):
        yield from following("FIW", up)
    while count(FORWARD, up) < count(FORWARD, down) or count(FORWARD, down) < total:
        yield from following("FIW" if count(FORWARD, down) < total else "IW", down)
        yield from following("FIW", up)
    for _ in range(rank):
        yield from following("I", down)
        yield from following("I", up)
    for _ in range(ranks - rank):
        yield from following("IW", down)
    for stage in (up, down):
        yield from following("W" * (count(INPUT, stage) - count(WEIGHT, stage)), stage)


# ---- messages -----------------------------------------------------------------------------------------------------------


def peer(action: Action, schedule: str, ranks: int) -> int:
    """The rank at the other end of a message."""
    after = action.kind in (SEND_ACTIVATION, RECEIVE_GRADIENT)
    return rank_of(schedule, ranks, action.stage + 1 if after else action.stage - 1)


def with_messages(
    computed: Sequence[Sequence[Action]], schedule: str, ranks: int, chunks: int = 1, ahead: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """The same actions with the messages between ranks.

    A send follows what it sends. From one rank to another the receives come in the order of the sends, whatever they carry,
    so a link that delivers in order and one way cannot block; links of the two ways must be two. A receive stands `ahead`
    computations before the one that needs it, so that it passes meanwhile, and holds a buffer no longer than that; earlier
    only where a later message of its link is needed sooner. It stands behind every computation of its rank that its message
    depends on, over however many ranks: an accelerator's receive keeps the device busy until the message is there, and a
    kernel that is loaded or tuned behind it may wait for an idle device. Neighbouring stages on one rank send nothing.
    """
    last = chunks * ranks - 1
    before, needed = _before(computed, last), _places(computed, last)
    posts: list[dict[int, list[Action]]] = [{} for _ in computed]
    for rank, actions in enumerate(computed):
        soonest = {to: len(computed[to]) for to in range(ranks)}
        for action in reversed(actions):
            message = _result(action, last)
            if message is None or (to := peer(message, schedule, ranks)) == rank:
                continue
            receive = _arrival(message)
            soonest[to] = min(soonest[to], max(needed[to][receive] - ahead, before[action][to]))
            posts[to].setdefault(soonest[to], []).insert(0, receive)
    lists: list[tuple[Action, ...]] = []
    for rank, actions in enumerate(computed):
        merged: list[Action] = []
        for place, action in enumerate(actions):
            merged += [*posts[rank].get(place, ()), action]
            message = _result(action, last)
            if message is not None and peer(message, schedule, ranks) != rank:
                merged.append(message)
        lists.append(tuple(merged))
    return tuple(lists)


def receipts(
    computed: Sequence[Sequence[Action]], schedule: str, ranks: int, chunks: int = 1
) -> tuple[dict[Action, tuple[Action, ...]], ...]:
    """Of each rank, by a receive or a send: the messages it sent that are there when that receive has ended, or that it waits
    for after that send. Those that it waits for at the end of the step are left out.

    A message says that all is there which its sender depended on. Of what nothing tells, as in evaluation, no more than
    UNDER_WAY messages from one rank to another stay open where all computations take as long: an older one is waited for if it
    is needed by then. This cannot block, because all waiting is for what comes first in that timeline.
    """
    last = chunks * ranks - 1
    before, needed = _before(computed, last), _places(computed, last)
    start = simulate(computed, lambda action: 1.0).start
    made = {_arrival(message): action for action in before if (message := _result(action, last)) is not None}

    def of(rank: int) -> dict[Action, tuple[Action, ...]]:
        told: dict[Action, tuple[Action, ...]] = {}
        going: dict[Action, tuple[int, int]] = {}
        """Messages under way, to the rank and the place of the computation that needs them."""

        def close(key: Action, sent: list[Action]) -> None:
            if sent:
                told[key] = tuple(sent)
            for each in sent:
                del going[each]

        for place, action in enumerate(computed[rank]):
            receive, message = _needed(action, last), _result(action, last)
            if receive is not None and peer(receive, schedule, ranks) != rank:
                over = before[made[receive]]
                close(receive, [sent for sent, (to, at) in going.items() if at < over[to]])
            if message is not None and (to := peer(message, schedule, ranks)) != rank:
                older = [sent for sent, (target, _) in going.items() if target == to][:-UNDER_WAY]
                close(message, [sent for sent in older if start[to][going[sent][1]] <= start[rank][place]])
                going[message] = to, needed[to][_arrival(message)]
        return told

    return tuple(of(rank) for rank in range(ranks))


def _places(computed: Sequence[Sequence[Action]], last: int) -> list[dict[Action, int]]:
    """Of each rank, by a receive: where it computes what needs it."""
    return [
        {receive: place for place, action in enumerate(actions) if (receive := _needed(action, last)) is not None}
        for actions in computed
    ]


def _before(computed: Sequence[Sequence[Action]], last: int) -> dict[Action, tuple[int, ...]]:
    """Of each computation, how many of every rank's first ones are over when it is, whatever anything takes: itself and all
    that it depends on, by messages and by the order of ranks."""
    start = simulate(computed, lambda action: 1.0).start
    order = sorted((begin, rank, place) for rank, begins in enumerate(start) for place, begin in enumerate(begins))
    before: dict[Action, tuple[int, ...]] = {}
    for _, rank, place in order:
        action = computed[rank][place]
        known = [before[need] for need in _needs(action, last, before)]
        if place:
            known.append(before[computed[rank][place - 1]])
        most = [max(counts) for counts in zip(*known, strict=True)] or [0] * len(computed)
        most[rank] = place + 1
        before[action] = tuple(most)
    return before


def _result(action: Action, last: int) -> Action | None:
    """The send of what a computation made for another stage."""
    if action.kind == FORWARD and action.stage < last:
        return Action(SEND_ACTIVATION, action.stage, action.micro)
    if action.kind in (BACKWARD, INPUT) and action.stage > 0:
        return Action(SEND_GRADIENT, action.stage, action.micro)
    return None


def _needed(action: Action, last: int) -> Action | None:
    """The receive of what a computation needs of another stage."""
    if action.kind == FORWARD and action.stage > 0:
        return Action(RECEIVE_ACTIVATION, action.stage, action.micro)
    if action.kind in (BACKWARD, INPUT) and action.stage < last:
        return Action(RECEIVE_GRADIENT, action.stage, action.micro)
    return None


def _arrival(message: Action) -> Action:
    """The receive that a send ends in."""
    if message.kind == SEND_ACTIVATION:
        return Action(RECEIVE_ACTIVATION, message.stage + 1, message.micro)
    return Action(RECEIVE_GRADIENT, message.stage - 1, message.micro)


# ---- what a schedule costs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timeline:
    """start: of each action, by rank, in the order of its list. total: when the last one ends. busy: of each rank."""

    start: tuple[tuple[float, ...], ...]
    total: float
    busy: tuple[float, ...]


def simulate(computed: Sequence[Sequence[Action]], seconds: Callable[[Action], float]) -> Timeline:
    """Every computation starts as soon as its rank is free and what it needs is there; messages take no time.

    Raises ValueError where the ranks would wait for each other for ever.
    """
    last = max(action.stage for actions in computed for action in actions)
    done: dict[Action, float] = {}
    start: list[list[float]] = [[] for _ in computed]
    free = [0.0] * len(computed)
    left = sum(len(actions) for actions in computed)
    while left:
        before = left
        for rank, actions in enumerate(computed):
            while len(start[rank]) < len(actions):
                action = actions[len(start[rank])]
                ready = [done.get(need) for need in _needs(action, last, done)]
                if None in ready:
                    break
                begin = max([free[rank], *(time for time in ready if time is not None)])
                free[rank] = done[action] = begin + seconds(action)
                start[rank].append(begin)
                left -= 1
        if left == before:
            waiting = [
                str(actions[len(start[rank])]) for rank, actions in enumerate(computed) if len(start[rank]) < len(actions)
            ]
            raise ValueError(f"the ranks wait for each other at {', '.join(waiting)}")
    busy = tuple(sum(map(seconds, actions)) for actions in computed)
    return Timeline(tuple(map(tuple, start)), max(free), busy)


def _needs(action: Action, last: int, done: Container[Action]) -> list[Action]:
    """Computations that come before one, its rank's own order left out."""
    kind, stage, micro = action
    if kind == FORWARD:
        return [Action(FORWARD, stage - 1, micro)] if stage else []
    if kind == WEIGHT:
        return [Action(INPUT, stage, micro)]
    needs = [Action(FORWARD, stage, micro)]
    if stage < last:
        whole = Action(BACKWARD, stage + 1, micro)
        needs.append(whole if whole in done else Action(INPUT, stage + 1, micro))
    return needs


def bubble(schedule: str, ranks: int, micros: int, chunks: int, forward: float, input: float, weight: float) -> float:
    """Share of the step (0..1) in which a rank is idle, mean over ranks.

    forward, input, weight: seconds of one micro-batch in one stage, forward and backward to the input and to the weights.
    """
    cost = {FORWARD: forward, BACKWARD: input + weight, INPUT: input, WEIGHT: weight}
    timeline = simulate(pipeline_actions(schedule, ranks, micros, chunks), lambda action: cost[action.kind])
    return 1.0 - sum(timeline.busy) / (ranks * timeline.total)


def alive(actions: Sequence[Action]) -> int:
    """Most micro-batches, counted a stage each, whose activations a rank keeps at once: from forward to the end of backward
    (to W where it is split)."""
    split = any(action.kind == WEIGHT for action in actions)
    now = most = 0
    for action in actions:
        if action.kind == FORWARD:
            now += 1
        elif action.kind == (WEIGHT if split else BACKWARD):
            now -= 1
        most = max(most, now)
    return most
