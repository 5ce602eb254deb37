"""Initial values that do not depend on the layout, nor on the machine.

A value is a pure function of (seed, logical unfused name, place in the logical tensor). Rows are drawn in blocks of a
size that follows from the shape alone, each from a stream of its own, so that a rank draws the rows it holds and no
others. The streams are numpy's Philox (counter-based: the key is the tensor, the counter the block) with the ziggurat
of `standard_normal`. torch's own normal_ rounds differently with and without AVX2; this does not.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from meshwright.errors import ConfigError, Finding
from meshwright.spec.box import Box
from meshwright.spec.model_table import expert_name, logical_name
from meshwright.spec.parameters import Rule, Table
from meshwright.spec.placement import Placement

__all__ = ["CONSTRUCTOR", "fill", "initialize", "materialise", "values_of"]

CONSTRUCTOR = "constructor"
"""`Rule.init` of a parameter whose values are those that its module's own constructor gives it."""

_BLOCK_ROWS, _BLOCK_VALUES = 16, 4096
_CHUNK_VALUES = 2**24
"""Values drawn before they are copied to the device: bounds the memory beside the model."""
_THREADED_VALUES = 2**20


def _key(*parts: object) -> list[int]:
    """128 bits from the text of the parts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=16).digest()
    return [int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")]


def _normal_rows(name: str, columns: int, start: int, stop: int, seed: int) -> np.ndarray:
    """Rows [start, stop) of the standard normal values of a logical tensor, float32 [rows, columns]."""
    key = _key(seed, name)
    block = max(_BLOCK_ROWS, -(-_BLOCK_VALUES // max(columns, 1)))
    out = np.empty((stop - start, columns), dtype=np.float32)

    def draw(index: int) -> None:
        generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, index]))
        first, last = index * block, (index + 1) * block
        if start <= first and last <= stop:
            generator.standard_normal(dtype=np.float32, out=out[first - start : last - start])
            return
        values = generator.standard_normal((min(last, stop) - first, columns), dtype=np.float32)  # a prefix of the block
        low = max(first, start)
        out[low - start : min(last, stop) - start] = values[low - first :]

    blocks = range(start // block, -(-stop // block)) if stop > start else range(0)
    workers = min(torch.get_num_threads(), len(blocks))
    if workers > 1 and out.size >= _THREADED_VALUES:  # every block has its own stream: the order of work is free
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(draw, blocks))
    else:
        for index in blocks:
            draw(index)
    return out


def _scaled_rows(rule: Rule, name: str, columns: int, start: int, stop: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(_normal_rows(name, columns, start, stop, seed)).mul_(rule.std)


def _fused_rows(rule: Rule, name: str, columns: int, start: int, stop: int, seed: int) -> torch.Tensor:
    """Rows of a fused parameter: the logical rows of all groups that it touches, interleaved, then cut."""
    assert rule.fused is not None
    size = rule.fused.group_rows
    first, last = start // size, -(-stop // size)
    out = torch.empty(last - first, size, columns)
    offset = 0
    for part in rule.fused.parts:
        logical = logical_name(name, part.name)
        drawn = _scaled_rows(rule, logical, columns, first * part.rows, last * part.rows, seed)
        out[:, offset : offset + part.rows] = drawn.view(last - first, part.rows, columns)
        offset += part.rows
    return out.view(-1, columns)[start - first * size : stop - first * size]


def fill(rule: Rule, name: str, shape: Sequence[int], rows: slice | None, seed: int) -> torch.Tensor:
    """Initial values of a parameter, float32 on the CPU, [rows, *shape[1:]].

    rule   how it is filled; a fused parameter gets the values of its parts under their logical names
    name   of the parameter as a whole (`layers.3.attention.qkv.weight`), or a logical one with an unfused rule
    shape  of the whole parameter, whatever part of it is asked for
    rows   slice of the first dimension with step 1; None: all. The same rows have the same values whoever asks
    """
    start, stop, step = (rows or slice(None)).indices(shape[0])
    if step != 1:
        raise ValueError(f"rows of {name} must be one run, not step {step}")
    wanted = (max(stop - start, 0), *shape[1:])
    if rule.init == "ones":
        return torch.ones(wanted)
    if rule.init == "zeros":
        return torch.zeros(wanted)
    if rule.init != "normal":
        raise ValueError(f"{name}: no values can be drawn for init {rule.init!r}")
    if rule.experts:
        one = replace(rule, experts=False)
        each = [fill(one, expert_name(name, expert), shape[1:], None, seed) for expert in range(start, start + wanted[0])]
        return torch.stack(each) if each else torch.empty(wanted)
    draw = _scaled_rows if rule.fused is None else _fused_rows
    return draw(rule, name, math.prod(shape[1:]), start, start + wanted[0], seed).view(wanted)


def materialise(model: nn.Module, device: torch.device | str, dtype: torch.dtype | None = None) -> None:
    """Give every parameter and buffer memory on `device`, floating ones in `dtype`; a parameter used twice stays one.

    What already has memory keeps its values; what comes from meta has none yet.
    """
    device = torch.device(device)
    made: dict[int, torch.Tensor] = {}
    alive: list[torch.Tensor] = []  # keeps ids from being used again

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            if tensor.is_meta:
                new = torch.empty_like(tensor, device=device, dtype=kind)
            else:
                new = tensor.detach().to(device, kind)
            if isinstance(tensor, nn.Parameter):
                same = new.data_ptr() == tensor.data_ptr() and not tensor.is_meta
                new = tensor if same else nn.Parameter(new, requires_grad=tensor.requires_grad)
            made[id(tensor)] = new
            alive.append(tensor)
        return made[id(tensor)]

    for module in model.modules():
        own: dict[str, torch.Tensor] = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        own |= dict(module.named_buffers(recurse=False, remove_duplicate=False))
        for name, tensor in own.items():
            setattr(module, name, place(tensor))


def _tie(model: nn.Module, table: Table) -> None:
    """Make the other name of every tie the canonical parameter again (`to_empty` and sharding may have parted them).

    A part of a model may hold one side of a tie only.
    """
    held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for canonical, other in table.ties:
        if canonical not in held or other not in held:
            continue
        owner, _, leaf = other.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_parameter(canonical))


@torch.no_grad()
def _copy_constructed(model: nn.Module, remake: Callable[[], nn.Module], seed: int) -> None:
    """Values of a registered model: what its constructor makes on a CPU under a fixed seed."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(_key(seed, "constructor")[0] >> 1)
        source = remake()
    for name, parameter in source.named_parameters():
        model.get_parameter(name).copy_(parameter)
    for name, buffer in source.named_buffers():
        model.get_buffer(name).copy_(buffer)


@torch.no_grad()
def initialize(
    model: nn.Module,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    placements: Mapping[str, Placement] | None = None,
) -> None:
    """Fill a model of `build`, in place, with the values of (seed, logical name); parameters land on `device`.

    dtype: of floating parameters and buffers; default: as built. Values are drawn in fp32 and then cast. placements: which
    block of which logical parameter a parameter of this model is, by its name here; it gets the values of that block, and
    no others are drawn than those of its rows. One that is absent is whole, under its own name.
    Raises ConfigError for a module on meta that `build` did not make and that brings no table.
    """
    table = getattr(model, "table", None)
    remake = getattr(model, "remake", None)
    if remake is None and not isinstance(table, Table):
        missing = [name for name, p in model.named_parameters() if p.is_meta]
        if missing:
            what = f"nothing says how {missing[0]} and {len(missing) - 1} more parameters are filled"
            fix = "Register the model with register_model, or give the module a `table` (spec.parameters.Table)"
            raise ConfigError(findings=[Finding(type(model).__name__, what, fix)])
        materialise(model, device, dtype)
        return
    assert isinstance(table, Table)
    _tie(model, table)
    materialise(model, device, dtype)
    if remake is not None:
        _copy_constructed(model, remake, seed)
    for name, parameter in model.named_parameters():
        placement = (placements or {}).get(name) or Placement.whole(name, parameter.shape)
        rule = table.rule(placement.name)
        if rule.init != CONSTRUCTOR:
            _fill_block(parameter, rule, placement, seed)


def values_of(table: Table, placement: Placement, seed: int) -> torch.Tensor:
    """What `initialize` gives to a parameter of that placement: float32 [*placement.box.shape] on the CPU."""
    values = torch.empty(placement.box.shape)
    _fill_block(values, table.rule(placement.name), placement, seed)
    return values


def _fill_block(tensor: torch.Tensor, rule: Rule, placement: Placement, seed: int) -> None:
    """Draws the rows of the block, some at a time, and keeps of each what lies in the block."""
    name, shape, box = placement.name, placement.shape, placement.box
    if not shape:
        tensor.copy_(fill(rule, name, (1,), None, seed)[0])
        return
    inner = box.inside(Box.whole(shape))[1:]
    unit = 1 if rule.experts else _BLOCK_ROWS if rule.fused is None else rule.fused.group_rows
    rows = max(1, _CHUNK_VALUES // max(1, math.prod(shape[1:])) // unit) * unit
    for start in range(0, box.shape[0], rows):
        stop = min(start + rows, box.shape[0])
        drawn = fill(rule, name, shape, slice(box.offset[0] + start, box.offset[0] + stop), seed)
        tensor[start:stop].copy_(drawn[(slice(None), *inner)])
