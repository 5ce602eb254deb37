"""A pipeline computes what one process computes, whatever the schedule."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.config.schema import ModelConfig
from meshwright.distributed import mesh
from meshwright.errors import LayoutError
from meshwright.models import build
from meshwright.parallel.links import Mail
from meshwright.parallel.pipeline import Stages, cut
from meshwright.parallel.pipeline_runner import _Step
from meshwright.parallel.sharing import Sharing
from meshwright.spec.box import Box
from meshwright.spec.layout import Layout
from meshwright.spec.pipeline import UNDER_WAY, alive, pipeline_actions
from meshwright.spec.placement import Placement
from meshwright.spec.plan import Plan
from meshwright.spec.stages import rebalance
from tests.ranks.pipelines import MODELS, Job, StandIn, difference, forward_of, make_batches, make_model, oracle, train
from tests.ranks.pool import layout_mesh

SHAPES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "zero_bubble": {"schedule": "zero_bubble"},
    "zero_bubble x 2": {"schedule": "zero_bubble", "chunks": 2},
    "zbv": {"schedule": "zbv", "chunks": 2},
}
LIMITS = {"loss": 1e-12, "norm": 1e-12, "sums": 1e-12, "gradients": 1e-11, "weights": 1e-11}


def measure(ranks, job: Job) -> dict[str, float]:
    plain = Job(job.name, micros=job.micros, steps=job.steps, dropout=job.dropout, empty=job.empty, layers=job.layers)
    return difference(ranks(job.pp).run(train, job), oracle(plain))


def check(ranks, job: Job) -> None:
    found = measure(ranks, job)
    assert all(found[key] <= limit for key, limit in LIMITS.items()), found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_two_ranks_are_one_process(ranks, name, shape):
    check(ranks, Job(name, pp=2, dropout=0.2 if name in ("tied", "mlm") else 0.0, **SHAPES[shape]))


@pytest.mark.parametrize("micros", [1, 3, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_four_ranks_and_any_number_of_micro_batches(ranks, shape, micros):
    """Five layers on four stages, nine on eight."""
    layers = 9 if "chunks" in SHAPES[shape] else 5
    check(ranks, Job("tied", pp=4, micros=micros, dropout=0.1, layers=layers, **SHAPES[shape]))


@pytest.mark.parametrize(("shape", "split"), [("1f1b", (1, 4)), ("zero_bubble", (4, 1)), ("zbv", (1, 2, 1, 1))])
def test_a_split_of_ones_own(ranks, shape, split):
    check(ranks, Job("decoder", pp=2, split=split, **SHAPES[shape]))


@pytest.mark.parametrize("shape", SHAPES)
def test_micro_batches_without_a_target(ranks, shape):
    """The first and the last, and in one run all of them."""
    check(ranks, Job("mlm", micros=4, empty=(0, 3), steps=2, **SHAPES[shape]))
    check(ranks, Job("classifier", micros=2, empty=(0, 1), steps=1, **SHAPES[shape]))


@pytest.mark.parametrize("shape", ["1f1b", "zero_bubble", "zbv"])
def test_recomputed_blocks(ranks, shape):
    check(ranks, Job("tied", recompute=True, dropout=0.1, **SHAPES[shape]))


def test_compiled_blocks_run_backward_whole(ranks):
    check(ranks, Job("decoder", compile="eager", layers=2, steps=1, micros=2, **SHAPES["zero_bubble"]))


# the mutations themselves are in tests.ranks.pipelines: FAULTS
@pytest.mark.parametrize(
    ("fault", "shape", "seen"),
    [
        ("gradient lost", "1f1b", "gradients"),
        ("gradient lost", "interleaved", "gradients"),
        ("tie not summed", "gpipe", "gradients"),
        ("tie counted twice", "gpipe", "norm"),
        ("weights skipped", "zero_bubble", "gradients"),
        ("weights skipped", "zbv", "weights"),
        ("other micro-batch", "1f1b", "loss"),
    ],
)
def test_faults_are_seen(ranks, fault, shape, seen):
    assert measure(ranks, Job("tied", fault=fault, **SHAPES[shape]))[seen] > 1e-3


# ---- what is where ------------------------------------------------------------------------------------------------------


def describe(job: Job) -> dict[str, Any]:
    model = make_model(job)
    layout = Layout(pp=job.pp)
    stages = cut(model, Plan(layout, schedule=job.schedule, chunks=job.chunks, split=job.split), layout_mesh(layout))
    # as tensor parallelism would leave it: half of the vocabulary
    half = {"embedding.weight": Placement("embedding.weight", (46, 16), Box((23, 0), (23, 16)))}
    sharing = Sharing({**half, "head.weight": replace(half["embedding.weight"], name="head.weight")})
    stages.share(sharing)
    return {
        "blocks": [number for number, block in enumerate(model.layers) if block is not None],
        "names": sorted({name.partition(".")[0] for name, _ in model.named_parameters()}),
        "units": {name: stages.unit(name) for name, _ in model.named_parameters()},
        "placements": sharing.placements,
        "tie": sharing.groups["tie"].size() if "tie" in sharing.groups else 0,
        "length": len(model.layers),
    }


def test_a_rank_has_its_stages_and_nothing_else(ranks):
    first, last = ranks(2).run(describe, Job("tied", split=(2, 3)))
    assert (first["blocks"], last["blocks"]) == ([0, 1], [2, 3, 4]) and first["length"] == last["length"] == 5
    assert (first["names"], last["names"]) == (["embedding", "layers"], ["head", "layers", "norm"])
    assert first["units"]["layers.1.mlp.up.weight"] == (0, 1) and first["units"]["embedding.weight"] == (0, -1)
    assert last["units"]["layers.4.mlp.up.weight"] == (0, 4) and last["units"]["head.weight"] == (0, -1)


def test_both_ends_of_a_tie_say_so(ranks):
    first, *middle, last = ranks(4).run(describe, Job("tied", pp=4))
    ours, theirs = first["placements"]["embedding.weight"], last["placements"]["head.weight"]
    assert ours == Placement("embedding.weight", (46, 16), Box((23, 0), (23, 16)), "tie", counted=True)
    assert theirs == replace(ours, counted=False)
    assert first["tie"] == last["tie"] == 2 and [each["tie"] for each in middle] == [0, 0]


def test_chunks(ranks):
    first, second = ranks(2).run(describe, Job("tied", schedule="interleaved", chunks=2, split=(1, 1, 1, 2)))
    assert (first["blocks"], second["blocks"]) == ([0, 2], [1, 3, 4])
    assert first["units"]["layers.2.attention.out.weight"] == (1, 2) and first["units"]["embedding.weight"] == (0, -1)
    assert second["units"]["norm.weight"] == (1, -1) and second["tie"] == 2


def test_in_a_v_the_first_rank_has_both_ends_of_the_tie(ranks):
    first, second = ranks(2).run(describe, Job("tied", schedule="zbv", chunks=2, split=(1, 1, 1, 2)))
    assert (first["blocks"], second["blocks"]) == ([0, 3, 4], [1, 2])
    assert first["names"] == ["embedding", "layers", "norm"], "the head's weight is the embedding's"
    assert first["units"]["embedding.weight"] == (-1, -1) and first["units"]["norm.weight"] == (1, -1)
    assert first["units"]["layers.3.mlp.up.weight"] == (1, 3) and first["tie"] == 0


def test_without_a_pipeline_nothing_is_cut():
    model = make_model(Job("tied"))
    stages = cut(model, Plan(Layout()), None)
    sharing = Sharing()
    stages.share(sharing)
    assert stages.runner() is None and not sharing.placements and all(block is not None for block in model.layers)
    assert stages.first and stages.last
    assert stages.unit("embedding.weight") == (0, -1) and stages.unit("layers.3.mlp.up.weight") == (0, 3)


# ---- refusals -----------------------------------------------------------------------------------------------------------


class NoSpan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.extra = nn.Linear(2, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.extra(self.layers[0](tokens))


def shares_a_block() -> nn.Module:
    model = make_model(Job("decoder"))
    model.layers[4].mlp = model.layers[0].mlp
    return model


def refusal(which: str) -> str:
    models = {"layers": lambda: nn.Linear(2, 2), "span": NoSpan, "shared": shares_a_block}
    make = models.get(which, lambda: make_model(Job("decoder", layers=3)))
    plans = {
        "few": {"layout": Layout(pp=2), "schedule": "interleaved", "chunks": 2},
        "split": {"layout": Layout(pp=2), "split": (1, 1)},
    }
    plan = Plan(**plans.get(which, {"layout": Layout(pp=2)}))
    with pytest.raises(LayoutError) as caught:
        cut(make(), plan, layout_mesh(plan.layout))
    return str(caught.value)


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("layers", ["Linear", "no `layers`", "Use pp: 1"]),
        ("span", ["NoSpan", "hidden and span", "config.width", "NoSpan.extra.weight", "belongs to no stage"]),
        ("few", ["layout.pp", "4 stages for 3 layers", "pp * chunks <= 3"]),
        ("split", ["plan.split", "2 layers, the model 3", "[2, 1]"]),
        ("shared", ["layers.0.mlp.down.weight = layers.4.mlp.down.weight", "several stages"]),
    ],
)
def test_refusals_say_why(ranks, which, words):
    for text in ranks(2).run(refusal, which):
        assert all(word in text for word in words), text


# ---- memory, time -------------------------------------------------------------------------------------------------------


def prepared(job: Job) -> tuple[StandIn, Stages]:
    model, sharing, layout = make_model(job), Sharing(), Layout(pp=job.pp)
    stages = cut(model, Plan(layout, schedule=job.schedule, chunks=job.chunks), layout_mesh(layout))
    stages.share(sharing)
    return StandIn(model, stages, sharing), stages


def graphs_alive(job: Job) -> tuple[int, int]:
    """Most outputs of a block whose graph exists at once, and how many are left at the end."""
    engine, stages = prepared(job)
    known: list[weakref.ref[Any]] = []
    most = 0

    def watch(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        nonlocal most
        mark = torch.zeros(1)
        output.grad_fn.metadata["mark"] = mark
        known.append(weakref.ref(mark))
        most = max(most, sum(each() is not None for each in known))

    for stage in stages.held:
        engine.model.layers[stages.spans[stage][0]].register_forward_hook(watch)
    gc.disable()
    engine.runner.train(engine, job.micros, forward_of(job, make_batches(job, 0)), 1.0, lambda i, parts: None, nullcontext)
    left = sum(each() is not None for each in known)
    gc.enable()
    return most, left


# red where `_run_backward` reads `self.outputs[unit]` without taking it out
@pytest.mark.parametrize("shape", SHAPES)
def test_activations_are_dropped_as_soon_as_they_are_used(ranks, shape):
    job = Job("decoder", pp=2, micros=6, **SHAPES[shape])
    actions = pipeline_actions(job.schedule, 2, 6, job.chunks)
    for (most, left), mine in zip(ranks(2).run(graphs_alive, job), actions, strict=True):
        assert left == 0
        assert most <= alive(mine)


def most_sent(job: Job, training: bool) -> int:
    """Most tensors that were sent and are kept at once. A work says nothing by itself, as NCCL's while the host is ahead."""
    engine, _ = prepared(job)
    most, send = 0, Mail.send

    def counted(self: Mail, *args: Any) -> None:
        nonlocal most
        send(self, *args)
        most = max(most, len(self))

    forward = forward_of(job, make_batches(job, 0))
    with mock.patch.object(Mail, "send", counted):
        if training:
            engine.runner.train(engine, job.micros, forward, 1.0, lambda i, parts: None, nullcontext)
        else:
            engine.runner.evaluate(engine, job.micros, lambda view, i: forward(view, i).loss_sum[None], lambda i, sums: None)
    return most


# red (8) where `receipts` is empty, (4) in training where only sends wait, (8) in evaluation where only receives tell
def test_sent_tensors_are_dropped_before_the_step_ends(ranks):
    job = Job("decoder", micros=8)
    assert ranks(2).run(most_sent, job, True) == [2, 2]
    assert ranks(2).run(most_sent, job, False) == [UNDER_WAY + 1, 0]


def timeouts() -> set[timedelta | None]:
    """Of all groups that a cut makes."""
    seen: list[timedelta | None] = []
    make = dist.new_subgroups_by_enumeration

    def noted(rows: Any, timeout: timedelta | None = None, **rest: Any) -> Any:
        seen.append(timeout)
        return make(rows, timeout=timeout, **rest)

    with mock.patch.object(dist, "new_subgroups_by_enumeration", noted), mock.patch.object(mesh, "_made", {}):
        prepared(Job("tied"))
        prepared(Job("tied"))
    assert len(seen) == 3, "two links and a tie, made once"
    return set(seen)


def test_a_first_message_may_take_as_long_as_other_collectives(ranks):
    assert ranks(2).run(timeouts) == [{timedelta(minutes=30)}] * 2


def timed(job: Job) -> tuple[dict[int, float], list[float], tuple[int, ...]]:
    engine, _ = prepared(job)
    for _ in range(2):
        engine.zero()
        engine.runner.train(engine, 3, forward_of(job, make_batches(job, 0)), 1.0, lambda i, parts: None, nullcontext)
    return engine.runner.seconds, engine.runner.stage_seconds(), rebalance(**engine.runner.measured())


@pytest.mark.parametrize("shape", ["1f1b", "zbv"])
def test_seconds_of_stages_are_measured_and_lead_to_a_split(ranks, shape):
    job = Job("decoder", **SHAPES[shape])
    outcomes = ranks(2).run(timed, job)
    held = [set(seconds) for seconds, _, _ in outcomes]
    assert set.union(*held) == set(range(2 * job.chunks)) and not held[0] & held[1]
    assert outcomes[0][1:] == outcomes[1][1:], "all ranks know the same"
    for seconds, everyone, split in outcomes:
        assert all(everyone[stage] == spent > 0 for stage, spent in seconds.items())
        assert sum(split) == 5 and len(split) == 2 * job.chunks and min(split) >= 1


def test_the_default_split_weighs_the_head(ranks):
    """A vocabulary that is worth about two layers."""
    assert ranks(2).run(default_split) == [((0, 5), (5, 8))] * 2


def default_split() -> tuple[tuple[int, int], ...]:
    config = ModelConfig(arch="decoder", layers=8, width=16, heads=2, ffn=48, vocab=448, max_len=8)
    return cut(build(config, "lm"), Plan(Layout(pp=2)), layout_mesh(Layout(pp=2))).spans


def test_what_is_not_the_last_stage_ends_at_the_call_of_the_model(ranks):
    assert ranks(2).run(after_the_call) == [[], [0, 1, 2]]


def after_the_call() -> list[int]:
    job = Job("decoder")
    engine, _ = prepared(job)
    inner = forward_of(job, make_batches(job, 0))
    reached: list[int] = []

    def forward(model: Any, number: int) -> Any:
        assert model.config.width == 16
        try:
            parts = inner(model, number)
        except Exception:
            raise AssertionError("a stage that hands on looks like a failure") from None
        reached.append(number)
        return parts

    engine.runner.train(engine, 3, forward, 1.0, lambda i, parts: None, nullcontext)
    return reached


def test_a_loss_that_calls_no_model_is_named(ranks):
    assert ranks(2).run(no_call) == ["", "the loss function does not call the model"]


def no_call() -> str:
    engine, stages = prepared(Job("decoder"))
    step = _Step(engine.runner, engine, 1, lambda model, number: None, 1.0, lambda i, parts: None, nullcontext, {})
    if stages.first:
        return ""
    with pytest.raises(RuntimeError) as caught:
        step.shape  # noqa: B018
    return str(caught.value)
