"""The 8-bit linear layer on a GPU: the bits of its plain version, and what each part costs. `pytest -m gpu -s
tests/gpu/test_fp8.py` prints the times at the shapes of a Llama of 1 B parameters, 16384 tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.config.schema import ModelConfig
from meshwright.distributed.device import fp8_findings
from meshwright.kernels import fp8
from meshwright.kernels.accelerated import fp8_kernels
from meshwright.models import build, initialize
from meshwright.parallel.compile import compile_blocks
from meshwright.parallel.fp8 import multiply_in_fp8
from meshwright.spec.plan import Plan
from tests.unit import fp8_cases

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.accelerator.is_available():
    pytest.skip("no accelerator", allow_module_level=True)
DEVICE = torch.accelerator.current_accelerator()
assert DEVICE is not None
fp8_triton = fp8_kernels(DEVICE)
if fp8_findings(DEVICE) or fp8_triton is None:
    pytest.skip("no products of 8-bit numbers, or no Triton", allow_module_level=True)

TOKENS = 16384
SHAPES = {"qkv": (3072, 2048), "out": (2048, 2048), "up": (16384, 2048), "down": (2048, 8192)}
"""Features out and in."""
BF16 = torch.bfloat16


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=DEVICE) * scale).to(BF16)


def micros(call: Callable[[], object], times: int = 10) -> float:
    for _ in range(3):
        call()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3 / times


def test_the_cast_is_the_plain_one_bit_for_bit():
    # What rounding there is, is the device's own on both sides: mutations are those of the interpreter's test.
    for representable in (True, False):
        found = fp8_cases.cases(fp8_triton, DEVICE, representable)
        assert {name: count for name, count in found.items() if count} == {}
    for value in (float("inf"), float("nan")):
        assert fp8_cases.poisoned(fp8_triton, DEVICE, value) == [False, True, False, False, True]


@pytest.mark.parametrize(("fast", "limit"), [(False, 2.0**-8), (True, 2.0**-7)])
def test_the_product_is_the_plain_one(fast, limit):
    """Relative to the norm: one rounding to bf16, and what is lost in sums of 4096 where they are fast. Red when a scale goes
    to the other factor, or is left out."""
    a, b = drawn(256, 4096) * torch.exp2(drawn(256, 1, seed=1) * 3), drawn(512, 4096, seed=2)
    a8, a_scale, _, _ = fp8.cast(a, fp8.row_largest(a), a.abs().amax(), True, False)
    b8, b_scale, _, _ = fp8.cast(b, fp8.row_largest(b), b.abs().amax(), True, False)
    found = fp8.multiply(a8, a_scale, b8, b_scale, BF16, fast)
    plain = (a8.float().double() * a_scale[:, None]) @ (b8.float().double() * b_scale[:, None]).t()
    error = float((found.double() - plain).norm(dim=1).div(plain.norm(dim=1)).max())
    print(f"\nfast {fast}: largest error of a row {error:.2e}")
    assert error < limit


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tokens", [1024, 1000])
def test_output_and_gradients_are_those_of_the_plain_layer(compiled, tokens):
    """On the CPU in fp32 sums. 1000 is no multiple of 16. Red when a factor is not transposed, or the filling is kept."""
    x, weight = drawn(tokens, 256).requires_grad_(), drawn(384, 256, seed=1, scale=0.05).requires_grad_()
    bias, gradient = drawn(384, seed=2).requires_grad_(), drawn(tokens, 384, seed=3)
    call = torch.compile(fp8.fp8_linear, fullgraph=True, dynamic=False) if compiled else fp8.fp8_linear
    out = call(x, weight, bias)
    found = (out, *torch.autograd.grad(out, (x, weight, bias), gradient))
    there = [each.detach().cpu().requires_grad_() for each in (x, weight, bias)]
    plain = fp8.fp8_linear(*there)
    expected = (plain, *torch.autograd.grad(plain, there, gradient.cpu()))
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert float(((a.cpu().double() - b.double()).norm() / b.double().norm()).detach()) < 2.0**-7


def test_times_of_the_parts():
    print(f"\nus, {TOKENS} tokens" + " " * 19 + "".join(f"{name:>9}" for name in (*SHAPES, "sum")))

    def row(name: str, of: Callable[[int, int], float]) -> list[float]:
        taken = [of(*shape) for shape in SHAPES.values()]
        print(f"{name:36}" + "".join(f"{each:9.0f}" for each in (*taken, sum(taken))))
        return taken

    def cast_of(rows: int, columns: int, straight: bool = True, turned: bool = True) -> float:
        x = drawn(rows, columns)
        largest = fp8.row_largest(x)
        whole = largest.amax()
        return micros(lambda: fp8.cast(x, largest, whole, straight, turned))

    def product(rows: int, columns: int, depth: int, fast: bool | None) -> float:
        a, b = drawn(rows, depth), drawn(columns, depth, seed=1)
        if fast is None:
            return micros(lambda: a @ b.t())
        a8, a_scale, _, _ = fp8.cast(a, fp8.row_largest(a), a.abs().amax(), True, False)
        b8, b_scale, _, _ = fp8.cast(b, fp8.row_largest(b), b.abs().amax(), True, False)
        return micros(lambda: fp8.multiply(a8, a_scale, b8, b_scale, BF16, fast))

    row("largest of rows of x", lambda out, into: micros(lambda x=drawn(TOKENS, into): fp8.row_largest(x)))
    row("largest of rows of the gradient", lambda out, into: micros(lambda x=drawn(TOKENS, out): fp8.row_largest(x)))
    row("cast of x, both ways", lambda out, into: cast_of(TOKENS, into))
    row("cast of the gradient, both ways", lambda out, into: cast_of(TOKENS, out))
    row("cast of the weight", lambda out, into: cast_of(out, into, turned=False))
    row("cast of the weight, transposed", lambda out, into: cast_of(out, into, straight=False))
    kept = fp8_triton.BLOCK, fp8_triton.WARPS
    for size in ((128, 128), (64, 128), (128, 64), (64, 64), (32, 128), (128, 32)):
        for warps in (4, 8):
            fp8_triton.BLOCK, fp8_triton.WARPS = size, warps
            row(f"  cast of x, {size}, {warps} warps", lambda out, into: cast_of(TOKENS, into))
    fp8_triton.BLOCK, fp8_triton.WARPS = kept
    for name, fast in (("bf16", None), ("fp8", False), ("fp8 fast", True)):
        row(f"output, {name}", lambda out, into, fast=fast: product(TOKENS, out, into, fast))
        row(f"input gradient, {name}", lambda out, into, fast=fast: product(TOKENS, into, out, fast))
        row(f"weight gradient, {name}", lambda out, into, fast=fast: product(out, into, TOKENS, fast))

    def layer(call: Callable[..., torch.Tensor], out: int, into: int) -> float:
        x, weight = drawn(TOKENS, into).requires_grad_(), drawn(out, into, seed=1, scale=0.02).requires_grad_()
        gradient = drawn(TOKENS, out, seed=2)
        return micros(lambda: torch.autograd.grad(call(x, weight, None), (x, weight), gradient))

    compiled = torch.compile(fp8.fp8_linear, fullgraph=True, dynamic=False)
    plain = row("whole layer, bf16", lambda out, into: layer(F.linear, out, into))
    row("whole layer, fp8", lambda out, into: layer(fp8.fp8_linear, out, into))
    ours = row("whole layer, fp8 compiled", lambda out, into: layer(compiled, out, into))
    assert sum(ours) < sum(plain)


def block(precision: str) -> float:
    """us of forward and backward of a compiled one."""
    shape = ModelConfig(arch="decoder", layers=1, width=2048, heads=32, kv_heads=8, ffn=8192, vocab=64, max_len=4096)
    model: nn.Module = build(shape, "lm", BF16)
    initialize(model, 0, DEVICE)
    multiply_in_fp8(model, Plan(precision=precision), DEVICE)
    compile_blocks(model, "inductor")
    tokens = torch.zeros(4, 4096, dtype=torch.int64, device=DEVICE)
    x, gradient = drawn(4, 4096, 2048).requires_grad_(), drawn(4, 4096, 2048, seed=1)
    wanted = (x, *model.layers.parameters())

    def step() -> None:
        torch.autograd.grad(model.run_layers(x, (0, 1), tokens, None, None, None, None), wanted, gradient)

    return micros(step)


def test_time_of_a_block():
    """Where the largest magnitudes are found in the kernels that make a tensor."""
    plain, ours = block("bf16"), block("fp8")
    print(f"\none block, forward and backward: {plain:.0f} us in bf16, {ours:.0f} us in fp8")
    assert ours < plain
