"""A real run on random rows for the suites that need one: the context of `meshwright train`, without its command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.bench.synthetic import RandomRows
from meshwright.bench.workloads import Workload
from meshwright.config.load import Resolved
from meshwright.config.schema import Config
from meshwright.data.dataset import Row
from meshwright.distributed import device as devices
from meshwright.distributed.reduce import broadcast_json
from meshwright.distributed.stop import StopFlag
from meshwright.distributed.world import Ranks
from meshwright.observe.resources import Sampler
from meshwright.runtime.folder import RunFolder
from meshwright.runtime.worker import Job, RunData, build_context
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.train.context import Context

__all__ = ["HeldRows", "Shape", "opened", "plan_of"]


@dataclass(frozen=True)
class Shape:
    """A decoder. rows: of a rank and step. precision: as in the settings."""

    layers: int
    width: int
    vocab: int
    rows: int
    seq_len: int
    precision: str = "fp32"

    def config(self, ranks: int, steps: int, folder: Path, **more: Any) -> Config:
        heads = max(1, self.width // 64)
        model = {"layers": self.layers, "width": self.width, "heads": heads, "ffn": 4 * self.width, "vocab": self.vocab}
        workload = Workload("host", model, self.rows, self.seq_len, "causal", "tokens")
        return workload.config(devices=ranks, steps=steps, folder=str(folder), precision=self.precision, **more)


class HeldRows:
    """`count` random rows, made once and given again and again, so that making them costs no step anything."""

    def __init__(self, shape: Shape, count: int):
        made = RandomRows(shape.seq_len, shape.vocab, "causal")
        self._rows = [made.row(sample) for sample in range(count)]
        self.seq_len = shape.seq_len
        self.rows = 1 << 20

    def row(self, sample: int) -> Row:
        return self._rows[sample % len(self._rows)]


def plan_of(shape: Shape, layout: Layout, device_type: str) -> Plan:
    return Plan(layout, shape.rows, shape.precision, "off" if device_type == "cpu" else "inductor")


@contextlib.contextmanager
def opened(config: Config, plan: Plan, rows: HeldRows, folder: Path, ranks: Ranks) -> Iterator[Context]:
    """The context of a new run in `folder`, weights drawn, ready for its first step. Every rank calls it."""
    run = RunFolder(folder)
    if ranks.rank == 0:
        run.create(resume=False)
        run.write_config(Resolved(config, {}))
    broadcast_json(None, ranks.control)  # the folder is there before any rank goes on
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopFlag())
        stack.enter_context(Sampler(ranks.device))
        yield build_context(Job(run), config, plan, RunData(rows, None, "random"), ranks, stop, stack)
    devices.synchronize(ranks.device)
