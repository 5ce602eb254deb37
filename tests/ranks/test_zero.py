"""ZeRO-1, ZeRO-2, ZeRO-3 and hybrid sharding compute what one process computes."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.config.schema import LossScaleConfig, OptimizerConfig
from meshwright.parallel import engine, zero, zero3
from meshwright.parallel.apply import Engine
from meshwright.spec.layout import Layout
from tests.ranks.replicas import Job, Outcome, Toy, _copy, build, loss_sum, make_batch, make_model, one_step, oracle, train
from tests.ranks.test_replicate import difference

TOLERANCE = 1e-11
STAGES = (1, 2, 3)
SHAPES = {"2": {"dp_shard": 2}, "4": {"dp_shard": 4}, "2x2": {"dp_replicate": 2, "dp_shard": 2}}


def job_of(shape: str, stage: int, **settings: Any) -> Job:
    layout = Layout(**SHAPES[shape], zero=stage)
    return Job(world=layout.world, layout=layout, **settings)


def run(ranks, job: Job, fault: str = "") -> list[Outcome]:
    return ranks(job.world).run(train_with, job, fault)


def train_with(job: Job, fault: str) -> Outcome:
    with FAULTS[fault]():
        return train(job)


# ---- faults that the tests below must see --------------------------------------------------------------------------------


def _dirty_gaps() -> Any:
    """What lies between parameters is summed as if it were a gradient."""
    stage, use = zero.StreamedGradients._stage, zero.ShardedGroup.use_gradient

    def streamed(self: zero.StreamedGradients, bucket: Any) -> torch.Tensor:
        return stage(self, bucket).fill_(1.0)

    def whole(self: zero.ShardedGroup, dtype: torch.dtype) -> None:
        use(self, dtype)
        self.gradient.fill_(1.0)

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(zero.StreamedGradients, "_stage", streamed))
    stack.enter_context(mock.patch.object(zero.ShardedGroup, "use_gradient", whole))
    return stack


def _norm_of_one_axis() -> Any:
    """The engine takes the norm of its own shard for that of the gradient."""
    return mock.patch.object(engine, "reduce_sum", lambda value, groups: value)


FAULTS: dict[str, Any] = {
    "": contextlib.nullcontext,
    "replicas not summed": lambda: mock.patch.object(zero.ShardedGradients, "_sum_replicas", lambda self, part: None),
    "gaps counted": _dirty_gaps,
    "weights not gathered": lambda: mock.patch.object(zero.ShardedParameters, "publish", lambda self, updated: None),
    "weights of one shard": lambda: mock.patch.object(zero3, "all_gather_single", _own_copies),
    "norm of one axis": _norm_of_one_axis,
    "unused not zeroed": lambda: mock.patch.object(zero.StreamedGradients, "_zero_rest", _stale),
}


OF_STAGES = {"unused not zeroed": (2, 3), "weights not gathered": (1, 2), "weights of one shard": (3,)}
"""Faults that are not in every stage."""


def _stale(self: zero.StreamedGradients, bucket: Any) -> None:
    for slot in bucket.slots:
        if not slot.touched:
            self._view(bucket.group, slot).fill_(1e-3)


def _own_copies(output: torch.Tensor, piece: torch.Tensor, **options: Any) -> Any:
    output.copy_(piece.repeat(output.numel() // piece.numel()))
    return Late(lambda: None)


# ---- parity --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.1, 0.0])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stage", STAGES)
def test_three_steps_equal_one_process_of_plain_torch(ranks, stage, shape, accumulation, clip):
    # Tied head, a block used twice, a frozen and an unused weight, uneven masks, empty micro-batches. Red with each of the
    # faults of `test_a_fault_is_seen`. Measured: 4e-15.
    job = job_of(shape, stage, accumulation=accumulation, clip=clip)
    reference = oracle(job)
    for outcome in run(ranks, job):
        assert outcome.buckets >= 4
        assert outcome.losses == pytest.approx(reference.losses, rel=1e-12)
        assert [float(norm) for norm in outcome.norms] == pytest.approx([float(n) for n in reference.norms], rel=1e-12)
        assert difference(outcome, reference) < TOLERANCE
        assert outcome.steps[-1]["sync"] is None


@pytest.mark.parametrize(
    ("fault", "stage"),
    [(fault, stage) for fault in FAULTS if fault for stage in OF_STAGES.get(fault, STAGES)],
)
def test_a_fault_is_seen(ranks, fault, stage):
    job = job_of("2x2", stage, accumulation=2)
    worst = max(difference(outcome, oracle(job)) for outcome in run(ranks, job, fault))
    assert worst > 1e6 * TOLERANCE


@pytest.mark.parametrize("stage", STAGES)
def test_sgd_in_fp32_is_within_1e_5_of_each_tensors_largest_element(ranks, stage):
    # Red with "norm of one axis" and "replicas not summed".
    job = job_of("2x2", stage, precision="fp32", accumulation=2, optimizer=OptimizerConfig(kind="sgd", momentum=0.9))
    reference = oracle(job)
    for outcome in run(ranks, job):
        assert outcome.losses == pytest.approx(reference.losses, rel=1e-5)
        assert [float(norm) for norm in outcome.norms] == pytest.approx([float(n) for n in reference.norms], rel=1e-5)
        for name, expected in [*reference.gradients.items(), *reference.weights.items()]:
            ours = outcome.gradients if expected is reference.gradients.get(name) else outcome.weights
            assert float((ours[name] - expected).abs().max()) <= 1e-5 * float(expected.abs().max()), name


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_two_shards_compute_bit_for_bit_what_two_replicas_do(ranks, stage, precision):
    # Masters, moments and averages. Two addends have one sum, whatever the algorithm; clipping would reorder the norm.
    # Red when masters start from rounded weights, and when the average follows the weights before the update.
    settings = {"precision": precision, "clip": 0.0, "ema": 0.8, "loss_scale": LossScaleConfig(initial=256.0)}
    plain = ranks(2).run(train, Job(world=2, **settings))[0]
    for outcome in run(ranks, job_of("2", stage, **settings)):
        assert outcome.losses == plain.losses
        assert outcome.state.keys() == plain.state.keys()
        assert all(torch.equal(outcome.state[name], value) for name, value in plain.state.items())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("culprit", range(4))
def test_an_overflow_on_any_one_rank_makes_all_skip(ranks, stage, culprit):
    # Red when the parameter is named by the rank that holds it alone.
    scale = LossScaleConfig(initial=1024.0, interval=2)
    job = job_of("2x2", stage, precision="fp16", steps=4, accumulation=2, loss_scale=scale, ema=0.9)
    for outcome in run(ranks, replace(job, inf=(2, culprit, "layers.1.up.weight"))):
        assert [step["skipped"] for step in outcome.steps] == [False, False, True, False]
        assert [step["unchanged"] for step in outcome.steps] == [False, False, True, False]
        assert [step["culprit"] for step in outcome.steps] == [None, None, "layers.1.up.weight", None]
        assert [step["scale"] for step in outcome.steps] == [1024.0, 1024.0, 2048.0, 1024.0]
        assert outcome.steps[-1]["sync"] is None


def diverging_flag(job: Job, culprit: int) -> tuple[bool, bool]:
    """A gradient that turned infinite after the reduction, on one rank only."""
    made = build(job)
    made.zero()
    with made.backward_scope(last=True):
        (loss_sum(made.model, *make_batch(0)) * 1e-3).backward()
    made.finish()
    if dist.get_rank() == culprit:
        made.parameters.ranges[0].gradient[0] = torch.inf
    before = [part.master.clone() for part in made.parameters.ranges]
    info = made.update(0.1, 1.0)
    same = all(torch.equal(part.master, kept) for part, kept in zip(made.parameters.ranges, before, strict=True))
    return bool(info.skipped), same


@pytest.mark.parametrize("culprit", [0, 3])
def test_the_flag_itself_is_agreed_on(ranks, culprit):
    # Red when `agree_any` is left out: the norm tells only the ranks of one dp_shard group.
    assert ranks(4).run(diverging_flag, job_of("2x2", 2, precision="fp16"), culprit) == [(True, True)] * 4


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_overlap_changes_no_bit(ranks, stage, precision):
    job = job_of("2x2", stage, accumulation=2, precision=precision, ema=0.5)
    on, off = run(ranks, job), run(ranks, replace(job, overlap=False))
    for a, b in zip(on, off, strict=True):
        assert a.losses == b.losses and torch.equal(torch.stack(a.norms), torch.stack(b.norms))
        assert all(torch.equal(b.state[name], value) for name, value in a.state.items())


@pytest.mark.parametrize("stage", STAGES)
def test_compiled_blocks_compute_the_same_bits(ranks, stage):
    # The hooks that wait for a block's weights lie outside of what is compiled.
    job = job_of("2", stage, accumulation=2, precision="fp32", steps=2)
    eager, compiled = run(ranks, job), run(ranks, replace(job, compile="eager"))
    assert compiled[0].losses == eager[0].losses
    assert all(torch.equal(compiled[0].state[name], value) for name, value in eager[0].state.items())


# ---- nothing is read before it is there ----------------------------------------------------------------------------------


class Late:
    """A collective that happens when it is waited for, and not before."""

    def __init__(self, collective: Any, *tensors: torch.Tensor, **options: Any):
        self.call = lambda: collective(*tensors, **options)

    def wait(self) -> None:
        self.call()


def late(collective: Any) -> Any:
    def start(*tensors: torch.Tensor, async_op: bool = False, **options: Any) -> Any:
        return Late(collective, *tensors, **options) if async_op else collective(*tensors, **options)

    return start


def train_late(job: Job, fault: str) -> Outcome:
    with contextlib.ExitStack() as stack:
        for module, name in ((zero, "all_gather_single"), (zero, "reduce_scatter_single"), (zero3, "all_gather_single")):
            stack.enter_context(mock.patch.object(module, name, late(getattr(module, name))))
        if fault == "blocks do not wait":
            stack.enter_context(mock.patch.object(zero.ShardedParameters, "_hook_forward", lambda self: None))
        if fault == "the rest does not wait":
            stack.enter_context(mock.patch.object(zero.ShardedParameters, "settle_shared", lambda self: None))
        if fault == "nobody waits":
            stack.enter_context(mock.patch.object(zero3.GatheredPart, "wait", lambda self: None))
        return train_without_looking(job)


def train_without_looking(job: Job) -> Outcome:
    """Steps one after another: nothing but forward and backward themselves may wait for weights."""
    made, out = from_meta(job), Outcome()
    for step in range(job.steps):
        one_step(made, job, dist.get_rank(), step, out)
    out.state = _copy(made)
    return out


def from_meta(job: Job) -> Engine:
    """The weights of `make_model`, filled into a model that came without memory."""
    with torch.device("meta"):
        model = Toy()
    made = build(job, model)
    values = dict(make_model().named_parameters())
    with made.masters() as masters, torch.no_grad():
        for name, parameter in masters.named_parameters():
            parameter.copy_(values[name])
    return made


@pytest.mark.parametrize("stage", STAGES)
def test_a_collective_may_take_until_it_is_waited_for(ranks, stage):
    # Small buckets, so that blocks have weights that nobody else waits for. Red too when the parameters of a meta model are
    # views to autograd: weights that arrive in forward then count as changed after their use.
    job = job_of("2x2", stage, accumulation=2, bucket_bytes=500)
    expected = ranks(4).run(train_without_looking, job)[0]
    for outcome in ranks(4).run(train_late, job, ""):
        assert outcome.losses == expected.losses
        assert all(torch.equal(outcome.state[name], value) for name, value in expected.state.items())
    for fault in ("blocks do not wait", "the rest does not wait") if stage < 3 else ("nobody waits",):
        assert ranks(4).run(train_late, job, fault)[0].losses != expected.losses, fault
