"""Activations, norms and dropout on random tensors, on any device; run as a script with TRITON_INTERPRET=1 it prints as JSON,
by case, the largest difference of the kernel from its oracle in fp64, or whether it has the same bits."""

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
    leaf = x.double().clone().requires_grad_()
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


def true_gelu(x: torch.Tensor) -> torch.Tensor:
    """In fp64, every digit of the lower tail too: the ndtr of torch has none left there."""
    return x.double() * torch.special.log_ndtr(x.double()).exp()


def other_bits(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Of bf16: the share of elements that differ, and by how many units in the last place at most."""
    apart = (found.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    return float((apart > 0).double().mean()), float(apart.max())


def tails(kernels: Any, device: Any = "cpu") -> Iterator[tuple[str, float]]:
    """GELU over all of its range, in fp32: errors of the value, absolute, relative to it and for small x, and of the slope;
    then how rounding to bf16 compares with that of the true value, and with the bits of torch."""
    x = torch.linspace(-12.0, 12.0, 40001, dtype=torch.float32, device=device)
    found, expected = kernels.gelu(x).double(), true_gelu(x)
    error = (found - expected).abs()
    relative = torch.where(x == 0, 0.0, error / expected.abs())
    yield "tails value", float(error.max() / 12.0)
    yield "tails relative", float(relative[x.abs() <= 8.0].max())
    yield "tails small", float(relative[x.abs() < 0.5].max())
    slope = kernels.gelu_gradient(torch.ones_like(x), x)
    yield "tails slope", far(slope, gradient_of(nn.functional.gelu, x, torch.ones_like(x)))
    normal = torch.randn(200_000, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).to(device)
    ours = kernels.gelu(normal.float()).bfloat16()  # rounded by torch: the interpreter cuts off
    share, units = other_bits(ours, true_gelu(normal).float().bfloat16())
    yield "tails share of other bits", share
    yield "tails units", units
    yield "tails share of other bits than torch", other_bits(ours, nn.functional.gelu(normal))[0]


def edges(kernels: Any, device: Any = "cpu") -> Iterator[tuple[str, bool]]:
    x = torch.tensor([float("inf"), 1e30, float("nan"), float("-inf"), -1e30, 0.0, -0.0], device=device)
    value, slope = (y.tolist() for y in (kernels.gelu(x), kernels.gelu_gradient(torch.ones_like(x), x)))
    yield "edges above", value[:2] == x[:2].tolist() and slope[:2] == [1.0, 1.0]
    yield "edges no number", value[2] != value[2] and slope[2] != slope[2]
    yield "edges below", max(map(abs, value[3:5] + slope[3:5])) < 1e-13
    yield "edges zero", value[5:] == [0.0, 0.0] and slope[5:] == [0.5, 0.5]


DROPPED = {"odd": ((3, 5, 13), 0.1, 2), "rows": ((2, 3, 1500), 0.5, -7), "of a row": ((9, 24), 0.9, 1)}


def dropped(kernels: Any, device: Any = "cpu") -> Iterator[tuple[str, bool]]:
    """The bits of the plain version, at keys of all sizes. On a CPU bf16 is halved only, where nothing is to be rounded: the
    interpreter would cut off."""
    for kind, dtype in {**DTYPES, "fp64": torch.float64}.items():
        for name, (shape, p, site) in DROPPED.items():
            p = 0.5 if kind == "bf16" and str(device) == "cpu" else p
            x = drawn(*shape, dtype=dtype, device=device)
            keys = torch.randint(-(2**31), 2**31, shape[:-1], generator=torch.Generator().manual_seed(3)).to(torch.int32)
            found = kernels.dropped(x, keys.to(device), *dropout.in_words(site, p))
            yield f"dropout {name} {kind}", torch.equal(found, dropout.plain_dropout(x, keys.to(device), site, p))


NORMS = {"rows": (37, 96), "of a row": (1, 4096), "odd": (3, 5, 13), "1b": (5, 2048), "not 2048": (3, 1040), "none": (0, 8)}


def norm_gradients(
    residual: torch.Tensor, normed: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of x and of weight, by autograd of `nn.RMSNorm`, in fp64."""
    norm = nn.RMSNorm(x.shape[-1], eps=eps, device=x.device, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(weight)
    leaf = x.double().clone().requires_grad_()
    torch.autograd.backward((leaf * 1.0, norm(leaf)), (residual.double(), normed.double()))
    assert leaf.grad is not None and norm.weight.grad is not None
    return leaf.grad, norm.weight.grad


def norms(kernels: Any, device: Any = "cpu", shapes: dict[str, tuple[int, ...]] = NORMS) -> Iterator[tuple[str, float]]:
    """With an eps that counts beside x, which is small in the first row and large in the last."""
    for kind, dtype in DTYPES.items():
        for name, shape in shapes.items():
            residual, normed, x = (drawn(*shape, dtype=dtype, device=device, seed=seed) for seed in range(3))
            weight = drawn(shape[-1], dtype=dtype, device=device, seed=3)
            if x.numel():
                x.view(-1, shape[-1])[0] *= 2.0**-6
                x.view(-1, shape[-1])[-1] *= 2.0**4
            found = kernels.rms_norm_gradient(residual, normed, x, weight, 1e-3)
            for of, a, b in zip(("x", "weight"), found, norm_gradients(residual, normed, x, weight, 1e-3), strict=True):
                yield f"norm of {of} {name} {kind}", far(a, b)


def main() -> None:
    from meshwright.kernels import pointwise_triton, rms_norm_triton

    rms_norm_triton.THREADS = 8 * 32  # few programs, so that one has several rows, and they share them unevenly
    cases = dict(norms(rms_norm_triton))
    for of in (activations, tails, edges, dropped):
        cases.update(of(pointwise_triton))
    print(json.dumps(cases))


if __name__ == "__main__":
    main()
