"""Reductions and agreements over gloo ranks, and groups over several mesh axes."""

from __future__ import annotations

import math
import threading
import time

import pytest
import torch
import torch.distributed as dist

from meshwright import compat
from meshwright.distributed.mesh import AxisGroups, coordinate, data_rank
from meshwright.distributed.reduce import agree, barrier, broadcast_json, gather_json, max_scalars, sum_scalars
from meshwright.distributed.selftest import Link, measure_links
from meshwright.distributed.stop import StopFlag
from meshwright.errors import MeshwrightError, RankFailure
from meshwright.spec.layout import Layout
from tests.ranks.pool import joined, layout_mesh


def scalars() -> tuple[list[float], list[float], list[float]]:
    ranks = joined()
    # 1e16 + 1 - 1e16 is 0 when added in turn in fp64: the sum must round once
    mine = [float(ranks.rank + 1), [1e16, 1.0, -1e16][ranks.rank], float(2**53 - 3) if ranks.rank == 0 else 1.0]
    odd = [math.nan if ranks.rank == 1 else 1.0, math.inf if ranks.rank == 0 else -math.inf]
    return sum_scalars(mine, ranks.control), max_scalars(mine, ranks.control), sum_scalars(odd, ranks.control)


# mutation tried: sum() for math.fsum() gives 0.0 for the second value
def test_sums_round_once_and_are_the_same_on_every_rank(ranks):
    results = ranks(3).run(scalars)
    for sums, largest, odd in results:
        assert sums == [6.0, 1.0, float(2**53 - 1)] and largest == [3.0, 1e16, float(2**53 - 3)]
        assert all(map(math.isnan, odd))


def nan_is_largest() -> list[float]:
    return max_scalars([math.nan if joined().rank == 1 else 5.0, float(joined().rank)], joined().control)


# mutation tried: plain max() returns 5.0 for (5.0, nan)
def test_a_nan_is_never_lost_in_a_maximum(ranks):
    for first, second in ranks(2).run(nan_is_largest):
        assert math.isnan(first) and second == 1.0


def exchange() -> tuple[list[object], object]:
    control = joined().control
    mine = {"rank": joined().rank, "text": "ä" * 100 * joined().rank, "none": None}
    return gather_json(mine, control), broadcast_json(mine, control, source=1)


def test_values_of_unequal_length_cross_unchanged(ranks):
    expected = [{"rank": rank, "text": "ä" * 100 * rank, "none": None} for rank in range(3)]
    assert ranks(3).run(exchange) == [(expected, expected[1])] * 3


def refuse_objects() -> str:
    try:
        gather_json(object(), joined().control)
    except TypeError as error:
        return str(error)
    return ""


def test_what_is_no_json_is_refused(ranks):
    assert all("not JSON serializable" in text for text in ranks(2).run(refuse_objects))


def disagree(values: list[object]) -> str:
    try:
        agree(values[joined().rank], joined().control, "the config digest")
    except MeshwrightError as error:
        return str(error)
    return ""


def test_the_rank_that_differs_is_named_on_every_rank(ranks):
    assert ranks(3).run(disagree, ["a", "a", "a"]) == [""] * 3
    assert ranks(3).run(disagree, [{"x": 1, "y": 2}, {"y": 2, "x": 1}, {"x": 1, "y": 2}]) == [""] * 3
    for text in ranks(3).run(disagree, ["a", "b", "a"]):
        assert text == 'the ranks do not agree on the config digest: rank 1 has "b"; the others have "a"'


def late(seconds: float) -> str:
    # a group of its own: gloo does not use a group again after a time-out
    group = dist.new_group(backend="gloo")
    if joined().rank == 1:
        time.sleep(seconds)
    try:
        barrier(group, 0.5, "the end of the epoch")
    except RankFailure as error:
        return str(error)
    return ""


def test_a_barrier_names_who_is_missing(ranks):
    first, _ = ranks(2).run(late, 1.5)
    assert "rank 0 waited 0.5 s at the end of the epoch" in first and "1" in first.split(":", 1)[1]
    assert ranks(2).run(late, 0.0) == ["", ""]


def stop_together() -> tuple[bool, bool, bool]:
    stop = StopFlag()
    before = stop.agreed(joined().control)
    if joined().rank == 1:
        stop.request()
    return before, stop.local, stop.agreed(joined().control)


def test_one_ranks_request_stops_all_at_the_same_boundary(ranks):
    assert ranks(3).run(stop_together) == [(False, False, True), (False, True, True), (False, False, True)]


def control_beside_checkpoint() -> list[list[float]]:
    """A thread saves over its own group while the main thread agrees over the other, in no common order."""
    ranks = joined()
    found: list[float] = []

    def save() -> None:
        for index in range(20):
            found.append(sum_scalars([float(index)], ranks.checkpoint)[0])
            time.sleep(0.001 * ranks.rank)

    thread = threading.Thread(target=save)
    thread.start()
    control = [sum_scalars([1.0], ranks.control)[0] for _ in range(20)]
    thread.join()
    return [found, control]


def test_the_checkpoint_group_is_apart_from_the_control_group(ranks):
    for found, control in ranks(2).run(control_beside_checkpoint):
        assert found == [2.0 * index for index in range(20)] and control == [2.0] * 20


def mesh_facts(sizes: dict[str, int]) -> tuple[dict[str, int], tuple[int, int], list[int], list[int], bool]:
    mesh = layout_mesh(Layout(**sizes))
    groups = AxisGroups(mesh)
    whole = groups.over("dp_replicate", "dp_shard", "tp")
    again = groups.over("tp", "dp_shard", "dp_replicate") is whole
    data = dist.get_process_group_ranks(groups.data)
    return coordinate(mesh), data_rank(mesh), data, dist.get_process_group_ranks(whole), again


# mutation tried: without the permute in AxisGroups._make the data groups are (0, 1, 2, 3) and (4, 5, 6, 7)
@pytest.mark.slow
def test_groups_over_several_axes_on_eight_ranks(ranks):
    for rank, facts in enumerate(ranks(8).run(mesh_facts, {"dp_replicate": 2, "dp_shard": 2, "tp": 2})):
        place, data, data_ranks, whole, again = facts
        assert place == {"pp": 0, "dp_replicate": rank // 4, "dp_shard": rank // 2 % 2, "cp": 0, "tp": rank % 2}
        assert data == (rank // 2, 4) and data_ranks == [rank % 2 + 2 * i for i in range(4)]
        assert whole == list(range(8)) and again


def test_groups_over_several_axes_on_four_ranks(ranks):
    for rank, facts in enumerate(ranks(4).run(mesh_facts, {"dp_replicate": 2, "tp": 2})):
        place, data, data_ranks, whole, again = facts
        assert (place["dp_replicate"], place["tp"]) == divmod(rank, 2) and data == (rank // 2, 2)
        assert data_ranks == [rank % 2, rank % 2 + 2] and whole == [0, 1, 2, 3] and again


def links(broken: int) -> list[Link]:
    real = dist.all_reduce

    def adds_a_little(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        tensor += 1.0
        real(tensor, group=group)

    if joined().rank == broken:
        dist.all_reduce = adds_a_little
    try:
        return measure_links(joined())
    finally:
        dist.all_reduce = real


def test_a_selftest_tries_every_pair_and_the_whole(ranks):
    for found in ranks(3).run(links, -1):
        assert [link.ranks for link in found] == [(0, 1), (0, 2), (1, 2), (0, 1, 2)]
        assert all(link.right and link.latency_s > 0 and link.bytes_per_s > 0 for link in found)


def test_a_selftest_finds_wrong_sums(ranks):
    for found in ranks(3).run(links, 2):
        assert [link.right for link in found] == [True, False, False, False]


def pieces() -> tuple[torch.Tensor, torch.Tensor]:
    rank = joined().rank
    gathered, piece = torch.empty(4), torch.empty(2)
    compat.all_gather_single(gathered, torch.tensor([rank, rank + 10.0]))
    compat.reduce_scatter_single(piece, torch.arange(4.0) + rank)
    return gathered, piece


def test_the_renamed_collectives_over_ranks(ranks):
    for rank, (gathered, piece) in enumerate(ranks(2).run(pieces)):
        assert torch.equal(gathered, torch.tensor([0.0, 10.0, 1.0, 11.0]))
        assert torch.equal(piece, torch.tensor([[1.0, 3.0], [5.0, 7.0]][rank]))
