"""Slow-link methods on ranks, and the simulation of each in plain torch: one process, a model and a torch optimizer a replica.

The simulation shares with the product the models, their rows and their losses, and nothing of `meshwright.parallel`.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from meshwright.config.schema import Config
from meshwright.data.loader import Loader
from meshwright.models import build
from meshwright.parallel import apply
from meshwright.parallel.apply import Engine
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.train.objectives import make_objective
from meshwright.verify.cases import Case, run
from tests.parity.models import ROWS, case_of, fill
from tests.ranks.pool import joined, layout_mesh

Block = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name, offset and shape of a part of a parameter."""


@dataclass(frozen=True)
class Job:
    """sync: of `train.sync`. optimizer: of `train.optimizer`, over that of tests.parity.models."""

    sync: dict[str, Any]
    layout: Layout
    model: str = "tied"
    steps: int = 7
    micro_batch: int = 6
    clip: bool = True
    schedule: str = "1f1b"
    chunks: int = 1
    overlap: bool = True
    sequence_parallel: bool = True
    bucket_bytes: int = 20_000
    rows: int = ROWS
    recompute: str = "none"
    offload: str = "none"
    optimizer: dict[str, Any] = field(default_factory=dict)

    def case(self) -> Case:
        train: dict[str, Any] = {"batch": self.rows, "lr": 3e-3, "clip": 0.3 if self.clip else 0.0}
        optimizer = {"kind": "adamw", "weight_decay": 0.1, "eps": 1e-6, **self.optimizer}
        return case_of(self.model, "fp64", self.clip, self.steps, train={**train, "sync": self.sync, "optimizer": optimizer})

    def plan(self) -> Plan:
        return Plan(
            self.layout,
            self.micro_batch,
            "fp64",
            overlap=self.overlap,
            bucket_mib=1,
            schedule=self.schedule,
            chunks=self.chunks,
            sequence_parallel=self.sequence_parallel,
            recompute=self.recompute,
            offload=self.offload,
        )


@dataclass
class Outcome:
    """pieces: of the state after the last step. blocks: of the gradient on this rank. whole: parameters that are exchanged
    uncompressed, since ranks of a replica share them. sent: bytes a step in ring algorithms, between replicas."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    pieces: list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    differs: str | None = None


def on_rank(job: Job) -> Outcome:
    out = Outcome()
    counter = Counter(job)

    def look(step: int, engine: Engine, scale: float) -> None:
        counter.group = engine.local.replicas if engine.local else engine.axes.replicas
        out.sent.append(counter.taken())
        if step == job.steps - 1:
            out.pieces = [(p.name, p.shape, p.offset, p.tensor.clone()) for p in engine.parameters_state()]
            out.blocks = [(p.name.partition("/")[2], p.offset, tuple(p.tensor.shape)) for p in engine.gradient_state()]
            out.whole = [slot.placement.name for slot in engine.parameters.slots if slot.placement.shared]
            out.notes = engine.notes
            out.differs = engine.sync_check()

    with mock.patch.object(apply, "MIB", job.bucket_bytes), counter:
        trace = run(job.case(), job.plan(), layout_mesh(job.layout), joined(), look)
    out.losses, out.norms = trace.losses, trace.norms
    return out


class Counter:
    """Bytes that this rank gives to collectives of the data axes while it is entered, by ring algorithms; scalars left out."""

    def __init__(self, job: Job):
        self.group: Any = None
        self._log: list[tuple[Any, float]] = []
        self._patches: list[Any] = []

    def taken(self) -> float:
        found, self._log = sum(count for group, count in self._log if group is self.group), []
        return found

    def __enter__(self) -> Counter:
        from meshwright.parallel import compress

        def counted(real: Any, share: Any, which: int) -> Any:
            def call(*args: Any, group: Any = None, **options: Any) -> Any:
                size = group.size() if group is not None else 1
                if args[which].numel() > 8:
                    self._log.append((group, share(size) * args[which].nbytes))
                return real(*args, group=group, **options)

            return call

        ring = lambda n: 2 * (n - 1) / n
        half = lambda n: (n - 1) / n
        self._patches = [
            mock.patch.object(dist, "all_reduce", counted(dist.all_reduce, ring, 0)),
            mock.patch.object(dist, "all_to_all_single", counted(dist.all_to_all_single, half, 1)),
            mock.patch.object(compress, "all_gather_single", counted(compress.all_gather_single, half, 0)),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


def assembled(outcomes: list[Outcome]) -> dict[str, torch.Tensor]:
    """What the ranks hold together: whole tensors, those of replicas with a dimension for them in front."""
    whole: dict[str, torch.Tensor] = {}
    for outcome in outcomes:
        for name, shape, offset, tensor in outcome.pieces:
            target = whole.setdefault(name, torch.full(shape, torch.nan, dtype=tensor.dtype))
            target[tuple(slice(a, a + n) for a, n in zip(offset, tensor.shape, strict=True))] = tensor
    return whole


# ---- the simulation


class Replica:
    """One model with a torch optimizer of its own."""

    def __init__(self, config: Config, model: nn.Module):
        self.model = model
        self.named = dict(model.named_parameters())
        settings = config.train.optimizer
        decayed = [p for n, p in self.named.items() if not any(word in n for word in settings.no_decay)]
        rest = [p for n, p in self.named.items() if any(word in n for word in settings.no_decay)]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer: torch.optim.Optimizer
        if settings.kind == "adamw":
            self.optimizer = torch.optim.AdamW(groups, lr=config.train.lr, betas=settings.betas, eps=settings.eps)
        else:
            self.optimizer = torch.optim.SGD(groups, lr=config.train.lr, momentum=settings.momentum)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.named.items()}

    @torch.no_grad()
    def take(self, weights: dict[str, torch.Tensor]) -> None:
        for name, p in self.named.items():
            p.copy_(weights[name])


@dataclass
class Simulated:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    common: dict[str, torch.Tensor] = field(default_factory=dict)
    own: list[dict[str, torch.Tensor]] = field(default_factory=list)
    moments: list[dict[str, torch.Tensor]] = field(default_factory=list)


class Simulation:
    def __init__(self, job: Job, blocks: list[Block] | None = None, whole: list[str] | None = None):
        """blocks: of parameters that are matrices of their own; None: whole parameters. whole: what is never compressed."""
        self.case = job.case()
        self.config, self.sync = self.case.config, self.case.config.train.sync
        self.layout = job.layout
        self.objective = make_objective(self.config.objective, self.config.model.classes or 0)
        model = build(self.config.model, self.objective.task)
        fill(model)
        model = model.double()
        self.replicas = [Replica(self.config, copy.deepcopy(model)) for _ in range(job.layout.dp_replicate)]
        names = self.replicas[0].named
        self.blocks = (
            sorted(set(blocks)) if blocks is not None else [(n, (0,) * p.dim(), tuple(p.shape)) for n, p in names.items()]
        )
        self.whole = set(whole or ())
        self.memory: dict[Any, Any] = {}
        self.empty = 0
        """Steps of a replica without a target, while another had some."""
        ways = job.layout.dp
        self.loaders = [
            Loader(self.case.data, dp_rank=rank, dp_world=ways, micro_batch=job.rows, tail="step") for rank in range(ways)
        ]

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()

    def run(self) -> Simulated:
        out, sync = Simulated(), self.sync
        steps = [loader.steps(0, lambda consumed: self.config.train.batch) for loader in self.loaders]
        outer = Outer(self)
        number = -1
        """Of the steps that have a target."""
        for _ in range(self.case.steps):
            data = [next(each) for each in steps]
            if not sum(each.targets for each in data):
                out.losses.append(0.0)
                out.norms.append(0.0)
                continue
            number += 1
            apart = sync.local and number >= sync.warmup
            if apart and number == sync.warmup:
                outer.start()
            losses, gradients, targets = zip(*[self._backward(r, data) for r in range(len(self.replicas))], strict=True)
            out.losses.append(sum(losses) / sum(targets))
            if not apart:
                divided = [{name: g / sum(targets) for name, g in each.items()} for each in gradients]
                total = self.sum(divided)
                out.norms.append(self._update_all([total] * len(self.replicas)))
                continue
            self.empty += targets.count(0)
            own = [{n: g / t for n, g in each.items()} if t else None for each, t in zip(gradients, targets, strict=True)]
            out.norms.append(self._update_all(own))
            outer.after(number - sync.warmup + 1)
        self.close()
        out.common = outer.anchor if sync.local and self.case.steps > sync.warmup else self.replicas[0].weights()
        out.own = [replica.weights() for replica in self.replicas]
        for replica in self.replicas:
            state = replica.optimizer.state
            out.moments.append({n: state[p]["exp_avg"].clone() for n, p in replica.named.items() if "exp_avg" in state[p]})
        return out

    def _backward(self, number: int, data: list[Any]) -> tuple[float, dict[str, torch.Tensor], int]:
        """Loss summed over the rows of a replica, its gradients, and their targets."""
        replica, shards = self.replicas[number], self.layout.dp_shard
        replica.model.zero_grad()
        loss_sum, targets = 0.0, 0
        for part in data[number * shards : (number + 1) * shards]:
            targets += part.targets
            for batch in part.micro:
                parts = self.objective.loss(replica.model, batch, None)
                parts.loss_sum.backward()
                loss_sum += float((parts.loss_sum - parts.z_sum).detach())
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in replica.named.items()}
        return loss_sum, grads, targets

    def _update_all(self, gradients: list[dict[str, torch.Tensor] | None]) -> float:
        """Clips and updates each replica (one without a gradient updates nothing). Returns the mean of the norms."""
        norms = []
        for replica, own in zip(self.replicas, gradients, strict=True):
            if own is None:
                norms.append(0.0)
                continue
            for name, p in replica.named.items():
                p.grad = own[name].clone()
            norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in own.values()]))
            norms.append(float(norm))
            if self.config.train.clip:
                factor = min(1.0, self.config.train.clip / (float(norm) + 1e-6))
                for p in replica.named.values():
                    p.grad.mul_(factor)
            replica.optimizer.step()
        return sum(norms) / len(norms)

    # ---- what crosses

    def sum(self, each: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Of what the replicas have, as the compression lets it through."""
        total = {name: torch.stack([one[name] for one in each]).sum(0) for name in each[0]}
        if self.sync.compress == "none":
            return total
        for name in total:
            if name not in self.whole and self.sync.compress == "bf16":
                wide = torch.stack([one[name].to(torch.bfloat16).double() for one in each]).sum(0)
                total[name] = wide.to(torch.bfloat16).double()
        if self.sync.compress == "powersgd":
            for block in self.blocks:
                if block[0] not in self.whole:
                    self._low_rank(block, each, total)
        return total

    def _low_rank(self, block: Block, each: list[dict[str, torch.Tensor]], total: dict[str, torch.Tensor]) -> None:
        name, offset, shape = block
        place = tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
        rows = shape[0] if shape else 1
        matrices = [one[name][place].reshape(rows, -1) for one in each]
        columns, rank = matrices[0].shape[1], self.sync.rank
        if rank * (rows + columns) >= rows * columns:
            return
        if block not in self.memory:
            text = f"{name}/{'.'.join(map(str, offset))}+{'x'.join(map(str, shape))}"
            digest = hashlib.blake2b(f"powersgd {self.config.run.seed} {text}".encode(), digest_size=7).digest()
            draw = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            start = torch.randn(columns, rank, generator=draw, dtype=torch.float64)
            self.memory[block] = [start, [torch.zeros_like(m) for m in matrices]]
        q, errors = self.memory[block]
        matrices = [m + e for m, e in zip(matrices, errors, strict=True)]
        basis = torch.linalg.svd(sum(matrices) @ q, full_matrices=False).U  # any basis of the columns will do
        shares = [m.T @ basis for m in matrices]
        self.memory[block] = [sum(shares), [m - basis @ s.T for m, s in zip(matrices, shares, strict=True)]]
        total[name][place] = (basis @ sum(shares).T).reshape(shape)


class Outer:
    """local_sgd, diloco, and diloco one round late."""

    def __init__(self, simulation: Simulation):
        self.simulation = simulation
        self.sync = simulation.sync
        self.anchor: dict[str, torch.Tensor] = {}
        self.begins: list[dict[str, torch.Tensor]] = []
        self.coming: dict[str, torch.Tensor] | None = None

    def start(self) -> None:
        replicas = self.simulation.replicas
        self.anchor = replicas[0].weights()
        self.begins = [replica.weights() for replica in replicas]
        self.tensors = {name: nn.Parameter(value.clone()) for name, value in self.anchor.items()}
        diloco = self.sync.method == "diloco"
        momentum = self.sync.outer_momentum if diloco else 0.0
        lr = self.sync.outer_lr if diloco else 1.0
        self.optimizer = torch.optim.SGD(self.tensors.values(), lr=lr, momentum=momentum, nesterov=momentum > 0)

    def after(self, steps: int) -> None:
        if steps % self.sync.every:
            return
        replicas = self.simulation.replicas
        moved = [
            {name: begin[name] - now for name, now in replica.weights().items()}
            for begin, replica in zip(self.begins, replicas, strict=True)
        ]
        if not self.sync.overlap:
            self._step(self.simulation.sum(moved))
            self.begins = [self.anchor for _ in replicas]
        else:
            if self.coming is not None:
                self._step(self.coming)
            self.coming = self.simulation.sum(moved)
            self.begins = [{name: self.anchor[name] - d for name, d in each.items()} for each in moved]
        for replica, begin in zip(replicas, self.begins, strict=True):
            replica.take(begin)

    def _step(self, total: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.tensors.items():
            tensor.grad = total[name] / len(self.simulation.replicas)
        self.optimizer.step()
        self.anchor = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}


def apart(found: list[Outcome], known: Simulated) -> dict[str, float]:
    """Largest absolute differences of losses, norms, common weights, own weights and first moments."""
    state = assembled(found)
    gaps: dict[str, list[float]] = {"loss": [], "norm": [], "common": [], "own": [], "moment": []}
    for outcome in found:
        gaps["loss"] += [abs(a - b) for a, b in zip(outcome.losses, known.losses, strict=True)]
        gaps["norm"] += [abs(a - b) for a, b in zip(outcome.norms, known.norms, strict=True)]
    for name, value in known.common.items():
        gaps["common"].append(_gap(state[f"model/{name}"], value))
    local = any(name.startswith("replica/model/") for name in state)
    for number, (weights, moments) in enumerate(zip(known.own, known.moments, strict=True)):
        for name, value in weights.items():
            gaps["own"].append(_gap(state[f"replica/model/{name}"][number] if local else state[f"model/{name}"], value))
        for name, value in moments.items():
            kept = state[f"replica/optimizer/exp_avg/{name}"][number] if local else state[f"optimizer/exp_avg/{name}"]
            gaps["moment"].append(_gap(kept, value))
    return {kind: max(values, default=0.0) for kind, values in gaps.items()}


def _gap(a: torch.Tensor, b: torch.Tensor) -> float:
    gap = (a - b).abs().max()
    return float(gap) if not torch.isnan(gap) else float("inf")
