"""Suite `overhead`: a step of ours over one of a bare PyTorch loop with the same model, optimizer and rows, in one process.

python -m torch.distributed.run --nproc-per-node N -m meshwright.bench.host.overhead --repeat 5

The bare loop is what one writes by hand: stock data loader, forward, backward, clipping, fused AdamW, the loss read every step;
DistributedDataParallel on several ranks. Ours is the whole loop of `meshwright train`: loader thread, agreement of the ranks,
time split, metrics.jsonl, watchdog. Both run in turn, and the ratio is taken pair by pair.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from meshwright.bench.host.measures import Measure, of_repeats, say
from meshwright.bench.host.runs import HeldRows, Shape, opened, plan_of
from meshwright.config.schema import Config
from meshwright.data.batch import Batch
from meshwright.distributed import device as devices
from meshwright.distributed.environment import read_world
from meshwright.distributed.reduce import broadcast_json
from meshwright.distributed.watch import Watchdog
from meshwright.distributed.world import Ranks, init_world
from meshwright.models import build, initialize
from meshwright.spec.layout import Layout
from meshwright.train.loop import train
from meshwright.train.objectives import make_objective

__all__ = ["FAILS_AT", "SHAPE", "TARGET", "main", "measure"]

SHAPE = Shape(layers=4, width=192, vocab=2048, rows=8, seq_len=128)
TARGET = 1.03
FAILS_AT = 1.15
"""A step this much longer than the bare one is a regression."""
WAYS = {
    "step over a bare loop's": "seconds of a step",
    "processor time over a bare loop's": "of all threads in a step, which other work on the machine hardly changes",
}
WARM = 3
"""First steps of a block that are not counted."""


class TorchRows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The rows of our loader as a stock one takes them: (tokens, labels), int64 [S] each."""

    def __init__(self, rows: HeldRows, count: int):
        self._rows, self._count = rows, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self._rows.row(index)
        return torch.from_numpy(row.tokens), torch.from_numpy(row.labels)


class Bare:
    """The loop by hand; its model and optimizer live through all blocks."""

    def __init__(self, config: Config, shape: Shape, rows: HeldRows, ranks: Ranks):
        self._objective = make_objective(config.objective, 0)
        model = build(config.model, self._objective.task)
        initialize(model, config.run.seed, ranks.device)
        self._whole, self._device, self._clip = model.train(), ranks.device, config.train.clip
        self._model: nn.Module = nn.parallel.DistributedDataParallel(model) if ranks.size > 1 else model
        optimizer = config.train.optimizer
        decay: dict[str, Any] = {"betas": optimizer.betas, "weight_decay": optimizer.weight_decay}
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=config.train.lr, fused=True, **decay)
        self._rows, self._batch = rows, shape.rows

    def block(self, steps: int) -> Marks:
        """The end of each step; making its rows is a part of it."""
        marks = Marks()
        batches = iter(DataLoader(TorchRows(self._rows, steps * self._batch), batch_size=self._batch))
        for _ in range(steps):
            tokens, labels = (part.to(self._device) for part in next(batches))
            batch = Batch(tokens, labels, torch.arange(len(tokens)))
            parts = self._objective.loss(self._model, batch, None)
            (parts.loss_sum / labels.numel()).backward()
            torch.nn.utils.clip_grad_norm_(self._whole.parameters(), self._clip)
            self._optimizer.step()
            self._optimizer.zero_grad()
            float(parts.loss_sum.detach())
            marks.mark()
        return marks


@dataclass
class Marks:
    """The end of each step on the wall's clock, and the processor seconds that this process, all its threads, has used."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def mark(self) -> None:
        self.wall.append(time.perf_counter())
        self.processor.append(time.process_time())

    def medians(self) -> tuple[float, float]:
        """Of a step after the warm-up: wall, processor seconds."""
        wall, processor = (
            statistics.median(stop - start for start, stop in pairwise(times[WARM - 1 :]))
            for times in (self.wall, self.processor)
        )
        return wall, processor


class MarkingWatchdog(Watchdog):
    """The loop tells its watchdog of each step's end."""

    def __init__(self, marks: Marks, **limits: Any):
        super().__init__(**limits)
        self._marks = marks

    def beat(self, what: str = "a step") -> None:
        super().beat(what)
        if what == "a step":
            self._marks.mark()


def ours(config: Config, shape: Shape, rows: HeldRows, folder: Path, ranks: Ranks) -> Marks:
    """The ends of the steps of a new run."""
    marks = Marks()
    plan = plan_of(shape, Layout(dp_replicate=ranks.size), ranks.device.type)
    with opened(config, plan, rows, folder, ranks) as run:
        run.watchdog = MarkingWatchdog(marks, grace=config.run.grace, timeout=config.run.timeout, stop=run.stop)
        train(run)
    return marks


def measure(ranks: Ranks, repeat: int, steps: int, shape: Shape = SHAPE) -> Iterator[Measure]:
    """Blocks of `steps` steps in turn, bare and ours, `repeat` times; on the first rank the ratio of each pair's medians."""
    rows = HeldRows(shape, 64)
    pairs = []
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as temporary:
        base = Path(broadcast_json(temporary, ranks.control))
        bare = Bare(shape.config(ranks.size, steps, base), shape, rows, ranks)
        for turn in range(repeat):
            by_hand = bare.block(steps).medians()
            config = shape.config(ranks.size, steps, base / f"run-{turn}")
            pairs.append((by_hand, ours(config, shape, rows, base / f"run-{turn}", ranks).medians()))
        broadcast_json(None, ranks.control)  # the folder lives until every rank is done with it
    if ranks.rank == 0:
        more: dict[str, Any] = {
            "ranks": ranks.size,
            "higher": False,
            "limit": 1.0,
            "limited_by": "the bare loop",
            "target": TARGET,
        }
        yield of_repeats("step of the bare loop", [by_hand[0] for by_hand, _ in pairs], "s", ranks=ranks.size, higher=False)
        for i, (name, note) in enumerate(WAYS.items()):
            ratios = [mine[i] / by_hand[i] for by_hand, mine in pairs]
            yield of_pairs(name, ratios, note=note, fails_at=FAILS_AT, **more)


def of_pairs(name: str, ratios: list[float], **more: Any) -> Measure:
    """Their median; the spread is that of the middle half of the pairs, so that one disturbed pair decides nothing."""
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Measure(name, middle, "", (high - low) / middle, **more)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="of a block")
    args = parser.parse_args()
    with init_world(read_world(), devices.pick()) as ranks:
        for measure_ in measure(ranks, max(2, args.repeat), args.steps):
            say(measure_)


if __name__ == "__main__":
    main()
