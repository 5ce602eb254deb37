"""Rotary positions: frequencies of every scaling, the tables and the rotation."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.config.schema import ModelConfig, RopeScaling
from meshwright.errors import ConfigError
from meshwright.models.rope import RopeTable, frequencies, rotate

CPU = torch.device("cpu")
SCALINGS = [
    None,
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0},
]


def config(scaling: dict | None, **changes) -> ModelConfig:
    if scaling and scaling["rope_type"] in ("llama3", "yarn"):
        scaling = {"original_max_position_embeddings": 64, **scaling}
    fields = {"width": 64, "heads": 2, "max_len": 256, "rope_theta": 5000.0}
    return ModelConfig(**{**fields, **changes}, rope_scaling=scaling and RopeScaling(**scaling))


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("length", [200, 256, 700])
def test_tables_equal_transformers(scaling, length):
    # Red with: factor of yarn left out, the dynamic stretch taken from the current length alone, smooth and 1 - smooth swapped.
    # Tolerance: transformers turns fp32 frequencies (relative error 6e-8) by up to 700 rad.
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    c = config(scaling)
    numbers = {"rope_theta": c.rope_theta, "rope_type": "default"}
    if c.rope_scaling is not None:
        numbers |= {k: v for k, v in c.rope_scaling if v is not None}
    theirs = LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            hidden_size=c.width, num_attention_heads=c.heads, max_position_embeddings=c.max_len, rope_parameters=numbers
        )
    )
    cos_BSE, sin_BSE = theirs(torch.zeros(1), torch.arange(length)[None])
    cos, sin = RopeTable(c)(length, None, CPU, torch.float64)
    assert (cos[:, 0, 0] - cos_BSE[0, :, :16]).abs().max() < 2e-4
    assert (sin[:, 0, 0] - sin_BSE[0, :, :16]).abs().max() < 2e-4
    ours, _ = frequencies(c, length)
    torch.testing.assert_close(ours, theirs.inv_freq.double(), rtol=5e-7, atol=0)


def test_hand_computed():
    c = config({"rope_type": "linear", "factor": 4.0}, width=8, heads=2, rope_theta=100.0)
    found, factor = frequencies(c)
    assert found.tolist() == pytest.approx([0.25, 0.025], rel=1e-15) and factor == 1.0
    # dynamic: theta * (4 * 512/256 - 3) ** (4/2) = 100 * 25 beyond 256 positions, untouched up to there
    c = config({"rope_type": "dynamic", "factor": 4.0}, width=8, heads=2, rope_theta=100.0)
    assert frequencies(c, 256)[0].tolist() == pytest.approx([1.0, 0.1], rel=1e-15)
    assert frequencies(c, 512)[0].tolist() == pytest.approx([1.0, 1 / math.sqrt(2500)], rel=1e-15)
    c = config({"rope_type": "yarn", "factor": math.e})
    assert frequencies(c)[1] == pytest.approx(1.1, rel=1e-15)


def test_rotation_depends_on_distance_only():
    # Red with: sin's sign flipped in one half.
    torch.manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 1, 32, dtype=torch.float64).expand(1, 9, 1, 1, 32) for _ in range(2))
    cos, sin = RopeTable(config(None))(9, None, CPU, torch.float64)
    score = rotate(q, cos, sin)[0, :, 0, 0] @ rotate(k, cos, sin)[0, :, 0, 0].T
    for distance in range(-8, 9):
        diagonal = score.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-13)
    pair = torch.zeros(1, 2, 1, 1, 32, dtype=torch.float64)
    pair[..., 0] = 1.0  # dimension 0 turns with dimension 16, by one rad a position
    turned = rotate(pair, *RopeTable(config(None))(2, None, CPU, torch.float64))[0, 1, 0, 0]
    assert (turned[0].item(), turned[16].item()) == pytest.approx((math.cos(1), math.sin(1)), rel=1e-15)


def test_positions_pick_rows_and_tables_are_kept():
    table = RopeTable(config(None))
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 200]])
    cos, sin = table(5, positions, CPU, torch.float32)
    whole_cos, whole_sin = table(256, None, CPU, torch.float32)
    assert cos.shape == (2, 5, 1, 1, 16) and cos.dtype == torch.float32
    assert torch.equal(cos[:, :, 0, 0], whole_cos[:, 0, 0][positions])
    assert torch.equal(sin[:, :, 0, 0], whole_sin[:, 0, 0][positions])
    assert table(256, None, CPU, torch.float32)[0].data_ptr() == whole_cos.data_ptr()


def test_half_precision_is_turned_in_fp32():
    x = torch.randn(1, 300, 1, 1, 32, dtype=torch.bfloat16)
    cos, sin = RopeTable(config(None, max_len=512))(300, None, CPU, torch.float32)
    expected = rotate(x.double(), cos.double(), sin.double()).bfloat16()
    assert rotate(x, cos, sin).dtype == torch.bfloat16
    assert (rotate(x, cos, sin) != expected).double().mean() < 1e-3  # double rounding may move a tie


def test_made_under_inference_mode_is_usable_in_training():
    table = RopeTable(config(None))
    with torch.inference_mode():
        table(4, None, CPU, torch.float32)
    x = torch.randn(1, 4, 1, 1, 32, requires_grad=True)
    rotate(x, *table(4, None, CPU, torch.float32)).sum().backward()
    assert x.grad is not None


def test_dynamic_scaling_beyond_its_length_refuses_packed_rows():
    table = RopeTable(config({"rope_type": "dynamic", "factor": 2.0}))
    table(256, torch.zeros(1, 256, dtype=torch.int64), CPU, torch.float32)
    with pytest.raises(ConfigError, match=r"257 is beyond the 256 positions"):
        table(257, torch.zeros(1, 257, dtype=torch.int64), CPU, torch.float32)
