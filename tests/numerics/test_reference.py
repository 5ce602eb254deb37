"""20 steps of the product equal 20 steps of a plain PyTorch loop: losses, norms, learning rates, weights.

The loop below shares the model, its initial weights, the rows and the dropout keys with the product. Everything else is
torch's own or written out here: order of the samples, batches and ramp, schedule, loss from logits, clipping, optimizer,
averages of the weights, low-precision copies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.config.schema import Config
from meshwright.data.dataset import RowDataset
from meshwright.kernels.dropout import position_keys
from meshwright.models import build, initialize
from tests.numerics.jobs import DECODER, ENCODER, Result, configure, corpus, dataset, execute, largest_difference

STEPS = 20
TOLERANCE = 1e-11
TASKS = {"causal_lm": "lm", "masked_lm": "mlm", "classify": "classify"}


def batches(config: Config, epoch: int) -> Iterator[range]:
    """The samples of every step: an epoch ends with a smaller batch, or without its ragged end."""
    train, start = config.train, 0
    for _ in range(config.train.steps or 0):
        while True:
            rows = train.batch
            if train.ramp is not None and start < train.ramp.samples:
                rises = math.ceil((train.batch - train.ramp.start) / train.ramp.increment)
                rows = min(rows, train.ramp.start + train.ramp.increment * math.floor(start * rises / train.ramp.samples))
            left = epoch - start % epoch
            if left >= rows or train.tail == "step":
                break
            start += left
        rows = min(rows, left)
        yield range(start, start + rows)
        start += rows


def rate(config: Config, update: int) -> float:
    """Linear warm-up, then half a cosine to min_ratio."""
    schedule, total = config.train.schedule, config.train.steps or 0
    if update < schedule.warmup:
        return config.train.lr * (update + 1) / schedule.warmup
    done = (update - schedule.warmup) / (total - schedule.warmup)
    low = schedule.min_ratio * config.train.lr
    return low + 0.5 * (config.train.lr - low) * (1 + math.cos(math.pi * done))


def inputs(rows: RowDataset, samples: range, config: Config) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """tokens [B, S], labels, and the other arguments of the model."""
    made = [rows.row(sample) for sample in samples]

    def stacked(parts: list[Any]) -> torch.Tensor | None:
        return None if parts[0] is None else torch.from_numpy(np.stack(parts))

    tokens, labels = stacked([row.tokens for row in made]), stacked([row.labels for row in made])
    assert tokens is not None and labels is not None
    more: dict[str, Any] = {name: stacked([getattr(r, name) for r in made]) for name in ("documents", "positions", "select")}
    if config.model.dropout:
        more["dropout_key"] = position_keys(
            config.run.seed, torch.tensor(list(samples)), torch.arange(tokens.shape[1]).expand_as(tokens)
        )
    return tokens, labels, more


def loss_sums(
    config: Config, model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, more: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross-entropy, z term), summed over the targets, in at least fp32."""
    if config.precision == "bf16":
        return model(tokens, labels=labels, **more).loss_sum, torch.zeros(())
    logits = model(tokens, **more)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    labels = labels.flatten()
    plain = F.cross_entropy(
        logits, labels, reduction="sum", ignore_index=-100, label_smoothing=config.objective.label_smoothing
    )
    return plain, config.objective.z_loss * torch.logsumexp(logits, -1)[labels != -100].square().sum()


def optimizer_of(config: Config, named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    chosen = config.train.optimizer
    decayed = [p for name, p in named.items() if not any(word in name for word in chosen.no_decay)]
    others = [p for name, p in named.items() if any(word in name for word in chosen.no_decay)]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": chosen.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if chosen.kind == "sgd":
        return torch.optim.SGD(groups, lr=1.0, momentum=chosen.momentum)
    # torch's AdamW of one pass, as ours is on a CPU: it rounds otherwise than its several operations one after another
    return torch.optim.AdamW(groups, lr=1.0, betas=chosen.betas, eps=chosen.eps, fused=True)


@dataclass
class Reference(Result):
    rates: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)


def reference(
    config: Config, rows: RowDataset, *, micro_batch: int | None = None, dtype: torch.dtype = torch.float64
) -> Reference:
    """The loop. dtype: of the model; masters, of which it gets copies, are at least fp32.

    micro_batch: gradients are added up over parts of that many rows; None: the batch at once.
    """
    model = build(config.model, TASKS[config.objective.kind])
    initialize(model, config.run.seed, "cpu", torch.promote_types(dtype, torch.float32))
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    model.to(dtype).train()
    optimizer, out = optimizer_of(config, masters), Reference()
    out.averages = {name: p.detach().clone() for name, p in masters.items()}
    for update, samples in enumerate(batches(config, rows.rows)):
        step = micro_batch or len(samples)
        parts = [inputs(rows, samples[first : first + step], config) for first in range(0, len(samples), step)]
        count = sum(int((labels != -100).sum()) for _, labels, _ in parts)
        total = 0.0
        for p in masters.values():
            p.grad = None
        for tokens, labels, more in parts:
            plain, z = loss_sums(config, model, tokens, labels, more)
            total += plain.item()
            ((plain + z) / count).backward()
            for name, p in model.named_parameters():
                assert p.grad is not None
                new = p.grad.to(masters[name].dtype)
                old = masters[name].grad
                masters[name].grad, p.grad = new if old is None else old + new, None
        out.losses.append(total / count)
        norm = torch.nn.utils.clip_grad_norm_(list(masters.values()), config.train.clip or math.inf)
        out.norms.append(float(norm))
        out.rates.append(rate(config, update))
        out.batches.append(len(samples))
        for group in optimizer.param_groups:
            group["lr"] = out.rates[-1]
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
                out.averages[name].mul_(config.train.ema).add_(masters[name], alpha=1 - config.train.ema)
    out.weights = {name: p.detach() for name, p in masters.items()}
    return out


def apart(ours: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, expected, strict=True))


def job(model: dict[str, Any], kind: str, **sections: Any) -> Config:
    """eps 1e-6: with 1e-8 the gradients of key biases, zero but for rounding, move weights by more than the tolerance."""
    train = {"steps": STEPS, "optimizer": {"eps": 1e-6}, **sections.pop("train", {})}
    objective = {"kind": kind, **sections.pop("objective", {})}
    return configure(model, train=train, objective=objective, **sections)


SGD = {"kind": "sgd", "momentum": 0.9, "weight_decay": 0.05}
JOBS = {
    "decoder, packed documents": job(DECODER, "causal_lm"),
    "decoder, z-loss and dropout": job({**DECODER, "dropout": 0.1}, "causal_lm", objective={"z_loss": 0.01}),
    "decoder, responses only": job(DECODER, "causal_lm", objective={"response_only": True}),
    "decoder, sliding window, no ties": job({**DECODER, "tied": False, "sliding_window": 5}, "causal_lm"),
    "decoder, batch ramp": job(
        DECODER, "causal_lm", train={"ramp": {"start": 2, "increment": 3, "samples": 40}, "batch": 9, "tail": "step"}
    ),
    "decoder, average of the weights": job(DECODER, "causal_lm", train={"ema": 0.9, "tail": "drop", "batch": 10}),
    "decoder, SGD with momentum": job(DECODER, "causal_lm", train={"optimizer": SGD, "lr": 0.3, "clip": 0.7}),
    "decoder, nothing clipped, all decayed": job(
        DECODER, "causal_lm", train={"clip": 0.0, "optimizer": {"no_decay": [], "weight_decay": 0.3, "betas": [0.8, 0.99]}}
    ),
    "encoder, masked tokens": job(ENCODER, "masked_lm", data={"packing": "none"}),
    "encoder, packed, dropout, smoothing": job({**ENCODER, "dropout": 0.1}, "masked_lm", objective={"label_smoothing": 0.1}),
    "classifier": job({**ENCODER, "classes": 3}, "classify", objective={"label_smoothing": 0.1}),
    "classifier, dropout of its own": job({**ENCODER, "classes": 3, "dropout": 0.2, "head_dropout": 0.4}, "classify"),
    "classifier on a decoder": job({**DECODER, "classes": 4}, "classify", objective={"z_loss": 0.05}),
}


@pytest.mark.parametrize("name", JOBS)
def test_twenty_steps_equal_a_plain_loop(name):
    # Red (each tried): loss times 1 + 1e-9; no z-loss; no dropout; schedule one update late; decay on all parameters; clip
    # at twice its value, or against half the norm; momentum dropped; average taken before the update, or with its decay
    # rounded to fp32 (as it was); ramp one increment early; each micro-step divided by its own targets (accumulation 3);
    # padded rows with the labels of a real one, or counted as targets; dropout keyed by the place in the micro-batch.
    config = JOBS[name]
    rows = dataset(config)
    expected = reference(config, rows)
    if config.train.clip:
        assert max(expected.norms) > config.train.clip  # it is at work
    for accumulation in (1, 3):
        ours = execute(config, rows, -(-config.train.batch // accumulation))
        assert [record["batch"] for record in ours.records] == expected.batches
        assert apart([record["lr"] for record in ours.records], expected.rates) < TOLERANCE
        assert apart(ours.losses, expected.losses) < TOLERANCE
        assert apart(ours.norms, expected.norms) < TOLERANCE
        assert largest_difference(ours.weights, expected.weights) < TOLERANCE
        if config.train.ema:
            assert largest_difference(ours.averages, expected.averages) < TOLERANCE


def test_the_jobs_reach_what_they_name():
    ragged, ramp, drop = (JOBS[f"decoder, {name}"] for name in ("packed documents", "batch ramp", "average of the weights"))
    assert len({len(samples) for samples in batches(ragged, dataset(ragged).rows)}) == 2  # the end of an epoch is in it
    assert [len(samples) for samples in batches(ramp, dataset(ramp).rows)][:8] == [2, 2, 2, 2, 2, 2, 2, 5]
    spans = list(batches(drop, dataset(drop).rows))
    assert any(b.start > a.stop for a, b in itertools.pairwise(spans))
    answers = dataset(JOBS["decoder, responses only"])
    assert any((answers.row(sample).labels == -100).all() for sample in range(answers.rows))


def low_precision(micro_batch: int) -> tuple[Config, RowDataset, Reference]:
    """Without clipping, whose norm is a sum in another order. Rows are whole, so that a step has 8 * 32 targets: division
    by a power of two rounds nothing."""
    config = job(DECODER, "causal_lm", precision="bf16", data={"seq_len": 32, "document_mask": False}, train={"clip": 0.0})
    rows = dataset(config, corpus(300, 40))
    return config, rows, reference(config, rows, micro_batch=micro_batch, dtype=torch.bfloat16)


@pytest.mark.parametrize("micro_batch", [8, 4])
def test_bf16_with_fp32_masters_equals_a_plain_loop_bit_for_bit(micro_batch):
    # Both sides round at the same places; the loss is the model's own (see `loss_sums`).
    # Red (each tried): masters rounded to bf16 before each update; gradients of two micro-steps added in bf16 (4);
    # working weights one update old.
    config, rows, expected = low_precision(micro_batch)
    ours = execute(config, rows, micro_batch)
    assert all(value.dtype == torch.float32 for value in ours.weights.values())
    assert ours.gradients["embedding.weight"].dtype == (torch.bfloat16 if micro_batch == 8 else torch.float32)
    assert ours.losses == expected.losses
    assert largest_difference(ours.weights, expected.weights) == 0.0
    assert apart(ours.norms, expected.norms) < 1e-6
