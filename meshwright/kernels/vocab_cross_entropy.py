"""Output matrix and softmax cross-entropy in one where each rank of a group holds a run of the vocabulary's rows.

Logits stay where they are made. For each chunk of rows the ranks exchange five numbers a row in one all-gather, and every
rank combines them in the same order: losses are the same bits on all. The oracle is `linear_cross_entropy` over the whole
matrix.

Shapes: N rows, D width, V vocabulary, W rows of the vocabulary on this rank, C rows of a chunk, R ranks.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from meshwright.compat import all_gather_single
from meshwright.kernels.cross_entropy import chunk_rows, linear_cross_entropy
from meshwright.spec.labels import IGNORE

__all__ = ["vocab_cross_entropy"]


def _softmax_rows(
    logits_CW: torch.Tensor,
    labels_C: torch.Tensor,
    smoothing: float,
    z_loss: float,
    gradient: bool,
    *,
    first: int,
    vocab: int,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `_softmax_rows` of the whole vocabulary; the gradient is that of the logits that are here."""
    x_CW = logits_CW.to(torch.promote_types(logits_CW.dtype, torch.float32))
    valid_C, here_C = labels_C != IGNORE, labels_C - first
    mine_C = valid_C & (here_C >= 0) & (here_C < x_CW.shape[1])
    index_C1 = torch.where(mine_C, here_C, 0)[:, None]
    top_C, best_C = x_CW.max(dim=1)
    picked_C = torch.where(mine_C, x_CW.gather(1, index_C1)[:, 0], 0.0)
    plain_C = x_CW.sum(dim=1) if smoothing else torch.zeros_like(top_C)
    x_CW = x_CW.sub_(top_C[:, None]).exp_()
    numbers_5C = torch.stack((top_C, x_CW.sum(dim=1), picked_C, plain_C, (mine_C & (best_C == here_C)).to(x_CW.dtype)))
    tops_RC, sums_RC, picked_RC, plain_RC, leads_RC = _exchange(numbers_5C, group).unbind(1)
    peak_C, winner_C = tops_RC.max(dim=0)  # the first of equals, which has the smaller tokens
    sum_C = (sums_RC * (tops_RC - peak_C).exp_()).sum(dim=0)
    lse_C = peak_C + sum_C.log()
    target_C = picked_RC.sum(dim=0) * (1.0 - smoothing)
    if smoothing:
        target_C = target_C + plain_RC.sum(dim=0) * (smoothing / vocab)
    # a label outside of the vocabulary is on no rank: a NaN, never the loss of another token
    target_C = torch.where((labels_C < 0) | (labels_C >= vocab), torch.nan, target_C)
    loss_C = torch.where(valid_C, lse_C - target_C, 0.0)
    z_C = torch.where(valid_C, z_loss * lse_C.square(), 0.0)
    hit_C = valid_C & leads_RC.gather(0, winner_C[None])[0].bool()
    if gradient:
        share_C = (top_C - peak_C).exp_() / sum_C
        x_CW.mul_((torch.where(valid_C, 1.0 + 2.0 * z_loss * lse_C, 0.0) * share_C)[:, None])
        if smoothing:
            x_CW.sub_((valid_C.to(x_CW.dtype) * (smoothing / vocab))[:, None])
        x_CW.scatter_add_(1, index_C1, (mine_C.to(x_CW.dtype) * (smoothing - 1.0))[:, None])
    return loss_C, z_C, hit_C, x_CW.to(logits_CW.dtype)


def _exchange(numbers: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[R, ...]: the tensors of all ranks."""
    out = numbers.new_empty((group.size() * numbers.shape[0], *numbers.shape[1:]))
    all_gather_single(out, numbers, group=group)
    return out.unflatten(0, (group.size(), -1))


def vocab_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_WD: torch.Tensor,
    bias_W: torch.Tensor | None,
    labels_N: torch.Tensor,
    *,
    first: int,
    vocab: int,
    group: dist.ProcessGroup,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`linear_cross_entropy` of the whole matrix, of which this rank holds the rows [first, first + W).

    hidden_ND, labels_N  the same on all ranks; labels are tokens of the whole vocabulary or IGNORE
    vocab                rows of the whole matrix; ranks hold runs of it in rank order
    chunk                rows whose logits exist at once, the same on all ranks; default: by a budget of bytes

    Returns (loss_sum, z_sum, correct), the same bits on every rank. Gradients of weight and bias are this rank's own. That
    of `hidden_ND` is the part that comes from these rows: the caller sums it over the ranks. Collective: one all-gather of
    5 numbers a row for each chunk.
    """
    if chunk is None:  # by the even share: blocks may differ, chunks must not
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        chunk = chunk_rows(hidden_ND.shape[0], -(-vocab // group.size()), hidden_ND.new_empty(0, dtype=wide))
    rows = functools.partial(_softmax_rows, first=first, vocab=vocab, group=group)
    return linear_cross_entropy(
        hidden_ND, weight_WD, bias_W, labels_N, smoothing=smoothing, z_loss=z_loss, chunk=chunk, softmax_rows=rows
    )
