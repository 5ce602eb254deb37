"""The plan rule: the formula of the states by hand, and the layout that follows from it."""

from __future__ import annotations

import pytest

from meshwright.config.schema import Config
from meshwright.errors import LayoutError
from meshwright.plan.memory import StateBytes, state_bytes
from meshwright.runtime.choose import SAFE_SHARE, choose_plan, memory_bytes
from meshwright.spec.counts import parameter_count
from meshwright.spec.layout import Layout

GIB = 2**30
MODEL = {"arch": "decoder", "layers": 16, "width": 2048, "heads": 16, "kv_heads": 4, "ffn": 5632, "vocab": 32000}


def config(**train) -> Config:
    return Config.model_validate(
        {
            "model": MODEL,
            "data": {"train": [{"path": "corpus"}], "seq_len": 1024},
            "train": {"batch": 64, "steps": 1, **train},
            "precision": "bf16",
        }
    )


def choose(device_gib: float | None, world: int = 8, **train):
    bytes_ = None if device_gib is None else int(device_gib * GIB)
    return choose_plan(config(**train), world=world, device_type="cuda", device_bytes=bytes_, task="lm")


@pytest.mark.parametrize(
    ("precision", "layout", "ema", "expected"),
    [
        ("bf16", Layout(dp_replicate=8), False, StateBytes(2000, 4000, 12000)),
        ("bf16", Layout(dp_shard=4, zero=1), False, StateBytes(2000, 4000, 3000)),
        ("bf16", Layout(dp_shard=4, zero=1), True, StateBytes(2000, 4000, 4000)),
        ("bf16", Layout(dp_shard=4, zero=2), False, StateBytes(2000, 1000, 3000, 40)),
        ("fp32", Layout(dp_shard=4, zero=1), False, StateBytes(4000, 4000, 2000)),
        ("fp32", Layout(dp_replicate=2, dp_shard=4, zero=2), False, StateBytes(4000, 1000, 2000, 40)),
        ("fp64", Layout(dp_shard=2, zero=2), False, StateBytes(8000, 4000, 8000, 40)),
    ],
)
def test_bytes_of_a_thousand_parameters_by_hand(precision, layout, ema, expected):
    assert state_bytes(1000, precision, layout, ema=ema, bucket_bytes=10) == expected


def test_a_large_parameter_makes_large_buckets_but_never_more_than_all_of_the_gradient():
    assert state_bytes(1000, "bf16", Layout(dp_shard=2, zero=2), bucket_bytes=10, largest=100).staging == 1600
    assert state_bytes(1000, "bf16", Layout(dp_shard=2, zero=2), bucket_bytes=10, largest=900).staging == 4000
    assert state_bytes(1000, "bf16", Layout(dp_shard=2, zero=2), moments=0).optimizer == 2000  # masters


def needs(layout: Layout) -> float:
    """GiB of a device on which one row just fits."""
    return memory_bytes(config(), 1, "lm", layout) / SAFE_SHARE / GIB


def test_the_rule_takes_the_first_stage_that_fits_and_says_why():
    # Red when a stage is skipped, and when the share of a device that may be used is forgotten.
    plain, first, second = (
        needs(layout) for layout in (Layout(dp_replicate=8), Layout(dp_shard=8, zero=1), Layout(dp_shard=8, zero=2))
    )
    assert plain > first > second > 5
    assert choose(None).layout == Layout(dp_replicate=8)
    assert choose(plain * 1.01).layout == Layout(dp_replicate=8)
    plan = choose(plain * 0.99)
    assert plan.layout == Layout(dp_shard=8, zero=1)
    assert plan.reason.startswith(f"ZeRO-1 over 8 devices (data parallel needs about {plain * SAFE_SHARE:.1f} GiB, 85% of")
    plan = choose(first * 0.99)
    assert plan.layout == Layout(dp_shard=8, zero=2)
    assert f"ZeRO-1 needs about {first * SAFE_SHARE:.1f} GiB" in plan.reason
    with pytest.raises(LayoutError) as caught:
        choose(second * 0.99)
    assert "ZeRO-2 needs about" in str(caught.value) and "start more devices" in str(caught.value)


def test_one_device_has_nobody_to_share_with():
    with pytest.raises(LayoutError, match="data parallel needs about") as caught:
        choose(10, world=1)
    assert "ZeRO-1 needs" not in str(caught.value)


def test_the_micro_batch_fills_what_the_states_leave():
    # The same device holds a larger micro-batch when the states are sharded: by what they no longer take.
    layout = Layout(dp_shard=8, zero=1)
    plan = choose(needs(Layout(dp_replicate=8)) * 0.99)
    assert plan.micro_batch > 1
    assert memory_bytes(config(), plan.micro_batch, "lm", layout) <= SAFE_SHARE * needs(Layout(dp_replicate=8)) * GIB
    saved = memory_bytes(config(), 1, "lm", Layout(dp_replicate=8)) - memory_bytes(config(), 1, "lm", layout)
    assert saved == pytest.approx(12 * 7 / 8 * parameter_count(config().model, "lm"))
