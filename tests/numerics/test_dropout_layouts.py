"""Dropout and masking of whole runs on several layouts.

Hidden dropout and the choice of masked tokens are functions of (seed, sample, position): the losses of a run are the same on
any number of ranks and in any micro-batch. Attention dropout is drawn by the attention kernels from the generator of the
device, which each rank seeds by (seed, step, its place): exact on the same layout, equal in distribution on another.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from meshwright.config.schema import Config
from meshwright.data.dataset import Dataset, Row
from meshwright.spec.layout import Layout
from tests.numerics.jobs import DECODER, ENCODER, configure, corpus, dataset, execute

TOLERANCE = 1e-12
"""Relative, fp64, after 5 steps."""

HIDDEN = {
    "masked tokens": configure({**ENCODER, "dropout": 0.2}, objective={"kind": "masked_lm"}, train={"steps": 5}),
    "packed documents": configure({**DECODER, "dropout": 0.2}, train={"steps": 5, "batch": 10}),
    "labels of rows": configure(
        {**ENCODER, "dropout": 0.2, "head_dropout": 0.5, "classes": 3}, objective={"kind": "classify"}, train={"steps": 5}
    ),
}


def short(config: Config) -> Dataset:
    """Few rows: an epoch ends within the five steps, with a smaller one."""
    classes = config.model.classes or 0 if config.objective.kind == "classify" else 0
    return dataset(config, corpus(37, 20 if classes == 0 else 40, classes=classes))


@dataclass(frozen=True)
class Same:
    """One row for ever, so that only the draws differ."""

    base: Dataset
    rows: int = 1 << 20

    @property
    def seq_len(self) -> int:
        return self.base.seq_len

    def row(self, sample: int) -> Row:
        return self.base.row(0)


LAYOUTS = {
    "one rank": Layout(),
    "two ranks": Layout(dp_replicate=2),
    "four ranks": Layout(dp_replicate=4),
    "ZeRO-2 on two ranks": Layout(dp_shard=2, zero=2),
    "ZeRO-1 on two times two ranks": Layout(dp_replicate=2, dp_shard=2, zero=1),
}


def losses_of(
    config: Config, micro_batches: tuple[int, ...], layout: Layout | None = None, same: bool = False
) -> list[list[float]]:
    """Losses of the runs, one for each micro-batch; on the first rank, empty on the others. same: one row for ever."""
    rows = Same(short(config)) if same else short(config)
    return [execute(config, rows, micro, layout).losses for micro in micro_batches]


def losses_of_one_row(config: Config) -> list[list[float]]:
    return losses_of(config, (1,), same=True)


@functools.cache
def losses_at_once(name: str) -> list[float]:
    (losses,) = losses_of(HIDDEN[name], (HIDDEN[name].train.batch,))
    return losses


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("where", LAYOUTS)
def test_hidden_dropout_and_masking_do_not_depend_on_the_layout(ranks, name, where):
    # Red (each tried) with dropout keys by the place in the micro-batch in place of the sample, with keys that know the
    # rank, and with masks drawn by the place in the micro-batch.
    config, layout = HIDDEN[name], LAYOUTS[where]
    expected = losses_at_once(name)
    for losses in ranks(layout.world).run(losses_of, config, (1, 2, 3, 5), layout)[0]:
        assert losses == pytest.approx(expected, rel=TOLERANCE, abs=0)


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_dropout_is_at_work(name):
    config = HIDDEN[name]
    still = config.model_copy(update={"model": config.model.model_copy(update={"dropout": 0.0, "head_dropout": None})})
    other = config.model_copy(update={"run": config.run.model_copy(update={"seed": 1})})
    (dropped,), (plain,) = losses_of(config, (4,)), losses_of(still, (4,))
    assert all(abs(a - b) > 1e-4 for a, b in zip(dropped, plain, strict=True))
    assert losses_of(other, (4,)) != [dropped]


def attention_only(batch: int, steps: int, p: float = 0.3, seed: int = 0, lr: float = 1e-12) -> Config:
    """No hidden dropout; weights that all but stand still, and are large enough for attention to be far from even."""
    model = {**DECODER, "attention_dropout": p, "init_std": 0.3}
    train = {"batch": batch, "steps": steps, "lr": lr, "optimizer": {"weight_decay": 0.0}}
    return configure(model, train=train, run={"seed": seed})


def test_attention_dropout_alone_is_at_work():
    # Red when the model gets dropout keys for hidden dropout only, as it did: attention then drops nothing.
    dropped, still = attention_only(8, 3), attention_only(8, 3, p=0.0)
    (a,), (b,) = losses_of(dropped, (8,)), losses_of(still, (8,))
    assert all(abs(x - y) > 1e-4 for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("world", [1, 2])
def test_attention_dropout_is_exact_on_the_same_layout(ranks, world):
    # Red when no step seeds the generator: the second run goes on where the first one left it.
    config = attention_only(8, 5, lr=3e-3)
    first, second = ranks(world).run(losses_of, config, (2, 2))[0]
    assert first == second


def test_attention_dropout_differs_between_steps_and_ranks(ranks):
    # Red when the generator is seeded without the step, or without the rank's place.
    (alone,) = losses_of_one_row(attention_only(1, 6))
    ordered = sorted(alone)
    assert min(b - a for a, b in itertools.pairwise(ordered)) > 1e-6  # the weights alone move them by 1e-11
    (both,) = ranks(2).run(losses_of_one_row, attention_only(2, 6))[0]
    # the first rank draws as the single one does; were the second to draw the same, their mean would be the same too
    assert all(abs(a - b) > 1e-6 for a, b in zip(both, alone, strict=True))


def test_attention_dropout_differs_between_seeds():
    # Red when the generator is seeded without the seed of the run.
    used: list[int] = []
    for seed in (0, 1):
        with mock.patch.object(torch, "manual_seed", used.append):
            losses_of_one_row(attention_only(1, 6, seed=seed))
    assert len(set(used)) == len(used) == 12


def test_attention_dropout_is_equal_in_distribution_on_other_layouts(ranks):
    # Red when the second rank drops nothing: the spread is then 0.71 of what it should be.
    config, steps = attention_only(4, 120), 120
    runs = [*losses_of(config, (4, 2), same=True), *ranks(2).run(losses_of_one_row, config)[0]]
    assert runs[0] != runs[1] and runs[0] != runs[2]  # not exact, as is said above
    spreads, means = [statistics.stdev(run) for run in runs], [statistics.fmean(run) for run in runs]
    assert max(spreads) / min(spreads) < 1.25
    assert max(means) - min(means) < 4 * max(spreads) * (2 / steps) ** 0.5
