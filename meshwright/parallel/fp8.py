"""Training whose linear layers multiply in 8 bits (`kernels.fp8`): `precision: fp8`."""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.distributed.device import fp8_findings
from meshwright.errors import Finding, LayoutError
from meshwright.kernels.fp8 import ALIGNED, fp8_linear
from meshwright.models.trunk import Trunk
from meshwright.spec.plan import Plan

__all__ = ["Fp8Linear", "multiply_in_fp8"]

RECIPE = "e4m3, dynamic scales by row, in the gradients of weights by tensor"


class Fp8Linear(nn.Linear):
    """A linear layer that is trained in 8 bits. Where no gradient is asked for it multiplies in the dtype of its weights, so
    that what is evaluated is what is saved and served."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        return fp8_linear(x, self.weight, self.bias)


def multiply_in_fp8(model: nn.Module, plan: Plan, device: torch.device) -> str:
    """Puts an `Fp8Linear` in the place of each `nn.Linear` inside of the blocks of one of our models: the same parameters,
    by the same names; returns a note for the log, empty for another precision. Call it before blocks are recomputed or
    compiled. The layers outside (embedding, head, classifier), routers and experts stay as they are, and so does one whose
    sizes are no multiples of 16.

    Raises LayoutError for a device without such products, for a model that is not one of ours, and where there is nothing to
    convert.
    """
    if plan.precision != "fp8":
        return ""
    if findings := fp8_findings(device):
        raise LayoutError(findings=findings)
    if not isinstance(model, Trunk):
        what = "fp8, but which layers of a model may multiply in it is known of Meshwright's own models only"
        raise LayoutError(findings=[Finding("plan.precision", what, "Use bf16")])
    left: Counter[str] = Counter()
    converted = 0
    for block in model.layers:  # None where another stage has it
        for name, linear in [] if block is None else list(block.named_modules()):
            if type(linear) is not nn.Linear:
                continue
            if linear.in_features % ALIGNED or linear.out_features % ALIGNED:
                left[f"{name} ({linear.out_features} x {linear.in_features})"] += 1
                continue
            parent, _, leaf = name.rpartition(".")
            setattr(block.get_submodule(parent), leaf, _converted(linear))
            converted += 1
    if not converted:
        what = f"fp8, but no linear layer of the blocks has sizes that are multiples of {ALIGNED}: {', '.join(left)}"
        raise LayoutError(findings=[Finding("plan.precision", what, "Use bf16, or other sizes in the model")])
    note = f"{converted} linear layers multiply in fp8 ({RECIPE}), everything else in bf16"
    if left:
        note += f"; among it, no multiples of {ALIGNED}: {', '.join(left)}"
    return note + ("; emulated on this device: slower than bf16" if device.type == "cpu" else "")


def _converted(linear: nn.Linear) -> Fp8Linear:
    has_bias = linear.bias is not None
    made = Fp8Linear(linear.in_features, linear.out_features, has_bias, device="meta", dtype=linear.weight.dtype)
    made.weight, made.bias = linear.weight, linear.bias
    return made.train(linear.training)
