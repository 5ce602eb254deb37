"""The product of many experts: its gradients, and that the grouped kernel of torch means what ours does."""

from __future__ import annotations

import pytest
import torch

from meshwright.compat import grouped_mm
from meshwright.kernels.grouped_linear import grouped_linear, looped_linear, looped_weight_gradient

ENDS = torch.tensor([2, 2, 5, 6])
"""Four experts, one without a row; the last row of seven is nobody's."""


# Red when the foreign row goes to the last expert, and when the input's gradient takes the matrix of the expert before.
def test_gradients_and_foreign_rows():
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)
    out = grouped_linear(x, weight, ENDS)
    experts = [0, 0, 2, 2, 2, 3]
    expected = torch.stack([weight[expert] @ row for expert, row in zip(experts, x[:6], strict=True)])
    torch.testing.assert_close(out[:6], expected, rtol=0, atol=1e-14)
    assert not out[6].any()
    assert torch.autograd.gradcheck(lambda x, weight: grouped_linear(x, weight, ENDS), (x, weight))
    (dx, dw) = torch.autograd.grad(out.square().sum(), (x, weight))
    assert not dx[6].any() and not dw[1].any()


def test_nobody_has_a_row():
    x, weight = torch.empty(0, 3, requires_grad=True), torch.ones(2, 5, 3, requires_grad=True)
    out = grouped_linear(x, weight, torch.zeros(2, dtype=torch.int64))
    assert out.shape == (0, 5)
    out.sum().backward()
    assert weight.grad is not None and not weight.grad.any(), "zeros and not nothing: its gradient arrives on every rank"


def test_the_operator_can_be_traced():
    x = torch.randn(7, 3, requires_grad=True)
    torch.library.opcheck(grouped_linear, (x, torch.randn(4, 5, 3, requires_grad=True), ENDS))


def test_the_kernel_of_torch_takes_what_we_give_it():
    # The canary of `compat.grouped_mm`: operands, layouts and ends as `grouped_linear` uses them, forward and both gradients.
    x, weight = torch.randn(7, 16, dtype=torch.bfloat16), torch.randn(4, 24, 16, dtype=torch.bfloat16)
    ends = ENDS.to(torch.int32)
    try:
        out = grouped_mm(x, weight.transpose(1, 2), ends)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this build has no grouped product on a CPU: {error}")
    torch.testing.assert_close(out[:6], looped_linear(x, weight, ENDS)[:6])
    gradient = torch.randn(7, 24, dtype=torch.bfloat16)
    torch.testing.assert_close(
        grouped_mm(gradient, weight, ends)[:6], looped_linear(gradient, weight.transpose(1, 2), ENDS)[:6]
    )
    torch.testing.assert_close(grouped_mm(gradient.t(), x, ends), looped_weight_gradient(gradient, x, ENDS))
