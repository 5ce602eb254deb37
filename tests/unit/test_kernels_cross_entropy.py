"""Chunked linear + cross-entropy against torch's own, which holds all logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.batch import IGNORE
from meshwright.kernels import cross_entropy
from meshwright.kernels.cross_entropy import linear_cross_entropy

N, D, V = 50, 16, 37


def _case(dtype: torch.dtype = torch.float64, ignored: int = 3, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(*s, dtype=dtype, generator=generator).requires_grad_() for s in ((N, D), (V, D), (V,)))
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[::ignored] = IGNORE
    return hidden, weight, bias, labels


def _reference(hidden, weight, bias, labels, smoothing, z_loss):
    logits = F.linear(hidden, weight, bias)
    valid = labels != IGNORE
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
    z = z_loss * logits.logsumexp(-1)[valid].square().sum()
    return loss + z, z, (logits.argmax(-1) == labels)[valid].sum()


# Mutations, each red: no `- (1 - smoothing)` at the label; smoothing / (V - 1); z gradient without the factor 2.
@settings(max_examples=40, deadline=None)
@given(
    smoothing=st.sampled_from([0.0, 0.1, 0.9]),
    z_loss=st.sampled_from([0.0, 1e-4, 0.1]),
    chunk=st.sampled_from([None, 1, 7, 25, N, 1000]),
    with_bias=st.booleans(),
    ignored=st.integers(2, N),
    seed=st.integers(0, 5),
)
def test_equals_torch(smoothing: float, z_loss: float, chunk: int | None, with_bias: bool, ignored: int, seed: int) -> None:
    hidden, weight, bias, labels = _case(ignored=ignored, seed=seed)
    b = bias if with_bias else None
    leaves = (hidden, weight, bias) if with_bias else (hidden, weight)
    total, z, correct = linear_cross_entropy(hidden, weight, b, labels, smoothing=smoothing, z_loss=z_loss, chunk=chunk)
    expected, expected_z, expected_correct = _reference(hidden, weight, b, labels, smoothing, z_loss)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(z, expected_z, rtol=1e-12, atol=1e-12)
    assert correct == expected_correct and correct.dtype == torch.int64
    assert not z.requires_grad and not correct.requires_grad
    ours, theirs = torch.autograd.grad(total * 0.37, leaves), torch.autograd.grad(expected * 0.37, leaves)
    for a, e in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    hidden, weight, bias, labels = _case()

    def loss(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(h[:9], w, b, labels[:9], smoothing=0.2, z_loss=0.01, chunk=4)[0]

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))


# Mutation: without the check for IGNORE in the factor of the gradient the ignored rows have gradients: red.
@pytest.mark.parametrize("rows", [0, N])
def test_nothing_to_predict(rows: int) -> None:
    hidden, weight, bias, labels = _case()
    labels = torch.full_like(labels, IGNORE)
    total, z, correct = linear_cross_entropy(hidden[:rows], weight, bias, labels[:rows], smoothing=0.1, z_loss=0.1, chunk=8)
    assert total == 0 and z == 0 and correct == 0
    total.backward()
    for leaf in (hidden, weight, bias):
        assert leaf.grad is not None and not leaf.grad.any()


# Mutation: sums and buffers in the inputs' dtype; the fp32 buffer is what keeps 64 chunks as good as one: red.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    hidden, weight, bias, labels = _case(dtype)
    hidden, labels = hidden.detach().repeat(64, 1).requires_grad_(), labels.repeat(64)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    expected, _, _ = _reference(*exact, labels, 0.1, 0.01)
    expected.backward()
    steps = torch.finfo(dtype).eps
    for chunk in (N, None):
        total, z, _ = linear_cross_entropy(hidden, weight, bias, labels, smoothing=0.1, z_loss=0.01, chunk=chunk)
        assert total.dtype == z.dtype == torch.float32
        torch.testing.assert_close(total.double(), expected, rtol=steps / 16, atol=0)
        for grad, leaf in zip(torch.autograd.grad(total, (hidden, weight, bias)), exact, strict=True):
            assert grad.dtype == dtype
            assert (grad.double() - leaf.grad).abs().max() < 1.5 * steps * leaf.grad.abs().max()


# The gradient is scaled by 1 / targets in fp32. Mutation: the factor is rounded to bf16 first, 0.2% of everything: red.
def test_upstream_factor_is_not_rounded() -> None:
    hidden, weight, bias, labels = _case(torch.bfloat16)
    total, _, _ = linear_cross_entropy(hidden, weight, bias, labels, chunk=N)
    plain = torch.autograd.grad(total, weight, retain_graph=True)[0]
    factor = torch.tensor(1 / 3.003, dtype=torch.float32)
    scaled = torch.autograd.grad(total * factor, weight)[0]
    assert torch.equal(scaled, (plain.float() * factor).bfloat16())


def test_no_grad_makes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    original = cross_entropy._softmax_rows
    monkeypatch.setattr(cross_entropy, "_softmax_rows", lambda *a: asked.append(a[-1]) or original(*a))
    hidden, weight, bias, labels = _case()
    with torch.no_grad():
        total, _, _ = linear_cross_entropy(hidden, weight, bias, labels, chunk=20)
    assert asked == [False] * 3 and not total.requires_grad
    torch.testing.assert_close(total, _reference(hidden, weight, bias, labels, 0.0, 0.0)[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_inputs(frozen: int) -> None:
    *leaves, labels = _case()
    leaves[frozen] = leaves[frozen].detach()
    total, _, _ = linear_cross_entropy(*leaves, labels, chunk=20)
    live = [leaf for leaf in leaves if leaf.requires_grad]
    expected = torch.autograd.grad(_reference(*leaves, labels, 0.0, 0.0)[0], live)
    for a, e in zip(torch.autograd.grad(total, live), expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


def test_tied_weight_and_second_backward() -> None:
    _, weight, _, labels = _case()
    tokens = torch.arange(N) % V

    def grads(loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.autograd.grad(loss, weight, retain_graph=True)[0]
        return first, torch.autograd.grad(loss, weight)[0]

    ours = grads(linear_cross_entropy(F.embedding(tokens, weight), weight, None, labels, chunk=20)[0] * 0.5)
    theirs = grads(_reference(F.embedding(tokens, weight), weight, None, labels, 0.0, 0.0)[0] * 0.5)
    for a, e in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


# The point of it all. Mutation: one chunk whatever is asked: red.
def test_never_holds_all_logits() -> None:
    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.numel = max(self.numel, out.numel())
            return out

    hidden, labels = torch.randn(512, D, requires_grad=True), torch.randint(0, 128, (512,))
    weight = torch.randn(128, D, requires_grad=True)
    with Largest() as seen:
        linear_cross_entropy(hidden, weight, None, labels, chunk=64)[0].backward()
    assert seen.numel == max(64 * 128, 512 * D)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it, of a tensor between two graphs
def test_inside_a_compiled_function() -> None:
    hidden, weight, bias, labels = _case(torch.float32)

    def step(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(h.tanh(), w, bias.detach(), labels)[0] * 2

    results = []
    for function in (step, torch.compile(step, backend="aot_eager")):
        loss = function(hidden, weight)
        results.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    for a, e in zip(*results, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows, vocab, expected", [(10, 100, 10), (0, 100, 1), (100_000, 8192, 1024), (3, 10**9, 1)])
def test_default_chunk(rows: int, vocab: int, expected: int) -> None:
    assert cross_entropy.chunk_rows(rows, vocab, torch.empty(0)) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [37, 50_000])
def test_accelerator_equals_oracle(dtype: torch.dtype, vocab: int) -> None:
    device = torch.accelerator.current_accelerator()
    logits = (torch.randn(64, vocab) * 3).to(dtype)
    labels = torch.randint(0, vocab, (64,))
    labels[::5] = IGNORE
    fast = cross_entropy.fast_softmax_rows(device)
    if fast is None:
        pytest.skip("no Triton")
    ours = fast(logits.to(device), labels.to(device), 0.1, 1e-3, True)
    oracle = cross_entropy._softmax_rows(logits.clone(), labels, 0.1, 1e-3, True)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, torch.finfo(dtype).eps)
    for a, e in zip(ours[:2], oracle[:2], strict=True):
        torch.testing.assert_close(a.cpu(), e, rtol=min(tolerance, 2e-6), atol=1e-5 if dtype != torch.float64 else 1e-12)
    assert torch.equal(ours[2].cpu().bool(), oracle[2])
    torch.testing.assert_close(ours[3].cpu(), oracle[3], rtol=tolerance, atol=tolerance)
    for chunk in (None, 24):
        h, w = (torch.randn(64, 32, dtype=dtype), torch.randn(vocab, 32, dtype=dtype))
        here = [t.clone().double().requires_grad_() for t in (h, w)]
        there = [t.to(device).requires_grad_() for t in (h, w)]
        expected = _reference(*here, None, labels, 0.0, 0.0)[0]
        expected.backward()
        total = linear_cross_entropy(*there, None, labels.to(device), chunk=chunk)[0]
        total.backward()
        for a, e in zip(there, here, strict=True):
            assert (a.grad.cpu().double() - e.grad).abs().max() < 8 * max(tolerance, 1e-12) * e.grad.abs().max()
