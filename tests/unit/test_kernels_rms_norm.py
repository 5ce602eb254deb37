"""The gradient of RMSNorm beside a residual sum against autograd of `nn.RMSNorm`: the operator on a CPU, the kernel in Triton's
interpreter. On a device: `tests/gpu/test_pointwise.py`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.config.schema import ModelConfig
from meshwright.kernels import rms_norm
from meshwright.kernels.dropout import position_keys
from meshwright.models import build, initialize
from meshwright.parallel.compile import compile_blocks
from meshwright.parallel.recompute import recompute_blocks
from meshwright.spec.plan import Plan
from tests.unit.pointwise_cases import NORMS, drawn, norm_gradients, norms
from tests.unit.test_kernels_fused import of
from tests.unit.test_kernels_pointwise import interpreter

LIMIT = {"fp32": 1e-6, "bf16": 2.0**-7, "fp16": 2.0**-10}
"""Of sums in fp32 and one rounding, relative to the largest; the interpreter cuts off to bf16 and rounds to fp16."""


@pytest.mark.parametrize("shape", NORMS.values())
def test_plain_gradient_is_that_of_autograd(shape: tuple[int, ...]) -> None:
    """Mutations tried, each red: eps outside of the root; no mean; the gradient of the residual left out; weight in the
    weight's gradient; a mean over rows."""
    parts = (
        *(drawn(*shape, dtype=torch.float64, seed=seed) for seed in range(3)),
        drawn(shape[-1], dtype=torch.float64, seed=3),
    )
    for a, b in zip(rms_norm.plain_rms_norm_gradient(*parts, 0.1), norm_gradients(*parts, 0.1), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_rounded_once() -> None:
    """Mutation tried, red: the norm's own part rounded before the residual's is added."""
    plain = SimpleNamespace(rms_norm_gradient=rms_norm.plain_rms_norm_gradient)
    wrong = {name: value for name, value in norms(plain) if not value <= LIMIT[name.rsplit(" ", 1)[1]] / 2}
    assert not wrong, wrong


# Mutations tried, each red: a fake of the weight's gradient as large as x; outputs exchanged.
def test_the_operator_is_what_the_compiler_is_told() -> None:
    parts = (*(drawn(3, 16, dtype=torch.float32, seed=seed) for seed in range(3)), drawn(16, dtype=torch.float32), 1e-5)
    torch.library.opcheck(rms_norm.rms_norm_gradient, parts)


def test_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutations tried, each red: no look at whether all is compiled, at the dtype of weights, at what is trained, at the width,
    at the kind of norm, at no gradient being wanted."""
    monkeypatch.setattr("meshwright.kernels.pointwise._TRITON", True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)

    def taken(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, width: int = 32, **how: Any) -> bool:
        kind = how.pop("kind", nn.RMSNorm)
        trained, of_weight = how.pop("x", True), how.pop("weight", True)
        with FakeTensorMode():
            x = torch.empty(2, width, device=device, dtype=dtype, requires_grad=trained)
            norm = kind(width, **{"eps": 1e-5, "dtype": torch.bfloat16, "device": device, **how})
            return rms_norm.in_one_pass(x, norm.requires_grad_(of_weight))

    assert taken() and taken("xpu") and taken(width=4096)
    assert not taken("cpu") and not taken(dtype=torch.float32) and not taken(width=8192)
    assert not taken(x=False) and not taken(weight=False) and not taken(kind=nn.LayerNorm)
    assert not taken(elementwise_affine=False) and not taken(eps=None)
    with torch.no_grad():
        assert not taken()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    assert not taken()


CONFIG = {"layers": 2, "width": 32, "heads": 2, "ffn": 48, "vocab": 31, "max_len": 8, "dropout": 0.1}


def gradients(how: str, recompute: str, frozen: str) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """Of a small model in fp64, and its loss where no gradient is wanted."""
    model = build(ModelConfig(**CONFIG), "lm", torch.float64)
    initialize(model, 0, torch.device("cpu"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    recompute_blocks(model, Plan(recompute=recompute))
    compile_blocks(model, how)
    tokens = torch.arange(16).view(2, 8) % 31
    parts = model(tokens, labels=tokens, dropout_key=position_keys(0, torch.arange(2), torch.arange(8)))
    parts.loss_sum.backward()
    with torch.no_grad():
        loss = model(tokens, labels=tokens).loss_sum
    return [parameter.grad for parameter in model.parameters()], loss


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Calls of the gradient, where the kernel could be."""
    calls, real = [], rms_norm.plain_rms_norm_gradient

    def plain(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(rms_norm, "plain_rms_norm_gradient", plain)
    monkeypatch.setattr(rms_norm, "one_pass", lambda x: True)
    return lambda: len(calls)


@pytest.mark.parametrize(
    ("recompute", "frozen", "norms"),
    [
        ("none", "", 4),
        pytest.param("full", "", 4, marks=pytest.mark.slow),
        pytest.param("selective", "", 4, marks=pytest.mark.slow),
        pytest.param("none", "attention_norm", 2, marks=pytest.mark.slow),
        pytest.param("selective", "embedding", 3, marks=pytest.mark.slow),
    ],
)
def test_inside_of_compiled_blocks(recompute: str, frozen: str, norms: int, counted: Callable[[], int]) -> None:
    """Two norms of each of two layers, as far as x and weight are trained. Mutations tried, each red: gradients of residual and
    norm exchanged; eps of another size; the first output is what was normed."""
    expected, loss = gradients("off", recompute, frozen)
    assert counted() == 0
    found, other = gradients("eager", recompute, frozen)
    assert counted() == norms and torch.equal(loss, other)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * float(b.abs().max()))


@pytest.mark.slow
@interpreter
def test_the_kernel() -> None:
    """Mutations tried, each red: eps outside of the root; either mean over a block for one over the width; the residual left
    out; rows of a last round left out; some parts left out, or others taken for a column's."""
    found = of("pointwise_cases", "norm of")
    wrong = {name: value for name, value in found.items() if not value <= LIMIT[name.rsplit(" ", 1)[1]]}
    assert len(found) == 2 * 3 * len(NORMS) and not wrong, wrong
