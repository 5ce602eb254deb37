"""parallelize and the engine on one process: refusals, state, averages, and the rules of a step."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from meshwright.config.schema import LossScaleConfig, OptimizerConfig
from meshwright.errors import LayoutError, MeshwrightError
from meshwright.parallel import optimizer
from meshwright.parallel.apply import parallelize
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from tests.ranks.replicas import Job, Outcome, Toy, build, loss_sum, make_batch, make_model, one_step

CPU = torch.device("cpu")


def apply(layout: Layout, mesh=None):
    return parallelize(make_model(), plan=Plan(layout=layout), mesh=mesh, table=None, optimizer=OptimizerConfig(), device=CPU)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(tp=2), ["is for 2 ranks", "the mesh has 1"]),
        (Layout(zero=2, ep=2), ["layout.zero: 2", "layout.ep: 2"]),
        (Layout(cp=2), ["is for 2 ranks", "the mesh has 1"]),
        (Layout(zero=1), ["layout.zero: 1, but there is nothing to shard over"]),
        (Layout(dp_shard=2), ["layout.dp_shard: 2, but nothing is sharded with zero: 0"]),
        (Layout(dp_shard=2, zero=1), ["is for 2 ranks", "the mesh has 1"]),
        (Layout(ep=2), ["layout.ep: 2"]),
        (Layout(dp_replicate=2), ["is for 2 ranks", "the mesh has 1"]),
    ],
)
def test_a_layout_that_is_not_there_is_refused_with_every_reason(layout, words):
    with pytest.raises(LayoutError) as caught:
        apply(layout)
    assert all(word in str(caught.value) for word in words)


def step(engine, number: int = 0, accumulation: int = 1) -> Outcome:
    out = Outcome()
    one_step(engine, Job(accumulation=accumulation), 0, number, out)
    return out


@pytest.mark.parametrize("precision", ["fp64", "bf16", "fp16"])
def test_state_carries_over_to_a_new_engine_bit_for_bit(precision):
    # Red when after_load does not refresh the working copies, and when the count of updates is not carried.
    job = Job(precision=precision, ema=0.9, loss_scale=LossScaleConfig(initial=256.0))
    first = build(job)
    step(first), step(first, 1)
    second = build(job, make_model(seed=5))
    stored = {piece.name: piece.tensor.clone() for piece in first.parameters_state()}
    extra = json.loads(json.dumps(first.extra_state()))
    for piece in second.parameters_state():
        assert piece.shape == tuple(piece.tensor.shape) and piece.offset == (0,) * len(piece.shape) and piece.owner
        piece.tensor.copy_(stored.pop(piece.name))
    assert not stored
    second.load_extra(extra)
    second.after_load()
    for number in (2, 3):
        assert step(first, number).losses == step(second, number).losses
    assert all(
        torch.equal(a.tensor, b.tensor) for a, b in zip(first.parameters_state(), second.parameters_state(), strict=True)
    )
    assert first.extra_state() == second.extra_state() and first.extra_state()["updates"] == 4


def test_names_of_the_state():
    engine = build(Job(precision="bf16", ema=0.9))
    names = [piece.name for piece in engine.parameters_state()]
    assert len(names) == len(set(names))
    weights = {name.removeprefix("model/") for name in names if name.startswith("model/")}
    assert weights == {name for name, _ in engine.model.named_parameters()}  # the tie once, the frozen ones too
    for kind in ("optimizer/exp_avg/", "optimizer/exp_avg_sq/", "ema/"):
        assert {n.removeprefix(kind) for n in names if n.startswith(kind)} == {w for w in weights if not w.startswith("frozen")}
    assert {p.tensor.dtype for p in engine.parameters_state() if not p.name.startswith("model/frozen")} == {torch.float32}


def test_persistent_buffers_are_kept_and_others_not():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(2, affine=True)
            self.register_buffer("scratch", torch.zeros(3), persistent=False)

    names = {piece.name for piece in build(Job(), Counting()).parameters_state() if "optimizer" not in piece.name}
    buffers = {"running_mean", "running_var", "num_batches_tracked"}
    assert names == {f"model/bn.{name}" for name in {"weight", "bias"} | buffers}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_average_is_swapped_in_and_the_weights_come_back_bit_for_bit(precision, monkeypatch):
    # Red when the exchange stops after its first block, and when the average takes the weights before the update.
    monkeypatch.setattr(optimizer, "_EXCHANGE", 100)
    engine = build(Job(precision=precision, ema=0.75))
    by_hand = {slot.name: slot.of(group.master).clone() for group, slot in engine.parameters.each()}
    for number in range(3):
        step(engine, number)
        for group, slot in engine.parameters.each():
            by_hand[slot.name] = 0.75 * by_hand[slot.name] + 0.25 * slot.of(group.master)
    before = {piece.name: piece.tensor.clone() for piece in engine.parameters_state()}
    working = {slot.name: slot.parameter.detach().clone() for slot in engine.parameters.slots}
    with pytest.raises(KeyError), engine.averaged():
        for slot in engine.parameters.slots:
            expected = by_hand[slot.name].to(slot.parameter.dtype)
            assert torch.allclose(slot.parameter.detach(), expected, rtol=1e-2 if precision == "bf16" else 1e-6, atol=1e-7)
        assert not torch.equal(engine.model.embedding.weight.detach(), working["embedding.weight"])
        raise KeyError
    assert all(torch.equal(piece.tensor, before[piece.name]) for piece in engine.parameters_state())
    assert all(torch.equal(slot.parameter.detach(), working[slot.name]) for slot in engine.parameters.slots)


def test_without_an_average_the_weights_stay():
    engine = build(Job())
    before = engine.model.embedding.weight.detach().clone()
    with engine.averaged():
        assert torch.equal(engine.model.embedding.weight.detach(), before)


@pytest.mark.parametrize("way", ["fill", "masters"])
def test_averages_start_from_filled_weights(way):
    # Red when they go on from those before.
    engine = build(Job(ema=0.5))
    step(engine), step(engine, 1)
    values = dict(make_model(seed=5).named_parameters())
    if way == "fill":
        engine.fill(lambda name, _: values[name].detach())
    else:
        with engine.masters() as model, torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(values[name])
    averages = {p.name.removeprefix("ema/"): p.tensor for p in engine.parameters_state() if p.name.startswith("ema/")}
    assert averages
    for name, average in averages.items():
        assert torch.equal(average, values[name].detach().to(average.dtype)), name


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_a_meta_model_is_filled_in_master_precision(precision):
    reference = build(Job(precision=precision, ema=0.5), make_model(torch.float32))
    with torch.device("meta"):
        model = Toy()
    engine = build(Job(precision=precision, ema=0.5), model)
    values = dict(make_model(torch.float32).named_parameters())
    with engine.masters() as masters, torch.no_grad():
        for name, parameter in masters.named_parameters():
            assert name.startswith("frozen") or parameter.dtype == (torch.float64 if precision == "fp64" else torch.float32)
            parameter.copy_(values[name])
    for ours, theirs in zip(engine.parameters_state(), reference.parameters_state(), strict=True):
        assert ours.name == theirs.name and torch.equal(ours.tensor, theirs.tensor)
    assert step(engine).losses == step(reference).losses


def test_one_rank_and_one_micro_step_keep_the_gradient_in_the_dtype_of_the_weights():
    # What the bytes in replicate.py's docstring rest on; the second step shows that the choice is made anew each step.
    engine = build(Job(precision="bf16"))
    for accumulation, dtype in ((1, torch.bfloat16), (2, torch.float32), (1, torch.bfloat16)):
        step(engine, accumulation=accumulation)
        assert {group.gradient.dtype for group in engine.parameters.groups} == {dtype}
        assert all(slot.parameter.grad is None or dtype == torch.bfloat16 for slot in engine.parameters.slots)


def test_zero_forgets_and_full_precision_accumulates_in_the_flat_buffer():
    engine = build(Job(precision="fp32"))
    for _ in range(2):
        step(engine, accumulation=4)
        for group, slot in engine.parameters.each():
            if not slot.name.startswith("unused"):
                assert slot.parameter.grad.data_ptr() == slot.of(group.gradient).data_ptr()
        first = {slot.name: slot.of(group.gradient).clone() for group, slot in engine.parameters.each()}
        engine.zero()
        assert all(slot.parameter.grad is None for slot in engine.parameters.slots)
    engine = build(Job(precision="fp32"), make_model(torch.float32))
    step(engine, accumulation=4), step(engine, accumulation=4)
    assert all(torch.equal(slot.of(group.gradient), first[slot.name]) for group, slot in engine.parameters.each())


def test_backward_outside_a_scope_and_scopes_out_of_order_are_refused():
    engine = build(Job())
    loss = loss_sum(engine.model, *make_batch(0))
    with pytest.raises(MeshwrightError, match=r"outside of a micro-batch \(engine\.backward_scope\)"):
        loss.backward()
    engine.zero()
    with engine.backward_scope(last=True):
        loss_sum(engine.model, *make_batch(0)).backward()
    with pytest.raises(MeshwrightError, match=r"call zero\(\) first"), engine.backward_scope(last=True):
        pass
    engine.zero()
    loss = loss_sum(engine.model, *make_batch(0))
    with pytest.raises(MeshwrightError, match="second gradient"), engine.backward_scope(last=True):
        loss.backward(retain_graph=True)
        loss.backward()


def test_a_sparse_gradient_counts_like_a_dense_one():
    torch.manual_seed(0)
    sparse, dense = nn.Embedding(9, 3, sparse=True), nn.Embedding(9, 3)
    dense.load_state_dict(sparse.state_dict())
    results = []
    for model in (sparse, dense):
        engine = build(Job(precision="fp32"), model)
        for last in (False, True):
            with engine.backward_scope(last=last):
                model(torch.tensor([1, 2, 2, 5])).square().sum().backward()
        results.append(engine.parameters.groups[0].gradient.clone())
    assert torch.equal(*results) and float(results[0].abs().max()) > 0


def test_noise_on_one_rank_is_measured_on_the_first_of_several_micro_steps():
    engine = build(Job(precision="fp16"))
    job = Job(accumulation=2, measure_noise=True)
    out = Outcome()
    one_step(engine, job, 0, 0, out)
    alone = make_model(torch.float32)
    tokens, labels = make_batch(0)
    (loss_sum(alone, tokens[:4], labels[:4]) / int((labels != -100).sum())).backward()
    expected = sum(float(p.grad.square().sum()) for p in alone.parameters() if p.grad is not None)
    assert out.noise[0] == pytest.approx(expected, rel=1e-2)  # fp16; a loss scale left in would be 65536^2 off
    one_step(engine, Job(accumulation=1, measure_noise=True), 0, 1, out)
    assert out.noise[1] == 0
