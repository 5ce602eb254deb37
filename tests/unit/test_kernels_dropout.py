"""Dropout that is a pure function of (seed, sample, position, site, feature)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.kernels.dropout import dropout, keep_mask, position_keys

B, S, D = 32, 64, 512


def _keys(seed: int = 0, batch: int = B, length: int = S, first: int = 0) -> torch.Tensor:
    return position_keys(seed, torch.arange(first, first + batch), torch.arange(length))


def _z(mask: torch.Tensor, p: float) -> float:
    """Standard deviations that the number of kept elements is away from its mean."""
    n = mask.numel()
    return abs(mask.sum().item() - n * (1 - p)) / math.sqrt(n * p * (1 - p))


def _correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """|correlation| of two masks in units of its standard deviation when they are independent."""
    x, y = a.double().flatten() - a.double().mean(), b.double().flatten() - b.double().mean()
    return abs((x * y).sum() / (x.norm() * y.norm())).item() * math.sqrt(a.numel())


# Mutation: the threshold from round(p * 2**31) keeps 1 - p / 2 of all: red.
@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_keep_rate(p: float) -> None:
    mask = keep_mask(_keys(), D, 0, p)
    assert _z(mask, p) < 4.5
    for dim in (0, 1, 2):  # of each row, position and feature: chi-square of their counts, 5 sigma
        counts = mask.movedim(dim, 0).flatten(1).sum(1).double()
        n = mask.numel() // counts.numel()
        chi = ((counts - n * (1 - p)) ** 2).sum().item() / (n * p * (1 - p))
        assert abs(chi - counts.numel()) < 5 * math.sqrt(2 * counts.numel())


# Mutation: without the second multiplication of the mix neighbours correlate (12 sigma): red.
def test_independence_of_neighbours() -> None:
    key = _keys()
    for p in (0.1, 0.5):
        mask = keep_mask(key, D, 0, p)
        worst = max(_correlation(mask[..., lag:], mask[..., :-lag]) for lag in range(1, 17))
        worst = max(worst, *(_correlation(mask[:, lag:], mask[:, :-lag]) for lag in range(1, 9)))
        worst = max(worst, *(_correlation(mask[lag:], mask[:-lag]) for lag in range(1, 5)))
        for site in range(1, 9):
            other = keep_mask(key, D, site, p)
            worst = max(worst, _correlation(mask, other), _correlation(mask[..., 1:], other[..., :-1]))
            worst = max(worst, _correlation(mask[..., 2:], other[..., :-2]), _correlation(mask[:, 1:], other[:, :-1]))
        for seed in (1, 2, 2**32, -1):
            worst = max(worst, _correlation(mask, keep_mask(_keys(seed), D, 0, p)))
        assert worst < 5.0


def test_one_flipped_bit_of_a_key_gives_another_mask() -> None:
    key = _keys()
    mask = keep_mask(key, D, 0, 0.5)
    for bit in range(32):
        flipped = keep_mask(key ^ (1 << bit if bit < 31 else -(2**31)), D, 0, 0.5)
        assert _correlation(mask, flipped) < 5.0


# Mutation: leaving out the high word of the sample number makes samples 2**32 apart equal: red.
def test_keys_differ() -> None:
    samples = torch.tensor([0, 1, 2, 2**31, 2**32, 2**32 + 1, 2**40, -1])
    keys = torch.cat([position_keys(seed, samples, torch.arange(4096)) for seed in (0, 1, 2**32, 2**33, -1)])
    assert keys.dtype == torch.int32
    unique = keys.unique().numel()
    expected = keys.numel() - keys.numel() ** 2 / 2**33  # birthdays
    assert abs(unique - expected) < 5 * math.sqrt(keys.numel() ** 2 / 2**33) + 1


# Mutation: keys from the row's index in the batch instead of its sample number: red.
@settings(max_examples=25, deadline=None)
@given(start=st.integers(0, 2**40), cut=st.integers(1, 7), window=st.integers(1, 15), seed=st.integers(-(2**63), 2**64))
def test_layout_free(start: int, cut: int, window: int, seed: int) -> None:
    samples, positions = torch.arange(start, start + 8), torch.arange(16)
    x = torch.randn(8, 16, 12)
    whole = dropout(x, position_keys(seed, samples, positions), 3, 0.3)
    halves = [dropout(x[r], position_keys(seed, samples[r], positions), 3, 0.3) for r in (slice(cut), slice(cut, None))]
    assert torch.equal(torch.cat(halves), whole)
    grid = positions.expand(8, 16)
    parts = [dropout(x[:, c], position_keys(seed, samples, grid[:, c]), 3, 0.3) for c in (slice(window), slice(window, None))]
    assert torch.equal(torch.cat(parts, 1), whole)


# The stream is a promise: a resumed run must draw the same masks with a later version. Mutation: any constant changed.
def test_golden() -> None:
    key = position_keys(1234, torch.tensor([0, 7, 2**33 + 5]), torch.arange(3))
    assert key.tolist() == GOLDEN_KEYS
    bits = keep_mask(key, 64, 2, 0.5).view(-1, 64)
    assert [int("".join("01"[int(b)] for b in row), 2) for row in bits[:3]] == GOLDEN_MASKS


GOLDEN_KEYS = [
    [404895176, -1326322275, -1565318932],
    [-1152252041, 1018349788, -1278174619],
    [-1937717909, -183458538, 66663993],
]
GOLDEN_MASKS = [6558585349147401217, 16322829946422260167, 13894314482038536826]


# Mutation: backward with another site than forward: red.
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradient(dtype: torch.dtype) -> None:
    x = torch.randn(4, 8, 16, dtype=dtype, requires_grad=True)
    key = _keys(5, 4, 8)
    mask = keep_mask(key, 16, 1, 0.25)
    out = dropout(x, key, 1, 0.25)
    expected = torch.where(mask, x.detach() * (1 / 0.75), 0.0)
    assert out.dtype == dtype and torch.equal(out, expected)
    upstream = torch.randn_like(x)
    out.backward(upstream)
    assert torch.equal(x.grad, torch.where(mask, upstream * (1 / 0.75), 0.0))


def test_gradcheck() -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: dropout(t, _keys(1, 2, 3), 0, 0.4), (x,))


def test_saves_the_keys_only() -> None:
    saved: list[torch.Tensor] = []
    x = torch.randn(4, 8, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        dropout(x, _keys(0, 4, 8), 0, 0.1)
    assert [t.shape for t in saved] == [(4, 8)]


def test_off_is_the_same_tensor() -> None:
    x = torch.randn(2, 3, 4)
    assert dropout(x, None, 0, 0.5) is x
    assert dropout(x, _keys(0, 2, 3), 0, 0.0) is x


def test_dropped_infinities_are_zeros() -> None:
    x = torch.full((4, 8, 64), float("inf"))
    out = dropout(x, _keys(0, 4, 8), 0, 0.5)
    assert set(out.unique().tolist()) == {0.0, float("inf")}


def _compiled_equals_eager(backend: str, features: int) -> None:
    def f(x: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        key = position_keys(7, samples, torch.arange(x.shape[1]))
        return dropout(dropout(x, key, 1, 0.2) + 1.0, key, 2, 0.5)

    x = torch.randn(4, 8, features)
    samples = torch.tensor([3, 2**31 - 1, 2**31, 2**35])
    results = []
    for function in (f, torch.compile(f, backend=backend, fullgraph=True)):
        leaf = x.clone().requires_grad_()
        out = function(leaf, samples)
        out.sum().backward()
        results.append((out.detach(), leaf.grad))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager == 0, compiled == 0)  # the masks, bit for bit
        torch.testing.assert_close(eager, compiled, rtol=1e-6, atol=0)


def test_compiled() -> None:
    _compiled_equals_eager("aot_eager", 33)


# Mutation: int32 throughout in code compiled for a CPU. Its overflow is undefined in C++, and the compiler made a loop
# over the features of it that wrote past the end (40 features: wrong values; 33: a damaged heap): red.
@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    _compiled_equals_eager("inductor", 40)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_same_bits_on_an_accelerator() -> None:
    device = torch.accelerator.current_accelerator()
    there = position_keys(3, torch.arange(2**31 - 2, 2**31 + 2, device=device), torch.arange(64, device=device))
    here = position_keys(3, torch.arange(2**31 - 2, 2**31 + 2), torch.arange(64))
    assert torch.equal(there.cpu(), here)
    assert torch.equal(keep_mask(there, 256, 5, 0.1).cpu(), keep_mask(here, 256, 5, 0.1))
