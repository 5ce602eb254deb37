"""Parameters and buffers of a module: their names, what cannot be trained, and putting others in their place."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.errors import Finding, LayoutError
from meshwright.spec.parameters import Table

__all__ = ["canonical", "check_kinds", "place_buffers", "replace"]


def canonical(model: nn.Module, table: Table | None) -> dict[str, nn.Parameter]:
    """Parameters once each in order of registration; ties under the table's canonical name. Raises LayoutError for a
    tie of the table that the model does not have."""
    every = dict(model.named_parameters(remove_duplicate=False))
    renamed: dict[int, str] = {}
    for name, other in table.ties if table else ():
        if name not in every or other not in every:
            continue
        if every[name] is not every[other]:
            raise LayoutError(f"{other} is declared to be {name}, but the model holds two tensors; tie them before parallelize")
        renamed[id(every[name])] = name
    return {renamed.get(id(parameter), name): parameter for name, parameter in model.named_parameters()}


def check_kinds(parameters: dict[str, nn.Parameter]) -> None:
    """Raises LayoutError where nothing can be trained, or where what is to be trained is no real number."""
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    findings = [
        Finding(name, f"is a trainable parameter of dtype {parameter.dtype}", "Keep its real and imaginary part as two")
        for name, parameter in trained.items()
        if not parameter.dtype.is_floating_point
    ]
    if not trained:
        findings = [Finding("model", "has no trainable parameter", "Let some parameter require a gradient")]
    if findings:
        raise LayoutError(findings=findings)


def replace(model: nn.Module, old: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    """A meta parameter cannot change device in place: put a new one wherever the model holds the old one."""
    new = nn.Parameter(values.new_empty(0), requires_grad=old.requires_grad)
    new.data = values  # a view made into a parameter shares its version with all others of the buffer: autograd would
    # see a weight that arrives during forward as a change of those that were used before
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is old:
                setattr(module, key, new)
    return new


def place_buffers(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Buffers go to the device and are never cast down: position tables and statistics keep their precision."""
    for module in model.modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            kind = torch.promote_types(buffer.dtype, dtype) if buffer.dtype.is_floating_point else buffer.dtype
            placed = torch.empty(buffer.shape, dtype=kind, device=device) if buffer.is_meta else buffer.to(device, kind)
            if placed is not buffer:
                setattr(module, key, placed)
