"""Flat buffers: every parameter once, aligned, in the right group, and cut into buckets that cover everything."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from meshwright.config.schema import OptimizerConfig
from meshwright.errors import LayoutError
from meshwright.parallel.buffers import ALIGN_BYTES, decays, local_pieces, unit_of
from meshwright.parallel.flat import FlatParameters
from meshwright.parallel.sharing import Sharing
from meshwright.spec.box import Box
from meshwright.spec.parameters import Table
from meshwright.spec.placement import Placement

CPU = torch.device("cpu")
WORDS = OptimizerConfig().no_decay


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 5, bias=False)
        self.body = nn.Linear(3, 3)
        self.embedding = nn.Embedding(5, 3)
        self.embedding.weight = self.head.weight
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("counts", torch.arange(4))


def flat(model: nn.Module, dtype: torch.dtype = torch.float32, table: Table | None = None) -> FlatParameters:
    return FlatParameters(model, dtype=dtype, device=CPU, no_decay=WORDS, table=table)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.0.mlp.up.weight", True),
        ("layers.0.mlp.up.bias", False),
        ("layers.0.attention.q_norm.weight", False),
        ("layers.0.LayerNorm.weight", False),
        ("position_embedding.weight", False),
        ("head.weight", True),
    ],
)
def test_decay_follows_the_words_of_the_config_whatever_the_case(name, expected):
    assert decays(name, WORDS) is expected
    assert decays(name, []) is True


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 400), min_size=1, max_size=12).filter(any), ways=st.integers(2, 5), limit=st.integers(0, 4000)
)
def test_buckets_can_be_cut_into_equal_aligned_pieces(sizes, ways, limit):
    # Red when the end of a bucket is not padded, and when the cut depends on where padding put the slots.
    model = nn.ParameterList(nn.Parameter(torch.ones(size)) for size in sizes)
    options = {"dtype": torch.float32, "device": CPU, "no_decay": [], "table": None}
    plain = FlatParameters(model, **options).buckets(limit)
    buckets = FlatParameters(model, **options, ways=ways, bucket_bytes=limit).buckets(limit)
    assert [[slot.name for slot in bucket.slots] for bucket in buckets] == [[s.name for s in b.slots] for b in plain]
    ends = {0} | {bucket.stop for bucket in buckets}
    for bucket in buckets:
        assert bucket.start in ends and (bucket.stop - bucket.start) * 4 % (ways * ALIGN_BYTES) == 0
        assert (bucket.stop - bucket.start) * 4 < sum(slot.size * 4 + ALIGN_BYTES for slot in bucket.slots) + ways * ALIGN_BYTES
        assert float(bucket.group.working[bucket.start : bucket.stop].sum()) == sum(slot.size for slot in bucket.slots)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 7), min_size=0, max_size=3), min_size=1, max_size=12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    bucket=st.integers(1, 2000),
    seed=st.integers(0, 9),
)
def test_buffers_hold_every_parameter_once_and_buckets_cover_them(shapes, dtype, bucket, seed):
    # Red when the alignment is left out, when a bucket stops short of the padding, and when it spans one slot too many.
    torch.manual_seed(seed)
    model = nn.Module()
    for number, shape in enumerate(shapes):
        model.register_parameter(
            f"{'norm' if (number + seed) % 3 == 0 else 'weight'}{number}", nn.Parameter(torch.randn(shape))
        )
    values = {name: parameter.detach().clone().double() for name, parameter in model.named_parameters()}
    parameters = flat(model, dtype)
    assert [slot.name for slot in parameters.slots] == list(values)
    for group in parameters.groups:
        assert group.size == sum(slot.size for slot in group.slots) + int((group.working == 0).sum())
        for slot in group.slots:
            assert group.decay == decays(slot.name, WORDS)
            assert slot.parameter.dtype == dtype and slot.parameter.is_contiguous()
            assert slot.parameter.data_ptr() == group.working.data_ptr() + slot.start * dtype.itemsize
            assert slot.start * dtype.itemsize % ALIGN_BYTES == 0
            assert torch.equal(slot.of(group.master).double(), values[slot.name].to(group.master.dtype).double())
            assert torch.equal(slot.parameter.detach(), slot.of(group.master).to(dtype))
    buckets = parameters.buckets(bucket)
    covered = [(id(b.group), element) for b in buckets for element in range(b.start, b.stop)]
    assert len(covered) == len(set(covered)) == sum(group.size for group in parameters.groups)
    assert sorted(slot.name for b in buckets for slot in b.slots) == sorted(values)
    for b in buckets:
        assert all(b.start <= slot.start and slot.start + slot.size <= b.stop for slot in b.slots)
        assert len(b.slots) == 1 or (b.stop - b.start) * max(4, dtype.itemsize) <= bucket
    lowest = [min(slot.index for slot in b.slots) for b in buckets]
    assert lowest == sorted(lowest, reverse=True)


def test_a_tie_is_one_tensor_under_the_name_that_the_table_calls_canonical():
    model = Tied()
    table = Table(rules=(), ties=(("embedding.weight", "head.weight"),))
    parameters = flat(model, torch.bfloat16, table)
    assert [slot.name for slot in parameters.slots] == ["embedding.weight", "body.weight", "body.bias"]
    assert model.embedding.weight is model.head.weight
    assert flat(Tied()).slots[0].name == "head.weight"
    model.head.weight = nn.Parameter(torch.zeros(5, 3))
    with pytest.raises(LayoutError, match=r"head\.weight is declared to be embedding\.weight"):
        flat(model, table=table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_meta_model_gets_storage_and_keeps_its_ties(dtype):
    with torch.device("meta"):
        model = Tied()
        model.body.weight.requires_grad_(False)
    parameters = flat(model, dtype)
    assert all(not p.is_meta and p.dtype == dtype for p in model.parameters())
    assert model.embedding.weight is model.head.weight is parameters.slots[0].parameter
    assert parameters.frozen["body.weight"] is model.body.weight and not model.body.weight.requires_grad
    assert model.table.dtype == torch.float32 and model.table.device == CPU


def test_frozen_parameters_are_cast_and_stay_outside_and_buffers_are_never_cast_down():
    model = Tied()
    model.body.weight.requires_grad_(False)
    parameters = flat(model, torch.bfloat16)
    assert [slot.name for slot in parameters.slots] == ["head.weight", "body.bias"]
    assert model.body.weight.dtype == torch.bfloat16
    assert (model.table.dtype, model.counts.dtype) == (torch.float32, torch.int64)
    double = Tied()
    flat(double, torch.float64)
    assert (double.table.dtype, double.counts.dtype) == (torch.float64, torch.int64)


def test_models_that_cannot_be_trained_are_refused():
    with pytest.raises(LayoutError, match="no trainable parameter"):
        flat(nn.Linear(2, 2).requires_grad_(False))
    model = nn.Module()
    model.z = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(LayoutError, match=r"z: is a trainable parameter of dtype torch\.complex64"):
        flat(model)


def test_units_follow_the_name():
    assert unit_of("layers.12.mlp.up.weight") == (0, 12)
    assert unit_of("embedding.weight") == unit_of("encoder.layers.3.weight") == (0, -1)


def test_groups_follow_the_role_and_the_logical_name():
    # Red when decay goes by the name in this rank's model: the two ends of a tie would be decayed differently.
    model = nn.ModuleDict({"head": nn.Linear(3, 5, bias=False), "body": nn.Linear(3, 3, bias=False)})
    tie = Placement("embedding.weight", (5, 3), Box.whole((5, 3)), shared="tie", counted=False)
    parameters = FlatParameters(
        model, dtype=torch.float32, device=CPU, no_decay=WORDS, table=None, sharing=Sharing({"head.weight": tie})
    )
    assert [(g.decay, g.shared, g.counted) for g in parameters.groups] == [(True, "", True), (False, "tie", False)]
    assert parameters.placements["head.weight"] is tie


@settings(max_examples=30, deadline=None)
@given(chunks=st.lists(st.integers(-1, 2), min_size=1, max_size=12), limit=st.integers(1, 4000))
def test_a_bucket_never_spans_two_chunks(chunks, limit):
    # Red when neighbours are cut by size alone.
    model = nn.ParameterList(nn.Parameter(torch.ones(9)) for _ in chunks)
    parameters = FlatParameters(
        model, dtype=torch.float32, device=CPU, no_decay=[], table=None, unit=lambda name: (chunks[int(name)], -1)
    )
    buckets = parameters.buckets(limit)
    assert sorted(slot.index for bucket in buckets for slot in bucket.slots) == list(range(len(chunks)))
    for bucket in buckets:
        assert {slot.unit[0] for slot in bucket.slots} == {bucket.chunk}


@settings(max_examples=60, deadline=None)
@given(
    held=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    padding=st.lists(st.integers(0, 2), min_size=3, max_size=3),
    offset=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    data=st.data(),
)
def test_runs_of_a_local_block_land_in_the_logical_tensor(held, padding, offset, data):
    # Red when offsets are those of the rank's own tensor, and when padding is kept.
    local = [size + extra for size, extra in zip(held, padding, strict=False)]
    shape = tuple(size + at + 1 for size, at in zip(held, offset, strict=False))
    box = Box(tuple(offset[: len(held)]), tuple(held))
    values = torch.arange(1.0, 1.0 + torch.Size(local).numel()).view(local)
    first = data.draw(st.integers(0, values.numel() - 1))
    size = data.draw(st.integers(1, values.numel() - first))
    pieces = local_pieces("model", Placement("w", shape, box), local, values.view(-1)[first : first + size], first)
    whole, expected = torch.zeros(shape), torch.zeros(shape)
    for piece in pieces:
        assert piece.name == "model/w" and piece.shape == shape
        whole[piece.box.inside(Box.whole(shape))] += piece.tensor
    kept = torch.zeros(values.numel())
    kept[first : first + size] = values.view(-1)[first : first + size]
    expected[box.inside(Box.whole(shape))] = kept.view(local)[tuple(slice(0, n) for n in held)]
    assert torch.equal(whole, expected)
