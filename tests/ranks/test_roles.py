"""Parameters that ranks of one layout share, replicate, pad or tie, and backward in pieces: what one process computes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.checkpoint import CheckpointStore
from meshwright.config.schema import OptimizerConfig
from meshwright.distributed.mesh import coordinate
from meshwright.errors import MeshwrightError
from meshwright.parallel import replicate
from meshwright.parallel.axes import Axes
from meshwright.parallel.buffers import Unit, unit_of
from meshwright.parallel.engine import Engine
from meshwright.parallel.flat import FlatParameters
from meshwright.parallel.optimizer import FlatOptimizer
from meshwright.parallel.precision import working_dtype
from meshwright.parallel.replicate import Gradients
from meshwright.parallel.sharing import Sharing
from meshwright.parallel.zero import ShardedGradients, ShardedParameters, StreamedGradients
from meshwright.parallel.zero3 import GatheredGradients, GatheredParameters
from meshwright.spec.box import Box
from meshwright.spec.layout import Layout
from meshwright.spec.placement import Placement
from tests.ranks.pool import joined, layout_mesh

TOLERANCE = 1e-11
WIDTH, COLUMNS = 6, 9
ADAMW = OptimizerConfig(weight_decay=0.3)


class Scaled(nn.Module):
    """sum of ((x * scale) @ matrix)^2 + (x * both)^2 over all that is here: `scale` and `matrix` work on a rank's columns, all
    ranks of the tensor group compute `both`. `tied` stands at two ends."""

    def __init__(self, columns: slice, padded: int) -> None:
        super().__init__()
        values = torch.Generator().manual_seed(5)
        draw = lambda *shape: torch.randn(*shape, generator=values, dtype=torch.float64)
        scale, matrix, both = draw(WIDTH), draw(WIDTH, COLUMNS), draw(WIDTH)
        mine = matrix[:, columns]
        self.scale = nn.Parameter(scale)
        self.matrix = nn.Parameter(torch.cat([mine, torch.zeros(WIDTH, padded - mine.shape[1])], dim=1))
        self.both = nn.Parameter(both)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale @ self.matrix).square().sum() + (x * self.both).square().sum()


@dataclass(frozen=True)
class Job:
    layout: Layout = field(default_factory=Layout)
    precision: str = "fp64"
    overlap: bool = True
    accumulation: int = 1
    noise: bool = False
    once: bool = False
    fault: str = ""


@dataclass
class Outcome:
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    noise: list[float] = field(default_factory=list)
    sync: str | None = None


def engine_of(job: Job, model: nn.Module, sharing: Sharing | None = None, unit: Any = unit_of) -> Engine:
    """As `parallelize` builds it, with buckets of a few parameters."""
    layout = job.layout
    mesh = layout_mesh(layout) if layout.world > 1 else None
    axes = Axes.of(mesh, layout.zero)
    options: dict[str, Any] = {"dtype": working_dtype(job.precision), "device": torch.device("cpu"), "no_decay": ["scale"]}
    options |= {"table": None, "sharing": sharing, "unit": unit}
    buckets: dict[str, Any] = {"bucket_bytes": 300, "overlap": job.overlap}
    gradients: Gradients
    if not layout.zero:
        parameters = FlatParameters(model, **options)
        gradients = Gradients(parameters, axes.data, **buckets)
    else:
        assert mesh is not None and axes.data is not None
        shards = mesh.get_group("dp_shard")
        if layout.zero == 3:
            gathered = parameters = GatheredParameters(model, shards, once=job.once, **buckets, **options)
            gradients = GatheredGradients(gathered, axes.data, None, **buckets)
            return Engine(parameters, gradients, FlatOptimizer(ADAMW, parameters), scaler=None, axes=axes)
        sharded = parameters = ShardedParameters(model, shards, **buckets, **options)
        replicas = mesh.get_group("dp_replicate") if layout.dp_replicate > 1 else None
        kind = ShardedGradients if layout.zero == 1 else StreamedGradients
        gradients = kind(sharded, axes.data, replicas, **buckets)
    return Engine(parameters, gradients, FlatOptimizer(ADAMW, parameters), scaler=None, axes=axes)


def place_of(layout: Layout) -> tuple[int, int]:
    """(index among the data ranks, index in the tensor group)."""
    if layout.world == 1:
        return 0, 0
    at = coordinate(layout_mesh(layout))
    return at["dp_replicate"] * layout.dp_shard + at["dp_shard"], at["tp"]


def split_model(layout: Layout) -> tuple[Scaled, Sharing]:
    """This rank's columns: 5 of 9 on the first of two, 4 and one of padding on the other."""
    ways, index = layout.tp, place_of(layout)[1]
    padded = -(-COLUMNS // ways)
    columns = slice(index * padded, min(COLUMNS, (index + 1) * padded))
    box = Box((0, columns.start), (WIDTH, columns.stop - columns.start))
    sharing = Sharing()
    if ways > 1:
        sharing.placements = {
            "scale": Placement("scale", (WIDTH,), Box.whole((WIDTH,)), shared="tp", counted=index == 0),
            "matrix": Placement("matrix", (WIDTH, COLUMNS), box),
            "both": Placement("both", (WIDTH,), Box.whole((WIDTH,)), counted=index == 0),
        }
        sharing.groups = {"tp": layout_mesh(layout).get_group("tp")}
    return Scaled(columns, padded), sharing


def batch(step: int, data: int) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + data), dtype=torch.float64)


def whole_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Logical tensors of the masters, put together from the blocks of all ranks, which must agree where they meet."""
    found: dict[str, torch.Tensor] = {}
    mine = [(p.name, p.shape, p.box, p.tensor.clone()) for p in engine.parameters_state()]
    everyone: list[Any] = [mine]
    if dist.is_initialized() and engine.axes.every:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    for name, shape, box, values in (piece for pieces in everyone for piece in pieces):
        if name.startswith("model/"):
            whole = found.setdefault(name.removeprefix("model/"), torch.full(shape, torch.nan, dtype=torch.float64))
            place = box.inside(Box.whole(shape))
            assert bool((whole[place].isnan() | (whole[place] == values)).all()), f"{name}: two ranks hold different values"
            whole[place] = values.double()
    assert not any(bool(whole.isnan().any()) for whole in found.values())
    return found


FAULTS: dict[str, Any] = {
    "": contextlib.nullcontext,
    "shared not summed": lambda: mock.patch.object(replicate.Gradients, "_share", lambda self: None),
    "copies counted": lambda: mock.patch.object(
        FlatParameters,
        "_placements",
        lambda self, every: {n: replace(p, counted=True) for n, p in _placements(self, every).items()},
    ),
    "axis forgotten": lambda: mock.patch.object(Axes, "of", lambda mesh, zero=0: replace(_of(mesh, zero), distinct=())),
}
_placements, _of = FlatParameters._placements, Axes.of


def _counted(self: FlatParameters, every: dict[str, nn.Parameter]) -> dict[str, Placement]:
    return {name: replace(placement, counted=True) for name, placement in _placements(self, every).items()}


def train(job: Job) -> Outcome:
    data, _ = place_of(job.layout)
    out = Outcome()
    with FAULTS[job.fault]():
        model, sharing = split_model(job.layout)
        engine = engine_of(job, model, sharing)
        for step in range(3):
            rows = batch(step, data) if job.layout.dp > 1 else torch.cat([batch(step, 0), batch(step, 1)])
            parts = rows.tensor_split(job.accumulation)
            engine.measure_noise = job.noise
            engine.zero()
            for number, part in enumerate(parts):
                loss = engine.model(part) / 7
                with engine.backward_scope(last=number == len(parts) - 1):
                    loss.backward()
            engine.finish()
            out.noise.append(sum(map(float, engine.micro_square_norms)))
            out.norms.append(float(engine.update(0.05, 1.0).grad_norm))
        out.weights = whole_weights(engine)
        out.sync = None if job.fault else engine.sync_check()
    return out


SHAPES = {
    "tp2": Layout(tp=2),
    "tp2 x dp2": Layout(dp_replicate=2, tp=2),
    "tp2 x zero1": Layout(dp_shard=2, tp=2, zero=1),
    "tp2 x zero2": Layout(dp_shard=2, tp=2, zero=2),
    "tp2 x zero3": Layout(dp_shard=2, tp=2, zero=3),
}


def apart(outcome: Outcome, reference: Outcome) -> float:
    assert outcome.weights.keys() == reference.weights.keys()
    norms = [abs(a - b) / b for a, b in zip(outcome.norms, reference.norms, strict=True)]
    return max(*norms, *(float((outcome.weights[n] - w).abs().max()) for n, w in reference.weights.items()))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_split_shared_replicated_and_padded_parameters_train_as_one_process(ranks, shape, accumulation):
    # Red with each of the faults below. The reference is plain torch: test_the_reference_is_plain_torch.
    reference = train(Job())
    job = Job(layout=SHAPES[shape], accumulation=accumulation)
    for outcome in ranks(job.layout.world).run(train, job):
        assert apart(outcome, reference) < TOLERANCE
        assert outcome.sync is None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fault", ["shared not summed", "copies counted", "axis forgotten"])
def test_a_fault_is_seen(ranks, fault, shape):
    job = Job(layout=SHAPES[shape], fault=fault)
    if fault != "copies counted":  # the holders part ways
        with pytest.raises(Exception, match="two ranks hold different values"):
            ranks(job.layout.world).run(train, job)
        return
    assert max(apart(outcome, train(Job())) for outcome in ranks(job.layout.world).run(train, job)) > 1e5 * TOLERANCE


def test_the_reference_is_plain_torch():
    model, _ = split_model(Layout())
    groups = [{"params": [model.matrix, model.both], "weight_decay": 0.3}, {"params": [model.scale], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.05, betas=ADAMW.betas, eps=ADAMW.eps)
    for step in range(3):
        optimizer.zero_grad()
        (model(torch.cat([batch(step, 0), batch(step, 1)])) / 7).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    ours = train(Job()).weights
    assert all(float((ours[name] - p.detach()).abs().max()) < TOLERANCE for name, p in model.named_parameters())


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("shape", ["tp2", "tp2 x dp2", "tp2 x zero2"])
def test_noise_is_that_of_the_whole_model(ranks, shape, overlap):
    # Red when shared parts are squared before they are summed, and without the sum over the tensor group.
    job = Job(layout=SHAPES[shape], accumulation=2, noise=True, overlap=overlap)
    outcomes = ranks(job.layout.world).run(train, job)
    for rank, outcome in enumerate(outcomes):
        rows = batch(0, rank // 2) if job.layout.dp > 1 else torch.cat([batch(0, 0), batch(0, 1)])
        first = rows if shape == "tp2 x dp2" else rows.tensor_split(2)[0]
        model, _ = split_model(Layout())
        (model(first) / 7).backward()
        by_hand = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
        assert outcome.noise[0] == pytest.approx(by_hand, rel=1e-12)


def saved(root: str, job: Job) -> None:
    model, sharing = split_model(job.layout)
    engine = engine_of(job, model, sharing)
    _one_update(engine, job.layout)
    with _store(root, job) as store:
        store.save(1, engine.parameters_state(), {}, background=False)


def loaded(root: str, job: Job) -> dict[str, torch.Tensor]:
    model, sharing = split_model(job.layout)
    for parameter in model.parameters():
        parameter.data.mul_(0.0)
    engine = engine_of(job, model, sharing)
    with _store(root, job) as store:
        newest = store.newest()
        assert newest is not None
        store.load(newest, engine.parameters_state())
    engine.after_load()
    return whole_weights(engine)


def _store(root: str, job: Job) -> CheckpointStore:
    if job.layout.world == 1:
        return CheckpointStore(root, keep=2)
    ranks = joined()
    return CheckpointStore(root, group=ranks.checkpoint, rank=ranks.rank, world=ranks.size, keep=2)


def _one_update(engine: Engine, layout: Layout) -> None:
    data, _ = place_of(layout)
    engine.zero()
    with engine.backward_scope(last=True):
        engine.model(batch(0, data) if layout.dp > 1 else torch.cat([batch(0, 0), batch(0, 1)])).backward()
    engine.finish()
    engine.update(0.05, 0.0)


@pytest.mark.parametrize("shape", ["tp2", "tp2 x zero2"])
def test_a_checkpoint_holds_logical_tensors_without_padding(ranks, tmp_path, shape):
    # Columns of a matrix are cut over ranks, runs of each over shards. Red when blocks are not shifted to their place, and
    # when padding is stored.
    job = Job(layout=SHAPES[shape])
    ranks(job.layout.world).run(saved, str(tmp_path), job)
    one = engine_of(Job(), split_model(Layout())[0])
    _one_update(one, Layout())
    expected = whole_weights(one)
    alone = loaded(str(tmp_path), Job())
    assert alone.keys() == expected.keys()
    assert all(float((alone[name] - values).abs().max()) < TOLERANCE for name, values in expected.items())
    for again in ranks(job.layout.world).run(loaded, str(tmp_path), job):
        assert all(torch.equal(again[name], alone[name]) for name in expected)


def out_of_step(job: Job, name: str) -> str | None:
    model, sharing = split_model(job.layout)
    engine = engine_of(job, model, sharing)
    if dist.get_rank() == 1 and name:
        model.get_parameter(name).data[0] += 1e-3
    return engine.sync_check()


@pytest.mark.parametrize("name", ["scale", "both", ""])
def test_a_copy_in_the_tensor_group_that_differs_is_named(ranks, name):
    # Red when only data ranks are compared. `matrix` differs by right.
    for shape in ("tp2", "tp2 x zero1"):
        job = Job(layout=SHAPES[shape])
        assert ranks(job.layout.world).run(out_of_step, job, name) == [name or None] * job.layout.world


def broken_somewhere(rank: int, name: str) -> str | None:
    job = Job(layout=SHAPES["tp2 x zero2"])
    model, sharing = split_model(job.layout)
    engine = engine_of(job, model, sharing)
    if dist.get_rank() == rank:
        model.get_parameter(name).register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
    data, _ = place_of(job.layout)
    engine.zero()
    with engine.backward_scope(last=True):
        engine.model(batch(0, data)).backward()
    engine.finish()
    assert bool(engine.update(0.1, 1.0).skipped)
    return engine.nonfinite_parameter()


@pytest.mark.parametrize("rank", range(4))
def test_a_gradient_that_is_not_finite_is_named_by_all(ranks, rank):
    # Ranks group their parameters differently: a place in a rank's own list names another one elsewhere.
    for name in ("both", "matrix"):
        assert ranks(4).run(broken_somewhere, rank, name) == [name] * 4


# ---- a tie across stages ---------------------------------------------------------------------------------------------------


class End(nn.Module):
    """One of two stages: (x @ weight + bias)^2, the weight the same on both."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        values = torch.Generator().manual_seed(9)
        tied, biases = torch.randn(4, 4, generator=values, dtype=torch.float64), torch.eye(2, 4, dtype=torch.float64)
        self.register_parameter(("embedding", "head")[stage], nn.Parameter(tied))
        self.register_parameter(f"bias{stage}", nn.Parameter(biases[stage].clone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.parameters()
        return (x @ weight + bias).square().sum()


def tied(layout: Layout) -> tuple[list[float], dict[str, torch.Tensor], str | None]:
    at = coordinate(layout_mesh(layout))
    stage, data = at["pp"], at["dp_shard"] + at["dp_replicate"]
    name = ("embedding", "head")[stage]
    whole = Placement("embedding", (4, 4), Box.whole((4, 4)), shared="tie", counted=stage == 0)
    engine = engine_of(Job(layout=layout), End(stage), Sharing({name: whole}, {"tie": layout_mesh(layout).get_group("pp")}))
    norms = []
    for step in range(3):
        engine.zero()
        with engine.backward_scope(last=True):
            engine.model(batch(step, 10 * stage + data)[:, :4]).backward()
        engine.finish()
        norms.append(float(engine.update(0.05, 1.0).grad_norm))
    return norms, whole_weights(engine), engine.sync_check()


@pytest.mark.parametrize(
    "layout", [Layout(pp=2), Layout(pp=2, dp_replicate=2), *(Layout(pp=2, dp_shard=2, zero=stage) for stage in (1, 2, 3))]
)
def test_a_tie_is_summed_once_and_counted_once(ranks, layout):
    # Red with counted on both stages, and when decay goes by a stage's own name ("head" would decay, "embedding" not).
    first, last = End(0), End(1)
    last.head = first.embedding
    trained = [first.embedding, first.bias0, last.bias1]
    optimizer = torch.optim.AdamW(trained, lr=0.05, betas=ADAMW.betas, eps=ADAMW.eps, weight_decay=0.3)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        for data in range(layout.dp):
            (first(batch(step, data)[:, :4]) + last(batch(step, 10 + data)[:, :4])).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 1.0)))
        optimizer.step()
    for ours, weights, sync in ranks(layout.world).run(tied, layout):
        assert ours == pytest.approx(norms, rel=1e-12) and sync is None
        assert weights.keys() == {"embedding", "bias0", "bias1"}
        for name, values in zip(("embedding", "bias0", "bias1"), trained, strict=True):
            assert float((weights[name] - values.detach()).abs().max()) < TOLERANCE, name


# ---- backward in pieces ----------------------------------------------------------------------------------------------------


class Chunks(nn.Module):
    """Two chunks that share `common`; of each weight one factor is met by autograd, the other delivered."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.Generator().manual_seed(3)
        for name in ("a.first", "a.second", "b.first", "b.second", "common"):
            self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.randn(40, generator=values).double()))

    def forward(self, chunk: str, x: torch.Tensor, second: bool = True) -> torch.Tensor:
        out = (x * self.get_parameter(f"{chunk}_first") * self.common).square().sum()
        return out + (x * self.get_parameter(f"{chunk}_second")).square().sum() if second else out


def unit(name: str) -> Unit:
    return {"a": 0, "b": 1}.get(name[0], -1), -1


def in_pieces(layout: Layout, split: bool, overlap: bool) -> dict[str, torch.Tensor]:
    """Two micro-batches on two chunks, chunk 1 first, as an interleaved pipeline would; several steps."""
    model, fixed = Chunks(), Chunks()
    engine = engine_of(Job(layout=layout, overlap=overlap, once=split), model, unit=unit)
    data, _ = place_of(layout)

    def whole(step: int, chunk: int, micro: int) -> None:
        loss = model("ab"[chunk], _rows(step, data, micro))
        with engine.backward_scope(last=micro == 1, chunk=chunk):
            loss.backward()

    def given(step: int, chunk: int, micro: int) -> None:
        name, x = f"{'ab'[chunk]}_second", _rows(step, data, micro)
        loss = model("ab"[chunk], x, second=False)
        with engine.backward_scope(last=micro == 1, chunk=chunk, part="input"):
            loss.backward()
        gradient = 2 * x.square().sum(0) * fixed.get_parameter(name).detach()
        pending.append((chunk, micro, model.get_parameter(name), gradient))

    def weights(count: int) -> None:
        for chunk, micro, weight, gradient in pending[:count]:
            with engine.backward_scope(last=micro == 1, chunk=chunk, part="weight"):
                engine.gradients.deliver(weight, gradient)
        del pending[:count]

    for step in range(3):
        pending: list[Any] = []
        engine.zero()
        if split:
            given(step, 1, 0)
            given(step, 1, 1)
            given(step, 0, 0)
            weights(2)
            given(step, 0, 1)
            weights(2)
        else:
            for chunk, micro in ((1, 0), (1, 1), (0, 0), (0, 1)):
                whole(step, chunk, micro)
        engine.finish()
        gradients = {p.name: p.tensor.clone() for p in engine.gradient_state()}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [(p.name, p.box, p.tensor.clone()) for p in engine.gradient_state()])
        gradients = {}
        for name, box, values in (piece for pieces in everyone for piece in pieces):
            gradients.setdefault(name.removeprefix("gradient/"), torch.zeros(40, dtype=torch.float64))[
                box.inside(Box.whole((40,)))
            ] = values
        engine.update(0.0, 0.0)
    return gradients


def _rows(step: int, data: int, micro: int) -> torch.Tensor:
    return torch.randn(3, 40, generator=torch.Generator().manual_seed(100 * step + 10 * data + micro), dtype=torch.float64)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("layout", [Layout(), Layout(dp_replicate=2), *(Layout(dp_shard=2, zero=stage) for stage in (1, 2, 3))])
def test_chunks_and_a_backward_in_two_give_the_whole_gradient(ranks, layout, overlap, split):
    # Red when a bucket of the last scope for inputs leaves at once, and when what two chunks use leaves with the first.
    model = Chunks()
    for data in range(layout.dp):
        for micro in range(2):
            (model("a", _rows(2, data, micro)) + model("b", _rows(2, data, micro))).backward()
    for gradients in ranks(layout.world).run(in_pieces, layout, split, overlap):
        assert gradients.keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert float((gradients[name] - parameter.grad).abs().max()) < TOLERANCE * float(parameter.grad.abs().max())


def test_scopes_that_cannot_be_are_refused():
    engine = engine_of(Job(), Chunks(), unit=unit)
    model = engine.model
    engine.zero()
    with pytest.raises(MeshwrightError, match="chunk 1 reached a_"), engine.backward_scope(last=False, chunk=1):
        model("a", torch.ones(40, dtype=torch.float64)).backward()
    engine.zero()
    with pytest.raises(MeshwrightError, match="not trained"), engine.backward_scope(last=False):
        engine.gradients.deliver(nn.Parameter(torch.ones(40)), torch.ones(40))


def test_a_runner_sees_every_micro_batch_in_turn():
    engine, seen = engine_of(Job(), Scaled(slice(0, COLUMNS), COLUMNS)), []

    class Parts:
        def __init__(self, loss: torch.Tensor) -> None:
            self.loss_sum = loss

    def forward(model: nn.Module, number: int) -> Parts:
        return Parts(model(batch(0, number)))

    engine.zero()
    engine.run(2, forward, 0.5, lambda number, parts: seen.append((number, float(parts.loss_sum.detach()))))
    engine.finish()
    model = Scaled(slice(0, COLUMNS), COLUMNS)
    losses = [model(batch(0, number)) for number in range(2)]
    (0.5 * sum(losses)).backward()
    assert seen == [(number, float(loss.detach())) for number, loss in enumerate(losses)]
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert float(engine.grad_norm()) == pytest.approx(float(norm), rel=1e-12)
    scores = []
    with torch.no_grad():
        engine.evaluate(2, lambda model, number: model(batch(0, number)), lambda number, value: scores.append(float(value)))
    assert scores == [value for _, value in seen]
