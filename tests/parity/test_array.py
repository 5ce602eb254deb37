"""What the committed array holds: nothing that could run is left out of it without a word."""

from __future__ import annotations

from collections import Counter

from meshwright.verify.cover import pairs_of
from tests.parity import array
from tests.parity.cells import LAYOUTS, SCHEDULES, Cell
from tests.parity.models import MODELS

ARRAY = array.load()


def test_the_committed_array_is_the_one_that_its_factors_give():
    assert array.generate() == ARRAY, "write it anew: python -m tests.parity.array"


def test_every_pair_of_values_that_any_cell_of_4_ranks_has_is_in_one():
    # Red when a line of array.json is taken out: the greedy choice has none to spare but among the strategies alone.
    small = [cell for cell in ARRAY if cell.world <= 4]
    wanted = set().union(*(pairs_of(array.factors(cell)) for cell in array.candidates()))
    assert wanted == set().union(*(pairs_of(array.factors(cell)) for cell in small))
    assert len(wanted) > 700


def test_every_strategy_is_alone_on_every_model():
    found = {(cell.model, cell.layout, cell.schedule, cell.sequence_parallel) for cell in ARRAY}
    for model in MODELS:
        for layout in ("data", "zero1", "zero2", "zero3", "hybrid1", "hybrid2", "hybrid3", "tp"):
            assert (model, layout, "", True) in found
        assert (model, "tp", "", False) in found
        for schedule in SCHEDULES:
            assert (model, "pp", schedule, True) in found
        alone = {cell.context for cell in ARRAY if (cell.model, cell.layout) == (model, "cp")}
        assert alone == (set() if model == "moe" else set(array.CONTEXT)), "experts are not counted by parts of a row"


def test_full_stacks_use_8_ranks_and_everything():
    full = [cell for cell in ARRAY if cell.world == 8]
    assert len(full) == 15 and all(cell.accumulation == 3 and cell.clip for cell in full)
    assert {cell.model for cell in full} == set(MODELS)
    assert {cell.schedule for cell in full} == {*SCHEDULES, ""}
    assert {LAYOUTS[cell.layout].zero for cell in full} == {0, 1, 2, 3}
    assert {cell.context for cell in full} == {*array.CONTEXT, "auto"}
    assert {cell.recompute for cell in full} == set(array.RECOMPUTE) and {cell.compile for cell in full} == set(array.COMPILE)


def test_no_cell_is_refused():
    assert [(cell.id, cell.refused()) for cell in ARRAY if cell.refused()] == []


def test_cells_have_names_of_their_own():
    every = array.whole_product()
    assert len({cell.id for cell in every}) == len(every) == len(set(every))
    assert max(Counter(cell.id for cell in ARRAY).values()) == 1
    kinds = {(cell.layout, cell.schedule, cell.accumulation, cell.precision, cell.clip, cell.recompute) for cell in every}
    assert {(layout, how) for layout, _, _, _, _, how in kinds} >= {(name, how) for name in LAYOUTS for how in array.RECOMPUTE}
    assert isinstance(every[0], Cell)
