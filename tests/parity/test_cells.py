"""The covering array, cell by cell, and the one process that it is compared with against torch alone.

A cell trains three steps by a plan and compares loss, norm, every gradient of every step, and weights and moments at the end
with one device. tests/parity/test_faults.py says which faults turn cells red.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.data.batch import IGNORE
from meshwright.data.loader import Loader
from meshwright.kernels.dropout import position_keys
from meshwright.models import build
from meshwright.parallel.inputs import scalar_loss
from meshwright.train.objectives import make_objective
from tests.parity import array
from tests.parity.cells import LAYOUTS, compiled_alike, limits_of, reference_of, run_cell
from tests.parity.models import MODELS, ROWS, STEPS, case_of, rows_of


def cells() -> list[Any]:
    """The array, those beside each other, and on one worker, that share what is compiled; of the compiled cells, each of which
    takes as long as thirty others, one a layout, the rest among the slow."""
    met: set[str] = set()
    slow: set[str] = set()
    for cell in array.load():
        if cell.compile != "off":
            slow |= {cell.id} if cell.layout in met else set()
            met.add(cell.layout)
    ordered = sorted(array.load(), key=lambda cell: (cell.world, compiled_alike(cell)))
    params = []
    for cell in ordered:
        marks = [pytest.mark.slow] if cell.id in slow else []
        if cell.compile != "off":
            marks.append(pytest.mark.xdist_group(f"compiled {cell.world} {compiled_alike(cell)}"))
        params.append(pytest.param(cell, id=cell.id, marks=marks))
    return params


@pytest.mark.parametrize("cell", cells())
def test_cell(ranks, cell):
    assert run_cell(ranks, cell).over(limits_of(cell)) == []


def test_targets_are_uneven_over_rows_and_some_rows_have_none():
    for model in MODELS:
        case = case_of(model)
        step = next(Loader(case.data, micro_batch=1).steps(0, lambda consumed: ROWS))
        targets = [batch.targets() for batch in step.micro]
        assert len(targets) == ROWS and 0 in targets and (len(set(targets)) > 2 or model in ("classifier", "plain")), model
        assert rows_of(case.config).rows >= ROWS
    assert max(layout.world for layout in LAYOUTS.values()) == 8 and ROWS % 4 and ROWS % 8


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_one_device_is_what_torch_alone_computes(model, clip):
    # Autograd, torch.optim.AdamW and torch's own clipping on the whole batch. Red when the tie gets its gradient twice, when
    # norms and biases are decayed, and when the loss is divided by rows instead of targets.
    case, known = case_of(model, clip=clip), reference_of(model, "fp64", clip)
    config, train = case.config, case.config.train
    net = build(config.model, make_objective(config.objective, 3).task)
    case.fill(net)
    net.double()
    words = train.optimizer.no_decay
    named = dict(net.named_parameters())
    plain = [p for name, p in named.items() if any(word in name.lower() for word in words)]
    decayed = [p for name, p in named.items() if not any(word in name.lower() for word in words)]
    groups = [{"params": decayed, "weight_decay": train.optimizer.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=train.optimizer.betas, eps=train.optimizer.eps)
    steps = Loader(case.data, micro_batch=ROWS).steps(0, lambda consumed: ROWS)
    for number in range(STEPS):
        batch = next(steps).micro[0]
        key = position_keys(config.run.seed, batch.samples, torch.arange(batch.tokens.shape[1])) if model == "dropout" else None
        optimizer.zero_grad()
        parts = make_objective(config.objective, 3).loss(net, batch, key)
        (scalar_loss(parts) / (batch.labels != IGNORE).sum()).backward()
        loss = float((parts.loss_sum - parts.z_sum).detach()) / int((batch.labels != IGNORE).sum())
        assert known.trace.losses[number] == pytest.approx(loss, rel=1e-12)
        for name, expected in known.gradients[number].items():
            torch.testing.assert_close(named[name.removeprefix("gradient/")].grad, expected, rtol=0, atol=1e-12)
        total = float(torch.nn.utils.get_total_norm([p.grad for p in named.values()]))
        assert known.trace.norms[number] == pytest.approx(total, rel=1e-12)
        if clip:
            assert total > train.clip, "the clip is felt"
            torch.nn.utils.clip_grad_norm_(named.values(), train.clip)
        optimizer.step()
    for name, weight in named.items():
        torch.testing.assert_close(known.state[f"model/{name}"], weight.detach(), rtol=0, atol=1e-11)
