"""One step on a device: the new tokens of many sequences through the model in one row, with keys and values in pages.

The model is that of training. Here it gets tokens [1, T] of all sequences behind each other with the position of each, and in
every layer an attention that looks into the pages; all else in it treats tokens one by one.

Shapes: T new tokens, D width, H query heads, K key/value heads, E features of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import asdict, dataclass
from typing import Any

import torch

from meshwright.distributed import device as devices
from meshwright.errors import DeviceError, Finding
from meshwright.kernels.paged_attention import Pages, paged_attention, write_pages
from meshwright.models.layers import Attention, Layer
from meshwright.models.moe import MoE
from meshwright.models.rope import RopeTable
from meshwright.models.trunk import Hidden, Trunk
from meshwright.serve.scheduler import Work

__all__ = ["Packed", "Runner", "block_bytes", "blocks_for", "longest", "pack"]

CPU_CACHE_BYTES = 2**30
"""Most that the cache of a CPU takes where nobody says how many blocks it has."""


@dataclass(frozen=True)
class Packed:
    """A step as plain numbers, to be sent to other ranks as JSON.

    tokens, positions, slots  one of each new token
    counts, lengths, tables   new tokens, all tokens and blocks of each sequence
    select                    index of the tokens whose logits are asked for
    """

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    counts: list[int]
    lengths: list[int]
    tables: list[list[int]]
    select: list[int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def pack(work: Listed[Work], block_size: int) -> Packed:
    """The work of a step; logits are asked for where a sequence's newest token is part of it, in the order of the work."""
    packed = Packed([], [], [], [], [], [], [])
    for item in work:
        sequence, stop = item.sequence, item.start + item.count
        positions = range(item.start, stop)
        packed.tokens.extend(sequence.tokens[item.start : stop])
        packed.positions.extend(positions)
        packed.slots.extend(sequence.blocks[p // block_size] * block_size + p % block_size for p in positions)
        packed.counts.append(item.count)
        packed.lengths.append(stop)
        packed.tables.append(sequence.blocks[: -(-stop // block_size)])
        if item.last:
            packed.select.append(len(packed.tokens) - 1)
    return packed


class Runner:
    """A decoder, or some layers of one, with a cache of `blocks` blocks. It takes the model over: its attention then needs the
    pages.

    span: layers [first, stop) that are here; the embedding is before the first of all, the head after the last
    blocks: None sizes the cache, on an accelerator from what a full step leaves free. token_budget: of such a step.
    max_len: longest sequence that it can compute.
    Raises DeviceError where no sequence of the model's length fits.
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
    ):
        self.model = model.eval().requires_grad_(False)
        self.span = span or (0, len(model.layers))
        self.block_size, self.max_len = block_size, longest(model)
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self._pages: Pages | None = None
        attentions = [layer.attention for layer in model.layers if isinstance(layer, Layer)]
        self._shapes = [_kv_shape(attention) for attention in attentions]
        self._cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, attention in enumerate(attentions):
            attention.attend = _PagedAttention(self, index)
        for layer in model.layers:
            if isinstance(layer, Layer) and isinstance(layer.mlp, MoE):
                layer.mlp.router.capacity = None  # a limit by row would let an answer depend on its batch mates
        if model.rope is not None:
            model.rope = _Rope(model.rope)  # type: ignore[assignment]
        self.blocks = self._size(token_budget, sequences) if blocks is None else blocks
        self._allocate(self.blocks)

    def start(self, packed: Packed) -> None:
        """Begin a step; `finish` gives its logits."""
        self._logits = self.run(packed)

    def finish(self) -> torch.Tensor:
        """Logits [len(select), V] of the step that was started first."""
        return self._logits

    @torch.inference_mode()
    def run(self, packed: Packed, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Keys and values of all new tokens into the cache. Logits [len(select), V], or where the last layer is not here the
        hidden states [T, D], in the dtype of the weights. hidden: [T, D] of the layer before, where the first one is not here.
        """

        def on_device(values: list[Any]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)

        most = max(map(len, packed.tables))
        tables = on_device([[*table, *[0] * (most - len(table))] for table in packed.tables])
        self._pages = Pages(on_device(packed.slots), tables, tuple(packed.counts), tuple(packed.lengths))
        select = on_device([packed.select or [0]])
        output = self.model(
            on_device([packed.tokens]),
            positions=on_device([packed.positions]),
            select=select,
            hidden=None if hidden is None else hidden[None],
            span=self.span,
        )
        self._pages = None
        if self.span[1] < len(self.model.layers):
            return (output.x_BSD if isinstance(output, Hidden) else output)[0]
        return output[0, : len(packed.select)]

    def attend(
        self, index: int, q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        assert self._pages is not None
        keys, values = self._cache[index]
        write_pages(k_TKE, v_TKE, keys, values, self._pages)
        return paged_attention(q_THE, keys, values, self._pages, window=window)

    def _allocate(self, blocks: int) -> None:
        self._cache = [
            tuple(torch.zeros(blocks, self.block_size, *shape, dtype=self.dtype, device=self.device) for _ in range(2))  # type: ignore[misc]
            for shape in self._shapes
        ]

    def _size(self, token_budget: int, sequences: int) -> int:
        """Blocks for what is free beside a step of the full budget; on a CPU as many as `sequences` of full length need, within
        CPU_CACHE_BYTES."""
        each = block_bytes(self._shapes, self.block_size, self.dtype)
        needed = -(-self.max_len // self.block_size)
        if self.device.type == "cpu":
            return max(needed, min(sequences * needed, CPU_CACHE_BYTES // each))
        self._warm(min(token_budget, self.max_len))
        free, total = devices.memory_total(self.device)
        return blocks_for(free, total, each, self.block_size, self.max_len)

    def _warm(self, tokens: int) -> None:
        """One step as large as any, so that what is free afterwards stays free."""
        self._allocate(-(-tokens // self.block_size))
        table = list(range(-(-tokens // self.block_size)))
        slots = list(range(tokens))
        hidden = torch.zeros(tokens, self.model.config.width, dtype=self.dtype, device=self.device) if self.span[0] else None
        self.run(Packed([0] * tokens, slots, slots, [tokens], [tokens], [table], [tokens - 1]), hidden)
        self._cache = []
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


class _PagedAttention:
    """In the place of `models.attention` in one layer."""

    def __init__(self, runner: Runner, index: int):
        self.runner, self.index = runner, index

    def __call__(
        self, q_1THE: torch.Tensor, k_1TKE: torch.Tensor, v_1TKE: torch.Tensor, *, window: int | None, **_: Any
    ) -> torch.Tensor:
        return self.runner.attend(self.index, q_1THE[0], k_1TKE[0], v_1TKE[0], window)[None]


class _Rope:
    """Angles by position alone: the tokens of a step are no sequence whose length could matter."""

    def __init__(self, whole: RopeTable):
        self.whole = whole

    def __call__(
        self, length: int, positions_1T: torch.Tensor | None, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.whole(1, positions_1T, device, dtype)
