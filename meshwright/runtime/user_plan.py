"""The plan for a user's own module: a strategy by name, parts of a plan, or the first that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.errors import Finding, LayoutError
from meshwright.plan.memory import state_bytes
from meshwright.runtime.choose import bucket_mib, fill_layout, layout_name
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, check_keys, read_plan
from meshwright.spec.plan_rules import refused

__all__ = ["STRATEGIES", "Given", "precision_of", "resolve_plan", "splits"]

STRATEGIES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
"""Names for `plan=`: the ZeRO stage over all ranks. On one rank each of them is plain training."""

STATES = 0.6
"""Share of a device that weights, gradients and optimizer state may fill where nothing is known of the activations."""

Given = str | Path | Mapping[str, Any] | Plan

_PRECISIONS = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}


def precision_of(model: nn.Module) -> str:
    """Of a plan that keeps the trainable parameters' dtype. Raises LayoutError where they have several."""
    found = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad and parameter.is_floating_point()}
    if len(found) > 1:
        shown = " and ".join(sorted(str(dtype) for dtype in found))
        fix = "Give precision=, or convert the model to one of them"
        raise LayoutError(findings=[Finding("model", f"its trainable parameters are {shown}", fix)])
    return _PRECISIONS.get(found.pop() if found else torch.float32, "fp32")


def splits(plan: Plan) -> bool:
    """Whether ranks have parts of the model or of its rows, so that it has to be one of ours."""
    return plan.layout.tp * plan.layout.pp * plan.layout.cp > 1


def resolve_plan(
    given: Given,
    *,
    parameters: int,
    world: int,
    device_bytes: int | None,
    weights: str,
    precision: str | None,
    micro_batch: int | None,
    moments: int = 2,
) -> Plan:
    """given: "auto", a name of STRATEGIES, JSON text, a file, a mapping with parts of a plan, or a whole one. weights:
    precision of the working weights. device_bytes: None where memory is no limit that is known. Raises LayoutError with all
    that is wrong.
    """
    if isinstance(given, Plan):
        plan = given
    else:
        plan = _from_parts(given, parameters, world, device_bytes, weights, moments)
    changed: dict[str, Any] = {} if precision is None else {"precision": precision}
    changed |= {} if micro_batch is None else {"micro_batch": micro_batch}
    plan = replace(plan, **changed)
    findings = refused(plan)
    if plan.precision == "fp8":
        what = "fp8, which runs of `meshwright train` have: which layers may multiply in it is not known of a module"
        findings.append(Finding("plan.precision", what, "Use bf16"))
    if not findings and plan.layout.world != world:
        what = f"is for {plan.layout.world} ranks, but {world} were started"
        findings.append(Finding("plan.layout", what, f"Start {plan.layout.world}, or leave the data axes out"))
    if findings:
        raise LayoutError(findings=findings)
    return plan


def _from_parts(given: Any, parameters: int, world: int, device_bytes: int | None, weights: str, moments: int) -> Plan:
    base = Plan(bucket_mib=bucket_mib(parameters, weights))
    if given == "auto":
        layout = _first_that_fits(parameters, world, device_bytes, weights, moments)
        return replace(base, layout=layout, reason=layout_name(layout))
    if isinstance(given, str) and given in STRATEGIES:
        zero = STRATEGIES[given]
        layout = Layout(dp_shard=world, zero=zero) if zero and world > 1 else Layout(dp_replicate=world)
        return replace(base, layout=layout, reason=given)
    if isinstance(given, Mapping):
        parts = dict(given)
        check_keys(parts, "plan")
    else:
        text = str(given)
        if not text.lstrip().startswith("{") and not Path(text).exists():
            known = ", ".join(["auto", *STRATEGIES])
            fix = f"Use {known}, a mapping, JSON text, or a file"
            raise LayoutError(findings=[Finding("plan", f"{text!r} is no strategy and no file", fix)])
        parts = read_plan(text)
    layout = fill_layout(parts.pop("layout", {}), world)
    if "split" in parts:
        parts["split"] = tuple(parts["split"])
    return replace(base, layout=layout, reason="given", **{key: value for key, value in parts.items() if key != "reason"})


def _first_that_fits(parameters: int, world: int, device_bytes: int | None, weights: str, moments: int) -> Layout:
    """Data parallelism, then ZeRO-1, 2, 3. `runtime.choose.layouts` begins with ZeRO-1, for it knows model and optimizer; an
    optimizer of the user's own may need whole tensors, which plain data parallelism alone always has."""
    plain = Layout(dp_replicate=world)
    if device_bytes is None or world == 1:
        return plain
    for layout in (plain, *(Layout(dp_shard=world, zero=zero) for zero in (1, 2, 3))):
        if state_bytes(parameters, weights, layout, moments=moments).total <= STATES * device_bytes:
            return layout
    return Layout(dp_shard=world, zero=3)
