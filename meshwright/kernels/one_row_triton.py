"""`kernels.one_row` in Triton. Import through `kernels.accelerated`.

A program has some rows of a matrix and walks over their columns; threads sum their own columns and meet once, at the end.
Where two rows belong together, a gate and its value, or the two features of a head that turn together, a program has both.

fp64 tensors are computed in fp64, everything else in fp32. The result of a matrix is rounded as the model does before it is
turned, gated or added to the residual stream; a normed row is not rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import nn

from meshwright.kernels.early import launch_options
from meshwright.kernels.fused import GATES, Heads
from meshwright.kernels.fused_triton import activated
from meshwright.kernels.rowwise_triton import as_stored, widened

__all__ = ["gate_linear", "heads_linear", "linear", "sizes"]


def sizes(count: int, columns: int, paired: bool, narrow: bool = False) -> dict[str, int]:
    """rows: of a program, or pairs; block: columns at a time. For a matrix of `count` rows, or pairs of them. narrow: of 8
    bits, of which a thread takes twice as many columns at a time.

    A multiprocessor needs about 40 KB on their way at any time. Of a large matrix warps have some rows each, which share the
    reads of x; of a small one there are not enough rows for that, and some warps share one, more where it is long. Either way
    no warp waits for another before the end. `bench.kernels` times others."""
    if narrow:
        rows = 2 if count >= MANY else 1
        return {"rows": rows, "block": 512, "num_warps": 1} if rows > 1 else {"rows": 1, "block": 2048, "num_warps": 2}
    if count >= MANY:
        return {"rows": 4, "block": 256, "num_warps": 1}
    if paired and columns < 4096:
        return {"rows": 1, "block": 1024, "num_warps": 2}
    whole = paired or (columns >= 8192 and columns % 4096 == 0)
    return {"rows": 1, "block": 4096 if whole else 2048, "num_warps": 4}


MANY = 8192
"""Rows, or pairs, that keep all multiprocessors busy with four in a warp."""
_KINDS = {name: number for number, name in enumerate(GATES)}
_PLAIN = -1


@triton.jit
def _weights(source, column, mine, width: tl.constexpr, distance: tl.constexpr):
    """Some columns of the rows at `source`, and of those that belong to them (the same where none do)."""
    there = mine[:, None] & (column < width)
    w = tl.load(source + column, mask=there, other=0.0, eviction_policy="evict_first")
    u = w
    if distance:
        u = tl.load(source + distance * width + column, mask=there, other=0.0, eviction_policy="evict_first")
    return w, u


@triton.jit
def _products(
    a,
    b,
    w,
    u,
    x_ptr,
    norm_ptr,
    column,
    width: tl.constexpr,
    distance: tl.constexpr,
    normed: tl.constexpr,
    wide: tl.constexpr,
):
    """a and b with what these columns add to them."""
    inside = column < width
    x = tl.load(x_ptr + column, mask=inside, other=0.0).to(wide)
    if normed:
        x *= tl.load(norm_ptr + column, mask=inside, other=0.0).to(wide)
    a += widened(w, wide) * x
    if distance:
        b += widened(u, wide) * x
    return a, b


@triton.jit
def _row(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    row_scale_ptr,
    residual_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    count,
    extent,
    width: tl.constexpr,
    distance: tl.constexpr,
    eps: tl.constexpr,
    normed: tl.constexpr,
    biased: tl.constexpr,
    scaled: tl.constexpr,
    added: tl.constexpr,
    kind: tl.constexpr,
    group: tl.constexpr,
    features: tl.constexpr,
    turned: tl.constexpr,
    wide: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    early: tl.constexpr,
):
    """count: rows of the matrix, or pairs of them. extent: the width again, for a loop that is not to be unrolled. distance:
    from a row to the one that belongs to it, in runs of as many; 0: none does. kind: of `activated`, or -1. features: not 0
    where the result are heads, of which lane `group` is the key. early: of `kernels.early`: the first weights are on their way
    before the kernel that writes x has ended."""
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    own = tl.program_id(0) * rows + tl.arange(0, rows)
    mine = own < count
    first = own // distance * (2 * distance) + own % distance if distance else own
    a = tl.zeros([rows, block], wide)
    b = tl.zeros([rows, block], wide)
    source = weight_ptr + first.to(tl.int64)[:, None] * width
    lanes = tl.arange(0, block)[None, :]
    w, u = _weights(source, lanes, mine, width, distance)
    if scaled:
        own_scale = tl.load(row_scale_ptr + first, mask=mine, other=0.0)
        if distance:
            other_scale = tl.load(row_scale_ptr + first + distance, mask=mine, other=0.0)
    if early:
        tl.extra.cuda.gdc_wait()
    a, b = _products(a, b, w, u, x_ptr, norm_ptr, lanes, width, distance, normed, wide)
    for start in range(block, width, block):
        w, u = _weights(source, start + lanes, mine, width, distance)
        a, b = _products(a, b, w, u, x_ptr, norm_ptr, start + lanes, width, distance, normed, wide)
    y, z = tl.sum(a, 1), tl.sum(b, 1)
    if normed:  # x comes from the cache again: sums of squares beside the others would take registers from the reads of weights
        squares = tl.zeros([block], wide)
        for start in range(0, extent, block):
            column = start + tl.arange(0, block)
            x = tl.load(x_ptr + column, mask=column < extent, other=0.0).to(wide)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares, 0) / width + eps)
        y, z = y * scale, z * scale
    if scaled:
        y *= own_scale
        if distance:
            z *= other_scale
    if biased:
        y += tl.load(bias_ptr + first, mask=mine, other=0.0).to(wide)
        if distance:
            z += tl.load(bias_ptr + first + distance, mask=mine, other=0.0).to(wide)
    if features:
        y, z = y.to(dtype), z.to(dtype)
        head, feature = first // features, first % features
        lane, kv_head = head % (group + 2), head // (group + 2)
        if turned:
            cos = tl.load(cos_ptr + feature, mask=mine, other=0.0)
            sin = tl.load(sin_ptr + feature, mask=mine, other=0.0)
            low = (y.to(wide) * cos - z.to(wide) * sin).to(dtype)
            high = (z.to(wide) * cos + y.to(wide) * sin).to(dtype)
            y, z = tl.where(lane <= group, low, y), tl.where(lane <= group, high, z)
        query = out_ptr + (kv_head * group + lane) * features + feature
        tl.store(query, y, mask=mine & (lane < group))
        tl.store(query + distance, z, mask=mine & (lane < group))
        kv_heads = 2 * count // (features * (group + 2))
        place = (tl.load(slots_ptr) * kv_heads + kv_head) * features + feature
        y, z = as_stored(y, keys_ptr), as_stored(z, keys_ptr)
        tl.store(keys_ptr + place, y, mask=mine & (lane == group))
        tl.store(keys_ptr + place + distance, z, mask=mine & (lane == group))
        tl.store(values_ptr + place, y, mask=mine & (lane == group + 1))
        tl.store(values_ptr + place + distance, z, mask=mine & (lane == group + 1))
    else:
        if kind >= 0:
            y = activated(y.to(dtype).to(wide), kind)
        if distance:
            y = y.to(dtype).to(wide) * z.to(dtype).to(wide)
        y = y.to(dtype)
        if added:
            y = (y.to(wide) + tl.load(residual_ptr + own, mask=mine, other=0.0).to(wide)).to(dtype)
        tl.store(out_ptr + own, y, mask=mine)


def _launch(
    x: torch.Tensor,
    norm: nn.RMSNorm | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    row_scale: torch.Tensor | None,
    *,
    residual: torch.Tensor | None = None,
    distance: int = 0,
    kind: int = _PLAIN,
    heads: Heads | None = None,
    pages: tuple[torch.Tensor, ...] = (),
) -> torch.Tensor:
    """Returns out. pages: keys, values, slots."""
    count = weight.shape[0] // (2 if distance else 1)
    turned = heads is not None and heads.cos is not None
    chosen = sizes(count, x.shape[-1], bool(distance), weight.element_size() == 1)
    most = max(16, triton.next_power_of_2(x.shape[-1]))
    _row[(triton.cdiv(count, chosen["rows"]),)](
        x,
        x if norm is None else norm.weight,
        weight,
        x if bias is None else bias,
        x if row_scale is None else row_scale,
        x if residual is None else residual,
        out,
        heads.cos if heads is not None and turned else x,
        heads.sin if heads is not None and turned else x,
        *(pages or (x, x, x)),
        count,
        x.shape[-1],
        width=x.shape[-1],
        distance=distance,
        eps=0.0 if norm is None else norm.eps,
        normed=norm is not None,
        biased=bias is not None,
        scaled=row_scale is not None,
        added=residual is not None,
        kind=kind,
        group=0 if heads is None else heads.group,
        features=0 if heads is None else 2 * distance,
        turned=turned,
        wide=tl.float64 if x.dtype == torch.float64 else tl.float32,
        **{**chosen, "block": min(chosen["block"], most)},
        **launch_options(),
    )
    return out


def linear(
    x: torch.Tensor,
    norm: nn.RMSNorm | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """weight (times a scale for each of its rows, fp32) times the norm of x, + residual. out: a contiguous row for it."""
    shape = (*x.shape[:-1], weight.shape[0])
    y = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out.view(shape)
    return _launch(x, norm, weight, bias, y, row_scale, residual=residual)


def gate_linear(
    x: torch.Tensor,
    norm: nn.RMSNorm | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    name: str,
    gate_rows: int,
) -> torch.Tensor:
    """`kernels.fused.gate` of weight times the norm of x."""
    width = weight.shape[0] // (2 if gate_rows else 1)
    y = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    return _launch(x, norm, weight, bias, y, row_scale, distance=gate_rows, kind=_KINDS[name])


def heads_linear(
    x: torch.Tensor,
    norm: nn.RMSNorm | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    heads: Heads,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """`kernels.fused.turn_and_write` of weight times the norm of x; heads have no norms and an even number of features."""
    kv_heads, features = keys.shape[2:]
    q = torch.empty(1, kv_heads * heads.group, features, dtype=x.dtype, device=x.device)
    return _launch(x, norm, weight, bias, q, row_scale, distance=features // 2, heads=heads, pages=(keys, values, slots))
