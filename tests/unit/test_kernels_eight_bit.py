"""Kernels over numbers of 8 bits, in Triton's interpreter, against their plain versions."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.unit.test_kernels_fused import of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which the extra `kernels` brings"),
]
LIMIT = {"fp64": 4e-14, "fp32": 1e-5, "fp16": 2.0**-8, "bf16": 2.0**-5}
"""Relative to numbers above 1: sums of 300 products of numbers up to 30, and products of two such. bf16 as in
`test_kernels_fused`."""


@pytest.mark.parametrize(("kind", "count"), [("rows", 3), ("matrix", 9), ("pages", 3), ("attention", 3)])
def test_numbers_of_8_bits(kind: str, count: int):
    # Mutations tried: the scale of the first row of a pair for both; half of the factor of values in pairs: each red.
    found = of("eight_bit_cases", kind)
    wrong = {name: value for name, value in found.items() if not value < LIMIT[name.rsplit(" ", 1)[1]]}
    assert len(found) == count and not wrong, wrong


def test_kernels_that_round_what_they_give():
    """Bit by bit what a kernel of its own makes of their results. Mutations tried, each red: the norm, or the product with a
    gate, not rounded to the model's dtype before; a scale for two rows; half of the features of a gate."""
    found = of("eight_bit_cases", "before")
    assert len(found) == 12 and set(found.values()) == {0.0}, found
