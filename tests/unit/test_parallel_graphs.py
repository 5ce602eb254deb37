"""Replayed blocks compute what called ones do, on a stand-in for the device: it calls again what was recorded, and leaves the
results in the memory of the first call, as a device does.

Mutations tried, each red: the gradient of the last output, a block's own arguments, those of all blocks or the first input are
not copied in; a gradient stays in its static memory as `.grad`; the random state is not put back; a pass that waits for
its backward is not waited for, or for ever; a second backward is let through; addresses of weights, or whether an argument is
still that of all blocks, are not looked at; every argument is taken for one of all blocks; shapes are recorded without a
limit, or when they came twice, but not in a row; evaluation is taken for training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright.config.schema import ModelConfig, OptimizerConfig
from meshwright.distributed import device as devices
from meshwright.errors import LayoutError, MeshwrightError
from meshwright.kernels.dropout import position_keys
from meshwright.models import build, initialize
from meshwright.models.layers import layer_keys
from meshwright.parallel.apply import parallelize
from meshwright.parallel.engine import Engine
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from tests.ranks.replicas import Toy

CPU = torch.device("cpu")
ROWS, LENGTH, LAYERS, STEPS, MICRO = 2, 12, 3, 3, 3
MODELS: dict[str, dict[str, Any]] = {
    "encoder": {"arch": "encoder", "norm": "layer", "norm_order": "post", "positions": "learned", "activation": "gelu"},
    "decoder": {"arch": "decoder", "kv_heads": 2},
}


class Standing(devices.Recorder):
    """Its results are overwritten at each replay, which is why whoever keeps one too long is seen here."""

    def __init__(self, device: torch.device):
        self.recorded = self.replayed = 0

    def record(self, call: Callable[[], Any]) -> Callable[[], None]:
        self.recorded += 1
        first = call()

        def replay() -> None:
            self.replayed += 1
            with torch.no_grad():
                for there, value in zip(first, call(), strict=True):
                    if there is not None:
                        there.copy_(value)

        return replay


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> list[Standing]:
    made: list[Standing] = []

    def make(device: torch.device) -> Standing:
        made.append(Standing(device))
        return made[-1]

    monkeypatch.setattr(devices, "Recorder", make)
    monkeypatch.setattr(devices, "records", lambda device: True)
    return made


def engine_of(
    name: str,
    *,
    graphs: bool,
    precision: str = "fp32",
    compile: str = "off",
    ema: float = 0.0,
    layout: Layout = Layout(),  # frozen
    mesh: DeviceMesh | None = None,
    **model,
) -> Engine:
    sizes = {"layers": LAYERS, "width": 32, "heads": 4, "ffn": 64, "vocab": 61, "max_len": LENGTH}
    values = {**sizes, "dropout": 0.1, "attention_dropout": 0.0, **MODELS[name], **model}
    made = build(ModelConfig(**values), "mlm" if name == "encoder" else "lm")
    initialize(made, 0, CPU)
    plan = Plan(layout, micro_batch=ROWS, precision=precision, compile=compile, graphs=graphs)
    return parallelize(made.train(), plan=plan, mesh=mesh, table=made.table, optimizer=OptimizerConfig(), device=CPU, ema=ema)


def batch(step: int, number: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + number)
    tokens = torch.randint(0, 61, (rows, LENGTH + 1), generator=draw)
    key = position_keys(step, torch.arange(rows) + 10 * number, torch.arange(LENGTH))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].contiguous(), "dropout_key": key}


def evaluated(engine: Engine) -> float:
    engine.model.eval()
    with torch.no_grad(), engine.averaged():
        loss = float(engine.model(**{**batch(77, 0), "dropout_key": None}).loss_sum)
    engine.model.train()
    return loss


def train(
    engine: Engine, steps: int = STEPS, micro: int = MICRO, ragged: bool = False, extra: Any = None, between: bool = True
) -> list[Any]:
    """Losses, gradients and, `between` steps, weights and what evaluation gave."""
    out: list[Any] = []

    def taken(number: int, parts: Any) -> None:
        out.append(parts.loss_sum.detach())

    for step in range(steps):
        engine.zero()
        batches = [batch(step, n, 1 if ragged and n == micro - 1 else ROWS) for n in range(micro)]
        batches = [one | (extra(step, n) if extra else {}) for n, one in enumerate(batches)]
        engine.run(micro, lambda model, n, each=batches: model(**each[n]), 1e-2, taken)
        engine.finish()
        out += [piece.tensor.clone() for piece in engine.gradient_state()]
        engine.update(1e-2, 1.0)
        if between:
            out += [parameter.detach().clone() for parameter in engine.model.parameters()]
            out.append(torch.tensor(evaluated(engine)))
    return out


def same(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> bool:
    return len(ours) == len(plain) and all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_gradients_and_weights_have_the_same_bits(name, precision, recorder):
    """With accumulation, averages, and evaluation between the steps."""
    ours = train(engine_of(name, graphs=True, precision=precision, ema=0.5))
    assert same(ours, train(engine_of(name, graphs=False, precision=precision, ema=0.5)))
    (used,) = recorder
    assert used.recorded == 2 * LAYERS and used.replayed == 2 * LAYERS * (STEPS * MICRO - 1)


@pytest.mark.slow
def test_compiled_blocks_are_recorded_without_compiling_anew(recorder):
    """Their code is shared by the blocks, and by the aliases of their weights that a recording computes with."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    ours = train(engine_of("encoder", graphs=True, compile="eager"))
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    assert same(ours, train(engine_of("encoder", graphs=False, compile="eager")))
    assert frames == torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # training, evaluation
    assert recorder[0].replayed


@pytest.mark.parametrize("name", MODELS)
def test_other_shapes_run_as_before(name, recorder):
    """The last micro-batch of each step has one row; it never comes twice in a row, so it is not recorded."""
    ours = train(engine_of(name, graphs=True), ragged=True)
    assert same(ours, train(engine_of(name, graphs=False), ragged=True))
    assert recorder[0].recorded == 2 * LAYERS and recorder[0].replayed == 2 * LAYERS * (STEPS * (MICRO - 1) - 1)


def test_a_few_shapes_are_recorded_and_no_more(recorder):
    ours, plain = engine_of("decoder", graphs=True), engine_of("decoder", graphs=False)
    for rows in (1, 2, 3):
        for engine in (ours, plain):
            engine.zero()
            engine.run(3, lambda model, n, rows=rows: model(**batch(0, n, rows)), 1e-2, lambda n, parts: None)
            engine.finish()
            engine.update(1e-2, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(ours.model.parameters(), plain.model.parameters(), strict=True))
    assert recorder[0].recorded == 2 * 2 * LAYERS and recorder[0].replayed == 2 * 2 * 2 * LAYERS


def test_packed_documents_are_copied_in(recorder):
    """Documents, positions (hence the angles) and borders are other ones in each micro-batch, and the same for all blocks."""

    def packed(step: int, number: int) -> dict[str, torch.Tensor]:
        cut = 2 + (3 * step + number) % 7
        row = torch.arange(LENGTH)
        documents = (row >= cut).int().expand(ROWS, LENGTH).contiguous()
        positions = torch.where(row >= cut, row - cut, row).expand(ROWS, LENGTH).contiguous()
        borders = torch.tensor([0, cut, LENGTH, LENGTH + cut, *[2 * LENGTH] * 4], dtype=torch.int32)
        return {"documents": documents, "positions": positions, "cu_seqlens": borders}

    ours = train(engine_of("decoder", graphs=True), extra=packed)
    assert same(ours, train(engine_of("decoder", graphs=False), extra=packed))
    assert recorder[0].replayed


def test_each_replay_draws_a_mask_of_its_own_and_recording_draws_none(recorder):
    """Attention's dropout comes from the generator: with the same state as without recordings, the same masks."""

    def losses(graphs: bool) -> list[Any]:
        engine = engine_of("encoder", graphs=graphs, attention_dropout=0.5)
        torch.manual_seed(4)
        return train(engine)

    assert same(losses(True), losses(False)) and recorder[0].replayed


def test_two_forwards_before_a_backward(recorder):
    """The second one of a pass that waits for its backward is called; its own recording would overwrite what that needs."""

    def gradients(graphs: bool) -> list[torch.Tensor]:
        engine = engine_of("encoder", graphs=graphs)
        train(engine, steps=1)
        engine.zero()
        with engine.backward_scope(last=True):
            sum(engine.model(**batch(5, n)).loss_sum for n in range(2)).backward()
        engine.finish()
        return [piece.tensor.clone() for piece in engine.gradient_state()]

    ours = gradients(True)
    replayed = recorder[0].replayed
    assert all(torch.equal(a, b) for a, b in zip(ours, gradients(False), strict=True))
    assert replayed == 2 * LAYERS * MICRO  # MICRO - 1 in the step, one here


def test_a_forward_whose_backward_never_comes(recorder):
    """As in a loop that skips a batch: when its graph is gone the next one is replayed."""
    engine = engine_of("encoder", graphs=True)
    train(engine, steps=1)
    before = recorder[0].replayed
    lost = engine.model(**batch(5, 0))
    kept = engine.model(**batch(5, 1))
    assert recorder[0].replayed == before + LAYERS
    del lost, kept
    engine.model(**batch(5, 1))
    assert recorder[0].replayed == before + 2 * LAYERS


def test_a_second_backward_is_refused(recorder):
    engine = engine_of("encoder", graphs=True)
    train(engine, steps=1)
    engine.zero()
    loss = engine.model(**batch(5, 0)).loss_sum
    with engine.backward_scope(last=False):
        loss.backward(retain_graph=True)
    with pytest.raises(MeshwrightError, match="graphs: false"), engine.backward_scope(last=True):
        loss.backward()


def test_weights_that_are_elsewhere_are_not_replayed(recorder):
    """Neither the masters, nor one weight of another address: its block and those behind it are called. Behind both, parameters
    are where the recording looks for them."""
    ours, plain = engine_of("decoder", graphs=True, precision="bf16"), engine_of("decoder", graphs=False, precision="bf16")
    assert same(train(ours, steps=1), train(plain, steps=1))
    before, losses = recorder[0].replayed, []
    for engine in (ours, plain):
        with engine.masters() as model:
            losses.append(model(**batch(9, 0)).loss_sum.detach())
        weight = engine.model.layers[1].mlp.up.weight
        home, weight.data = weight.data, 2 * weight.data
        losses.append(engine.model(**batch(9, 0)).loss_sum.detach())
        weight.data = home
    assert losses[:2] == losses[2:] and recorder[0].replayed == before + 1
    assert same(train(ours, steps=1), train(plain, steps=1)) and recorder[0].replayed == before + 1 + 2 * LAYERS * MICRO


def test_what_cannot_be_recorded_is_refused():
    plan = Plan(graphs=True)
    with pytest.raises(LayoutError, match="a cpu device does not record"):
        engine_of("decoder", graphs=True)
    with pytest.raises(LayoutError, match="only our own models"):
        parallelize(Toy(), plan=plan, mesh=None, table=None, optimizer=OptimizerConfig(), device=CPU)


def test_an_argument_that_only_one_block_has(recorder):
    """All blocks had the same angles when they were recorded: a block with others, and those behind it, are called."""
    found = []
    for graphs in (True, False):
        engine = engine_of("decoder", graphs=graphs)
        train(engine, steps=1)
        model, given = engine.model, batch(0, 0)
        cos, sin = model.rope(LENGTH, None, CPU, torch.float32)
        x = model.embed(given["tokens"], None, given["dropout_key"])
        for index, layer in enumerate(model.layers):
            angles = (cos, sin) if index != 1 else (sin, cos)
            x = layer(x, *angles, None, None, layer_keys(given["dropout_key"], index))
        found.append(x.detach())
    assert torch.equal(*found) and recorder[0].replayed == 2 * LAYERS * (MICRO - 1) + 1


def test_evaluation_is_neither_recorded_nor_replayed(recorder):
    engine = engine_of("decoder", graphs=True)
    train(engine, steps=1)
    before = recorder[0].recorded, recorder[0].replayed
    with torch.no_grad():
        for _ in range(3):
            engine.model(**batch(1, 0))
    engine.model.eval()
    engine.model(**batch(1, 0))
    assert (recorder[0].recorded, recorder[0].replayed) == before
