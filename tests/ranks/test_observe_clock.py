"""Exposed communication between real ranks: a late rank shows as communication on the others, and as its own part on itself."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
import torch.distributed as dist

from meshwright.observe.clock import IDLE, PARTS, StepClock

pytestmark = pytest.mark.alone


def splits(late_part: str | None, steps: int = 7) -> list[dict[str, float]]:
    """Steps of two ranks that all-reduce each step; rank 1 spends 50 ms more in `late_part`."""
    clock = StepClock()
    extra = 0.05 if late_part and dist.get_rank() == 1 else 0.0
    dist.barrier()
    clock.restart()
    found = []
    for _ in range(steps):
        with clock.span("data"):
            time.sleep(0.005 + (extra if late_part == "data" else 0.0))
        with clock.span("compute"):
            time.sleep(0.01 + (extra if late_part == "compute" else 0.0))
            work = dist.all_reduce(torch.ones(1000), async_op=True)
            with clock.waiting():
                work.wait()
        found.append(clock.finish_step().as_dict())
    return found


@pytest.mark.parametrize("late_part", ["data", "compute"])
def test_a_late_rank_is_seen_as_communication_by_the_other(ranks, late_part: str) -> None:
    # mutation tried: work.wait() outside the span -> red
    plain, late = ranks(2).run(splits, None), ranks(2).run(splits, late_part)
    for rank, expected in ((0, "communication"), (1, late_part)):
        for part in (*PARTS, IDLE):
            before, after = (statistics.median(step[part] for step in run[rank]) for run in (plain, late))
            assert after - before == pytest.approx(0.05 if part == expected else 0.0, abs=0.01), (rank, part)
    for run in plain + late:
        for step in run:
            assert sum(seconds for part, seconds in step.items() if part != "wall") == pytest.approx(step["wall"], rel=1e-9)
