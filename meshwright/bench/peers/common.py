"""What the peers share: their command line, the workload's rows as torch's data loader takes them, the line they print."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from meshwright.bench.measure import GIB, Laps, figures
from meshwright.bench.synthetic import RandomRows
from meshwright.bench.workloads import WORKLOADS, Workload
from meshwright.config.schema import ModelConfig
from meshwright.data.batch import IGNORE
from meshwright.distributed import device as devices

__all__ = ["Job", "TorchRows", "loader", "measured", "parse", "report", "skip", "small"]


@dataclass(frozen=True)
class Job:
    """One measurement of a peer: what to run, for how many steps, and this process's place among the ranks."""

    workload: Workload
    steps: int
    warm: int
    flags: argparse.Namespace
    rank: int
    local_rank: int
    world: int
    device: torch.device

    @property
    def model(self) -> ModelConfig:
        return self.workload.config(devices=1, steps=1, folder="unused").model

    @property
    def vocab(self) -> int:
        return self.workload.model["vocab"]


def parse(description: str | None, workloads: tuple[str, ...], *flags: str) -> Job:
    """The command line and the environment that torchrun gives; `flags` are switches of this peer."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=workloads)
    parser.add_argument("--steps", type=int, default=30, help="all steps, those of the warm-up too")
    parser.add_argument("--warm", type=int, default=10, help="steps that are not counted")
    parser.add_argument("--smoke", action="store_true", help="tiny numbers in place of the workload's, to try the script")
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    if not 0 < args.warm < args.steps:
        parser.error(f"--warm {args.warm} leaves no step of --steps {args.steps}; give 0 < warm < steps")
    workload = WORKLOADS[args.workload]
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    return Job(
        workload=small(workload) if args.smoke else workload,
        steps=args.steps,
        warm=args.warm,
        flags=args,
        rank=rank,
        local_rank=local_rank,
        world=int(os.environ.get("WORLD_SIZE", 1)),
        device=devices.rank_device(devices.pick(), local_rank),
    )


def small(workload: Workload) -> Workload:
    """The same kind of model and rows with tiny numbers."""
    numbers: dict[str, Any] = {"layers": 2, "width": 64, "heads": 4, "ffn": 256, "vocab": 512, "max_len": 64}
    if "kv_heads" in workload.model:
        numbers["kv_heads"] = 2
    return replace(workload, model={**workload.model, **numbers}, rows=4, seq_len=64)


class TorchRows(Dataset[dict[str, torch.Tensor]]):
    """Rows of the workload as int64 [S]: `input_ids`, and `labels` with -100 where nothing is predicted.

    shifted: labels are the next tokens; otherwise, for causal rows, the tokens themselves, which the model shifts.
    """

    def __init__(self, workload: Workload, rows: int, *, shifted: bool = True):
        self._rows = RandomRows(workload.seq_len, workload.model["vocab"], workload.targets)
        self._count = rows
        self._own = workload.targets == "causal" and not shifted

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows.row(index)
        tokens, labels = torch.from_numpy(row.tokens.copy()), torch.from_numpy(row.labels.copy())
        if self._own:
            labels = tokens.clone()
        elif row.select is not None:
            every = torch.full_like(tokens, IGNORE)
            chosen = labels != IGNORE
            every[torch.from_numpy(row.select)[chosen]] = labels[chosen]
            labels = every
        return {"input_ids": tokens, "labels": labels}


def loader(job: Job) -> DataLoader[dict[str, torch.Tensor]]:
    """This rank's rows of every step, in the order of the workload."""
    data = TorchRows(job.workload, job.steps * job.workload.rows * job.world)
    return DataLoader(
        data,
        batch_size=job.workload.rows,
        sampler=DistributedSampler(data, job.world, job.rank, shuffle=False),
        num_workers=0 if job.device.type == "cpu" else 2,
        pin_memory=job.device.type != "cpu",
    )


def measured(job: Job, engine: str, laps: Laps, losses: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The record of a loop that marked a lap and kept a loss after every step."""
    seconds = laps.seconds()[job.warm - 1 :]  # the first lap is the second step
    memory = devices.memory(job.device)
    return figures(
        engine,
        seconds,
        rows=job.workload.rows * job.world,
        seq_len=job.workload.seq_len,
        losses=(float(losses[0]), float(losses[-1])),
        peak_gib=memory.allocated_peak / GIB,
        reserved_gib=memory.reserved_peak / GIB,
    )


def report(job: Job, record: dict[str, Any]) -> None:
    """The result, as the last line of rank 0."""
    if job.rank == 0:
        print(json.dumps(record), flush=True)


def skip(job: Job, engine: str, reason: str) -> None:
    """No result, and why; the process then ends without an error."""
    report(job, {"engine": engine, "skipped": reason})
