"""ZeRO-3 beside plain steps: recompute, evaluation, pipelines, weights that some rank does not use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.distributed.piece import Piece
from meshwright.errors import MeshwrightError
from meshwright.parallel.apply import Engine
from meshwright.parallel.zero3 import GatheredGradients, GatheredParameters, GatheredPart
from meshwright.spec.placement import Placement
from tests.ranks.replicas import (
    Block,
    Job,
    Outcome,
    Toy,
    _copy,
    build,
    loss_sum,
    make_batch,
    make_model,
    one_step,
    oracle,
    train,
    whole_gradients,
)
from tests.ranks.test_replicate import difference
from tests.ranks.test_zero import TOLERANCE, job_of

GATHERS = ("twice", "once")


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("recompute", ["", "inside", "outside"])
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_recompute_finds_its_weights(ranks, recompute, gather, precision):
    # A checkpoint inside the hooks runs the forward again without them, one around the block runs them again. "inside" is red
    # when backward does not gather at a block's output; "outside" finds its weights by the block's own hook too.
    job = job_of("2", 3, accumulation=2, recompute=recompute, gather=gather, precision=precision)
    plain = ranks(2).run(train, job_of("2", 2, accumulation=2, precision=precision))[0]
    for outcome in ranks(2).run(train, job):
        assert outcome.losses == pytest.approx(plain.losses, rel=1e-12)
        worst = max(float((outcome.state[name] - value).abs().max()) for name, value in plain.state.items())
        assert worst < (TOLERANCE if precision == "fp64" else 1e-7)
        if precision == "fp64":
            assert difference(outcome, oracle(job)) < TOLERANCE


@pytest.mark.parametrize("recompute", ["", "inside"])
@pytest.mark.parametrize("gather", GATHERS)
def test_compiled_blocks_compute_the_same_bits(ranks, gather, recompute):
    job = job_of("2", 3, accumulation=2, precision="fp32", steps=2, gather=gather)
    eager, compiled = ranks(2).run(train, job), ranks(2).run(train, replace(job, compile="eager", recompute=recompute))
    assert compiled[0].losses == eager[0].losses
    assert all(torch.equal(compiled[0].state[name], value) for name, value in eager[0].state.items())


# ---- what is where, when ---------------------------------------------------------------------------------------------------


class Ledger:
    """Gathers and releases as they happen, beside the visits of blocks, and the most whole weights at one time."""

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.parameters, GatheredParameters)
        self.parameters = engine.parameters
        self.log: list[str] = []
        self.peak = 0
        self.received = 0
        units = {id(part): self._name(part) for part in self.parameters.parts}
        gather, release = GatheredPart.gather, GatheredPart.release
        ledger = self

        def gathers(part: GatheredPart) -> None:
            if not part.there:
                ledger.log.append(f"gather {units[id(part)]}")
                ledger.received += part.whole_weights.nbytes
            gather(part)
            ledger.peak = max(ledger.peak, ledger.held())

        def releases(part: GatheredPart) -> None:
            if part.there:
                ledger.log.append(f"release {units[id(part)]}")
            release(part)

        self.patches = (
            mock.patch.object(GatheredPart, "gather", gathers),
            mock.patch.object(GatheredPart, "release", releases),
        )
        for number, block in enumerate(self.parameters._blocks):
            block.register_forward_pre_hook(lambda *_, number=number: self.log.append(f"forward {number}"))

    def _name(self, part: GatheredPart) -> str:
        return next((str(number) for number, parts in enumerate(self.parameters._blocks.values()) if part in parts), "rest")

    def held(self) -> int:
        return sum(part.whole_weights.untyped_storage().nbytes() for part in self.parameters.parts)

    def __enter__(self) -> Ledger:
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self.patches:
            patch.stop()


class Straight(Toy):
    """Four blocks, each used once; everything is used."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.unused = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def straight() -> Straight:
    torch.manual_seed(0)
    return Straight().double()


def ledger_of(job: Job) -> tuple[list[str], int, int, int, dict[str, int]]:
    """Of the second step: events, peak, bytes received, bytes held afterwards; and the sizes of the units."""
    made = build(job, straight())
    one_step(made, job, dist.get_rank(), 0, Outcome())
    with Ledger(made) as ledger:
        one_step(made, job, dist.get_rank(), 1, Outcome())
    sizes: dict[str, int] = {}
    for part in ledger.parameters.parts:
        name = ledger._name(part)
        sizes[name] = sizes.get(name, 0) + part.whole_weights.numel() * part.whole_weights.itemsize
    return ledger.log, ledger.peak, ledger.received, ledger.held(), sizes


def test_one_block_ahead_and_no_more(ranks):
    # Every event is written down: without prefetching the order differs.
    job = job_of("2", 3, accumulation=2)
    for log, peak, received, after, sizes in ranks(2).run(ledger_of, job):
        runs = list(dict.fromkeys(log[: log.index("forward 3") + 1]))  # a unit has two buckets, decayed and not
        assert runs == [
            *("gather rest", "gather 0", "gather 1", "forward 0", "release 0", "gather 2", "forward 1", "release 1"),
            *("gather 3", "forward 2", "release 2", "forward 3"),
        ]
        backward = list(dict.fromkeys(log[log.index("forward 3") + 1 : log.index("forward 0", log.index("forward 3"))]))
        assert backward[:6] == ["gather 2", "release 3", "gather 1", "release 2", "gather 0", "release 1"]
        assert sorted(backward[6:8]) == ["release 0", "release rest"]
        assert peak == sizes["rest"] + 2 * sizes["0"] and after == 0
        total = sum(sizes.values())
        assert received == 2 * (2 * total - sizes["rest"] - sizes["3"])


def test_once_keeps_everything_from_the_first_forward_to_the_last_backward(ranks):
    for log, peak, received, after, sizes in ranks(2).run(ledger_of, job_of("2", 3, accumulation=3, gather="once")):
        assert received == peak == sum(sizes.values()) and after == 0
        assert not [event for event in log[: -2 * len(sizes)] if event.startswith("release")]


def test_without_overlap_nothing_is_gathered_ahead(ranks):
    for log, peak, _, _, sizes in ranks(2).run(ledger_of, job_of("2", 3, overlap=False)):
        assert log.index("forward 0") < log.index("gather 1")
        assert peak == sizes["rest"] + sizes["0"]


# ---- evaluation, averages, filling -----------------------------------------------------------------------------------------


def evaluated(job: Job) -> tuple[float, float, float, int]:
    """Held-out loss before and inside averages, after them, and bytes left behind."""
    made, rank = build(job), dist.get_rank()
    one_step(made, job, rank, 0, Outcome())
    with Ledger(made) as ledger, torch.no_grad():
        before = float(loss_sum(made.model, *make_batch(7)))
        with made.averaged():
            inside = float(loss_sum(made.model, *make_batch(7)))
        after = float(loss_sum(made.model, *make_batch(7)))
    one_step(made, job, rank, 1, Outcome())
    return before, inside, after, ledger.held()


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluation_leaves_nothing_behind(ranks, precision, gather):
    job = job_of("2", 3, precision=precision, ema=0.6, gather=gather)
    expected = ranks(2).run(evaluated_plainly, replace(job, layout=None, gather="twice"))[0]
    for before, inside, after, held in ranks(2).run(evaluated, job):
        assert (before, inside, after) == expected and before == after != inside
        assert held == 0


def evaluated_plainly(job: Job) -> tuple[float, float, float]:
    made = build(job)
    one_step(made, job, dist.get_rank(), 0, Outcome())
    with torch.no_grad():
        before = float(loss_sum(made.model, *make_batch(7)))
        with made.averaged():
            inside = float(loss_sum(made.model, *make_batch(7)))
        return before, inside, float(loss_sum(made.model, *make_batch(7)))


def filled(job: Job) -> list[float]:
    """From meta, one parameter after another."""
    with torch.device("meta"):
        model = Toy()
    made, values, asked = build(job, model), dict(make_model().named_parameters()), []

    def value(name: str, placement: Placement) -> torch.Tensor:
        assert placement == made.placements[name] and placement.box.shape == values[name].shape
        asked.append(name)
        return values[name].detach()

    made.fill(value)
    assert sorted(asked) == sorted(values)
    out = Outcome()
    for step in range(2):
        one_step(made, job, dist.get_rank(), step, out)
    return out.losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_filling_one_parameter_after_another(ranks, precision, stage):
    # The same losses as from a model that came filled. Red when working weights do not follow,
    # and when frozen parameters are left out.
    job = job_of("2", stage, precision=precision, ema=0.5) if stage else Job(world=2, precision=precision, ema=0.5)
    assert ranks(2).run(filled, job)[0] == train_losses(ranks, job)


def train_losses(ranks: Any, job: Job) -> list[float]:
    return ranks(2).run(train, replace(job, steps=2))[0].losses


class Buffered(Straight):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def read(job: Job) -> tuple[list[str], list[str], list[str], list[str]]:
    """What reading weights by state_dict says before a step, after one, and of a block; names inside masters; what is kept."""
    made = build(job, Buffered().double())
    said = []
    for module in (made.model, made.model, made.model.layers[0]):
        try:
            module.state_dict()
        except MeshwrightError as error:
            said.append(str(error))
        one_step(made, job, dist.get_rank(), len(said), Outcome())
    with made.masters() as model:
        inside = list(model.state_dict())
        whole = [name for name, value in model.named_parameters(remove_duplicate=False) if value.untyped_storage().nbytes()]
    return said, inside, whole, [piece.name for piece in made.parameters_state()]


def test_a_state_dict_is_refused_where_there_are_no_weights(ranks):
    # Red when it hands out tensors without memory, and when a checkpoint loses buffers, or keeps those that are none of it.
    for said, inside, whole, kept in ranks(2).run(read, job_of("2", 3)):
        assert len(said) == 3 and all("engine.masters()" in text for text in said)
        assert {*whole, "seen"} == set(inside) and whole
        assert "model/seen" in kept and "model/scratch" not in kept


# ---- as pipelines drive it -------------------------------------------------------------------------------------------------


def ahead_of_backward(job: Job, ahead: int) -> dict[str, torch.Tensor]:
    """`ahead` forwards before the first backward, then one of each in turn."""
    made = build(job)
    rank = dist.get_rank()
    out: dict[str, torch.Tensor] = {}
    for step in range(2):
        tokens, labels = make_batch(step)
        parts = list(zip(tokens[rank::2].tensor_split(4), labels[rank::2].tensor_split(4), strict=True))
        made.zero()
        losses: list[torch.Tensor] = []
        for number in range(len(parts)):
            while len(losses) < min(len(parts), number + ahead):
                losses.append(loss_sum(made.model, *parts[len(losses)]) / 11)
            with made.backward_scope(last=number == len(parts) - 1):
                losses[number].backward()
        made.finish()
        out = _gradients(made)
        made.update(0.05, 1.0)
    return out | _copy(made)


def _gradients(engine: Engine) -> dict[str, torch.Tensor]:
    def of(piece: Piece) -> str:
        return f"{piece.name} {piece.box}"

    return {of(piece): piece.tensor.clone() for piece in engine.gradient_state()}


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("ahead", [2, 4])
def test_forwards_may_run_ahead_of_backward(ranks, ahead, gather):
    # Red when the rest is not gathered again before a backward.
    job = job_of("2", 3, gather=gather)
    expected = ranks(2).run(ahead_of_backward, job_of("2", 2), 1)
    serial = ranks(2).run(ahead_of_backward, job, 1)
    for ours, alone, other in zip(ranks(2).run(ahead_of_backward, job, ahead), serial, expected, strict=True):
        assert all(torch.equal(ours[name], value) for name, value in alone.items())
        whole = [name for name in other if not name.startswith("gradient/")]
        assert all(float((ours[name] - other[name]).abs().max()) < TOLERANCE for name in whole)


# ---- models that are not as expected ---------------------------------------------------------------------------------------


class ChoosyBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)
        self.used = True

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x = super().forward(x)
        return (x + self.extra(x) if self.used else x), {"beside": x}


class Chosen(nn.Module):
    """The first block is frozen; of the others some ranks leave a weight unused; outputs are nested."""

    def __init__(self, listed: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        made = [ChoosyBlock() for _ in range(3)]
        made[0].requires_grad_(False)
        self.blocks = nn.ModuleDict({str(number): block for number, block in enumerate(made)} if not listed else {})
        self.layers = nn.ModuleList(made) if listed else None
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers if self.layers is not None else self.blocks.values():
            x, beside = block(x)
            x = x + 0.1 * beside["beside"]
        return x.square().sum()


def chosen(job: Job, listed: bool) -> dict[str, torch.Tensor]:
    model = Chosen(listed)
    made, rank = build(job, model), dist.get_rank()
    for _ in range(2):
        for block in model.layers if model.layers is not None else model.blocks.values():
            block.used = rank == 0
        made.zero()
        for last in (False, True):
            loss = made.model(torch.full((2, 8), 0.1 + rank + 2 * last, dtype=torch.float64))
            with made.backward_scope(last=last):
                loss.backward()
        made.finish()
        gradients = whole_gradients(made)
        made.update(0.0, 0.0)
    return gradients


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("gather", GATHERS)
def test_a_weight_that_one_rank_does_not_use(ranks, gather, listed):
    # Gathers and reductions keep one order on all ranks. A unit that waited for all its gradients
    # would wait for ever on one rank.
    model = Chosen(listed)
    for rank in range(2):
        for block in model.layers if listed else model.blocks.values():
            block.used = rank == 0
        for last in (False, True):
            model(torch.full((2, 8), 0.1 + rank + 2 * last, dtype=torch.float64)).backward()
    for gradients in ranks(2).run(chosen, job_of("2", 3, gather=gather), listed):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None
                assert float((gradients[name] - parameter.grad).abs().max()) < TOLERANCE * float(parameter.grad.abs().max())


def unsettled(job: Job) -> str:
    """A gradient that comes when its unit has already been reduced."""
    made = build(job, straight())
    assert isinstance(made.gradients, GatheredGradients)
    made.zero()
    loss = loss_sum(made.model, *make_batch(0))
    try:
        with made.backward_scope(last=True):
            loss.backward(retain_graph=True)
            made.gradients._finished(set(made.parameters.ranges))  # type: ignore[arg-type]
            loss.backward()
    except Exception as error:
        return str(error)
    return ""


def test_a_second_backward_in_a_scope_is_refused(ranks):
    assert all("got a second gradient" in text for text in ranks(2).run(unsettled, job_of("2", 3)))
