"""What goes into a module that is not ours, and what comes out of it as a loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from meshwright.compat import NormBase
from meshwright.errors import Finding, UserError

__all__ = ["cast_buffers", "cast_inputs", "scalar_loss"]


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """From now on the model's forward gets floating tensors, in tuples, lists and dictionaries too, in the dtype of its
    weights."""

    def cast(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _cast(args, dtype), _cast(kwargs, dtype)

    model.register_forward_pre_hook(cast, with_kwargs=True)


def cast_buffers(model: nn.Module, persistent: Collection[str], dtype: torch.dtype) -> None:
    """Floating buffers that a checkpoint keeps, such as tables of positions, get the dtype of the weights, with which they are
    added. Statistics of norms keep theirs, and so do buffers that are no part of the state: of rotary frequencies and the like
    their modules see to the precision."""
    for name, module in model.named_modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            kept = isinstance(module, NormBase) or f"{name}.{key}".lstrip(".") not in persistent
            if buffer.is_floating_point() and not kept and buffer.dtype != dtype:
                setattr(module, key, buffer.to(dtype))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, dtype) for item in value))
    if type(value) in (tuple, list):
        return type(value)(_cast(item, dtype) for item in value)
    if type(value) is dict:
        return {key: _cast(item, dtype) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **{name: _cast(item, dtype) for name, item in values.items()})
    return value


def scalar_loss(parts: Any) -> torch.Tensor:
    """What backward begins with: `parts.loss_sum`, and what is learned beside it, `parts.balance_sum`, where there is any.
    Raises UserError where that cannot be trained with."""
    loss = getattr(parts, "loss_sum", None)
    if not isinstance(loss, torch.Tensor):
        what = f"is {type(parts).__name__}, which has no tensor `loss_sum`"
        raise UserError(findings=[Finding("loss", what, "Return LossParts: the sum over the targets, not their mean")])
    if loss.numel() != 1:
        what = f"has shape {list(loss.shape)}, and backward starts from one number"
        raise UserError(findings=[Finding("loss", what, "Sum it over the targets")])
    if not loss.requires_grad:
        what = "depends on no trainable parameter"
        fix = "It may have been made under torch.no_grad(), detached, or from integers; or what it uses is frozen"
        raise UserError(findings=[Finding("loss", what, fix)])
    balance = getattr(parts, "balance_sum", None)
    return loss if balance is None else loss + balance
