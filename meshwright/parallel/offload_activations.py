"""Activations in host memory: what blocks keep for backward leaves the device after forward and comes back for backward.

Every kept byte crosses the link to the host twice, while other blocks compute; what two blocks keep is on the device at a time.
Pinned memory of the host is rounded up to a power of two by torch, each tensor by itself, and kept for the next one as large.
Parameters stay, and what all blocks are given beside their input (tables of positions, documents). On a CPU it is a plain copy.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.distributed import device as devices

__all__ = ["Host", "offload"]


def offload(block: nn.Module, host: Host) -> None:
    """What the block keeps for backward goes by way of `host`, which all blocks of a model share.

    By hooks of the module, which run outside of what is compiled.
    """
    under_way: list[tuple[_Call, saved_tensors_hooks]] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = _Call(host, module, (*args[1:], *kwargs.values()))
        hooks = saved_tensors_hooks(call.pack, lambda packed: packed if isinstance(packed, torch.Tensor) else packed())
        hooks.__enter__()
        under_way.append((call, hooks))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        call, hooks = under_way.pop()
        hooks.__exit__()
        call.close()

    block.register_forward_pre_hook(enter, with_kwargs=True)
    block.register_forward_hook(leave, always_call=True)


class Host:
    """The stream on which tensors leave and come back, one after the other, and the newest call of any block."""

    def __init__(self) -> None:
        self.stream: torch.Stream | None = None
        self.newest: Callable[[], _Call | None] = lambda: None


@dataclass
class _Kept:
    """A tensor that backward will want. here: its copy on the device, until that has left and from when it comes back, with
    the same strides, which compiled code counts on. away: its elements, without the gaps that a view may have."""

    here: torch.Tensor | None
    device: torch.device
    stride: tuple[int, ...]
    away: torch.Tensor
    used: bool = False

    def back(self) -> torch.Tensor:
        """Empty memory on the device."""
        return torch.empty_strided(self.away.shape, self.stride, dtype=self.away.dtype, device=self.device)


class _Call:
    """What one forward of one block keeps. It leaves while the block and the next one run, and comes back one block early.

    Tensors are freed to the stream that computes, which has then waited for their copies: no allocator has to ask for it.
    Weak references to other calls: a call lives as long as the part of the graph that it serves.
    """

    def __init__(self, host: Host, block: nn.Module, beside: tuple[Any, ...]):
        self.host, self.before = host, host.newest
        self._not_moved = (block, beside)
        self._staying: set[int] | None = None
        self._kept: list[_Kept] = []
        self._left: torch.Event | None = None
        self._came: torch.Event | None = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | Callable[[], torch.Tensor]:
        """The tensor itself if it is a parameter, or one that every block is given; else what gives it back."""
        if self._staying is None:  # not before: weights that are gathered for the block are elsewhere before it runs
            block, beside = self._not_moved
            tensors = [*block.parameters(), *(value for value in beside if isinstance(value, torch.Tensor))]
            self._staying = {each.untyped_storage().data_ptr() for each in tensors}
        if tensor.untyped_storage().data_ptr() in self._staying:
            return tensor
        away = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
        if self.host.stream is None:
            self.host.stream = devices.stream(tensor.device)
        self._kept.append(_Kept(tensor, tensor.device, tensor.stride(), away))
        devices.wait_stream(self.host.stream, None)
        with devices.use_stream(self.host.stream):
            away.copy_(tensor, non_blocking=True)
        return functools.partial(self.take, len(self._kept) - 1)

    def close(self) -> None:
        """After the forward: what the call before kept is on the host, or waited for now."""
        self._not_moved, self._staying = (nn.Module(), ()), None
        self._left = self._mark()
        self.host.newest = weakref.ref(self)
        if (before := self.before()) is not None:
            before._let_go()

    def take(self, number: int) -> torch.Tensor:
        """One tensor for backward, on its device; what the call before kept starts on its way."""
        kept = self._kept[number]
        kept.used = False  # it is asked for again where a graph is kept
        self._fetch()
        if self._came is not None:
            self._came.wait()
        if (before := self.before()) is not None:
            before._fetch()
        assert kept.here is not None
        if self._left is not None:
            # The newest block's own tensor may still be on its way out: what uses its memory next would change what a second
            # backward is given.
            self._left.wait()
        tensor, kept.here, kept.used = kept.here, None, True
        return tensor

    def _let_go(self) -> None:
        if self._left is not None:
            self._left.wait()
        for kept in self._kept:
            kept.here = None

    def _fetch(self) -> None:
        absent = [kept for kept in self._kept if kept.here is None and not kept.used]
        if not absent:
            return
        for kept in absent:
            kept.here = kept.back()
        devices.wait_stream(self.host.stream, None)  # their memory may have been freed, but be in use by what is queued
        with devices.use_stream(self.host.stream):
            for kept in absent:
                if kept.here is not None:
                    kept.here.copy_(kept.away, non_blocking=True)
        self._came = self._mark()

    def _mark(self) -> torch.Event | None:
        return None if self.host.stream is None else devices.mark(self.host.stream.device, self.host.stream)

    def __del__(self) -> None:
        if self._came is not None:  # fetched early for a backward that never came
            self._came.wait()
