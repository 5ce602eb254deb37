"""What this device can do at best: rates of a large matmul and a copy, and the floor of each workload's step.

python -m meshwright.bench.ceilings [--workloads llama-1b,bert-large] [--describe]

Prints one JSON object a line. The floor of a step is the time of every matmul at its own shape (forward, input gradient, weight
gradient) and of attention forward and backward at the fastest backend, each measured by itself on random data: no norm,
activation, dropout, optimizer, launch gap or communication. The `limit` is the rate of a device that needs the floor and no
more; in the same precision only a version that does less work is faster. On a device that multiplies in 8 bits there is a
`limit_fp8` too, with the products of the blocks as `precision: fp8` has them, and without its casts.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.bench.measure import median_seconds
from meshwright.bench.workloads import WORKLOADS, Workload
from meshwright.distributed import device as devices
from meshwright.kernels import fp8
from meshwright.observe.flops import attention_pairs, peak_rate

__all__ = ["Attention", "Floor", "Matmul", "attention_of", "floor", "head_positions", "limit", "matmuls", "step_flops"]

_BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
_CPU_BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
_INSIDE = ("qkv", "attention.out", "mlp.up", "mlp.down")
"""Matmuls of `matmuls` that the blocks have."""
_ALIGN = 64
"""Output matrices may be padded to a multiple of this many rows, when that is faster."""


@dataclass(frozen=True)
class Matmul:
    """A weight [outputs, inputs] that multiplies `rows` positions, `count` times a step: three products each."""

    name: str
    rows: int
    outputs: int
    inputs: int
    count: int = 1

    @property
    def flops(self) -> float:
        """Forward, input gradient and weight gradient: 2 x rows x outputs x inputs each."""
        return 6.0 * self.rows * self.outputs * self.inputs * self.count


@dataclass(frozen=True)
class Attention:
    """`count` times a step."""

    rows: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    causal: bool
    count: int

    @property
    def flops(self) -> float:
        """12 x heads x head_dim a pair, forward and backward, recomputed scores not counted; causal: half the square."""
        pairs = self.rows * attention_pairs([self.length], causal=self.causal)
        return 12.0 * self.heads * self.head_dim * pairs * self.count


@dataclass(frozen=True)
class Floor:
    """Seconds of one step of one device."""

    matmul: float
    attention: float
    backend: str

    @property
    def seconds(self) -> float:
        return self.matmul + self.attention


def head_positions(workload: Workload) -> int:
    """Positions of a row whose logits are needed: all, or the masked 15%."""
    return round(0.15 * workload.seq_len) if workload.targets == "masked" else workload.seq_len


def matmuls(workload: Workload) -> list[Matmul]:
    """Every matmul of a step of one device, with queries, keys and values, and gate and up, in one product each."""
    model = workload.config(devices=1, steps=1, folder="unused").model
    assert model.vocab is not None, workload.name
    tokens, head_rows = workload.rows * workload.seq_len, workload.rows * head_positions(workload)
    head_dim = model.head_dim or model.width // model.heads
    inner, kv = model.heads * head_dim, (model.kv_heads or model.heads) * head_dim
    gates = 2 if model.activation == "swiglu" else 1
    found = [
        Matmul("qkv", tokens, inner + 2 * kv, model.width, model.layers),
        Matmul("attention.out", tokens, model.width, inner, model.layers),
        Matmul("mlp.up", tokens, gates * model.ffn, model.width, model.layers),
        Matmul("mlp.down", tokens, model.width, model.ffn, model.layers),
        Matmul("head", head_rows, model.vocab, model.width),
    ]
    if model.head_transform:
        found.append(Matmul("head.transform", head_rows, model.width, model.width))
    return found


def attention_of(workload: Workload) -> Attention:
    model = workload.config(devices=1, steps=1, folder="unused").model
    head_dim = model.head_dim or model.width // model.heads
    return Attention(
        workload.rows,
        model.heads,
        model.kv_heads or model.heads,
        workload.seq_len,
        head_dim,
        model.arch == "decoder",
        model.layers,
    )


def step_flops(workload: Workload) -> float:
    """Operations of a step of one device, by the same formula as MFU (docs/metrics.md)."""
    return sum(matmul.flops for matmul in matmuls(workload)) + attention_of(workload).flops


def limit(workload: Workload, seconds: float) -> float:
    """Tokens/s or samples/s (the workload's unit) of a device whose step takes `seconds`."""
    return workload.rows * (workload.seq_len if workload.unit == "tokens" else 1) / seconds


def floor(workload: Workload, device: torch.device, precision: str = "bf16") -> Floor:
    """Measured here and now. precision: bf16, or fp8, which is that of the matmuls inside of the blocks."""
    matmul = 0.0
    for part in matmuls(workload):
        inside = part.name in _INSIDE and part.outputs % fp8.ALIGNED == part.inputs % fp8.ALIGNED == 0
        if precision == "fp8" and inside:
            matmul += part.count * _three_products_fp8(part, device)
            continue
        seconds = _three_products(part, device)
        if part.outputs % _ALIGN:
            seconds = min(seconds, _three_products(replace(part, outputs=-(-part.outputs // _ALIGN) * _ALIGN), device))
        matmul += part.count * seconds
    seconds, backend = _attention(attention_of(workload), device)
    return Floor(matmul, seconds, backend)


def _random(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


def _three_products(part: Matmul, device: torch.device) -> float:
    inputs, weight = _random(part.rows, part.inputs, device=device), _random(part.outputs, part.inputs, device=device)
    outputs = _random(part.rows, part.outputs, device=device)
    products = (lambda: inputs @ weight.t(), lambda: outputs @ weight, lambda: outputs.t() @ inputs)
    return sum(median_seconds(product, device) for product in products)


def _three_products_fp8(part: Matmul, device: torch.device) -> float:
    """As the layers of `precision: fp8` have them (`kernels.fp8`)."""

    def factor(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = _random(rows, columns, device=device)
        largest = fp8.row_largest(made)
        return fp8.cast(made, largest, largest.amax(), True, False)[:2]

    found = 0.0
    for rows, columns, depth, fast in (
        (part.rows, part.outputs, part.inputs, fp8.FAST_OUTPUT),
        (part.rows, part.inputs, part.outputs, fp8.FAST_INPUT),
        (part.outputs, part.inputs, part.rows, fp8.FAST_WEIGHT),
    ):
        factors = (*factor(rows, depth), *factor(columns, depth), torch.bfloat16, fast)
        found += median_seconds(functools.partial(fp8.multiply, *factors), device)
    return found


def _attention(part: Attention, device: torch.device) -> tuple[float, str]:
    """Seconds of all layers' forward and backward with the fastest backend that takes the shape, and its name."""
    q = _random(part.rows, part.heads, part.length, part.head_dim, device=device).requires_grad_()
    k, v = (_random(part.rows, part.kv_heads, part.length, part.head_dim, device=device).requires_grad_() for _ in range(2))
    grad = torch.randn_like(q)

    def call() -> object:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=part.causal, enable_gqa=part.kv_heads != part.heads)
        return torch.autograd.grad(out, (q, k, v), grad)

    best, name = float("inf"), ""
    for backend in _CPU_BACKENDS if device.type == "cpu" else _BACKENDS:
        try:
            with sdpa_kernel(backend):
                seconds = median_seconds(call, device)
        except RuntimeError:  # this backend does not take the shape here
            continue
        if seconds < best:
            best, name = seconds, backend.name.removesuffix("_ATTENTION").lower()
    if not name:
        raise RuntimeError(f"no attention backend takes {part}")
    return part.count * best, name


def matmul_rate(device: torch.device, precision: str, size: int) -> float:
    """FLOP/s of a square product: precision bf16, or tf32 (fp32 tensors where torch may use TF32)."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (_random(size, size, device=device, dtype=dtype) for _ in range(2))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return 2.0 * size**3 / median_seconds(lambda: a @ b, device)
    finally:
        torch.set_float32_matmul_precision(before)


def copy_rate(device: torch.device, size: int) -> float:
    """Bytes/s of a copy inside the device's memory, read and written bytes both counted."""
    source = torch.zeros(size, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2.0 * size / median_seconds(lambda: target.copy_(source), device)


def machine(device: torch.device) -> dict[str, Any]:
    name = devices.name(device)
    peak = peak_rate(device, "bf16", name)
    have = devices.count(device.type) if device.type != "cpu" else devices.default_ranks("cpu")
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    total = devices.memory_total(device)[1]
    found = {"device": name, "type": device.type, "count": have, "memory": total}
    return {**found, "peak": peak.rate, "peak_source": peak.source, **versions}


def measure(workloads: Iterable[Workload], device: torch.device) -> Iterable[dict[str, Any]]:
    """Records in the order in which they are measured."""
    size, copied = (8192, 4 << 30) if device.type != "cpu" else (512, 16 << 20)
    for precision in ("bf16", "tf32"):
        yield {"what": "matmul", "precision": precision, "size": size, "flops_per_s": matmul_rate(device, precision, size)}
    yield {"what": "copy", "bytes": copied, "bytes_per_s": copy_rate(device, copied)}
    eight = device.type != "cpu" and not devices.fp8_findings(device)  # which a CPU emulates
    for workload in workloads:
        for what, precision in (("limit", "bf16"), *([("limit_fp8", "fp8")] if eight else [])):
            found = floor(workload, device, precision)
            record = {"what": what, "workload": workload.name, "unit": workload.unit, "limit": limit(workload, found.seconds)}
            parts = {"matmul_seconds": found.matmul, "attention_seconds": found.attention, "attention_backend": found.backend}
            yield {**record, "seconds": found.seconds, **parts, "flops": step_flops(workload)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="llama-1b,bert-large,encoder-24x1024")
    parser.add_argument("--describe", action="store_true", help="only the machine, nothing measured that its data sheet says")
    args = parser.parse_args()
    device = devices.rank_device(devices.pick(), 0)
    devices.set_current(device)
    torch.manual_seed(0)
    print(json.dumps({"what": "machine", **machine(device)}), flush=True)
    if not args.describe:
        for record in measure((WORKLOADS[name] for name in args.workloads.split(",")), device):
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
