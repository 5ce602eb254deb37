"""`kernels.paged_attention` in Triton: decode and cached prefill by one kernel. Import through `kernels.accelerated`.

A program has some queries of one sequence, all heads that share a key/value head, and walks over keys with a running maximum
and sum (arXiv:2205.14135). A single new token has too little work for a device, so its keys are dealt to programs of SPAN keys
each (more for a sequence of more than SPANS SPAN tokens), and a second kernel puts their results together. The spans depend on
the length of the sequence alone, and so does the order of any sum: the result of a token is bitwise the same whatever else is
in the step. Programs beyond the end of their sequence do nothing, so how many are launched may be more than are needed.

fp64 tensors are computed in fp64, everything else in fp32. Shapes as in `kernels.paged_attention`; D sequences with one new
token, S spans.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from meshwright.kernels.paged_attention import QUERIES, Pages, Singles

__all__ = ["paged_attention"]

SPAN = 256
"""Least keys of a program for a sequence with one new token."""
SPANS = 32
"""Most programs of such a sequence and key/value head."""
TILE = 64
"""Keys at a time."""


@triton.jit(do_not_specialize=["table_width"])
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    top_ptr,
    sum_ptr,
    tables_ptr,
    items_ptr,
    starts_ptr,
    counts_ptr,
    lengths_ptr,
    table_width,
    q_token,
    q_head,
    heads,
    kv_heads,
    features,
    scale,
    page: tl.constexpr,
    group: tl.constexpr,
    window: tl.constexpr,
    span: tl.constexpr,
    spans: tl.constexpr,
    queries: tl.constexpr,
    wide: tl.constexpr,
    lanes: tl.constexpr,
    columns: tl.constexpr,
    tile: tl.constexpr,
):
    """items: (sequence, its first query) of each program along axis 0. span 0: all keys, and `out` is the result [T, H, E];
    else axis 2 counts spans, and `out` [S, D, H, E] is the weighted sum of values, `top` and `sum` [S, D, H] their softmax.
    What a program beyond the end of its sequence would have is not written."""
    item, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(items_ptr + 2 * item)
    first = tl.load(items_ptr + 2 * item + 1)
    start = tl.load(starts_ptr + row).to(tl.int64)
    count = tl.load(counts_ptr + row)
    length = tl.load(lengths_ptr + row)
    each = span * tl.cdiv(length, span * spans) if span else length
    if part * each >= length:
        return

    lane = tl.arange(0, lanes)
    query = first + lane // group
    head = kv_head * group + lane % group
    column = tl.arange(0, columns)
    real = (query < count) & (lane < queries * group)
    inside = real[:, None] & (column < features)[None, :]
    position = length - count + query
    place = (start + query)[:, None] * heads * features + head[:, None] * features + column[None, :]
    q_place = (start + query)[:, None] * q_token + head[:, None] * q_head + column[None, :]
    q = tl.load(q_ptr + q_place, mask=inside, other=0.0)

    begin = 0
    end = tl.minimum(length, length - count + first + queries)
    if window:
        begin = tl.maximum(0, length - count + first - window + 1) // tile * tile
    if span:
        begin = tl.maximum(begin, part * each)
        end = tl.minimum(end, (part + 1) * each)
    top = tl.full([lanes], float("-inf"), wide)
    total = tl.zeros([lanes], wide)
    sums = tl.zeros([lanes, columns], wide)
    for at in range(begin, end, tile):
        key = at + tl.arange(0, tile)
        known = key < end
        block = tl.load(tables_ptr + row.to(tl.int64) * table_width + key // page, mask=known, other=0).to(tl.int64)
        slot = (block * page + key % page) * kv_heads + kv_head
        there = known[:, None] & (column < features)[None, :]
        k = tl.load(k_ptr + slot[:, None] * features + column[None, :], mask=there, other=0.0)
        v = tl.load(v_ptr + slot[:, None] * features + column[None, :], mask=there, other=0.0)
        score = tl.dot(q, tl.trans(k), out_dtype=wide, input_precision="ieee") * scale
        seen = known[None, :] & (key[None, :] <= position[:, None])
        if window:
            seen = seen & (position[:, None] - key[None, :] < window)
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: exp(-inf - 0) is 0, and no NaN
        weight = tl.exp(score - base[:, None])
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(weight, 1)
        sums = sums * shrink[:, None] + tl.dot(weight.to(v.dtype), v, out_dtype=wide, input_precision="ieee")
        top = higher
    if span:
        at_item = (part * tl.num_programs(0) + item).to(tl.int64) * heads + head
        tl.store(top_ptr + at_item, top, mask=real)
        tl.store(sum_ptr + at_item, total, mask=real)
        tl.store(out_ptr + at_item[:, None] * features + column[None, :], sums, mask=inside)
    else:
        total = tl.where(real, total, 1.0)
        tl.store(out_ptr + place, (sums / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _merge(
    sums_ptr,
    top_ptr,
    sum_ptr,
    out_ptr,
    items_ptr,
    tokens_ptr,
    lengths_ptr,
    features,
    span: tl.constexpr,
    spans: tl.constexpr,
    columns: tl.constexpr,
):
    """The results of the spans of one sequence and head, weighed by their largest score: `out` [T, H, E]."""
    item, head, items, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    length = tl.load(lengths_ptr + tl.load(items_ptr + 2 * item))
    token = tl.load(tokens_ptr + item).to(tl.int64)
    part = tl.arange(0, spans)
    column = tl.arange(0, columns)
    used = part < tl.cdiv(length, span * tl.cdiv(length, span * spans))
    place = (part.to(tl.int64) * items + item) * heads + head
    top = tl.load(top_ptr + place, mask=used, other=float("-inf"))
    weight = tl.exp(top - tl.max(top, 0))
    total = tl.sum(tl.load(sum_ptr + place, mask=used, other=0.0) * weight, 0)
    there = used[:, None] & (column < features)[None, :]
    sums = tl.load(sums_ptr + place[:, None] * features + column[None, :], mask=there, other=0.0)
    merged = tl.sum(sums * weight[:, None], 0) / total
    where = out_ptr + (token * heads + head) * features + column
    tl.store(where, merged.to(out_ptr.dtype.element_ty), mask=column < features)


def paged_attention(
    q_THE: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: Pages | Singles,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """As `kernels.paged_attention.paged_attention`; pages and tables are contiguous, and the features of a query's head are."""
    if isinstance(pages, Singles):
        longest = pages.tables.shape[1] * keys.shape[1]
    else:
        longest = pages.longest_single if pages.single else 0
    out_THE = torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device)
    heads, features = q_THE.shape[1:]
    kv_heads, page = keys.shape[2], keys.shape[1]
    wide = torch.promote_types(q_THE.dtype, torch.float32)
    group = heads // kv_heads
    columns = max(16, triton.next_power_of_2(features))
    rows = pages.on_device

    def launch(
        out: torch.Tensor, top: torch.Tensor, total: torch.Tensor, items: torch.Tensor, queries: int, spans: int
    ) -> None:
        _attend[(items.shape[0], kv_heads, spans)](
            q_THE,
            keys,
            values,
            out,
            top,
            total,
            pages.tables,
            items,
            rows.starts,
            rows.counts,
            rows.lengths,
            pages.tables.shape[1],
            q_THE.stride(0),
            q_THE.stride(1),
            heads,
            kv_heads,
            features,
            scale or features**-0.5,
            page=page,
            group=group,
            window=window or 0,
            span=SPAN if queries == 1 else 0,
            spans=SPANS,
            queries=queries,
            wide=tl.float64 if wide == torch.float64 else tl.float32,
            lanes=max(16, triton.next_power_of_2(queries * group)),
            columns=columns,
            tile=TILE,
        )

    if longest:
        single, spans = rows.single.shape[0], min(SPANS, triton.cdiv(longest, SPAN))
        sums = torch.empty(spans, single, heads, features, dtype=wide, device=q_THE.device)
        top, total = (torch.empty(spans, single, heads, dtype=wide, device=q_THE.device) for _ in range(2))
        launch(sums, top, total, rows.single, 1, spans)
        sizes = {"span": SPAN, "spans": SPANS, "columns": columns}
        found = (sums, top, total, out_THE, rows.single, rows.single_tokens, rows.lengths)
        _merge[(single, heads)](*found, features, **sizes)
    if rows.blocks.shape[0]:
        launch(out_THE, out_THE, out_THE, rows.blocks, QUERIES, 1)
    return out_THE
