"""The rank pool itself: results in order, warm, and a failing, dying or hanging rank is named in time."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks.pool import RankError, mesh

pytestmark = pytest.mark.alone


def add(value: float) -> float:
    tensor = torch.tensor(dist.get_rank() + value)
    dist.all_reduce(tensor)
    return tensor.item()


def identity() -> tuple[int, int, int]:
    return dist.get_rank(), os.getpid(), torch.get_num_threads()


def fail_on(culprit: int, how: str) -> None:
    if dist.get_rank() == culprit:
        if how == "raise":
            raise ValueError("a planted failure")
        if how == "exit":
            os._exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


def same_mesh() -> bool:
    return mesh((2, 1), ("a", "b")) is mesh((2, 1), ("a", "b"))


def sum_over_tensor(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor * (dist.get_rank() + 1)
    dist.all_reduce(tensor, group=mesh((2, 1), ("a", "b")).get_group("a"))
    return tensor


def test_results_come_in_rank_order_on_warm_processes_with_one_thread(ranks):
    first = ranks(2).run(identity)
    assert [rank for rank, _, _ in first] == [0, 1]
    assert {threads for _, _, threads in first} == {1}
    assert ranks(2).run("tests.ranks.test_pool:identity") == first


def test_a_function_gets_its_arguments_and_tensors_come_back(ranks):
    assert ranks(2).run(add, 10.0) == [21.0, 21.0]
    assert ranks(2).run(same_mesh) == [True, True]
    for result in ranks(2).run(sum_over_tensor, torch.arange(3.0)):
        assert torch.equal(result, torch.tensor([0.0, 3.0, 6.0]))


@pytest.mark.parametrize(
    ("how", "code", "words"), [("raise", None, "a planted failure"), ("exit", 7, "exit code 7"), ("kill", 137, "SIGKILL")]
)
def test_the_rank_that_failed_is_named_at_once_and_the_pool_recovers(ranks, how, code, words):
    ranks(3).run(identity)
    start = time.monotonic()
    with pytest.raises(RankError, match=words) as caught:
        ranks(3).run(fail_on, 1, how)
    assert time.monotonic() - start < 2.5
    assert caught.value.rank == 1 and caught.value.exit_code == code
    assert ranks(3).run(add, 0.0) == [3.0] * 3


def test_a_hang_is_ended_and_shows_where_each_rank_stood(ranks):
    with pytest.raises(RankError, match=r"no answer within 1 s; ranks \[0, 1\] still run(.|\n)*fail_on"):
        ranks(2).run(fail_on, 1, "hang", timeout=1.0)
    assert ranks(2).run(add, 0.0) == [1.0, 1.0]
