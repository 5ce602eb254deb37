"""Times the kernels of a decode step one by one, beside the bytes that each must move, and the attention of prompts.

python -m meshwright.bench.kernels [llama-1b] [--rows 1 256] [--context 256 1150] [--prompt 1000] [--all] [--fp8] [--no-early]
                                                        [--smoke]

Lines of JSON: what, microseconds of one call, 10^9 bytes/s (of prompts 10^12 operations/s), and the sizes it was compiled for
where they are not those that serving uses. --all tries others, so that those of serving can be chosen again for another device.
--fp8: matrices and pages of 8 bits. --no-early: each kernel waits for the end of the one before. Matrices and pages are as many
as no cache holds, as in a model, and calls are recorded where the device can: no launch is timed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from meshwright.bench.measure import median_seconds
from meshwright.config.recipes import recipe
from meshwright.config.schema import ModelConfig
from meshwright.distributed import device as devices
from meshwright.kernels import early, fused, one_row
from meshwright.kernels.accelerated import one_row_kernels, paged_kernels
from meshwright.kernels.fused import Heads
from meshwright.kernels.paged_attention import SPAN, Pages, Singles, paged_attention
from meshwright.kernels.rowwise import ScaledLinear, to_e4m3

SMALL = {"width": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 512}
SCRATCH = 512 << 20
"""Bytes that the calls timed together read at least: several times the cache of a device."""
PAGE = 16
ROW_SIZES = [
    *((1, 512, 1), (1, 1024, 1), (2, 256, 1), (2, 512, 1), (4, 256, 1), (8, 256, 1)),
    *((1, 1024, 2), (1, 2048, 2), (2, 1024, 2), (1, 2048, 4), (1, 4096, 4), (2, 2048, 4)),
]
"""rows, block, warps"""
DECODE_SIZES = [
    *itertools.product((512, 1024, 2048), (64, 128), (4,), (2, 3, 4)),
    *((512, 64, 4, 5), (512, 32, 2, 4), (512, 32, 4, 5), (512, 64, 2, 4), (512, 64, 8, 4), (512, 128, 8, 3), (512, 256, 8, 2)),
]
"""span, tile, warps, stages"""
PROMPT_SIZES = [*itertools.product((64, 128), (4, 8), (2, 3)), (32, 4, 4), (64, 4, 4)]
"""tile, warps, stages"""

Record = dict[str, Any]


def main() -> None:
    args = arguments()
    device = devices.rank_device(devices.pick(), 0)
    devices.set_current(device)
    shape = Shape(ModelConfig(**{**recipe(args.recipe), **(SMALL if args.smoke else {})}), device, args.smoke, args.fp8)
    with torch.inference_mode(), swapped(early, "ALLOWED", args.early and early.ALLOWED):
        for record in itertools.chain(
            matrices(shape, args.rows, args.all),
            *(between(shape, rows) for rows in args.rows),
            *(attention(shape, *sizes, args.all) for sizes in itertools.product(args.rows, args.context)),
            *(prompts(shape, length, args.all) for length in args.prompt),
        ):
            print(json.dumps(record), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="llama-1b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 256], help="sequences of a step")
    parser.add_argument("--context", type=int, nargs="+", default=[256, 1150], help="tokens of each")
    parser.add_argument("--prompt", type=int, nargs="*", default=[1000], help="tokens of prompts, of which a step has 16,384")
    parser.add_argument("--all", action="store_true", help="other sizes of kernels too")
    parser.add_argument("--fp8", action="store_true", help="matrices and pages of 8 bits")
    parser.add_argument("--no-early", dest="early", action="store_false", help="no kernel begins while another one ends")
    parser.add_argument("--smoke", action="store_true", help="tiny numbers in place of the recipe's")
    return parser.parse_args()


class Shape:
    """Of a model's matrices and heads, and where they are timed."""

    def __init__(self, config: ModelConfig, device: torch.device, small: bool, narrow: bool):
        """narrow: matrices and pages of 8 bits."""
        self.config, self.device, self.narrow = config, device, narrow
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.kv_heads = config.kv_heads or config.heads
        self.features = config.head_dim or config.width // config.heads
        self.group = config.heads // self.kv_heads
        self.lines = (config.heads + 2 * self.kv_heads) * self.features
        self.scratch = 1 << 16 if small else SCRATCH
        self.recorder = devices.Recorder(device) if devices.records(device) else None
        self.norm = nn.RMSNorm(config.width, eps=1e-5, device=device, dtype=self.dtype).requires_grad_(False)

    def some(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def pages(self, count: int) -> torch.Tensor:
        made = self.some(count, PAGE, self.kv_heads, self.features)
        return to_e4m3(made) if self.narrow else made

    def matrix(self, rows: int, columns: int) -> nn.Module:
        made = nn.Linear(columns, rows, bias=False, device="meta", dtype=self.dtype).to_empty(device=self.device)
        made.requires_grad_(False).weight.normal_(0.0, 0.02)
        return ScaledLinear(made.weight, None) if self.narrow else made

    def heads(self, rows: int) -> tuple[Heads, torch.Tensor, torch.Tensor, torch.Tensor]:
        """With pages, and a slot for each row."""
        angles = torch.rand(2, rows, self.features // 2, device=self.device)
        pools = [self.pages(-(-rows // PAGE)) for _ in "kv"]
        return Heads(self.group, None, None, *angles), pools[0], pools[1], torch.arange(rows, device=self.device)

    def timed(self, calls: Sequence[Callable[[], object]]) -> float:
        """Seconds of one of the calls, which are made one after the other."""

        def together() -> None:
            for call in calls:
                call()

        together()  # what comes first is compiled
        devices.synchronize(self.device)
        return median_seconds(together if self.recorder is None else self.recorder.record(together), self.device) / len(calls)


def said(what: str, seconds: float, moved: int, **more: Any) -> Record:
    return {"what": what, "us": round(seconds * 1e6, 2), "gb_per_s": round(moved / seconds / 1e9, 1), **more}


@contextmanager
def swapped(module: ModuleType | None, name: str, value: object) -> Iterator[None]:
    """With another value of a module's constant; None: with its own."""
    own = getattr(module, name, None)
    if module is not None and value is not None:
        setattr(module, name, value)
    try:
        yield
    finally:
        if module is not None:
            setattr(module, name, own)


def matrices(shape: Shape, rows_of: Sequence[int], every: bool) -> Iterator[Record]:
    """A single row through each matrix, with what is around it; and rows through the matrix alone as torch does it. The output
    matrix has never 8 bits."""
    config = shape.config
    sizes = {
        "qkv": (shape.lines, config.width),
        "out": (config.width, config.heads * shape.features),
        "up": (2 * config.ffn, config.width),
        "down": (config.width, config.ffn),
        "head": (config.vocab or 0, config.width),
    }
    kernels = one_row_kernels(shape.device)
    for name, (rows, columns) in sizes.items():
        if name == "head" and shape.narrow:
            continue
        moved = rows * columns * (1 if shape.narrow else shape.dtype.itemsize)
        modules = [shape.matrix(rows, columns) for _ in range(max(1, shape.scratch // moved))]
        for count in rows_of:
            many = shape.some(1, count, columns)
            seconds = shape.timed([functools.partial(module, many) for module in modules])
            yield said(f"{name} by torch", seconds, moved, rows=count)
        x = shape.some(1, 1, columns)
        calls = [functools.partial(_row, shape, name, x, shape.some(1, 1, rows), module, shape.heads(1)) for module in modules]
        yield said(name, shape.timed(calls), moved)
        for lines, block, warps in ROW_SIZES if every and kernels is not None else []:
            chosen = {"rows": lines, "block": block, "num_warps": warps}
            with swapped(kernels, "sizes", lambda *_, chosen=chosen: chosen):
                yield said(name, shape.timed(calls), moved, **chosen)


def _row(shape: Shape, name: str, x: torch.Tensor, residual: torch.Tensor, module: nn.Module, heads: tuple[Any, ...]) -> object:
    if name == "qkv":
        return one_row.heads_linear(x, None, shape.norm, module, *heads)
    if name == "up":
        return one_row.gate_linear(x, None, shape.norm, module, "swiglu", 16)
    if name == "head":
        assert isinstance(module, nn.Linear)
        return one_row.vocabulary_linear(x, None, shape.norm, module.weight, None, None)
    return one_row.linear(x, module, residual)


def between(shape: Shape, rows: int) -> Iterator[Record]:
    """What is between the matrices, for many rows."""
    config, size = shape.config, shape.dtype.itemsize
    x, branch, up = shape.some(rows, config.width), shape.some(rows, config.width), shape.some(rows, 2 * config.ffn)
    qkv, heads, logits = shape.some(rows, shape.lines), shape.heads(rows), shape.some(rows, config.vocab or 1)
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "add_norm": (lambda: fused.add_norm(x, branch, shape.norm), 4 * x.numel() * size),
        "turn_and_write": (lambda: fused.turn_and_write(qkv, *heads), 2 * qkv.numel() * size),
        "gate": (lambda: fused.gate(up, "swiglu", 16), 3 * up.numel() * size // 2),
        "best": (lambda: fused.best(logits), logits.numel() * size),
    }
    if shape.narrow:
        given = (x, branch, shape.norm)
        calls["add_norm, rounded"] = (lambda: fused.add_norm_rounded(*given), x.numel() * (3 * size + 1))
        calls["gate, rounded"] = (lambda: fused.gate_rounded(up, "swiglu", 16), up.numel() * (2 * size + 1) // 2)
    for name, (call, moved) in calls.items():
        yield said(name, shape.timed([call] * 64), moved, rows=rows)


def attention(shape: Shape, rows: int, context: int, every: bool) -> Iterator[Record]:
    """Of one new token of each sequence, over pages in random order."""
    moved = 2 * rows * context * shape.kv_heads * shape.features * (1 if shape.narrow else shape.dtype.itemsize)
    width = -(-context // PAGE)
    layers = max(1, min(64, shape.scratch // moved))
    pools = [[shape.pages(rows * width) for _ in "kv"] for _ in range(layers)]
    tables = torch.randperm(rows * width).view(rows, width).to(torch.int32).to(shape.device)
    slots = torch.zeros(rows, dtype=torch.int64, device=shape.device)
    lengths = torch.full((rows,), context, dtype=torch.int32, device=shape.device)
    q = shape.some(rows, shape.config.heads, shape.features)

    def calls(span: int) -> list[Callable[[], object]]:
        pages = Singles(slots, tables, lengths, span)
        return [functools.partial(paged_attention, q, keys, values, pages) for keys, values in pools]

    given = {"rows": rows, "context": context}
    yield said("decode", shape.timed(calls(SPAN)), moved, **given)
    for span, *sizes in DECODE_SIZES if every else []:
        told = {"what": "decode", **given, "span": span}
        yield from of_sizes(shape, "DECODE", sizes, told, lambda span=span: said("decode", shape.timed(calls(span)), moved))  # type: ignore[misc]


def of_sizes(shape: Shape, name: str, sizes: Sequence[int], told: Record, timed: Callable[[], Record]) -> Iterator[Record]:
    """What `timed` gives with other sizes (tile, warps, stages) of the attention that has them under this name."""
    kernels = paged_kernels(shape.device)
    if kernels is None:
        return
    chosen = dict(zip(("tile", "num_warps", "num_stages"), sizes, strict=True))
    with swapped(kernels, name, chosen):
        try:
            yield {**timed(), **told, **chosen}
        except Exception as error:  # more shared memory than there is, for one
            yield {**told, **chosen, "failed": str(error).splitlines()[0][:100]}


def prompts(shape: Shape, length: int, every: bool) -> Iterator[Record]:
    """Of prompts of so many tokens, none of which is known, over pages in random order."""
    rows, width = max(1, (64 if shape.scratch < SCRATCH else 16384) // length), -(-length // PAGE)
    operations = 2 * rows * length**2 * shape.kv_heads * shape.group * shape.features
    pools = [[shape.pages(rows * width) for _ in "kv"] for _ in range(4)]
    tables = torch.randperm(rows * width).view(rows, width).to(torch.int32).to(shape.device)
    pages = Pages(
        torch.zeros(rows * length, dtype=torch.int64, device=shape.device), tables, (length,) * rows, (length,) * rows
    )
    q = shape.some(rows * length, shape.config.heads, shape.features)
    calls = [functools.partial(paged_attention, q, keys, values, pages) for keys, values in pools]
    told = {"what": "prompt", "tokens": length}

    def timed() -> Record:
        us = shape.timed(calls) * 1e6
        return {**told, "us": round(us, 2), "tflop_per_s": round(operations / us / 1e6, 1)}

    yield timed()
    for sizes in PROMPT_SIZES if every else []:
        yield from of_sizes(shape, "PROMPT", sizes, told, timed)


if __name__ == "__main__":
    main()
