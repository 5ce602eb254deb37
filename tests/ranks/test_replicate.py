"""Data parallelism computes what one process computes: gradients, norm and weights, to fp64 rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.config.schema import OptimizerConfig
from meshwright.errors import LayoutError
from meshwright.parallel.apply import parallelize
from meshwright.parallel.axes import Axes
from meshwright.parallel.engine import Engine
from meshwright.parallel.flat import FlatParameters
from meshwright.parallel.optimizer import FlatOptimizer
from meshwright.parallel.replicate import Gradients
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from tests.ranks.pool import mesh
from tests.ranks.replicas import ROWS, Job, Outcome, make_model, oracle, train

TOLERANCE = 1e-11


def run(ranks, job: Job) -> list[Outcome]:
    return ranks(job.world).run(train, job) if job.world > 1 else [train(job)]


def difference(ours: Outcome, reference: Outcome) -> float:
    """Largest difference in loss, norm, first gradient (over its largest element) and final weights."""
    assert ours.gradients.keys() == reference.gradients.keys() and ours.weights.keys() == reference.weights.keys()
    worst = [abs(a - b) for a, b in zip(ours.losses, reference.losses, strict=True)]
    worst += [float((a - b).abs()) for a, b in zip(ours.norms, reference.norms, strict=True)]
    largest = max(float(value.abs().max()) for value in reference.gradients.values())
    worst += [float((ours.gradients[n] - g).abs().max()) / largest for n, g in reference.gradients.items()]
    worst += [float((ours.weights[n] - w).abs().max()) for n, w in reference.weights.items()]
    return max(worst)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_three_clipped_steps_equal_one_process_of_plain_torch(ranks, world, accumulation):
    # Red with each of the faults of `test_a_fault_is_seen`. Measured: 3e-15.
    job = Job(world=world, accumulation=accumulation)
    reference = oracle(job)
    outcomes = run(ranks, job)
    assert outcomes[0].buckets >= 4
    assert max(float(norm) for norm in reference.norms) > job.clip  # the clip is at work
    for outcome in outcomes:
        assert difference(outcome, reference) < TOLERANCE
        assert all(torch.equal(outcome.state[name], value) for name, value in outcomes[0].state.items())
        assert outcome.steps[-1]["sync"] is None


def test_sgd_and_no_clip_equal_plain_torch(ranks):
    # Red when `clip_coefficient` clips at 0, and when momentum is dropped.
    job = Job(world=2, clip=0.0, optimizer=OptimizerConfig(kind="sgd", momentum=0.9, weight_decay=0.2), lr=0.1)
    for outcome in run(ranks, job):
        assert difference(outcome, oracle(job)) < TOLERANCE
        assert "optimizer/momentum/head.weight" not in outcome.state  # the tie is kept once, under its canonical name
        assert float(outcome.state["optimizer/momentum/embedding.weight"].abs().max()) > 0


@pytest.mark.parametrize(
    "fault", ["no reduction", "mean over ranks", "last bucket forgotten", "tie counted twice", "micro-steps overwrite"]
)
def test_a_fault_is_seen(ranks, fault):
    job = Job(world=2, accumulation=2, mutation=fault)
    worst = max(difference(outcome, oracle(job)) for outcome in run(ranks, job))
    assert worst > 1e6 * TOLERANCE


def test_unused_parameters_get_zeros_and_not_what_the_buffer_held(ranks):
    assert max_unused(ranks, "") == 0.0
    assert max_unused(ranks, "stale gradients") > 0.0


def max_unused(ranks, mutation: str) -> float:
    return max(ranks(2).run(stale_then_unused, mutation))


def stale_then_unused(mutation: str) -> float:
    """Largest gradient of a weight that the second step does not use, after the first one did."""
    from tests.ranks.replicas import _mutated, build, make_batch

    job = Job(world=2, mutation=mutation)
    tokens, _ = make_batch(0)
    with _mutated(job):
        engine = build(job)
        for used in (True, False):
            engine.zero()
            with engine.backward_scope(last=True):
                hidden = engine.model.embedding(tokens)
                (engine.model.unused(hidden) if used else hidden).sum().backward()
            engine.finish()
    group, slot = next((group, slot) for group, slot in engine.parameters.each() if slot.name == "unused.weight")
    return float(slot.of(group.gradient).abs().max())


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_overlap_changes_no_bit(ranks, precision):
    # Red when the buckets of the two ways differ, or when a bucket starts before its last gradient is in.
    job = Job(world=2, accumulation=2, precision=precision)
    on, off = run(ranks, job), run(ranks, replace(job, overlap=False))
    for a, b in zip(on, off, strict=True):
        assert a.losses == b.losses and torch.equal(torch.stack(a.norms), torch.stack(b.norms))
        assert all(torch.equal(b.state[name], value) for name, value in a.state.items())


def launches_during_backward(overlap: bool) -> tuple[list[int], int]:
    """Buckets already under way at each arrival of a gradient in the last backward, and how many there are."""
    from tests.ranks.replicas import build, loss_sum, make_batch

    engine = build(Job(world=2, overlap=overlap))
    seen: list[int] = []
    for slot in engine.parameters.slots:
        slot.parameter.register_post_accumulate_grad_hook(lambda _: seen.append(engine.gradients._lanes[0].launched))
    for _ in range(2):  # after the first step the bucket with the unused weight goes last
        seen.clear()
        engine.zero()
        with engine.backward_scope(last=True):
            loss_sum(engine.model, *make_batch(0)).backward()
        engine.finish()
    return seen, len(engine.gradients.buckets)


def test_buckets_leave_while_backward_runs(ranks):
    # Red when the unused weight's bucket keeps its place: all others then wait behind it.
    for seen, buckets in ranks(2).run(launches_during_backward, True):
        assert seen == sorted(seen) and 0 < seen[len(seen) // 2] < buckets
    for seen, _ in ranks(2).run(launches_during_backward, False):
        assert set(seen) == {0}


@pytest.mark.parametrize("world", [1, 2])
def test_accumulation_k_by_m_equals_one_of_k_times_m_in_fp32(ranks, world):
    whole = run(ranks, Job(world=world, precision="fp32", steps=1))[0].gradients
    for k in (2, 4):
        split = run(ranks, Job(world=world, accumulation=k, precision="fp32", steps=1))[0].gradients
        for name, reference in whole.items():
            if not name.startswith("unused"):
                assert float((split[name] - reference).abs().max()) <= 1e-6 * float(reference.abs().max()), name


def test_the_average_of_the_weights_is_the_same_on_any_number_of_ranks(ranks):
    job = Job(ema=0.7)
    single = train(job)
    for outcome in run(ranks, replace(job, world=4)):
        for name in single.weights:
            if not name.startswith("frozen"):
                average = outcome.state[f"ema/{name}"]
                assert float((average - single.state[f"ema/{name}"]).abs().max()) < TOLERANCE
    assert float((single.state["ema/embedding.weight"] - single.weights["embedding.weight"]).abs().max()) > 1e-4


def test_local_square_norms_are_of_the_gradient_before_reduction(ranks):
    # Red when measured after the reduction (each rank then reports the square of the sum).
    for overlap in (True, False):
        job = Job(world=2, accumulation=2, steps=1, measure_noise=True, overlap=overlap)
        outcomes = run(ranks, job)
        expected = ranks(2).run(own_part_squared, 2)
        assert [outcome.noise[0] for outcome in outcomes] == pytest.approx(expected, rel=1e-12)
    assert run(ranks, replace(job, measure_noise=False))[0].noise == [0]


def own_part_squared(world: int) -> float:
    from tests.ranks.replicas import IGNORE, loss_sum, make_batch, make_model

    model, rank = make_model(), dist.get_rank()
    tokens, labels = make_batch(0)
    mine = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    (loss_sum(model, tokens[mine], labels[mine]) / int((labels != IGNORE).sum())).backward()
    return sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)


def planted_difference(kind: str) -> str | None:
    from tests.ranks.replicas import build

    engine = build(Job(world=2, precision="bf16", ema=0.5))
    if dist.get_rank() == 1:
        if kind == "master":
            next(p for p in engine.parameters_state() if p.name == "model/layers.1.up.weight").tensor[3, 2] += 1e-6
        elif kind == "working":
            engine.model.layers[2].down.bias.data[1] += 1.0
        elif kind == "moment":
            next(p for p in engine.parameters_state() if p.name == "optimizer/exp_avg_sq/norm.weight").tensor[0] = 1e-30
    return engine.sync_check()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("", None),
        ("master", "layers.1.up.weight"),
        ("working", "layers.2.down.bias"),
        ("moment", "optimizer/exp_avg_sq/norm.weight"),
    ],
)
def test_a_replica_that_differs_is_named_on_every_rank(ranks, kind, name):
    assert ranks(2).run(planted_difference, kind) == [name, name]


def pieces_on_ranks(world: int, reduce_over_pieces: bool) -> tuple[float, list[torch.Tensor]]:
    """Each rank owns one of `world` layers, as pipeline stages and shards do; two clipped steps."""
    layers = [nn.Linear(6, 6, dtype=torch.float64, bias=False) for _ in range(world)]
    for number, layer in enumerate(layers):
        nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(number))
    group = dist.group.WORLD if world == dist.get_world_size() else None
    rank = dist.get_rank() if group is not None else None
    own = nn.ModuleList(layers if rank is None else [layers[rank]])
    config = OptimizerConfig(weight_decay=0.0)
    parameters = FlatParameters(own, dtype=torch.float64, device=torch.device("cpu"), no_decay=[], table=None)
    distinct = (group,) if group is not None and reduce_over_pieces else ()
    every = (group,) if group is not None else ()
    engine = Engine(
        parameters,
        Gradients(parameters, None, bucket_bytes=1000, overlap=True),
        FlatOptimizer(config, parameters),
        scaler=None,
        axes=Axes(distinct=distinct, every=every),
    )
    x = torch.ones(2, 6, dtype=torch.float64)
    for _ in range(2):
        engine.zero()
        with engine.backward_scope(last=True):
            sum(layer(x).square().sum() for layer in own).backward()
        engine.finish()
        info = engine.update(0.1, 0.1)
    return float(info.grad_norm), [layer.weight.detach().clone() for layer in own]


def test_the_norm_counts_every_distinct_piece_once(ranks):
    results = ranks(2).run(pieces_on_ranks, 2, True)
    norm, weights = ranks(1).run(pieces_on_ranks, 2, True)[0]
    assert [value for value, _ in results] == pytest.approx([norm, norm], abs=TOLERANCE)
    for rank, (_, own) in enumerate(results):
        assert float((own[0] - weights[rank]).abs().max()) < TOLERANCE


def test_a_norm_that_skips_an_axis_is_seen(ranks):
    results = ranks(2).run(pieces_on_ranks, 2, False)
    norm, _ = ranks(1).run(pieces_on_ranks, 2, True)[0]
    assert all(abs(value - norm) > 1e-3 * norm for value, _ in results)


def uneven(accumulated: bool) -> tuple[float, torch.Tensor]:
    """Micro-batch A: one target of loss 4; B: three of loss 1; over two ranks or two micro-steps."""
    from tests.ranks.replicas import build

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Parameter(torch.tensor([4.0, 1.0, 1.0, 1.0], dtype=torch.float64))

    world = 1 if accumulated else 2
    job = Job(world=world, optimizer=OptimizerConfig(kind="sgd", weight_decay=0.0))
    engine = build(job, Scores())
    parts = [slice(0, 1), slice(1, 4)]
    mine = parts if accumulated else [parts[dist.get_rank()]]
    total = torch.zeros((), dtype=torch.float64)
    for number, part in enumerate(mine):
        loss = engine.model.scores[part].square().sum() / engine.model.scores.detach()[part][0]  # losses equal the scores
        total += loss.detach()
        with engine.backward_scope(last=number == len(mine) - 1):
            (loss / 4).backward()
    engine.finish()
    if world > 1:
        dist.all_reduce(total)
    group, slot = next(iter(engine.parameters.each()))
    return float(total / 4), slot.of(group.gradient).clone()


def test_uneven_targets_weigh_by_token_not_by_micro_batch(ranks):
    # The mean of the micro-batches' means would be 2.5. Red when the group's size divides the sum.
    for loss, gradient in [uneven(True), *ranks(2).run(uneven, False)]:
        assert loss == 1.75
        assert torch.equal(gradient, torch.full((4,), 0.5, dtype=torch.float64))  # 2 * score / score / 4 targets


def refused_mesh(names: tuple[str, str]) -> str:
    try:
        parallelize(
            make_model(),
            plan=Plan(layout=Layout(dp_replicate=2)),
            mesh=mesh((2, 1), names),
            table=None,
            optimizer=OptimizerConfig(),
            device=torch.device("cpu"),
        )
    except LayoutError as error:
        return str(error)
    return ""


def test_a_mesh_without_the_axis_of_the_layout_is_refused(ranks):
    # Red when only the number of ranks is compared: no gradient would be reduced.
    for names in (("replicas", "dp_shard"), ("dp_shard", "dp_replicate")):
        assert all("the mesh has 2 as" in text for text in ranks(2).run(refused_mesh, names))
