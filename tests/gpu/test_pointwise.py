"""Activations, norms and dropout in one pass on an accelerator: right, eager and compiled, and as fast as memory;
`pytest -m gpu -s tests/gpu/test_pointwise.py` prints the times of the kernels beside those that the compiler makes, in about
two minutes."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from meshwright.config.schema import ModelConfig
from meshwright.distributed import device as devices
from meshwright.kernels import dropout, pointwise, rms_norm
from meshwright.models import build, initialize
from meshwright.parallel.compile import compile_blocks
from meshwright.parallel.recompute import recompute_blocks
from meshwright.spec.plan import Plan
from tests.unit import pointwise_cases as cases

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
if not torch.accelerator.is_available() or find_spec("triton") is None:
    pytest.skip("no accelerator, or no Triton", allow_module_level=True)

DEVICE = torch.accelerator.current_accelerator()
LIMIT = {"fp32": 5e-7, "bf16": 2.0**-8, "fp16": 2.0**-10}
"""Of one rounding, relative to the largest."""
ENOUGH = 0.6
"""Of the rate at which the device copies."""


def kernels():
    from meshwright.kernels import pointwise_triton

    return pointwise_triton


def seconds(call: Callable[..., object], *arguments: object, times: int = 30) -> float:
    for _ in range(3):
        call(*arguments)
    torch.accelerator.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        call(*arguments)
    torch.accelerator.synchronize()
    return (time.perf_counter() - start) / times


def copy_rate() -> float:
    """Bytes a second, read and written."""
    x = torch.empty(2**29, dtype=torch.bfloat16, device=DEVICE)
    y = torch.empty_like(x)
    return 2 * x.nbytes / seconds(y.copy_, x)


# Mutations as in tests/unit/test_kernels_pointwise.py.
def test_kernels_against_fp64():
    wrong = {name: value for name, value in cases.activations(kernels(), DEVICE) if not value <= LIMIT[name.rsplit(" ", 1)[1]]}
    assert not wrong, wrong
    found = dict(cases.tails(kernels(), DEVICE))
    print(found)
    assert found["tails value"] < 2e-7 and found["tails slope"] < 5e-7 and found["tails small"] < 6e-7
    assert found["tails relative"] < 2e-4 and found["tails units"] <= 1
    assert found["tails share of other bits"] < 1e-3 and found["tails share of other bits than torch"] < 1e-3
    found = {**dict(cases.edges(kernels(), DEVICE)), **dict(cases.dropped(kernels(), DEVICE))}
    assert all(value is True for value in found.values()), found


def test_dropout_in_eager_code_has_the_bits_of_the_plain_version():
    x = cases.drawn(4, 8, 96, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    keys = dropout.position_keys(5, torch.arange(4, device=DEVICE), torch.arange(8, device=DEVICE))
    out = dropout.dropout(x, keys, 3, 0.1)
    out.backward(out.detach())
    assert torch.equal(out, dropout.plain_dropout(x, keys, 3, 0.1))
    assert torch.equal(x.grad, dropout.plain_dropout(out, keys, 3, 0.1))


def report(name: str, ours: float, other: float, moved: int, rate: float) -> None:
    share, theirs = (moved / rate / spent for spent in (ours, other))
    print(f"{name:18} {1e6 * ours:7.1f} us ({share:.0%} of copying)   otherwise {1e6 * other:7.1f} us ({theirs:.0%})")
    assert share > ENOUGH, name


@pytest.mark.parametrize(("name", "shape", "rows"), [("gelu", (32768, 4096), ()), ("swiglu", (16384, 16384), (16,))])
def test_times_of_activations(name: str, shape: tuple[int, int], rows: tuple[int, ...]):
    """Shapes of a layer of BERT-large and of Llama-1B."""
    module, rate = kernels(), copy_rate()
    x = cases.drawn(*shape, dtype=torch.float32, device=DEVICE).bfloat16()
    ours, gradient = getattr(module, name), getattr(module, f"{name}_gradient")
    plain = torch.compile(getattr(pointwise, f"plain_{name}"), fullgraph=True, dynamic=False)
    out = ours(x, *rows)
    print()
    report(name, seconds(ours, x, *rows), seconds(plain, x, *rows), x.nbytes + out.nbytes, rate)
    leaf = x.clone().requires_grad_()
    made = plain(leaf, *rows)
    otherwise = seconds(lambda: torch.autograd.grad(made, leaf, out, retain_graph=True))
    report(f"{name} gradient", seconds(gradient, out, x, *rows), otherwise, 2 * x.nbytes + out.nbytes, rate)
    chosen = module._BLOCK, module._WARPS
    try:  # for whoever chooses the size of a program
        for module._BLOCK, module._WARPS in ((512, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8)):
            both = seconds(ours, x, *rows), seconds(gradient, out, x, *rows)
            print(f"    {module._BLOCK} outputs by {module._WARPS} warps: {1e6 * both[0]:.1f} and {1e6 * both[1]:.1f} us")
    finally:
        module._BLOCK, module._WARPS = chosen


def test_time_of_dropout():
    x = cases.drawn(64, 512, 1024, dtype=torch.float32, device=DEVICE).bfloat16()
    keys = dropout.position_keys(5, torch.arange(64, device=DEVICE), torch.arange(512, device=DEVICE))
    ours = seconds(kernels().dropped, x, keys, *dropout.in_words(1, 0.1))
    print()
    report("dropout", ours, seconds(dropout.plain_dropout, x, keys, 1, 0.1), 2 * x.nbytes, copy_rate())


def norm_kernels():
    from meshwright.kernels import rms_norm_triton

    return rms_norm_triton


WIDE = {"all of 1b": (1000, 2048), "8b": (517, 4096), "small": (2000, 1024), "1536": (1031, 1536), "999": (300, 999)}


# Mutations as in tests/unit/test_kernels_rms_norm.py.
def test_gradient_of_norms_against_fp64():
    limit = {**LIMIT, "fp32": 3e-6}  # of sums over rows
    found = dict(cases.norms(norm_kernels(), DEVICE, {**cases.NORMS, **WIDE}))
    wrong = {name: value for name, value in found.items() if not value <= limit[name.rsplit(" ", 1)[1]]}
    assert found and not wrong, wrong


def norm_inputs(rows: int, width: int) -> list[torch.Tensor]:
    """Gradients of the residual and of the norm, x and weight."""
    shapes = ((rows, width), (rows, width), (rows, width), (width,))
    return [cases.drawn(*shape, dtype=torch.float32, device=DEVICE, seed=seed).bfloat16() for seed, shape in enumerate(shapes)]


def test_gradient_of_norms_has_the_same_bits_every_time():
    inputs = norm_inputs(16384, 2048)
    first = norm_kernels().rms_norm_gradient(*inputs, 1e-5)
    for _ in range(20):
        assert all(map(torch.equal, norm_kernels().rms_norm_gradient(*inputs, 1e-5), first))


def recorded_seconds(call: Callable[[], object]) -> float:
    """Of a call that has several launches, without what it costs to launch them."""
    seconds(call, times=1)  # compiled, and the allocator's memory in place
    if not devices.records(DEVICE):
        return seconds(call)
    recorder = devices.Recorder(DEVICE)
    return seconds(recorder.record(call))


@pytest.mark.parametrize("shape", [(16384, 2048), (8192, 4096), (16384, 1024)])
def test_times_of_the_gradient_of_norms(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    """The first is that of a layer of Llama-1B."""
    module, rate = norm_kernels(), copy_rate()
    inputs = residual, normed, x, weight = norm_inputs(*shape)

    def time() -> float:
        return recorded_seconds(lambda: module.rms_norm_gradient(*inputs, 1e-5))

    norm = torch.nn.RMSNorm(shape[1], eps=1e-5, device=DEVICE, dtype=torch.bfloat16)
    norm.weight.data.copy_(weight)
    leaf = x.clone().requires_grad_()
    made = torch.compile(lambda x: (x * 1.0, norm(x)), fullgraph=True, dynamic=False)(leaf)
    leaves = (leaf, norm.weight)
    otherwise = seconds(lambda: torch.autograd.grad(made, leaves, (residual, normed), retain_graph=True))
    print()
    report(f"norm {shape[0]} x {shape[1]}", time(), otherwise, 4 * x.nbytes, rate)
    if shape != (16384, 2048):
        return
    for name, values in {"EACH": (8, 16), "STAGES": (1, 2, 3, 4), "THREADS": (32768, 65536, 98304, 131072)}.items():
        for value in values:  # for whoever chooses the size of a program
            with monkeypatch.context() as changed:
                changed.setattr(module, name, value)
                print(f"    {name} {value}: {1e6 * time():.1f} us")
    with monkeypatch.context() as changed:
        changed.setattr(module, "EACH", 8)
        changed.setattr(module, "THREADS", 131072)
        print(f"    both smaller: {1e6 * time():.1f} us")


LAYERS = {
    "gelu": (ModelConfig(layers=1, width=1024, heads=16, ffn=4096, vocab=64, max_len=512, dropout=0.1, activation="gelu"), 32),
    "swiglu": (ModelConfig(layers=1, width=2048, heads=32, kv_heads=8, ffn=8192, vocab=64, max_len=2048), 4),
}
LAYERS["rms_norm"] = LAYERS["swiglu"]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_in_a_compiled_layer(name: str, recompute: str, monkeypatch: pytest.MonkeyPatch):
    """Gradients of a layer with the operators against those without, and its time."""
    config, rows = LAYERS[name]
    torch.manual_seed(0)
    x = torch.randn(rows, config.max_len, config.width, device=DEVICE).bfloat16()
    gradient = torch.randn_like(x) / 64
    tokens = torch.zeros(rows, config.max_len, dtype=torch.int64, device=DEVICE)
    keys = dropout.position_keys(0, torch.arange(rows, device=DEVICE), torch.arange(config.max_len, device=DEVICE))
    grads, times, called = [], [], [0, 0]
    module = norm_kernels() if name == "rms_norm" else kernels()
    real = getattr(module, f"{name}_gradient")
    for operators in (True, False):
        torch.compiler.reset()
        with monkeypatch.context() as changed:

            def counted(*arguments: Any, operators: bool = operators) -> torch.Tensor:
                called[operators] += 1
                return real(*arguments)

            changed.setattr(module, f"{name}_gradient", counted)
            if not operators and name == "rms_norm":
                changed.setattr(rms_norm, "in_one_pass", lambda x, norm: False)
            elif not operators:
                changed.setattr(pointwise, "_TRITON", False)
            model = build(config, "lm", torch.bfloat16)
            initialize(model, 0, DEVICE)
            recompute_blocks(model, Plan(recompute=recompute))
            compile_blocks(model, "inductor")

            def step(model: torch.nn.Module = model) -> None:
                model.zero_grad()
                model.run_layers(x, (0, 1), tokens, None, None, None, keys).backward(gradient)

            times.append(seconds(step, times=10))
            grads.append([parameter.grad.float() for parameter in model.layers.parameters()])
    assert called[False] == 0 < called[True]
    print(f"\nlayer with {name}, recompute {recompute}: {1e3 * times[0]:.2f} ms, without operators {1e3 * times[1]:.2f} ms")
    for a, b in zip(*grads, strict=True):
        # Atomic sums of attention's backward may round otherwise from run to run, and bf16 has 8 bits.
        assert float((a - b).abs().max()) <= 2**-5 * float(b.abs().max())
