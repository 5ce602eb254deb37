"""Initial values: the same whoever draws them, of the right size, on every layout."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from meshwright.config.recipes import recipe
from meshwright.config.schema import ModelConfig
from meshwright.errors import ConfigError
from meshwright.models import build, fill, initialize, registry
from meshwright.models.initialize import values_of
from meshwright.spec.box import Box
from meshwright.spec.model_table import logical_name
from meshwright.spec.parameters import Fused, Part, Rule, Table
from meshwright.spec.placement import Placement

QKV = Fused((Part("q", 12), Part("k", 4), Part("v", 4)), groups=5)
RULES = [
    (Rule("*", std=0.5), "x.weight", (103, 7)),
    (Rule("*", std=0.5), "x.weight", (9000, 3)),
    (Rule("*"), "x.bias", (10_000,)),
    (Rule("*"), "x.weight", (40, 3, 2)),
    (Rule("*", fused=QKV), "layers.0.attention.qkv.weight", (100, 6)),
    (Rule("*", init="ones"), "norm.weight", (33,)),
]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(RULES), st.data())
def test_a_part_equals_the_slice_of_the_whole(case, data):
    # Red with: blocks counted from the first row asked for, a fused part's rows counted from its first group.
    rule, name, shape = case
    start = data.draw(st.integers(0, shape[0]))
    stop = data.draw(st.integers(start, shape[0]))
    whole = fill(rule, name, shape, None, 3)
    assert whole.shape == shape and whole.dtype == torch.float32
    part = fill(rule, name, shape, slice(start, stop), 3)
    assert torch.equal(part, whole[start:stop])


def test_fused_and_unfused_agree():
    rule, name, shape = RULES[4]
    fused = fill(rule, name, shape, None, 3)
    for part, rows in (("q", 60), ("k", 20), ("v", 20)):
        plain = fill(Rule("*"), f"layers.0.attention.{part}.weight", (rows, 6), None, 3)
        for logical, where in QKV.slices(part):
            assert torch.equal(plain[logical], fused[where])
    assert logical_name("layers.3.mlp.up.bias", "gate") == "layers.3.mlp.gate.bias"


def test_golden_values():
    # The generator's stream is part of the contract: these were drawn with numpy 1.26 to 2.5 and AVX2, AVX512 or neither.
    got = fill(Rule("*", std=1.0), "layers.3.attention.q.weight", (64, 64), None, 1234)
    assert got[0, :4].tolist() == [-0.3786512017250061, -1.2884807586669922, -0.09335163235664368, -0.1185188740491867]
    assert got[-1, -2:].tolist() == [0.26075515151023865, 0.6560245156288147]
    assert got.double().sum().item() == pytest.approx(-65.98714277747786, abs=1e-9)


def test_threads_change_nothing():
    shape = (700, 2048)  # above the size from which blocks are drawn by several threads
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = fill(Rule("*"), "w", shape, None, 0)
        torch.set_num_threads(3)
        assert torch.equal(fill(Rule("*"), "w", shape, None, 0), one)
    finally:
        torch.set_num_threads(threads)


def test_values_are_normal_and_differ_by_name_seed_and_block():
    x = fill(Rule("*", std=0.02), "w", (1000, 1000), None, 0).double() / 0.02
    # standard errors with a million values: mean 1e-3, variance 1.4e-3, kurtosis 4.9e-3; five of them
    assert abs(x.mean()) < 5e-3 and abs(x.var() - 1) < 7e-3 and abs((x**4).mean() - 3) < 0.05
    assert abs((x[:-16] * x[16:]).mean()) < 5e-3  # neighbouring blocks
    small = [fill(Rule("*"), name, (16, 64), None, seed) for name, seed in (("a", 0), ("b", 0), ("a", 1))]
    assert len({tuple(t.flatten().tolist()) for t in small}) == 3


def test_initialize_is_fill_for_every_parameter():
    config = ModelConfig(**{**recipe("debug"), "vocab": 100, "init_std": 0.1})
    model, other = build(config, "lm"), build(config, "lm", torch.float64)
    initialize(model, 7, "cpu")
    initialize(other, 7, "cpu")
    assert model.head.weight is model.embedding.weight
    for name, parameter in model.named_parameters():
        rule = model.table.rule(name)
        assert torch.equal(parameter, fill(rule, name, parameter.shape, None, 7))
        assert torch.equal(other.get_parameter(name), parameter.double())
    scale = math.sqrt(2 * config.layers)
    assert model.layers[1].mlp.down.weight.std().item() == pytest.approx(0.1 / scale, rel=0.05)
    assert model.layers[1].attention.out.weight.std().item() == pytest.approx(0.1 / scale, rel=0.05)
    assert model.layers[1].mlp.up.weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert model.norm.weight.eq(1).all()


def test_large_parameters_are_filled_in_chunks(monkeypatch):
    config = ModelConfig(**{**recipe("debug"), "vocab": 100})
    whole, chunked = build(config, "lm"), build(config, "lm")
    initialize(whole, 7, "cpu")  # red with: rows counted from the start of their chunk
    monkeypatch.setitem(fill.__globals__, "_CHUNK_VALUES", 4096)
    initialize(chunked, 7, "cpu")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), chunked.parameters(), strict=True))


@pytest.mark.parametrize("name", ["debug", "debug-encoder", "gpt2", "qwen3-0.6b", "encoder-24x1024"])
@pytest.mark.parametrize("task", ["own", "classify"])
def test_every_parameter_has_a_rule_that_fits(name, task):
    # Red with: the bias rule before that of qkv, a rule missing.
    config = ModelConfig(**{"vocab": 512, **recipe(name), "classes": 2, "mlp_bias": True, "qkv_bias": True})
    task = ("lm" if config.arch == "decoder" else "mlm") if task == "own" else task
    model = build(config, task)
    for parameter_name, parameter in model.named_parameters():
        rule = model.table.rule(parameter_name)
        leaf = parameter_name.rpartition(".")[2]
        expected = "zeros" if leaf == "bias" else "ones" if "norm" in parameter_name else "normal"
        assert rule.init == expected
        fused = parameter_name.split(".")[-2] == "qkv" or (
            parameter_name.split(".")[-2] == "up" and config.activation == "swiglu"
        )
        assert (rule.fused is not None) == fused
        if rule.fused is not None:
            assert rule.fused.groups * rule.fused.group_rows == parameter.shape[0]
        assert all(dim < parameter.dim() for dim, _ in rule.axes)


@pytest.mark.parametrize("chunk", [2**24, 4096])
@pytest.mark.parametrize("name", ["up.weight", "down.weight", "up.bias", "out.weight"])
def test_a_block_has_the_values_of_its_place(monkeypatch, name, chunk):
    # Red with: the column offset dropped, rows counted from the start of the block.
    monkeypatch.setitem(fill.__globals__, "_CHUNK_VALUES", chunk)
    config = ModelConfig(**{**recipe("debug"), "vocab": 100, "mlp_bias": True})
    model = build(config, "lm")
    initialize(model, 7, "cpu")
    logical = f"layers.1.{'attention' if name.startswith('out') else 'mlp'}.{name}"
    whole = model.get_parameter(logical).detach()
    for offset in (0, 37):
        box = Box((offset, 5)[: whole.dim()], tuple(n - offset - 5 for n in whole.shape))
        got = values_of(model.table, Placement(logical, tuple(whole.shape), box), 7)
        assert got.dtype == torch.float32 and torch.equal(got, whole[box.inside(Box.whole(whole.shape))])


def test_a_part_of_a_model_is_filled_by_its_placements():
    config = ModelConfig(**{**recipe("debug"), "vocab": 100})
    whole, part = build(config, "lm"), build(config, "lm")
    initialize(whole, 7, "cpu")
    assert whole.head.weight is whole.embedding.weight
    part.embedding = None  # the last stage of a pipeline: no embedding, half of the rows of a head that is tied elsewhere
    part.layers[0] = None
    part.head.weight = nn.Parameter(torch.empty(50, 64, device="meta"))
    place = Placement("embedding.weight", (100, 64), Box((50, 0), (50, 64)))
    initialize(part, 7, "cpu", torch.float64, placements={"head.weight": place})
    assert torch.equal(part.head.weight, whole.embedding.weight[50:].double())
    assert torch.equal(part.layers[1].mlp.up.weight, whole.layers[1].mlp.up.weight.double())


class Users(nn.Module):
    """A module that a user might write: own values, a buffer, a tie, no table."""

    def __init__(self, width: int):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 8, batch_first=True)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.full((), 0.25))
        self.register_buffer("table_of_angles", torch.linspace(0, 1, 5), persistent=False)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    return registry.register_model


def test_a_registered_module_gets_its_constructor_s_values(registered):
    registered("mine", lambda config, task: Users(config.width))
    config = ModelConfig(arch="mine", width=8, vocab=11)
    models = [build(config, "lm") for _ in range(3)]
    assert all(p.is_meta for p in models[0].parameters())
    assert models[0].table.ties == (("embedding.weight", "head.weight"),)
    before = torch.random.get_rng_state()
    for model, seed in zip(models, (1, 1, 2), strict=True):
        initialize(model, seed, "cpu")
    assert torch.equal(torch.random.get_rng_state(), before)
    first, again, other = models
    assert first.head.weight is first.embedding.weight
    assert torch.equal(first.table_of_angles, torch.linspace(0, 1, 5)) and first.scale == 0.25
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_a_registered_module_may_bring_its_own_table(registered):
    def factory(config, task):
        module = Users(config.width)
        module.table = Table((Rule("*", init="zeros"),), ties=(("embedding.weight", "head.weight"),))
        return module

    registered("mine", factory)
    model = build(ModelConfig(arch="mine", width=8), "lm", torch.float64)
    initialize(model, 0, "cpu", torch.float32)
    assert all(p.dtype == torch.float32 and p.eq(0).all() for p in model.parameters())
    assert torch.equal(model.table_of_angles, torch.linspace(0, 1, 5))


def test_a_module_without_values_is_refused():
    with torch.device("meta"):
        bare = nn.Linear(2, 3)
    with pytest.raises(ConfigError, match=r"nothing says how weight and 1 more"):
        initialize(bare, 0, "cpu")
    real = nn.Linear(2, 3)
    kept = real.weight.detach().clone()
    initialize(real, 0, "cpu", torch.float64)
    assert torch.equal(real.weight, kept.double())


def test_ties_are_restored():
    config = ModelConfig(**{**recipe("debug"), "vocab": 100})
    model = build(config, "lm")
    model.to_empty(device="cpu")
    model.head.weight = nn.Parameter(torch.zeros(100, 64))
    initialize(model, 0, "cpu")
    assert model.head.weight is model.embedding.weight


def test_a_step_of_rows_is_refused():
    with pytest.raises(ValueError, match="one run"):
        fill(Rule("*"), "w", (10, 2), slice(0, 10, 2), 0)
    with pytest.raises(ValueError, match="constructor"):
        fill(Rule("*", init="constructor"), "w", (10, 2), None, 0)
