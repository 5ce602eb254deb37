"""Data parallelism: gradients gathered into the flat buffers while backward runs, and summed over the data ranks.

What moves a parameter, in bytes read and written, between autograd's own tensor and the flat buffer:

                                                        bf16, fp16 weights       fp32 weights
    first micro-step: a hook copies                     r2 + w4 =  6             r4 + w4      =  8
    later ones: added (by a hook; fp32 by autograd)     r2 + r4 + w4 = 10        r4 + r4 + w4 = 12
    one rank and one micro-step: nothing to be summed,
    so the buffer has the dtype of the weights          r2 + w2 =  4             r4 + w4      =  8

and then the norm reads the buffer once (4 or 2) and the update once (4 or 2) beside master and two moments (r12 + w12) and
the working copy (w2). A buffer is never cleared: the first micro-step overwrites it. Nothing is divided: the loss is already
a sum over the global number of targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from meshwright.errors import MeshwrightError
from meshwright.parallel.flat import Bucket, FlatParameters, Group, Slot, master_dtype
from meshwright.parallel.norm import square_norm

__all__ = ["Gradients"]


class Gradients:
    """Accumulates and reduces gradients.

    group: ranks that see different samples; None for one. overlap: reduce during the last backward, else after it (the
    same buckets in the same order, hence the same bits). Backward may run only inside `scope`, once each.
    """

    _in_place = True
    """Whether later micro-steps of full-precision weights may be added by autograd itself."""

    def __init__(self, parameters: FlatParameters, group: dist.ProcessGroup | None, *, bucket_bytes: int, overlap: bool):
        self.parameters = parameters
        self.group = group
        self.overlap = overlap
        self.measure_noise = False
        """Ask, before the first micro-step, for `square_norms`."""
        self.square_norms: list[torch.Tensor] = []
        """Square norms of this rank's own part of the gradient: of all its micro-steps where there are several ranks, of
        the first of several micro-steps on one rank."""
        self.buckets = parameters.buckets(bucket_bytes)
        self._bucket = self._numbers()
        self._missing: list[set[int]] = []
        self._launched = 0
        self._work: list[dist.Work] = []
        self._scopes = 0
        self._open = self._last = False
        self._settled = False
        self._at_once = overlap
        """Whether a bucket is started as soon as it is full."""
        for owner, slot in parameters.each():
            slot.parameter.register_post_accumulate_grad_hook(self._hook(owner, slot))

    @contextmanager
    def scope(self, last: bool) -> Iterator[None]:
        """Around the backward of one micro-step; `last` on the last one of the step."""
        if self._open or self._last:
            raise MeshwrightError("a backward scope inside another, or after the last one of the step: call zero() first")
        self._open, self._last = True, last
        self._scopes += 1
        self._begin(last)
        self._missing = [{id(slot) for slot in bucket.slots} for bucket in self.buckets]
        try:
            yield
        finally:
            self._open = False
        self._end(last)

    def _begin(self, last: bool) -> None:
        if self._scopes == 1:
            for group in self.parameters.groups:
                group.use_gradient(group.dtype if last and self.group is None else master_dtype(group.dtype))

    def _end(self, last: bool) -> None:
        alone = self.group is None and self._scopes == 1 and not last
        if last or (alone and self.measure_noise):
            self._zero_untouched()
        if alone and self.measure_noise:
            self.square_norms = [self.square()]
        if last and self.overlap:
            self._launch(len(self.buckets))
        elif last and self.group is not None:
            self._measure(len(self.buckets))

    def finish(self, wait: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """Waits until every bucket is reduced; only the waiting is inside `wait()`."""
        if self.group is None:
            return
        with wait():
            self._launch(len(self.buckets))
            self._complete()
        if self.overlap and not self._settled:
            self._settle()

    def zero(self) -> None:
        """Forgets the gradients of the step."""
        for slot in self.parameters.slots:
            slot.parameter.grad = None
            slot.touched = False
        self.square_norms = []
        self._scopes = self._launched = 0
        self._last = False

    def square(self) -> torch.Tensor:
        """Sum of squares of all gradients held here, loss scale included: 0-d."""
        return torch.stack([square_norm(part.gradient) for part in self.parameters.ranges]).sum()

    @property
    def noise_of_one_micro_step(self) -> bool:
        """Whether `square_norms` are of one micro-step, not of all that this rank did."""
        return self.group is None

    def _hook(self, group: Group, slot: Slot) -> Callable[[torch.Tensor], None]:
        def arrived(parameter: torch.Tensor) -> None:
            self._arrive(group, slot, parameter)

        return arrived

    def _arrive(self, group: Group, slot: Slot, parameter: torch.Tensor) -> None:
        if not self._open:
            raise MeshwrightError(f"backward reached {slot.name} outside engine.backward_scope")
        gradient = parameter.grad
        assert gradient is not None  # autograd has just set it
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        view = self._view(group, slot)
        if gradient.data_ptr() != view.data_ptr():  # else autograd has added in place
            if slot.touched:
                view.add_(gradient)
            else:
                view.copy_(gradient)
            parameter.grad = view if self._in_place and view.dtype == parameter.dtype else None
        slot.touched = True
        if self._reducing:
            self._count(slot)

    def _view(self, group: Group, slot: Slot) -> torch.Tensor:
        """Where the gradient of a parameter is summed over micro-steps."""
        return slot.of(group.gradient)

    def _source(self, bucket: Bucket) -> torch.Tensor:
        """What is reduced for a bucket."""
        return bucket.gradient

    def _count(self, slot: Slot) -> None:
        missing = self._missing[self._bucket[id(slot)]]
        if id(slot) not in missing:
            raise MeshwrightError(
                f"{slot.name} got a second gradient in one micro-step: run one backward a scope, and recompute with "
                "use_reentrant=False"
            )
        missing.remove(id(slot))
        if self._at_once:
            ready = self._launched
            while ready < len(self.buckets) and not self._missing[ready]:
                ready += 1
            self._launch(ready)

    def _zero_untouched(self) -> None:
        for group, slot in self.parameters.each():
            if not slot.touched:
                self._view(group, slot).zero_()
                slot.touched = True

    def _launch(self, stop: int) -> None:
        """Starts the reduction of the buckets before `stop` that have not been started."""
        if self.group is None:
            return
        if self._at_once:
            self._measure(stop)
        for bucket in self.buckets[self._launched : stop]:
            self._reduce(bucket)
        self._launched = max(stop, self._launched)

    @property
    def _reducing(self) -> bool:
        """Whether the buckets of the present micro-step are reduced."""
        return self._last

    def _reduce(self, bucket: Bucket) -> None:
        """Starts the reduction of one bucket."""
        work = dist.all_reduce(bucket.gradient, group=self.group, async_op=True)
        assert work is not None  # asynchronous, on a group that this rank is in
        self._work.append(work)

    def _complete(self) -> None:
        """Waits for everything that was started."""
        for work in self._work:
            work.wait()
        self._work = []

    def _settle(self) -> None:
        """After the first step: buckets that some rank did not complete, because the model leaves a parameter unused, go
        last, or the ones behind them would never leave before the end of backward. The ranks agree on the order; it
        changes no value."""
        device = self.parameters.groups[0].device
        late = torch.tensor([bool(missing) for missing in self._missing], dtype=torch.int32, device=device)
        dist.all_reduce(late, op=dist.ReduceOp.MAX, group=self.group)
        order = sorted(range(len(self.buckets)), key=late.tolist().__getitem__)
        self.buckets = [self.buckets[number] for number in order]
        self._bucket = self._numbers()
        self._settled = True

    def _numbers(self) -> dict[int, int]:
        return {id(slot): number for number, bucket in enumerate(self.buckets) for slot in bucket.slots}

    def _measure(self, stop: int) -> None:
        """Adds the square norms of the buckets that `_launch(stop)` is about to reduce."""
        for bucket in self.buckets[self._launched : stop] if self.measure_noise else ():
            part = square_norm(self._source(bucket))
            self.square_norms = [self.square_norms[0] + part] if self.square_norms else [part]
