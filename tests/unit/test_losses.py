"""Losses that a user's function returns, and their weights; batches cut into rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from meshwright.distributed.environment import World
from meshwright.distributed.world import Ranks
from meshwright.errors import DataError
from meshwright.runtime.batches import rows_of, split_rows
from meshwright.runtime.losses import LossError, Window, check_len, terms_of, weights_of


def value(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64, requires_grad=True)


def window(planned: int, **more: Any) -> Window:
    alone = Ranks(World(), torch.device("cpu"), "gloo", None, None, None)  # type: ignore[arg-type]
    return Window(alone, torch.device("cpu"), counts=True, guess=None, planned=planned, **more)


def test_the_mean_is_over_all_weights_and_not_over_micro_batches():
    """One target with loss 4, three with 1 each: 7/4. Mutation tried: each micro-batch divided by its own weight gives 2.5."""
    made, total = window(2), 0.0
    leaves = [value(4.0), value(3.0)]
    for leaf, weight in zip(leaves, (1, 3), strict=True):
        start = made.add(terms_of((leaf, weight)))
        start.backward()
        total += float(start.detach())
    factor, weights = made.close()
    assert weights == {"loss": 4.0} and total / factor == 1.75 and made.sums().tolist() == [7.0]
    assert [float(leaf.grad) / factor for leaf in leaves] == [0.25, 0.25]


def test_a_mean_with_its_weight_is_a_sum():
    (term,) = terms_of(value(2.0), 3)
    assert float(term.value.detach()) == 6.0 and term.weight == 3 and not term.bare


def test_several_losses_are_each_divided_by_their_own_weight():
    made = window(1)
    start = made.add(terms_of({"words": (value(6.0), 3), "labels": (value(5.0), 1)}))
    assert float(start.detach()) == 7.0
    assert made.close() == (1.0, {"words": 3.0, "labels": 1.0})
    made = window(2, known={"words": 4.0, "labels": 2.0})
    parts = {"words": (1.0, 2.0), "labels": (4.0, 0.0)}  # of two micro-batches, already times their weights
    total = sum(float(made.add(terms_of({k: (value(v[i]), 1) for k, v in parts.items()})).detach()) for i in range(2))
    assert total == 3.0 / 4 + 4.0 / 2


def test_several_losses_of_several_micro_batches_need_to_be_weighed_alike_or_ahead():
    made = window(2)
    with pytest.raises(LossError, match=r"weigh differently \(a 3, b 1\).*weight_fn"):
        made.add(terms_of({"a": (value(6.0), 3), "b": (value(5.0), 1)}))
    made = window(1)
    made.add(terms_of([value(1.0), value(2.0)]))
    with pytest.raises(LossError, match=r"more micro-batches than run\.parallelize was told"):
        made.add(terms_of([value(1.0), value(2.0)]))


def test_bare_means_are_taken_only_where_they_weigh_the_same():
    made = window(2)
    for _ in range(2):
        made.add(terms_of(value(2.0)), rows=4)
    assert made.close() == (1.0, {"loss": 2.0})
    made = window(2)
    made.add(terms_of(value(2.0)), rows=4)
    made.add(terms_of(value(2.0)), rows=3)
    with pytest.raises(LossError, match=r"3 to 4 rows.*weight_fn"):
        made.close()


def test_a_batch_without_any_weight_divides_by_nothing():
    made = window(1)
    start = made.add(terms_of((value(0.0), 0)))
    assert float(start.detach()) == 0.0 and made.close() == (1.0, {"loss": 0.0})


@pytest.mark.parametrize(
    ("output", "weight", "said"),
    [
        (torch.zeros(4, requires_grad=True), None, r"no scalar: its shape is \(4,\)"),
        (torch.zeros(()), None, "does not depend on any parameter"),
        (3.5, None, "is no tensor but a float"),
        (None, None, "is no tensor but None"),
        ((value(1.0), value(2.0)), None, r"a tuple of 2 that is no \(sum, weight\)"),
        ((value(1.0), 2), 3, "keep one of them"),
        ((value(1.0), torch.ones(2)), None, r"its weight is no number but a tensor of shape \(2,\)"),
        (torch.zeros((), dtype=torch.complex64, requires_grad=True), None, r"is complex \(torch.complex64\)"),
        ({}, None, "there is none"),
        ({"a": value(1.0)}, {"b": 1.0}, "loss 'a'.*has no weight among b"),
    ],
)
def test_what_is_no_loss_is_said(output: Any, weight: Any, said: str):
    with pytest.raises(LossError, match=f"(?i){said}"):
        terms_of(output, weight)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "weight_fn: gave no number but None"),
        ("4", "weight_fn: gave no number but a str"),
        (float("nan"), "weight_fn: gave nan"),
        (-3, "weight_fn: gave -3"),
        ({"a": 1, "b": torch.ones(2)}, r"weight_fn\['b'\]: gave no number but a tensor of shape \(2,\)"),
    ],
)
def test_what_is_no_weight_is_said(given: Any, said: str):
    """Mutation tried: None left out of the sum, so that every step was skipped in silence."""
    with pytest.raises(LossError, match=said):
        weights_of(given)
    assert weights_of({"a": torch.tensor(2), "b": True}) == {"a": 2.0, "b": 1.0} and weights_of(0) == {"": 0.0}


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -3.0])
def test_a_loss_with_a_weight_that_is_none_is_refused(weight: float):
    """In the first micro-batch and in a later one. Mutation tried: the sum of 5 and -3 taken."""
    with pytest.raises(LossError, match=f"loss: weighs {weight:g}"):
        window(1).add(terms_of((value(1.0), weight)))
    made = window(2)
    made.add(terms_of((value(1.0), 5)))
    made.add(terms_of((value(1.0), torch.tensor(weight))))
    with pytest.raises(LossError, match=f"loss: weighs {weight:g}"):
        made.close()


@pytest.mark.parametrize("batch", [[torch.zeros(3, 2), torch.zeros(3)], {"x": torch.zeros(3)}])
def test_len_of_the_parts_of_a_batch_is_no_weight_of_its_rows(batch: Any):
    with pytest.raises(LossError, match=f"counts the {len(batch)} parts of a {type(batch).__name__}, and it has 3 rows"):
        check_len(batch)
    check_len(torch.zeros(3, 2))
    check_len(["a", "b"])


def test_other_losses_than_before_are_refused():
    made = window(2)
    made.add(terms_of({"a": value(1.0)}))
    with pytest.raises(LossError, match="its losses are b, those of the one before a"):
        made.add(terms_of({"b": value(1.0)}))


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Record:
    x: torch.Tensor
    texts: list[str]
    scale: torch.Tensor


@pytest.mark.parametrize("ways", [1, 2, 3, 4, 7])
def test_every_structure_is_cut_by_rows_and_nothing_is_lost(ways: int):
    x, y = torch.arange(10).view(5, 2), torch.arange(5)
    whole: list[Any] = [
        x, (x, y), [x, y], {"x": x, "inner": {"y": y}}, Pair(x, y), Record(x, list("abcde"), torch.tensor(2.0)),
    ]  # fmt: skip
    for batch in whole:
        parts = split_rows(batch, ways)
        assert len(parts) == ways and [type(part) for part in parts] == [type(batch)] * ways
        sizes = [rows_of(part) for part in parts]
        assert sum(size or 0 for size in sizes) == 5 and sizes == sorted(sizes, reverse=True) and sizes[0] == -(-5 // ways)
    parts = split_rows(whole[-1], ways)
    assert [text for part in parts for text in part.texts] == list("abcde")
    assert torch.equal(torch.cat([part.x for part in parts]), x) and all(float(part.scale) == 2.0 for part in parts)


@pytest.mark.parametrize("batch", [(torch.zeros(3), torch.zeros(4)), ["a", "b"], {"n": 3}])
def test_a_batch_without_rows_is_refused_with_its_shapes(batch: Any):
    with pytest.raises(DataError, match=r"cannot be cut into rows: it holds .*split="):
        split_rows(batch, 2)
