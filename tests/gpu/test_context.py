"""The accelerator's kernel inside a ring against tiles in fp32, ranks played one after another. `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.parallel.context_blocks import Blocks, Flash, Merged, Tiles, flash_suits
from meshwright.spec.context import chunks_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.accelerator.is_available():
    pytest.skip("no accelerator", allow_module_level=True)

B, S, H, E, RANKS = 2, 1536, 8, 64, 3


def documents(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, S] and boundaries: documents over many borders of ranks, tiny ones, and padding."""
    lengths = [[700, 3, 1, 500, 332], [1, 1000, 35, 400, 100]]
    rows = torch.stack([torch.repeat_interleave(torch.arange(5), torch.tensor(row)) for row in lengths]).int()
    rows[1, -100:] = -1
    bounds = torch.tensor([0, *torch.tensor(lengths).flatten().cumsum(0).tolist(), B * S], dtype=torch.int32)
    return rows.to(device), bounds.to(device)


def around(kind: type, tensors: list[torch.Tensor], causal: bool, docs: bool) -> list[torch.Tensor]:
    """Result and gradients over whole rows, put together from what every rank computes."""
    q, k, v, grad = tensors
    runs = tuple(chunks_of(S, RANKS, rank, pairs=causal) for rank in range(RANKS))
    index = [torch.cat([torch.arange(start, start + size) for start, size in mine]).to(q.device) for mine in runs]
    seen, bounds = documents(q.device) if docs else (None, None)

    def blocks(rank: int, merged: Merged, backward: bool) -> Blocks:
        mine = index[rank]
        options = {"causal": causal, "scale": 1 / math.sqrt(E), "grad_BPHE": grad[:, mine] if backward else None}
        if kind is Flash:
            return Flash(q[:, mine], rank, runs, merged, cu_seqlens=bounds, **options)
        return Tiles(q[:, mine], k.shape[2], rank, runs, merged, window=0, documents=seen, **options)

    found = [torch.zeros(t.shape, device=q.device) for t in (q, q, k, v)]
    for rank, mine in enumerate(index):
        merged = Merged.over_nothing(q[:, mine])
        forward = blocks(rank, merged, False)
        for step in range(RANKS):
            source = (rank - step) % RANKS
            forward.forward(k[:, index[source]], v[:, index[source]], source)
        found[0][:, mine] = merged.out
        backward = blocks(rank, merged, True)
        for source in range(RANKS):
            dk, dv = backward.backward(k[:, index[source]], v[:, index[source]], source)
            found[2][:, index[source]] += dk
            found[3][:, index[source]] += dv
        assert backward.dq_BPHE is not None
        found[1][:, mine] = backward.dq_BPHE
    return found


@pytest.mark.parametrize("docs", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_the_kernel_computes_what_tiles_do(kv_heads, causal, docs):
    device = torch.accelerator.current_accelerator()
    draw = torch.Generator(device).manual_seed(0)
    shapes = [(B, S, heads, E) for heads in (H, kv_heads, kv_heads, H)]
    tensors = [torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16) for shape in shapes]
    seen, bounds = documents(device) if docs else (None, None)
    assert flash_suits(tensors[0], 0, seen, bounds)
    for got, wanted in zip(*(around(kind, tensors, causal, docs) for kind in (Flash, Tiles)), strict=True):
        assert got.isfinite().all()
        # bf16 has 8 bits: of the largest element, and of all together
        assert (got - wanted).abs().max() <= 2e-2 * wanted.abs().max()
        assert (got - wanted).norm() <= 1e-2 * wanted.norm()
