"""Slow links, without ranks: what the config and the layout refuse, bytes by hand, what is chosen, what a resume refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.config.check import check
from meshwright.config.schema import Config, SyncConfig
from meshwright.errors import CheckpointError, LayoutError
from meshwright.runtime.choose import choose_plan, memory_bytes, replica_layouts
from meshwright.runtime.identity import identity, refuse_other_replicas
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.slow_links import replica_bytes, sync_findings

DILOCO = {"method": "diloco"}


def config(sync: dict[str, Any], **train: Any) -> Config:
    model = {"layers": 16, "width": 2048, "heads": 16, "kv_heads": 4, "ffn": 5632, "vocab": 32000}
    data = {"train": [{"path": "corpus"}], "seq_len": 1024}
    return Config.model_validate(
        {"model": model, "data": data, "train": {"batch": 64, **train, "sync": sync}, "precision": "bf16"}
    )


@pytest.mark.parametrize(
    ("sync", "train", "where", "what"),
    [
        ({"every": 5}, {}, "train.sync.every", "belongs to local_sgd and diloco"),
        ({"warmup": 5, "compress": "bf16"}, {}, "train.sync.warmup", "belongs to local_sgd and diloco"),
        ({"method": "local_sgd", "outer_lr": 1.0}, {}, "train.sync.outer_lr", "belongs to diloco"),
        ({"method": "local_sgd", "outer_momentum": 0.5}, {}, "train.sync.outer_momentum", "belongs to diloco"),
        ({"method": "local_sgd", "overlap": True}, {}, "train.sync.overlap", "belongs to diloco"),
        ({"compress": "bf16", "rank": 2}, {}, "train.sync.rank", "belongs to compress: powersgd"),
        (DILOCO, {"ema": 0.9}, "train.ema", "weights of its own"),
        (DILOCO, {"steps": 50}, "train.steps", "50 is no whole number of rounds of 20 steps"),
        ({**DILOCO, "warmup": 40}, {"steps": 40}, "train.steps", "after 40"),
    ],
)
def test_what_does_nothing_or_contradicts_is_refused(sync, train, where, what):
    findings = check(config(sync, **train))
    assert [finding.where for finding in findings] == [where]
    assert what in findings[0].what and findings[0].fix


def test_the_nearest_numbers_of_steps_are_named():
    assert check(config(DILOCO, steps=50))[0].fix == "Use 40 or 60"
    assert check(config(DILOCO, steps=5))[0].fix == "Use 20"
    assert check(config({**DILOCO, "warmup": 10}, steps=25))[0].fix == "Use 30"
    for good in ({"steps": 60}, {"tokens": 100}):
        assert check(config(DILOCO, **good)) == []


def test_one_replica_has_nothing_to_exchange():
    one = Layout(dp_shard=4, zero=3)
    assert sync_findings(SyncConfig(), one) == []
    for values in (DILOCO, {"method": "local_sgd"}, {"compress": "powersgd"}):
        sync = SyncConfig.model_validate(values)
        assert [finding.where for finding in sync_findings(sync, one)] == [f"train.sync.{next(iter(values))}"]
        assert sync_findings(sync, Layout(dp_replicate=2, dp_shard=2, zero=3)) == []
        assert sync_findings(sync, Layout(dp_replicate=2, cp=2, zero=1)) == []
        assert "Use zero: 1" in sync_findings(sync, Layout(dp_replicate=2, cp=2))[0].fix


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 6000.0),  # 2 * 3/4 * 4 * 1000
        ({"compress": "bf16"}, 3300.0),  # 1.5 * (2 * 900 + 4 * 100)
        ({"compress": "powersgd", "rank": 2}, 3000.0),  # 600 elements of the matrix become 2 * (20 + 30): 1.5 * 4 * 500
        ({"method": "local_sgd", "every": 10}, 600.0),
        ({"method": "diloco", "every": 5, "overlap": True}, 1200.0),
    ],
)
def test_bytes_of_a_thousand_parameters_by_hand(values, expected):
    found = replica_bytes(
        SyncConfig.model_validate(values), 4, 1000, 4, whole=100 * ("compress" in values), matrices=[(20, 30)]
    )
    assert found == pytest.approx(expected)


def test_a_plan_has_a_replica_a_device_or_one_a_host():
    assert list(replica_layouts(8, 8)) == [Layout(dp_replicate=8)]
    assert list(replica_layouts(8, 4))[1:] == [Layout(dp_replicate=2, dp_shard=4, zero=stage) for stage in (1, 2, 3)]
    options: dict[str, Any] = {"world": 8, "device_type": "cuda", "task": "lm", "local": 4}
    large = choose_plan(config(DILOCO), device_bytes=80 * 2**30, **options)
    assert large.layout == Layout(dp_replicate=8)
    small = choose_plan(config(DILOCO), device_bytes=10 * 2**30, **options)
    assert small.layout.dp_replicate == 2 and small.layout.dp_shard == 4
    with pytest.raises(LayoutError):
        choose_plan(config(DILOCO), device_bytes=2**30, **options)


def test_the_estimate_counts_what_a_method_keeps():
    # 4 bytes a parameter and buffer, the same for all: anchor; momentum; begin and coming; the error of PowerSGD.
    plan = Plan(Layout(dp_replicate=2), precision="bf16")
    sizes = [
        memory_bytes(config(values), 1, "lm", plan)
        for values in (
            {},
            {"method": "local_sgd"},
            {**DILOCO, "outer_momentum": 0},
            DILOCO,
            {**DILOCO, "overlap": True},
            {"compress": "powersgd"},
            {**DILOCO, "overlap": True, "compress": "powersgd"},
        )
    ]
    unit = sizes[1] - sizes[0]
    assert [round((size - sizes[0]) / unit, 6) for size in sizes] == [0, 1, 1, 2, 4, 1, 5]


def test_another_number_of_replicas_or_another_plan_of_powersgd_is_refused():
    where = Path("checkpoints/step-00000004")

    def meta(**plan: Any) -> dict[str, Any]:
        return {"plan": Plan(Layout(dp_replicate=2, **plan.pop("layout", {})), **plan).to_dict()}

    plan = Plan(Layout(dp_replicate=2))
    refuse_other_replicas(config({}), Plan(Layout(dp_replicate=4)), meta(), where)
    refuse_other_replicas(config({"compress": "bf16"}), Plan(Layout(dp_replicate=4)), meta(), where)
    refuse_other_replicas(config(DILOCO), Plan(Layout(dp_replicate=2, tp=2)), meta(), where)
    low = config({"compress": "powersgd"})
    refuse_other_replicas(low, plan, meta(micro_batch=3), where)
    with pytest.raises(CheckpointError, match=r"dp_replicate: is 4, but .* of 2 replicas, each its own"):
        refuse_other_replicas(config(DILOCO), Plan(Layout(dp_replicate=4)), meta(), where)
    with pytest.raises(CheckpointError, match=r"plan\.layout"):
        refuse_other_replicas(low, plan, meta(layout={"tp": 2}), where)
    with pytest.raises(CheckpointError, match=r"plan\.bucket_mib: is 32, but .* was made with 16"):
        refuse_other_replicas(low, plan, meta(bucket_mib=16), where)


def test_the_identity_of_a_run_has_its_method_and_nothing_where_there_is_none():
    plain = identity(config({}), 10, "t", [])
    assert "sync" not in plain, "checkpoints made without the section go on"
    first = identity(config(DILOCO), 10, "t", [])["sync"]
    assert first == {"method": "diloco", "overlap": False, "compress": "none", "outer_momentum": True}
    assert identity(config({**DILOCO, "every": 7, "outer_lr": 0.1}), 10, "t", [])["sync"] == first
    assert identity(config({"compress": "powersgd", "rank": 3}), 10, "t", [])["sync"]["rank"] == 3
