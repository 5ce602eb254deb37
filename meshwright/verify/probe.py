"""What a model does with a batch, found by running it: whether rows see each other, and where numbers stop being finite."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from meshwright.compat import BatchNorm
from meshwright.errors import Finding
from meshwright.parallel.lesson import tensors_in

__all__ = ["first_nonfinite", "mixes_rows"]

Call = Callable[[nn.Module, Any], Any]
"""(model, batch) to logits, a loss, or anything with tensors in it."""
Agree = Callable[[bool], bool]
"""Whether it is so on any rank."""
TARGETS = frozenset(
    {"label", "labels", "target", "targets", "y", "attention_mask", "documents", "cu_seqlens", "positions", "position_ids"}
    | {"samples", "select", "lengths", "length", "weight", "weights", "mask"}
)
"""Entries of a batch that are no rows of inputs: they stay as they are."""
ROUNDINGS = 4096
"""Roundings of the largest element that are taken for one: sums over a batch are made in another order for other values."""


@torch.no_grad()
def mixes_rows(model: nn.Module, batch: Any, call: Call, agree: Agree = bool) -> Finding | None:
    """Whether what `call(model, batch)` gives depends on two rows of the batch together, and what in the model makes it so.

    Two rows are replaced by others in turn: f(a', b') - f(a', b) - f(a, b') + f(a, b) is zero for whatever is row by row, and
    for sums and means over rows. batch: a tensor, a tuple or list (whose first entry has the inputs), a mapping or a dataclass;
    rows come first in its tensors. The model is run as it is, in training or evaluation, with the same random numbers each
    time, without gradients, and its buffers are what they were. None where rows do not mix, and with fewer than two of them.

    It takes four forwards, and four more, whose intermediate results are kept, where rows mix. agree: of several ranks whose
    forwards exchange something; all of them then go on where one does. Without it call it before `parallelize`.
    """
    four = _four(batch)
    if agree(four is None) or four is None:
        return None
    with _unchanged(model):
        if not agree(_interact([_flat(value) for value in _runs(model, four, call)])):
            return None
        return _finding(model, _culprit(model, four, call))


def _runs(model: nn.Module, batches: list[Any], call: Call) -> Generator[Any, None, None]:
    """Lazily, each from the same state of buffers and generators."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    for batch in batches:
        for buffer, values in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(values)
        devices = [] if (device := _device(model)).type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda", enabled=True):
            torch.manual_seed(0)
            yield call(model, batch)


def _device(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    before = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, values in zip(model.buffers(), before, strict=True):
            buffer.copy_(values)


def _flat(value: Any) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors_in(value) if tensor.is_floating_point()]


def _interact(results: list[list[torch.Tensor]]) -> bool:
    for both, first, second, none in zip(*results, strict=True):
        if not both.shape == first.shape == second.shape == none.shape:
            continue  # as many as the values ask for: nothing can be said of it
        wide = torch.promote_types(both.dtype, torch.float32)
        interaction = (both.to(wide) - first.to(wide) - second.to(wide) + none.to(wide)).abs()
        largest = max(float(tensor.abs().max()) if tensor.numel() else 0.0 for tensor in (both, first, second, none))
        if interaction.numel() and float(interaction.max()) > ROUNDINGS * torch.finfo(both.dtype).eps * largest:
            return True
    return False


# ---- which module ---------------------------------------------------------------------------------------------------------


def _culprit(model: nn.Module, batches: list[Any], call: Call) -> str | None:
    """The first module that is done with an output in which rows mix: what is inside of it was done before, and did not."""
    runs: list[list[tuple[str, list[torch.Tensor]]]] = []
    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: runs[-1].append((name, _flat(output))))
        for name, module in model.named_modules()
    ]
    try:
        source = _runs(model, batches, call)
        for _ in batches:
            runs.append([])
            next(source)
        source.close()
    finally:
        for hook in hooks:
            hook.remove()
    for calls in zip(*runs, strict=False):
        if len({name for name, _ in calls}) > 1:
            return None  # the model goes other ways for other values
        if _interact([tensors for _, tensors in calls]):
            return calls[0][0]
    return None


def _finding(model: nn.Module, name: str | None) -> Finding:
    if name is None:
        what = "the result for one row depends on the other rows of its batch, so that it depends on the layout"
        return Finding(type(model).__name__, what, "Look for what is computed over the first dimension")
    modules = dict(model.named_modules())
    module = modules[name]
    where = f"{name} ({type(module).__name__})" if name else type(module).__name__
    if isinstance(module, BatchNorm):
        what = "normalises by the statistics of the batch, so that a row's result depends on the other rows"
        fix = (
            "Over several ranks keep batch_norm: synchronised, and rows a micro-step x data ranks as on one device; or use "
            "GroupNorm or LayerNorm, or model.eval() for it"
        )
        return Finding(where, what, fix)
    if (outer := _sequence_first(modules, name)) is not None:
        what = f"was left at batch_first=False and is fed rows first: it attends across the rows of a batch ({outer})"
        return Finding(where, what, f"Make {outer.partition(' ')[0]} with batch_first=True, or feed it [positions, rows, ...]")
    what = "is the first module in which the result for one row depends on the other rows of its batch"
    return Finding(where, what, "The result then depends on the layout: compute it row by row")


def _sequence_first(modules: Mapping[str, nn.Module], name: str) -> str | None:
    """The outermost module around `name` that a user makes with batch_first, and made without."""
    found = None
    parts = name.split(".") if name else []
    for length in range(len(parts), -1, -1):
        path = ".".join(parts[:length])
        module = modules.get(path)
        attention = getattr(module, "self_attn", module)
        if getattr(attention, "batch_first", None) is False:
            found = f"{type(module).__name__} {path}".strip()
    return found


# ---- batches --------------------------------------------------------------------------------------------------------------


def _four(batch: Any) -> list[Any] | None:
    """The batch with rows (a, b) as (a', b'), (a', b), (a, b'), (a, b)."""
    rows = _rows(batch)
    if rows < 2:
        return None
    first, second = 0, rows - 1
    return [_replaced(batch, rows, chosen) for chosen in ((first, second), (first,), (second,), ())]


def _rows(batch: Any) -> int:
    sizes = [tensor.shape[0] for tensor in tensors_in(_inputs(batch)) if tensor.dim()]
    return sizes[0] if sizes else 0


def _inputs(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key not in TARGETS}
    if isinstance(batch, tuple | list):
        return batch[0] if batch else ()
    if dataclasses.is_dataclass(batch):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if field.name not in TARGETS}
    return batch


def _replaced(batch: Any, rows: int, chosen: tuple[int, ...]) -> Any:
    def changed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _changed(value, chosen) if value.dim() and value.shape[0] == rows else value
        if isinstance(value, Mapping):
            return {key: changed(item) for key, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(changed(item) for item in value)
        return value

    new = changed(_inputs(batch))
    if isinstance(batch, Mapping):
        return {**batch, **new}
    if isinstance(batch, tuple | list):
        return type(batch)([new, *batch[1:]])
    return dataclasses.replace(batch, **new) if dataclasses.is_dataclass(batch) else new  # type: ignore[type-var]


def _changed(tensor: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
    """Rows become the next row, read backwards along the last dimension: values that the model knows."""
    new = tensor.clone()
    for row in chosen:
        other = tensor[(row + 1) % tensor.shape[0]]
        new[row] = other.flip(-1) if other.dim() else other
    return new


# ---- numbers ---------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def first_nonfinite(model: nn.Module, batch: Any, call: Call, agree: Agree = bool) -> Finding | None:
    """Where the first number that is not finite comes from: a parameter or buffer, an input, or the first module whose
    output has one. None where all outputs are finite. Runs the model once; under ZeRO-3 every rank must call it.

    agree: of several ranks whose forwards exchange something; none then runs it where one has found a parameter or an input.
    """
    found = _nonfinite_given(model, batch)
    if agree(found is not None):
        return found
    bad: list[str] = []

    def look(name: str, output: Any) -> None:
        if not bad and not all(map(_finite, tensors_in(output))):
            bad.append(name)

    modules = dict(model.named_modules())
    hooks = [module.register_forward_hook(lambda _, __, out, name=name: look(name, out)) for name, module in modules.items()]
    try:
        with _unchanged(model):
            result = call(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    if bad:
        where = f"{bad[0]} ({type(modules[bad[0]]).__name__})" if bad[0] else type(model).__name__
        return Finding(where, "is the first module whose output is not finite, from finite inputs and weights")
    if not all(map(_finite, tensors_in(result))):
        return Finding("loss", "is not finite, and every module's output is", "Look at what is computed behind the model")
    return None


def _nonfinite_given(model: nn.Module, batch: Any) -> Finding | None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.untyped_storage().nbytes() and not _finite(tensor):
            return Finding(name, "holds numbers that are not finite", "They came from an update or a checkpoint")
    if not all(map(_finite, tensors_in(_inputs(batch)))):
        return Finding("batch", "holds numbers that are not finite", "Look at the data")
    return None


def _finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
