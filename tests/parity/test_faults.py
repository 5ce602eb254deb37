"""Mutations, kept: every fault turns cells of the array red, and without it the same cells are green."""

from __future__ import annotations

import pytest

from tests.parity import array
from tests.parity.cells import Cell, limits_of, run_cell
from tests.parity.faults import FAULTS

green: set[Cell] = set()
"""Cells that were right without a fault; several faults are felt by the same."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_turns_cells_red(ranks, name):
    felt = [cell for cell in array.load() if FAULTS[name].felt(cell) and cell.world <= 4 and cell.compile == "off"]
    assert felt, "no cell of the array is meant to feel it"
    for cell in felt[:2]:
        if cell not in green:
            assert run_cell(ranks, cell).over(limits_of(cell)) == [], "it must be the fault that is seen"
            green.add(cell)
        found = run_cell(ranks, cell, fault=name).over(limits_of(cell))
        assert found, cell.id
