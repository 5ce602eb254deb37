"""The kernels of loss and optimizer on random tensors; run as a script with TRITON_INTERPRET=1 it prints a JSON line: the
largest difference of each from its oracle, relative to numbers above 1. The dtype is the last word of a name."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import torch

from meshwright.kernels import adamw, cross_entropy
from meshwright.spec.labels import IGNORE
from tests.unit.fused_cases import DTYPES, drawn

SIZE = 5000
"""Elements: more than a block, and no multiple of one."""


def largest(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """nan where one of them has one."""
    differences = [
        ((a.double() - e.double()).abs() / e.double().abs().clamp(min=1)).max() for a, e in zip(found, expected, strict=True)
    ]
    return float(torch.stack(differences).max())


def softmax(kernels: Any, dtype: torch.dtype, vocab: int, smoothing: float, z_loss: float) -> float:
    logits, labels = drawn(9, vocab, dtype=dtype) * 3, torch.arange(9) * vocab // 9
    for row, other in ((1, labels[1]), (2, 0), (3, vocab - 1)):  # the answer; as good as one before it; as one behind it
        logits[row, [labels[row], other]] = 40.0
    labels[::4] = IGNORE
    expected = cross_entropy._softmax_rows(logits.to(torch.float64, copy=True), labels, smoothing, z_loss, True)
    found = kernels.softmax_rows(logits.clone(), labels, smoothing, z_loss, True)
    return largest(list(found), list(expected))


def updated(kernels: Any, dtype: torch.dtype, which: str, skip: float) -> float:
    """Masters in at least fp32, gradients and working copy in `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    scale, flag = torch.tensor(0.3, dtype=wide), torch.tensor(skip)
    results = []
    for chosen in (kernels, None):
        w, m, v = drawn(SIZE, dtype=wide), drawn(SIZE, dtype=wide, seed=1), drawn(SIZE, dtype=wide, seed=2).square()
        grad, copy = drawn(SIZE, dtype=dtype, seed=3), torch.zeros(SIZE, dtype=dtype)
        options: dict[str, Any] = {"lr": 0.1, "grad_scale": scale, "working": copy, "skip": flag}
        with mock.patch.object(adamw, "optimizer_kernels", lambda device, chosen=chosen: chosen):
            if which == "adamw":
                adamw.adamw_(w, grad, m, v, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1, step=3, **options)
            else:
                adamw.sgd_(w, grad, m, momentum=0.9, weight_decay=0.1, **options)
        results.append([w, m, v, copy])
    return largest(*results)


def scaled(kernels: Any, dtype: torch.dtype) -> float:
    """From at least fp32 to `dtype`: a factor that bf16 cannot hold is not rounded before."""
    x, factor = drawn(7, 731, dtype=torch.promote_types(dtype, torch.float32)), torch.tensor(1.0 + 2.0**-9)
    return largest([kernels.scaled_cast(x, factor, dtype)], [x.double() * factor.double()])


def cases(kernels: Any) -> dict[str, float]:
    found = {}
    for name, dtype in DTYPES.items():
        for vocab in (37, 9000):
            for smoothing, z_loss in ((0.0, 0.0), (0.1, 0.01)):
                found[f"softmax {vocab} {smoothing} {name}"] = softmax(kernels, dtype, vocab, smoothing, z_loss)
        for which in ("adamw", "sgd") if name != "fp64" else ():  # the interpreter keeps constants in fp32
            for skip in (0.0, 1.0):
                found[f"{which} {skip} {name}"] = updated(kernels, dtype, which, skip)
        found[f"scaled {name}"] = scaled(kernels, dtype)
    return found


if __name__ == "__main__":
    from meshwright.kernels import triton_kernels

    print(json.dumps(cases(triton_kernels)))
