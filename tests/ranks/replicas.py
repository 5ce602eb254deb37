"""A small language model, an oracle in plain torch, and one training function that runs on any number of ranks."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.config.schema import LossScaleConfig, OptimizerConfig
from meshwright.parallel import apply, norm, replicate
from meshwright.parallel.apply import Engine, parallelize
from meshwright.parallel.precision import working_dtype
from meshwright.spec.box import Box
from meshwright.spec.layout import Layout
from meshwright.spec.parameters import Table
from meshwright.spec.plan import Plan
from tests.ranks.pool import layout_mesh

IGNORE = -100
VOCAB, WIDTH, ROWS, LENGTH = 13, 8, 8, 7
TIES = Table(rules=(), ties=(("embedding.weight", "head.weight"),))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Toy(nn.Module):
    """Tied head, one block used twice, one weight that nothing uses, one that is frozen."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.unused = nn.Linear(WIDTH, 5)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpointed = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embedding(tokens))
        for layer in [*self.layers, self.layers[0]]:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(self.norm(x))


def make_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> Toy:
    torch.manual_seed(seed)
    return Toy().double().to(dtype)


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens and labels int64 [ROWS, LENGTH]; row r has r % 5 of its LENGTH positions masked away, the last two rows all."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    for row in range(ROWS):
        labels[row, : row % 5] = IGNORE
    labels[-2:] = IGNORE
    return tokens, labels


def loss_sum(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(tokens).flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")


@dataclass(frozen=True)
class Job:
    """One training run. inf: (step, rank, parameter) whose gradient is made infinite there."""

    world: int = 1
    accumulation: int = 1
    steps: int = 3
    precision: str = "fp64"
    overlap: bool = True
    clip: float = 0.1
    lr: float = 0.01
    ema: float = 0.0
    compile: str = "off"
    gather: str = "twice"
    offload: str = "none"
    recompute: str = ""
    """"inside": a block's forward is a checkpoint; "outside": the whole block is, hooks included."""
    bucket_bytes: int = 2000
    measure_noise: bool = False
    inf: tuple[int, int, str] | None = None
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(weight_decay=0.3))
    mutation: str = ""
    layout: Layout | None = None
    """Data parallel over `world` where there is none."""


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the first step, loss scale removed."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)
    buckets: int = 0


def build(job: Job, model: nn.Module | None = None) -> Engine:
    layout = job.layout or Layout(dp_replicate=job.world)
    model = make_model() if model is None else model
    if job.recompute == "inside":
        for block in model.layers:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if isinstance(model, Toy):
        model.checkpointed = job.recompute == "outside"
    with mock.patch.object(apply, "MIB", job.bucket_bytes):  # a MiB would hold it all
        return parallelize(
            model,
            plan=Plan(
                layout=layout,
                precision=job.precision,
                overlap=job.overlap,
                compile=job.compile,
                gather=job.gather,
                offload=job.offload,
                bucket_mib=1,
            ),
            mesh=layout_mesh(layout) if job.world > 1 else None,
            table=TIES,
            optimizer=job.optimizer,
            device=torch.device("cpu"),
            loss_scale=job.loss_scale,
            ema=job.ema,
        )


def train(job: Job) -> Outcome:
    """Rows are dealt to ranks and micro-batches in contiguous runs, so that masks are uneven over both."""
    rank = dist.get_rank() if job.world > 1 else 0
    with _mutated(job):
        engine = build(job)
        out = Outcome(buckets=len(engine.gradients.buckets))
        out.state = _copy(engine)
        for step in range(job.steps):
            one_step(engine, job, rank, step, out)
            before, out.state = out.state, _copy(engine)
            out.steps[-1]["unchanged"] = all(torch.equal(before[name], out.state[name]) for name in before)
        out.weights = {name.removeprefix("model/"): value for name, value in out.state.items() if name.startswith("model/")}
        out.steps[-1]["sync"] = engine.sync_check()
    return out


def one_step(engine: Engine, job: Job, rank: int, step: int, out: Outcome) -> None:
    tokens, labels = make_batch(step)
    targets = int((labels != IGNORE).sum())
    mine = slice(rank * ROWS // job.world, (rank + 1) * ROWS // job.world)
    engine.measure_noise = job.measure_noise
    engine.zero()
    scale, total = engine.loss_scale, 0.0
    planted = _plant(engine, job, rank, step)
    parts = list(zip(tokens[mine].tensor_split(job.accumulation), labels[mine].tensor_split(job.accumulation), strict=True))
    for number, (part, label) in enumerate(parts):
        loss = loss_sum(engine.model, part, label)
        total += float(loss.detach())
        with engine.backward_scope(last=number == len(parts) - 1):
            (loss * (scale / targets)).backward()
    engine.finish()
    if planted is not None:
        planted.remove()
    if step == 0:
        out.gradients = {name: gradient / scale for name, gradient in whole_gradients(engine).items()}
    culprit = engine.nonfinite_parameter()
    out.noise.append(sum(float(square) for square in engine.micro_square_norms))
    info = engine.update(job.lr, job.clip)
    loss_value = torch.tensor(total, dtype=torch.float64)
    if job.world > 1:
        dist.all_reduce(loss_value)
    out.losses.append(float(loss_value) / targets)
    out.norms.append(info.grad_norm.clone())
    out.steps.append(
        {
            "skipped": bool(info.skipped),
            "scale": info.loss_scale,
            "next": engine.loss_scale,
            "exhausted": info.exhausted,
            "culprit": culprit,
            "updates": engine.extra_state()["updates"],
        }
    )


def oracle(job: Job) -> Outcome:
    """The same training by torch alone: one process, the whole batch at once, torch.optim."""
    model = make_model(working_dtype(job.precision))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    words, decay = job.optimizer.no_decay, job.optimizer.weight_decay
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in trained.items() if not any(w in n for w in words)], "weight_decay": decay},
        {"params": [p for n, p in trained.items() if any(w in n for w in words)], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=job.lr, momentum=job.optimizer.momentum)
    if job.optimizer.kind == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=job.lr, betas=job.optimizer.betas, eps=job.optimizer.eps)
    out = Outcome()
    for step in range(job.steps):
        tokens, labels = make_batch(step)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_sum(model, tokens, labels) / int((labels != IGNORE).sum())
        loss.backward()
        for p in trained.values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if step == 0:
            out.gradients = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
        out.losses.append(float(loss.detach()))
        norm_before = torch.nn.utils.get_total_norm([p.grad for p in trained.values() if p.grad is not None])
        out.norms.append(norm_before)
        if job.clip:
            torch.nn.utils.clip_grad_norm_(list(trained.values()), job.clip)
        optimizer.step()
    out.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return out


def _copy(engine: Engine) -> dict[str, torch.Tensor]:
    """What a checkpoint would keep, whole on every rank."""
    whole: dict[str, torch.Tensor] = {}
    for kind, buffers in engine._kinds():
        for slot in engine.parameters.slots:
            whole[f"{kind}/{slot.name}"] = torch.zeros(slot.shape, dtype=buffers[0].dtype)
    seen = {name: torch.zeros(values.shape, dtype=torch.int32) for name, values in whole.items()}
    for piece in engine.parameters_state():
        if piece.name not in whole:  # frozen, or a buffer
            whole[piece.name] = piece.tensor.clone()
            continue
        place = piece.box.inside(Box.whole(piece.shape))
        whole[piece.name][place] = piece.tensor
        seen[piece.name][place] += 1
    _sum_all([*seen.values(), *(whole[name] for name in seen)], engine)
    for name, count in seen.items():
        assert bool((count == 1).all()), f"{name}: an element is not held exactly once"
    return whole


def _sum_all(tensors: list[torch.Tensor], engine: Engine) -> None:
    """In place, over the axes whose ranks hold distinct pieces. A message a type: a thousand small ones take seconds."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in alike])
        for group in engine.axes.distinct:
            dist.all_reduce(flat, group=group)
        for tensor, summed in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
            tensor.copy_(summed.view_as(tensor))


def whole_gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """Reduced gradients, whole on every rank, in the dtype of the masters."""
    out = {slot.name: torch.zeros(slot.size, dtype=_dtype(engine)) for slot in engine.parameters.slots}
    for part in engine.parameters.ranges:
        for run in part.runs():
            out[run.slot.name][run.first : run.first + run.size] = run.of(part.gradient)
    _sum_all(list(out.values()), engine)
    return {slot.name: out[slot.name].view(slot.shape) for slot in engine.parameters.slots}


def _dtype(engine: Engine) -> torch.dtype:
    return engine.parameters.ranges[0].master.dtype


def _plant(engine: Engine, job: Job, rank: int, step: int) -> Any:
    if job.inf is None or job.inf[:2] != (step, rank):
        return None
    slot = next(slot for slot in engine.parameters.slots if slot.name == job.inf[2])
    return slot.parameter.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))


@contextlib.contextmanager
def _mutated(job: Job):
    """The training code with one fault, by name."""
    original_square, original_reduce = norm.square_norm, dist.all_reduce

    def quiet(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return _Done() if kwargs.get("async_op") else original_reduce(tensor, *args, **kwargs)

    def divided(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("async_op"):
            tensor.div_(job.world)
        return original_reduce(tensor, *args, **kwargs)

    def tie_twice(self: replicate.Gradients, counted: bool = True) -> torch.Tensor:
        tied = next((group, slot) for group, slot in self.parameters.each() if slot.name == "embedding.weight")
        return original_total(self) + original_square(tied[1].of(tied[0].gradient))

    def one_bucket_late(self: replicate.Gradients, lane: replicate.Lane, stop: int) -> None:
        original_launch(self, lane, min(stop, len(lane.buckets) - 1))

    original_total, original_launch = replicate.Gradients.square, replicate.Gradients._launch
    faults = {
        "": contextlib.nullcontext,
        "no reduction": lambda: mock.patch.object(dist, "all_reduce", quiet),
        "mean over ranks": lambda: mock.patch.object(dist, "all_reduce", divided),
        "last bucket forgotten": lambda: mock.patch.object(replicate.Gradients, "_launch", one_bucket_late),
        "tie counted twice": lambda: mock.patch.object(replicate.Gradients, "square", tie_twice),
        "micro-steps overwrite": lambda: mock.patch.object(replicate.Gradients, "_arrive", _overwriting),
        "stale gradients": lambda: mock.patch.object(replicate.Gradients, "_zero_untouched", lambda *_: None),
    }
    with faults[job.mutation]():
        yield


class _Done:
    def wait(self) -> None:
        return None


_arrive = replicate.Gradients._arrive


def _overwriting(self: replicate.Gradients, parameter: torch.Tensor) -> None:
    self._home[id(parameter)][1].touched = False
    if parameter.grad is not None and self._lanes[0].scopes > 1:
        parameter.grad = parameter.grad * 0.5  # away from the flat view, so that it is copied over it
    _arrive(self, parameter)
