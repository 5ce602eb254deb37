"""A user's module for layouts that split it: what the engine trains, which optimizer group each weight is in, and the way back.

`tp`, `pp` and `cp` need to know what a parameter is, and where positions meet. `models.adopt` makes one of our models of a
transformer, whose fused parameters hold several of the user's; the user's own optimizer goes on with those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from meshwright.distributed.world import Ranks
from meshwright.errors import ConfigError, Finding, LayoutError
from meshwright.models.adopt import Adopted, adopt
from meshwright.models.trunk import Trunk
from meshwright.parallel.engine import Engine
from meshwright.parallel.own_optimizer import OwnOptimizer
from meshwright.parallel.whole import whole_weights
from meshwright.runtime.adopted import AdoptedModule
from meshwright.runtime.batches import Split
from meshwright.runtime.preparing import cast_of, forward_under
from meshwright.runtime.training import Training
from meshwright.runtime.user_plan import splits
from meshwright.spec.parameters import Table
from meshwright.spec.plan import Plan
from meshwright.spec.plan_rules import refused_for

__all__ = ["Subject", "give_back", "original_state", "subject_of", "training_of"]


@dataclass(frozen=True, eq=False)
class Subject:
    """model: what the engine trains. given: what the script goes on with. table: of the model's parameters. label: number of
    the optimizer group of a parameter, by it and its logical name. split: over tensor, pipeline or context ranks."""

    model: nn.Module
    given: nn.Module
    table: Table | None
    label: Callable[[nn.Parameter, str], int]
    split: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def adopted(self) -> Adopted | None:
        return self.given.adopted if isinstance(self.given, AdoptedModule) else None


def subject_of(
    model: nn.Module, plan: Plan, table: Table | None, label: Mapping[int, int], low: bool | None, seed: int
) -> Subject:
    """label: by the id of the user's parameters. low: as `low_weights` of `Run.parallelize`. Where the plan splits it a module
    that is none of ours is adopted, and from then on lies in host memory, as it was. Raises LayoutError where that cannot be,
    and ConfigError where parameters that become one are in several optimizer groups.
    """
    if not splits(plan):
        return Subject(model, model, table, lambda parameter, name: label[id(parameter)])
    if low is False and plan.precision in ("bf16", "fp16"):
        what = f"false, and with tp, pp or cp the weights are {plan.precision}, with fp32 masters"
        raise LayoutError(findings=[Finding("low_weights", what, "Leave it out")])
    if isinstance(model, Trunk) or table is not None:
        names = {id(p): name for name, p in model.named_parameters()}
        named = {names[key]: number for key, number in label.items()}
        found = table or model.table
        assert isinstance(found, Table)
        return Subject(model, model, found, lambda parameter, name: named[name], split=True)
    adopted = adopt(model.to("cpu"))
    findings = refused_for(plan, adopted.config, adopted.task, 2 * plan.layout.tp * plan.layout.cp)  # lengths: at the forward
    if findings:
        raise LayoutError(findings=findings)
    groups = _groups(adopted, label)
    said = [note for note in adopted.notes if "dropout_key" not in note]
    if adopted.config.dropout:
        said.append(f"dropout {adopted.config.dropout} is drawn by step, row and position, not from torch's generator")
    given = AdoptedModule(adopted, seed)
    by_name: Callable[[nn.Parameter, str], int] = lambda parameter, name: groups[name]
    ours = adopted.model.table
    assert isinstance(ours, Table)
    return Subject(adopted.model, given, ours, by_name, True, tuple(said))


def _groups(adopted: Adopted, label: Mapping[int, int]) -> dict[str, int]:
    """Group of each of our parameters: that of the user's parameters in it."""
    theirs = dict(adopted.origin.named_parameters(remove_duplicate=False))
    members: dict[str, dict[int, list[str]]] = {}
    for piece in adopted.weights.pieces:
        number = label[id(theirs[piece.theirs])]
        members.setdefault(piece.ours, {}).setdefault(number, []).append(piece.theirs)
    findings = []
    for several in members.values():
        if len(several) > 1:
            (one, *_), (other, *_) = list(several.values())[:2]
            what = f"has {one} and {other} in two groups, and with tp, pp or cp they are parts of one parameter"
            findings.append(Finding("optimizer", what, "Put them into one group"))
    if findings:
        raise ConfigError(findings=findings)
    return {ours: next(iter(several)) for ours, several in members.items()}


def training_of(
    subject: Subject, engine: Engine, plan: Plan, ranks: Ranks, split: Split, rows: int | None, accumulate: int
) -> Training:
    """rows, accumulate: as `rows_at_once` and `accumulate` of `Training`; a pipeline that is told neither gets a micro-batch
    for each of its stages."""
    own = engine.optimizer
    assert isinstance(own, OwnOptimizer)  # the caller made it
    cast = nullcontext if subject.split and subject.adopted is None else cast_of(ranks.device.type, plan.precision)
    if plan.precision in ("bf16", "fp16") and not subject.split:
        forward_under(subject.model, cast)
    members: list[list[torch.Tensor]] | None = None
    if subject.split:
        members = [[] for _ in own.labels.optimizers]
        for group in engine.parameters.groups:
            members[own.labels.owner[group.label]] += [slot.parameter for slot in group.slots]
        if plan.layout.pp > 1 and rows is None and accumulate == 1:
            accumulate = plan.layout.pp * plan.chunks
    return Training(
        subject.given,
        engine,
        own,
        ranks,
        cast=cast,
        split=split,
        rows_at_once=rows,
        accumulate=accumulate,
        members=members,
    )


# ---- weights ---------------------------------------------------------------------------------------------------------------


def original_state(adopted: Adopted, engine: Engine) -> dict[str, torch.Tensor]:
    """Whole weights by the names of the origin's `state_dict`, in the masters' dtype on the CPU; what is not trained is the
    origin's. Collective."""
    ours = {name: value.cpu() for name, value in whole_weights(engine)}
    exported = dict(adopted.weights.export(ours.__getitem__))
    same = {id(p): name for name, p in adopted.origin.named_parameters(remove_duplicate=False) if name in exported}
    held = dict(adopted.origin.named_parameters(remove_duplicate=False))
    state = {}
    for name, value in adopted.origin.state_dict().items():
        known = name if name in exported else same.get(id(held.get(name)))
        state[name] = value.detach().cpu().clone() if known is None else exported[known].clone()
    return state


def give_back(adopted: Adopted, engine: Engine) -> None:
    """Writes the weights into the origin, in its dtype. Collective."""
    adopted.give_back(whole_weights(engine))
