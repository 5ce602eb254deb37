"""Triton kernels. Import through `kernels.accelerated`, which knows where they can run.

fp64 tensors are computed in fp64, everything else in fp32. Settings that stay the same for a run are compile-time
constants: a run-time number would reach the kernel rounded to fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["adamw_", "scaled_cast", "sgd_", "softmax_rows"]

_LOWEST = -1.0e38
"""Start of a running maximum: finite, so that a difference of two of them is no NaN."""


@triton.jit
def _softmax_rows(
    logits_ptr,
    row_stride,
    labels_ptr,
    loss_ptr,
    z_ptr,
    hit_ptr,
    vocab,
    smoothing: tl.constexpr,
    share: tl.constexpr,
    z_loss: tl.constexpr,
    ignore: tl.constexpr,
    lowest: tl.constexpr,
    gradient: tl.constexpr,
    wide: tl.constexpr,
    threads: tl.constexpr,
    each: tl.constexpr,
    ahead: tl.constexpr,
):
    """A row. A thread has `each` neighbours of every `block`, and a running maximum and sum of exponentials for all that it
    meets: one exponential a number, where a pair of them a lane would need two. `ahead` blocks are read before any is used."""
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * row_stride
    label = tl.load(labels_ptr + row)
    block: tl.constexpr = threads * each
    lanes = tl.arange(0, threads)[:, None] * each + tl.arange(0, each)[None, :]
    if label == ignore:
        tl.store(loss_ptr + row, 0.0)
        tl.store(z_ptr + row, 0.0)
        tl.store(hit_ptr + row, 0)
        if gradient:
            for start in range(0, vocab, block):
                column = start + lanes
                tl.store(base + column, tl.zeros([threads, each], wide), mask=column < vocab)
    else:
        top = tl.full([threads], lowest, wide)
        total = tl.zeros([threads], wide)
        plain = tl.zeros([threads], wide)
        for start in range(0, vocab, block * ahead):
            for part in tl.static_range(ahead):
                column = start + part * block + lanes
                inside = column < vocab
                x = tl.load(base + column, mask=inside, other=float("-inf")).to(wide)
                higher = tl.maximum(top, tl.max(x, 1))
                total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)
                top = higher
                if share != 0.0:
                    plain += tl.sum(tl.where(inside, x, 0.0), 1)
        peak = tl.max(top, axis=0)
        sum_all = tl.sum(total * tl.exp(top - peak), axis=0)
        lse = peak + tl.log(sum_all)
        known = (label >= 0) & (label < vocab)
        # A label outside of the vocabulary gives a NaN loss, never a read outside of the row.
        picked = tl.load(base + label, mask=known, other=float("nan")).to(wide)
        earlier = 0  # numbers as large as the label's before it: the first of them is the model's answer
        if picked == peak:
            for before in range(0, label.to(tl.int32), block):
                other = before + lanes
                equal = tl.load(base + other, mask=other < label, other=float("-inf")).to(wide) == peak
                earlier += tl.sum(tl.sum(equal.to(tl.int32), 1), 0)
        target = picked * (1.0 - smoothing)
        if share != 0.0:
            target += tl.sum(plain, axis=0) * share
        tl.store(loss_ptr + row, lse - target)
        tl.store(z_ptr + row, z_loss * lse * lse)
        tl.store(hit_ptr + row, ((picked == peak) & (earlier == 0)).to(tl.int32))
        if gradient:
            factor = (1.0 + 2.0 * z_loss * lse) / sum_all
            for start in range(0, vocab, block):
                column = start + lanes
                inside = column < vocab
                x = tl.load(base + column, mask=inside, other=0.0).to(wide)
                grad = tl.exp(x - peak) * factor
                if share != 0.0:
                    grad -= share
                grad = tl.where(column == label, grad - (1.0 - smoothing), grad)
                tl.store(base + column, grad, mask=inside)


SOFTMAX = {"threads": 1024, "each": 16, "ahead": 2}
"""Of a row of logits: threads, the neighbours that each has at a time, blocks that are read ahead."""


def softmax_rows(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, smoothing: float, z_loss: float, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss without z, z term, hit) of each row; the gradient overwrites the logits, which come back."""
    from meshwright.spec.labels import IGNORE

    rows, vocab = logits_CV.shape
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    loss_C, z_C = (torch.empty(rows, dtype=wide, device=logits_CV.device) for _ in range(2))
    hit_C = torch.empty(rows, dtype=torch.int32, device=logits_CV.device)
    threads = min(SOFTMAX["threads"], max(32, triton.next_power_of_2(vocab) // SOFTMAX["each"]))
    if rows:
        _softmax_rows[(rows,)](
            logits_CV, logits_CV.stride(0), labels_C.contiguous(), loss_C, z_C, hit_C, vocab,
            smoothing=smoothing, share=smoothing / vocab, z_loss=z_loss, ignore=IGNORE, lowest=_LOWEST, gradient=gradient,
            wide=_wide(wide), num_warps=threads // 32, **{**SOFTMAX, "threads": threads},
        )  # fmt: skip
    return loss_C, z_C, hit_C, logits_CV


def _wide(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


@triton.jit
def _adamw(
    master_ptr,
    grad_ptr,
    avg_ptr,
    sq_ptr,
    working_ptr,
    decay_ptr,
    rate_ptr,
    root_ptr,
    scale_ptr,
    skip_ptr,
    size,
    beta1: tl.constexpr,
    beta2: tl.constexpr,
    eps: tl.constexpr,
    scaled: tl.constexpr,
    skippable: tl.constexpr,
    copied: tl.constexpr,
    wide: tl.constexpr,
    block: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    if skippable:
        size = tl.where(tl.load(skip_ptr) == 0, size, 0)
    inside = at < size
    g = tl.load(grad_ptr + at, mask=inside, other=0.0).to(wide)
    if scaled:
        g *= tl.load(scale_ptr).to(wide)
    w = tl.load(master_ptr + at, mask=inside, other=0.0).to(wide)
    m = tl.load(avg_ptr + at, mask=inside, other=0.0).to(wide)
    v = tl.load(sq_ptr + at, mask=inside, other=0.0).to(wide)
    m += (g - m) * (1.0 - beta1)
    v = v * beta2 + g * g * (1.0 - beta2)
    w = w * tl.load(decay_ptr).to(wide)
    w -= tl.load(rate_ptr).to(wide) * m / (tl.sqrt(v) / tl.load(root_ptr).to(wide) + eps)
    tl.store(master_ptr + at, w, mask=inside)
    tl.store(avg_ptr + at, m, mask=inside)
    tl.store(sq_ptr + at, v, mask=inside)
    if copied:
        tl.store(working_ptr + at, w.to(tl.float32), mask=inside)


@triton.jit
def _sgd(
    master_ptr,
    grad_ptr,
    buffer_ptr,
    working_ptr,
    rate_ptr,
    scale_ptr,
    skip_ptr,
    size,
    momentum: tl.constexpr,
    weight_decay: tl.constexpr,
    buffered: tl.constexpr,
    scaled: tl.constexpr,
    skippable: tl.constexpr,
    copied: tl.constexpr,
    wide: tl.constexpr,
    block: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    if skippable:
        size = tl.where(tl.load(skip_ptr) == 0, size, 0)
    inside = at < size
    g = tl.load(grad_ptr + at, mask=inside, other=0.0).to(wide)
    if scaled:
        g *= tl.load(scale_ptr).to(wide)
    w = tl.load(master_ptr + at, mask=inside, other=0.0).to(wide)
    g += w * weight_decay
    if buffered:
        g += tl.load(buffer_ptr + at, mask=inside, other=0.0).to(wide) * momentum
        tl.store(buffer_ptr + at, g, mask=inside)
    w -= g * tl.load(rate_ptr).to(wide)
    tl.store(master_ptr + at, w, mask=inside)
    if copied:
        tl.store(working_ptr + at, w.to(tl.float32), mask=inside)


@triton.jit
def _scaled_cast(x_ptr, out_ptr, factor_ptr, size, wide: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < size
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(wide)
    tl.store(out_ptr + at, x * tl.load(factor_ptr).to(wide), mask=inside)


_BLOCK = 1024


def scaled_cast(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x * factor in one pass: a contiguous tensor of x's shape and `dtype`. factor: 0-d, on the same device."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=dtype)
    if size := x.numel():
        block = 4 * _BLOCK  # 16 bytes a thread and more
        _scaled_cast[(triton.cdiv(size, block),)](x, out, factor, size, wide=_wide(x.dtype), block=block, num_warps=8)
    return out


def adamw_(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    factors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    numbers: tuple[float, float, float],
    grad_scale: torch.Tensor | None,
    working: torch.Tensor | None,
    skip: torch.Tensor | None,
) -> None:
    """One pass. factors: 0-d (1 - lr * weight decay, lr / correction 1, sqrt of correction 2); numbers: betas, eps."""
    size = master.numel()
    if size:
        _adamw[(triton.cdiv(size, _BLOCK),)](
            master, grad, exp_avg, exp_avg_sq, master if working is None else working, *factors,
            master if grad_scale is None else grad_scale, master if skip is None else _flag(skip), size, *numbers,
            scaled=grad_scale is not None, skippable=skip is not None, copied=working is not None,
            wide=_wide(master.dtype), block=_BLOCK, num_warps=4,
        )  # fmt: skip


def sgd_(
    master: torch.Tensor,
    grad: torch.Tensor,
    buffer: torch.Tensor | None,
    lr: torch.Tensor,
    numbers: tuple[float, float],
    grad_scale: torch.Tensor | None,
    working: torch.Tensor | None,
    skip: torch.Tensor | None,
) -> None:
    """One pass. numbers: momentum, weight decay."""
    size = master.numel()
    if size:
        _sgd[(triton.cdiv(size, _BLOCK),)](
            master, grad, master if buffer is None else buffer, master if working is None else working, lr,
            master if grad_scale is None else grad_scale, master if skip is None else _flag(skip), size, *numbers,
            buffered=buffer is not None, scaled=grad_scale is not None, skippable=skip is not None,
            copied=working is not None, wide=_wide(master.dtype), block=_BLOCK, num_warps=4,
        )  # fmt: skip


def _flag(skip: torch.Tensor) -> torch.Tensor:
    return skip.to(torch.float32) if skip.dtype == torch.bool else skip
