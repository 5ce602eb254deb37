"""A user's module, optimizer and loader on ranks compute what a plain torch loop on one device computes, to fp64 rounding.

Mutations tried: in `Window.close` the factor left out (1.4); a stand-in row that counts (0.25); the first group's learning
rate for both (0.3); the scheduler's value not read (0.07); a rank's own weight for that of all (one without rows waits).
"""

from __future__ import annotations

import pytest

from tests.ranks.own_loop import by_hand, by_step, oracle

TOLERANCE = 1e-11


@pytest.mark.parametrize("zero", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_run_step_equals_a_plain_torch_loop(ranks, world: int, zero: str):
    reference = oracle()
    assert min(reference.norms) > 0.5  # the clip is at work
    for outcome in ranks(world).run(by_step, zero, {"micro_batch": 1 if world == 2 else None}):
        assert outcome.difference(reference) < TOLERANCE


@pytest.mark.parametrize("zero", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize(("world", "accumulate"), [(1, 2), (2, 1), (4, 1)])
def test_a_loop_of_ones_own_equals_a_plain_torch_loop(ranks, world: int, accumulate: int, zero: str):
    reference = oracle()
    for outcome in ranks(world).run(by_hand, zero, accumulate):
        assert outcome.difference(reference) < TOLERANCE
