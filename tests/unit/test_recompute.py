"""Recomputed and offloaded blocks: the same bits, and the bytes that are kept."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.errors import LayoutError
from meshwright.kernels.dropout import position_keys
from meshwright.parallel import offload_activations
from meshwright.parallel.compile import compile_blocks
from meshwright.parallel.recompute import recompute_blocks
from meshwright.spec.plan import Plan
from tests.unit.test_models_trunk import make, tokens

ROWS, LENGTH, WIDTH, LAYERS, WORD = 2, 20, 32, 4, 8
WAYS = {
    "selective": Plan(recompute="selective"),
    "full": Plan(recompute="full"),
    "every second": Plan(recompute="full", recompute_every=2),
    "offload": Plan(offload_activations=True),
    "full offload": Plan(recompute="full", offload_activations=True),
}


def prepared(name: str, plan: Plan, **changes) -> nn.Module:
    model = make(name, layers=LAYERS, **{"dropout": 0.2, **changes})
    recompute_blocks(model, plan)
    compile_blocks(model, plan.compile)
    return model


def hidden(model: nn.Module) -> torch.Tensor:
    """After the layers, [ROWS, LENGTH, WIDTH], with dropout on."""
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64, requires_grad=True)
    key = position_keys(0, torch.arange(ROWS), torch.arange(LENGTH))
    return model.run_layers(x, (0, LAYERS), tokens(ROWS, LENGTH), None, None, None, key)


def gradients(name: str, plan: Plan, **changes) -> dict[str, torch.Tensor]:
    torch.compiler.reset()
    model = prepared(name, plan, **changes)
    torch.manual_seed(7)
    hidden(model).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.layers.named_parameters()}


def assert_same_bits(name: str, plan: Plan, **changes) -> None:
    ours, plain = gradients(name, plan, **changes), gradients(name, Plan(compile=plan.compile), **changes)
    assert plain and ours.keys() == plain.keys()
    assert all(torch.equal(ours[key], value) for key, value in plain.items())


@pytest.mark.parametrize("attention_dropout", [0.0, 0.3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_gradients_are_those_of_blocks_that_keep_everything(name, way, attention_dropout):
    # Red, with attention dropout, when the generator's state is not kept; with offload, when another tensor comes back.
    assert_same_bits(name, WAYS[way], attention_dropout=attention_dropout)


@pytest.mark.parametrize("way", ["selective", "full", "offload", "selective offload"])
def test_compiled_blocks_too(way):
    recompute = way.split()[0] if way != "offload" else "none"
    plan = Plan(recompute=recompute, offload_activations="offload" in way, compile="eager")
    assert_same_bits("llama", plan, attention_dropout=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_compiled_by_inductor_too(recompute):
    ours = gradients("llama", Plan(recompute=recompute, compile="inductor"), attention_dropout=0.3)
    plain = gradients("llama", Plan(compile="inductor"), attention_dropout=0.3)
    for name, value in plain.items():  # kernels are fused otherwise: measured 1e-15
        assert float((ours[name] - value).abs().max()) <= 1e-14 * float(value.abs().max()), name


def test_blocks_that_are_recomputed_share_their_compiled_code():
    traced: list[int] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        traced.append(len(inputs))
        return graph.forward

    torch.compiler.reset()
    model = make("llama", layers=LAYERS)
    recompute_blocks(model, Plan(recompute="full"))
    compile_blocks(model, "eager", backend=counting)
    hidden(model)
    assert len(traced) == 1


class Live(TorchDispatchMode):
    """Bytes of what was made inside and is still there."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        before = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in before:
                reference = StorageWeakRef(each.untyped_storage())
                self.made[reference.cdata] = (reference, each.untyped_storage().nbytes())
        return out

    def bytes(self) -> int:
        gc.collect()
        return sum(size for reference, size in self.made.values() if not reference.expired())


def kept_bytes(name: str, plan: Plan) -> int:
    model = prepared(name, plan)
    with Live() as live:
        out = hidden(model)
    assert out.requires_grad
    return live.bytes()


def test_what_is_kept_shrinks_and_a_recomputed_block_keeps_its_input_and_keys():
    # Red when nothing is recomputed, and when "selective" keeps no operator (it is then as small as "full").
    none, selective, full = (kept_bytes("plain", Plan(recompute=how)) for how in ("none", "selective", "full"))
    shared = (ROWS * LENGTH + ROWS + LENGTH) * 8  # tokens and what keys are made of
    hidden_state, keys = ROWS * LENGTH * WIDTH * WORD, ROWS * LENGTH * 4
    assert LAYERS * (hidden_state + keys) <= full - hidden_state <= LAYERS * (hidden_state + keys) + 4 * shared
    products = ROWS * LENGTH * WORD * (3 * WIDTH + WIDTH + 64 + WIDTH)  # qkv, out, up, down
    attended = ROWS * LENGTH * WORD * WIDTH
    assert selective - full >= LAYERS * (products + attended)
    assert none > 1.2 * selective
    every_second = kept_bytes("plain", Plan(recompute="full", recompute_every=2))
    assert every_second == pytest.approx((none + full) / 2, rel=0.02)


def test_offloaded_blocks_keep_nothing_on_the_device_and_parameters_do_not_travel(monkeypatch):
    # Red when parameters are packed, and when the call before is not let go.
    calls: list[offload_activations._Call] = []
    original = offload_activations._Call.close
    monkeypatch.setattr(offload_activations._Call, "close", lambda self: (calls.append(self), original(self))[1])
    model = prepared("llama", Plan(offload_activations=True))
    out = hidden(model)
    assert len(calls) == LAYERS
    assert [all(kept.here is None for kept in call._kept) for call in calls] == [True] * (LAYERS - 1) + [False]
    shapes = {tuple(parameter.shape) for parameter in model.parameters()} | {tuple(p.t().shape) for p in model.parameters()}
    assert not any(tuple(kept.away.shape) in shapes for call in calls for kept in call._kept)
    table = model.rope(LENGTH, None, torch.device("cpu"), torch.float64)[0].numel()
    assert table not in [kept.away.numel() for call in calls for kept in call._kept]
    out.sum().backward()
    assert all(kept.here is None for call in calls for kept in call._kept)


def test_a_graph_that_is_kept_gives_its_gradient_twice():
    model = prepared("llama", Plan(offload_activations=True))
    out = hidden(model).sum()
    weights = list(model.layers.parameters())
    first = torch.autograd.grad(out, weights, retain_graph=True)
    second = torch.autograd.grad(out, weights)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_backward_takes_has_left_before_its_memory_is_free(monkeypatch):
    # Red when the newest block's own tensors are given away while they are copied out.
    waited: list[offload_activations._Call] = []

    class Left:
        def __init__(self, call: offload_activations._Call) -> None:
            self.call = call

        def wait(self) -> None:
            waited.append(self.call)

    original = offload_activations._Call.close

    def close(call: offload_activations._Call) -> None:
        original(call)
        call._left = Left(call)  # type: ignore[assignment]

    monkeypatch.setattr(offload_activations._Call, "close", close)
    taken: list[bool] = []
    take = offload_activations._Call.take

    def taking(call: offload_activations._Call, number: int) -> torch.Tensor:
        out = take(call, number)
        taken.append(call in waited)
        return out

    monkeypatch.setattr(offload_activations._Call, "take", taking)
    hidden(prepared("llama", Plan(offload_activations=True))).sum().backward()
    assert taken and all(taken)


def test_an_error_in_a_block_leaves_no_hook_behind():
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    model = nn.Module()
    model.layers = nn.ModuleList([Broken()])
    recompute_blocks(model, Plan(offload_activations=True))
    with pytest.raises(ZeroDivisionError):
        model.layers[0](torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    assert x.exp().grad_fn._saved_result.grad_fn is not None  # a packed one would have come back without its history


def test_missing_blocks_are_passed_over_and_keep_their_numbers():
    model = make("llama", layers=LAYERS)
    model.layers[0] = model.layers[3] = None
    before = [layer and layer.forward for layer in model.layers]
    recompute_blocks(model, Plan(recompute="full", recompute_every=2))
    changed = [layer is not None and layer.forward != old for layer, old in zip(model.layers, before, strict=True)]
    assert changed == [False, False, True, False]


def test_without_a_wish_nothing_is_touched():
    recompute_blocks(nn.Linear(2, 2), Plan())


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(recompute="full"), r"plan\.recompute: 'full' is about the repeated blocks of a model, and this one has none"),
        (Plan(offload_activations=True), r"plan\.offload_activations: True is about the repeated blocks of a model"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(plan, words):
    with pytest.raises(LayoutError, match=words):
        recompute_blocks(nn.Linear(2, 2), plan)


class Halves(torch.autograd.Function):
    """Keeps a view with gaps, as a compiled block keeps one half of a matrix, and tells how it came back."""

    strides: list[tuple[int, ...]]

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x[:, :3])
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (half,) = ctx.saved_tensors
        Halves.strides.append(half.stride())
        return gradient * 2 + half.sum()


def test_what_comes_back_has_the_strides_that_it_had():
    # Red with `empty_like` of the copy on the host, which closes the gaps: compiled code asserts strides.
    class Block(torch.nn.Module):
        def forward(self, x):
            return Halves.apply(x + 1)

    Halves.strides = []
    host, x = offload_activations.Host(), torch.arange(12.0).view(2, 6).requires_grad_()
    blocks = torch.nn.Sequential(Block(), Block())  # what the first one keeps has left when the second is through
    for block in blocks:
        offload_activations.offload(block, host)
    blocks(x).sum().backward()
    assert Halves.strides == [(6, 1), (6, 1)]
    second = 2.0 + float((2 * (x.detach() + 1) + 1)[:, :3].sum())
    assert torch.equal(x.grad, torch.full((2, 6), 2.0 * second + float((x.detach() + 1)[:, :3].sum())))
