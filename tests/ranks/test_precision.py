"""Reduced precision on ranks: every rank takes the same overflow decision, masters are exact, nothing diverges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from meshwright.config.schema import LossScaleConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from meshwright.train.schedule import learning_rate
from tests.ranks.replicas import Job, Outcome, build, loss_sum, make_batch, make_model, oracle, train

WORLD = 3
FP16 = Job(world=WORLD, precision="fp16", steps=5, loss_scale=LossScaleConfig(initial=1024.0, interval=2), ema=0.9)


def run(ranks, job: Job) -> list[Outcome]:
    return ranks(job.world).run(train, job)


@pytest.mark.parametrize("culprit", range(WORLD))
def test_an_overflow_on_any_one_rank_makes_all_skip_and_halves_the_scale(ranks, culprit):
    # Red when the decision is each rank's own before reduction, and when the scaler of one rank is not told.
    outcomes = run(ranks, replace(FP16, inf=(2, culprit, "layers.1.up.weight")))
    for outcome in outcomes:
        assert [step["skipped"] for step in outcome.steps] == [False, False, True, False, False]
        assert [step["unchanged"] for step in outcome.steps] == [
            False,
            False,
            True,
            False,
            False,
        ]  # bitwise, moments and EMA too
        assert [step["culprit"] for step in outcome.steps] == [None, None, "layers.1.up.weight", None, None]
        assert [step["scale"] for step in outcome.steps] == [1024.0, 1024.0, 2048.0, 1024.0, 1024.0]  # grown after 2 good steps
        assert outcome.steps[-1]["next"] == 2048.0
        assert [step["updates"] for step in outcome.steps] == [1, 2, 2, 3, 4]
        assert outcome.steps[-1]["sync"] is None
        assert all(torch.equal(outcome.state[name], value) for name, value in outcomes[0].state.items())


def test_the_learning_rate_of_the_step_after_a_skipped_one_is_that_of_the_skipped_one(ranks):
    job = replace(FP16, inf=(2, 1, "norm.weight"))
    config = TrainConfig(schedule=ScheduleConfig(kind="linear", warmup=2))
    updates = [0] + [step["updates"] for step in run(ranks, job)[0].steps]
    rates = [learning_rate(config, done, total=10) for done in updates]
    assert rates[3] == rates[2]
    assert rates[4] != rates[3]


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_without_a_loss_scale_too_a_gradient_that_is_not_finite_changes_nothing_anywhere(ranks, precision, culprit):
    job = Job(world=2, precision=precision, inf=(1, culprit, "layers.2.down.weight"), ema=0.5)
    for outcome in run(ranks, job):
        assert [step["unchanged"] for step in outcome.steps] == [False, True, False]
        assert [step["skipped"] for step in outcome.steps] == [False, True, False]
        assert [step["culprit"] for step in outcome.steps] == [None, "layers.2.down.weight", None]
        assert [step["updates"] for step in outcome.steps] == [1, 1, 2]
        assert outcome.steps[-1]["sync"] is None


def diverging_flag(culprit: int) -> tuple[bool, bool]:
    """A gradient that turned infinite after the reduction, on one rank only."""
    engine = build(Job(world=2, precision="fp16"))
    engine.zero()
    with engine.backward_scope(last=True):
        (loss_sum(engine.model, *make_batch(0)) * 1e-3).backward()
    engine.finish()
    if dist.get_rank() == culprit:
        engine.parameters.groups[0].gradient[0] = torch.inf
    before = engine.parameters.groups[0].master.clone()
    info = engine.update(0.1, 1.0)
    return bool(info.skipped), torch.equal(before, engine.parameters.groups[0].master)


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_flag_itself_is_agreed_on(ranks, culprit):
    # Red when `agree_any` is left out: the other rank updates and the replicas part for good.
    assert ranks(2).run(diverging_flag, culprit) == [(True, True)] * 2


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.02), ("fp16", 0.004), ("fp32", 2e-6)])
@pytest.mark.parametrize("world", [1, 2])
def test_training_stays_near_the_fp64_reference(ranks, precision, tolerance, world):
    # Relative L2 distances; red with "mean over ranks" and "micro-steps overwrite" (0.3 and more).
    job = Job(world=world, accumulation=2, precision=precision, clip=0.0, optimizer=OptimizerConfig(eps=1e-2))
    reference = oracle(replace(job, precision="fp64"))
    outcome = run(ranks, job)[0] if world > 1 else train(job)
    assert outcome.losses == pytest.approx(reference.losses, rel=tolerance)
    assert distance(outcome.gradients, reference.gradients) < tolerance
    start = dict(make_model().named_parameters())
    moved = {name: weight - start[name].detach() for name, weight in reference.weights.items()}
    ours = {name: weight.double() - start[name].detach() for name, weight in outcome.weights.items()}
    assert distance(ours, moved) < tolerance
    assert all(weight.dtype == torch.float32 for name, weight in outcome.weights.items() if not name.startswith("frozen"))


def distance(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """|ours - reference| / |reference| over the trained parameters together."""
    names = [name for name in reference if not name.startswith("frozen")]
    apart = sum(float((ours[name].double() - reference[name]).square().sum()) for name in names)
    return (apart / sum(float(reference[name].square().sum()) for name in names)) ** 0.5


def bf16_steps() -> float:
    """Largest difference between our masters and torch's AdamW in fp32 fed with the very same reduced gradients."""
    job = Job(world=2, precision="bf16", clip=0.0, optimizer=OptimizerConfig(weight_decay=0.0))
    engine = build(job)
    each = list(engine.parameters.each())
    shadow = [torch.nn.Parameter(slot.of(group.master).clone()) for group, slot in each]
    settings = {"lr": job.lr, "betas": job.optimizer.betas, "eps": job.optimizer.eps, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(shadow, fused=True, **settings)  # in one pass, as ours is on a CPU
    rows, worst = slice(dist.get_rank() * 4, dist.get_rank() * 4 + 4), 0.0
    for step in range(3):
        engine.zero()
        tokens, labels = make_batch(step)
        with engine.backward_scope(last=True):
            (loss_sum(engine.model, tokens[rows], labels[rows]) / 30).backward()
        engine.finish()
        for parameter, (group, slot) in zip(shadow, each, strict=True):
            assert group.gradient.dtype == torch.float32
            parameter.grad = slot.of(group.gradient).clone()
        engine.update(job.lr, job.clip)
        optimizer.step()
        for parameter, (group, slot) in zip(shadow, each, strict=True):
            worst = max(worst, float((slot.of(group.master) - parameter.detach()).abs().max()))
            assert torch.equal(slot.parameter.detach(), slot.of(group.master).to(torch.bfloat16))
    return worst


def test_bf16_masters_move_as_fp32_adamw_and_the_weights_are_their_rounding(ranks):
    # Red when the update reads the bf16 weights (3e-4), or when the working copy is written before the update.
    assert max(ranks(2).run(bf16_steps)) < 2e-8


def summed_in_fp32() -> tuple[float, float]:
    """Gradients 1 on rank 0 and 2^-10 on rank 1, in bf16 of 8 bits: the sum needs fp32. Then 1 + 2^-10 over micro-steps."""
    model = torch.nn.Linear(1, 1, bias=False)
    engine = build(Job(world=2, precision="bf16"), model)
    out = []
    for micro in (1, 2):
        engine.zero()
        for number in range(micro):
            small = dist.get_rank() == 1 if micro == 1 else number == 1
            with engine.backward_scope(last=number == micro - 1):
                model(torch.full((1, 1), 2.0**-10 if small else 1.0, dtype=torch.bfloat16)).sum().backward()
        engine.finish()
        out.append(float(engine.parameters.groups[0].gradient[0]))
    return out[0], out[1]


def test_bf16_gradients_are_summed_in_fp32_over_ranks_and_micro_steps(ranks):
    assert ranks(2).run(summed_in_fp32) == [(1 + 2.0**-10, 2 * (1 + 2.0**-10))] * 2
