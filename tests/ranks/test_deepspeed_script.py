"""A script written for DeepSpeed, with the import changed: what it computes is plain torch's mean over micro-batches and ranks.

Mutations tried: the schedule ticked on every micro-batch (0.16); the sum of the ranks in place of their mean (2.0).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.interop.deepspeed import translate
from meshwright.runtime import deepspeed
from meshwright.runtime.run import Run
from tests.ranks.pool import joined

CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "betas": [0.9, 0.98], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 5}},
    "steps_per_print": 1000,
}


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    return torch.randn(64, 3, generator=draw).double(), torch.randn(64, 1, generator=draw).double()


def script(stage: int, folder: str, stop: int = 6, resume: bool = False) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """As its author wrote it; each rank takes its own rows."""
    run = Run(joined())
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed"])
    model = net()
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config={**CONFIG, "zero_optimization": {"stage": stage, "reduce_bucket_size": 2e8}},
        run=run,
    )
    assert loader is None and optimizer is engine.optimizer and scheduler is engine.lr_scheduler
    micro = engine.train_micro_batch_size_per_gpu()
    assert (engine.train_batch_size(), micro * 2 * run.size, engine.zero_optimization_stage()) == (8, 8, stage)
    if resume:
        path, client = engine.load_checkpoint(folder)
        assert path is not None and client == {"note": "half"}
    engine.train()
    x, y = rows()
    norms = []
    while engine.global_steps < stop:
        first = (engine.micro_steps * run.size + run.rank) * micro
        loss = nn.functional.mse_loss(engine(x[first : first + micro]), y[first : first + micro])
        engine.backward(loss)
        engine.step()
        if engine.micro_steps % 2 == 0:
            norms.append(engine.get_global_grad_norm() or 0.0)
    engine.eval()
    with torch.no_grad():
        engine(x)
    if stop == 3:
        engine.save_checkpoint(folder, client_state={"note": "half"})
    weights = run.state_dict()
    run.close()
    return norms, weights, engine.local_rank


def plain(stop: int = 6) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, norms = net(), []
    settings = translate(CONFIG, ranks=2)
    opt = torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.9, 0.98), weight_decay=0.1)
    x, y = rows()
    for step in range(stop):
        opt.param_groups[0]["lr"] = settings.lr(step)
        opt.zero_grad()
        nn.functional.mse_loss(model(x[8 * step : 8 * step + 8]), y[8 * step : 8 * step + 8]).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        opt.step()
    return norms, model.state_dict()


def check(found: Any, reference: Any) -> None:
    (norms, weights, _), (expected, state) = found, reference
    assert max(abs(a - b) for a, b in zip(norms, expected, strict=True)) < 1e-11
    assert max(float((weights[name] - value).abs().max()) for name, value in state.items()) < 1e-11


@pytest.mark.parametrize(("world", "stage"), [(1, 2), (2, 0), (2, 1), (2, 2), (4, 3)])
def test_a_script_for_deepspeed_computes_what_plain_torch_does(ranks, tmp_path: Path, world: int, stage: int):
    reference = plain()
    assert max(reference[0]) > 0.5
    found = ranks(world).run(script, stage, str(tmp_path))
    assert [rank for _, _, rank in found] == list(range(world))
    for each in found:
        check(each, reference)


def test_it_goes_on_from_its_checkpoint_on_another_number_of_ranks(ranks, tmp_path: Path):
    norms, weights = plain()
    ranks(2).run(script, 2, str(tmp_path), 3)
    for each in ranks(4).run(script, 3, str(tmp_path), 6, True):
        check(each, (norms[3:], weights))


def mistakes() -> list[str]:
    said = []
    model = net()
    for more in ({"config": None}, {"model": None}, {"config": {**CONFIG, "train_micro_batch_size_per_gpu": 3}}, {"mpu": 1}):
        given = {"model": model, "config": CONFIG, "run": Run(joined()), **more}
        try:
            deepspeed.initialize(**given)
        except ConfigError as error:
            said.append(str(error))
    try:
        _ = deepspeed.zero
    except AttributeError as error:
        said.append(str(error))
    return said


def test_mistakes_are_one_clear_message(ranks):
    said = ranks(2).run(mistakes)[0]
    assert "has no config" in said[0] and "has no model" in said[1] and "3*2*2 != 8" in said[2] and "mpu" in said[3]
    assert "has no 'zero'" in said[4]
