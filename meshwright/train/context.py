"""Everything that one rank holds during a run. Made by `runtime`, passed to the functions of `train/`; nothing is global."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.checkpoint import CheckpointStore
from meshwright.config.schema import Config
from meshwright.data.loader import Loader
from meshwright.distributed.stop import StopFlag
from meshwright.distributed.watch import Watchdog
from meshwright.distributed.world import Ranks
from meshwright.observe.clock import StepClock
from meshwright.observe.progress import NullProgress
from meshwright.observe.trace import Profile
from meshwright.parallel.apply import Engine
from meshwright.spec.plan import Plan
from meshwright.train.objectives import Objective
from meshwright.train.recorder import Recorder
from meshwright.train.schedule import Budget
from meshwright.train.state import TrainState

__all__ = ["Context"]


@dataclass
class Context:
    """data_rank: this rank's place among those that see different samples.

    identity: what a resume must find unchanged, as JSON (model numbers, tokenizer, rows of the data, seed).
    """

    config: Config
    plan: Plan
    ranks: Ranks
    device: torch.device
    data_rank: int
    engine: Engine
    objective: Objective
    train_loader: Loader
    valid_loader: Loader | None
    store: CheckpointStore
    clock: StepClock
    recorder: Recorder
    progress: NullProgress
    profile: Profile
    stop: StopFlag
    watchdog: Watchdog
    budget: Budget
    identity: dict[str, Any]
    state: TrainState = field(default_factory=TrainState)
    started: float = field(default_factory=time.monotonic)
    saved_at: int | None = None
    """Step of the newest save of this process, so that the last one is not written twice."""

    @property
    def is_lead(self) -> bool:
        return self.ranks.rank == 0

    def elapsed(self) -> float:
        """Seconds of training, earlier parts of a resumed run included."""
        return self.state.seconds + time.monotonic() - self.started

    def out_of_time(self) -> bool:
        """Only the lead's clock decides; the decision reaches the others through `agree`."""
        return self.is_lead and self.budget.hours is not None and self.elapsed() >= self.budget.hours * 3600
