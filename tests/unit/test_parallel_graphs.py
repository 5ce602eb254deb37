"""Replayed blocks compute what called ones do, on a stand-in for the device: it calls again what was recorded, and leaves the
results in the memory of the first call, as a device does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshwright.config.schema import ModelConfig, OptimizerConfig
from meshwright.distributed import device as devices
from meshwright.errors import LayoutError, MeshwrightError
from meshwright.kernels.dropout import position_keys
from meshwright.models import build, initialize
from meshwright.models.trunk import Trunk
from meshwright.parallel.apply import parallelize
from meshwright.parallel.engine import Engine
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


def engine_of(name: str, *, graphs: bool, precision: str = "fp32", compile: str = "off", ema: float = 0.0, **model) -> Engine:
    sizes = {"layers": LAYERS, "width": 32, "heads": 4, "ffn": 64, "vocab": 61, "max_len": LENGTH}
    made = build(ModelConfig(**{**sizes, "dropout": 0.1, "attention_dropout": 0.0, **MODELS[name], **model}), {"encoder": "mlm", "decoder": "lm"}[name])
    initialize(made, 0, CPU)
    plan = Plan(micro_batch=ROWS, precision=precision, compile=compile, graphs=graphs)
    return parallelize(
        made.train(), plan=plan, mesh=None, table=made.table, optimizer=OptimizerConfig(), device=CPU, ema=ema
    )


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


def train(engine: Engine, steps: int = STEPS, micro: int = MICRO, ragged: bool = False, extra: Any = None) -> list[Any]:
    """Losses, gradients and weights of every step, and what evaluation between them gave."""
    out: list[Any] = []
    for step in range(steps):
        engine.zero()
        batches = [batch(step, n, 1 if ragged and n == micro - 1 else ROWS) for n in range(micro)]
        batches = [one | (extra(step, n) if extra else {}) for n, one in enumerate(batches)]
        engine.run(
            micro, lambda model, n, each=batches: model(**each[n]), 1e-2, lambda n, parts: out.append(parts.loss_sum.detach())
        )
        engine.finish()
        out += [piece.tensor.clone() for piece in engine.gradient_state()]
        engine.update(1e-2, 1.0)
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


