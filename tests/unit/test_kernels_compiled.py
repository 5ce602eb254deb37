"""Every Triton kernel compiles for the devices that we measure on, which need not be there: the interpreter accepts more."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.unit.test_kernels_fused import printed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which the extra `kernels` brings"),
]
KERNELS = {
    "eight_bit_cases": {"_quantize", "_add_norm", "_gate", "_decode", "_attend", "_row", "_turn_and_write"},
    "fp8_cases": {"_cast"},
    "fused_cases": {"_add_norm", "_gate", "_best", "_best_of_parts", "_turn_and_write"},
    "one_row_cases": {"_row", "_add_norm", "_turn_and_write"},
    "paged_cases": {"_decode", "_attend"},
    "pointwise_cases": {"_gelu", "_gelu_gradient", "_swiglu", "_swiglu_gradient", "_dropped", "_gradient", "_sum_parts"},
    "training_cases": {"_softmax_rows", "_scaled_cast", "_adamw", "_sgd"},
}


@pytest.mark.parametrize("module", KERNELS)
def test_compiles_for_hopper(module: str) -> None:
    """Mutations tried, each red: a loop variable of `_softmax_rows` whose type changes in a branch, which the interpreter runs;
    prompts in tiles of 512 keys, loaded three ahead."""
    variants = printed("-O", "-m", "tests.unit.compiled", module, interpret=False)
    found = {name for name, count in variants.items() if count}
    assert found == KERNELS[module]
