"""Decode kernels that begin while the one before ends, and numbers of 8 bits, on an accelerator. `pytest -m gpu -s
tests/gpu/test_serving8.py` prints what was measured."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from meshwright.bench.kernels import Shape, _row, swapped
from meshwright.bench.measure import median_seconds
from meshwright.config.recipes import recipe
from meshwright.config.schema import ModelConfig
from meshwright.distributed import device as devices
from meshwright.kernels import early, rowwise
from meshwright.kernels.fused import add_norm, add_norm_rounded, gate, gate_rounded
from meshwright.kernels.one_row import gate_linear, linear
from meshwright.kernels.paged_attention import Singles
from meshwright.kernels.rowwise import E4M3, Rounded, ScaledLinear, multiplied, plain_quantize_rows, rounded
from meshwright.models import build
from meshwright.models.trunk import Trunk
from meshwright.serve.layers import Forward
from meshwright.serve.quantize import quantize_matrices
from tests.gpu.test_serving import answers, called, made
from tests.unit import eight_bit_cases, fused_cases, one_row_cases

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.accelerator.is_available() or not devices.records(torch.device(devices.pick())):
    pytest.skip("no accelerator that records", allow_module_level=True)

DEVICE = torch.device(devices.pick())
LIMIT = {"fp32": 4e-6, "bf16": 2.0**-6}
"""As in `test_serving`."""
NARROW = {"fp32": 1e-5, "fp16": 2.0**-8, "bf16": 2.0**-5}
"""Of 8 bits: sums of 300 products of numbers up to 30, and products of two such."""


def without(call: Callable[[], object]) -> object:
    with swapped(early, "ALLOWED", False):
        return call()


def test_it_begins_early_here():
    """Else what follows compares a thing with itself."""
    assert early.launch_options() == {"early": True, "launch_pdl": True}
    assert without(early.launch_options) == {"early": False}


@pytest.mark.parametrize("narrow", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("group", [1, 4])
def test_the_same_tokens_with_and_without(group: int, narrow: bool):
    """Recorded, ahead, many sequences and one; bit by bit the same arithmetic. A read before the wait would show here."""
    model = made(64, group)
    kind = {"cache_dtype": E4M3} if narrow else {}
    if narrow:
        quantize_matrices(model, DEVICE)
    expected = without(lambda: answers(model, **kind))
    for _ in range(3):
        assert answers(model, **kind) == expected
    assert answers(model, max_running=1, **kind) == without(lambda: answers(model, max_running=1, **kind))
    assert answers(model, graphs=False, ahead=False, **kind) == without(
        lambda: answers(model, graphs=False, ahead=False, **kind)
    )


def chain(steps: int, width: int, narrow: bool) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    """Each kernel reads what the one before wrote, over memory that is used again and again."""
    torch.manual_seed(0)

    def matrix(rows: int, columns: int) -> nn.Module:
        plain = nn.Linear(columns, rows, bias=False, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False)
        return ScaledLinear(plain.weight, None) if narrow else plain

    ups, downs = ([matrix(*size) for _ in range(steps)] for size in ((2 * width, width), (width, width)))
    norm = nn.RMSNorm(width, eps=1e-5, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False)
    start = torch.randn(1, 1, width, device=DEVICE, dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        x = start
        for up, down in zip(ups, downs, strict=True):
            x, y = gate_linear(x, None, norm, up, "swiglu", 16)
            x, branch = linear(y, down, x)
            assert branch is None
            x = add_norm(x, x, norm)[1]
        return x

    return run, start


@pytest.mark.parametrize("narrow", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("width", [256, 2048])
def test_a_chain_is_bitwise_the_same(width: int, narrow: bool):
    """Called and recorded. Small kernels, which are the ones that overlap the most."""
    run, start = chain(24, width, narrow)
    with torch.inference_mode():
        devices.synchronize(DEVICE)
        expected = without(run).clone()
        kept: list[torch.Tensor] = []
        replay = devices.Recorder(DEVICE).record(lambda: kept.append(run()))
        for seed in range(50):
            assert torch.equal(run(), expected)
            replay()
            assert torch.equal(kept[-1], expected)
            if seed % 10 == 9:
                start.normal_()
                devices.synchronize(DEVICE)
                expected = without(run).clone()


def test_kernels_are_their_plain_versions_with_early_launches():
    from meshwright.kernels import fused_triton

    found = fused_cases.cases(fused_triton, DEVICE, tuple(LIMIT)) | one_row_cases.cases(DEVICE, tuple(LIMIT))
    wrong = {name: value for name, value in found.items() if value is not True and not value < LIMIT[name.rsplit(" ", 1)[1]]}
    assert len(found) > 60 and not wrong


@pytest.mark.parametrize("many", [32, 8192])
def test_kernels_of_8_bits_are_their_plain_versions(many: int, monkeypatch: pytest.MonkeyPatch):
    from meshwright.kernels import one_row_triton

    monkeypatch.setattr(one_row_triton, "MANY", many)
    found = eight_bit_cases.cases(DEVICE, tuple(LIMIT))
    wrong = {name: value for name, value in found.items() if not value < NARROW[name.rsplit(" ", 1)[1]]}
    assert len(found) == 22 and not wrong, wrong
    assert all(value == 0.0 for name, value in found.items() if name.startswith("before"))  # bit by bit


@pytest.mark.parametrize("rows", [2, 16, 256, 1000])
def test_rows_of_8_bits_times_a_matrix_of_8_bits(rows: int):
    """What torch multiplies, against fp64 with the same rounded numbers. Fast accumulation keeps about 13 bits of a partial
    sum, of which K = 512 has 16: up to 5.1e-3 of the largest of a row was seen, where rounding to bf16 is 2e-3."""
    torch.manual_seed(0)
    x = torch.randn(rows, 512, device=DEVICE, dtype=torch.bfloat16)
    x *= torch.logspace(-3, 3, rows, device=DEVICE)[:, None]
    module = ScaledLinear(torch.randn(768, 512, device=DEVICE, dtype=torch.bfloat16) / 512**0.5, None)
    assert module._multiplies(x)
    values, scale = plain_quantize_rows(x)
    exact = (values.double() * scale) @ (module.weight.double() * module.scale[:, None]).t()
    size = exact.abs().amax(1, keepdim=True)
    given = multiplied(values, scale, module.weight, module.scale, torch.bfloat16)
    assert float(((given.double() - exact) / size).abs().max()) < 2.0**-7
    assert float(((module(x).double() - exact) / size).abs().max()) < 2.0**-6  # an activation may be rounded the other way
    widened = x.double() @ (module.weight.double() * module.scale[:, None]).t()
    print(f"\n{rows} rows: rounding activations changes {float((exact - widened).norm() / widened.norm()):.2%}")


def test_8_bits_recorded_and_called():
    model = quantize_matrices(made(64, 4), DEVICE)
    assert answers(model) == called(model)


def test_the_same_tokens_where_kernels_round_what_they_give(monkeypatch: pytest.MonkeyPatch):
    """Recorded and called: the bits of rows that are rounded by a kernel of their own."""
    model = quantize_matrices(made(64, 4), DEVICE)
    given: list[type] = []
    model.layers[0].mlp.down.register_forward_pre_hook(lambda _, args: given.append(type(args[0])))  # type: ignore[union-attr]
    found = answers(model, cache_dtype=E4M3)
    assert called(model, cache_dtype=E4M3) == found and Rounded in given
    given.clear()
    monkeypatch.setattr(rowwise, "ROUNDS_BEFORE", False)
    assert answers(model, cache_dtype=E4M3) == found and Rounded not in given


@pytest.mark.parametrize("rows", [448, 16])
@pytest.mark.parametrize("name", ["llama-1b", "llama-3-8b"])
def test_kernels_that_round_what_they_give(name: str, rows: int, capsys: pytest.CaptureFixture[str]):
    """Bit by bit what a kernel of its own makes of their results; and microseconds of both."""
    shape = Shape(ModelConfig(**recipe(name)), DEVICE, False, True)
    width, features = shape.config.width, shape.config.ffn
    x, branch, up = shape.some(1, rows, width), shape.some(1, rows, width), shape.some(1, rows, 2 * features)
    pairs: dict[str, tuple[Callable[[], Rounded], Callable[[], Rounded]]] = {
        "add_norm": (
            lambda: add_norm_rounded(x, branch, shape.norm)[1],
            lambda: rounded(add_norm(x, branch, shape.norm)[1]),
        ),
        "gate": (lambda: gate_rounded(up, "swiglu", 16), lambda: rounded(gate(up, "swiglu", 16))),
    }
    lines = []
    with torch.inference_mode():
        for kind, (one, two) in pairs.items():
            found, expected = one(), two()
            assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
            assert torch.equal(found.scale, expected.scale)
            times = [shape.timed([call] * 64) * 1e6 for call in (one, two)]
            lines.append(f"{name} {rows} rows {kind:9}{times[0]:7.2f} us, by two kernels {times[1]:7.2f} us")
    with capsys.disabled():
        print("\n" + "\n".join(lines))


def test_a_step_of_many_rows_where_kernels_round_what_they_give(capsys: pytest.CaptureFixture[str]):
    """Logits of 448 sequences of 300 tokens through four layers of the 8B shape, bit by bit, and the time of a step of each."""
    rows, length, page = 448, 300, 16
    values = {**recipe("llama-3-8b"), "layers": 4, "vocab": 1024}
    model = build(ModelConfig(**values), "lm", torch.bfloat16)
    assert isinstance(model, Trunk)
    for parameter in model.to_empty(device=DEVICE).requires_grad_(False).parameters():  # drawn on a host it would take long
        parameter.normal_(0.0 if parameter.ndim > 1 else 1.0, 0.02)
    forward = Forward(quantize_matrices(model, DEVICE), (0, 4))
    each = -(-length // page)
    pools = [torch.randn(rows * each, page, 8, 128, device=DEVICE).to(E4M3) for _ in "kv"]
    forward.cache = [tuple(pool.view(torch.uint8).clone().view(E4M3) for pool in pools) for _ in range(4)]  # type: ignore[misc]
    tables = torch.arange(rows * each, dtype=torch.int32, device=DEVICE).view(rows, each)
    slots = tables[:, (length - 1) // page].long() * page + (length - 1) % page
    pages = Singles(slots, tables, torch.full((rows,), length, dtype=torch.int32, device=DEVICE))
    tokens = torch.arange(rows, device=DEVICE)
    positions = torch.full((rows,), length - 1, device=DEVICE)
    logits, times = [], []
    with torch.inference_mode():
        for before in (True, False):
            with swapped(rowwise, "ROUNDS_BEFORE", before):
                logits.append(forward(tokens, positions, pages))
                replay = devices.Recorder(DEVICE).record(lambda: forward(tokens, positions, pages))
            times.append(median_seconds(replay, DEVICE) * 1e6)
    assert logits[0].isfinite().all() and torch.equal(*logits)
    with capsys.disabled():
        print(f"\n4 layers, {rows} rows: {times[0]:.0f} us, with kernels of their own {times[1]:.0f} us")


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    values, scale = plain_quantize_rows(x)
    return values.float() * scale


def test_8_bits_move_the_logits_as_the_same_rounding_does_in_full_precision(capsys: pytest.CaptureFixture[str]):
    """Of a random model, whose logits are close to each other and whose attention is sharp: what rounding weights and
    activations alone changes, by fp32 on a CPU, against what the kernels change."""
    model = made(128, 4).eval().requires_grad_(False)
    tokens = torch.randint(0, 997, (2, 256), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        plain = model(tokens.to(DEVICE)).float()
        small = quantize_matrices(copy.deepcopy(model), DEVICE)(tokens.to(DEVICE)).float()
        exact = copy.deepcopy(model).float().cpu()
        rounded = quantize_matrices(copy.deepcopy(exact), torch.device("cpu"))
        for module in rounded.modules():
            if isinstance(module, ScaledLinear):
                module.register_forward_pre_hook(lambda _, given: (rounded_rows(given[0]),))
        moved = rounded(tokens) - exact(tokens)
    share, expected = (small - plain).norm() / plain.norm(), moved.norm() / exact(tokens).norm()
    with capsys.disabled():
        print(f"\nlogits move by {float(share):.2%} of their size, by the rounding alone {float(expected):.2%}")
    assert abs(float(share) / float(expected) - 1.0) < 0.1


@pytest.mark.parametrize("name", ["llama-1b", "llama-3-8b"])
def test_times_of_one_row(name: str, capsys: pytest.CaptureFixture[str]):
    """Microseconds of each matrix with what is around it, one after the other as in a step, recorded."""
    lines = []
    for narrow in (False, True):
        shape = Shape(ModelConfig(**recipe(name)), DEVICE, False, narrow)
        config = shape.config
        sizes = {
            "qkv": (shape.lines, config.width),
            "out": (config.width, config.heads * shape.features),
            "up": (2 * config.ffn, config.width),
            "down": (config.width, config.ffn),
        }
        with torch.inference_mode():
            for kind, (rows, columns) in sizes.items():
                modules = [shape.matrix(rows, columns) for _ in range(12)]
                x, residual = shape.some(1, 1, columns), shape.some(1, 1, rows)
                calls = [functools.partial(_row, shape, kind, x, residual, module, shape.heads(1)) for module in modules]
                late, soon = without(functools.partial(shape.timed, calls)), shape.timed(calls)
                moved = rows * columns * (1 if narrow else 2)
                lines.append(
                    f"{name} {'fp8' if narrow else 'bf16'} {kind:5}{late * 1e6:8.2f} us, early {soon * 1e6:8.2f} us, "
                    f"{moved / soon / 1e9:7.0f} GB/s"
                )
                assert 0.0 < soon < 1e-3
    with capsys.disabled():
        print("\n" + "\n".join(lines))
