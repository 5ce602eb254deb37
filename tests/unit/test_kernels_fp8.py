"""A linear layer in 8 bits against its recipe, stated anew in fp64 and in steps of the format, not by torch's own casts."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from meshwright.kernels import fp8
from meshwright.kernels.fp8 import cast, fp8_linear, plain_cast, row_largest, scale_of
from tests.unit.test_kernels_fused import interpreted

M, K, N = 20, 32, 48


def rounded(value: float) -> float:
    """To e4m3: 8 steps a power of two down to 2**-6, of which below it stay the same; half goes to the even step."""
    if value == 0.0:
        return 0.0
    step = 2.0 ** (max(math.floor(math.log2(abs(value))), -6) - 3)
    return round(value / step) * step


def stated(x: torch.Tensor, by_row: bool) -> torch.Tensor:
    """What the 8 bits of x [M, K] and the scales stand for, fp64."""
    x, out = x.detach(), torch.empty(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        largest = float((x[row] if by_row else x).abs().max())
        scale = 2.0 ** math.ceil(math.log2(largest / 448.0)) if largest else 1.0
        out[row] = torch.tensor([rounded(value / scale) * scale for value in x[row].tolist()], dtype=torch.float64)
    return out


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of very different size, so that a scale of the whole is not that of a row."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randn(shape[0], 1, generator=generator) * 6)
    return (torch.randn(*shape, generator=generator) * sizes).to(dtype)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 2.0**-8)])
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_are_those_of_the_recipe(dtype, limit, bias):
    """Mutations tried, each red: the weight with one scale in the output; x with one scale a row in the gradient of the
    weight; the gradient with one scale for x; gradients of x and weight from factors that were not cast; no bias."""
    x, weight = drawn(M, K, dtype=dtype, seed=0), drawn(N, K, dtype=dtype, seed=1)
    gradient, b = drawn(M, N, dtype=dtype, seed=2), drawn(N, 1, dtype=dtype, seed=3)[:, 0] if bias else None
    given = [each.requires_grad_() for each in (x, weight, b) if each is not None]
    out = fp8_linear(x.view(4, 5, K), weight, b).view(M, N)
    found = (out, *torch.autograd.grad(out, given, gradient))
    plain = stated(x, True) @ stated(weight, True).T
    expected = [
        plain if b is None else plain + b.double(),
        stated(gradient, True) @ stated(weight, False),
        stated(gradient, False).T @ stated(x, False),
        *([] if b is None else [gradient.double().sum(0)]),
    ]
    for a, c in zip(found, expected, strict=True):
        assert a.dtype == dtype
        assert float(((a.double() - c).norm() / c.norm()).detach()) < limit


def test_what_8_bits_can_say_is_exact():
    # Red with a scale that is no power of two, and with one that leaves the largest above 448.
    x = torch.tensor([[448.0, 1.0, -0.0625, 2.0**-9], [3.0, 2.5, -15 * 2.0**-5, 0.0]]) * torch.tensor([[2.0**20], [2.0**-30]])
    x8, scale, _, _ = plain_cast(x, row_largest(x), row_largest(x).amax(), True, False)
    assert torch.equal((x8.float() * scale[:, None])[:2], x)
    assert scale[0] == 2.0**20 and scale[1] == 2.0**-37  # 3 is 1.5 * 2, and 1.5 * 2**8 the largest of that kind


def test_the_largest_is_never_cut_and_no_scale_overflows():
    # Red when 1.75 goes to the next exponent, when the number after it does not, and without the least exponent.
    after = float(torch.nextafter(torch.tensor(448.0), torch.tensor(449.0)))
    largest = torch.tensor([448.0, after, 449.0, 255.9, 1.0, 3.4e38, 1e-45, 1e-38, 0.0])
    scale = scale_of(largest)
    assert float(largest[1]) > 448.0 and scale[:5].tolist() == [1.0, 2.0, 2.0, 1.0, 2.0**-8]
    assert bool((largest / scale <= 448.0).all()) and bool(((scale > 0) & (1 / scale).isfinite()).all())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_seen(bad):
    """In the row of the output, in that of the gradient, and in the whole gradient of the weight. Red with the scale of a
    finite number: a cast that saturates makes 448 of an infinity."""
    x = drawn(M, K, dtype=torch.float32, seed=0)
    x[3, 5] = bad
    x.requires_grad_()
    weight = drawn(N, K, dtype=torch.float32, seed=1).requires_grad_()
    out = fp8_linear(x, weight, None)
    seen = ~out.isfinite().all(1)
    assert seen.tolist() == [row == 3 for row in range(M)]
    assert not torch.autograd.grad(out, weight, torch.ones_like(out), retain_graph=True)[0].isfinite().any()
    gradient = torch.ones_like(out)
    gradient[7, 1] = bad
    to_x = torch.autograd.grad(out, x, gradient)[0]
    assert (~to_x.isfinite().all(1)).tolist() == [row == 7 for row in range(M)]


def test_zeros_give_zeros():
    x = torch.zeros(M, K, requires_grad=True)
    weight = torch.zeros(N, K, requires_grad=True)
    out = fp8_linear(x, weight, None)
    for each in (out, *torch.autograd.grad(out, (x, weight), torch.zeros_like(out))):
        assert torch.equal(each, torch.zeros_like(each))


def test_rows_are_filled_up_and_taken_off_again():
    # Red when the filling is counted in a result, or the fake says other shapes than there are.
    x = drawn(5, K, dtype=torch.float32, seed=0)
    torch.library.opcheck(cast, (x, row_largest(x), row_largest(x).amax(), True, True), test_utils="test_faketensor")
    torch.library.opcheck(cast, (x, row_largest(x), row_largest(x).amax(), False, True), test_utils="test_faketensor")
    made = cast(x, row_largest(x), row_largest(x).amax(), True, True)
    assert [tuple(each.shape) for each in made] == [(16, K), (16,), (K, 16), (K,)]
    assert not made[0][5:].float().any() and not made[2][:, 5:].float().any()


@pytest.mark.slow
def test_a_compiled_layer_is_one_graph_with_the_same_bits():
    # Red with a graph break in the function, and with operators that say other shapes to the compiler.
    weight = drawn(N, K, dtype=torch.bfloat16, seed=1).requires_grad_()

    def layer(x: torch.Tensor) -> torch.Tensor:
        return fp8_linear(torch.nn.functional.silu(x), weight, None)

    x = drawn(M, K, dtype=torch.bfloat16, seed=0).requires_grad_()
    results = []
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)):
        out = call(x)
        results.append((out, *torch.autograd.grad(out, (x, weight), torch.ones_like(out))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_half_of_the_input_is_kept():
    # Red when the input, or the weight in 8 bits, is kept too.
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    x = drawn(64, K, dtype=torch.bfloat16, seed=0).requires_grad_()
    weight = drawn(N, K, dtype=torch.bfloat16, seed=1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fp8_linear(x, weight, None)
    sizes = sum(each.numel() * each.element_size() for each in kept if each is not weight)
    assert sizes == 64 * K + 4 * K + 2 * (N + 1)
    assert fp8.ALIGNED == 16


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which the extra `kernels` brings")
def test_the_kernel_is_the_plain_cast_bit_for_bit():
    """Mutations tried, each red: the scale of a row for the transposed copy; rows beyond the end not zero; the scale of the
    first column block only; a transposed copy that is not; the scale of a finite number for one that is not."""
    found: dict[str, Any] = interpreted("fp8_cases")
    assert len(found["differing"]) == 24
    assert {name: count for name, count in found["differing"].items() if count} == {}
    assert found["poisoned"] == {value: [False, True, False, False, True] for value in ("inf", "-inf", "nan")}
