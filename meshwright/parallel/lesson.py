"""How ZeRO-3 gets to know a module that it has not been written for: its first forward, and the backward behind it.

Blocks are gathered as they are called, in one order on all ranks. Of somebody else's module that is not known: a weight may be
used without calling the block that it belongs to, a block may be called on some ranks alone, its gradient may come by another
way than its output. In a lesson

    - all ranks say at every call what they need next; everything that any of them needs is gathered by all
    - `Watch` sees every use of a parameter before it happens
    - what backward needs and has not got is gathered when it is asked for

and what was learnt holds from then on: such weights are kept with the rest, which is whole while the model computes; where
ranks went different ways, all weights are. A lesson costs a small message a block, and a wait for it.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["Lesson", "tensors_in"]

_HARMLESS = frozenset(
    {"device", "dtype", "shape", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "is_cpu", "is_meta", "is_nested"}
    | {"is_sparse", "is_quantized", "is_mkldnn", "grad", "grad_fn", "names", "itemsize", "nbytes", "_backward_hooks"}
    | {"size", "dim", "numel", "nelement", "stride", "is_floating_point", "is_complex", "element_size", "__len__", "__hash__"}
    | {"is_contiguous", "type", "has_names", "get_device", "requires_grad_", "storage_offset", "ndimension", "is_inference"}
)
"""What may be asked of a parameter without reading its elements."""


class Watch(TorchFunctionMode):
    """Calls `seen` before an operation reads a parameter outside of every block that it belongs to.

    blocks: of a parameter, by its id. inside: blocks that are being called.
    """

    def __init__(self, blocks: Mapping[int, Sequence[nn.Module]], inside: list[nn.Module], seen: Callable[[int], None]):
        super().__init__()
        self.blocks, self.inside, self.seen = blocks, inside, seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name not in _HARMLESS:
            for tensor in tensors_in((args, kwargs)):
                mine = self.blocks.get(id(tensor))
                if mine and not any(block in self.inside for block in mine):
                    self.seen(id(tensor))
        return func(*args, **kwargs)


class Lesson:
    """blocks, home: blocks of a parameter and number of its part, by its id. fetch, drop: gather parts by number, and
    wait; release them. there: whether a part is, and not on its way. storages: the memory of the parts that are there, with
    their numbers. data: the ranks that learn together. watched: uses are looked at; not with compiled blocks, which hide them.
    """

    def __init__(
        self,
        blocks: Mapping[int, Sequence[nn.Module]],
        home: Mapping[int, int],
        *,
        parts: int,
        fetch: Callable[[Iterable[int]], None],
        drop: Callable[[Iterable[int]], None],
        there: Callable[[int], bool],
        storages: Callable[[], dict[int, int]],
        data: dist.ProcessGroup,
        device: torch.device,
        watched: bool,
    ):
        self.home, self.there, self.storages = home, there, storages
        self.fetch, self.drop = fetch, drop
        self.data, self.device = data, device
        self.apart: set[int] = set()
        """Parts that are to be kept with the rest."""
        self.divided = False
        """Whether ranks went different ways."""
        self.inside: list[nn.Module] = []
        self._parts = parts
        self._open = ExitStack()
        if watched:
            self._open.enter_context(Watch(blocks, self.inside, self._stray))
            if torch.is_grad_enabled():
                self._open.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))

    def want(self, parts: Iterable[int], done: bool = False) -> bool:
        """Gathers what this and other ranks need next. Collective; returns whether all ranks are done."""
        flags = torch.zeros(self._parts + 1, dtype=torch.int32)
        flags[[number for number in parts if not self.there(number)]] = 1
        flags[-1] = int(done)
        flags = flags.to(self.device)
        dist.all_reduce(flags, group=self.data)
        *counts, finished = flags.tolist()
        self.divided |= any(count not in (0, self.data.size()) for count in counts)
        needed = [number for number, count in enumerate(counts) if count]
        self.drop(number for number in needed)  # a rank that still has one must take part all the same
        self.fetch(needed)
        return finished == self.data.size()

    def end_forward(self, route: Sequence[int]) -> None:
        """route: numbers of the blocks that were visited. Collective: waits for ranks that go further."""
        self.stop()
        while not self.want((), done=True):
            pass
        digest = zlib.crc32(repr(list(route)).encode())
        ends = torch.tensor([digest, -digest], dtype=torch.int64, device=self.device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.data)
        self.divided |= ends.tolist() != [digest, -digest]
        flags = torch.tensor(int(self.divided), dtype=torch.int32, device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.data)
        self.divided = bool(flags)
        if self.divided:
            self.apart = set(range(self._parts))
            self.drop(self.apart)  # they may have others, and are all to be gathered in one order
        self.agree()

    def stop(self) -> None:
        """Looks at nothing any more."""
        self._open.close()

    def agree(self) -> None:
        """All ranks keep with the rest what any of them must. Collective."""
        flags = torch.zeros(self._parts, dtype=torch.int32)
        flags[list(self.apart)] = 1
        flags = flags.to(self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.data)
        self.apart = {number for number, flag in enumerate(flags.tolist()) if flag}

    def _stray(self, parameter: int) -> None:
        number = self.home[parameter]
        self.apart.add(number)
        if not self.there(number):
            self.want([number])

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        return tensor.detach(), self.storages().get(tensor.untyped_storage().data_ptr())

    def _unpack(self, packed: tuple[torch.Tensor, int | None]) -> torch.Tensor:
        tensor, number = packed
        if number is not None and not self.there(number):  # backward came by another way than the block's output, or before it
            self.apart.add(number)
            self.fetch([number])
        return tensor


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
