"""Imported by the server that ranks are forked from: one tiny compilation, so that the second that a process's first one takes,
nearly all of it for imports, is spent once and not by every rank.

Not where torch was built for an accelerator: there autograd, which a compilation runs too, is of no use in a fork after it."""

from __future__ import annotations

import torch


def _double(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sum()


if not torch.backends.cuda.is_built():
    torch.compile(_double, backend="aot_eager", fullgraph=True)(torch.ones(2, requires_grad=True)).backward()
    torch.compiler.reset()
