"""Recorded blocks on a device that records: the losses of blocks that are called, and the seconds of both.

`pytest -m gpu -s tests/gpu/test_graphs.py`
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from meshwright.config.schema import ModelConfig, OptimizerConfig
from meshwright.distributed import device as devices
from meshwright.kernels.dropout import position_keys
from meshwright.models import build, initialize
from meshwright.parallel.apply import parallelize
from meshwright.parallel.engine import Engine
from meshwright.spec.plan import Plan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.accelerator.is_available() or not devices.records(devices.pick()):
    pytest.skip("no device that records", allow_module_level=True)

ROWS, LENGTH, VOCAB, STEPS, MICRO = 4, 256, 512, 5, 2
MODELS: dict[str, dict[str, Any]] = {
    "encoder": {"arch": "encoder", "norm": "layer", "norm_order": "post", "positions": "learned", "activation": "gelu"},
    "decoder": {"arch": "decoder", "kv_heads": 2},
}


class Counted(devices.Recorder):
    made: list[Counted]

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.recorded = self.replayed = 0
        Counted.made.append(self)

    def record(self, call: Any) -> Any:
        self.recorded += 1
        replay = super().record(call)

        def counting() -> None:
            self.replayed += 1
            replay()

        return counting


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Counted]:
    Counted.made = []
    monkeypatch.setattr(devices, "Recorder", Counted)
    return Counted.made


def engine_of(name: str, graphs: bool, compile: str, **model: Any) -> Engine:
    device = torch.device(devices.pick(), 0)
    sizes = {"layers": 4, "width": 256, "heads": 4, "ffn": 512, "vocab": VOCAB, "max_len": LENGTH}
    values = {**sizes, "dropout": 0.0, "attention_dropout": 0.0, **MODELS[name], **model}
    made = build(ModelConfig(**values), "mlm" if name == "encoder" else "lm", torch.bfloat16)
    initialize(made, 0, device)
    plan = Plan(micro_batch=ROWS, precision="bf16", compile=compile, graphs=graphs)
    made.train()
    return parallelize(made, plan=plan, mesh=None, table=made.table, optimizer=OptimizerConfig(), device=device, ema=0.5)


def batch(engine: Engine, step: int, number: int, packed: bool = False) -> dict[str, torch.Tensor]:
    device = engine.parameters.groups[0].device
    draw = torch.Generator().manual_seed(100 * step + number)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=draw)
    out = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].contiguous()}
    out["dropout_key"] = position_keys(step, torch.arange(ROWS) + ROWS * number, torch.arange(LENGTH))
    if packed:
        cut, row = 20 + 7 * (3 * step + number), torch.arange(LENGTH)
        out["documents"] = (row >= cut).int().expand(ROWS, LENGTH).contiguous()
        out["positions"] = torch.where(row >= cut, row - cut, row).expand(ROWS, LENGTH).contiguous()
        borders = [edge for r in range(ROWS) for edge in (r * LENGTH, r * LENGTH + cut)]
        borders += [ROWS * LENGTH] * (16 - len(borders))
        out["cu_seqlens"] = torch.tensor(borders, dtype=torch.int32)
    return {name: value.to(device) for name, value in out.items()}


def train(engine: Engine, packed: bool = False) -> list[float]:
    """Losses of micro-batches, and of an evaluation behind each step."""
    out: list[torch.Tensor] = []
    for step in range(STEPS):
        engine.zero()
        engine.run(
            MICRO,
            lambda model, n, step=step: model(**batch(engine, step, n, packed)),
            1e-3,
            lambda n, parts: out.append(parts.loss_sum.detach().clone()),
        )
        engine.finish()
        engine.update(1e-3, 1.0)
        engine.model.eval()
        with torch.no_grad(), engine.averaged():
            out.append(engine.model(**{**batch(engine, 77, 0, packed), "dropout_key": None}).loss_sum)
        engine.model.train()
    return torch.stack(out).double().div(ROWS * LENGTH).tolist()


def compare(name: str, compile: str, counted: list[Counted], packed: bool = False, **model: Any) -> None:
    ours, plain, again = (train(engine_of(name, graphs, compile, **model), packed) for graphs in (True, False, False))
    (used,) = counted
    assert used.recorded == 8 and used.replayed == 8 * (STEPS * MICRO - 1)
    worst, noise = (max(abs(a - b) / abs(b) for a, b in zip(one, plain, strict=True)) for one in (ours, again))
    print(f"\n{name} {compile}: losses differ by {worst:.1e}, those of two runs without recordings by {noise:.1e}")
    assert len(set(plain[MICRO :: MICRO + 1])) == STEPS and noise < 1e-3  # the one evaluated batch: the weights move
    assert worst <= max(1e-6, 2 * noise)  # backward of attention may sum in another order each time


@pytest.mark.parametrize("compile", ["off", "inductor"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_blocks_that_are_called(name, compile, counted):
    """With accumulation and evaluation of the averages. The same launches: the same bits are expected."""
    compare(name, compile, counted)


def test_hidden_dropout_is_drawn_from_the_keys_of_the_step(counted):
    compare("encoder", "inductor", counted, dropout=0.1)


def test_packed_documents(counted):
    compare("decoder", "inductor", counted, packed=True)


@pytest.mark.parametrize("compile", ["off", "inductor"])
def test_each_replay_draws_a_mask_of_attention_of_its_own(compile, counted):
    """The same batch and the same weights: no two losses are the same."""
    engine = engine_of("encoder", True, compile, attention_dropout=0.3)
    state, losses = torch.cuda.get_rng_state(), []
    for step in range(6):
        engine.zero()
        engine.run(
            1, lambda model, n: model(**batch(engine, 0, 0)), 1e-3, lambda n, parts: losses.append(parts.loss_sum.detach())
        )
        if step == 0:
            drawn = torch.cuda.get_rng_state()
    assert counted[0].replayed == 8 * 5
    assert len(set(torch.stack(losses).tolist())) == 6
    assert not torch.equal(state, drawn)


def seconds(graphs: bool) -> float:
    """Of a micro-step of 24 layers so small that the host is what it waits for."""
    engine = engine_of("encoder", graphs, "inductor", layers=24, dropout=0.1)
    one = batch(engine, 0, 0)

    def step() -> None:
        engine.zero()
        engine.run(1, lambda model, n: model(**one), 1e-3, lambda n, parts: None)
        engine.finish()
        engine.update(1e-4, 1.0)

    for _ in range(4):
        step()
    torch.accelerator.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        step()
    torch.accelerator.synchronize()
    return (time.perf_counter() - start) / 20


def test_it_is_faster():
    plain, ours = seconds(False), seconds(True)
    print(f"\n24 layers of width 256, {ROWS} x {LENGTH} tokens: {plain * 1e3:.2f} ms a step, recorded {ours * 1e3:.2f} ms")
    assert ours < 0.8 * plain
