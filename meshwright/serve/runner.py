"""One step on a device: the new tokens of many sequences through the model in one row, with keys and values in pages.

The parameters are those of the model of training; `serve.layers` computes its forward with them.

Shapes: T new tokens, D width, H query heads, K key/value heads, E features of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed

import numpy as np
import torch

from meshwright.distributed import device as devices
from meshwright.errors import DeviceError, Finding
from meshwright.kernels.grouped_linear import stays_on_device
from meshwright.kernels.paged_attention import SPAN, Pages, Rows, row_numbers
from meshwright.models.layers import Attention, Layer
from meshwright.models.moe import MoE
from meshwright.models.trunk import Trunk
from meshwright.serve.graphs import Decoding, padded_rows
from meshwright.serve.layers import Forward
from meshwright.serve.packed import Packed
from meshwright.serve.sampler import Scores, scores_of

__all__ = ["Runner", "block_bytes", "blocks_for", "longest"]

CPU_CACHE_BYTES = 2**30
"""Most that the cache of a CPU takes where nobody says how many blocks it has."""
ALIGNED = 4
"""Numbers of 4 bytes: a kernel is compiled once for addresses that are multiples of 16 bytes, and again for others."""


class Runner:
    """A decoder, or some layers of one, with a cache of `blocks` blocks. It takes the model over: experts then have no limit.

    span: layers [first, stop) that are here; the embedding is before the first of all, the head after the last
    blocks: None sizes the cache, on an accelerator from what a full step leaves free. token_budget: of such a step.
    sequences: most of a step. max_len: longest sequence that it can compute.
    graphs: whether a step of one new token for each sequence is padded and, where the device can, recorded once and replayed
    (`serve.graphs`); None: where that can be recorded. Of some layers only no step is.
    cache_dtype: of keys and values in the cache; None: of the weights. key_span: of `kernels.paged_attention.Pages`
    Raises DeviceError where no sequence of the model's length fits, or not what was asked for.
    """

    lanes = 1
    """Steps that are under way at the same time."""

    def __init__(
        self,
        model: Trunk,
        *,
        blocks: int | None,
        block_size: int,
        token_budget: int = 512,
        sequences: int = 64,
        span: tuple[int, int] | None = None,
        graphs: bool | None = None,
        cache_dtype: torch.dtype | None = None,
        key_span: int = SPAN,
    ):
        self.model = model.eval().requires_grad_(False)
        self.span = span or (0, len(model.layers))
        self.block_size, self.max_len, self.key_span = block_size, longest(model), key_span
        weight = next(model.parameters())
        self.device, self.dtype, self.cache_dtype = weight.device, weight.dtype, cache_dtype or weight.dtype
        self._shapes = [_kv_shape(layer.attention) for layer in model.layers if isinstance(layer, Layer)]
        self._forward = Forward(model, self.span)
        for layer in model.layers:
            if isinstance(layer, Layer) and isinstance(layer.mlp, MoE):
                layer.mlp.router.capacity = None  # a limit by row would let an answer depend on its batch mates
        self._latest = torch.zeros(padded_rows(sequences), dtype=torch.int64, device=self.device)
        self._decoding: Decoding | None = None
        self.blocks = self._size(token_budget, sequences) if blocks is None else self._held(blocks)
        self._allocate(self.blocks)
        recorded = devices.records(self.device) and _stays_on_device(model)
        if (recorded if graphs is None else graphs) and self.span == (0, len(model.layers)):
            self._decoding = self._decode(sequences, recorded)

    def start(self, packed: Packed) -> None:
        """Begin a step; `finish` gives its scores."""
        output = self.run(packed)
        assert isinstance(output, Scores), "a runner of some layers has no logits"
        self._scores = output

    def finish(self) -> Scores:
        """Scores of the step that was started first, [len(select), V]; the next step overwrites them."""
        return self._scores

    def feed(self, tokens: torch.Tensor) -> None:
        """What was chosen by the step before, int64 [len(select)], where that is not the largest logit of each."""
        self._latest[: tokens.shape[0]].copy_(tokens)

    @torch.inference_mode()
    def run(self, packed: Packed, hidden: torch.Tensor | None = None) -> Scores | torch.Tensor:
        """Keys and values of all new tokens into the cache. Scores of the tokens in `select`, with logits in the dtype of the
        weights; where the last layer is not here the hidden states [T, D]. hidden: [T, D] of the layer before, where the first
        one is not here."""
        if self._decoding is not None and packed.single and packed.sizes[1] <= self._decoding.rows:
            return self._decoding.run(packed)
        tokens, feeds, positions, select, pages = self._sent(packed)
        if packed.feeds.max() >= 0:
            tokens = torch.where(feeds < 0, tokens, self._latest[feeds.clamp(min=0)])
        output = self._forward(tokens, positions, pages, select=select, hidden=hidden)
        if self.span[1] < len(self.model.layers):
            return output
        scores = scores_of(output[: len(packed.select)])
        self.feed(scores.best[0])
        return scores

    def _sent(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Pages]:
        """tokens, feeds, positions, select and pages on the device, in one copy."""
        counts, lengths = packed.counts.tolist(), packed.lengths.tolist()
        select = packed.select if len(packed.select) else np.zeros(1, np.int32)
        parts = [*packed.token_fields, select, *row_numbers(counts, lengths), packed.tables]
        ends = np.cumsum([-(-part.size // ALIGNED) * ALIGNED for part in parts])
        numbers = np.zeros(ends[-1], np.int32)
        for start, part in zip([0, *ends], parts, strict=False):
            numbers[start : start + part.size] = part.ravel()
        sent = devices.pinned(numbers, self.device).to(self.device, non_blocking=True)
        indices = sent[: ends[4]].long()
        found = [
            whole[start : start + part.size].view(part.shape)
            for whole, start, part in zip([indices] * 5 + [sent] * 7, [0, *ends], parts, strict=False)
        ]
        pages = Pages(found[3], found[11], tuple(counts), tuple(lengths), Rows(*found[5:11]), self.key_span)
        return found[0], found[1], found[2], found[4], pages

    def _decode(self, sequences: int, recorded: bool) -> Decoding:
        return Decoding(
            self._forward,
            self._latest,
            rows=sequences,
            max_len=self.max_len,
            block_size=self.block_size,
            scratch=self.blocks,
            vocab=self.model.config.vocab or 0,
            dtype=self.dtype,
            recorded=recorded,
            key_span=self.key_span,
        )

    def _allocate(self, blocks: int) -> None:
        """Pages for so many blocks, and one that belongs to nobody."""
        self._forward.cache = [
            tuple(
                torch.zeros(blocks + 1, self.block_size, *shape, dtype=self.cache_dtype, device=self.device) for _ in range(2)
            )  # type: ignore[misc]
            for shape in self._shapes
        ]

    def _held(self, blocks: int) -> int:
        """So many, where there is memory for them: a CPU promises what it does not have, and ends the process later."""
        each = block_bytes(self._shapes, self.block_size, self.cache_dtype)
        free, _ = devices.memory_total(self.device)
        if (blocks + 1) * each > free:
            what = f"{blocks:,} of {each:,} bytes are {blocks * each / 2**30:,.1f} GiB, and {free / 2**30:,.1f} are free"
            raise DeviceError(findings=[Finding("blocks", what, f"Use {max(free // each - 1, 1):,} or less, or leave it out")])
        return blocks

    def _size(self, token_budget: int, sequences: int) -> int:
        """Blocks for what is free beside a step of the full budget; on a CPU as many as `sequences` of full length need, within
        CPU_CACHE_BYTES."""
        each = block_bytes(self._shapes, self.block_size, self.cache_dtype)
        needed = -(-self.max_len // self.block_size)
        if self.device.type == "cpu":
            return max(needed, min(sequences * needed, CPU_CACHE_BYTES // each))
        self._warm(min(token_budget, sequences * self.max_len), sequences)
        free, total = devices.memory_total(self.device)
        return blocks_for(free, total, each, self.block_size, self.max_len)

    def _warm(self, tokens: int, sequences: int) -> None:
        """One step as large as any, so that what is free afterwards stays free: so many tokens, and logits of each sequence."""
        counts = np.full(-(-tokens // self.max_len), self.max_len)
        counts[-1] = tokens - counts[:-1].sum()
        pages = -(-int(counts.max()) // self.block_size)
        self._allocate(len(counts) * pages)
        row, positions = np.repeat(np.arange(len(counts)), counts), np.concatenate([np.arange(count) for count in counts])
        fields = np.stack((np.zeros(tokens), np.full(tokens, -1), positions, row * pages * self.block_size + positions))
        table = np.arange(len(counts) * pages).reshape(-1, pages)
        hidden = torch.zeros(tokens, self.model.config.width, dtype=self.dtype, device=self.device) if self.span[0] else None
        try:
            self.run(Packed.of(fields, np.stack((counts, counts)), np.arange(tokens)[-sequences:], table), hidden)
        except torch.OutOfMemoryError:
            what = f"a step of {tokens:,} tokens with logits of {min(tokens, sequences):,} needs more memory than is left"
            fix = "Use smaller ones, fewer weights a device, or larger devices"
            raise DeviceError(findings=[Finding("token_budget, max_running", what, fix)]) from None
        self._forward.cache = []
        devices.synchronize(self.device)


def block_bytes(shapes: Listed[tuple[int, int]], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of a block over all layers. shapes: key/value heads and features of a head of each layer."""
    return sum(2 * block_size * heads * features * dtype.itemsize for heads, features in shapes)


def blocks_for(free: int, total: int, each: int, block_size: int, max_len: int, share: float = 0.9) -> int:
    """Blocks of `each` bytes in `free` bytes, of which what exceeds `share` of the `total` stays unused.

    Raises DeviceError with the sums where not even one sequence of max_len tokens fits.
    """
    budget = max(0, int(free - (1 - share) * total))
    blocks = budget // each
    if blocks * block_size < max_len:
        what = (
            f"{free / 2**30:.2f} of {total / 2**30:.2f} GiB are free beside the weights and a full step; "
            f"{budget / 2**30:.2f} GiB of them hold {blocks * block_size} tokens of the cache, "
            f"and one sequence may have {max_len}"
        )
        fix = f"Use at most max_len {blocks * block_size}, a smaller token_budget, or more devices"
        raise DeviceError(findings=[Finding("cache", what, fix)])
    return blocks


def longest(model: Trunk) -> int:
    """Tokens of the longest sequence that can be continued from a cache: a dynamic scaling turns all keys anew with each token
    beyond its original length, so it ends there."""
    scaling = model.config.rope_scaling if model.config.positions == "rope" else None
    if scaling is None or scaling.rope_type != "dynamic":
        return model.max_len
    return min(model.max_len, scaling.original_max_position_embeddings or model.max_len)


def _kv_shape(attention: Attention) -> tuple[int, int]:
    """Key/value heads that are here, and the features of each."""
    rows = sum(p.shape[0] for name, p in attention.qkv.named_parameters() if name.endswith("weight"))
    return rows // ((attention.group + 2) * attention.head_dim), attention.head_dim


def _stays_on_device(model: Trunk) -> bool:
    """Whether nothing in a forward waits for the device."""
    experts = [layer.mlp.experts for layer in model.layers if isinstance(layer, Layer) and isinstance(layer.mlp, MoE)]
    return all(stays_on_device(matrix) for one in experts for matrix in (one.up, one.down))
