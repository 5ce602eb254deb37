"""The plan rule: the formula of the states by hand, and the layout that follows from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.config.schema import Config
from meshwright.errors import LayoutError
from meshwright.plan.memory import StateBytes, state_bytes
from meshwright.runtime.choose import SAFE_SHARE, bucket_mib, choose_plan, layouts, memory_bytes
from meshwright.spec.counts import parameter_count, rank_parameters
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan

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


def memory(layout: Layout, micro_batch: int = 1, **changed) -> float:
    """Bytes of a rank as the rule estimates them, with the buckets of the rule."""
    mib = bucket_mib(parameter_count(config().model, "lm"), "bf16")
    return memory_bytes(config(), micro_batch, "lm", Plan(layout, precision="bf16", bucket_mib=mib, **changed))


def needs(layout: Layout) -> float:
    """GiB of a device on which one row just fits."""
    return memory(layout) / SAFE_SHARE / GIB


LADDER = (
    Layout(dp_shard=8, zero=1),
    Layout(dp_shard=8, zero=2),
    Layout(dp_shard=8, zero=3),
    Layout(dp_shard=4, zero=3, tp=2),
    Layout(tp=8),
)


def test_the_rule_takes_the_first_layout_that_fits_and_says_why():
    # Red when a stage is skipped, and when the share of a device that may be used is forgotten.
    gib = [needs(layout) for layout in LADDER]
    assert gib == sorted(gib, reverse=True)
    assert choose(None).layout == Layout(dp_replicate=8), "memory of a CPU is no limit"
    assert choose(gib[0] * 1.01).layout == LADDER[0]
    assert choose(gib[0] * 1.01).reason.startswith("ZeRO-1 over 8 devices;")
    for smaller, layout in zip(gib, LADDER[1:3], strict=False):
        plan = choose(smaller * 0.99)
        assert plan.layout == layout
        assert plan.reason.startswith(f"ZeRO-{layout.zero} over 8 devices (")
    assert f"ZeRO-1 needs about {gib[0] * SAFE_SHARE:.1f} GiB, 85% of" in choose(gib[0] * 0.99).reason
    assert f"ZeRO-2 needs about {gib[1] * SAFE_SHARE:.1f} GiB" in choose(gib[1] * 0.99).reason
    assert choose(gib[2] * 0.99).layout.tp > 1, "tensor parallelism inside of a host is next"
    with pytest.raises(LayoutError) as caught:
        choose(0.5)
    assert "ZeRO-3 needs about" in str(caught.value) and "start more devices" in str(caught.value)


def test_tensor_ranks_stay_inside_a_host_then_come_pipelines_and_at_last_context():
    # Red when tensor ranks are dealt over hosts.
    every = list(layouts(16, 4))
    assert len(set(every)) == len(every) and all(layout.world == 16 and layout.tp <= 4 for layout in every)
    assert [layout.cp > 1 for layout in every] == sorted(layout.cp > 1 for layout in every)
    tried = [layout for layout in every if layout.cp == 1]
    assert every[len(tried)] == Layout(dp_shard=2, cp=2, tp=4, zero=3) and every[-1] == Layout(cp=16, zero=3)
    assert [layout.pp > 1 for layout in tried] == sorted(layout.pp > 1 for layout in tried)
    assert [layout.tp * layout.pp > 1 for layout in tried] == sorted(layout.tp * layout.pp > 1 for layout in tried)
    assert next(layout for layout in tried if layout.pp > 1) == Layout(pp=2, dp_shard=2, tp=4, zero=1)
    assert {layout.tp for layout in layouts(8, 8)} == {1, 2, 4, 8}


def test_one_device_has_nobody_to_share_with():
    with pytest.raises(LayoutError, match="data parallel needs about") as caught:
        choose(10, world=1)
    assert "ZeRO-1 needs" not in str(caught.value)


def test_the_micro_batch_fills_what_the_states_leave():
    # The same device holds a larger micro-batch when the states are sharded: by what they no longer take.
    layout = Layout(dp_shard=8, zero=1)
    plan = choose(needs(Layout(dp_replicate=8)) * 0.99)
    assert plan.micro_batch > 1
    assert memory(layout, plan.micro_batch) <= SAFE_SHARE * needs(Layout(dp_replicate=8)) * GIB
    saved = memory(Layout(dp_replicate=8)) - memory(layout)
    assert saved == pytest.approx(12 * 7 / 8 * parameter_count(config().model, "lm"))


def test_context_ranks_share_the_states_and_the_positions():
    # Red when states are divided by dp_shard alone, and when activations count whole rows.
    shared, alone = Layout(dp_shard=2, cp=4, zero=3), Layout(dp_shard=8, zero=3)
    assert state_bytes(1000, "bf16", shared) == state_bytes(1000, "bf16", alone)
    activations = [memory(layout, 8) - memory(layout, 4) for layout in (shared, alone)]
    assert activations[0] == pytest.approx(activations[1] / 4)
    plan = choose_plan(
        config(), world=8, device_type="cpu", device_bytes=None, task="lm", given={"layout": {"cp": 4, "zero": 2}}
    )
    assert plan.layout == Layout(dp_shard=2, cp=4, zero=2) and plan.context in ("ring", "all_to_all")
    assert f"context 4 ({plan.context.replace('_', '-')})" in plan.described() and "ZeRO-2 over 8" in plan.described()


def test_recompute_leaves_less_in_memory():
    whole, selective, full = (memory(Layout(), 8, recompute=how) for how in ("none", "selective", "full"))
    assert whole > selective > full
    assert memory(Layout(), 8, recompute="full", recompute_every=2) > full


def test_fp8_keeps_the_inputs_of_matrices_in_8_bits():
    # By hand, a layer and token: 2 width + ffn - width less, and 2 bytes of the widest matrix once. Red with a term left out.
    model, plan = config().model, Plan(precision="bf16")
    wide = max(model.ffn * (2 if model.activation == "swiglu" else 1), 3 * model.width)
    eight = config().model_copy(update={"precision": "fp8"})
    less = memory_bytes(config(), 3, "lm", plan) - memory_bytes(eight, 3, "lm", replace(plan, precision="fp8"))
    tokens = 3 * config().data.seq_len
    assert less == pytest.approx(tokens * (model.layers * (model.width + model.ffn) - 2 * wide), rel=1e-9)
    assert state_bytes(1000, "fp8", Layout()) == state_bytes(1000, "bf16", Layout())


def test_a_part_of_a_plan_is_completed():
    # Red when the data ranks of a given layout are not what is left of the world.
    def given(world: int = 8, **keys) -> Plan:
        return choose_plan(config(), world=world, device_type="cpu", device_bytes=None, task="lm", given=keys)

    assert given(layout={"tp": 2}).layout == Layout(dp_replicate=4, tp=2)
    assert given(layout={"tp": 2, "zero": 2}).layout == Layout(dp_shard=4, tp=2, zero=2)
    assert given(layout={"pp": 2, "zero": 3, "dp_replicate": 2}).layout == Layout(dp_replicate=2, dp_shard=2, pp=2, zero=3)
    assert given(layout={"dp_shard": 8, "zero": 1}, micro_batch=3, bucket_mib=7).bucket_mib == 7
    assert given(recompute="full").recompute == "full"
    assert given(layout={"pp": 4, "tp": 2}, micro_batch=5, reason="mine").reason == "mine"
    with pytest.raises(LayoutError, match="tp 3 does not divide 8 ranks") as caught:
        given(layout={"tp": 3})
    assert "Start 6, 9 ranks" in str(caught.value)
    with pytest.raises(LayoutError, match="is for 16 ranks, but 8 are started"):
        given(layout={"tp": 16})


def test_a_pipeline_is_fed_with_enough_micro_batches():
    plan = choose_plan(
        config(batch=64), world=4, device_type="cuda", device_bytes=1 << 50, task="lm", given={"layout": {"pp": 4}}
    )
    assert plan.accumulation(64) >= 16 and "micro-batches a pipeline stage" in plan.reason


def test_blocks_are_recorded_where_the_host_is_late():
    # A block has 201,326,592 parameters here: 4.1 ms for 4,096 tokens at 400 TFLOP/s. Red with 1 operation a parameter.
    def chosen(device_type: str = "cuda", layers: int = 2, width: int = 256, rows: int = 4, **given) -> Plan:
        model = {"layers": layers, "width": width, "heads": 4, "ffn": 4 * width, "vocab": 1000, "max_len": 1024}
        settings = config(micro_batch=rows).model_copy(update={"model": type(config().model).model_validate(model)})
        bytes_ = None if device_type == "cpu" else 80 * GIB
        return choose_plan(settings, world=1, device_type=device_type, device_bytes=bytes_, task="lm", given=given)

    assert chosen().graphs and not chosen("cpu").graphs
    assert not chosen(width=4096).graphs and chosen(width=4096, rows=1).graphs  # 4.1 ms, 1.03 ms
    assert not chosen(width=3584, rows=2).graphs  # 1.58 ms
    assert not chosen(graphs=False).graphs and chosen(width=4096, graphs=True).graphs
    assert not chosen(recompute="full").graphs


def test_recorded_blocks_keep_gradients():
    # By hand, bf16: 2 B a parameter of the layers, and 2 B x width + 4 a token and layer.
    settings = config()
    model = settings.model
    block = rank_parameters(model, "lm", Layout()).block
    more = memory(Layout(), graphs=True) - memory(Layout())
    assert more == model.layers * (2 * block + 1024 * (2 * model.width + 4))
