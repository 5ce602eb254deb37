"""Recompute of blocks in backward instead of keeping what they computed.

With B rows, S positions, D width and w bytes an element, a block that is recomputed as a whole keeps its input alone,

    B S D w  (and 4 B S of dropout keys)

for one more forward in backward: a third more arithmetic. "selective" keeps the outputs of its matrix products and of attention
beside it, and recomputes norms, activation, rotation, dropout and sums, which cost memory traffic but hardly any arithmetic.
What is kept may wait in host memory (`offload_activations`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.autograd.graph import increment_version
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.errors import Finding, LayoutError
from meshwright.models.layers import Layer
from meshwright.parallel.batch_norm import batch_norms, kept_statistics
from meshwright.parallel.blocks import find_blocks
from meshwright.parallel.offload_activations import Host, offload
from meshwright.spec.plan import Plan

__all__ = ["KEPT", "recompute_blocks"]

KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "torch_attn::_varlen_attn",
        "meshwright::all_sum",
        "meshwright::scatter_sum",
        "meshwright::exchange",
        "meshwright::ring_attention",
        "meshwright::grouped_linear",
        "meshwright::deal",
        "meshwright::fp8_multiply",
    }
)
"""Operators whose outputs "selective" keeps: what torch dispatches for linear layers and attention on CPU and accelerators, the
sums over tensor-parallel ranks behind them, the exchanges of context-parallel ones, the products of experts, and the rows that
came from other ranks."""


def recompute_blocks(model: nn.Module, plan: Plan) -> None:
    """Wraps the blocks of the model (`find_blocks`) in place as the plan says; call it before they are compiled.

    Blocks 0, n, 2n, ... are recomputed, with n = plan.recompute_every. The results are those without it, bit for bit in eager
    execution. Raises LayoutError for a model without blocks.
    """
    if plan.recompute == "none" and not plan.offload_activations:
        return
    blocks = find_blocks(model).modules
    if not blocks:
        key = "recompute" if plan.recompute != "none" else "offload_activations"
        what = f"{getattr(plan, key)!r} is about the repeated blocks of a model, and this one has none"
        raise LayoutError(findings=[Finding(f"plan.{key}", what, "Leave it out")])
    config = getattr(model, "config", None)
    if plan.recompute != "none" and getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]  # transformers': a block that runs again would lengthen its cache
    host = Host()
    for number, block in enumerate(blocks):
        if block is None:
            continue
        if plan.recompute != "none" and number % plan.recompute_every == 0:
            block.forward = _recomputed(block, plan.recompute)
        if plan.offload_activations:
            offload(block, host)


def _draws(block: nn.Module) -> bool:
    """Whether a block may draw from a generator, whose state recompute must then go back to. Our own layers do so in the
    dropout of attention only; of others we cannot know."""
    return not isinstance(block, Layer) or getattr(block.attention, "dropout", 1.0) > 0.0


def _recomputed(block: nn.Module, how: str) -> Callable[..., Any]:
    forward = block.forward
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": _draws(block)}
    contexts = functools.partial(create_selective_checkpoint_contexts, _keep) if how == "selective" else _no_contexts
    if batch_norms(block):
        options["context_fn"] = lambda: _counting_once(block, *contexts())
    elif how == "selective":
        options["context_fn"] = contexts

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **kwargs, **options)

    return recomputed


def _no_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), nullcontext()


def _counting_once(
    block: nn.Module, first: AbstractContextManager[Any], again: AbstractContextManager[Any]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a forward and of its repetition, in which running statistics stay what they are."""

    @contextmanager
    def repeated() -> Iterator[None]:
        with kept_statistics(block), again:
            yield

    return first, repeated()


def _keep(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operator.name()
    if name.startswith("c10d::") and name.endswith("_"):
        # it writes into its first argument and does not say so: a kept output would be changed, and used again, unnoticed
        for tensor in args[0] if isinstance(args[0], list | tuple) else args[:1]:
            increment_version(tensor)
    return CheckpointPolicy.MUST_SAVE if name in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
