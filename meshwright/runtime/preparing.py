"""The parts of `Run.parallelize`: what is checked and decided before a module is laid out, and how it computes afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.distributed import device as devices
from meshwright.distributed.world import Ranks
from meshwright.errors import ConfigError, Finding, LayoutError
from meshwright.parallel.own_optimizer import Labels
from meshwright.parallel.precision import working_dtype
from meshwright.runtime.training import Cast
from meshwright.runtime.user_plan import Given, precision_of, resolve_plan, splits
from meshwright.spec.plan import Plan, read_plan

__all__ = [
    "are_loaders",
    "as_given",
    "cast_of",
    "check_arguments",
    "dtype_of",
    "forward_under",
    "keys_of",
    "listed",
    "loaders_of",
    "owners",
    "plan_for",
    "share_values",
]


def check_arguments(
    model: Any,
    optimizers: Sequence[Any],
    loaders: Sequence[Any],
    batch: str,
    on_nonfinite: str,
    micro_batch: int | None,
    accumulate: int,
    clip: float,
    precision: str | None,
    known_models: Sequence[nn.Module] = (),
    batch_norm: str = "synchronised",
) -> None:
    """Raises ConfigError with everything that is wrong with the arguments of `parallelize`."""
    findings = []
    if not isinstance(model, nn.Module):
        findings.append(Finding("model", f"is no torch.nn.Module but a {type(model).__name__}"))
    elif any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        findings.append(Finding("model", "has parameters on the meta device, which have no values", "Build it on the CPU"))
    elif model in known_models:
        findings.append(Finding("model", "was made parallel before", "Give all its optimizers in one call"))
    if not optimizers or not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
        findings.append(Finding("optimizer", "is no torch.optim.Optimizer", "Give one, or several as a list or dict"))
    for each in loaders:
        if not hasattr(each, "__iter__") and not hasattr(each, "__getitem__"):
            what = f"is no iterable of batches but a {type(each).__name__}"
            findings.append(Finding("loader", what, "Give a DataLoader, several as a list or dict, or None"))
    for name, value, known in (
        ("batch", batch, ("global", "rank")),
        ("on_nonfinite", on_nonfinite, ("stop", "skip")),
        ("batch_norm", batch_norm, ("synchronised", "local")),
        ("precision", precision, (None, "fp32", "fp64", "bf16", "fp16")),
    ):
        if value not in known:
            findings.append(Finding(name, f"{value!r} is not one of {', '.join(str(each) for each in known if each)}"))
    for name, number in (("micro_batch", 1 if micro_batch is None else micro_batch), ("accumulate", accumulate)):
        if not isinstance(number, int) or number < 1:
            findings.append(Finding(name, f"{number!r} is no whole number of at least 1"))
    if isinstance(clip, bool) or not isinstance(clip, int | float) or not clip >= 0:
        findings.append(Finding("clip", f"{clip!r} is no number of at least 0"))
    if findings:
        raise ConfigError(findings=findings)


def owners(model: nn.Module, labels: Labels, notes: list[str]) -> dict[int, int]:
    """Label by the id of each trainable parameter; what no optimizer has is frozen, as it would never change."""
    label = labels.by_parameter()
    mine = {id(parameter): name for name, parameter in model.named_parameters()}
    strange = [p for group in labels.groups for p in group["params"] if id(p) not in mine]
    if strange:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in strange[:8])
        what = f"holds {len(strange)} tensors that are no parameters of the model: of shape {shapes}"
        fix = "Make it from model.parameters(), after the last change to the model"
        raise ConfigError(findings=[Finding("optimizer", what, fix)])
    left = [parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) not in label]
    for parameter in left:
        parameter.requires_grad_(False)
    if left:
        names = ", ".join(mine[id(parameter)] for parameter in left[:4]) + (", ..." if len(left) > 4 else "")
        notes.append(f"in no optimizer, so they stay as they are: {names}")
    return label


def plan_for(
    model: nn.Module,
    plan: Given,
    kept: str,
    asked: bool,
    micro_batch: int | None,
    optimizers: Sequence[Any],
    ranks: Ranks,
) -> Plan:
    """kept: precision of the parameters, or the one that was `asked` for."""
    sgd = all(type(each).__name__ == "SGD" and not each.defaults.get("momentum") for each in optimizers)
    keys = keys_of(plan)
    own = not asked and (isinstance(plan, Plan) or "precision" in keys)
    return resolve_plan(
        plan,
        parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        world=ranks.size,
        device_bytes=None if ranks.device.type == "cpu" else devices.memory_total(ranks.device)[1],
        weights=kept if kept in ("fp64",) else "fp32",
        precision=None if own else kept,
        micro_batch=micro_batch,
        moments=0 if sgd else 2,
    )


def dtype_of(model: nn.Module, plan: Plan, precision: str | None, low_weights: bool | None) -> torch.dtype:
    """Of the working weights. precision, low_weights: as given to `Run.parallelize`."""
    if plan.precision in ("fp32", "fp64"):
        return working_dtype(plan.precision)
    low = (plan.layout.zero == 3 or splits(plan)) if low_weights is None else low_weights
    low |= precision is None and precision_of(model) == plan.precision
    return working_dtype(plan.precision) if low else torch.float32


def share_values(model: nn.Module, ranks: Ranks) -> None:
    """Parameters and buffers of rank 0 on every rank: a script that seeds nothing starts from others on each."""
    if ranks.size == 1:
        return
    on_cpu = ranks.backend == "gloo"
    group = ranks.control if on_cpu else ranks.group
    for tensor in (*model.parameters(), *model.buffers()):
        sent = tensor.detach().to("cpu" if on_cpu else ranks.device).contiguous()
        dist.broadcast(sent, src=0, group=group)
        tensor.data.copy_(sent)


def keys_of(plan: Any) -> frozenset[str]:
    """Keys that a plan given in parts has; none for a name or a whole plan."""
    if isinstance(plan, Mapping):
        return frozenset(plan)
    with contextlib.suppress(LayoutError):
        if isinstance(plan, str | Path) and (str(plan).lstrip().startswith("{") or Path(plan).is_file()):
            return frozenset(read_plan(str(plan)))
    return frozenset()


def listed(given: Any) -> list[Any]:
    """One or several, as a list."""
    if given is None:
        return []
    if isinstance(given, Mapping):
        return list(given.values())
    return list(given) if isinstance(given, list | tuple) else [given]


def are_loaders(given: Any) -> bool:
    """Whether these are several loaders, and not one that is a list of ready-made batches, which can be iterated too."""
    if isinstance(given, Mapping):
        return True
    return isinstance(given, list | tuple) and bool(given) and not any(_may_be_batch(each) for each in given)


def _may_be_batch(value: Any) -> bool:
    whole = isinstance(value, torch.Tensor | str | bytes | Mapping | list | tuple) or dataclasses.is_dataclass(value)
    return whole or hasattr(value, "__array__") or not hasattr(value, "__iter__")


def loaders_of(given: Any) -> list[Any]:
    """One or several, as a list."""
    return listed(given) if given is None or are_loaders(given) else [given]


def as_given(given: Any, made: Sequence[Any], several: bool = True) -> Any:
    """What was made of several, as they were given. several: false for one that is a list itself."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        return dict(zip(given, made, strict=True))
    return type(given)(made) if several and isinstance(given, list | tuple) else made[0]


def cast_of(device_type: str, precision: str) -> Cast:
    """The context in which a module of this precision computes."""
    if precision not in ("bf16", "fp16"):
        return nullcontext

    def cast() -> AbstractContextManager[object]:
        return torch.autocast(device_type, working_dtype(precision))

    return cast


def forward_under(model: nn.Module, cast: Cast) -> None:
    """The module computes under `cast` wherever it is called, in evaluation too."""
    inner = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with cast():
            return inner(*args, **kwargs)

    model.forward = forward
