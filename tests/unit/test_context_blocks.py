"""Attention by blocks of keys, as a ring adds them up, against one softmax over all of them. No ranks: a loop over them."""

from __future__ import annotations

import math
from itertools import pairwise, product
from unittest import mock

import pytest
import torch

from meshwright.models.attention import attention
from meshwright.parallel import context_blocks
from meshwright.parallel.context_blocks import Flash, Merged, Tiles, flash_suits
from meshwright.spec.context import chunks_of

B, S, H, E = 3, 48, 4, 8
RANKS = 3


def documents() -> torch.Tensor:
    """Documents over one, several and no border of ranks, a row that is one document, and padding."""
    rows = [[30, 1, 9, 8], [48], [5, 7, 20]]
    out = torch.full((B, S), -1, dtype=torch.int32)
    for row, lengths in enumerate(rows):
        out[row, : sum(lengths)] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return out


def whole(kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(B, S, heads, E, generator=draw, dtype=torch.float64).to(dtype) for heads in (H, kv_heads, kv_heads, H)]


CASES = [(causal, window, docs) for causal in (True, False) for window in (0, 5, 20) for docs in (True, False)]


@pytest.mark.parametrize("tile", [2**20, B * H * 16 * 16])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("causal", "window", "docs"), CASES)
def test_blocks_make_the_whole(causal, window, docs, kv_heads, tile):
    # Red with: a merge that forgets to weigh what was there, delta left out of the gradient, a window that is one longer, and
    # tiles before the diagonal taken for whole ones under documents.
    q, k, v, grad = whole(kv_heads, torch.float64)
    seen = documents() if docs else None
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = attention(*inputs, causal=causal, documents=seen, window=window or None)
    gradients = torch.autograd.grad(expected, inputs, grad)
    runs = tuple(chunks_of(S, RANKS, rank, pairs=causal) for rank in range(RANKS))
    index = [torch.cat([torch.arange(start, start + size) for start, size in mine]) for mine in runs]
    options = {"causal": causal, "window": window, "documents": seen, "scale": 1 / math.sqrt(E)}
    found = [torch.zeros_like(t) for t in (expected.detach(), q, k, v)]
    with mock.patch.dict(context_blocks.TILE, cpu=tile):
        for rank in range(RANKS):
            mine, merged = index[rank], Merged.over_nothing(q[:, index[rank]])
            blocks = Tiles(q[:, mine], kv_heads, rank, runs, merged, **options)
            for step in range(RANKS):
                source = (rank - step) % RANKS
                blocks.forward(k[:, index[source]], v[:, index[source]], source)
            found[0][:, mine] = merged.out
            blocks = Tiles(q[:, mine], kv_heads, rank, runs, merged, **options, grad_BPHE=grad[:, mine])
            for source in range(RANKS):
                dk, dv = blocks.backward(k[:, index[source]], v[:, index[source]], source)
                found[2][:, index[source]] += dk
                found[3][:, index[source]] += dv
            assert blocks.dq_BPHE is not None
            found[1][:, mine] = blocks.dq_BPHE
    for got, wanted in zip(found, (expected, *gradients), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-13)


def test_what_no_query_sees_is_not_computed():
    # Half of the pairs of a causal ring are hidden; of documents that are all on one rank, all but its own.
    q = whole(H, torch.float64)[0]
    runs = tuple(chunks_of(S, RANKS, rank, pairs=True) for rank in range(RANKS))
    alone = torch.arange(S, dtype=torch.int32).div(S // (2 * RANKS), rounding_mode="floor").expand(B, S)
    for docs, expected in ((None, [3, 2, 2]), (alone, [2, 0, 0])):
        options = {"causal": True, "window": 0, "documents": docs, "scale": 1.0}
        for rank in range(RANKS):
            share = S // RANKS
            blocks = Tiles(q[:, :share], H, rank, runs, Merged.over_nothing(q[:, :share]), **options)
            counts = [len(list(blocks._tiles((rank - step) % RANKS))) for step in range(RANKS)]
            assert counts == expected


def test_the_kernel_gets_runs_of_each_document():
    # Of every document a rank's positions lie together; queries come after keys, or the block is causal with itself.
    docs = documents()
    bounds = [0]
    for row in range(B):
        starts = [at for at in range(S) if at == 0 or docs[row, at] != docs[row, at - 1]]
        bounds += [row * S + at for at in starts if row * S + at]
    cu = torch.tensor([*bounds, B * S, B * S], dtype=torch.int32)
    runs = tuple(chunks_of(S, RANKS, rank, pairs=True) for rank in range(RANKS))
    share = S // RANKS
    for rank in range(RANKS):
        q = torch.zeros(B, share, H, E)
        blocks = Flash(q, rank, runs, Merged.over_nothing(q), causal=True, cu_seqlens=cu, scale=1.0)
        for source in range(RANKS):
            (first, n), (_, m), (cu_q, cu_k, longest) = blocks._block(source)
            assert longest == (n, m) and first + n == share and len(cu_q) == len(cu_k) == len(cu)
            seen = set()
            places = [[at for start, size in runs[each] for at in range(start, start + size)] for each in (rank, source)]
            queries, keys = places[0][first:], places[1][:m]
            for (a, b), (c, d) in zip(*(pairwise(bounds.tolist()) for bounds in (cu_q, cu_k)), strict=True):
                for i, j in product(range(a, b), range(c, d)):
                    if source != rank or j - c <= i - a:
                        assert i // n == j // m
                        seen.add((i // n, queries[i % n], keys[j % m]))
            expected = {(row, i, j) for row, i, j in product(range(B), *places) if j <= i and docs[row, i] == docs[row, j]}
            assert seen == expected


def test_a_cpu_has_no_kernel_for_it():
    assert not flash_suits(torch.zeros(1, 4, 2, 8, dtype=torch.bfloat16), 0, None, None)
