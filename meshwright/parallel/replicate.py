"""Data parallelism: gradients gathered into the flat buffers while backward runs, and summed over the data ranks.

A parameter's gradient takes one of three ways, bytes moved per parameter and micro-step counted beside (bf16 weights):

    direct   one rank, one micro-step: autograd's own tensor is kept and read by norm and update         0 B (fp32: 0)
    first    first micro-step of several, or several ranks: copied into the buffer             r2 + w4 = 6 B (fp32: 8)
    added    later micro-steps: fp32 autograd adds in place, bf16 a hook adds              r2 + r4 + w4 = 10 B (fp32: 12)

Nothing is divided: the loss is already a sum over the global number of targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from meshwright.errors import MeshwrightError
from meshwright.parallel.flat import Bucket, FlatParameters, Group, Slot
from meshwright.parallel.norm import square_norm

__all__ = ["Gradients"]


class Gradients:
    """Accumulates and reduces gradients.

    group: ranks that see different samples; None for one. overlap: reduce during the last backward, else after it (the
    same buckets in the same order, hence the same bits). Backward may run only inside `scope`, once each.
    """

    def __init__(self, parameters: FlatParameters, group: dist.ProcessGroup | None, *, bucket_bytes: int, overlap: bool):
        self.parameters = parameters
        self.group = group
        self.overlap = overlap
        self.measure_noise = False
        """Ask, before the first micro-step, for `square_norms` of this step."""
        self.square_norms: list[torch.Tensor] = []
        self.buckets = parameters.buckets(bucket_bytes)
        self._bucket = {id(slot): number for number, bucket in enumerate(self.buckets) for slot in bucket.slots}
        self._waiting: list[int] = []
        self._launched = 0
        self._work: list[dist.Work] = []
        self._scopes = 0
        self._open = self._last = False
        self.direct = False
        self._arrived: set[int] = set()
        for owner, slot in parameters.each():
            slot.parameter.register_post_accumulate_grad_hook(self._hook(owner, slot))

    @contextmanager
    def scope(self, last: bool) -> Iterator[None]:
        """Around the backward of one micro-step; `last` on the last one of the step."""
        if self._open or self._last:
            raise MeshwrightError("a backward scope was opened inside another, or after the last one of the step; call zero() first")
        self._open, self._last = True, last
        self._scopes += 1
        self.direct = last and self._scopes == 1 and self.group is None
        self._arrived.clear()
        self._waiting = [len(bucket.slots) for bucket in self.buckets]
        try:
            yield
        finally:
            self._open = False
        if last:
            self._complete()
        elif self.measure_noise and self.group is None and self._scopes == 1:
            self._zero_untouched()
            self.square_norms.append(self._square([group.gradient for group in self.parameters.groups]))

    def finish(self, wait: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """Waits until every bucket is reduced; only the waiting is inside `wait()`."""
        if self.group is not None and (self._work or self._launched < len(self.buckets)):
            with wait():
                self._launch(len(self.buckets))
                for work in self._work:
                    work.wait()
        self._work = []

    def zero(self) -> None:
        """Forgets the gradients of the step. Writes nothing: the next first micro-step overwrites the buffers."""
        for slot in self.parameters.slots:
            slot.parameter.grad = None
            slot.touched = False
        self.square_norms = []
        self._scopes = self._launched = 0
        self._last = self.direct = False

    def each(self) -> Iterator[tuple[Group, Slot, torch.Tensor]]:
        """Every trainable parameter with its gradient, in the order of the model. Shaped as the parameter; zeros where
        backward did not reach it; in the dtype of the masters, or of the weights where `direct`."""
        for group, slot in self.parameters.each():
            if self.direct:
                if slot.parameter.grad is None:
                    slot.parameter.grad = torch.zeros_like(slot.parameter)
                yield group, slot, slot.parameter.grad
            else:
                yield group, slot, slot.of(group.gradient)

    def square(self) -> torch.Tensor:
        """Sum of squares of all gradients held here, loss scale included."""
        if self.direct:
            return self._square([gradient for _, _, gradient in self.each()])
        return self._square([group.gradient for group in self.parameters.groups])

    def _square(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([square_norm(part) for part in parts]).sum()

    def _hook(self, group: Group, slot: Slot) -> Callable[[torch.Tensor], None]:
        def arrived(parameter: torch.Tensor) -> None:
            self._arrive(group, slot, parameter)

        return arrived

    def _arrive(self, group: Group, slot: Slot, parameter: torch.Tensor) -> None:
        if not self._open:
            raise MeshwrightError(f"backward reached {slot.name} outside engine.backward_scope")
        if self.direct:
            return
        gradient = parameter.grad
        assert gradient is not None  # autograd calls this hook right after it has set it
        view = slot.of(group.gradient)
        if gradient.data_ptr() != view.data_ptr():  # else autograd has added in place
            if slot.touched:
                view.add_(gradient)
            else:
                view.copy_(gradient)
            parameter.grad = None if group.mixed else view
        slot.touched = True
        if self._last:
            self._count(slot)

    def _count(self, slot: Slot) -> None:
        if id(slot) in self._arrived:
            raise MeshwrightError(
                f"{slot.name} got a second gradient in the last micro-step; run one backward a scope (with recompute, "
                "use_reentrant=False)"
            )
        self._arrived.add(id(slot))
        self._waiting[self._bucket[id(slot)]] -= 1
        if self.overlap:
            ready = self._launched
            while ready < len(self.buckets) and self._waiting[ready] == 0:
                ready += 1
            self._launch(ready)

    def _complete(self) -> None:
        if self.direct:
            return
        self._zero_untouched()
        if self.overlap:
            self._launch(len(self.buckets))

    def _zero_untouched(self) -> None:
        for group, slot in self.parameters.each():
            if not slot.touched:
                slot.of(group.gradient).zero_()
                slot.touched = True

    def _launch(self, stop: int) -> None:
        """Starts the reduction of the buckets before `stop` that have not been started."""
        if self.group is None:
            return
        for bucket in self.buckets[self._launched : stop]:
            if self.measure_noise:
                self._add_square(square_norm(bucket.gradient))
            work = dist.all_reduce(bucket.gradient, group=self.group, async_op=True)
            assert work is not None  # asynchronous calls on a group that this rank is in return one
            self._work.append(work)
        self._launched = max(stop, self._launched)

    def _add_square(self, value: torch.Tensor) -> None:
        self.square_norms = [self.square_norms[0] + value] if self.square_norms else [value]
