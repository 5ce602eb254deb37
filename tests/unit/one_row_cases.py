"""One row through a matrix and what is around it, on any device; run as a script with TRITON_INTERPRET=1 it prints a JSON line:
the largest difference of each case from the plain functions in fp64."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import torch
from torch import nn

from meshwright.kernels import one_row
from meshwright.kernels.fused import Heads
from tests.unit.fused_cases import DTYPES, doubled, drawn, largest, norm_of

WIDTHS = {"narrow": (24, 3), "no multiple": (300, 37), "many rows": (40, 70)}
"""Columns, and rows of the matrix."""


def matrix(rows: int, columns: int, dtype: torch.dtype, device: Any, bias: bool) -> nn.Linear:
    made = nn.Linear(columns, rows, bias=bias, dtype=dtype, device=device).requires_grad_(False)
    made.weight.copy_(drawn(rows, columns, dtype=dtype, device=device, seed=1) * columns**-0.5)
    if bias:
        made.bias.copy_(drawn(rows, dtype=dtype, device=device, seed=2))
    return made


def exact(module: nn.Linear) -> nn.Linear:
    other = nn.Linear(module.in_features, module.out_features, module.bias is not None, device=module.weight.device)
    other = other.double().requires_grad_(False)
    other.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
    return other


def wide(*values: Any) -> list[Any]:
    def one(value: Any) -> Any:
        if isinstance(value, nn.Linear):
            return exact(value)
        if isinstance(value, nn.Module):
            return doubled(value)
        if isinstance(value, Heads):
            return Heads(value.group, *wide(*value[1:]))
        return value.double().clone() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return [one(value) for value in values]


class Plain:
    """Nothing runs in a kernel."""

    def __enter__(self) -> None:
        none = lambda device: None
        self.patches = [
            mock.patch("meshwright.kernels.one_row.one_row_kernels", none),
            mock.patch("meshwright.kernels.fused.fused_kernels", none),
        ]
        for patch in self.patches:
            patch.start()

    def __exit__(self, *_: object) -> None:
        for patch in self.patches:
            patch.stop()


def compared(call: Any, *values: Any) -> float:
    """Of what it returns, and of what it changed: tensors among the values."""
    doubles = wide(*values)
    found = call(*values)
    with Plain():
        expected = call(*doubles)
    pairs = [(one, other) for one, other in zip(found, expected, strict=True) if other is not None]
    pairs += [(one, other) for one, other in zip(values, doubles, strict=True) if isinstance(one, torch.Tensor)]
    assert all(one is not None and (not one.is_floating_point() or one.dtype == values[0].dtype) for one, _ in pairs)
    return largest([one for one, _ in pairs], [other for _, other in pairs])


def added(y: torch.Tensor, module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor]:
    total, branch = one_row.linear(y, module, x)
    return (total if branch is None else total + branch,)


def vocabulary(x: Any, branch: Any, norm: Any, module: nn.Linear, out: torch.Tensor) -> tuple[torch.Tensor]:
    return (one_row.vocabulary_linear(x, branch, norm, module.weight, module.bias, out),)


def heads_case(dtype: torch.dtype, device: Any, *, normed: bool, turned: bool, bias: bool, group: int, features: int) -> float:
    kv_heads, width = 2, 44
    x = drawn(1, 1, width, dtype=dtype, device=device)
    norm = norm_of(nn.RMSNorm, width, dtype, device)
    angle = drawn(1, features // 2, device=device, seed=5)
    at_least = torch.promote_types(dtype, torch.float32)
    angles = [f(angle).to(at_least) for f in (torch.cos, torch.sin)] if turned else [None, None]
    norms = [norm_of(nn.RMSNorm, features, dtype, device) for _ in "qk"] if normed else [None, None]
    pools = [drawn(3, 4, kv_heads, features, dtype=dtype, device=device, seed=n) for n in (3, 4)]
    module = matrix(kv_heads * (group + 2) * features, width, dtype, device, bias)
    slots = torch.tensor([6], device=device)
    return compared(one_row.heads_linear, x, None, norm, module, Heads(group, *norms, *angles), *pools, slots)


def cases(device: Any = "cpu", dtypes: Any = tuple(DTYPES)) -> dict[str, float]:
    """By name; the dtype is the last word."""
    found: dict[str, float] = {}
    for word in dtypes:
        dtype = DTYPES[word]

        def some(*shape: int, seed: int = 0, dtype: torch.dtype = dtype) -> torch.Tensor:
            return drawn(*shape, dtype=dtype, device=device, seed=seed)

        for name, (width, rows) in WIDTHS.items():
            x = some(1, 1, width + 8)[..., :width]  # what lies behind it is no zero
            module = matrix(rows, width, dtype, device, bias=name != "narrow")
            rms, layer = (norm_of(kind, width, dtype, device) for kind in (nn.RMSNorm, nn.LayerNorm))
            found[f"add {name} {word}"] = compared(added, x, module, some(1, 1, rows, seed=3))
            out = torch.zeros(1, rows, dtype=dtype, device=device)
            for kind, norm, branch in (("rms", rms, None), ("branch", rms, some(1, 1, width, seed=4)), ("layer", layer, None)):
                found[f"vocabulary {kind} {name} {word}"] = compared(vocabulary, x, branch, norm, module, out)
            up = matrix(10 * rows, width, dtype, device, bias=name == "no multiple")
            found[f"gate {name} {word}"] = compared(one_row.gate_linear, x, None, rms, up, "swiglu", 5)
            found[f"gelu {name} {word}"] = compared(one_row.gate_linear, x, None, layer, module, "gelu_tanh", 0)
        for name, values in HEADS.items():
            found[f"heads {name} {word}"] = heads_case(dtype, device, **values)
    return found


HEADS: dict[str, dict[str, Any]] = {
    "llama": {"normed": False, "turned": True, "bias": False, "group": 4, "features": 16},
    "qwen-2": {"normed": False, "turned": True, "bias": True, "group": 3, "features": 10},
    "qwen-3": {"normed": True, "turned": True, "bias": False, "group": 2, "features": 8},
    "gpt-2": {"normed": False, "turned": False, "bias": True, "group": 1, "features": 6},
    "odd": {"normed": False, "turned": False, "bias": True, "group": 1, "features": 5},
}

if __name__ == "__main__":
    from meshwright.kernels import fused_triton, one_row_triton

    with (
        mock.patch.object(one_row_triton, "MANY", 32),
        mock.patch("meshwright.kernels.one_row.one_row_kernels", lambda device: one_row_triton),
        mock.patch("meshwright.kernels.fused.fused_kernels", lambda device: fused_triton),
    ):
        print(json.dumps(cases()))
