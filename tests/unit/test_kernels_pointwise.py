"""Activations and dropout in one pass against their plain versions: the operators on a CPU, the kernels in Triton's
interpreter. On a device: `tests/gpu/test_pointwise.py`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.config.schema import ModelConfig
from meshwright.kernels import pointwise
from meshwright.kernels.dropout import position_keys
from meshwright.models import build, initialize
from meshwright.parallel.compile import compile_blocks
from meshwright.parallel.recompute import recompute_blocks
from meshwright.spec.plan import Plan
from tests.unit.pointwise_cases import drawn, gradient_of
from tests.unit.test_kernels_fused import of

interpreter = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which the extra `kernels` brings")
LIMIT = {"fp32": 2e-7, "bf16": 2.0**-7, "fp16": 2.0**-10}
"""Of one rounding, relative to the largest; the interpreter cuts off to bf16 and rounds to fp16."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_plain_gradients_are_those_of_autograd(dtype: torch.dtype) -> None:
    """Mutations tried, each red: Phi'(x) without its x; no root in the density; s for silu's whole slope; gradients of gate and
    value exchanged."""
    x, gradient = drawn(5, 24, dtype=dtype), drawn(5, 24, dtype=dtype, seed=1)
    limit = 1e-14 if dtype == torch.float64 else 1e-6
    found = pointwise.plain_gelu_gradient(gradient, x)
    assert float((found - gradient_of(F.gelu, x, gradient)).abs().max()) < limit * 8
    found = pointwise.plain_swiglu_gradient(gradient[:, :12], x, 4)
    expected = gradient_of(lambda leaf: pointwise.plain_swiglu(leaf, 4), x, gradient[:, :12])
    assert float((found - expected).abs().max()) < limit * 8


# Mutations tried, each red: a fake of swiglu as wide as its input; gelu without its backward registered.
def test_operators_are_what_the_compiler_is_told() -> None:
    leaf = drawn(3, 16, dtype=torch.float32).requires_grad_()
    torch.library.opcheck(pointwise.gelu_operator, (leaf,))
    torch.library.opcheck(pointwise.swiglu_operator, (leaf, 4))


# Mutations tried, each red: only CPU tensors pass; fp64 passes; runs of 3 pass.
def test_the_operator_runs_where_the_kernel_can(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gelu", "swiglu"):
        monkeypatch.setattr(pointwise, f"{name}_operator", lambda *arguments: True)
        monkeypatch.setattr(pointwise, f"plain_{name}", lambda *arguments: False)
    monkeypatch.setattr(pointwise, "_TRITON", True)

    def operators(device: str, dtype: torch.dtype = torch.bfloat16, rows: int = 4) -> list[bool]:
        with FakeTensorMode():
            x = torch.empty(2, 24, device=device, dtype=dtype)
            return [pointwise.gelu(x), pointwise.swiglu(x, rows)]

    assert operators("cuda") == operators("xpu") == [True, True]
    assert operators("cuda", rows=3) == [True, False]
    assert operators("cuda", torch.float64) == operators("cpu") == operators("meta") == [False, False]
    monkeypatch.setattr(pointwise, "_TRITON", False)
    assert operators("cuda") == [False, False]


CONFIG = {"layers": 2, "width": 32, "heads": 2, "ffn": 96, "vocab": 31, "max_len": 8, "dropout": 0.1}


def gradients(activation: str, prepare: Callable[[torch.nn.Module], None]) -> list[torch.Tensor]:
    """Of a small model in fp64: what the operators compute is then what torch does, to 1e-12."""
    model = build(ModelConfig(**CONFIG, activation=activation), "lm", torch.float64)
    initialize(model, 0, torch.device("cpu"))
    prepare(model)
    tokens = torch.arange(16).view(2, 8) % 31
    parts = model(tokens, labels=tokens, dropout_key=position_keys(0, torch.arange(2), torch.arange(8)))
    parts.loss_sum.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("activation", "recompute"),
    [
        ("swiglu", "none"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("gelu", "selective"), ("gelu", "full"), ("swiglu", "selective"), ("swiglu", "full"))
        ),
    ],
)
def test_operators_inside_of_blocks(activation: str, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager and traced whole, recomputed or not. Mutations tried, each red: the gradient of swiglu's gate zeroed; the operator
    of gelu gives its input."""
    calls = {"plain_gelu": 0, "plain_gelu_gradient": 0, "plain_swiglu_gradient": 0}

    def prepare(model: torch.nn.Module, how: str = "off") -> None:
        recompute_blocks(model, Plan(recompute=recompute))
        compile_blocks(model, how)

    expected = gradients(activation, lambda model: None)
    real = {name: getattr(pointwise, name) for name in calls}

    def counted(name: str) -> Callable[..., torch.Tensor]:
        def plain(*arguments: object) -> torch.Tensor:
            calls[name] += 1
            return real[name](*arguments)

        return plain

    monkeypatch.setattr(pointwise, "one_pass", lambda x: True)
    for name in calls:
        monkeypatch.setattr(pointwise, name, counted(name))
    for how in ("off", "eager"):
        calls.update(dict.fromkeys(calls, 0))
        found = gradients(activation, lambda model, how=how: prepare(model, how))
        again = 1 if recompute == "none" else 2
        assert calls[f"plain_{activation}_gradient"] == CONFIG["layers"]  # swiglu's forward may be a compiler's own
        assert activation != "gelu" or calls["plain_gelu"] == CONFIG["layers"] * again
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * float(b.abs().max()))


@pytest.mark.slow
@interpreter
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_kernels_of_activations(kind: str) -> None:
    """Mutations tried, each red: slopes of both signs exchanged; the density without its x, or to the base of 2; a last
    element left out; a value next to its gate where runs are longer; long runs placed as short ones; the value for the gate in
    the value's gradient; s for silu's whole slope."""
    found = of("pointwise_cases", kind)
    wrong = {name: value for name, value in found.items() if not value <= LIMIT[name.rsplit(" ", 1)[1]]}
    assert found and not wrong, wrong


# Mutations tried, each red: 1.1511 or 5.057e-5 for a coefficient; GELU cut off
# at 6 instead of 8; 0.39894 for the density at 0.
@pytest.mark.slow
@interpreter
def test_gelu_over_all_of_its_range() -> None:
    found = of("pointwise_cases", "tails")
    assert found["tails value"] < 1e-7 and found["tails slope"] < 2e-7
    assert found["tails small"] < 4e-7 and found["tails relative"] < 1e-4
    assert found["tails units"] <= 1 and found["tails share of other bits"] < 1e-4
    assert found["tails share of other bits than torch"] < 1e-3


# Mutations tried, each red: no cut at 8; NaN taken for 8.
@pytest.mark.slow
@interpreter
def test_gelu_of_what_is_no_number() -> None:
    found = of("pointwise_cases", "edges")
    assert len(found) == 4 and all(value is True for value in found.values()), found


# Mutations tried, each red: a shift that copies the sign; no site; another
# threshold; one multiplication less; the features of the first block for all; fp64 scaled in fp32.
@pytest.mark.slow
@interpreter
def test_dropout_has_the_bits_of_the_plain_version() -> None:
    found = of("pointwise_cases", "dropout")
    assert len(found) == 12 and all(value is True for value in found.values()), found
