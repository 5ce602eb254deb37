"""Operations of a step and MFU, against numbers worked out by hand from the formulas in docs/metrics.md."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshwright.config.schema import ModelConfig
from meshwright.observe.clock import IDLE, PARTS
from meshwright.observe.flops import (
    MatmulWeights,
    Peak,
    attention_pairs,
    flops_per_token,
    matmul_weights,
    measure_matmul,
    mfu,
    peak_rate,
    training_flops,
)
from meshwright.observe.metrics import REQUIRED
from meshwright.observe.resources import memory_now
from meshwright.spec.counts import parameter_groups

LLAMA_1B = ModelConfig(
    arch="decoder", layers=16, width=2048, heads=32, kv_heads=8, ffn=8192, vocab=128_256, activation="swiglu", tied=True
)
BERT_LARGE = ModelConfig(
    arch="encoder", layers=24, width=1024, heads=16, ffn=4096, vocab=30_522, activation="gelu", head_transform=True, tied=True,
    qkv_bias=True, attention_bias=True, mlp_bias=True, classes=2,
)  # fmt: skip
ENCODER_24 = ModelConfig(arch="encoder", layers=24, width=1024, heads=16, ffn=2048, vocab=50_000, activation="relu")


def test_llama_1b_by_hand() -> None:
    # a layer: q 2048*2048, k and v 2048*512 each, out 2048*2048, gate, up and down 2048*8192 each = 60,817,408
    # head: 2048*128,256 = 262,668,288, counted though it is tied; the look-up is not
    assert matmul_weights(LLAMA_1B) == MatmulWeights(blocks=16 * 60_817_408, head=262_668_288)
    # 6 * (973,078,528 + 262,668,288) = 7,414,480,896; attention 12*16*32*64 * 4096/2 = 805,306,368
    assert flops_per_token(LLAMA_1B, 4096) == 7_414_480_896 + 805_306_368
    # mutations tried, each red: 3 -> 2 feed-forward matrices, kv_heads ignored, causal half forgotten, tied head left out


def test_bert_large_with_logits_at_15_percent_of_the_positions() -> None:
    # a layer: 4*1024^2 + 2*1024*4096 = 12,582,912; head: 1024*30,522 + 1024^2 = 32,303,104
    assert matmul_weights(BERT_LARGE, "mlm") == MatmulWeights(blocks=24 * 12_582_912, head=32_303_104)
    # 64 rows of 512 tokens, 77 positions a row: all pairs of a row attend, none is masked
    step = training_flops(
        BERT_LARGE, tokens=64 * 512, head_positions=64 * 77, pairs=attention_pairs([512] * 64, causal=False), task="mlm"
    )
    assert step.blocks == 6 * 301_989_888 * 32_768
    assert step.head == 6 * 32_303_104 * 4_928
    assert step.attention == 12 * 24 * 16 * 64 * 64 * 512 * 512
    assert step.total == 59_373_627_899_904 + 955_138_179_072 + 4_947_802_324_992


def test_bert_large_classifier_counts_pooler_and_classes_once_a_row() -> None:
    weights = matmul_weights(BERT_LARGE, "classify")
    assert weights.head == 1024 * 1024 + 1024 * 2
    one_row = training_flops(BERT_LARGE, tokens=128, head_positions=1, pairs=128 * 128, task="classify")
    assert one_row.total == 6 * (301_989_888 * 128 + 1_050_624) + 12 * 24 * 1024 * 128 * 128
    assert flops_per_token(BERT_LARGE, 128, "classify") * 128 == one_row.total


def test_the_24_layer_encoder_by_hand() -> None:
    # a layer: 4*1024^2 + 2*1024*2048 = 8,388,608; head 51,200,000; attention 12*24*1024*512 a token, not halved
    assert flops_per_token(ENCODER_24, 512, "mlm") == 6 * (24 * 8_388_608 + 51_200_000) + 150_994_944


def test_weights_agree_with_the_parameter_counts_of_the_model() -> None:
    for config, task in ((LLAMA_1B, "lm"), (BERT_LARGE, "mlm"), (ENCODER_24, "mlm")):
        groups = parameter_groups(config, task)
        biases = (3 * config.width + config.width + config.ffn + config.width) * config.layers if config.qkv_bias else 0
        assert matmul_weights(config, task).blocks == groups["attention"] + groups["mlp"] - biases


def test_pairs_follow_the_documents() -> None:
    assert attention_pairs([8], causal=False) == 64
    assert attention_pairs([8], causal=True) == 32
    assert attention_pairs([3, 5], causal=True) == 4.5 + 12.5
    assert attention_pairs([8, 2], causal=True, window=4) == (4 * 8 - 8) + 2
    assert attention_pairs([8], causal=True, window=8) == attention_pairs([8], causal=True, window=100) == 32
    assert attention_pairs([], causal=True) == 0
    band = sum(abs(query - key) < 3 for query in range(8) for key in range(8))
    assert attention_pairs([8], causal=False, window=3) == band == 8 * 8 - 5 * 6
    assert attention_pairs([8], causal=False, window=9) == 64


def test_open_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.vocab"):
        matmul_weights(ModelConfig())
    with pytest.raises(ValueError, match=r"model\.classes"):
        matmul_weights(ModelConfig(vocab=10), "classify")
    with pytest.raises(ValueError, match="'mine'"):
        matmul_weights(ModelConfig(arch="mine", vocab=10))


def test_mfu_by_hand() -> None:
    # 0.25 s on 8 devices of 100 TFLOP/s: 1e14 operations of 2e14 possible
    assert mfu(1e14, 0.25, 1e14, 8) == 0.5
    assert mfu(1e12, 2.0, 1e12) == 0.5


def test_mfu_of_the_published_llama_1b_rate() -> None:
    # 59,300 tokens/s of 8.2198 GFLOP each on an H200 (989.4 TFLOP/s): 487.4 TFLOP/s, 49.3%
    peak = peak_rate("cpu", "bf16", "NVIDIA H200").rate
    assert mfu(59_300 * flops_per_token(LLAMA_1B, 4096), 1.0, peak) == pytest.approx(0.49266, abs=1e-5)


def assert_peak(peak: Peak, rate: float, source: str) -> None:
    assert (peak.rate, peak.source) == (pytest.approx(rate), source)


def test_the_peak_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_peak(peak_rate("cpu", "bf16", "NVIDIA H200"), 989.4e12, "H200 data sheet, bf16 dense")
    assert_peak(peak_rate("cpu", "fp32", "NVIDIA H200"), 66.9e12, "H200 data sheet, fp32 dense")
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    assert_peak(peak_rate("cpu", "fp32", "NVIDIA H200"), 494.7e12, "H200 data sheet, tf32 dense")
    monkeypatch.undo()
    unknown = peak_rate("cpu", "fp32", "An Unheard-of Processor")
    assert "measured, fp32 matmul 768 x 768 x 768" in unknown.source
    assert peak_rate("cpu", "fp64", "NVIDIA H200").source.startswith("measured, fp64")  # the sheet's number is not kept


def test_the_measured_rate_is_of_the_right_size() -> None:
    small = measure_matmul("cpu", "fp32", size=256, seconds=0.02).rate
    assert 1e8 < small < 1e13  # one thread of a CPU: between a tenth of a GFLOP/s and ten TFLOP/s


def test_the_example_in_the_documentation_is_right() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    weights = matmul_weights(LLAMA_1B)
    total = flops_per_token(LLAMA_1B, 4096)
    for number in (weights.blocks // 16, weights.blocks + weights.head, 6 * (weights.blocks + weights.head), int(total)):
        assert f"{number:,}" in text, number
    assert f"MFU of {mfu(59_300 * total, 1.0, peak_rate('cpu', 'bf16', 'NVIDIA H200').rate):.1%}" in text


def test_the_documentation_has_every_name() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name in (
        *REQUIRED,
        *PARTS,
        IDLE,
        "wall",
        "process",
        "nonfinite",
        "mfu",
        "samples_per_s",
        "noise_scale",
        *memory_now("cpu"),
    ):
        assert f"`{name}`" in text, name
