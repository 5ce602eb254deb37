"""Blocks whose forward and backward are each recorded once and then replayed: one launch where the host made a hundred.

The first pass through the blocks with arguments of some shapes runs as ever (it compiles, and shows which arguments all
blocks share), the second one in a row is recorded, those after it are replayed; evaluation, other shapes and whatever else does
not fit run as before. A recording computes over memory that stays:

    input of block 0, what all blocks share, what each gets of its own    copied in
    output of block i                                                     is the input of block i + 1: nothing is copied
    gradient of the input of block i + 1                                  is that of the output of block i: the same
    weights                                                               where they are: views of the flat buffers
    gradients of the weights                                              given to autograd, read before the next backward

It is `torch.cuda.make_graphed_callables` in what it does, and not a call of it in three respects. That keeps the autograd graph
of the recorded forward, and with it the accumulation nodes of the weights on the recording's stream: hooks on gradients would
run there, beside those of embedding and head on another stream, and a bucket with both would be reduced before it is whole.
Here the recorded graph is of aliases of the weights, and is dropped. That copies each input and each gradient from block to
block. And it cannot tell that a second forward overwrites what the backward of the first one still needs: here such a forward
runs as without a recording.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from meshwright.distributed import device as devices
from meshwright.errors import Finding, LayoutError, MeshwrightError
from meshwright.models.trunk import Trunk
from meshwright.parallel.blocks import find_blocks
from meshwright.spec.plan import Plan

__all__ = ["RECORDINGS", "Replays", "replay_blocks"]

RECORDINGS = 2
"""Shapes that are recorded; calls of others run as before. Each recording keeps inputs and outputs of all blocks."""

Arguments = tuple[torch.Tensor | None, ...]
Key = tuple[object, ...]
"""Shapes, dtypes and strides of arguments, and whether the first one needs a gradient."""


def replay_blocks(model: nn.Module, plan: Plan, device: torch.device) -> Replays | None:
    """Lets the blocks of the model be recorded and replayed, in place; None where the plan does not ask for it.

    Call it when the parameters are where they stay, and blocks are what they will be. Raises LayoutError for a device that
    records nothing and for a model that is not one of ours: nothing says that its blocks run one after another, each once.
    """
    if not plan.graphs:
        return None
    findings = []
    if not devices.records(device):
        findings.append(_finding(f"true, but a {device.type} device does not record launches"))
    if not isinstance(model, Trunk) or model.config.experts:
        findings.append(_finding("true, but only our own models without experts are known to run block after block"))
    if findings:
        raise LayoutError(findings=findings)
    return Replays(find_blocks(model).here, device)


class Replays:
    """Records and replays `blocks`, which run one after another, each on the output of the one before."""

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device):
        self._device = device
        self._recorder = devices.Recorder(device)
        self._bodies = [_Body(block) for block in blocks]
        self._recordings: dict[Key, _Recording] = {}
        self._watched: tuple[Key, list[bool]] | None = None
        """Of the last pass, if it was watched: which arguments were the same for all blocks."""
        self._going: _Pass | None = None
        self._last: weakref.ref[_Pass] | None = None
        """The last one that was replayed, as long as its autograd graph is there."""
        for number, body in enumerate(self._bodies):
            body.block.forward = self._numbered(number)

    def _numbered(self, number: int) -> Callable[..., Any]:
        def forward(*arguments: Any, **named: Any) -> Any:
            return self._call(number, *arguments, **named)

        return forward

    def _call(self, number: int, *arguments: Any, **named: Any) -> Any:
        key = None if named else _key(arguments)
        if number == 0:
            self._going = self._begin(key, arguments)
        going, body = self._going, self._bodies[number]
        if going is None:
            return body.plain(*arguments, **named)
        place = None
        if key is None or not going.takes(number, key, arguments):
            self._going = None  # this block and all after it run as before: on the same values
        else:
            place = going.next(arguments)
            if number == len(self._bodies) - 1:
                self._watched = going.close()
                self._going = None
        if place is None:
            return body.plain(*arguments, **named)
        return _Replay.apply(place, going, arguments[0], *body.trained)

    def _begin(self, key: Key | None, arguments: Arguments) -> _Pass | None:
        """A pass that is watched or replayed; None for neither. All recordings share their memory: while one waits for its
        backward, none is replayed."""
        last = None if self._last is None else self._last()
        if key is None or not torch.is_grad_enabled() or not self._bodies[0].block.training or (last and last.pending):
            return None
        if key not in self._recordings:
            if len(self._recordings) == RECORDINGS:
                return None
            if self._watched is None or self._watched[0] != key:
                return _Pass(key, arguments)
            self._recordings[key] = self._record(arguments, self._watched[1])
        going = _Pass(key, arguments, self._recordings[key])
        self._last = weakref.ref(going)
        return going

    def _record(self, arguments: Arguments, shared: Sequence[bool]) -> _Recording:
        """All blocks, for arguments like these. Changes no weight, no gradient and no random state."""
        with _refusing(), devices.kept_random(self._device), torch.enable_grad():
            side = devices.stream(self._device)
            devices.wait_stream(side, None)
            with devices.use_stream(side):  # what a first call on a new stream makes must not be made in a recording
                for body in self._bodies:
                    body.warm(arguments)
            devices.wait_stream(None, side)
            return _Recording(self._recorder, self._bodies, arguments, shared)


class _Body(nn.Module):
    """A block without its hooks: what they do (waiting for weights) is done outside of a recording, at every call."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block
        self.plain: Callable[..., Any] = block.forward
        self.names = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        self.trained = [parameter for parameter in self.parameters() if parameter.requires_grad]

    def forward(self, *arguments: torch.Tensor | None) -> torch.Tensor:
        return self.plain(*arguments)

    def taped(self, arguments: Arguments) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """What the block gives, and the leaves of its graph: x where it needs a gradient, and aliases of the parameters. The
        parameters themselves may have a node in a graph of the pass before, on another stream."""
        aliases = {name: nn.Parameter(parameter.detach()) for name, parameter in zip(self.names, self.trained, strict=True)}
        output = functional_call(self, aliases, arguments)  # type: ignore[arg-type]  # Any in torch's stub is a tuple of Any
        return output, [x for x in arguments[:1] if x is not None and x.requires_grad] + list(aliases.values())

    def warm(self, arguments: Arguments) -> None:
        """Forward and backward, for what they leave behind in libraries."""
        x = arguments[0]
        assert x is not None  # see `_key`
        output, leaves = self.taped((x.detach().requires_grad_(x.requires_grad), *arguments[1:]))
        torch.autograd.grad(output, leaves, torch.zeros_like(output), allow_unused=True)


class _Place:
    """A block in a recording: arguments, output and gradients are memory that stays. own: those arguments that no other block
    gets, to be copied in."""

    def __init__(self, recorder: devices.Recorder, body: _Body, arguments: Arguments, own: Arguments):
        self.body, self.arguments, self.own = body, arguments, own
        self.addresses = [parameter.data_ptr() for parameter in body.trained]
        self._graph: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        self.forward, (self.out,) = _recorded(recorder, self._forward)

    def record_backward(self, recorder: devices.Recorder, out_grad: torch.Tensor) -> None:
        self.out_grad = out_grad
        self.backward, self.grads = _recorded(recorder, self._backward)

    @property
    def x(self) -> torch.Tensor:
        x = self.arguments[0]
        assert x is not None  # see `_key`
        return x

    def _forward(self) -> list[torch.Tensor]:
        with torch.enable_grad():
            self._graph = self.body.taped(self.arguments)
        return [self._graph[0].detach()]

    def _backward(self) -> list[torch.Tensor | None]:
        assert self._graph is not None  # forward comes first
        (output, leaves), self._graph = self._graph, None
        unasked: list[torch.Tensor | None] = [] if self.x.requires_grad else [None]
        return [*unasked, *torch.autograd.grad(output, leaves, self.out_grad, allow_unused=True)]


class _Recording:
    """All blocks for arguments of one kind. shared: which of them all blocks have in common."""

    def __init__(
        self, recorder: devices.Recorder, bodies: Sequence[_Body], arguments: Arguments, shared: Sequence[bool]
    ) -> None:
        self.shared = shared
        self.common = [_static(each) if alike else None for each, alike in zip(arguments, shared, strict=True)]
        self.places: list[_Place] = []
        x = _static(arguments[0])
        for body in bodies:
            own = [None if alike else _static(each) for each, alike in zip(arguments, shared, strict=True)]
            own[0] = None  # the output of the block before
            rest = [one if mine is None else mine for one, mine in zip(self.common, own, strict=True)][1:]
            self.places.append(_Place(recorder, body, (x, *rest), tuple(own)))
            x = self.places[-1].out.detach().requires_grad_()
        gradient: torch.Tensor | None = torch.empty_like(self.places[-1].out)
        for place in reversed(self.places):
            assert gradient is not None  # of the input of every block but the first
            place.record_backward(recorder, gradient)
            gradient = place.grads[0]


@dataclass(eq=False)
class _Pass:
    """One way through the blocks: watched, or replayed from `recording`. Autograd's nodes of the replayed blocks hold it."""

    key: Key
    first: Arguments
    recording: _Recording | None = None
    seen: list[Arguments] = field(default_factory=list)
    count: int = 0
    pending: set[int] = field(default_factory=set)
    """Blocks that were replayed and whose backward was not."""

    def takes(self, number: int, key: Key, arguments: Arguments) -> bool:
        """Whether this is the next block, and its arguments are of the kind of the first one's; for a replay, that they and the
        weights are where the recording looks for them."""
        if number != self.count or key[1:] != self.key[1:]:
            return False
        if self.recording is None:
            return True
        place, x = self.recording.places[number], arguments[0]
        assert x is not None  # see `_key`
        return (
            (number == 0 or x.data_ptr() == place.x.data_ptr())
            and all(a is b for a, b, alike in zip(arguments, self.first, self.recording.shared, strict=True) if alike)
            and all(p.data_ptr() == then for p, then in zip(place.body.trained, place.addresses, strict=True))
        )

    def next(self, arguments: Arguments) -> _Place | None:
        """The block that is replayed, with its arguments copied in; None where this pass is watched."""
        number, self.count = self.count, self.count + 1
        if self.recording is None:
            self.seen.append(arguments)
            return None
        place = self.recording.places[number]
        if number == 0:
            _copy(self.recording.common, arguments)
            _copy((place.x,), arguments[:1])
        _copy(place.own, arguments)
        self.pending.add(id(place))
        return place

    def close(self) -> tuple[Key, list[bool]] | None:
        """After the last block. What a watched pass saw: its key, and which arguments were the same for all blocks."""
        seen, first, self.seen, self.first = self.seen, self.first, [], ()
        if self.recording is not None:
            return None
        shared = [all(each[n] is one for each in seen) for n, one in enumerate(first)]
        return self.key, [False, *shared[1:]]


class _Replay(torch.autograd.Function):
    """One block: a launch forward, a launch backward."""

    @staticmethod
    def forward(ctx: Any, place: _Place, going: _Pass, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.place, ctx.going = place, going
        place.forward()
        return place.out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        place, pending = ctx.place, ctx.going.pending
        if id(place) not in pending:
            what = "a second backward through the same forward, which replayed blocks have forgotten"
            raise MeshwrightError(f"{what}: run forward again, or use graphs: false in the plan")
        pending.remove(id(place))
        if out_grad.data_ptr() != place.out_grad.data_ptr():
            place.out_grad.copy_(out_grad)
        place.backward()
        # another tensor over the same memory, which autograd may make the .grad of a parameter without copying it
        return None, None, *(None if grad is None else grad.detach() for grad in place.grads)


def _key(arguments: Arguments) -> Key | None:
    """None for what is not recorded: a first argument that is no tensor, others that are neither tensors nor None, and others
    that need a gradient."""
    if not arguments or arguments[0] is None:
        return None
    if not all(each is None or isinstance(each, torch.Tensor) for each in arguments):
        return None
    if any(each is not None and each.requires_grad for each in arguments[1:]):
        return None
    kinds = (None if each is None else (each.shape, each.dtype, each.stride(), each.device) for each in arguments)
    return arguments[0].requires_grad, *kinds


def _static(argument: torch.Tensor | None) -> torch.Tensor | None:
    """A copy that stays. Of the same values: what is called with it may take them for places in memory."""
    return None if argument is None else argument.detach().clone().requires_grad_(argument.requires_grad)


@torch.no_grad()
def _copy(targets: Sequence[torch.Tensor | None], values: Arguments) -> None:
    for target, value in zip(targets, values, strict=True):
        if target is not None and value is not None:
            target.copy_(value)


def _recorded(recorder: devices.Recorder, call: Callable[[], list[Any]]) -> tuple[Callable[[], None], list[Any]]:
    """What replays the call, and the memory in which it leaves its results."""
    kept: list[list[Any]] = []

    def keeping() -> list[Any]:
        results = call()
        if not kept:
            kept.append(results)
        return results

    return recorder.record(keeping), kept[0]


@contextmanager
def _refusing() -> Iterator[None]:
    """Says of what the device does not record how to go on without it."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise LayoutError(findings=[_finding(f"true, but the blocks cannot be recorded: {reason}")]) from error


def _finding(what: str) -> Finding:
    return Finding("plan.graphs", what, "Use graphs: false")
