"""Small models trained through a pipeline on gloo ranks, and by torch alone in one process."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from meshwright.config.schema import ModelConfig, ObjectiveConfig
from meshwright.data.batch import IGNORE, Batch
from meshwright.kernels.dropout import position_keys
from meshwright.models import build, initialize
from meshwright.parallel.compile import compile_blocks
from meshwright.parallel.links import Mail
from meshwright.parallel.pipeline import Stages, cut
from meshwright.parallel.pipeline_runner import _Step
from meshwright.parallel.sharing import Sharing
from meshwright.spec.layout import Layout
from meshwright.spec.pipeline import RECEIVE_GRADIENT, Action
from meshwright.spec.plan import Plan
from meshwright.train.objectives import Objective
from tests.ranks.pool import layout_mesh

LAYERS, VOCAB, CLASSES, ROWS, LENGTH, KEPT = 5, 23, 3, 2, 6, 3
LR, CLIP = 0.01, 0.1
COMMON: dict[str, Any] = {"layers": LAYERS, "width": 16, "heads": 2, "ffn": 24, "vocab": VOCAB, "max_len": 16}
ENCODER: dict[str, Any] = {"arch": "encoder", "positions": "learned", "norm": "layer", "activation": "gelu", "qkv_bias": True}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "decoder": ({"arch": "decoder", "kv_heads": 1}, "lm"),
    "tied": ({"arch": "decoder", "tied": True}, "lm"),
    "mlm": ({**ENCODER, "tied": True, "head_transform": True, "head_bias": True, "embed_norm": True, "token_types": 2}, "mlm"),
    "classifier": ({**ENCODER, "pooler": True, "classes": CLASSES}, "classify"),
    "plain": ({**ENCODER, "norm_order": "post", "final_norm": False, "mlp_bias": True, "classes": CLASSES}, "classify"),
}


@dataclass(frozen=True)
class Job:
    """empty: micro-batches without a single target."""

    name: str
    schedule: str = "1f1b"
    pp: int = 2
    chunks: int = 1
    micros: int = 3
    steps: int = 3
    dropout: float = 0.0
    split: tuple[int, ...] = ()
    compile: str = "off"
    empty: tuple[int, ...] = ()
    recompute: bool = False
    layers: int = LAYERS
    fault: str = ""


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the first step, under their logical names."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    sums: list[float] = field(default_factory=list)
    """Of the evaluation at the end."""


def make_model(job: Job) -> nn.Module:
    settings, task = MODELS[job.name]
    model = build(ModelConfig(**{**COMMON, "layers": job.layers}, **settings, dropout=job.dropout), task)
    initialize(model, 7, "cpu", torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():  # weights of one rank's share must differ from another's: 0.02 is too alike
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    return model


def objective_of(job: Job) -> Objective:
    task = MODELS[job.name][1]
    kind = {"lm": "causal_lm", "mlm": "masked_lm", "classify": "classify"}[task]
    return Objective(ObjectiveConfig(kind=kind), task, CLASSES if task == "classify" else 0)


def make_batches(job: Job, step: int) -> list[Batch]:
    """`micros` micro-batches of a step; row r has some of its positions masked away, other ones in every micro-batch."""
    task = MODELS[job.name][1]
    out = []
    for micro in range(job.micros):
        generator = torch.Generator().manual_seed(1000 * step + micro)
        labels_shape = {"lm": (ROWS, LENGTH), "mlm": (ROWS, KEPT), "classify": (ROWS,)}[task]
        labels = torch.randint(0, CLASSES if task == "classify" else VOCAB, labels_shape, generator=generator)
        if task != "classify":
            labels[0, : (micro + step) % labels_shape[1]] = IGNORE
        elif micro % 3 == 1:
            labels[0] = IGNORE
        if micro in job.empty:
            labels[:] = IGNORE
        select = torch.randint(0, LENGTH, (ROWS, KEPT), generator=generator) if task == "mlm" else None
        samples = torch.arange(ROWS) + ROWS * (micro + job.micros * step)
        tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
        out.append(Batch(tokens=tokens, labels=labels, samples=samples, select=select))
    return out


def forward_of(job: Job, batches: list[Batch]) -> Any:
    objective = objective_of(job)

    def forward(model: nn.Module, number: int) -> Any:
        batch = batches[number]
        key = position_keys(5, batch.samples, torch.arange(LENGTH)) if job.dropout else None
        return objective.loss(model, batch, key)

    return forward


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1)


@functools.cache
def oracle(job: Job) -> Outcome:
    """One process, one micro-batch after another, torch's optimizer."""
    model, out = make_model(job), Outcome()
    optimizer = adamw(model.parameters())
    for step in range(job.steps):
        batches = make_batches(job, step)
        targets = max(1, sum(batch.targets() for batch in batches))
        forward = forward_of(job, batches)
        optimizer.zero_grad()
        losses = [forward(model, number).loss_sum for number in range(job.micros)]
        for loss in losses:
            (loss / targets).backward()
        out.losses.append(float(sum(losses).detach()) / targets)
        if step == 0:
            out.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        out.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    out.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.eval()
    with torch.no_grad():
        objective = objective_of(job)
        out.sums = sum(objective.evaluate(model, batch) for batch in make_batches(job, 99)).tolist()
    return out


class StandIn:
    """As much of an engine as a pipeline needs: gradients in `.grad`, checked scopes, ties summed, norm, clip, AdamW."""

    def __init__(self, model: nn.Module, stages: Stages, sharing: Sharing):
        self.model, self.stages, self.sharing = model, stages, sharing
        self.runner = stages.runner()
        self.gradients = self
        self.optimizer = adamw(model.parameters())
        self.open: tuple[int, str] | None = None
        self.finished: set[tuple[int, str]] = set()
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(functools.partial(self._arrived, name))

    def _arrived(self, name: str, parameter: torch.Tensor) -> None:
        assert self.open is not None, f"{name}: outside of a scope"
        chunk, part = self.open
        assert part != "weight" and self.stages.unit(name)[0] in (chunk, -1), f"{name}: in chunk {chunk}, {part}"

    @contextmanager
    def backward_scope(self, last: bool, chunk: int = 0, part: str = "whole") -> Iterator[None]:
        assert self.open is None and (chunk, part) not in self.finished
        self.open = (chunk, part)
        yield
        self.open = None
        if last:
            self.finished.add((chunk, part))

    def deliver(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        assert self.open is not None and self.open[1] == "weight"
        assert any(parameter is known for known in self.model.parameters())
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def zero(self) -> None:
        self.optimizer.zero_grad()
        self.finished.clear()

    def finish(self) -> None:
        for name, parameter in self.model.named_parameters():
            shared = self.sharing.of(name, tuple(parameter.shape)).shared
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if shared:
                dist.all_reduce(parameter.grad, group=self.sharing.groups[shared])

    def update(self) -> float:
        square = torch.zeros((), dtype=torch.float64)
        for name, parameter in self.model.named_parameters():
            if self.sharing.of(name, tuple(parameter.shape)).counted:
                square += parameter.grad.square().sum()
        dist.all_reduce(square)
        norm = square.sqrt()
        for parameter in self.model.parameters():
            parameter.grad.mul_((CLIP / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        return float(norm)


def logical(stages: Stages, sharing: Sharing, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {sharing.of(name, ()).name: value for name, value in values.items()}


def train(job: Job) -> Outcome:
    with FAULTS[job.fault]():
        return _train(job)


def _train(job: Job) -> Outcome:
    model, sharing, out = make_model(job), Sharing(), Outcome()
    layout = Layout(pp=job.pp)
    plan = Plan(layout, schedule=job.schedule, chunks=job.chunks, split=job.split, compile=job.compile)
    stages = cut(model, plan, layout_mesh(layout))
    stages.share(sharing)
    if job.recompute:
        _recompute(model)
    compile_blocks(model, job.compile)
    engine: Any = StandIn(model, stages, sharing)
    for step in range(job.steps):
        batches = make_batches(job, step)
        targets = max(1, sum(batch.targets() for batch in batches))
        total = torch.zeros((), dtype=torch.float64)
        seen: list[int] = []

        def taken(number: int, parts: Any, total=total, seen=seen) -> None:
            total += parts.loss_sum.detach()
            seen.append(number)

        engine.zero()
        engine.runner.train(engine, job.micros, forward_of(job, batches), 1 / targets, taken, nullcontext)
        assert seen == (list(range(job.micros)) if stages.last else [])
        engine.finish()
        dist.all_reduce(total)
        out.losses.append(float(total) / targets)
        if step == 0:
            out.gradients = logical(stages, sharing, {name: p.grad.clone() for name, p in model.named_parameters()})
        out.norms.append(engine.update())
    out.weights = logical(stages, sharing, {name: p.detach().clone() for name, p in model.named_parameters()})
    model.eval()
    held_out, objective = make_batches(job, 99), objective_of(job)
    sums: list[torch.Tensor] = []
    engine.runner.evaluate(
        engine, job.micros, lambda view, i: objective.evaluate(view, held_out[i]), lambda i, values: sums.append(values.clone())
    )
    out.sums = torch.stack(sums).sum(0).tolist()
    return out


def _recompute(model: nn.Module) -> None:
    from torch.utils.checkpoint import checkpoint

    for block in model.layers:
        if block is not None:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


# ---- faults that the tests must see -------------------------------------------------------------------------------------


def _gradient_lost() -> Any:
    """The gradient of the second micro-batch does not reach the stage before."""
    take = Mail.take

    def lossy(self: Mail, receive: Action) -> torch.Tensor:
        values = take(self, receive)
        return values.zero_() if receive.kind == RECEIVE_GRADIENT and receive.micro == 1 else values

    return mock.patch.object(Mail, "take", lossy)


def _tie_counted_twice() -> Any:
    share = Stages.share

    def twice(self: Stages, sharing: Sharing) -> None:
        share(self, sharing)
        sharing.placements = {name: replace(placement, counted=True) for name, placement in sharing.placements.items()}

    return mock.patch.object(Stages, "share", twice)


def _tie_alone() -> Any:
    share = Stages.share

    def alone(self: Stages, sharing: Sharing) -> None:
        share(self, sharing)
        sharing.placements = {name: replace(placement, shared="") for name, placement in sharing.placements.items()}

    return mock.patch.object(Stages, "share", alone)


FAULTS: dict[str, Any] = {
    "": nullcontext,
    "gradient lost": _gradient_lost,
    "tie not summed": _tie_alone,
    "tie counted twice": _tie_counted_twice,
    "weights skipped": lambda: mock.patch.object(_Step, "_weight", _Step._nothing),
    "other micro-batch": lambda: _swapped(),
}


def _swapped() -> Any:
    """A stage takes the hidden states of the micro-batch before."""
    hidden = _Step._hidden

    def stale(self: _Step, stage: int, micro: int) -> torch.Tensor:
        values = hidden(self, stage, micro)
        kept = getattr(self, "kept", None)
        self.kept = values.detach().clone()  # type: ignore[attr-defined]
        return values if kept is None else kept

    return mock.patch.object(_Step, "_hidden", stale)


def difference(found: list[Outcome], expected: Outcome) -> dict[str, float]:
    """Largest relative differences, over all ranks; every logical parameter must be on some rank."""

    def tensors(kind: str) -> float:
        wanted: dict[str, torch.Tensor] = getattr(expected, kind)
        names = {name for outcome in found for name in getattr(outcome, kind)}
        assert names == set(wanted), names ^ set(wanted)
        return max(
            float((value - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=1e-3))
            for outcome in found
            for name, value in getattr(outcome, kind).items()
        )

    def numbers(kind: str) -> float:
        wanted = getattr(expected, kind)
        return max(
            abs(a - b) / max(abs(b), 1e-3)
            for outcome in found
            for a, b in zip(getattr(outcome, kind), wanted, strict=True)
        )

    return {
        "loss": numbers("losses"),
        "norm": numbers("norms"),
        "sums": numbers("sums"),
        "gradients": tensors("gradients"),
        "weights": tensors("weights"),
    }
