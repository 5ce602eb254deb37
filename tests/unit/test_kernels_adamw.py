"""One-pass updates against torch.optim."""

from __future__ import annotations

import pytest
import torch

from meshwright.kernels import adamw
from meshwright.kernels.adamw import adamw_, sgd_

BLOCK = 1 << 16
SIZE = 3 * BLOCK // 2 + 5
SETTINGS = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "_BLOCK", BLOCK)


def _run_torch(optimizer_kind, start: torch.Tensor, grads: list[torch.Tensor], **kw) -> torch.Tensor:
    parameter = torch.nn.Parameter(start.clone())
    optimizer = optimizer_kind([parameter], foreach=False, **kw)
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    return parameter.detach()


def _data(dtype: torch.dtype, steps: int = 10) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(SIZE, dtype=torch.float64, generator=generator).to(dtype) for _ in range(steps + 1))
    return start, grads


# Mutations, each red: weight decay after the step; eps inside of the root; correction 2 without its root; blocks of
# _BLOCK + 1 elements every _BLOCK.
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_adamw_equals_torch(dtype: torch.dtype, tolerance: float) -> None:
    start, grads = _data(dtype)
    expected = _run_torch(torch.optim.AdamW, start, grads, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    master, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step, grad in enumerate(grads, 1):
        adamw_(master, grad, m, v, step=step, **SETTINGS)
    torch.testing.assert_close(master, expected, rtol=tolerance, atol=tolerance)


# Mutations, each red: the last few elements go to the kernel as they are; what precedes them ends one early; the new moments
# of them are not written back.
@pytest.mark.parametrize("scale", [None, 0.25, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_shard_gives_the_bits_of_the_whole(dtype: torch.dtype, scale: float | None) -> None:
    start, grads = _data(dtype, 3)
    start, grads = start[:1000], [grad[:1000] for grad in grads]
    factor = None if scale is None else torch.tensor(scale, dtype=dtype)
    results = []
    for sizes in ([1000], [1, 62, 63, 64, 65, 128, 7, 610]):
        state = [start.clone(), torch.zeros_like(start), torch.zeros_like(start)]
        for step, grad in enumerate(grads, 1):
            for w, g, m, v in zip(*(t.split(sizes) for t in (state[0], grad, *state[1:])), strict=True):
                adamw_(w, g, m, v, step=step, grad_scale=factor, **SETTINGS)
        results.append(state)
    assert all(torch.equal(whole, parts) for whole, parts in zip(*results, strict=True))


def test_adamw_takes_tensors_for_what_the_device_knows() -> None:
    start, grads = _data(torch.float64, 3)
    results = []
    for wrap in (lambda x: x, lambda x: torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else torch.int64)):
        master, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
        for step, grad in enumerate(grads, 1):
            adamw_(master, grad, m, v, step=wrap(step), **{**SETTINGS, "lr": wrap(3e-3)})
        results.append(master)
    torch.testing.assert_close(*results, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("momentum, weight_decay", [(0.0, 0.0), (0.9, 0.0), (0.9, 0.1), (0.0, 0.1)])
def test_sgd_equals_torch(momentum: float, weight_decay: float) -> None:
    start, grads = _data(torch.float64)
    expected = _run_torch(torch.optim.SGD, start, grads, lr=0.1, momentum=momentum, weight_decay=weight_decay)
    master, buffer = start.clone(), torch.zeros_like(start) if momentum else None
    for grad in grads:
        sgd_(master, grad, buffer, lr=0.1, momentum=momentum, weight_decay=weight_decay)
    torch.testing.assert_close(master, expected, rtol=1e-12, atol=1e-12)


# Mutation: grad_scale applied to the first moment only: red.
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scale_and_working_copy(grad_dtype: torch.dtype) -> None:
    start, grads = _data(torch.float32, 2)
    grads = [grad.to(grad_dtype) for grad in grads]
    factor = torch.tensor(0.25)  # a power of two: exact
    scaled = [grad.float() * 0.25 for grad in grads]
    for fused, reference in ((adamw_, torch.optim.AdamW), (sgd_, torch.optim.SGD)):
        master, a, b = start.clone(), torch.zeros(SIZE), torch.zeros(SIZE)
        working = torch.empty(SIZE, dtype=torch.bfloat16)
        for step, grad in enumerate(grads, 1):
            before = grad.clone()
            if fused is adamw_:
                adamw_(master, grad, a, b, step=step, grad_scale=factor, working=working, **SETTINGS)
            else:
                sgd_(master, grad, a, lr=0.1, momentum=0.9, grad_scale=factor, working=working)
            assert torch.equal(grad, before)
        if reference is torch.optim.AdamW:
            kw = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        else:
            kw = {"lr": 0.1, "momentum": 0.9}
        torch.testing.assert_close(master, _run_torch(reference, start, scaled, **kw), rtol=2e-6, atol=2e-6)
        assert torch.equal(working, master.bfloat16())


# Mutation: `skip` read but ignored: red.
@pytest.mark.parametrize("flag", [torch.tensor(True), torch.tensor(1.0), torch.tensor(3)])
def test_skip_changes_nothing(flag: torch.Tensor) -> None:
    tensors = [torch.randn(100).abs() for _ in range(3)]
    working = torch.full((100,), 7.0, dtype=torch.float16)
    before = [t.clone() for t in (*tensors, working)]
    grad = torch.full((100,), float("inf"))
    adamw_(tensors[0], grad, tensors[1], tensors[2], step=1, working=working, skip=flag, **SETTINGS)
    sgd_(tensors[0], grad, tensors[1], lr=0.1, momentum=0.9, working=working, skip=flag)
    assert all(torch.equal(a, b) for a, b in zip((*tensors, working), before, strict=True))
    sgd_(tensors[0], torch.ones(100), None, lr=0.5, skip=torch.zeros_like(flag))
    assert torch.equal(tensors[0], before[0] - 0.5)


def test_refuses_what_it_would_get_wrong() -> None:
    flat = torch.zeros(12)
    with pytest.raises(ValueError, match="contiguous tensors of one size"):
        adamw_(flat, torch.zeros(11), flat.clone(), flat.clone(), step=1, **SETTINGS)
    with pytest.raises(ValueError, match="contiguous tensors of one size"):
        sgd_(torch.zeros(3, 4).t(), flat, None, lr=0.1)
    with pytest.raises(ValueError, match="momentum needs a buffer"):
        sgd_(flat, flat, None, lr=0.1, momentum=0.9)


def test_empty_shards() -> None:
    adamw_(*(torch.empty(0) for _ in range(4)), step=1, working=torch.empty(0, dtype=torch.bfloat16), **SETTINGS)
    sgd_(torch.empty(0), torch.empty(0), None, lr=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_accelerator_equals_oracle(dtype: torch.dtype, tolerance: float, grad_dtype: torch.dtype) -> None:
    device = torch.accelerator.current_accelerator()
    start, grads = _data(dtype)
    grads = [grad.to(grad_dtype) for grad in grads]
    results = []
    for place in (torch.device("cpu"), device):
        master, m, v = (
            start.to(place, copy=True),
            torch.zeros(SIZE, dtype=dtype, device=place),
            torch.zeros(SIZE, dtype=dtype, device=place),
        )
        working, scale = torch.zeros(SIZE, dtype=torch.bfloat16, device=place), torch.tensor(0.3, device=place)
        off, on = torch.tensor(False, device=place), torch.tensor(True, device=place)
        for step, grad in enumerate(grads, 1):
            grad = grad.to(place)
            adamw_(master, grad, m, v, step=step, grad_scale=scale, working=working, skip=off, **SETTINGS)
            adamw_(master, grad * float("inf"), m, v, step=step, working=working, skip=on, **SETTINGS)
            sgd_(master, grad, m, lr=1e-3, momentum=0.5, weight_decay=0.01, grad_scale=scale, working=working, skip=off)
        results.append([t.cpu() for t in (master, m, v, working)])
    for here, there in zip(*results, strict=True):
        bound = tolerance if here.dtype == dtype else 2**-8
        torch.testing.assert_close(there, here, rtol=bound, atol=bound)
