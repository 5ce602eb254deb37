"""`kernels.fused` in Triton. Import through `kernels.accelerated`.

fp64 tensors are computed in fp64, everything else in fp32; what a model rounds in between (a sum of the residual stream, a
normed head) is rounded here too. What is reduced over is in one program and in one order, whatever is beside it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

from meshwright.kernels.early import launch_options
from meshwright.kernels.fused import GATES, Heads
from meshwright.kernels.rowwise import Rounded, rounded
from meshwright.kernels.rowwise_triton import as_stored, empty_rows, row_warps, store_rounded

__all__ = ["add_norm", "add_norm_rounded", "best", "gate", "gate_rounded", "turn_and_write"]

_KINDS = {name: number for number, name in enumerate(GATES)}
_CHUNK = 8192
"""Logits of a program."""
_WHOLE = 16384
"""Most features of a feed-forward layer that a program keeps in registers."""


def _wide(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


@triton.jit
def _normed(first, second, weight_ptr, column, half, features, eps, dtype: tl.constexpr, wide: tl.constexpr):
    """Both halves of the features of some heads [lanes, columns], times a weight [E]; rounded as the model does."""
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / features + eps)[:, None]
    a = tl.load(weight_ptr + column, mask=column < half, other=0.0).to(wide)[None, :]
    b = tl.load(weight_ptr + half + column, mask=half + column < features, other=0.0).to(wide)[None, :]
    return (first * scale * a).to(dtype).to(wide), (second * scale * b).to(dtype).to(wide)


@triton.jit
def _turn_and_write(
    qkv_ptr,
    token_stride,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    kv_heads,
    group: tl.constexpr,
    features: tl.constexpr,
    lanes: tl.constexpr,
    columns: tl.constexpr,
    normed: tl.constexpr,
    q_eps: tl.constexpr,
    k_eps: tl.constexpr,
    turned: tl.constexpr,
    wide: tl.constexpr,
    early: tl.constexpr,
):
    """One token, and one key/value head with its queries: lane G is the key, G + 1 the value. A head is in two halves."""
    if early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    half: tl.constexpr = (features + 1) // 2
    lane = tl.arange(0, lanes)[:, None]
    column = tl.arange(0, columns)
    low, high = (column < half)[None, :], (half + column < features)[None, :]
    source = qkv_ptr + token * token_stride + (kv_head * (group + 2) + lane) * features + column[None, :]
    first = tl.load(source, mask=(lane < group + 2) & low, other=0.0).to(wide)
    second = tl.load(source + half, mask=(lane < group + 2) & high, other=0.0).to(wide)
    if normed:
        q_first, q_second = _normed(first, second, q_norm_ptr, column, half, features, q_eps, dtype, wide)
        k_first, k_second = _normed(first, second, k_norm_ptr, column, half, features, k_eps, dtype, wide)
        first = tl.where(lane < group, q_first, tl.where(lane == group, k_first, first))
        second = tl.where(lane < group, q_second, tl.where(lane == group, k_second, second))
    if turned:
        cos = tl.load(cos_ptr + token * half + column, mask=column < half, other=0.0)[None, :]
        sin = tl.load(sin_ptr + token * half + column, mask=column < half, other=0.0)[None, :]
        turning = lane <= group
        turned_first = tl.where(turning, first * cos - second * sin, first)
        second = tl.where(turning, second * cos + first * sin, second)
        first = turned_first
    first, second = first.to(dtype), second.to(dtype)
    query = q_ptr + ((token * kv_heads + kv_head) * group + lane) * features + column[None, :]
    tl.store(query, first, mask=(lane < group) & low)
    tl.store(query + half, second, mask=(lane < group) & high)
    place = (tl.load(slots_ptr + token) * kv_heads + kv_head) * features + column[None, :] + lane * 0
    first, second = as_stored(first, keys_ptr), as_stored(second, keys_ptr)
    tl.store(keys_ptr + place, first, mask=(lane == group) & low)
    tl.store(keys_ptr + place + half, second, mask=(lane == group) & high)
    tl.store(values_ptr + place, first, mask=(lane == group + 1) & low)
    tl.store(values_ptr + place + half, second, mask=(lane == group + 1) & high)


def turn_and_write(
    qkv: torch.Tensor, heads: Heads, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """As `kernels.fused.turn_and_write`; rows of qkv, pages and norms are contiguous."""
    tokens, kv_heads, features = qkv.shape[0], keys.shape[2], keys.shape[3]
    q = torch.empty(tokens, kv_heads * heads.group, features, dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm = heads.q_norm, heads.k_norm
    normed, turned = q_norm is not None and k_norm is not None, heads.cos is not None
    lanes = triton.next_power_of_2(heads.group + 2)
    columns = triton.next_power_of_2((features + 1) // 2)
    _turn_and_write[(tokens, kv_heads)](
        qkv,
        qkv.stride(0),
        q_norm.weight if q_norm is not None else qkv,
        k_norm.weight if k_norm is not None else qkv,
        heads.cos if turned else qkv,
        heads.sin if turned else qkv,
        q,
        keys,
        values,
        slots,
        kv_heads,
        group=heads.group,
        features=features,
        lanes=lanes,
        columns=columns,
        normed=normed,
        q_eps=_eps(q_norm),
        k_eps=_eps(k_norm),
        turned=turned,
        wide=_wide(qkv.dtype),
        num_warps=max(1, min(4, lanes * columns // 256)),
        **launch_options(),
    )
    return q


def _eps(norm: nn.Module | None) -> float:
    return 0.0 if norm is None else float(norm.eps)  # type: ignore[arg-type]  # given: models.layers.make_norm


@triton.jit
def _add_norm(
    x_ptr,
    branch_ptr,
    weight_ptr,
    bias_ptr,
    total_ptr,
    out_ptr,
    scale_ptr,
    width,
    eps: tl.constexpr,
    added: tl.constexpr,
    rms: tl.constexpr,
    biased: tl.constexpr,
    rounding: tl.constexpr,
    wide: tl.constexpr,
    block: tl.constexpr,
    early: tl.constexpr,
):
    """One row. rounding: into 8 bits, with a scale."""
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, block)
    inside = column < width
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(wide)
    if early:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0)
    if added:
        x = (x.to(wide) + tl.load(branch_ptr + row + column, mask=inside, other=0.0).to(wide)).to(x.dtype)
        tl.store(total_ptr + row + column, x, mask=inside)
    y = x.to(wide)
    if not rms:
        y = tl.where(inside, y - tl.sum(y, 0) / width, 0.0)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / width + eps) * weight
    if biased:
        y += tl.load(bias_ptr + column, mask=inside, other=0.0).to(wide)
    if rounding:
        y = tl.where(inside, y, 0.0).to(x.dtype).to(wide)
        # A thread may have 16 numbers of 8 bits, but then it would add other squares than where nothing is rounded.
        together: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
        store_rounded(y, inside, tl.max_contiguous(row + column, together), out_ptr, scale_ptr, tl.program_id(0))
    else:
        tl.store(out_ptr + row + column, y.to(x.dtype), mask=inside)


def add_norm(x: torch.Tensor, branch: torch.Tensor | None, norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.fused.add_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _launch_add_norm(x, branch, norm, out, None), out


def add_norm_rounded(x: torch.Tensor, branch: torch.Tensor | None, norm: nn.Module) -> tuple[torch.Tensor, Rounded]:
    """As `kernels.fused.add_norm_rounded`."""
    values, scale = empty_rows(*x.shape, device=x.device)
    return _launch_add_norm(x, branch, norm, values, scale), Rounded(values, scale, x.dtype)


def _launch_add_norm(
    x: torch.Tensor, branch: torch.Tensor | None, norm: nn.Module, out: torch.Tensor, scale: torch.Tensor | None
) -> torch.Tensor:
    """x + branch; out is written, and the scales of its rows where it has 8 bits."""
    width = x.shape[-1]
    x = x.contiguous()
    total = x if branch is None else torch.empty_like(x)
    bias: Any = norm.bias if isinstance(norm, nn.LayerNorm) else None
    block = triton.next_power_of_2(width)
    _add_norm[(x.numel() // width,)](
        x,
        x if branch is None else branch.contiguous(),
        norm.weight,
        x if bias is None else bias,
        total,
        out,
        x if scale is None else scale,
        width,
        eps=_eps(norm),
        added=branch is not None,
        rms=not isinstance(norm, nn.LayerNorm),
        biased=bias is not None,
        rounding=scale is not None,
        wide=_wide(x.dtype),
        block=block,
        num_warps=row_warps(block),
        **launch_options(),
    )
    return total


@triton.jit
def activated(x, kind: tl.constexpr):
    """By the place of its name in `kernels.fused.GATES`."""
    if kind == 0:
        return x / (1.0 + tl.exp(-x))
    elif kind == 1:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif kind == 2:
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 0.5 (1 + tanh(z / 2)) = 1 / (1 + exp(-z))
        return x / (1.0 + tl.exp(-z))
    else:
        return tl.maximum(x, 0.0)


@triton.jit
def _gate(
    x_ptr,
    out_ptr,
    scale_ptr,
    width,
    kind: tl.constexpr,
    rows: tl.constexpr,
    rounding: tl.constexpr,
    wide: tl.constexpr,
    block: tl.constexpr,
    early: tl.constexpr,
):
    """`block` features of a row. rounding: into 8 bits, with a scale; then they are all of its features."""
    if early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * block + tl.arange(0, block)
    inside = column < width
    source = x_ptr + row * 2 * width + column // rows * (2 * rows) + column % rows
    first = tl.load(source, mask=inside, other=0.0)
    value = tl.load(source + rows, mask=inside, other=0.0)
    y = (activated(first.to(wide), kind).to(first.dtype).to(wide) * value.to(wide)).to(first.dtype)
    if rounding:
        store_rounded(y.to(wide), inside, row * width + column, out_ptr, scale_ptr, row)
    else:
        tl.store(out_ptr + row * width + column, y, mask=inside)


def gate(x: torch.Tensor, name: str, gate_rows: int) -> torch.Tensor:
    """As `kernels.fused.gate`, with a gate."""
    width = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(width))
    grid = (triton.cdiv(width, block), out.numel() // width)
    sizes: dict[str, Any] = {"kind": _KINDS[name], "rows": gate_rows, "wide": _wide(x.dtype), "block": block}
    _gate[grid](x.contiguous(), out, x, width, rounding=False, **sizes, **launch_options())
    return out


def gate_rounded(x: torch.Tensor, name: str, gate_rows: int) -> Rounded:
    """As `kernels.fused.gate_rounded`, with a gate."""
    width = x.shape[-1] // 2
    block = triton.next_power_of_2(width)
    if block > _WHOLE:
        return rounded(gate(x, name, gate_rows))
    values, scale = empty_rows(*x.shape[:-1], width, device=x.device)
    sizes: dict[str, Any] = {"kind": _KINDS[name], "rows": gate_rows, "wide": _wide(x.dtype), "block": block}
    _gate[(1, scale.numel())](
        x.contiguous(), values, scale, width, rounding=True, **sizes, num_warps=row_warps(block), **launch_options()
    )
    return Rounded(values, scale, x.dtype)


@triton.jit
def _best(
    logits_ptr,
    row_stride,
    top_ptr,
    index_ptr,
    vocab,
    wide: tl.constexpr,
    block: tl.constexpr,
    chunk: tl.constexpr,
    early: tl.constexpr,
):
    """The largest of `chunk` logits of one row, and its first place; NaN where one is."""
    if early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0), tl.program_id(1)
    lanes = tl.arange(0, block)
    top = tl.full([block], float("-inf"), wide)
    place = tl.full([block], 0, tl.int32) + vocab
    wrong = tl.zeros([block], tl.int32)
    for start in range(part * chunk, part * chunk + chunk, block):
        column = start + lanes
        x = tl.load(logits_ptr + row.to(tl.int64) * row_stride + column, mask=column < vocab, other=float("-inf")).to(wide)
        wrong = tl.where(x != x, 1, wrong)
        place = tl.where(x > top, column, place)
        top = tl.where(x > top, x, top)
    peak = tl.max(top, 0)
    at = row * tl.num_programs(1) + part
    tl.store(index_ptr + at, tl.min(tl.where(top == peak, place, vocab), 0))
    tl.store(top_ptr + at, tl.where(tl.max(wrong, 0) > 0, float("nan"), peak))


@triton.jit
def _best_of_parts(top_ptr, index_ptr, out_ptr, out_stride, parts, vocab, lanes: tl.constexpr, early: tl.constexpr):
    if early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, lane = tl.program_id(0), tl.arange(0, lanes)
    top = tl.load(top_ptr + row * parts + lane, mask=lane < parts, other=float("-inf"))
    index = tl.load(index_ptr + row * parts + lane, mask=lane < parts, other=0)
    wrong = tl.max((top != top).to(tl.int32), 0)
    top = tl.where(top != top, float("-inf"), top)
    peak = tl.max(top, 0)
    first = tl.min(tl.where(top == peak, index, vocab), 0)
    broken = (wrong > 0) | (peak == float("inf")) | (peak == float("-inf"))
    tl.store(out_ptr + row, tl.minimum(first, vocab - 1).to(tl.int64))
    tl.store(out_ptr + out_stride + row, broken.to(tl.int64))


def best(logits: torch.Tensor, out: torch.Tensor) -> None:
    """As `kernels.fused.best`; the rows of out are contiguous."""
    rows, vocab = logits.shape
    if not rows:
        return
    parts, block = triton.cdiv(vocab, _CHUNK), min(2048, triton.next_power_of_2(vocab))
    wide = torch.promote_types(logits.dtype, torch.float32)
    top = torch.empty(rows, parts, dtype=wide, device=logits.device)
    index = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    sizes: dict[str, Any] = {"block": block, "chunk": _CHUNK, "wide": _wide(logits.dtype)}
    lanes, early = triton.next_power_of_2(parts), launch_options()
    _best[(rows, parts)](logits, logits.stride(0), top, index, vocab, **sizes, **early)
    _best_of_parts[(rows,)](top, index, out, out.stride(0), parts, vocab, lanes=lanes, num_warps=1, **early)
