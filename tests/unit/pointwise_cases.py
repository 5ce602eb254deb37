"""Activations and dropout on random tensors, on any device; run as a script with TRITON_INTERPRET=1 it prints as JSON, by case,
the largest difference of the kernel from its oracle in fp64, or whether it has the same bits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from meshwright.kernels import dropout, pointwise

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SWIGLU = {"models": ((3, 5, 96), 16), "of one": ((7, 6), 1), "of four": ((2, 1040), 4), "long": ((2, 8192), 2048)}
"""Shape and gate_rows: a row is no multiple of a block, or a run longer than one."""
SHAPES = {"odd": (3, 7, 13), "a block": (1024,), "blocks": (5, 411), "none": (0, 4)}


def drawn(*shape: int, dtype: torch.dtype, device: Any = "cpu", seed: int = 0) -> torch.Tensor:
    """Twice a standard normal, so that tails are in it."""
    values = 2.0 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return values.to(device=device, dtype=dtype)


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the largest that is expected; 0 for no numbers."""
    if found.shape != expected.shape:
        return float("inf")
    if not found.numel():
        return 0.0
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def gradient_of(function: Any, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """By autograd of the plain function, in fp64."""
    leaf = x.double().requires_grad_()
    function(leaf).backward(gradient.double())
    assert leaf.grad is not None
    return leaf.grad


def activations(kernels: Any, device: Any = "cpu") -> Iterator[tuple[str, float]]:
    for kind, dtype in DTYPES.items():
        for name, shape in SHAPES.items():
            x, gradient = (drawn(*shape, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
            yield f"gelu {name} {kind}", far(kernels.gelu(x), nn.functional.gelu(x.double()))
            expected = gradient_of(nn.functional.gelu, x, gradient)
            yield f"gelu gradient {name} {kind}", far(kernels.gelu_gradient(gradient, x), expected)
        for name, (shape, rows) in SWIGLU.items():
            x = drawn(*shape, dtype=dtype, device=device)
            gradient = drawn(*shape[:-1], shape[-1] // 2, dtype=dtype, device=device, seed=1)
            yield f"swiglu {name} {kind}", far(kernels.swiglu(x, rows), pointwise.plain_swiglu(x.double(), rows))
            expected = gradient_of(lambda leaf, rows=rows: pointwise.plain_swiglu(leaf, rows), x, gradient)
            yield f"swiglu gradient {name} {kind}", far(kernels.swiglu_gradient(gradient, x, rows), expected)


def tails(kernels: Any, device: Any = "cpu") -> Iterator[tuple[str, float]]:
    """What is asked of exact GELU everywhere, in fp32: the value absolutely, and relative to itself; the slope absolutely. Then
    the share of bf16 results that have other bits than torch's, and by how many units in the last place at most."""
    x = torch.linspace(-12.0, 12.0, 40001, dtype=torch.float32, device=device)
    wide = x.double()
    found, expected = kernels.gelu(x).double(), wide * torch.special.ndtr(wide)
    yield "tails value", float(((found - expected).abs() / wide.abs().clamp(min=1.0)).max())
    some = wide.abs() < 7.5
    yield "tails relative", float(((found - expected).abs() / expected.abs().clamp(min=1e-300))[some & (wide != 0)].max())
    small = wide.abs() < 0.5
    yield "tails small", float(((found - expected).abs() / expected.abs().clamp(min=1e-300))[small & (wide != 0)].max())
    slope = kernels.gelu_gradient(torch.ones_like(x), x)
    yield "tails slope", far(slope, gradient_of(nn.functional.gelu, x, torch.ones_like(x)))
    drawn_16 = torch.randn(200_000, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).to(device)
    ours, theirs = kernels.gelu(drawn_16.float()).bfloat16(), nn.functional.gelu(drawn_16)
    apart = (ours.view(torch.int16).int() - theirs.view(torch.int16).int()).abs()
    yield "tails share of other bits", float((apart > 0).double().mean())
    yield "tails units", float(apart.max())
    edges = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e30, -1e30, 0.0], device=device)
    value = kernels.gelu(edges).cpu()
    near = value[1].abs() < 1e-12 and value[4].abs() < 1e-12 and value[5] == 0
    yield "edges", bool(value[0] == float("inf") and value[2].isnan() and value[3] == edges[3].cpu() and near)


DROPPED = {"odd": ((3, 5, 13), 0.1, 2), "rows": ((2, 3, 1500), 0.5, -7), "of a row": ((9, 24), 0.9, 1)}


def dropped(kernels: Any, device: Any = "cpu") -> Iterator[tuple[str, bool]]:
    """The bits of the plain version, at keys of all sizes."""
    for kind, dtype in {**DTYPES, "fp64": torch.float64}.items():
        for name, (shape, p, site) in DROPPED.items():
            x = drawn(*shape, dtype=dtype, device=device)
            keys = torch.randint(-(2**31), 2**31, shape[:-1], generator=torch.Generator().manual_seed(3)).to(torch.int32)
            found = kernels.dropped(x, keys.to(device), *dropout.in_words(site, p))
            yield f"dropout {name} {kind}", torch.equal(found, dropout.plain_dropout(x, keys.to(device), site, p))


def main() -> None:
    from meshwright.kernels import pointwise_triton

    cases = {}
    for of in (activations, tails, dropped):
        cases.update(of(pointwise_triton))
    print(json.dumps(cases))


if __name__ == "__main__":
    main()
