"""Compiled blocks: same numbers, shared code, a clear word when one does not compile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright.errors import LayoutError
from meshwright.parallel.compile import compile_blocks, compile_errors
from tests.ranks.replicas import Job, build, loss_sum, make_batch, make_model, train

# The tracer itself reads .grad of tensors inside the graph and hides the warning, which fails where warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_traced_blocks_train_to_the_same_bits_as_eager_ones():
    job = Job(accumulation=2, precision="fp32", steps=2)
    eager, traced = train(job), train(replace(job, compile="eager"))
    assert traced.losses == eager.losses
    assert all(torch.equal(traced.state[name], value) for name, value in eager.state.items())


def test_blocks_of_one_class_share_their_code_and_shapes_may_vary():
    # Red when the limit of compiled versions is torch's own 8, and when each block is traced anew (12 and more graphs).
    traced: list[int] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        traced.append(len(inputs))
        return graph.forward

    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(12))
    compile_blocks(model, "eager", backend=counting)
    for rows in range(2, 14):
        x = torch.ones(rows, 4)
        for layer in model.layers:
            x = layer(x)
    assert 12 <= len(traced) <= 24  # a shape is static: one graph each, and one more where the input needs a gradient


def test_off_leaves_the_blocks_alone():
    model = make_model()
    before = [layer.forward for layer in model.layers]
    compile_blocks(model, "off")
    assert [layer.forward for layer in model.layers] == before


def test_a_block_that_breaks_the_graph_is_refused_in_words():
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    model = nn.Module()
    model.layers = nn.ModuleList([Branch()])
    compile_blocks(model, "eager")
    with pytest.raises(LayoutError, match=r"(?s)compile: a block does not compile with 'eager'.*compile: off"):
        model.layers[0](torch.ones(3))


def test_a_model_without_layers_is_refused():
    with pytest.raises(LayoutError, match=r"'inductor' compiles the repeated blocks of a model, and this one has none"):
        compile_blocks(nn.Linear(2, 2), "inductor")


def test_errors_of_the_model_itself_pass_through():
    model = make_model()
    engine = build(Job(compile="eager"), model)
    with pytest.raises(ZeroDivisionError), compile_errors("eager"):
        raise ZeroDivisionError
    loss = loss_sum(engine.model, *make_batch(0))
    with pytest.raises(KeyError), engine.backward_scope(last=True):
        loss.backward()
        raise KeyError


@pytest.mark.slow
def test_inductor_trains_to_the_same_losses():
    job = Job(precision="fp64", steps=2)
    eager, compiled = train(job), train(replace(job, compile="inductor"))
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-12)
