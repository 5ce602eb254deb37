"""Any nn.Module through data parallelism and ZeRO: what one process of plain torch computes, to fp64 rounding."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.config.schema import LossScaleConfig, OptimizerConfig
from meshwright.parallel import apply
from meshwright.parallel.apply import Engine, parallelize
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from tests.ranks.foreign_models import (
    CLIP,
    DECAY,
    EPS,
    KINDS,
    LR,
    ROWS,
    STEPS,
    Trained,
    made,
    oracle,
    rows_of,
)
from tests.ranks.pool import layout_mesh
from tests.ranks.replicas import _copy, whole_gradients

LAYOUTS = {
    "data": Layout(dp_replicate=2),
    "zero1": Layout(dp_shard=2, zero=1),
    "zero2": Layout(dp_shard=2, zero=2),
    "zero3": Layout(dp_shard=2, zero=3),
    "data4": Layout(dp_replicate=4),
    "zero1-4": Layout(dp_shard=4, zero=1),
    "zero2-4": Layout(dp_shard=4, zero=2),
    "zero3-4": Layout(dp_shard=4, zero=3),
    "hybrid3": Layout(dp_replicate=2, dp_shard=2, zero=3),
}


@dataclass(frozen=True)
class Job:
    kind: str
    layout: str
    accumulation: int = 1
    recompute: str = "none"
    precision: str = "fp64"
    batch_norm: str = "synchronised"
    gather: str = "twice"
    overlap: bool = True
    steps: int = STEPS
    options: dict[str, Any] = field(default_factory=dict)


def engine_of(job: Job) -> Engine:
    layout = LAYOUTS[job.layout]
    plan = Plan(layout, precision=job.precision, recompute=job.recompute, bucket_mib=1, gather=job.gather, overlap=job.overlap)
    with mock.patch.object(apply, "MIB", 600):  # several buckets
        return parallelize(
            made(KINDS[job.kind]),
            plan=plan,
            mesh=layout_mesh(layout),
            table=None,
            optimizer=OptimizerConfig(weight_decay=DECAY, eps=EPS),
            device=torch.device("cpu"),
            batch_norm=job.batch_norm,  # type: ignore[arg-type]
            **job.options,
        )


def one_step(engine: Engine, job: Job, step: int) -> float:
    """Rows are dealt in runs. Returns the loss of all ranks."""
    kind, rank, world = KINDS[job.kind], dist.get_rank(), dist.get_world_size()
    mine = {name: values.tensor_split(world)[rank] for name, values in rows_of(kind, step).items()}
    parts = [{name: values.tensor_split(job.accumulation)[i] for name, values in mine.items()} for i in range(job.accumulation)]
    total = torch.zeros((), dtype=torch.float64)

    def forward(model: nn.Module, i: int) -> SimpleNamespace:
        return SimpleNamespace(loss_sum=kind.loss(model, parts[i]))

    engine.zero()
    engine.run(len(parts), forward, engine.loss_scale / ROWS, lambda _, taken: total.add_(taken.loss_sum.detach().double()))
    engine.finish()
    dist.all_reduce(total)
    return float(total) / ROWS


def train(job: Job) -> tuple[Trained, list[str], str | None]:
    """And the names of unused parameters, and of a weight that differs between ranks."""
    engine, out = engine_of(job), Trained()
    unused: list[str] = []
    for step in range(job.steps):
        out.losses.append(one_step(engine, job, step))
        if step == 0:
            out.gradients = whole_gradients(engine)
            unused = engine.unused_parameters()
        out.norms.append(float(engine.update(LR, CLIP).grad_norm))
    state = _copy(engine)
    out.weights = {name.removeprefix("model/"): value for name, value in state.items() if name.startswith("model/")}
    out.buffers = {name: buffer.clone() for name, buffer in engine.model.named_buffers()}
    return out, unused, engine.sync_check()


expected = functools.cache(lambda kind: oracle(KINDS[kind]))


def difference(ours: Trained, reference: Trained, buffers: bool = True) -> float:
    """Largest of loss, norm, first gradient over its largest element, weights, and buffers."""
    worst = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours.losses, reference.losses, strict=True)]
    worst += [abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours.norms, reference.norms, strict=True)]
    assert ours.gradients.keys() == reference.gradients.keys()
    largest = max(float(value.abs().max()) for value in reference.gradients.values())
    worst += [float((ours.gradients[n] - g).abs().max()) / largest for n, g in reference.gradients.items()]
    worst += [float((ours.weights[n] - w).abs().max()) for n, w in reference.weights.items()]
    if buffers:
        worst += [float((ours.buffers[n] - b).abs().max()) for n, b in reference.buffers.items() if b.numel()]
    return max(worst)


def check(ranks: Any, job: Job, tolerance: float = 1e-11) -> list[tuple[Trained, list[str], str | None]]:
    found = ranks(LAYOUTS[job.layout].world).run(train, job)
    for trained, _, apart in found:
        assert difference(trained, expected(job.kind)) < tolerance
        assert apart is None
    return found


LARGE = pytest.mark.slow
SHORT = [("odd", layout) for layout in ("data4", "zero1", "zero2-4", "hybrid3")]
SHORT += [("signals", layout) for layout in ("data4", "zero1-4", "zero2", "hybrid3")]
SHORT += [("recommender", "data"), ("crnn", "zero2"), ("branching", "zero1-4"), ("branching", "zero3-4"), ("gpt2", "zero2-4")]
EVERY = [
    pytest.param(kind, layout, marks=() if layout == "zero3" or (kind, layout) in SHORT else LARGE)
    for kind in KINDS
    for layout in LAYOUTS
]


# Mutations, each red: a lesson without `drop` (branching); strays not kept with the rest (odd); what backward needs not
# fetched, or not kept with the rest (aside, without overlap).
@pytest.mark.parametrize(("kind", "layout"), EVERY)
def test_any_module_equals_plain_torch(ranks, kind, layout):
    check(ranks, Job(kind, layout))


@pytest.mark.parametrize(
    "job",
    [
        Job("aside", "zero3", overlap=False),  # nothing is there ahead of its use: red when backward does not ask for it
        Job("odd", "zero3", accumulation=2, recompute="full"),
        Job("odd", "zero3", accumulation=2, gather="once"),
        Job("branching", "hybrid3", accumulation=2),
        Job("gpt2", "zero3", accumulation=2, recompute="selective"),
        pytest.param(Job("encoder", "zero2", accumulation=2, recompute="full"), marks=LARGE),
        pytest.param(Job("recommender", "zero2", accumulation=2), marks=LARGE),
        pytest.param(Job("recommender", "data", accumulation=2), marks=LARGE),
        pytest.param(Job("crnn", "zero3", accumulation=2), marks=LARGE),
        pytest.param(Job("bert", "zero3", accumulation=2, recompute="full", gather="once"), marks=LARGE),
    ],
    ids=lambda job: f"{job.kind}-{job.layout}-{job.recompute}-{job.gather}-{job.overlap}",
)
def test_accumulation_and_recompute_change_nothing(ranks, job):
    check(ranks, job)


# Mutations, each red: without the sum of the ranks' two numbers in backward; without the distances of the ranks' means in the
# variance; statistics of a recomputed block counted twice.
@pytest.mark.parametrize("layout", ["data", "zero3"])
def test_batch_norm_of_all_ranks_is_that_of_one_device_under_recompute_too(ranks, layout):
    check(ranks, Job("signals", layout, recompute="full"))


def test_batch_norm_left_to_each_rank_depends_on_the_layout_and_says_so(ranks):
    job = Job("signals", "data", batch_norm="local")
    (first, _, apart), (second, _, _) = ranks(2).run(train, job)
    assert difference(first, expected("signals")) > 1e-4 and apart is None
    assert not torch.equal(first.buffers["plain.running_mean"], second.buffers["plain.running_mean"])
    low = Job(
        "signals", "data", batch_norm="local", precision="bf16"
    )  # red when weights are not brought to the statistics' dtype
    assert all(abs(trained.losses[0] - first.losses[0]) < 0.2 for trained, _, _ in ranks(2).run(train, low))
    assert "depends on the layout" in ranks(2).run(notes, job)[0][0]
    assert (
        "all data ranks" in ranks(2).run(notes, Job("signals", "data"))[0][0]
        and not ranks(2).run(notes, Job("crnn", "data"))[0]
    )


def notes(job: Job) -> list[str]:
    return list(engine_of(job).notes)


@pytest.mark.parametrize("layout", ["data", "zero3"])
def test_unused_parameters_are_named_and_decay_as_on_one_device(ranks, layout):
    for _, unused, _ in check(ranks, Job("odd", layout)):
        rare = [
            f"rare.0.{name}"
            for name in ("weight", "up.weight", "up.bias", "down.weight", "down.bias", "extra.weight", "extra.bias")
        ]
        assert sorted(unused) == sorted([*rare, "unused.weight", "unused.bias"])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "kind", ["signals", "odd", pytest.param("recommender", marks=LARGE), pytest.param("llama", marks=LARGE)]
)
def test_other_precisions_learn_the_same(ranks, kind, precision):
    # Inputs come in fp64 and are cast; BatchNorm keeps its statistics in fp32. The signals lie at 30 +- 1, where fp16 rounds
    # to 0.016 and bf16 to 0.125; a scale of 64 overflows nowhere. Red when inputs or buffers are not cast.
    options = {"loss_scale": LossScaleConfig(initial=64)} if precision == "fp16" else {}
    limit = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}[precision]
    for trained, _, apart in ranks(2).run(train, Job(kind, "zero3", precision=precision, options=options)):
        losses = zip(trained.losses, expected(kind).losses, strict=True)
        assert max(abs(ours - theirs) / theirs for ours, theirs in losses) < limit and apart is None


# ---- what ZeRO-3 must not get wrong --------------------------------------------------------------------------------------


def misused(kind: str) -> str:
    engine = engine_of(Job("branching" if kind == "route" else "crnn", "zero3"))
    job = Job("branching" if kind == "route" else "crnn", "zero3")
    try:
        if kind == "inside":
            one_step(engine, job, 0)
            engine.zero()
            engine.model.rnn(torch.zeros(2, 3, 24, dtype=torch.float64))
            return ""
        with mock.patch.dict(KINDS, branching=everywhere(True)):  # the same way on both ranks at first
            one_step(engine, job, 0)
            engine.update(LR, CLIP)
        with mock.patch.dict(KINDS, branching=everywhere(False)):
            one_step(engine, job, 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def everywhere(flag: bool) -> Any:
    kind = KINDS["branching"]

    def rows(generator: torch.Generator) -> dict[str, torch.Tensor]:
        found = kind.rows(generator)
        return {**found, "flagged": torch.full_like(found["flagged"], flag)}

    return replace(kind, rows=rows)


def test_another_way_than_the_first_forward_is_an_error_and_no_wrong_number(ranks):
    for said in ranks(2).run(misused, "route"):
        assert (
            said.startswith("MeshwrightError") and "forward came to inner.body.0" in said and "inner.body.1 the first" in said
        )
        assert "zero: 2" in said and "gather_whole" in said


def test_a_part_of_the_model_called_alone_is_an_error(ranks):
    assert all("rnn runs where the model has not gathered its weights" in said for said in ranks(2).run(misused, "inside"))


def gathered(kind: str) -> tuple[int, int]:
    """Parts that the first step has moved to those outside of blocks, and of how many."""
    job = Job(kind, "zero3")
    engine = engine_of(job)
    before = len(engine.parameters._shared)  # type: ignore[attr-defined]
    one_step(engine, job, 0)
    return len(engine.parameters._shared) - before, len(engine.parameters.parts)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "moved"), [("gpt2", "none"), ("llama", "none"), ("odd", "some"), ("branching", "all")])
def test_only_what_must_be_whole_is_kept_whole(ranks, kind, moved):
    for more, parts in ranks(2).run(gathered, kind):
        assert more == 0 if moved == "none" else 0 < more < parts - 1
        assert (parts - more <= 4) == (moved == "all")


# ---- bad input -------------------------------------------------------------------------------------------------------------


def refused(loss: str) -> str:
    model = made(KINDS["recommender"])
    if loss == "nothing":
        model.requires_grad_(False)
    try:
        engine = parallelize(
            model,
            plan=Plan(LAYOUTS["zero1"], precision="fp64"),
            mesh=layout_mesh(LAYOUTS["zero1"]),
            table=None,
            optimizer=OptimizerConfig(),
            device=torch.device("cpu"),
        )
        engine.zero()
        rows = rows_of(KINDS["recommender"], 0)

        def forward(model: nn.Module, i: int) -> Any:
            scores = model(rows["user"], rows["seen"])
            if loss == "nan" and dist.get_rank() == 1:
                return SimpleNamespace(
                    loss_sum=model.score(model.tower(torch.full((1, 12), torch.nan, dtype=torch.float64))).sum()
                )
            kinds = {"vector": scores, "detached": scores.sum().detach(), "nan": scores.sum()}
            return SimpleNamespace(loss_sum=kinds[loss]) if loss in kinds else scores.sum()

        engine.run(1, forward, 1.0, lambda *_: None)
        engine.finish()
        name = engine.nonfinite_parameter()
        return f"{name} {bool(engine.update(LR, CLIP).skipped)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ("vector", "UserError: loss: has shape [8], and backward starts from one number. Sum it over the targets"),
        ("detached", "UserError: loss: depends on no trainable parameter"),
        ("tensor", "UserError: loss: is Tensor, which has no tensor `loss_sum`"),
        ("nothing", "LayoutError: model: has no trainable parameter"),
        ("nan", "tower.0.weight True"),
    ],
)
def test_what_cannot_be_trained_says_why(ranks, loss, says):
    assert all(said.startswith(says) for said in ranks(2).run(refused, loss)), loss
