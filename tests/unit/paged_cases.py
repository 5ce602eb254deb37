"""Random pages, and what the kernel makes of them in Triton's interpreter: a JSON line a case. Run with TRITON_INTERPRET=1."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch

from meshwright.kernels.paged_attention import SPAN, Pages, Singles, gathered_attention


@dataclass(frozen=True)
class Case:
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    features: int = 16
    page: int = 4
    window: int | None = None
    dtype: torch.dtype = torch.float64
    span: int = SPAN


CASES = {
    "decode": Case((1, 1, 1), (1, 7, 33)),
    "spans": Case((1, 1), (300, 530), page=16),
    "short spans": Case((1, 1), (90, 530), page=16, span=128),
    "prefill": Case((5, 20), (5, 20)),
    "cached": Case((3, 17, 2), (9, 40, 66)),
    "mixed": Case((1, 18, 1, 4), (30, 18, 5, 90)),
    "window": Case((1, 19, 1), (90, 75, 3), window=9),
    "window of spans": Case((1, 1), (530, 40), window=200, page=16),
    "all heads": Case((1, 5), (12, 9), heads=3, kv_heads=3, features=10),
    "one head for six": Case((1, 5), (12, 9), heads=6, kv_heads=1, features=24, page=3),
    "fp32": Case((1, 18), (90, 40), dtype=torch.float32),
    "fp16": Case((1, 18), (90, 40), dtype=torch.float16),
}


def made(case: Case, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Pages]:
    """q, keys, values, pages. What no sequence has is NaN: nobody may look at it."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(case.dtype)

    needed = [-(-length // case.page) for length in case.lengths]
    order = torch.randperm(sum(needed) + 2, generator=generator).tolist()
    tables = torch.full((len(needed), max(needed)), order[-1])
    keys, values = (torch.full((len(order), case.page, case.kv_heads, case.features), torch.nan).to(case.dtype) for _ in "kv")
    for row, (count, length) in enumerate(zip(needed, case.lengths, strict=True)):
        tables[row, :count] = torch.tensor([order.pop(0) for _ in range(count)])
        for pool in (keys, values):
            slots = (tables[row, :count, None] * case.page + torch.arange(case.page)).flatten()[:length]
            pool.flatten(0, 1)[slots] = drawn(length, case.kv_heads, case.features)
    q = drawn(sum(case.counts), case.heads, case.features)
    return q, keys, values, Pages(torch.zeros(len(q), dtype=torch.int64), tables, case.counts, case.lengths, span=case.span)


def difference(case: Case) -> float:
    """Largest difference from the oracle, which is computed in fp64."""
    from meshwright.kernels.paged_triton import paged_attention

    q, keys, values, pages = made(case)
    found = paged_attention(q, keys, values, pages, window=case.window)
    assert found.dtype == case.dtype
    expected = gathered_attention(*(t.double() for t in (q, keys, values)), pages, window=case.window)
    return float((found.double() - expected).abs().max())


def alone() -> bool:
    """Whether each sequence of a step gets bitwise what it gets alone."""
    from meshwright.kernels.paged_triton import paged_attention

    case = Case((1, 18, 1, 1), (30, 40, 300, 600), dtype=torch.float32, page=16)
    q, keys, values, pages = made(case)
    together = paged_attention(q, keys, values, pages).split(case.counts)
    same = True
    for row, part in enumerate(q.split(case.counts)):
        own = Pages(pages.slots, pages.tables[row : row + 1], case.counts[row : row + 1], case.lengths[row : row + 1])
        same = same and torch.equal(paged_attention(part, keys, values, own), together[row])
    return same


def sizes_on_the_device() -> bool:
    """Whether a step of which only the device knows the lengths gives the bits of one whose lengths the host knows: with wider
    tables than any sequence needs, hence programs that have nothing to do, and with one that must have more keys each."""
    from meshwright.kernels.paged_triton import paged_attention

    case = Case((1,) * 5, (1, 512, 513, 700, 17000), dtype=torch.float32, page=16, heads=2)
    q, keys, values, pages = made(case)
    known = paged_attention(q, keys, values, pages)
    same = float((known - gathered_attention(q, keys, values, pages)).abs().max()) < 1e-5
    for rows, width in ((5, 1063), (4, 200), (3, 40), (1, 1)):
        tables = torch.zeros(rows, width, dtype=torch.int32)
        have = min(width, pages.tables.shape[1])
        tables[:, :have] = pages.tables[:rows, :have]
        lengths = torch.tensor(case.lengths[:rows], dtype=torch.int32)
        alone = Singles(pages.slots[:rows], tables, lengths)
        for _ in range(2):  # what programs count with is as it was
            same = same and torch.equal(paged_attention(q[:rows], keys, values, alone), known[:rows])
    return same


def strided() -> bool:
    """Whether queries may be a part of something larger, as they are behind one matrix for all three."""
    from meshwright.kernels.paged_triton import paged_attention

    case = Case((1, 5), (12, 9), heads=3, kv_heads=3)
    q, keys, values, pages = made(case)
    whole = torch.stack((q, torch.zeros_like(q), q), 2)
    return torch.equal(paged_attention(whole[:, :, 0], keys, values, pages), paged_attention(q, keys, values, pages))


if __name__ == "__main__":
    for name, case in CASES.items():
        print(json.dumps([name, difference(case)]), flush=True)
    for check in (alone, sizes_on_the_device, strided):
        print(json.dumps([check.__name__, check()]), flush=True)
