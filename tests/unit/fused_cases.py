"""What lies between matrices on random tensors, on any device; run as a script with TRITON_INTERPRET=1 it prints a JSON line a
case: the largest difference of the kernel from its oracle in fp64."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from meshwright.kernels import fused
from meshwright.kernels.fused import Heads

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
HEADS = {
    "llama": {"group": 4, "features": 16},
    "qwen-3": {"group": 2, "features": 24, "normed": True},
    "gpt-2": {"group": 1, "features": 10, "turned": False},
    "one head for five": {"group": 5, "features": 6, "kv_heads": 1},
    "odd": {"group": 2, "features": 5, "turned": False, "kv_heads": 3},
}
NORMS = {"rms": (nn.RMSNorm, 24), "layer": (nn.LayerNorm, 24), "wide": (nn.RMSNorm, 1000), "no bias": (nn.LayerNorm, 96)}
GATES = {"swiglu": 16, "gelu": 4, "gelu_tanh": 1, "relu": 2}
ROWS = {"one chunk": (3, 61), "chunks": (2, 20000), "as many as a chunk": (1, 8192)}


def drawn(*shape: int, dtype: torch.dtype = torch.float64, device: Any = "cpu", seed: int = 0) -> torch.Tensor:
    values = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return values.to(device=device, dtype=dtype)


def norm_of(kind: type[nn.Module], width: int, dtype: torch.dtype, device: Any, **options: Any) -> nn.Module:
    norm = kind(width, eps=1e-3, dtype=dtype, device=device, **options)
    with torch.no_grad():
        for number, parameter in enumerate(norm.parameters()):
            parameter.copy_(drawn(width, dtype=dtype, device=device, seed=number + 7))
    return norm.requires_grad_(False)


def doubled(norm: nn.Module) -> nn.Module:
    options = {"bias": norm.bias is not None} if isinstance(norm, nn.LayerNorm) else {}
    other = type(norm)(norm.weight.shape[0], eps=norm.eps, dtype=torch.float64, device=norm.weight.device, **options)
    other.load_state_dict({name: value.double() for name, value in norm.state_dict().items()})
    return other.requires_grad_(False)


def largest(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Relative to numbers above 1."""
    pairs = zip(found, expected, strict=True)
    return max(float(((one.double() - other).abs() / other.abs().clamp(min=1.0)).max()) for one, other in pairs)


def turned(kernels: Any, dtype: torch.dtype, device: Any, *, group: int, features: int, **how: Any) -> float:
    """Queries, and all of the pages: what is not written stays."""
    tokens, kv_heads = 7, how.get("kv_heads", 2)
    wide = torch.promote_types(dtype, torch.float32)
    whole = drawn(tokens, kv_heads * (group + 2) * features + 8, dtype=dtype, device=device)
    qkv = whole[:, : kv_heads * (group + 2) * features]
    slots = torch.tensor([5, 0, 11, 3, 2, 8, 9], device=device)
    norms = [norm_of(nn.RMSNorm, features, dtype, device) for _ in "qk"] if how.get("normed") else [None, None]
    if norms[1] is not None:
        norms[1].weight.mul_(-2.0)
    angles = drawn(2, tokens, features // 2, dtype=wide, device=device, seed=2) if how.get("turned", True) else (None, None)
    heads = Heads(group, *norms, *angles)
    exact = Heads(group, *(n and doubled(n) for n in norms), *(None if a is None else a.double() for a in angles))
    pools = [drawn(4, 3, kv_heads, features, dtype=dtype, device=device, seed=n) for n in (3, 4)]
    expected = [pool.double().clone() for pool in pools]
    q = kernels.turn_and_write(qkv, heads, *pools, slots)
    assert q.dtype == dtype and q.is_contiguous()
    other = fused.plain_turn_and_write(qkv.double().contiguous(), exact, *expected, slots)
    return largest([q, *pools], [other, *expected])


def added(kernels: Any, dtype: torch.dtype, device: Any, kind: type[nn.Module], width: int, **options: Any) -> float:
    x, branch = (drawn(2, 3, width, dtype=dtype, device=device, seed=n) + 1 for n in (0, 1))
    norm = norm_of(kind, width, dtype, device, **options)
    found = [*kernels.add_norm(x, branch, norm), kernels.add_norm(x, None, norm)[1]]
    total = (x + branch).double()  # the model rounds it too
    return largest(found, [total, doubled(norm)(total), doubled(norm)(x.double())])


def gated(kernels: Any, dtype: torch.dtype, device: Any, name: str, rows: int) -> float:
    x = drawn(5, 2 * rows * 7, dtype=dtype, device=device) * 3
    return largest([kernels.gate(x, name, rows)], [fused.plain_gate(x.double(), name, rows)])


def chosen(kernels: Any, dtype: torch.dtype, device: Any, rows: int, vocab: int) -> bool:
    """Equal to the plain version: with equals of the largest, and with rows that are no numbers."""
    logits = drawn(rows + 5, vocab, dtype=dtype, device=device)
    expected = torch.stack((logits.argmax(1), torch.zeros(rows + 5, dtype=torch.int64, device=device)))
    logits[0, [3, min(3 + 2048, vocab - 1), vocab - 1]], expected[0, 0] = 9.0, 3  # the second for the same thread
    for row, (place, value) in enumerate(((0, torch.nan), (vocab - 1, torch.inf), (vocab // 2, -torch.nan)), rows):
        logits[row, place], expected[1, row] = value, 1
    logits[rows + 3], expected[1, rows + 3] = -torch.inf, 1
    logits[rows + 4, 1:], expected[0, rows + 4] = -torch.inf, 0
    out = torch.full((2, rows + 9), -1, device=device)
    kernels.best(logits, out[:, : rows + 5])
    fine = expected[1] == 0
    return bool((out[1, : rows + 5] == expected[1]).all() and (out[0, : rows + 5] == expected[0])[fine].all()) and bool(
        (out[:, rows + 5 :] == -1).all() and (out[0, : rows + 5] < vocab).all()
    )


def cases(kernels: Any, device: Any = "cpu", dtypes: Any = tuple(DTYPES)) -> dict[str, float | bool]:
    """By name; the dtype is the last word."""
    found: dict[str, float | bool] = {}
    for name in dtypes:
        dtype = DTYPES[name]
        for shape, values in HEADS.items():
            found[f"turn {shape} {name}"] = turned(kernels, dtype, device, **values)
        for kind, (norm, width) in NORMS.items():
            options = {"bias": False} if kind == "no bias" else {}
            found[f"norm {kind} {name}"] = added(kernels, dtype, device, norm, width, **options)
        for gate, rows in GATES.items():
            found[f"gate {gate} {name}"] = gated(kernels, dtype, device, gate, rows)
        for shape, (rows, vocab) in ROWS.items():
            found[f"best {shape} {name}"] = chosen(kernels, dtype, device, rows, vocab)
    return found


if __name__ == "__main__":
    from meshwright.kernels import fused_triton

    print(json.dumps(cases(fused_triton)))
