"""Attention over pages: the plain version against a whole row, and the Triton kernel against the plain one."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from meshwright.kernels.paged_attention import Singles, gathered_attention
from meshwright.models.attention import attention
from tests.unit.paged_cases import CASES, made

LIMIT = {torch.float64: 1e-14, torch.float32: 1e-5, torch.float16: 2e-3}
"""Values are about 1; results of fp16 are rounded to 5e-4."""


@pytest.mark.parametrize("name", CASES)
def test_pages_are_rows(name: str):
    """Mutations tried, each red: pages in the order of their numbers; the new tokens counted as the first ones of a row."""
    case = CASES[name]
    q, keys, values, pages = (t.double() if isinstance(t, torch.Tensor) else t for t in made(case))
    found = gathered_attention(q, keys, values, pages, window=case.window).split(case.counts)
    for row, (count, length, own) in enumerate(zip(case.counts, case.lengths, q.split(case.counts), strict=True)):
        slots = (pages.tables[row, :, None] * case.page + torch.arange(case.page)).flatten()[:length]
        k, v = (pool.flatten(0, 1)[slots][None] for pool in (keys, values))
        whole_q = torch.cat((torch.zeros(length - count, *own.shape[1:], dtype=own.dtype), own))[None]
        expected = attention(whole_q, k, v, causal=True, window=case.window)[0, length - count :]
        assert (found[row] - expected).abs().max() < 1e-14


def test_lengths_that_only_the_device_knows():
    """With wider tables than any sequence needs. Mutation tried: what is behind the end of a sequence is seen: red."""
    q, keys, values, pages = made(CASES["decode"])
    wide = torch.cat((pages.tables, pages.tables[:, -1:].expand(-1, 3)), 1)
    alone = Singles(pages.slots, wide, torch.tensor(pages.lengths, dtype=torch.int32))
    for window in (None, 5):
        found, expected = (gathered_attention(q, keys, values, p, window=window) for p in (alone, pages))
        assert (found - expected).abs().max() < 1e-14


@functools.cache
def interpreted() -> dict[str, float | bool]:
    """All cases in one process of Triton's interpreter, which must be chosen before Triton is imported. bf16 is not among them:
    the interpreter multiplies its bits as whole numbers (Triton 3.7)."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.paged_cases"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which the extra `kernels` brings")


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_computes_what_the_plain_version_does(name: str):
    """Mutations tried, each red: a query sees one key more; the window one wider, or one tile late; spans are not weighed by
    their largest score; the head of a lane counted over the queries first."""
    assert interpreted()[name] < LIMIT[CASES[name].dtype]


@pytest.mark.slow
@needs_triton
def test_a_sequence_gets_the_same_bits_alone():
    # Mutation tried: fewer keys at a time where there are more sequences: red.
    assert interpreted()["alone"] is True


@pytest.mark.slow
@needs_triton
def test_what_is_launched_does_not_depend_on_lengths():
    """Mutations tried, each red: the keys of a program by the width of the tables; spans weighed alike, in sum or in values;
    the programs of a sequence do not set their count back."""
    assert interpreted()["sizes_on_the_device"] is True


@pytest.mark.slow
@needs_triton
def test_queries_need_not_lie_alone():
    # Mutation tried: the stride of the output: red.
    assert interpreted()["strided"] is True
