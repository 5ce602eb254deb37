"""Imported by the server that ranks are forked from: one tiny compilation, so that the second that a process's first one takes,
nearly all of it for imports, is spent once and not by every rank.

Forward alone where torch was built for an accelerator: there a backward starts threads, after which no fork can run one."""

from __future__ import annotations

import torch


def _double(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sum()


_compiled = torch.compile(_double, backend="aot_eager", fullgraph=True)
_result = _compiled(torch.ones(2, requires_grad=True))
if torch.accelerator.current_accelerator() is None:
    _result.backward()
torch.compiler.reset()
