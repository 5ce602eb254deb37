"""A short training that any layout can run: the product's own loader, step and update, without a run folder."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.checkpoint import CheckpointStore
from meshwright.config.schema import Config
from meshwright.data.dataset import Dataset
from meshwright.data.loader import Loader, StepData
from meshwright.distributed.mesh import data_rank
from meshwright.distributed.stop import StopFlag
from meshwright.distributed.watch import Watchdog
from meshwright.distributed.world import Ranks
from meshwright.models import build
from meshwright.observe.clock import StepClock
from meshwright.observe.flops import Peak
from meshwright.observe.noise import NoiseScale
from meshwright.observe.progress import NullProgress
from meshwright.observe.trace import Profile
from meshwright.parallel.apply import Engine
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.train.context import Context
from meshwright.train.engine import give_values, make_engine
from meshwright.train.figures import Figures
from meshwright.train.objectives import make_objective
from meshwright.train.recorder import Recorder
from meshwright.train.result import Agreed, StepResult
from meshwright.train.schedule import Budget, peak_learning_rate
from meshwright.train.step import agree, train_step

__all__ = ["Case", "CompiledBlocks", "Looker", "Trace", "alone", "compiled_alike", "opened", "run", "steps_of"]


@dataclass(frozen=True)
class Case:
    """What is trained, whatever the layout.

    config: precision, batch, optimizer and the rest; its plan-like settings (micro-batch, compile) are not looked at.
    fill: gives values to the model of `build` before it is split. None: the split model is filled in place, as in training.
    first: steps that were made before (they fix the place in the data).
    """

    config: Config
    data: Dataset
    steps: int
    fill: Callable[[nn.Module], None] | None = None
    first: int = 0


@dataclass
class Trace:
    """Of every step: loss and norm as this rank knows them, the loss scale it carried, whether it updated nothing."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)

    def take(self, result: StepResult) -> None:
        self.losses.append(float(result.loss))
        self.norms.append(float(result.grad_norm))
        self.scales.append(result.loss_scale)
        self.skipped.append(bool(result.skipped))


Looker = Callable[[int, Engine, float], None]
"""Called after each step with its number from 0, the engine, whose gradients are those of the step, and their loss scale."""


def alone(config: Config, micro_batch: int) -> Plan:
    """The plan of one device, with nothing that could change a bit: no compilation, no recompute, no overlap."""
    return Plan(Layout(), micro_batch=micro_batch, precision=config.precision, overlap=False)


def compiled_alike(plan: Plan) -> tuple[object, ...]:
    """Plans of one model of which this is the same may run each other's compiled blocks.

    torch 2.11 runs blocks that were compiled for a ring where all-to-all is meant, and the other way round: it does not look
    at which of two methods an attribute of a module is bound to. 2.13 does.
    """
    layout = plan.layout
    return layout.tp, layout.cp, layout.ep, plan.sequence_parallel, plan.context, plan.precision


class CompiledBlocks:
    """For what the blocks are that this process has compiled."""

    def __init__(self) -> None:
        self._known: tuple[object, ...] | None = None

    def prepare_for(self, plan: Plan, model: str = "") -> None:
        """Forgets blocks that are compiled for plans unlike this one, or for another model: those would be tried first, at
        every call, and one day be too many."""
        alike = (model, *compiled_alike(plan))
        if plan.compile != "off" and alike != self._known:
            torch.compiler.reset()
            self._known = alike


def run(case: Case, plan: Plan, mesh: DeviceMesh | None, ranks: Ranks, look: Looker | None = None) -> Trace:
    """Train the case by a plan. Collective over the ranks of `mesh`; with None this process is alone.

    Raises LayoutError, on every rank, for a plan that this model cannot have.
    """
    trace = Trace()
    with opened(case, plan, mesh, ranks) as context:
        for step, result in enumerate(steps_of(context, case.steps, single=mesh is None)):
            trace.take(result)
            if look is not None:
                look(step, context.engine, result.loss_scale)
    return trace


def steps_of(context: Context, count: int, *, single: bool) -> Iterator[StepResult]:
    """Steps at the peak learning rate, the loader's next ones. single: no other rank is asked for its counts."""
    train = context.config.train
    data = context.train_loader.steps(context.state.consumed, lambda consumed: train.batch)
    for _ in range(count):
        step = next(data)
        agreed = _counts(step) if single else agree(context, step)
        result = train_step(context, step, agreed, peak_learning_rate(train))
        context.state.step += 1
        context.state.consumed = step.consumed_after
        yield result


def _counts(data: StepData) -> Agreed:
    return Agreed(data.targets, data.tokens, data.local_rows, 0.0, False, data.targets)


@contextlib.contextmanager
def opened(case: Case, plan: Plan, mesh: DeviceMesh | None, ranks: Ranks) -> Iterator[Context]:
    """Model, engine and loader, ready for the first step of the case."""
    config, device = case.config, ranks.device
    objective = make_objective(config.objective, config.model.classes or 0)
    model = build(config.model, objective.task)
    if case.fill is not None:
        case.fill(model)
    engine = make_engine(model, config, plan, mesh, device)
    if case.fill is None:
        give_values(engine, config.run.seed, device)
    place = 0 if mesh is None else data_rank(mesh)[0]
    loader = Loader(case.data, dp_rank=place, dp_world=plan.layout.dp, micro_batch=plan.micro_batch, tail=config.train.tail)
    stop = StopFlag()
    figures = Figures(
        config.model, objective.task, peak=Peak(1.0, "not measured"), world=1, parts=1, device=device, noise=NoiseScale()
    )
    with contextlib.closing(loader), tempfile.TemporaryDirectory(prefix="meshwright-verify-") as nowhere:
        context = Context(
            config=config,
            plan=plan,
            ranks=ranks,
            device=device,
            data_rank=place,
            engine=engine,
            objective=objective,
            train_loader=loader,
            valid_loader=None,
            store=CheckpointStore(nowhere, write=False),
            clock=StepClock(device),
            recorder=Recorder([], figures, deferred=False, must_know_skips=False, stop_on_nonfinite=False),
            progress=NullProgress(),
            profile=Profile(None),
            stop=stop,
            watchdog=Watchdog(stop=stop),
            budget=Budget(None, None),
            identity={},
        )
        context.state.step = case.first
        context.state.consumed = case.first * config.train.batch
        yield context
