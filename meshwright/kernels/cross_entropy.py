"""Output matrix and softmax cross-entropy in one, chunk by chunk: the logits of all rows never exist at once.

Gradients are made in the forward pass, while a chunk's logits are at hand; backward only multiplies by the incoming
scalar. Softmax statistics are in at least fp32 (fp64 stays fp64), matrix products in the dtype of the inputs.

Shapes: N rows, D width, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from meshwright.kernels.accelerated import scaled_cast
from meshwright.kernels.accelerated import softmax_rows as fast_softmax_rows
from meshwright.spec.labels import IGNORE

__all__ = ["SoftmaxRows", "chunk_rows", "linear_cross_entropy"]

SoftmaxRows = Callable[
    [torch.Tensor, torch.Tensor, float, float, bool], tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
]
"""Signature of `_softmax_rows`."""

_CHUNK_BYTES = {"cpu": 32 * 2**20}
_CHUNK_BYTES_ACCELERATOR = 2 * 2**30 + 2**28
"""Bytes of a chunk's logits. An accelerator wants few, large products (8,192 rows of 128,256 bf16 logits are 2.1 GB);
a CPU wants the chunk near its last cache."""


def chunk_rows(rows: int, vocab: int, logit: torch.Tensor) -> int:
    """Rows of a chunk whose logits, of the dtype and on the device of `logit`, are within the budget."""
    budget = _CHUNK_BYTES.get(logit.device.type, _CHUNK_BYTES_ACCELERATOR)
    most = max(1, budget // max(1, vocab * logit.element_size()))
    tile = 128 if most >= 128 else 1  # whole tiles of a matrix product, where the budget allows one
    most -= most % tile
    even = -(-rows // max(1, -(-rows // most)))  # equal chunks, no short last one
    return max(1, min(rows, -(-even // tile) * tile))


_ALIGNED_ROWS = 64
"""Rows of the weight are filled up with zeros to a multiple of this where a kernel works in place: a row of logits that does
not begin at a multiple of 16 bytes takes matrix products four times as long (BERT's 30,522 on an H200)."""


def _softmax_rows(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, smoothing: float, z_loss: float, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss without z, z term, hit) of each row and d(loss + z)/d(logits) in the logits' dtype. Oracle of the kernel.

    The logits' memory may be reused for the gradient.
    """
    vocab = logits_CV.shape[1]
    x_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    valid_C = labels_C != IGNORE
    weight_C = valid_C.to(x_CV.dtype)
    index_C1 = torch.where(valid_C, labels_C, 0)[:, None]
    top_C, best_C = x_CV.max(dim=1)
    picked_C = x_CV.gather(1, index_C1)[:, 0]
    target_C = picked_C * (1.0 - smoothing)
    if smoothing:
        target_C = target_C + x_CV.mean(dim=1) * smoothing
    x_CV = x_CV.sub_(top_C[:, None]).exp_()
    sum_C = x_CV.sum(dim=1)
    lse_C = top_C + sum_C.log()
    loss_C = torch.where(valid_C, lse_C - target_C, 0.0)
    z_C = torch.where(valid_C, z_loss * lse_C.square(), 0.0)
    hit_C = valid_C & (best_C == labels_C)
    if gradient:
        x_CV.mul_((torch.where(valid_C, 1.0 + 2.0 * z_loss * lse_C, 0.0) / sum_C)[:, None])
        if smoothing:
            x_CV.sub_((weight_C * (smoothing / vocab))[:, None])
        x_CV.scatter_add_(1, index_C1, (weight_C * (smoothing - 1.0))[:, None])
    return loss_C, z_C, hit_C, x_CV.to(logits_CV.dtype)


def _product(grad_CV: torch.Tensor, hidden_CD: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """grad^T hidden [V, D], rounded no earlier than in `wide`."""
    if wide == grad_CV.dtype:
        return grad_CV.t() @ hidden_CD
    if grad_CV.device.type == "cpu":  # mixed products exist on accelerators only
        return grad_CV.t().to(wide) @ hidden_CD.to(wide)
    return torch.mm(grad_CV.t(), hidden_CD, out_dtype=wide)


def _accumulate(total_VD: torch.Tensor, grad_CV: torch.Tensor, hidden_CD: torch.Tensor) -> None:
    """total += grad^T hidden, the products rounded no earlier than in the dtype of `total`."""
    if total_VD.dtype == grad_CV.dtype:
        total_VD.addmm_(grad_CV.t(), hidden_CD)
    elif total_VD.device.type == "cpu":
        total_VD.addmm_(grad_CV.t().to(total_VD.dtype), hidden_CD.to(total_VD.dtype))
    else:
        torch.addmm(total_VD, grad_CV.t(), hidden_CD, out_dtype=total_VD.dtype, out=total_VD)


def _scaled(stored: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """stored * factor (0-d) in one pass, rounded once, to `dtype`."""
    kernel = scaled_cast(stored.device)
    if kernel is not None:
        return kernel(stored, factor, dtype)
    # one dimension, since a 0-d factor would first be rounded to bf16
    return torch.mul(stored, factor.reshape(1), out=torch.empty_like(stored, dtype=dtype))


def _first_rows(x: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    return None if x is None else x[:rows]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_N: torch.Tensor,
        settings: tuple[float, float, int, bool],
        wanted: tuple[bool, bool, bool],
        softmax_rows: SoftmaxRows,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        smoothing, z_loss, chunk, in_place = settings
        rows, vocab = hidden_ND.shape[0], weight_VD.shape[0]
        more = -vocab % _ALIGNED_ROWS if in_place else 0
        if more:  # logits and gradients of the rows that are added stay zero
            weight_VD = F.pad(weight_VD, (0, 0, 0, more))
            bias_V = None if bias_V is None else F.pad(bias_V, (0, more))
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        loss, z = hidden_ND.new_zeros((), dtype=wide), hidden_ND.new_zeros((), dtype=wide)
        correct = labels_N.new_zeros((), dtype=torch.int64)
        grad_hidden_ND = torch.empty_like(hidden_ND) if wanted[0] else None
        # One chunk is not added to anything; fp16 is wide all the same, whose range holds the sum over a batch.
        summed = hidden_ND.dtype if rows <= chunk and hidden_ND.dtype != torch.float16 else wide
        grad_weight_VD = weight_VD.new_zeros(weight_VD.shape, dtype=wide) if wanted[1] and not rows else None
        grad_bias_V = weight_VD.new_zeros(weight_VD.shape[0], dtype=wide) if wanted[2] else None
        for start in range(0, rows, chunk):
            hidden_CD, labels_C = hidden_ND[start : start + chunk], labels_N[start : start + chunk]
            if bias_V is None:
                logits_CV = hidden_CD @ weight_VD.t()
            else:
                logits_CV = torch.addmm(bias_V, hidden_CD, weight_VD.t())
            loss_C, z_C, hit_C, grad_CV = softmax_rows(logits_CV[:, :vocab], labels_C, smoothing, z_loss, any(wanted))
            if more:
                grad_CV = logits_CV
            del logits_CV
            loss += loss_C.sum()
            z += z_C.sum()
            correct += hit_C.sum()
            if grad_hidden_ND is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[start : start + chunk])
            if wanted[1]:
                if grad_weight_VD is None:
                    grad_weight_VD = _product(grad_CV, hidden_CD, summed)
                else:
                    _accumulate(grad_weight_VD, grad_CV, hidden_CD)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(dim=0, dtype=wide)
        ctx.save_for_backward(grad_hidden_ND, _first_rows(grad_weight_VD, vocab), _first_rows(grad_bias_V, vocab))
        ctx.dtypes = (hidden_ND.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        ctx.mark_non_differentiable(z, correct)
        return loss + z, z, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """The stored gradients stay as they are: a retained graph, or a split backward, comes here twice."""
        out: list[torch.Tensor | None] = []
        for stored, dtype, needed in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad, strict=False):
            if stored is None or not needed:
                out.append(None)
            else:
                out.append(_scaled(stored, grad, dtype))
        return (*out, None, None, None, None)


def linear_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    *,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
    softmax_rows: SoftmaxRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum over the targets of cross-entropy(hidden @ weight^T + bias, label), and what goes with it.

    labels_N   int64; IGNORE rows contribute nothing, neither to the sums nor to the gradients
    smoothing  as `label_smoothing` of `torch.nn.functional.cross_entropy`: the target is
               (1 - smoothing) * onehot + smoothing / V
    z_loss     weight of logsumexp(logits)^2 of each target (PaLM, arXiv:2204.02311, section 5)
    chunk      rows whose logits exist at once; default: by a budget of bytes
    softmax_rows  what turns a chunk's logits into losses and gradients; default: the softmax over the columns that are here

    Returns scalars, the first two in at least fp32:
    loss_sum  the only differentiable one: cross-entropy *plus* the z term, so that `loss_sum.backward()` is all
    z_sum     the z term alone, detached; the cross-entropy to report is loss_sum - z_sum
    correct   int64 count of targets that are the (first) largest logit

    Call it outside compiled regions. First derivatives only.
    """
    if chunk is None:
        chunk = chunk_rows(hidden_ND.shape[0], weight_VD.shape[0], hidden_ND)
    enabled = torch.is_grad_enabled()
    wanted = (
        enabled and hidden_ND.requires_grad,
        enabled and weight_VD.requires_grad,
        enabled and bias_V is not None and bias_V.requires_grad,
    )
    in_place = None if softmax_rows else fast_softmax_rows(hidden_ND.device)
    settings = (smoothing, z_loss, chunk, in_place is not None)
    softmax_rows = softmax_rows or in_place or _softmax_rows
    return _LinearCrossEntropy.apply(hidden_ND, weight_VD, bias_V, labels_N, settings, wanted, softmax_rows)
