"""The attention interface against arithmetic written out, and packed documents against each document alone."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.models import attention as module
from meshwright.models.attention import attention


def written_out(q, k, v, *, causal, documents=None, window=None, scale=None):
    """Every query by itself: softmax over the keys it may see."""
    batch, length, heads, width = q.shape
    group = heads // k.shape[2]
    out = torch.zeros_like(q)
    for b in range(batch):
        for i in range(length):
            seen = [
                j
                for j in range(length)
                if (not causal or j <= i)
                and (window is None or abs(i - j) < window)
                and (documents is None or documents[b, i] == documents[b, j])
            ]
            for h in range(heads):
                score = k[b, seen, h // group] @ q[b, i, h] * (scale or 1 / math.sqrt(width))
                out[b, i, h] = score.softmax(0) @ v[b, seen, h // group]
    return out


def tensors(batch, length, heads, kv_heads, width, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, length, n, width, generator=g, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]


def packed(lengths: list[int], row: int) -> torch.Tensor:
    ids = [i for i, n in enumerate(lengths) for _ in range(n)]
    return torch.tensor([ids + [-1] * (row - len(ids))], dtype=torch.int32)


def boundaries(documents: torch.Tensor) -> torch.Tensor:
    """Starts of all runs over the flattened tokens and the end, padded with the end."""
    flat = (documents + 1 + torch.arange(documents.shape[0])[:, None] * 1000).flatten()
    starts = [0] + [i for i in range(1, len(flat)) if flat[i] != flat[i - 1]]
    return torch.tensor([*starts, len(flat), len(flat), len(flat)], dtype=torch.int32)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    padding=st.integers(0, 3),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 3]),
    isolate=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
)
def test_against_arithmetic(lengths, padding, heads, causal, window, isolate, scale):
    # Red with: < window changed to <=, the causal test dropped from the mask, heads repeated in the other order.
    window = window if causal else None
    row = sum(lengths) + padding
    documents = packed(lengths, row) if isolate else None
    q, k, v = tensors(1, row, *heads, 8)
    got = attention(q, k, v, causal=causal, documents=documents, window=window, scale=scale)
    expected = written_out(q, k, v, causal=causal, documents=documents, window=window, scale=scale)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("causal,window,isolate", [(True, None, True), (False, None, True), (True, 3, True), (True, 3, False)])
def test_variable_length_call(monkeypatch, grouped, causal, window, isolate):
    # The accelerator's branch, with the kernel replaced by arithmetic that follows torch's documentation of it.
    # Red with: window instead of window - 1, kv heads not repeated where grouping is missing.
    calls = []

    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        calls.append(enable_gqa)
        assert enable_gqa or q.shape[1] == k.shape[1]
        assert torch.equal(cu_q, cu_k) and max_q == max_k == 10 and cu_q.dtype == torch.int32
        out = torch.zeros_like(q)
        for a, b in itertools.pairwise(cu_q.tolist()):
            left, right = window_size
            i, j = torch.arange(b - a)[:, None], torch.arange(b - a)[None]
            mask = ((left < 0) | (i - j <= left)) & ((right < 0) | (j - i <= right))
            group = q.shape[1] // k.shape[1]
            for h in range(q.shape[1]):
                score = q[a:b, h] @ k[a:b, h // group].T / math.sqrt(q.shape[-1])
                out[a:b, h] = score.masked_fill(~mask, -math.inf).softmax(-1) @ v[a:b, h // group]
        return out

    documents = torch.cat([packed([3, 4], 10), packed([1, 1, 8], 10)]) if isolate else None
    q, k, v = tensors(2, 10, 4, 2, 8)
    expected = attention(q, k, v, causal=causal, documents=documents, window=window)
    monkeypatch.setattr(module, "_VARLEN", (kernel, grouped))
    monkeypatch.setattr(module, "_FLASH_DEVICES", ("cpu",))
    monkeypatch.setattr(module, "_FLASH_DTYPES", (torch.float64,))
    cu_seqlens = None if documents is None else boundaries(documents)
    got = attention(q, k, v, causal=causal, documents=documents, cu_seqlens=cu_seqlens, window=window)
    assert calls == [grouped]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    attention(q, k, v, causal=causal, documents=documents, cu_seqlens=cu_seqlens, window=window, dropout_p=0.5)
    assert calls == [grouped]  # the kernel has no dropout: the masked path does it


def test_the_installed_torch_has_variable_length_attention():
    # A canary: without it packed rows on an accelerator fall back to a mask.
    assert module._varlen() is not None


def test_dropout_is_of_the_weights():
    q, k, v = tensors(1, 6, 2, 2, 8)
    torch.manual_seed(0)
    ones = torch.ones_like(v)
    draws = torch.stack([attention(q, k, ones, causal=True, dropout_p=0.5)[..., 0] for _ in range(400)])
    assert draws.std() > 0.3 and (draws.mean(0) - 1).abs().max() < 0.2
    assert torch.equal(attention(q, k, v, causal=True), attention(q, k, v, causal=True))


@pytest.mark.gpu
@pytest.mark.parametrize("causal,window", [(True, None), (False, None), (True, 37)])
def test_documents_on_an_accelerator(causal, window):
    if not torch.accelerator.is_available():
        pytest.skip("no accelerator")
    device = torch.accelerator.current_accelerator()
    documents = torch.cat([packed([100, 60, 90], 256), packed([1, 255], 256)])
    q, k, v = (t.bfloat16() for t in tensors(2, 256, 8, 2, 64))
    expected = attention(q.double(), k.double(), v.double(), causal=causal, documents=documents, window=window)
    got = attention(
        *(t.to(device) for t in (q, k, v)),
        causal=causal,
        documents=documents.to(device),
        cu_seqlens=boundaries(documents).to(device),
        window=window,
    )
    assert (got.cpu().double() - expected).abs().max() < 2e-2
