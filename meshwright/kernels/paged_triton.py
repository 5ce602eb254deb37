"""`kernels.paged_attention` in Triton. Import through `kernels.accelerated`.

A program has some queries of one sequence, all heads that share a key/value head, and walks over keys with a running maximum
and sum (arXiv:2205.14135). `_attend` has up to QUERIES tokens of a prompt. A single new token has too little work for a device,
so `_decode` deals its keys to programs of `span` keys each (more for a sequence of more than SPANS spans); the one that is
through last puts their results together. With a given span, the order of any sum depends on the length of the sequence alone:
the result of a token is bitwise the same whatever else is in the step. Programs beyond the end of their sequence do nothing, so
how many are launched may be more than are needed.

Programs of all key/value heads of a sequence are neighbours: a token's heads lie together, and are read at about the same time.

They take no part in `kernels.early`: what is launched behind the few programs of a short sequence fills the multiprocessors
before these have their keys, and a step gets slower than without (docs/performance-log.md).

fp64 tensors are computed in fp64, everything else in fp32; keys and values of 8 bits become those of a wider dtype, which has
them all, before they are multiplied. Shapes as in `kernels.paged_attention`; D sequences with one new token, S spans, G = H/K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from meshwright.kernels.paged_attention import QUERIES, Pages, Singles
from meshwright.kernels.rowwise_triton import widened

__all__ = ["DECODE", "PROMPT", "paged_attention"]

SPANS = 32
"""Most programs of a sequence with one new token and a key/value head."""
PROMPT = {"tile": 64, "num_warps": 4, "num_stages": 3}
"""Of a prompt: keys at a time, warps, and tiles that are loaded ahead."""
DECODE = {"tile": 128, "num_warps": 4, "num_stages": 3}
"""The same of a single token. `bench.kernels` times others."""

NEAR = {torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _score(q, k, known, key, position, scale, window: tl.constexpr, wide: tl.constexpr):
    """Of queries [lanes, columns] and keys [tile, columns]: [lanes, tile], -inf where a query may not look."""
    score = tl.dot(q, tl.trans(k), out_dtype=wide, input_precision="ieee") * scale
    seen = known[None, :] & (key[None, :] <= position[:, None])
    if window:
        seen = seen & (position[:, None] - key[None, :] < window)
    return tl.where(seen, score, float("-inf"))


@triton.jit
def _weigh(score, top, total):
    """The softmax of more keys: largest score, sum of weights; the weights of these, and what former sums shrink by."""
    higher = tl.maximum(top, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: exp(-inf - 0) is 0, and no NaN
    weight = tl.exp(score - base[:, None])
    shrink = tl.exp(top - base)
    return higher, total * shrink + tl.sum(weight, 1), weight, shrink[:, None]


@triton.jit
def _sum(sums, weight, v, shrink, wide: tl.constexpr):
    """The weighted sum of values, with more of them."""
    return sums * shrink + tl.dot(weight.to(v.dtype), v, out_dtype=wide, input_precision="ieee")


@triton.jit
def _pair(v):
    """Two numbers of 8 bits (e4m3) in each of 16: their 2^-8 in fp16, whose exponent has a bit more and another bias. NaN
    becomes 1.875. An operand of 16 bits can be turned on its way to a matrix product, one of 8 bits goes byte by byte."""
    low = ((v & 0x0080) << 8) | ((v & 0x007F) << 7)
    high = (v & 0x8000) | ((v >> 1) & 0x3F80)
    return low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)


@triton.jit(do_not_specialize=["table_width"])
def _decode(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    sums_ptr,
    top_ptr,
    total_ptr,
    marks_ptr,
    tables_ptr,
    items_ptr,
    tokens_ptr,
    lengths_ptr,
    table_width,
    q_token,
    q_head,
    scale,
    alone: tl.constexpr,
    page: tl.constexpr,
    features: tl.constexpr,
    group: tl.constexpr,
    window: tl.constexpr,
    pairs: tl.constexpr,
    span: tl.constexpr,
    spans: tl.constexpr,
    near: tl.constexpr,
    wide: tl.constexpr,
    lanes: tl.constexpr,
    columns: tl.constexpr,
    tile: tl.constexpr,
):
    """Grid K, D, S. alone: item, row and token are the same number; else items [D, 2] and tokens [D] say which. pairs: values
    come as pairs of 8 bits. `sums` [D, K, S, G, E] (in fp32), `top` and `total` [D, K, S, G] are what the spans leave where
    there are several."""
    kv_head, item, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(0)
    row = item if alone else tl.load(items_ptr + 2 * item)
    length = tl.load(lengths_ptr + row)
    each = span * tl.cdiv(length, span * spans)
    if part * each >= length:
        return
    token = item if alone else tl.load(tokens_ptr + item)

    lane, column = tl.arange(0, lanes), tl.arange(0, columns)
    real = lane < group
    inside = real[:, None] & (column < features)[None, :]
    head = kv_head * group + lane
    q_place = token.to(tl.int64) * q_token + head[:, None] * q_head + column[None, :]
    q = tl.load(q_ptr + q_place, mask=inside, other=0.0).to(near)
    begin, end = part * each, tl.minimum(length, (part + 1) * each)
    if window:
        begin = tl.maximum(begin, (length - window) // tile * tile)
    position = tl.zeros([lanes], tl.int32) + (length - 1)
    table = tables_ptr + row.to(tl.int64) * table_width
    top = tl.full([lanes], float("-inf"), wide)
    total = tl.zeros([lanes], wide)
    width: tl.constexpr = columns // 2 if pairs else columns
    feature = tl.arange(0, width)
    real_v = (feature < (features // 2 if pairs else features))[None, :]
    sums = tl.zeros([lanes, width], wide)
    second = sums
    for at in range(begin, end, tile):
        key = at + tl.arange(0, tile)
        known = key < end
        block = tl.load(table + key // page, mask=known, other=0).to(tl.int64)
        slot = ((block * page + key % page) * kv_heads + kv_head) * features
        there = known[:, None] & (column < features)[None, :]
        k = tl.load(k_ptr + slot[:, None] + column[None, :], mask=there, other=0.0, eviction_policy="evict_first")
        v_place = v_ptr + (slot // 2 if pairs else slot)[:, None] + feature[None, :]
        v = tl.load(v_place, mask=known[:, None] & real_v, other=0 if pairs else 0.0, eviction_policy="evict_first")
        score = _score(q, widened(k, near), known, key, position, scale, window, wide)
        top, total, weight, shrink = _weigh(score, top, total)
        if pairs:
            low, high = _pair(v)
            sums, second = _sum(sums, weight, low, shrink, wide), _sum(second, weight, high, shrink, wide)
        else:
            sums = _sum(sums, weight, widened(v, near), shrink, wide)
    if pairs:
        sums = tl.interleave(sums, second) * 256.0

    out = out_ptr + (token.to(tl.int64) * kv_heads * group + head[:, None]) * features + column[None, :]
    parts = tl.cdiv(length, each)
    if parts == 1:
        tl.store(out, (sums / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
        return
    mark = item * kv_heads + kv_head
    first = mark.to(tl.int64) * tl.num_programs(2) * group  # of this sequence and head: S * G numbers
    mine = first + part * group + lane
    tl.store(top_ptr + mine, top, mask=real)
    tl.store(total_ptr + mine, total, mask=real)
    tl.store(sums_ptr + mine[:, None] * features + column[None, :], sums, mask=inside)
    tl.debug_barrier()  # all threads have written before one says so
    if tl.atomic_add(marks_ptr + mark, 1, sem="acq_rel", scope="gpu") == parts - 1:
        tl.store(marks_ptr + mark, 0)
        every = tl.arange(0, spans)
        used = real[:, None] & (every < parts)[None, :]
        places = first + every[None, :] * group + lane[:, None]
        tops = tl.load(top_ptr + places, mask=used, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(total_ptr + places, mask=used, other=0.0, cache_modifier=".cg")
        peak = tl.where(real, tl.max(tops, 1), 0.0)
        whole = tl.where(real, tl.sum(totals * tl.exp(tops - peak[:, None]), 1), 1.0)
        merged = tl.zeros([lanes, columns], wide)
        for other in range(0, parts):
            theirs = first + other * group + lane
            weight = tl.exp(tl.load(top_ptr + theirs, mask=real, other=float("-inf"), cache_modifier=".cg") - peak)
            place = sums_ptr + theirs[:, None] * features + column[None, :]
            merged += tl.load(place, mask=inside, other=0.0, cache_modifier=".cg") * weight[:, None]
        tl.store(out, (merged / whole[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["table_width"])
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    tables_ptr,
    items_ptr,
    starts_ptr,
    counts_ptr,
    lengths_ptr,
    table_width,
    q_token,
    q_head,
    scale,
    page: tl.constexpr,
    features: tl.constexpr,
    group: tl.constexpr,
    window: tl.constexpr,
    queries: tl.constexpr,
    near: tl.constexpr,
    wide: tl.constexpr,
    lanes: tl.constexpr,
    columns: tl.constexpr,
    tile: tl.constexpr,
):
    """Grid K, items: (sequence, its first query) of each."""
    kv_head, item = tl.program_id(0), tl.program_id(1)
    kv_heads = tl.num_programs(0)
    row = tl.load(items_ptr + 2 * item)
    first = tl.load(items_ptr + 2 * item + 1)
    start = tl.load(starts_ptr + row).to(tl.int64)
    count = tl.load(counts_ptr + row)
    length = tl.load(lengths_ptr + row)

    lane = tl.arange(0, lanes)
    query = first + lane // group
    head = kv_head * group + lane % group
    column = tl.arange(0, columns)
    real = (query < count) & (lane < queries * group)
    inside = real[:, None] & (column < features)[None, :]
    position = length - count + query
    q_place = (start + query)[:, None] * q_token + head[:, None] * q_head + column[None, :]
    q = tl.load(q_ptr + q_place, mask=inside, other=0.0).to(near)
    begin = 0
    end = tl.minimum(length, length - count + first + queries)
    if window:
        begin = tl.maximum(0, length - count + first - window + 1) // tile * tile
    top = tl.full([lanes], float("-inf"), wide)
    total = tl.zeros([lanes], wide)
    sums = tl.zeros([lanes, columns], wide)
    for at in range(begin, end, tile):
        key = at + tl.arange(0, tile)
        known = key < end
        block = tl.load(tables_ptr + row.to(tl.int64) * table_width + key // page, mask=known, other=0).to(tl.int64)
        slot = ((block * page + key % page) * kv_heads + kv_head) * features
        there = known[:, None] & (column < features)[None, :]
        k = tl.load(k_ptr + slot[:, None] + column[None, :], mask=there, other=0.0)
        v = tl.load(v_ptr + slot[:, None] + column[None, :], mask=there, other=0.0)
        k, v = widened(k, near), widened(v, near)
        score = _score(q, k, known, key, position, scale, window, wide)
        top, total, weight, shrink = _weigh(score, top, total)
        sums = _sum(sums, weight, v, shrink, wide)
    total = tl.where(real, total, 1.0)
    out = out_ptr + ((start + query)[:, None] * kv_heads * group + head[:, None]) * features + column[None, :]
    tl.store(out, (sums / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


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
    out_THE = torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device)
    if isinstance(pages, Singles):
        longest = pages.tables.shape[1] * keys.shape[1]
    else:
        longest = pages.longest_single if pages.single else 0
    scale = scale or q_THE.shape[2] ** -0.5
    if longest:
        _single_tokens(q_THE, keys, values, pages, out_THE, longest, window or 0, scale)
    if not isinstance(pages, Singles) and pages.on_device.blocks.shape[0]:
        rows, sizes = pages.on_device, _sizes(q_THE, keys, QUERIES)
        _attend[(keys.shape[2], rows.blocks.shape[0])](
            q_THE,
            keys,
            values,
            out_THE,
            pages.tables,
            rows.blocks,
            rows.starts,
            rows.counts,
            rows.lengths,
            pages.tables.shape[1],
            q_THE.stride(0),
            q_THE.stride(1),
            scale,
            window=window or 0,
            queries=QUERIES,
            **sizes,
            **PROMPT,
        )
    return out_THE


def _sizes(q_THE: torch.Tensor, keys: torch.Tensor, queries: int) -> dict[str, object]:
    """What both kernels are compiled for."""
    group, features = q_THE.shape[1] // keys.shape[2], q_THE.shape[2]
    return {
        "page": keys.shape[1],
        "features": features,
        "group": group,
        "near": _near(q_THE.dtype, keys.dtype),
        "wide": tl.float64 if q_THE.dtype == torch.float64 else tl.float32,
        "lanes": max(16, triton.next_power_of_2(queries * group)),
        "columns": max(16, triton.next_power_of_2(features)),
    }


def _near(queries: torch.dtype, keys: torch.dtype) -> tl.dtype:
    """In which queries meet keys, and weights values. For 8 bits fp16 in the place of bf16: a device makes it of them in one
    instruction for two, and it has more digits; a query beyond 65,504 would be infinite."""
    if keys.itemsize == 1 and queries.itemsize == 2:
        return tl.float16
    return NEAR[queries]


def _single_tokens(
    q_THE: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: Pages | Singles,
    out_THE: torch.Tensor,
    longest: int,
    window: int,
    scale: float,
) -> None:
    """Sequences with one new token, of which none is longer than `longest`."""
    alone = isinstance(pages, Singles)
    if isinstance(pages, Singles):
        items = tokens = lengths = pages.lengths
    else:
        rows = pages.on_device
        items, tokens, lengths = rows.single, rows.single_tokens, rows.lengths
    (kv_heads, features), single = keys.shape[2:], items.shape[0]
    group, device = q_THE.shape[1] // kv_heads, q_THE.device
    pairs = q_THE.dtype.itemsize == 2 and values.dtype.itemsize == 1 and features >= 32
    spans = min(SPANS, triton.cdiv(longest, pages.span))
    wide = torch.promote_types(q_THE.dtype, torch.float32)
    sums = torch.empty(single, kv_heads, spans if spans > 1 else 0, group, features, dtype=wide, device=device)
    top, total = (torch.empty(sums.shape[:-1], dtype=wide, device=device) for _ in range(2))
    _decode[(kv_heads, single, spans)](
        q_THE,
        keys,
        values.view(torch.uint16) if pairs else values,
        out_THE,
        sums,
        top,
        total,
        pages.marks.of(single, kv_heads, device),
        pages.tables,
        items,
        tokens,
        lengths,
        pages.tables.shape[1],
        q_THE.stride(0),
        q_THE.stride(1),
        scale,
        alone=alone,
        window=window,
        pairs=pairs,
        span=pages.span,
        spans=SPANS,
        **_sizes(q_THE, keys, 1),
        **DECODE,
    )
