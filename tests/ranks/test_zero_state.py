"""What a rank holds under ZeRO: filling, averages, replicas that differ, bytes, and checkpoints around all layouts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.checkpoint import CheckpointStore
from meshwright.parallel import zero
from tests.ranks.pool import joined
from tests.ranks.replicas import Job, Outcome, _copy, build, loss_sum, make_batch, make_model, one_step
from tests.ranks.test_zero import from_meta, job_of


def filled_from_meta(job: Job) -> list[float]:
    made, out = from_meta(job), Outcome()
    one_step(made, job, dist.get_rank(), 0, out)
    with made.masters() as masters:  # what is there can be read and changed
        masters.norm.weight.data.mul_(2.0)
    one_step(made, job, dist.get_rank(), 1, out)
    return out.losses


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_a_meta_model_is_filled_through_whole_masters(ranks, precision):
    # Red when the masters are not taken back, or not gathered before.
    job = job_of("2", 2, precision=precision, clip=0.0)
    plain = ranks(2).run(filled_from_meta, Job(world=2, precision=precision, clip=0.0))
    assert ranks(2).run(filled_from_meta, job) == plain


def averaged(job: Job) -> tuple[bool, float]:
    """Inside, the weights that all ranks compute with are the averages; afterwards they are themselves, bit for bit."""
    made = build(job)
    for step in range(2):
        one_step(made, job, dist.get_rank(), step, Outcome())
    state = _copy(made)
    before = {slot.name: slot.parameter.detach().clone() for slot in made.parameters.slots}
    with made.averaged():
        apart = max(
            float((slot.parameter.detach() - state[f"ema/{slot.name}"].to(slot.parameter.dtype)).abs().max())
            for slot in made.parameters.slots
        )
    back = all(torch.equal(slot.parameter.detach(), before[slot.name]) for slot in made.parameters.slots)
    return back, apart


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_averages_are_swapped_in_whole(ranks, precision):
    assert ranks(4).run(averaged, job_of("2x2", 2, precision=precision, ema=0.7)) == [(True, 0.0)] * 4


def planted_difference(kind: str) -> str | None:
    made = build(job_of("2x2", 2, precision="bf16", ema=0.5))
    held = {piece.name for piece in made.parameters_state()}
    name = {"master": "model/layers.1.down.weight", "moment": "optimizer/exp_avg_sq/layers.2.down.weight"}.get(kind, "")
    if dist.get_rank() == 3 and kind == "working":
        made.model.layers[2].down.bias.data[1] += 1.0
    elif dist.get_rank() == 3 and name in held:
        next(piece for piece in made.parameters_state() if piece.name == name).tensor.view(-1)[0] += 1e-3
    return made.sync_check()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("", None),
        ("working", "layers.2.down.bias"),
        ("master", "layers.1.down.weight"),
        ("moment", "optimizer/exp_avg_sq/layers.2.down.weight"),
    ],
)
def test_a_replica_whose_shard_differs_is_named_on_every_rank(ranks, kind, name):
    # Red when shards are compared over dp_shard too: they differ by right.
    assert ranks(4).run(planted_difference, kind) == [name] * 4


def noise_of(job: Job) -> tuple[float, float]:
    """What the engine reports, and the square norm of this rank's own part by hand."""
    made, out, rank = build(job), Outcome(), dist.get_rank()
    one_step(made, job, rank, 0, out)
    model, (tokens, labels) = make_model(), make_batch(0)
    rows = len(tokens) // job.world
    if made.gradients.noise_of_one_micro_step:
        mine = slice(rank * rows, rank * rows + rows // job.accumulation)
    else:
        mine = slice(rank * rows, (rank + 1) * rows)
    (loss_sum(model, tokens[mine], labels[mine]) / int((labels != -100).sum())).backward()
    return out.noise[0], sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stage", [1, 2])
def test_noise_is_measured_before_the_reduction(ranks, stage, overlap):
    # Of all micro-steps under ZeRO-1, of the first under ZeRO-2, which keeps no local sum. Red when measured afterwards.
    for ours, by_hand in ranks(2).run(noise_of, job_of("2", stage, accumulation=2, measure_noise=True, overlap=overlap)):
        assert ours == pytest.approx(by_hand, rel=1e-12) and ours > 0


# ---- messages --------------------------------------------------------------------------------------------------------------


def sent(job: Job) -> tuple[dict[str, list[int]], int, int]:
    """Bytes of each message of the second step by its kind (of the whole of which a rank sends a part), of the padded
    gradient, and the number of buckets."""
    made, log = build(job), dict[str, list[int]]()
    one_step(made, job, dist.get_rank(), 0, Outcome())

    def noted(kind: str, call: Any, place: int) -> Any:
        def run(*tensors: torch.Tensor, **options: Any) -> Any:
            if options.get("async_op"):
                log.setdefault(kind, []).append(tensors[place].nbytes)
            return call(*tensors, **options)

        return run

    with (
        mock.patch.object(zero, "reduce_scatter_single", noted("reduce-scatter", zero.reduce_scatter_single, 1)),
        mock.patch.object(zero, "all_gather_single", noted("all-gather", zero.all_gather_single, 0)),
        mock.patch.object(dist, "all_reduce", noted("all-reduce", dist.all_reduce, 0)),
    ):
        one_step(made, job, dist.get_rank(), 1, Outcome())
    elements = sum(group.size for group in made.parameters.groups)
    return log, elements, len(made.gradients.buckets)


@pytest.mark.parametrize("stage", [1, 2])
def test_messages_and_bytes_of_a_step_are_those_of_the_page(ranks, stage):
    # Red when the replicas sum whole buckets, or sum in every micro-step, and when ZeRO-1 reduces in every micro-step.
    for log, elements, buckets in ranks(4).run(sent, job_of("2x2", stage, precision="bf16", accumulation=2)):
        micro_steps = 1 if stage == 1 else 2
        assert len(log["reduce-scatter"]) == micro_steps * buckets
        assert sum(log["reduce-scatter"]) == micro_steps * 4 * elements
        assert len(log["all-gather"]) == buckets and sum(log["all-gather"]) == 2 * elements
        assert len(log["all-reduce"]) == buckets and sum(log["all-reduce"]) == 4 * elements // 2


# ---- checkpoints ---------------------------------------------------------------------------------------------------------

RING = [
    Job(world=2),
    job_of("2", 1),
    job_of("4", 2),
    job_of("2x2", 1),
    Job(world=4),
    job_of("2x2", 2),
    job_of("4", 3),
    job_of("2", 2),
    job_of("2x2", 3),
    Job(),
]


def hop(root: str, job: Job, start: int, steps: int) -> tuple[list[float], int, int]:
    """Loads what lies there, trains `steps` steps and saves. Losses, and bytes read and held by this rank."""
    ranks = joined() if job.world > 1 else None
    made, out = build(job, make_model(seed=start)), Outcome()
    group = ranks.checkpoint if ranks else None
    rank = ranks.rank if ranks else 0
    with CheckpointStore(root, group=group, rank=rank, world=job.world) as store:
        newest = store.newest()
        if newest is not None:
            made.load_extra(store.load(newest, made.parameters_state())["engine"])
            made.after_load()
        read = store.last_load.bytes_read
        for step in range(start, start + steps):
            one_step(made, job, rank, step, out)
        store.save(start + steps, made.parameters_state(), {"engine": made.extra_state()}).wait()
    return out.losses, read, sum(piece.tensor.nbytes for piece in made.parameters_state())


def test_a_checkpoint_goes_round_all_data_parallel_layouts(ranks, tmp_path):
    # Red when after_load does not gather, when a moment's piece is shifted by one element, and when updates are not carried.
    steps = 3
    whole = Job(steps=steps * len(RING), ema=0.9)
    uninterrupted = Outcome()
    alone = build(whole, make_model(seed=0))
    for step in range(whole.steps):
        one_step(alone, whole, 0, step, uninterrupted)
    largest = max(parameter.nbytes for parameter in alone.model.parameters())
    for number, job in enumerate(RING):
        job, start = replace(job, ema=0.9), number * steps
        arguments = (str(tmp_path), job, start, steps)
        results = [hop(*arguments)] if job.world == 1 else ranks(job.world).run(hop, *arguments)
        for losses, read, held in results:
            assert losses == pytest.approx(uninterrupted.losses[start : start + steps], abs=1e-9), job.layout
            assert (read > 0) == (number > 0) and read <= held + largest, "a rank reads its shard"


def pieces_of(job: Job) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [(p.name, p.offset, tuple(p.tensor.shape)) for p in build(job).parameters_state() if p.name.startswith("optim")]


def test_every_element_of_the_optimizer_is_held_by_one_shard(ranks):
    every = list(itertools.chain(*ranks(4).run(pieces_of, job_of("4", 1))))
    assert len(every) == len(set(every))
    moments = {"exp_avg", "exp_avg_sq"}
    elements = sum(torch.Size(shape).numel() for _, _, shape in every)
    assert elements == len(moments) * sum(p.numel() for p in make_model().parameters() if p.requires_grad)
