"""One-pass optimizer updates over flat tensors: AdamW and SGD with momentum.

A pass reads master, gradient and moments once, applies the gradient factor (clip coefficient and 1 / loss scale),
updates everything in place and writes the low-precision working copy. On an accelerator it is one Triton kernel. Elsewhere
AdamW is torch's own function, on a CPU its kernel of one pass, and SGD its formula, both in blocks that stay in the cache; they
are the oracle of the Triton kernels. Nothing here waits for the device.

All tensors of a call are contiguous, of the same number of elements and on one device; their shape does not matter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.adamw import adamw as torch_adamw

from meshwright.kernels.accelerated import optimizer_kernels

__all__ = ["adamw_", "sgd_"]

_BLOCK = 1 << 20
"""Elements a block on a CPU: what stays in the last cache between the passes; a smaller one is eaten by calls."""

_LANES = 64
"""Elements of a CPU's widest vector, or a multiple. torch's kernel rounds what is left over by another order of operations."""


def _check(master: torch.Tensor, *others: torch.Tensor | None) -> None:
    for tensor in (master, *others):
        if tensor is not None and (not tensor.is_contiguous() or tensor.numel() != master.numel()):
            raise ValueError(
                f"a fused update needs contiguous tensors of one size: {tuple(master.shape)}, {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}"
            )


def _number(value: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A 0-d tensor beside `like`, made without a copy from the host."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.full((), value, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def _correction(beta: float, step: int | torch.Tensor) -> float | torch.Tensor:
    """1 - beta^step. In fp64: 1 - 0.999^1 in fp32 is off by 1e-5 of its value."""
    if isinstance(step, torch.Tensor):
        return 1.0 - torch.pow(torch.full((), beta, dtype=torch.float64, device=step.device), step)
    return 1.0 - beta**step


def adamw_(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int | torch.Tensor,
    grad_scale: torch.Tensor | None = None,
    working: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
) -> None:
    """AdamW with decoupled weight decay, as `torch.optim.AdamW` (arXiv:1711.05101, algorithm 2), in place.

    master, exp_avg, exp_avg_sq  fp32 or fp64, updated
    grad        any floating dtype, left as it is; its value is grad * grad_scale
    lr, step    numbers, or 0-d tensors on the device; step counts from 1 and includes this update
    grad_scale  0-d tensor: clip coefficient times 1 / loss scale
    working     low-precision copy, rewritten from the new master in the same pass
    skip        0-d tensor; where it is not zero nothing changes, the working copy included (fp16 overflow)

    Only a plain-torch update on a device without Triton reads `skip`, and `lr` and `step` as tensors, on the host.
    """
    _check(master, grad, exp_avg, exp_avg_sq, working)
    kernels = optimizer_kernels(master.device)
    if kernels is not None:
        correction1, correction2 = _correction(beta1, step), _correction(beta2, step)
        rate, root = _number(lr / correction1, master), _number(correction2**0.5, master)
        decay = _number(1.0 - lr * weight_decay, master)
        kernels.adamw_(master, grad, exp_avg, exp_avg_sq, (decay, rate, root), (beta1, beta2, eps), grad_scale, working, skip)
        return
    if skip is not None and bool(skip):
        return
    options = {"lr": float(lr), "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    factor = None if grad_scale is None or _is_one(grad_scale) else grad_scale
    alone = factor is None and working is None and grad.dtype == master.dtype  # nothing is read twice
    size, wide = max(master.numel(), 1) if alone else _block_size(master), _scratch(master)
    for w, g, m, v, out in _blocks(master, grad, exp_avg, exp_avg_sq, working, size=size):
        _adamw_block(w, _scaled(g, factor, wide), m, v, int(step), options)
        if out is not None:
            out.copy_(w)


def _is_one(factor: torch.Tensor) -> bool:
    """On a device that would have to wait for the answer: no."""
    return factor.device.type == "cpu" and float(factor) == 1.0


def _adamw_block(
    w: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, step: int, options: dict[str, Any]
) -> None:
    """torch's update of one block; on a CPU every element by the same instructions, wherever the block begins and ends, so that
    a shard gives the bits of the whole."""
    cpu = w.device.type == "cpu"
    rest = w.numel() % _LANES if cpu else 0
    whole = w.numel() - rest

    def update(*tensors: torch.Tensor) -> None:
        params, grads, averages, squares, steps = ([tensor] for tensor in (*tensors, torch.tensor(step - 1.0)))
        torch_adamw(
            params, grads, averages, squares, [], steps, fused=cpu, foreach=False, amsgrad=False, maximize=False, **options
        )

    if whole:
        update(w[:whole], g[:whole], m[:whole], v[:whole])
    if rest:
        padded = [torch.nn.functional.pad(tensor[whole:], (0, _LANES - rest)) for tensor in (w, g, m, v)]
        update(*padded)
        for tensor, new in zip((w, m, v), (padded[0], *padded[2:]), strict=True):
            tensor[whole:] = new[:rest]


def sgd_(
    master: torch.Tensor,
    grad: torch.Tensor,
    buffer: torch.Tensor | None,
    *,
    lr: float | torch.Tensor,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    grad_scale: torch.Tensor | None = None,
    working: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
) -> None:
    """SGD with momentum as `torch.optim.SGD` (weight decay is added to the gradient), in place.

    buffer  momentum, zeros before the first step, which makes that step equal to torch's; None only without momentum.
    The others as in `adamw_`.
    """
    if momentum and buffer is None:
        raise ValueError("momentum needs a buffer")
    _check(master, grad, buffer, working)
    kernels = optimizer_kernels(master.device)
    if kernels is not None:
        kernels.sgd_(master, grad, buffer, _number(lr, master), (momentum, weight_decay), grad_scale, working, skip)
        return
    if skip is not None and bool(skip):
        return
    pace, wide = float(lr), _scratch(master)
    for w, g, m, out in _blocks(master, grad, buffer, working, size=_block_size(master)):
        g = _scaled(g, grad_scale, wide)
        if weight_decay:
            g = torch.add(g, w, alpha=weight_decay, out=wide[: w.numel()])
        if m is not None:
            g = m.mul_(momentum).add_(g)
        w.add_(g, alpha=-pace)
        if out is not None:
            out.copy_(w)


def _block_size(flat: torch.Tensor) -> int:
    """On an accelerator one block: launches cost more there than cache misses."""
    return _BLOCK if flat.device.type == "cpu" else max(flat.numel(), 1)


def _scratch(master: torch.Tensor) -> torch.Tensor:
    return master.new_empty(min(master.numel(), _block_size(master)))


def _scaled(g: torch.Tensor, grad_scale: torch.Tensor | None, scratch: torch.Tensor) -> torch.Tensor:
    """The gradient's value in the master's dtype, in `scratch` unless it is that already."""
    if g.dtype != scratch.dtype:
        g = scratch[: g.numel()].copy_(g)
    return g if grad_scale is None else torch.mul(g, grad_scale, out=scratch[: g.numel()])


def _blocks(*tensors: torch.Tensor | None, size: int) -> Iterator[tuple[Any, ...]]:
    """Views of the same `size` elements of every tensor, block after block."""
    first = tensors[0]
    assert first is not None
    count = -(-first.numel() // size)
    return zip(*(itertools.repeat(None, count) if t is None else t.view(-1).split(size) for t in tensors), strict=False)
