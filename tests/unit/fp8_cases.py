"""The cast of `kernels.fp8` in Triton against the plain one, on any device; run as a script with TRITON_INTERPRET=1 it prints a
JSON line: by case, how many bytes differ."""

from __future__ import annotations

import json
from typing import Any

import torch

from meshwright.kernels import fp8

SHAPES = {"one block": (16, 16), "filled up": (33, 48), "several blocks": (150, 272)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def drawn(rows: int, columns: int, dtype: torch.dtype, representable: bool) -> torch.Tensor:
    """Rows of very different size. representable: numbers that 8 bits can say, at most 2**10 apart in the matrix: the
    interpreter cuts off the bits that a device rounds."""
    generator = torch.Generator().manual_seed(rows)
    if representable:
        sizes = torch.exp2(torch.randint(-2, 3, (rows, 1), generator=generator).float())
        numbers = torch.randint(8, 16, (rows, columns), generator=generator)
        signs = torch.randint(0, 2, (rows, columns), generator=generator) * 2 - 1
        return (numbers * signs * sizes).to(dtype)
    sizes = torch.exp2(torch.randn(rows, 1, generator=generator) * 8)
    return (torch.randn(rows, columns, generator=generator) * sizes).to(dtype)


def differing(kernels: Any, x: torch.Tensor, straight: bool, turned: bool) -> int:
    rows = fp8.row_largest(x)
    found = kernels.cast(x, rows, rows.amax(), straight, turned)
    expected = fp8.plain_cast(x, rows, rows.amax(), straight, turned)
    assert [each.shape for each in found] == [each.shape for each in expected]
    pairs = zip(found, expected, strict=True)
    return sum(int((a.view(torch.uint8) != b.contiguous().view(torch.uint8)).sum()) for a, b in pairs)


def cases(kernels: Any, device: torch.device | str, representable: bool) -> dict[str, int]:
    out = {}
    for shape, (rows, columns) in SHAPES.items():
        for name, dtype in DTYPES.items():
            x = drawn(rows, columns, dtype, representable).to(device)
            for straight, turned in ((True, True), (True, False), (False, True)):
                out[f"{shape} {name} {straight} {turned}"] = differing(kernels, x, straight, turned)
            x[2] = 0.0
            out[f"{shape} {name} zeros"] = differing(kernels, x, True, True)
    return out


def poisoned(kernels: Any, device: torch.device | str, value: float) -> list[bool]:
    """By row of [4, 16] with one such number in row 1, whether its 8 bits and scale stand for NaN; then of the whole."""
    x = torch.ones(4, 16, device=device)
    x[1, 3] = value
    rows = fp8.row_largest(x)
    straight, scale, turned, whole = kernels.cast(x, rows, rows.amax(), True, True)
    by_row = (straight.float() * scale[:, None])[:4].isnan().all(1).tolist()
    return [*by_row, bool((turned.float() * whole[:, None])[:, :4].isnan().all())]


if __name__ == "__main__":
    from meshwright.kernels import fp8_triton

    differences = cases(fp8_triton, "cpu", representable=True)
    infinite = {str(value): poisoned(fp8_triton, "cpu", value) for value in (float("inf"), float("-inf"), float("nan"))}
    print(json.dumps({"differing": differences, "poisoned": infinite}))
