"""Pipeline parallelism: a rank keeps some stages of the model, and runs their part of every micro-batch.

    cut(model, plan, mesh)      leaves this rank's modules in the model, and says what it did (`Stages`)
    Stages.unit, Stages.share   tell the flat buffers whose gradients are whole when, and what two stages hold together
    Stages.runner()             runs the micro-batches of a step by the action list of `spec.pipeline`

A message is the hidden states [B, S, D] of a micro-batch, or their gradient, in the dtype of the weights: with p ranks, v
chunks and M micro-batches a rank sends at most 2 v M of them a step. The loss exists on the rank of the last stage only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import Finding, LayoutError
from meshwright.parallel.links import Links, pairs_of
from meshwright.parallel.pipeline_runner import Pipeline
from meshwright.parallel.sharing import Sharing
from meshwright.parallel.split_backward import Deferral
from meshwright.spec.pipeline import rank_of, splits_backward, stage_of
from meshwright.spec.placement import Placement
from meshwright.spec.plan import Plan
from meshwright.spec.stages import balance, check_split, layer_costs, spans

__all__ = ["Pipeline", "Stages", "Tie", "cut"]

BEFORE = ("embedding", "position_embedding", "type_embedding", "embedding_norm")
"""Modules that only the first stage has."""
AFTER = ("norm", "head", "pooler", "classifier")
"""Modules that only the last stage has."""
MASKED_SHARE = 0.15
"""Of the positions of a masked language model, those that its head sees: BERT's share, for the balance of the stages. The
model does not know `objective.mask_fraction`; where that is far from it, `plan.split` says it better."""


@dataclass(frozen=True)
class Tie:
    """One parameter under two names: `first` is used by the first stage, `last` by the last."""

    first: str
    last: str


@dataclass(frozen=True, eq=False)
class Stages:
    """What this rank has of the model.

    model: as it was cut. rank, ranks: its place in the pipeline. held: its stages, in the order of the model; chunk c is
    held[c]. spans: layers [first, stop) of every stage of the pipeline. ties: what the first and the last stage share.
    split_backward: weight gradients are put off. note: what was done otherwise than the plan says, for the log; empty where
    nothing was.
    """

    model: nn.Module
    plan: Plan
    rank: int = 0
    ranks: int = 1
    held: tuple[int, ...] = (0,)
    spans: tuple[tuple[int, int], ...] = ()
    ties: tuple[Tie, ...] = ()
    split_backward: bool = False
    note: str = ""
    tie_group: dist.ProcessGroup | None = None
    links: Links | None = None
    pipeline: dist.ProcessGroup | None = field(default=None, repr=False)

    @property
    def first(self) -> bool:
        """Whether the embedding is here."""
        return self.held[0] == 0

    @property
    def last(self) -> bool:
        """Whether the head is here."""
        return self.ranks == 1 or self.held[-1] == len(self.spans) - 1

    def unit(self, name: str) -> tuple[int, int]:
        """(chunk, block) of a parameter of this rank's model: chunk -1 for one that the first and the last stage share here,
        block -1 outside of `model.layers`."""
        if any(name in (tie.first, tie.last) for tie in self.ties) and self.first and self.last:
            return -1 if self.ranks > 1 else 0, -1
        owner, _, rest = name.partition(".")
        if owner == "layers":
            block = int(rest.partition(".")[0])
            return (self._chunk(block) if self.ranks > 1 else 0), block
        return (len(self.held) - 1 if owner in AFTER else 0), -1

    def _chunk(self, block: int) -> int:
        return next(chunk for chunk, stage in enumerate(self.held) if self.spans[stage][0] <= block < self.spans[stage][1])

    def share(self, sharing: Sharing) -> None:
        """Records that both ends of a tie hold the same block, each with its own share of the gradient. The block is
        whatever was made of it: call it after tensors were split."""
        if self.tie_group is None:
            return
        sharing.groups["tie"] = self.tie_group
        for tie in self.ties:
            name = tie.first if self.first else tie.last
            placement = sharing.of(name, tuple(self.model.get_parameter(name).shape))
            assert not placement.shared, f"{name} is shared over {placement.shared} already"
            counted = placement.counted and self.first
            sharing.placements[name] = Placement(tie.first, placement.shape, placement.box, shared="tie", counted=counted)

    def runner(self) -> Pipeline | None:
        """Runs the micro-batches; None where there is no pipeline. Call it when blocks are what they will be: linear layers
        of blocks are told to put off the gradients of their weights."""
        if self.links is None or self.pipeline is None:
            return None
        deferral = Deferral() if self.split_backward else None
        if deferral is not None:
            for block in present(self.model):
                deferral.attach(block)
        return Pipeline(
            self.model,
            schedule=self.plan.schedule,
            ranks=self.ranks,
            chunks=self.plan.chunks,
            spans=self.spans,
            links=self.links,
            group=self.pipeline,
            deferral=deferral,
        )


def present(model: nn.Module) -> Iterator[nn.Module]:
    """The blocks of `model.layers` that are here."""
    layers = model.layers
    assert isinstance(layers, nn.ModuleList)
    return (block for block in layers if block is not None)


def cut(model: nn.Module, plan: Plan, mesh: DeviceMesh | None) -> Stages:
    """Takes from the model, in place, what other ranks of the pipeline hold: those modules become None (`layers` keeps its
    length). Collective over the world.

    model: filled or on meta, with `layers` and `config.width`, and a forward that takes `hidden` and `span`; the modules
    around the layers have the names of our models. The head of a model with tied weights keeps a parameter of its own.
    Raises LayoutError, with everything that is wrong, for a model that cannot be cut or a plan that does not fit it.
    """
    ranks = plan.layout.pp
    if ranks == 1 or mesh is None:
        return Stages(model, plan)
    count = ranks * plan.chunks
    findings = _check_model(model)
    if not findings:
        findings = check_split(plan.split, len(model.layers), count)  # type: ignore[arg-type]  # checked: it has layers
    if findings:
        raise LayoutError(findings=findings)
    bounds = spans(plan.split or _balanced(model, count))
    held = stage_of(plan.schedule, ranks, plan.chunks)[rank := mesh.get_local_rank("pp")]
    ties = _ties(model, bounds)
    _keep(model, held, bounds)
    apart = rank_of(plan.schedule, ranks, count - 1)  # where the head is, if not beside the embedding
    splits = splits_backward(plan.schedule)
    compiled = splits and plan.compile != "off"
    return Stages(
        model,
        plan,
        rank,
        ranks,
        held,
        bounds,
        ties,
        split_backward=splits and not compiled,
        note=f"{plan.schedule}: compiled blocks compute the gradients of inputs and weights together" if compiled else "",
        tie_group=pairs_of(mesh, "tie", 0, apart) if ties and apart else None,
        links=Links(mesh, _pairs(plan.schedule, ranks, plan.chunks)),
        pipeline=mesh.get_group("pp"),
    )


def _check_model(model: nn.Module) -> list[Finding]:
    """Why a model cannot be cut: all reasons."""
    name, fix = type(model).__name__, "Use pp: 1, or one of our models: adopt(module) makes one of a transformer"
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return [Finding(name, "cannot be cut into stages: it has no `layers`, a ModuleList", fix)]
    findings = []
    missing = [key for key in ("hidden", "span") if key not in inspect.signature(model.forward).parameters]
    if missing:
        what = f"cannot be cut into stages: its forward does not take {' and '.join(missing)}"
        findings.append(Finding(name, what, fix))
    if not isinstance(getattr(getattr(model, "config", None), "width", None), int):
        findings.append(Finding(name, "cannot be cut into stages: it has no `config.width`, the width of what they send", fix))
    known = (*BEFORE, *AFTER, "layers")
    for key, _ in model.named_parameters():
        if key.partition(".")[0] not in known:
            findings.append(Finding(f"{name}.{key}", "belongs to no stage: it is outside of the layers and not known", fix))
    return findings


def _balanced(model: nn.Module, stages: int) -> tuple[int, ...]:
    """By operations where they are known, else by the number of layers."""
    layers, task = len(model.layers), getattr(model, "task", "")  # type: ignore[arg-type]  # a ModuleList
    if task not in ("lm", "mlm", "classify"):
        return balance([1.0] * layers, 0.0, 0.0, stages)
    length: int = model.max_len  # type: ignore[assignment]  # what has a task is one of our models
    costs = layer_costs(model.config, task, length, MASKED_SHARE * length if task == "mlm" else None)  # type: ignore[arg-type]
    return balance(costs.layers, costs.first, costs.last, stages)


def _ties(model: nn.Module, bounds: tuple[tuple[int, int], ...]) -> tuple[Tie, ...]:
    """Parameters that the first and the last stage share. Raises LayoutError for any other that two stages would share."""

    def stage(name: str) -> int:
        owner, _, rest = name.partition(".")
        if owner == "layers":
            block = int(rest.partition(".")[0])
            return next(number for number, (start, stop) in enumerate(bounds) if start <= block < stop)
        return len(bounds) - 1 if owner in AFTER else 0

    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    ties, findings = [], []
    for shared in names.values():
        if len({stage(name) for name in shared}) == 1:
            continue
        outside = [name for name in shared if not name.startswith("layers.")]
        if len(shared) == 2 and outside == shared:
            ties.append(Tie(*sorted(shared, key=stage)))
        else:
            what = "is one parameter on several stages, which only the embedding and the head can have"
            findings.append(Finding(" = ".join(shared), what, "Use pp: 1"))
    if findings:
        raise LayoutError(findings=findings)
    return tuple(ties)


def _keep(model: nn.Module, held: tuple[int, ...], bounds: tuple[tuple[int, int], ...]) -> None:
    here = {block for stage in held for block in range(*bounds[stage])}
    layers: Any = model.layers
    for block in range(len(layers)):
        if block not in here:
            layers[block] = None
    foreign = (*(BEFORE if 0 not in held else ()), *(AFTER if len(bounds) - 1 not in held else ()))
    for name in foreign:
        if getattr(model, name, None) is not None:
            setattr(model, name, None)


def _pairs(schedule: str, ranks: int, chunks: int) -> list[tuple[int, int]]:
    """(from, to) of all neighbouring stages that are on two ranks, both ways."""
    found: dict[tuple[int, int], None] = {}
    for stage in range(ranks * chunks - 1):
        here, there = rank_of(schedule, ranks, stage), rank_of(schedule, ranks, stage + 1)
        if here != there:
            found |= {(here, there): None, (there, here): None}
    return sorted(found)
