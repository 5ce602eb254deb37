"""Compilation of the repeated blocks of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.errors import Finding, LayoutError
from meshwright.parallel.blocks import find_blocks

__all__ = ["compile_blocks", "compile_errors"]

_BACKENDS = {"eager": "aot_eager", "inductor": "inductor"}

VARIANTS = 64
"""Compiled versions a block may have: shapes x (training, evaluation). Past torch's own 8 it would raise."""


def compile_blocks(model: nn.Module, how: str, backend: str | Callable[..., Any] | None = None, *, whole: bool = True) -> None:
    """Compiles each block of the model (`find_blocks`) in place; embedding and head, whose shapes vary, are left.

    how: `off`, `eager` (traced and run by aot_eager: the bits of eager execution) or `inductor`. Blocks of one class
    share their compiled code. Whole graphs and static shapes only: a silent break would cost what compilation gives.
    whole: False where a block has a part that cannot be compiled (rows that travel between ranks), around which it breaks.
    backend: another compiler than the one that `how` names.
    Raises LayoutError for a model without blocks; a block that does not compile raises it at its first call.
    """
    if how == "off":
        return
    blocks = find_blocks(model).here
    if not blocks:
        raise LayoutError(findings=[_finding(f"{how!r} compiles the repeated blocks of a model, and this one has none")])
    torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, VARIANTS)
    for block in blocks:
        compiled = torch.compile(block.forward, backend=backend or _BACKENDS[how], fullgraph=whole, dynamic=False)
        block.forward = _named(compiled, how)


def _named(compiled: Callable[..., Any], how: str) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        with compile_errors(how):
            return compiled(*args, **kwargs)

    return forward


@contextmanager
def compile_errors(how: str) -> Iterator[None]:
    """Turns what the compiler raises, in forward or backward, into a LayoutError that says how to go on without it."""
    try:
        yield
    except Exception as error:
        if how == "off" or not type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch._functorch")):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise LayoutError(findings=[_finding(f"a block does not compile with {how!r}: {reason}")]) from error


def _finding(what: str) -> Finding:
    return Finding("compile", what, "Use compile: off")
