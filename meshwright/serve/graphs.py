"""Steps of one new token for each sequence, always the same launches over memory that stays where it is, so that a device can
record them once and replay them as one (on CUDA as a graph).

A step is padded: up to one of a few numbers of rows, and up to one of a few longest lengths. A row of padding is a sequence of
one token in the scratch page, which belongs to nobody. Each pair of the two numbers is recorded when it first comes.

Shapes: R sequences, N >= R rows with padding, M most pages of a sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from meshwright.distributed import device as devices
from meshwright.kernels.fused import best
from meshwright.kernels.paged_attention import Singles
from meshwright.serve.packed import Packed
from meshwright.serve.sampler import Scores

__all__ = ["Decoding", "padded_length", "padded_rows"]

LEAST_LENGTH = 1024
"""Tokens: shorter sequences are not told apart."""
FIELDS = 8
"""Numbers of a row beside its pages: token, feed, position, slot, length, and none that mean something, so that all begin at a
multiple of 16 bytes."""


def padded_rows(rows: int) -> int:
    """1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, ...: the next one. A recording takes time and
    memory; a row costs little beside the weights, but many are logits and a choice for nobody."""
    power = 1 << (rows - 1).bit_length()
    step = power if power <= 32 else power // (4 if power <= 256 else 8)
    return -(-rows // step) * step


def padded_length(length: int) -> int:
    """1,024, 2,048, 4,096, ... tokens: the next one."""
    return max(LEAST_LENGTH, 1 << (length - 1).bit_length())


class Decoding:
    """Runs steps that are `Packed.single`, of up to `rows` sequences of up to `max_len` tokens.

    forward(tokens, positions, pages, out=)  writes logits [N, V] of one new token each, int64 [N] both
    scratch   page that belongs to nobody
    latest    int64 [padded rows]: what the step before chose, for those whose token the host does not know yet; a step leaves
              its own there
    recorded  whether the device records steps; else they are called anew each time
    key_span  of `Singles`
    """

    def __init__(
        self,
        forward: Callable[..., torch.Tensor],
        latest: torch.Tensor,
        *,
        rows: int,
        max_len: int,
        block_size: int,
        scratch: int,
        vocab: int,
        dtype: torch.dtype,
        recorded: bool,
        key_span: int,
    ):
        self.forward, self.latest, self.block_size, self.scratch = forward, latest, block_size, scratch
        self.rows, self.max_len, self.key_span = rows, max_len, key_span
        device, most = latest.device, padded_rows(rows)
        self._inputs = torch.zeros(most * (FIELDS + self._pages(max_len)), dtype=torch.int32, device=device)
        self._logits = torch.zeros(most, vocab, dtype=dtype, device=device)
        self._best = torch.zeros(2, most, dtype=torch.int64, device=device)
        self._recorder = devices.Recorder(device) if recorded else None
        self._replays: dict[tuple[int, int], Callable[[], None]] = {}

    def run(self, packed: Packed) -> Scores:
        """What is returned is overwritten by the next step."""
        rows = packed.sizes[1]
        padded, width = padded_rows(rows), self._pages(int(packed.lengths.max()))
        host = devices.pinned(self._padded(packed, padded, width), self.latest.device)
        self._inputs[: host.shape[0]].copy_(host, non_blocking=True)
        replay = self._replays.get((padded, width))
        if replay is not None:
            replay()
        else:
            self._step(padded, width)  # what comes first is called: it compiles kernels, and makes what is kept
            if self._recorder is not None:
                self._replays[padded, width] = self._recorder.record(lambda: self._step(padded, width))
        return Scores(self._logits[:rows], self._best[:, :rows])

    def _pages(self, length: int) -> int:
        """Of a sequence of the padded length."""
        return -(-min(padded_length(length), self.max_len) // self.block_size)

    def _padded(self, packed: Packed, padded: int, width: int) -> np.ndarray:
        numbers = np.zeros(padded * (FIELDS + width), np.int32)
        rows, known = packed.tables.shape
        fields = numbers[: FIELDS * padded].reshape(FIELDS, padded)
        fields[:4, :rows], fields[4, :rows] = packed.token_fields, packed.lengths
        fields[:5, rows:] = np.array([[0], [-1], [0], [self.scratch * self.block_size], [1]])
        tables = numbers[FIELDS * padded :].reshape(padded, width)
        tables[:rows, :known], tables[:rows, known:], tables[rows:] = packed.tables, self.scratch, self.scratch
        return numbers

    def _step(self, padded: int, width: int) -> None:
        tokens, feeds, positions, slots = self._inputs[: 4 * padded].view(4, padded).long().unbind()
        lengths = self._inputs[4 * padded : 5 * padded]
        tables = self._inputs[FIELDS * padded : padded * (FIELDS + width)].view(padded, width)
        tokens = torch.where(feeds < 0, tokens, self.latest[feeds.clamp(min=0)])
        logits, chosen = self._logits[:padded], self._best[:, :padded]
        self.forward(tokens, positions, Singles(slots, tables, lengths, self.key_span), out=logits)
        best(logits, chosen)
        self.latest[:padded].copy_(chosen[0])
