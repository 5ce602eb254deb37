"""The function that is traced gives the model's own numbers, whatever stands beside a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshwright.errors import ConfigError
from meshwright.export.parity import Batch, batches, compare, expected, latency_ms
from meshwright.export.plain import PlainModel
from tests.unit.export_cases import CASES, source


def run_of(plain: PlainModel):
    def run(tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return plain(torch.from_numpy(tokens), torch.from_numpy(np.ascontiguousarray(mask))).numpy()

    return run


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_model_itself(name: str):
    """Rows together, padded on either side, against each row alone through the model, in fp64.

    Mutations tried: no padding mask in `_attend`; positions from `arange` (red with padding on the left where positions are
    learned); the last column for the last real position; experts that were not chosen count too; the mean over padding as well.
    """
    given, output = source(name, torch.float64), CASES[name][2]
    made = batches(262, 48)
    wanted = [expected(given.trunk, batch, output) for batch in made]
    parity = compare(run_of(PlainModel(given.trunk, output)), made, wanted, output)
    assert parity.difference < 1e-11 and parity.scale > 0.2
    assert parity.same == (None if output == "embeddings" else 1.0)
    assert any(batch.mask[:, 0].min() == 0 for batch in made) and any(batch.mask[:, -1].min() == 0 for batch in made)


def test_the_model_is_left_as_it_is_and_its_parameters_are_shared():
    given = source("gpt2")
    before = [layer.attention.attend for layer in given.trunk.layers]
    plain = PlainModel(given.trunk)
    assert [layer.attention.attend for layer in given.trunk.layers] == before
    assert plain.model.embedding.weight is given.trunk.embedding.weight is plain.model.head.weight


def test_a_difference_is_seen():
    """Mutation tried: `max` over Python floats, which forgets a NaN that is not the first."""
    given = source("grouped")
    made = batches(262, 48)
    wanted = [expected(given.trunk, batch) for batch in made]
    run = run_of(PlainModel(given.trunk))
    assert compare(run, made, wanted).good

    def off(tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return run(tokens, mask) + (0.01 if tokens.shape[0] == 3 else 0.0)

    def broken(tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return run(tokens, mask) * (np.nan if tokens.shape[0] == 4 else 1.0)

    assert not compare(off, made, wanted).good and not compare(broken, made, wanted).good
    swapped = compare(lambda tokens, mask: -run(tokens, mask), made, wanted)
    assert swapped.same is not None and swapped.same < 0.1


def test_what_a_batch_is_called():
    mask = np.array([[1, 1, 1], [1, 0, 0]])
    assert str(Batch(mask, mask)) == "2 x 3, 2 of 6 padding on the right"
    assert str(Batch(mask, mask[:, ::-1])) == "2 x 3, 2 of 6 padding on the left"
    assert str(Batch(mask[:1], mask[:1])) == "1 x 3"


def test_the_time_is_the_median():
    import time

    waits = iter([0.05, 0.05, 0.05, 0.001, 0.2, 0.01])
    assert 9 < latency_ms(lambda *_: time.sleep(next(waits)) or np.zeros(1), 4, 3) < 50


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 24}


@pytest.mark.parametrize(
    ("name", "settings", "output", "words"),
    [
        ("grouped", {"rope_scaling": DYNAMIC}, "logits", "dynamic with max_len 48 beyond the original 24"),
        ("grouped", {}, "embeddings", "this model is a decoder"),
        ("experts", {"capacity": 1.0}, "logits", "model.capacity: 1.0"),
    ],
)
def test_what_no_graph_can_have_is_refused(name: str, settings: dict, output: str, words: str):
    with pytest.raises(ConfigError, match=words):
        PlainModel(source(name, **settings).trunk, output)


def test_dynamic_scaling_that_is_never_reached_is_taken():
    plain = source("grouped", rope_scaling={**DYNAMIC, "original_max_position_embeddings": 48})
    made = batches(262, 48)
    wanted = [expected(plain.trunk, batch) for batch in made]
    assert compare(run_of(PlainModel(plain.trunk)), made, wanted).good
