"""The loss scaler, step by step, against its rule."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config.schema import LossScaleConfig
from meshwright.parallel.buffers import master_dtype
from meshwright.parallel.precision import CEILING, LossScaler, working_dtype

G, X = False, True  # a good step, an overflow


def scales(config: LossScaleConfig, steps: list[bool]) -> list[float]:
    scaler = LossScaler(config)
    out = []
    for overflow in steps:
        scaler.update(overflow)
        out.append(scaler.scale)
    return out


@pytest.mark.parametrize(
    ("config", "steps", "expected"),
    [
        ({"interval": 2}, [G, G, G, G], [8, 16, 16, 32]),
        ({"interval": 2}, [G, X, G, G], [8, 4, 4, 8]),  # an overflow starts the run of good steps anew
        ({"hysteresis": 2, "interval": 9}, [X, G, X, X], [8, 8, 4, 2]),  # the first overflow is spared, later ones are not
        ({"hysteresis": 3, "interval": 9}, [X, X, X], [8, 8, 4]),
        ({"hysteresis": 2, "interval": 1}, [X, X, G, X, X], [8, 4, 8, 8, 4]),  # growth gives the spared one back
        ({"growth": 3.0, "backoff": 0.25, "interval": 1}, [G, X], [24, 6]),
        ({"floor": 3.0}, [X, X, X], [4, 3, 3]),
        ({"static": True, "interval": 1}, [G, X, X], [8, 8, 8]),
    ],
)
def test_scale_follows_the_rule(config, steps, expected):
    assert scales(LossScaleConfig(initial=8.0, **config), steps) == expected


def test_the_end_is_reported_only_when_no_smaller_scale_can_answer():
    scaler = LossScaler(LossScaleConfig(initial=4.0, floor=2.0, hysteresis=2))
    assert [scaler.update(X) for _ in range(4)] == [False, False, True, True]  # spared, to the floor, at the floor
    assert scaler.update(G) is False
    assert LossScaler(LossScaleConfig(static=True)).update(X) is True


@given(steps=st.lists(st.booleans(), max_size=40), cut=st.integers(0, 40))
def test_state_goes_through_json_and_the_rest_is_the_same(steps, cut):
    config = LossScaleConfig(initial=64.0, interval=3, hysteresis=2, floor=0.5)
    scaler = LossScaler(config)
    for overflow in steps[:cut]:
        scaler.update(overflow)
    other = LossScaler(config)
    other.load(json.loads(json.dumps(scaler.state())))
    for overflow in steps[cut:]:
        assert scaler.update(overflow) == other.update(overflow)
    assert scaler == other


def test_growth_ends_where_a_scaled_loss_could_no_longer_be_held():
    assert scales(LossScaleConfig(initial=CEILING / 2, interval=1), [G] * 3) == [CEILING] * 3


def test_dtypes():
    kinds = {name: working_dtype(name) for name in ("fp32", "fp64", "bf16", "fp16")}
    assert kinds == {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
    assert {name: master_dtype(kind) for name, kind in kinds.items()} == {
        "fp32": torch.float32,
        "fp64": torch.float64,
        "bf16": torch.float32,
        "fp16": torch.float32,
    }
