"""Kernels of serving against their plain versions, in Triton's interpreter. That those are what the model computes is tested in
`test_serve_layers`."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.unit import fused_cases, one_row_cases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which the extra `kernels` brings"),
]
LIMIT = {"fp64": 4e-15, "fp32": 2e-6, "bf16": 2.0**-5}
"""Relative to numbers above 1. The interpreter cuts off what bf16 has no room for, where a device rounds: twice the error of
each of up to four roundings of 2**-8."""


def printed(*arguments: str, interpret: bool) -> Any:
    """The JSON that a process of Python prints: whether Triton interprets must be chosen before it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpret))}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, *arguments], env=environment, cwd=root, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@functools.cache
def interpreted(module: str) -> dict[str, float | bool]:
    """All cases in one process of the interpreter."""
    return printed("-m", f"tests.unit.{module}", interpret=True)


def near(found: dict[str, float | bool]) -> bool:
    """Says which are not."""
    wrong = {name: value for name, value in found.items() if not (value < LIMIT[name.rsplit(" ", 1)[1]])}
    assert not wrong, wrong
    return len(found) > 0


def of(module: str, kind: str) -> dict[str, float | bool]:
    return {name: value for name, value in interpreted(module).items() if name.startswith(kind)}


def test_heads_are_turned_and_written():
    """Mutations tried, each red: the key is not turned; the value is turned; the norm of queries for keys; the slot, or the
    sine, of the first token for all."""
    assert near(of("fused_cases", "turn"))


def test_norms_of_sums():
    # Mutations tried, each red: eps outside of the root; padding counted in a variance; no bias.
    assert near(of("fused_cases", "norm"))


def test_gates():
    # Mutations tried, each red: the gate as value; the value activated; 0.70 in gelu for the root of a half; runs of one.
    assert near(of("fused_cases", "gate"))


def test_largest_logits():
    """Mutations tried, each red: the last of equals of a thread, or of the parts; NaN passed over; a row of -inf taken as
    fine."""
    found = of("fused_cases", "best")
    assert len(found) == len(fused_cases.ROWS) * len(fused_cases.DTYPES) and all(value is True for value in found.values())


@pytest.mark.parametrize("kind", ["add", "vocabulary", "gate", "gelu", "heads"])
def test_one_row_through_a_matrix(kind: str):
    """Mutations tried, each red: a column beyond the end counted; one square too few; the bias of the first row for both; the
    second row not scaled; half of a key where a value belongs, or not turned; cosine of another feature; no residual; the
    residual stream as its own branch."""
    found = of("one_row_cases", kind)
    assert near(found) and len(found) >= len(one_row_cases.WIDTHS) * len(fused_cases.DTYPES)


@pytest.mark.parametrize("kind", ["softmax", "adamw", "sgd", "scaled"])
def test_loss_and_optimizer(kind: str):
    """Mutations tried, each red: no share of the smoothing; the second of equal logits taken for the answer; a skipped update
    that is made all the same; momentum that is not stored; the factor rounded to bf16."""
    assert near(of("training_cases", kind))
