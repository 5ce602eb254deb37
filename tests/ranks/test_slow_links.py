"""Every slow-link method against its own simulation (tests/ranks/slow_links.py), in fp64 to 1e-9; measured 1e-13 and below.

Mutations tried, each red in the test named: the mean taken over the world and not over the replicas, the momentum without
Nesterov's second term, an outer step from the newest mean with overlap, begins that are not moved with the anchor,
gradients still summed over the replicas, the loss divided by the targets of all, a norm over all replicas, moments that start
anew after a round (`test_a_method_is_its_simulation`); a sum in bf16 and not wider, a replica's own piece of it not rounded,
errors not added, Q that starts anew every step (`test_compression_is_its_simulation`); begins, the momentum, what is coming,
errors, Q or the count of steps left out of the checkpoint, sums that a save does not wait for
(`test_a_run_that_was_stopped_in_a_round_goes_on_bitwise`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.checkpoint import CheckpointStore
from meshwright.config.schema import SyncConfig
from meshwright.spec.layout import Layout
from meshwright.spec.slow_links import replica_bytes
from meshwright.train.state import TrainState
from meshwright.verify.cases import opened, steps_of
from tests.ranks.pool import Pools, joined, layout_mesh
from tests.ranks.slow_links import Job, Outcome, Simulation, apart, assembled, on_rank

LIMIT = 1e-9
TWO = Layout(dp_replicate=2)
LOCAL = {"method": "local_sgd", "every": 3}
DILOCO = {"method": "diloco", "every": 3}
LATE = {"method": "diloco", "every": 2, "overlap": True}
LOW = {"compress": "powersgd", "rank": 2}


def compared(ranks: Pools, job: Job) -> tuple[list[Outcome], dict[str, float]]:
    found = ranks(job.layout.world).run(on_rank, job)
    blocks = sorted({block for outcome in found for block in outcome.blocks})
    whole = sorted({name for outcome in found for name in outcome.whole})
    assert {outcome.differs for outcome in found} == {None}
    return found, apart(found, Simulation(job, blocks, whole).run())


METHODS = {
    "local_sgd": Job(LOCAL, TWO),
    "local_sgd, four replicas, SGD": Job(LOCAL, Layout(dp_replicate=4), optimizer={"kind": "sgd", "momentum": 0.9}),
    "diloco": Job(DILOCO, TWO),
    "diloco without momentum, after a warm-up": Job({**DILOCO, "outer_momentum": 0.0, "warmup": 2}, TWO, clip=False),
    "diloco, late": Job(LATE, TWO),
    "diloco, late, every step": Job({**LATE, "every": 1, "outer_lr": 0.5}, Layout(dp_replicate=3), steps=4),
    "diloco in ZeRO-1, masters in host memory": Job(LATE, Layout(dp_replicate=2, dp_shard=2, zero=1), offload="optimizer"),
    "local_sgd in ZeRO-2": Job(LOCAL, Layout(dp_replicate=2, dp_shard=2, zero=2)),
    "diloco in ZeRO-3": Job({**DILOCO, "warmup": 1}, Layout(dp_replicate=2, dp_shard=2, zero=3), recompute="full"),
    "diloco with tensor parallel": Job(DILOCO, Layout(dp_replicate=2, tp=2), model="mqa"),
    "diloco with a pipeline": Job(LATE, Layout(dp_replicate=2, pp=2)),
    "local_sgd with a split backward": Job({**LOCAL, "warmup": 1}, Layout(dp_replicate=2, pp=2), schedule="zbv", chunks=2),
}


SELDOM = (
    "diloco without",
    "local_sgd in ZeRO-2",
    "diloco with tensor",
    "bf16 with",
    "low rank in ZeRO-1",
    "diloco in low rank",
)
"""Methods that are tried again in the long tail only."""


def often(jobs: dict[str, Job]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] * name.startswith(SELDOM)) for name in jobs]


@pytest.mark.parametrize("name", often(METHODS))
def test_a_method_is_its_simulation(ranks, name):
    _, gaps = compared(ranks, METHODS[name])
    assert max(gaps.values()) <= LIMIT, gaps


COMPRESSED = {
    "bf16, four replicas": Job({"compress": "bf16"}, Layout(dp_replicate=4)),
    "bf16 in ZeRO-3": Job({"compress": "bf16"}, Layout(dp_replicate=2, dp_shard=2, zero=3)),
    "bf16 with tensor parallel": Job({"compress": "bf16"}, Layout(dp_replicate=2, tp=2), model="gqa"),
    "low rank": Job(LOW, Layout(dp_replicate=3), clip=False),
    "low rank in ZeRO-1": Job(LOW, Layout(dp_replicate=2, dp_shard=2, zero=1)),
    "low rank in ZeRO-2": Job(LOW, Layout(dp_replicate=2, dp_shard=2, zero=2), micro_batch=3),
    "low rank with a pipeline": Job(LOW, Layout(dp_replicate=2, pp=2)),
    "diloco in bf16": Job({**DILOCO, "compress": "bf16"}, TWO),
    "diloco in low rank": Job({**DILOCO, **LOW}, Layout(dp_replicate=2, tp=2), sequence_parallel=False),
    "diloco in low rank, late": Job({**LATE, **LOW}, TWO),
    "local_sgd in bf16": Job({**LOCAL, "compress": "bf16"}, TWO),
}


@pytest.mark.parametrize("name", often(COMPRESSED))
def test_compression_is_its_simulation(ranks, name):
    found, gaps = compared(ranks, COMPRESSED[name])
    assert max(gaps.values()) <= LIMIT, gaps
    plain = apart(found, Simulation(replace(COMPRESSED[name], sync={**COMPRESSED[name].sync, **UNPRESSED})).run())
    assert max(plain.values()) > 1e-6, "what is compressed loses something"


UNPRESSED = {"compress": "none", "rank": SyncConfig().rank}


def test_a_replica_without_a_target_updates_nothing_and_takes_part_in_the_exchange(ranks):
    # Red when an empty step still decays the weights, and when it is no step of the round.
    job = Job({**DILOCO, "every": 2}, TWO, rows=2, steps=6)
    simulation = Simulation(job)
    known = simulation.run()
    assert simulation.empty, "some step leaves a replica without a target"
    gaps = apart(ranks(2).run(on_rank, job), known)
    assert max(gaps.values()) <= LIMIT, gaps


@pytest.mark.parametrize("sync", [LATE, {"compress": "bf16"}, LOW], ids=["late", "bf16", "low rank"])
@pytest.mark.parametrize(
    "layout",
    [TWO, pytest.param(Layout(dp_replicate=2, dp_shard=2, zero=2), marks=pytest.mark.slow)],
    ids=["replicas", "ZeRO-2"],
)
def test_overlap_of_the_plan_changes_no_bit(ranks, sync, layout):
    job = Job(sync, layout, steps=3)
    one, other = (assembled(ranks(layout.world).run(on_rank, replace(job, overlap=overlap))) for overlap in (True, False))
    assert all(torch.equal(one[name], other[name]) for name in one | other)


# ---- bytes

SENT = {
    "every_step": Job({}, TWO),
    "bf16": Job({"compress": "bf16"}, Layout(dp_replicate=4)),
    "low rank": Job(LOW, TWO),
    "local_sgd": Job(LOCAL, TWO),
    "diloco in bf16": Job({**DILOCO, "compress": "bf16"}, TWO),
    "diloco in low rank, late": Job({**LATE, **LOW}, TWO),
    "diloco in ZeRO-2": Job(DILOCO, Layout(dp_replicate=2, dp_shard=2, zero=2)),
}


@pytest.mark.parametrize("name", SENT)
def test_the_bytes_of_a_step_are_those_of_the_formula(ranks, name):
    # Counted at the collectives. Gaps between parameters are sent too, up to 128 bytes each: 2% of this model.
    job = replace(SENT[name], steps=7)
    found = ranks(job.layout.world).run(on_rank, job)[0]
    sync = job.case().config.train.sync
    matrices = [(s[0], torch.Size(s[1:]).numel()) for _, _, s in found.blocks if len(s) > 1]
    low = [(n, m) for n, m in matrices if sync.rank * (n + m) < n * m]
    elements = sum(torch.Size(shape).numel() for _, _, shape in found.blocks)
    rounds = [sum(found.sent[start : start + (sync.every if sync.local else 1)]) for start in (0, 3)]
    expected = replica_bytes(sync, job.layout.dp_replicate, elements, 8, matrices=low)
    if not sync.local:
        assert found.sent[3] == pytest.approx(expected, rel=0.02)
    elif not sync.overlap:
        assert rounds[1] / sync.every == pytest.approx(expected, rel=0.02)
        assert found.sent[:3] == [0, 0, rounds[0]], "nothing between the exchanges"
    else:  # the second message of a round leaves in the middle of the next one
        assert sum(found.sent[3:7]) / 4 == pytest.approx(expected, rel=0.02)
    assert bool(found.notes) != sync.plain


# ---- skips


def overflowing(sync: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """fp16 on every rank, with a gradient of replica 1 that is infinite in its second step."""
    job = Job(sync, layout, model="decoder")
    config = job.case().config
    scale = config.loss_scale.model_copy(update={"initial": 256.0})
    case = replace(job.case(), config=config.model_copy(update={"precision": "fp16", "loss_scale": scale}))
    ranks = joined()
    with opened(case, replace(job.plan(), precision="fp16"), layout_mesh(layout), ranks) as context:
        engine, told = context.engine, []
        slot = engine.parameters.slots[3]
        planted = None
        before = None
        for number, result in enumerate(steps_of(context, 4, single=False)):
            told.append((bool(result.skipped), bool(torch.isfinite(result.grad_norm)), engine.loss_scale))
            if planted is not None:
                planted.remove()
            own = {piece.name: piece.tensor.clone() for piece in engine.parameters_state()}
            if number == 1:
                kept = all(torch.equal(own[name], before[name]) for name in own if "/model/" in name or "exp_avg" in name)
            before, planted = own, None
            if number == 0 and engine.axes.replicas.rank() == 1:
                planted = slot.parameter.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
        extra = engine.extra_state()
        return {"told": told, "kept": kept, "updates": extra["updates"], "differs": engine.sync_check(), "state": own}


@pytest.mark.parametrize("layout", [TWO, Layout(dp_replicate=2, dp_shard=2, zero=2)], ids=["replicas", "ZeRO-2"])
def test_an_overflow_is_a_matter_of_its_replica_and_the_exchange_goes_on(ranks, layout):
    # Red when the decision is that of all replicas, and when a skipped step is no step of the round.
    found = ranks(layout.world).run(overflowing, {**DILOCO, "every": 4}, layout)
    for rank, each in enumerate(found):
        second = rank >= layout.world // 2
        assert [skipped for skipped, _, _ in each["told"]] == [False] * 4  # the other replica went on
        assert [finite for _, finite, _ in each["told"]] == [True, False, True, True]
        assert each["told"][-1][2] == (128.0 if second else 256.0)
        assert each["kept"] == second
        assert each["updates"] == (3 if second else 4)
        assert each["differs"] is None
        for name, value in each["state"].items():
            if name.startswith("replica/model/") and layout == TWO:
                assert torch.equal(value[0], each["state"][name.removeprefix("replica/")]), "the round has ended"


@pytest.mark.parametrize("compress", [{"compress": "bf16"}, LOW], ids=["bf16", "low rank"])
def test_an_overflow_reaches_every_replica_through_compressed_gradients(ranks, compress):
    # Red when what is not finite stays in the errors: every later step would be skipped.
    for each in ranks(2).run(overflowing, compress, TWO):
        assert [skipped for skipped, _, _ in each["told"]] == [False, True, False, False]
        assert each["kept"] or compress == LOW
        assert each["updates"] == 3 and each["differs"] is None
        assert all(bool(torch.isfinite(value).all()) for value in each["state"].values())


# ---- checkpoints


def stopped(job: Job, root: str, load: int, steps: int, keep: bool) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Any]]:
    """On every rank: loads the checkpoint of step `load`, trains, saves. What it ends with."""
    ranks = joined()
    case = job.case()
    if load:
        case = replace(case, fill=None)  # other values than those of the run
    with (
        CheckpointStore(root, group=ranks.checkpoint, rank=ranks.rank, world=ranks.size, keep=9) as store,
        opened(case, job.plan(), layout_mesh(job.layout), ranks) as context,
    ):
        engine = context.engine
        if load:
            meta = store.load(f"{root}/step-{load:08d}", engine.parameters_state())
            engine.after_load()
            context.state = TrainState.from_dict(meta["state"])
            engine.load_extra(context.state.engine)
        for _ in steps_of(context, steps, single=False):
            pass
        if keep:
            context.state.engine = engine.extra_state()
            meta = {"state": context.state.to_dict()}
            store.save(context.state.step, engine.parameters_state(), meta, background=False)
        return [(piece.name, piece.shape, piece.offset, piece.tensor.clone()) for piece in engine.parameters_state()]


STOPPED = {
    "local_sgd in ZeRO-3": Job(LOCAL, Layout(dp_replicate=2, dp_shard=2, zero=3)),
    "diloco, in its warm-up": Job({**DILOCO, "every": 2, "warmup": 8}, TWO),
    "diloco, late": Job({**LATE, "every": 3}, Layout(dp_replicate=2, tp=2)),
    "diloco in low rank, late, between its messages": Job({**LATE, **LOW, "every": 3}, TWO),
    "low rank in ZeRO-2": Job(LOW, Layout(dp_replicate=2, dp_shard=2, zero=2)),
    "low rank in ZeRO-1 with a pipeline": Job(LOW, Layout(dp_replicate=2, dp_shard=2, zero=1, pp=2)),
}


@pytest.mark.parametrize("name", often(STOPPED))
def test_a_run_that_was_stopped_in_a_round_goes_on_bitwise(ranks, tmp_path, name):
    job = STOPPED[name]
    pool = ranks(job.layout.world)
    through = pool.run(stopped, job, str(tmp_path / "a"), 0, 10, False)
    pool.run(stopped, job, str(tmp_path / "b"), 0, 7, True)
    again = pool.run(stopped, job, str(tmp_path / "b"), 7, 3, False)
    for one, other in zip(through, again, strict=True):
        assert [piece[:3] for piece in one] == [piece[:3] for piece in other]
        differing = [a[0] for a, b in zip(one, other, strict=True) if not torch.equal(a[3], b[3])]
        assert not differing


def test_replicas_of_another_shape_inside_take_a_checkpoint(ranks, tmp_path):
    # What a replica holds is stored by logical name, so that its own layout may change.
    job = Job(LATE, Layout(dp_replicate=2, dp_shard=2, zero=3))
    states = [ranks(4).run(stopped, job, str(tmp_path), 0, 3, True)]
    states.append(ranks(4).run(stopped, replace(job, layout=Layout(dp_replicate=2, tp=2)), str(tmp_path), 3, 0, False))
    one, other = (assembled([Outcome(pieces=pieces) for pieces in state]) for state in states)
    assert one.keys() == other.keys() and {name.partition("/")[0] for name in one} == {"model", "outer", "replica"}
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_another_number_of_replicas_is_refused_before_anything_is_touched(ranks, tmp_path):
    from tests.ranks.pool import RankError

    job = Job(LOCAL, TWO, model="decoder")
    ranks(2).run(stopped, job, str(tmp_path), 0, 2, True)
    with pytest.raises(RankError, match=r"replica/model/.*\[2, .*\[4, "):
        ranks(4).run(stopped, replace(job, layout=Layout(dp_replicate=4)), str(tmp_path), 2, 1, False)
