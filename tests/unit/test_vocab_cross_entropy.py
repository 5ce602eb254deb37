"""The vocabulary split over ranks against `linear_cross_entropy` of the whole matrix. Ranks are threads of this process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.kernels import vocab_cross_entropy as module
from meshwright.kernels.cross_entropy import linear_cross_entropy
from meshwright.kernels.vocab_cross_entropy import vocab_cross_entropy
from meshwright.spec.labels import IGNORE
from meshwright.spec.sharding import spread

N, D, V = 50, 16, 37


class Group:
    """What `vocab_cross_entropy` needs of a process group, for threads."""

    def __init__(self, ranks: int):
        self.ranks, self.here, self.calls = ranks, threading.local(), 0
        self.slots: list[Any] = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=20)

    def size(self) -> int:
        return self.ranks

    def exchange(self, numbers: torch.Tensor) -> torch.Tensor:
        self.slots[self.here.rank] = numbers
        self.barrier.wait()
        out = torch.stack(self.slots)
        self.calls += self.here.rank == 0
        self.barrier.wait()
        return out

    def run(self, function: Any) -> list[Any]:
        def one(rank: int) -> Any:
            self.here.rank = rank
            return function(rank)

        with ThreadPoolExecutor(self.ranks) as pool:
            return list(pool.map(one, range(self.ranks)))


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    monkeypatch.setattr(module, "_exchange", lambda numbers, group: group.exchange(numbers))


def case(dtype: torch.dtype, ignored: int, seed: int, bias: bool) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, b = (torch.randn(*s, dtype=dtype, generator=generator) for s in ((N, D), (V, D), (V,)))
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[::ignored] = IGNORE
    return [hidden, weight, b if bias else None, labels]


def split(case: list[Any], ranks: int, factor: float = 0.37, **options: Any) -> tuple[list[Any], list[Any], Group]:
    """(loss, z, correct) of each rank, and gradients: hidden summed, weight and bias put together."""
    hidden, weight, bias, labels = case
    group = Group(ranks)

    def one(rank: int) -> Any:
        start, size = spread(V, ranks)[rank]
        leaves = [hidden, weight[start : start + size], None if bias is None else bias[start : start + size]]
        leaves = [None if x is None else x.clone().requires_grad_() for x in leaves]
        parts = vocab_cross_entropy(*leaves, labels, first=start, vocab=V, group=group, **options)
        (parts[0] * factor).backward()
        return [p.detach() for p in parts], [x.grad for x in leaves if x is not None]

    results = group.run(one)
    hiddens, *others = zip(*(gradients for _, gradients in results), strict=True)
    return [parts for parts, _ in results], [sum(hiddens), *(torch.cat(blocks) for blocks in others)], group


def whole(case: list[Any], factor: float = 0.37, **options: Any) -> tuple[list[Any], list[Any]]:
    leaves = [None if x is None else x.clone().requires_grad_() for x in case[:3]]
    parts = linear_cross_entropy(*leaves, case[3], **options)
    (parts[0] * factor).backward()
    return [p.detach() for p in parts], [x.grad for x in leaves if x is not None]


# Mutations, each red: `share_C` without the rank's own maximum; the smoothing term over W instead of V; the label's term on
# every rank; sums not scaled to the common maximum.
@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(2, 5),
    smoothing=st.sampled_from([0.0, 0.1, 0.9]),
    z_loss=st.sampled_from([0.0, 1e-4, 0.1]),
    chunk=st.sampled_from([None, 1, 7, 25, 1000]),
    bias=st.booleans(),
    ignored=st.integers(2, N),
    seed=st.integers(0, 5),
)
def test_equals_the_whole_matrix(ranks, smoothing, z_loss, chunk, bias, ignored, seed):
    data = case(torch.float64, ignored, seed, bias)
    options = {"smoothing": smoothing, "z_loss": z_loss, "chunk": chunk}
    expected, gradients = whole(data, **options)
    parts, ours, _ = split(data, ranks, **options)
    for rank in parts:
        assert all(torch.equal(a, b) for a, b in zip(rank, parts[0], strict=True))  # the same bits everywhere
        torch.testing.assert_close(rank, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, gradients, rtol=1e-12, atol=1e-12)


def test_the_first_of_equal_logits_is_the_guess():
    # Red with: the last rank of equals; the label's own rank whenever it has the maximum.
    data = case(torch.float64, N, 0, False)
    data[0].round_()  # whole numbers: products do not round, whatever the shape of the matrix
    data[1][:] = data[1][0].round()  # every token has the same logit
    for label in (0, 1, 13, 25, V - 1):  # 13 and 25 are the first of their ranks
        data[3][:] = label
        expected, _ = whole(data)
        parts, _, _ = split(data, 3)
        assert {int(correct) for _, _, correct in parts} == {int(expected[2])} == {N if label == 0 else 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_as_good_as_the_whole(dtype):
    data = case(dtype, 3, 1, True)
    exact = [x if x is None or not x.is_floating_point() else x.double() for x in data]
    expected, gradients = whole(exact, smoothing=0.1, z_loss=0.01)
    parts, ours, _ = split(data, 3, smoothing=0.1, z_loss=0.01)
    steps = torch.finfo(dtype).eps
    assert parts[0][0].dtype == torch.float32
    torch.testing.assert_close(parts[0][0].double(), expected[0], rtol=max(steps / 16, 1e-6), atol=0)
    for a, e in zip(ours, gradients, strict=True):
        assert a.dtype == dtype
        assert (a.double() - e).abs().max() < 4 * steps * e.abs().max()  # of three parts, each rounded


def test_one_exchange_a_chunk_and_none_without_rows():
    data = case(torch.float64, 3, 0, True)
    assert split(data, 2, chunk=20)[2].calls == 3
    assert split(data, 2)[2].calls == 1
    empty = [data[0][:0], *data[1:3], data[3][:0]]
    parts, gradients, group = split(empty, 2)
    assert group.calls == 0 and float(parts[0][0]) == 0.0 and not any(g.any() for g in gradients)


def test_nothing_to_predict():
    data = case(torch.float64, 3, 0, True)
    data[3][:] = IGNORE
    parts, gradients, _ = split(data, 2, smoothing=0.1, z_loss=0.1)
    assert [float(p) for p in parts[1]] == [0.0, 0.0, 0.0] and not any(g.any() for g in gradients)


def test_a_label_outside_of_the_vocabulary_gives_a_nan():
    data = case(torch.float64, 3, 0, False)
    data[3][1] = V
    parts, _, _ = split(data, 2)
    assert all(loss.isnan() for loss, _, _ in parts)
