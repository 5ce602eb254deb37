"""The gradient of a step is the same however its rows are split over ranks and micro-steps.

One rank that takes the whole batch at once is the reference; fp32, since rounding is where real runs live.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from meshwright.config.schema import Config
from meshwright.data.batch import IGNORE
from meshwright.data.dataset import Dataset, Row
from tests.numerics.jobs import DECODER, ENCODER, Result, configure, corpus, dataset, execute, largest_difference

TOLERANCE = 1e-6
"""Of each tensor's largest element."""


@dataclass(frozen=True)
class Quiet:
    """Rows of another dataset, some of them without a target."""

    base: Dataset
    samples: frozenset[int]

    @property
    def rows(self) -> int:
        return self.base.rows

    @property
    def seq_len(self) -> int:
        return self.base.seq_len

    def row(self, sample: int) -> Row:
        row = self.base.row(sample)
        return replace(row, labels=np.full_like(row.labels, IGNORE)) if sample in self.samples else row


@dataclass(frozen=True)
class Split:
    """A first step. quiet: samples whose labels are taken away. micro: rows a forward, for each of which it is run.
    longest: tokens of a document, at most; 1 at least."""

    config: Config
    quiet: tuple[int, ...] = ()
    micro: tuple[int, ...] = (1, 2, 3)
    longest: int = 50

    def data(self) -> Dataset:
        classes, kind = self.config.model.classes or 0, self.config.objective.kind
        store = corpus(
            90, self.longest, classes=classes if kind == "classify" else 0, prompts=self.config.objective.response_only
        )
        return Quiet(dataset(self.config, store), frozenset(self.quiet))


def one_step(model: dict, kind: str, batch: int, **objective: object) -> Config:
    data = {"packing": "none"} if objective.get("response_only") else {}
    return configure(
        model, data=data, objective={"kind": kind, **objective}, train={"batch": batch, "steps": 1}, precision="fp32"
    )


SPLITS = {
    # documents of 1 to 12 tokens in rows of 24: rows differ in their documents and targets
    "packed documents": Split(one_step({**DECODER, "dropout": 0.1}, "causal_lm", 12, z_loss=1e-3), micro=(1, 3, 6), longest=12),
    "seven rows": Split(one_step(DECODER, "causal_lm", 7)),
    "fewer rows than ranks": Split(one_step(DECODER, "causal_lm", 3), micro=(1, 2)),
    "only responses are targets": Split(one_step(DECODER, "causal_lm", 8, response_only=True)),
    # two ranks: none on the second; four: none on the last two; three: none on the last
    "half of the rows without targets": Split(one_step(DECODER, "causal_lm", 8), quiet=(4, 5, 6, 7)),
    "one target row": Split(one_step({**ENCODER, "dropout": 0.1}, "masked_lm", 6), quiet=(0, 1, 2, 4, 5)),
    "masked tokens": Split(one_step(ENCODER, "masked_lm", 10, label_smoothing=0.1), micro=(2, 5)),
    "labels of rows": Split(one_step({**ENCODER, "classes": 3}, "classify", 9)),
}


def gradients(name: str) -> list[Result]:
    """On a rank: the first step for each micro-batch of the split."""
    split = SPLITS[name]
    data = split.data()
    return [execute(split.config, data, micro) for micro in split.micro]


@pytest.fixture(scope="module")
def whole() -> dict[str, Result]:
    """The whole batch at once, on one rank."""
    return {name: execute(split.config, split.data(), split.config.train.batch) for name, split in SPLITS.items()}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gradients_do_not_depend_on_the_split(ranks, whole, world):
    # Red (each tried): loss divided by this rank's targets, or by a micro-step's; gradients averaged over ranks; half of an
    # earlier micro-step forgotten; padded rows with the labels of a real one, or counted as targets.
    worst = {}
    for name in SPLITS:
        outcomes = ranks(world).run(gradients, name)
        for index, micro in enumerate(SPLITS[name].micro):
            first = outcomes[0][index]
            assert first.losses == pytest.approx(whole[name].losses, rel=TOLERANCE)
            assert first.norms == pytest.approx(whole[name].norms, rel=TOLERANCE)
            for rank in range(world):
                ours = outcomes[rank][index].gradients
                worst[name, micro] = largest_difference(ours, whole[name].gradients)
                assert all(torch.equal(ours[key], value) for key, value in first.gradients.items())  # the same bits
    assert max(worst.values()) < TOLERANCE, {case: value for case, value in worst.items() if value >= TOLERANCE}


def test_the_splits_are_what_they_say():
    packed = SPLITS["packed documents"].data()
    rows = [packed.row(sample) for sample in range(12)]
    documents = {int(row.documents.max()) for row in rows if row.documents is not None}
    assert len({int((row.labels != IGNORE).sum()) for row in rows}) > 3 and len(documents) > 2
    answers = SPLITS["only responses are targets"].data()
    counts = [int((answers.row(sample).labels != IGNORE).sum()) for sample in range(8)]
    assert 0 in counts and max(counts) > 5
