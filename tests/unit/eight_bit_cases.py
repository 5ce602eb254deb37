"""Kernels over numbers of 8 bits against their plain versions, on any device; run as a script with TRITON_INTERPRET=1 it prints
a JSON line: the largest difference of each case."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import torch
from torch import nn

from meshwright.kernels import fused, one_row, rowwise
from meshwright.kernels.fused import Heads
from meshwright.kernels.paged_attention import Pages, Singles, gathered_attention
from meshwright.kernels.rowwise import E4M3, ScaledLinear, to_e4m3
from tests.unit.fused_cases import DTYPES, drawn, largest, norm_of

WIDTHS = {"narrow": (24, 6), "no multiple": (300, 38), "many rows": (40, 70)}
"""Columns, and rows of the matrix."""
BEFORE = {"narrow": (24, 4, 40), "no multiple": (300, 1, 75), "llama-1b": (2048, 16, 8192), "llama-3-8b": (4096, 16, 14336)}
"""Width, rows of a gate beside each other, and features of a feed-forward layer."""


def matrix(rows: int, columns: int, dtype: torch.dtype, device: Any, bias: bool) -> ScaledLinear:
    weight = drawn(rows, columns, device=device, seed=1) * columns**-0.5
    weight *= torch.logspace(-2, 1, rows, dtype=torch.float64, device=device)[:, None]  # a scale for all would not do
    return ScaledLinear(weight.to(dtype), drawn(rows, dtype=dtype, device=device, seed=2) if bias else None)


def exact(module: ScaledLinear) -> nn.Linear:
    """What it computes, in fp64."""
    rows, columns = module.weight.shape
    other = nn.Linear(columns, rows, module.bias is not None, dtype=torch.float64, device=module.weight.device)
    with torch.no_grad():
        other.weight.copy_(module.weight.double() * module.scale.double()[:, None])
        if module.bias is not None:
            other.bias.copy_(module.bias)
    return other.requires_grad_(False)


def same_bytes(found: torch.Tensor, expected: torch.Tensor, share: float = 0.01) -> bool:
    """Up to one step of 8 bits, where two nearly equal numbers are on both sides of a bound: of this share at most. The
    interpreter (Triton 3.7) forgets the carry where it rounds up to a power of two, and gives half of it."""
    one, other = found.float(), expected.float()
    step = other.abs().clamp(min=2.0**-6) / 8.0
    if found.device.type == "cpu":
        one = torch.where(2 * one == other, other, one)
    return bool(((one - other).abs() <= step).all()) and float((one != other).double().mean()) < share


def rounded(dtype: torch.dtype, device: Any) -> float:
    """Scales of rows of all sizes, when the bytes are right."""
    from meshwright.kernels.rowwise_triton import quantize_rows

    x = drawn(7, 200, device=device) * torch.tensor([1e-20, 1e-3, 1.0, 30.0, 1e4, 1e9, 0.0], device=device)[:, None]
    x = x.to(dtype)
    (found, scale), (expected, other) = quantize_rows(x), rowwise.plain_quantize_rows(x)
    assert found.dtype == E4M3 and scale.shape == other.shape == (7, 1) and not found[6].float().any()
    assert same_bytes(found, expected)
    return float(((scale - other) / other).abs().max())


def different(found: rowwise.Rounded, x: torch.Tensor) -> int:
    """Bytes and scales that are not those of x, rounded by a kernel of its own."""
    from meshwright.kernels.rowwise_triton import quantize_rows

    values, scale = quantize_rows(x)
    assert found.values.shape == x.shape and found.scale.shape == (*x.shape[:-1], 1) and found.dtype == x.dtype
    assert found.values.float().isfinite().any() and float(scale[0, 0]) != float(scale[0, 1])
    bits = ((found.values, values, torch.uint8), (found.scale, scale, torch.int32))
    return sum(int((one.view(kind) != other.view(kind)).sum()) for one, other, kind in bits)


def before(dtype: torch.dtype, device: Any, width: int, gate_rows: int, features: int) -> float:
    """What a norm and a gate round themselves, bit by bit. Rows of all sizes; zeros, and some that are no numbers."""
    sizes = torch.tensor([1e-3, 1.0, 30.0, 1e4, 0.0, 1.0], dtype=torch.float64, device=device).view(2, 3, 1)
    x, branch = ((drawn(2, 3, width, device=device, seed=n) * sizes).to(dtype) for n in (0, 1))
    x[1, 2, width // 2] = torch.nan
    count = 0
    for kind in (nn.RMSNorm, nn.LayerNorm):
        norm = norm_of(kind, width, dtype, device)
        for added in (branch, None):
            total, found = fused.add_norm_rounded(x, added, norm)
            expected, normed = fused.add_norm(x, added, norm)
            count += different(found, normed) + int((total != expected).sum() - expected.isnan().sum())
    up = (drawn(2, 3, 2 * features, device=device, seed=2) * sizes).to(dtype)
    up[1, 2, [0, features + 1]] = torch.nan
    for name in ("swiglu", "gelu_tanh") if width < 1000 else ("swiglu",):
        count += different(fused.gate_rounded(up, name, gate_rows), fused.gate(up, name, gate_rows))
    return float(count)


def through(dtype: torch.dtype, device: Any, width: int, rows: int, bias: bool) -> float:
    """A single row through a matrix, with and without the other one of a pair."""
    x, residual = drawn(1, 1, width, dtype=dtype, device=device), drawn(1, 1, rows, dtype=dtype, device=device, seed=3)
    norm = norm_of(nn.RMSNorm, width, dtype, device)
    one, pair = (matrix(n, width, dtype, device, bias) for n in (rows, 10 * rows))
    found = [one_row.linear(x, one, residual)[0], one_row.gate_linear(x, None, norm, pair, "swiglu", 5)[1]]
    normed = nn.functional.rms_norm(x.double(), (width,), norm.weight.double(), norm.eps)
    expected = [residual.double() + exact(one)(x.double()), fused.plain_gate(exact(pair)(normed), "swiglu", 5)]
    return largest(found, expected)


def pools_of(dtype: torch.dtype, device: Any, kv_heads: int, features: int) -> list[torch.Tensor]:
    return [to_e4m3(drawn(3, 4, kv_heads, features, dtype=dtype, device=device, seed=n)) for n in (3, 4)]


def written(dtype: torch.dtype, device: Any) -> float:
    """Queries of one row and of four, when the pages are right."""
    kv_heads, features, width, group = 2, 16, 44, 3
    angle = drawn(4, features // 2, device=device, seed=5).to(torch.promote_types(dtype, torch.float32))
    cos, sin = torch.cos(angle), torch.sin(angle)
    worst = 0.0
    for rows in (1, 4):
        heads = Heads(group, None, None, cos[:rows].contiguous(), sin[:rows].contiguous())
        module = matrix(kv_heads * (group + 2) * features, width, dtype, device, True)
        module.scale[-features:] *= 1e3  # values of the last head: some are too large
        x = drawn(1, rows, width, dtype=dtype, device=device)
        slots, pools, others = (
            torch.tensor([6, 0, 11, 3], device=device)[:rows],
            *(pools_of(dtype, device, 2, 16) for _ in "fe"),
        )
        _, q = one_row.heads_linear(x, None, None, module, heads, *pools, slots)
        with mock.patch("meshwright.kernels.fused.fused_kernels", lambda device: None):
            other = fused.turn_and_write(exact(module)(x.double())[0].to(dtype), heads, *others, slots)
        worst = max(worst, largest([q], [other.double()]))
        for pool, own in zip(pools, others, strict=True):
            assert same_bytes(pool, own, 0.1 if dtype == torch.bfloat16 else 0.01)  # rounded to bf16 before, by each
        assert max(float(own.float().max()) for own in others) == 448.0  # what was larger
    return worst


def attended(dtype: torch.dtype, device: Any, features: int) -> float:
    """Over pages of 8 bits, a prompt and single tokens, whose lengths the host knows or only the device."""
    from meshwright.kernels.paged_triton import paged_attention

    every = torch.arange(256, dtype=torch.uint8, device=device).view(E4M3).float() / 64.0
    pools = [to_e4m3(drawn(40, 16, 2, features, device=device, seed=n)) for n in (0, 1)]
    some = every[~every.isnan()].repeat(2 * features // 2)[: 16 * 2 * features].view(16, 2, features)
    pools[1][3] = to_e4m3(some)  # the smallest numbers and both zeros among them
    lengths, counts = (600, 33, 40), (1, 18, 1)
    tables = torch.randperm(40, generator=torch.Generator().manual_seed(0)).repeat(3, 1).to(device)
    q = drawn(20, 8, features, dtype=dtype, device=device, seed=2)
    pages = Pages(torch.zeros(20, dtype=torch.int64, device=device), tables, counts, lengths)
    found = paged_attention(q, *pools, pages)
    expected = gathered_attention(q.double(), *(pool.double() for pool in pools), pages)
    single = torch.tensor([600, 40], dtype=torch.int32, device=device)
    alone = Singles(pages.slots[:2], tables[:2], single)
    assert torch.equal(paged_attention(q[[0, 19]], *pools, alone), found[[0, 19]])
    return float((found.double() - expected).abs().max())


def cases(device: Any = "cpu", dtypes: Any = tuple(DTYPES)) -> dict[str, float]:
    """By name; the dtype is the last word."""
    found: dict[str, float] = {}
    for word in dtypes:
        dtype = DTYPES[word]
        found[f"rows {word}"] = rounded(dtype, device)
        for name, (width, rows) in WIDTHS.items():
            found[f"matrix {name} {word}"] = through(dtype, device, width, rows, name != "narrow")
        for name, shape in BEFORE.items():
            found[f"before {name} {word}"] = before(dtype, device, *shape)
        found[f"pages {word}"] = written(dtype, device)
        if (torch.device(device).type, word) != ("cpu", "bf16"):  # the interpreter multiplies bf16 as whole numbers
            found[f"attention {word}"] = attended(dtype, device, 16)
    found["attention, values in pairs fp16"] = attended(torch.float16, device, 48)
    if torch.device(device).type != "cpu":
        found["attention, values in pairs bf16"] = attended(torch.bfloat16, device, 128)
    return found


if __name__ == "__main__":
    from meshwright.kernels import fused_triton, one_row_triton

    with (
        mock.patch.object(one_row_triton, "MANY", 32),
        mock.patch("meshwright.kernels.one_row.one_row_kernels", lambda device: one_row_triton),
        mock.patch("meshwright.kernels.fused.fused_kernels", lambda device: fused_triton),
    ):
        print(json.dumps(cases()))
