"""Context parallelism: the positions of a row are spread over the ranks of "cp", which see the same rows.

    the model's entrance    tokens, positions, dropout keys and labels of this rank's positions are kept, everything after it,
                            embedding, layers, head and loss, runs on those alone
    attention               sees all positions: `context_ring`, or here: all positions of a part of the heads
    the loss                is a sum over the targets that are here; the gradient of every parameter is the sum over the ranks

Documents and their boundaries stay whole: attention needs those of other ranks too. Positions and dropout keys are those of the
whole row, hence nothing depends on the layout.

all_to_all (arXiv:2309.14509): with c ranks, B rows of S positions, P = S / c here, H query and K key/value heads of E features
and e bytes an element a rank sends (c - 1)/c B P (2 H + 2 K) E e bytes in two messages in forward, as many in backward. Fewer
key/value heads than ranks: each goes to several. `spec.context` says which rank has which positions, and when it is chosen.

Shapes: B rows, S positions, P of them here, K selected positions, H query heads, K key/value heads, E features of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.data.batch import IGNORE, Batch
from meshwright.distributed.collectives import all_sum, copy, exchange, register_group
from meshwright.errors import Finding, LayoutError
from meshwright.models.attention import attention
from meshwright.models.layers import Layer
from meshwright.models.rope import RopeTable
from meshwright.models.trunk import Trunk
from meshwright.parallel.context_ring import ring_attention
from meshwright.spec.context import chunk_unit, chunks_of, deals_in_pairs, length_finding, resolved
from meshwright.spec.plan import Plan

__all__ = ["Context", "counted_here", "split_positions"]


def split_positions(model: nn.Module, plan: Plan, mesh: DeviceMesh | None) -> Context | None:
    """Lets `model`, in place, take whole rows and compute with the positions of this rank; None where all are here.

    model: of `build`, whole or a part of it. Its forward then gives, with labels, the sums over the targets that are here;
    without, the logits of the positions that are here, or of whole rows for classification. Raises LayoutError for a model that
    is not ours, and at a forward for a length that does not divide.
    """
    if mesh is None or plan.layout.cp == 1:
        return None
    if not isinstance(model, Trunk):
        what = f"{plan.layout.cp} ranks cannot share the rows of {type(model).__name__}: nothing says where its positions meet"
        raise LayoutError(findings=[Finding("layout.cp", what, "Use cp: 1")])
    group = mesh.get_group("cp")
    method = resolved(plan, model.config)
    if method == "ring" and model.config.attention_dropout:
        what = "attention dropout needs whole rows of weights, which no rank of a ring has"
        raise LayoutError(findings=[Finding("plan.context", what, "Use context: all_to_all, or attention_dropout: 0")])
    pairs = deals_in_pairs(method, model.config.arch)
    context = Context(register_group("cp", group), group.rank(), group.size(), method, pairs)
    attend = context.ring if method == "ring" else context.all_to_all
    for layer in model.layers:
        if isinstance(layer, Layer):
            layer.attention.attend = attend
    if model.rope is not None:
        model.rope = _Rope(model.rope, context)  # type: ignore[assignment]
    if model.task == "classify":
        model.pooled = _Pool(context, causal=model.causal)  # type: ignore[assignment, method-assign]
    model.context = context  # type: ignore[assignment]
    model.register_forward_pre_hook(_Entrance(context), with_kwargs=True)
    return context


def counted_here(model: nn.Module, batch: Batch) -> Batch:
    """The batch with labels for those targets alone that this rank counts: over the ranks of "cp" each is counted once."""
    context = getattr(model, "context", None)
    return batch if context is None else replace(batch, labels=context.own_labels(batch))


@dataclass(frozen=True, eq=False)
class Context:
    """This rank's place among those that share rows. pairs: whether a rank has a run of positions from each end of a row."""

    key: str
    rank: int
    size: int
    method: str
    pairs: bool
    note: str = "the gradient noise scale is not measured: with cp no rank has the gradient of a row of its own"
    _indices: dict[tuple[int, torch.device], torch.Tensor] = field(default_factory=dict, repr=False)

    def share(self, length: int) -> int:
        """Positions of a rank. Raises LayoutError for a length that does not divide."""
        finding = length_finding(length, self.size, self.pairs)
        if finding is not None:
            raise LayoutError(findings=[finding])
        return length // self.size

    def index(self, length: int, device: torch.device) -> torch.Tensor:
        """The positions that are here, int64 [P]."""
        if (length, device) not in self._indices:
            runs = chunks_of(length, self.size, self.rank, self.pairs)
            index = torch.cat([torch.arange(start, start + size) for start, size in runs])
            self._indices[length, device] = index.to(device)
        return self._indices[length, device]

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """[B or 1, S, ...] -> [B or 1, P, ...]"""
        self.share(x.shape[1])
        return x.index_select(1, self.index(x.shape[1], x.device))

    def find(self, positions: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of positions in rows of `length`: which are here, and their place here (any place for the others)."""
        chunk = self.share(length) * self.size // chunk_unit(self.size, self.pairs)
        number = positions // chunk
        first = number == self.rank
        second = number == 2 * self.size - 1 - self.rank if self.pairs else torch.zeros_like(first)
        return first | second, positions % chunk + second * chunk

    def own_labels(self, batch: Batch) -> torch.Tensor:
        """Labels, of their shape; IGNORE for targets that another rank counts. A classified row is the first rank's."""
        labels, length = batch.labels, batch.tokens.shape[1]
        if labels.dim() == 1:
            return labels if self.rank == 0 else torch.full_like(labels, IGNORE)
        at = torch.arange(length, device=labels.device) if batch.select is None else batch.select
        return labels.masked_fill(~self.find(at, length)[0], IGNORE)

    # ---- attention

    def ring(
        self,
        q_BPHE: torch.Tensor,
        k_BPKE: torch.Tensor,
        v_BPKE: torch.Tensor,
        *,
        causal: bool,
        documents: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        window: int | None,
        dropout_p: float,
    ) -> torch.Tensor:
        """As `models.attention`, for the queries that are here."""
        assert dropout_p == 0.0  # refused by split_positions
        scale = 1.0 / math.sqrt(q_BPHE.shape[-1])
        return ring_attention(q_BPHE, k_BPKE, v_BPKE, documents, cu_seqlens, causal, window or 0, scale, self.key)[0]

    def all_to_all(self, q_BPHE: torch.Tensor, k_BPKE: torch.Tensor, v_BPKE: torch.Tensor, **how: Any) -> torch.Tensor:
        """As `models.attention`, for the queries that are here."""
        kv_heads = k_BPKE.shape[2]
        if kv_heads < self.size:  # a key/value head goes to all ranks that have queries for it
            k_BPKE, v_BPKE = (t.repeat_interleave(self.size // kv_heads, dim=2) for t in (k_BPKE, v_BPKE))
        parts = [t.unflatten(2, (self.size, -1)) for t in (q_BPHE, k_BPKE, v_BPKE)]
        sizes = [part.shape[3] for part in parts]
        whole = exchange(torch.cat(parts, dim=3).flatten(2, 3), 2, 1, self.key)
        q, k, v = whole.split(sizes, dim=2)
        return exchange(attention(q, k, v, **how), 1, 2, self.key)


class _Entrance:
    """Forward pre-hook of the model: from whole rows to the positions that are here."""

    def __init__(self, context: Context):
        self.context = context

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert isinstance(model, Trunk)  # where this is registered
        context, kwargs = self.context, dict(given)
        tokens = args[0] if args else kwargs.pop("tokens")
        length = tokens.shape[1]
        if kwargs.get("positions") is not None:
            kwargs["positions"] = context.own(kwargs["positions"])
        elif model.position_embedding is not None:
            kwargs["positions"] = context.index(length, tokens.device)[None]
        if kwargs.get("dropout_key") is not None:
            kwargs["dropout_key"] = context.own(kwargs["dropout_key"])
        select, labels = kwargs.get("select"), kwargs.get("labels")
        if model.task == "classify":
            if labels is not None and context.rank:
                kwargs["labels"] = torch.full_like(labels, IGNORE)  # every rank has the logits, the first one counts them
        elif select is not None:
            kwargs["select"], kwargs["labels"] = self._select(select, labels, length)
        elif labels is not None:
            kwargs["labels"] = context.own(labels)
        return (context.own(tokens), *args[1:]), kwargs

    def _select(
        self, select_BK: torch.Tensor, labels_BK: torch.Tensor | None, length: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Those that are here first, then others with nothing to predict; no more than there are positions here."""
        here, place = self.context.find(select_BK, length)
        most = min(select_BK.shape[1], self.context.share(length))
        order = here.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
        if labels_BK is not None:
            labels_BK = labels_BK.masked_fill(~here, IGNORE).gather(1, order)
        return place.gather(1, order), labels_BK


class _Rope:
    """Angles of the positions that are here, from a table for whole rows."""

    def __init__(self, whole: RopeTable, context: Context):
        self.whole, self.context = whole, context

    def __call__(
        self, length: int, positions_BP: torch.Tensor | None, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """length: of what is here."""
        length *= self.context.size
        cos, sin = self.whole(length, positions_BP, device, dtype)
        if positions_BP is not None:
            return cos, sin
        index_P = self.context.index(length, device)
        return cos[index_P], sin[index_P]


class _Pool:
    """In the place of `Trunk.pooled`: the position that stands for a row is on one rank, and all get it. Its gradient, which
    the ranks have parts of, comes back as their sum."""

    def __init__(self, context: Context, *, causal: bool):
        self.context, self.causal = context, causal

    def __call__(self, x_BPD: torch.Tensor, documents_BS: torch.Tensor | None) -> torch.Tensor:
        """[B, D]"""
        batch, length = x_BPD.shape[0], x_BPD.shape[1] * self.context.size
        last = torch.full((batch,), length - 1, device=x_BPD.device)
        if not self.causal:
            last.zero_()
        elif documents_BS is not None:
            last = (documents_BS >= 0).sum(dim=1).sub(1).clamp(min=0)
        here_B, place_B = self.context.find(last, length)
        x_BD = x_BPD[torch.arange(batch, device=x_BPD.device), place_B].masked_fill(~here_B[:, None], 0.0)
        return copy(all_sum(x_BD, self.context.key), self.context.key)
