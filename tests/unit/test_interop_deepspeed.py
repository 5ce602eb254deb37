"""DeepSpeed's config files as people wrote them: batch sizes that must fit, old names, wrong places, "auto", schedules.

The numbers are DeepSpeed's own rules worked out by hand. Mutations tried: the schedule read at the step, not one before it; a
linear rise for the logarithmic one; ceil for floor in the derived batch; stairs left out.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import ConfigError
from meshwright.interop.deepspeed import Batch, Settings, translate
from meshwright.interop.deepspeed_schedule import OneCycle, Warmup

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}
SCALE_KEYS = {"hysteresis": 2, "initial_scale_power": 16, "loss_scale": 0, "loss_scale_window": 1000, "min_loss_scale": 1}


def config(**more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAMW, **more}


def refusal(given: Any, ranks: int = 2, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        translate(given, ranks=ranks, **options)
    return [str(finding) for finding in error.value.findings]


def warned(settings: Settings) -> list[str]:
    return [finding.where.removeprefix("ds_config: ") for finding in settings.warnings]


# ---- batch


@pytest.mark.parametrize(
    ("given", "ranks", "batch"),
    [
        ((20000, 20, 100), 10, Batch(20000, 20, 100)),
        ((512, 32, None), 8, Batch(512, 32, 2)),
        ((64, None, 4), 2, Batch(64, 8, 4)),
        ((None, 2, 8), 4, Batch(64, 2, 8)),
        ((32, None, None), 4, Batch(32, 8, 1)),
        ((None, 5, None), 3, Batch(15, 5, 1)),
    ],
)
def test_of_the_three_batch_keys_a_missing_one_follows(given: tuple[Any, ...], ranks: int, batch: Batch):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    data = {name: value for name, value in zip(names, given, strict=True) if value is not None}
    assert translate({**data, "optimizer": ADAMW}, ranks=ranks).batch == batch


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_batch_for_ten_ranks_is_refused_with_the_product_on_others(ranks: int):
    data = {"train_batch_size": 20000, "train_micro_batch_size_per_gpu": 20, "gradient_accumulation_steps": 100}
    (text,) = refusal({**data, "optimizer": ADAMW}, ranks)
    assert f"20*100*{ranks} != 20000" in text and "Start 10 ranks" in text


def test_a_batch_that_does_not_divide_and_one_that_is_missing():
    (text,) = refusal({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "optimizer": ADAMW})
    assert "10 rows do not divide into 2 ranks * 4" in text
    (text,) = refusal({"gradient_accumulation_steps": 4, "optimizer": ADAMW})
    assert "train_batch_size" in text and "alone says no batch" in text
    given = {"micro": 2, "accumulation": 2}
    assert translate({"optimizer": ADAMW}, ranks=2, arguments=given).batch == Batch(8, 2, 2)


# ---- keys


def test_a_key_in_the_wrong_place_is_told_and_clipping_stays_off():
    settings = translate(config(max_grad_norm=0.5), ranks=2)
    (warning,) = settings.warnings
    assert settings.clip == 0.0 and "not clipped" in str(warning) and "gradient_clipping" in str(warning)
    assert "gradient_clipping" in refusal(config(optimizer={"type": "AdamW", "params": {"max_grad_norm": 1.0}}))[0]


def test_a_misspelled_key_is_named_with_the_near_one_and_nvme_is_no_cpu():
    zero = {
        "stage": 3,
        "stage3_param_persitance_threshold": 1e5,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 4},
        "offload_param": {"device": "nvme", "nvme_path": "/nvme", "max_in_cpu": 1},
        "reduce_bucket_size": 9e7,
    }
    fp16 = {"enabled": True, "loss_scale": 1024, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
    data = config(zero_optimization=zero, fp16=fp16, gradient_clipping=1.0, gradient_accumulation_steps=1)
    found = refusal(data)
    assert len(found) == 2
    assert "'stage3_param_persistence_threshold'" in found[0] and "nvme is not available" in found[1]
    zero["stage3_param_persistence_threshold"] = zero.pop("stage3_param_persitance_threshold")
    for name in ("offload_optimizer", "offload_param"):
        zero[name] = {**zero[name], "device": "cpu"}  # type: ignore[dict-item]
    settings = translate(data, ranks=2)
    assert (settings.zero, settings.batch, settings.clip, settings.offload) == (3, Batch(8, 4, 1), 1.0, "parameters")
    assert settings.loss_scale.static and settings.loss_scale.initial == 1024
    assert settings.bucket_mib == round(9e7 * 4 / 2**20)


def test_the_old_offload_key_and_whole_numbers_with_an_exponent():
    zero = {"stage": 2, "cpu_offload": True, "allgather_bucket_size": 2e8, "reduce_bucket_size": 200000000.0}
    settings = translate(config(zero_optimization=zero, fp16={"enabled": True, **SCALE_KEYS}), ranks=2)
    assert (settings.zero, settings.offload, settings.precision) == (2, "optimizer", "fp16")
    assert (settings.loss_scale.initial, settings.loss_scale.hysteresis, settings.loss_scale.static) == (65536.0, 2, False)
    zero["offload_optimizer"] = {"device": "cpu"}  # type: ignore[assignment]
    assert "both are there" in refusal(config(zero_optimization=zero))[0]
    assert "no whole number" in refusal(config(zero_optimization={"stage": 2, "reduce_bucket_size": 2.5}))[0]


def test_keys_of_stage_3_have_no_effect_at_stage_2_and_each_is_told():
    dead = {
        "offload_param": {"device": "cpu", "pin_memory": True},
        "stage3_gather_fp16_weights_on_model_save": True,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_param_persistence_threshold": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "sub_group_size": 1e9,
    }
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "overlap_comm": True, **dead}
    settings = translate(config(zero_optimization=zero, gradient_accumulation_steps=2), ranks=2)
    assert (settings.zero, settings.offload, settings.overlap) == (2, "optimizer", True)
    assert sorted(warned(settings)) == sorted(f"zero_optimization.{name}" for name in dead)
    settings = translate(config(zero_optimization={**zero, "stage": 3}), ranks=2)
    assert settings.warnings == () and settings.offload == "parameters"


def test_bf16_has_an_old_name_and_no_loss_scale():
    settings = translate(config(bfloat16={"enabled": True}, amp={"enabled": False, "opt_level": "O2"}), ranks=2)
    assert settings.precision == "bf16" and settings.warnings == ()
    (text,) = refusal(config(bfloat16={"enabled": True}, bf16={"enabled": False}))
    assert "both are there" in text
    settings = translate(config(bf16={"enabled": True, **SCALE_KEYS}, fp16={"enabled": False}), ranks=2)
    assert settings.precision == "bf16" and sorted(warned(settings)) == sorted(f"bf16.{key}" for key in SCALE_KEYS)
    assert "both are enabled" in refusal(config(bf16={"enabled": True}, fp16={"enabled": True}))[0]
    assert "fp16.enable: is no key" in refusal(config(fp16={"enable": True}))[0]


def test_nothing_that_is_missing_is_made_up():
    found = refusal({"gradient_clipping": 0.1, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    assert len(found) == 2 and "train_batch_size" in found[0] and found[1].startswith("ds_config: optimizer: there is none")
    given = {"micro": 1, "optimizer": "AdamW", "lr": 1e-3}
    settings = translate({"gradient_clipping": 0.1}, ranks=2, arguments=given)
    assert settings.optimizer is not None and settings.optimizer.lr == 1e-3 and settings.clip == 0.1
    assert translate({"train_batch_size": 2}, ranks=2, own_optimizer=True).optimizer is None


def test_features_that_change_what_is_computed_are_refused_unless_off():
    assert "curriculum_learning" in refusal(config(curriculum_learning={"enabled": True}))[0]
    assert translate(config(curriculum_learning={"enabled": False}, elasticity={}), ranks=2).warnings == ()
    zero = {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 4}
    assert len(refusal(config(zero_optimization=zero))) == 2
    found = refusal(config(optimizer={"type": "OneBitAdam", "params": {}}, scheduler={"type": "WarmupLRR"}))
    assert len(found) == 2 and "'WarmupLR'" in found[1]
    assert "stage: 4" in refusal(config(zero_optimization={"stage": 4}))[0]


def test_everything_that_is_wrong_is_said_at_once():
    data = {
        "train_batch_size": "many",
        "gradient_clipping": -1,
        "fp16": {"enabled": "yes"},
        "zero_optimization": {"stage": 9},
        "optimizer": {"type": "AdamW", "params": {"lr": "small", "betas": [0.9]}},
        "scheduler": [],
    }
    text = "\n".join(refusal(data))
    for key in ("train_batch_size", "gradient_clipping", "fp16.enabled", "stage", "params.lr", "betas", "scheduler"):
        assert key in text


# ---- "auto"

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {f"warmup_{name}": "auto" for name in ("max_lr", "min_lr", "num_steps")} | {"total_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
}


def test_auto_values_are_filled_from_arguments_or_all_named():
    found = refusal(AUTO)
    assert len(found) == 9 and all('"auto" has no value here' in text for text in found)
    given = {"micro": 4, "lr": 2e-5, "weight_decay": 0.0, "warmup": 10, "total": 100}
    settings = translate(AUTO, ranks=2, arguments=given)
    assert settings.batch == Batch(8, 4, 1)
    assert settings.optimizer is not None and (settings.optimizer.lr, settings.optimizer.weight_decay) == (2e-5, 0.0)
    assert settings.schedule == Warmup("decay", 0.0, 2e-5, 10, True, 100)
    assert warned(settings) == ["zero_optimization.reduce_bucket_size"]  # its default is taken
    every = {**AUTO, "gradient_accumulation_steps": "auto"}
    assert translate(every, ranks=2, arguments={**given, "micro": 8, "accumulation": 2}).batch == Batch(32, 8, 2)


# ---- schedules


def test_a_schedule_is_set_after_a_step_so_that_the_first_two_have_the_lowest_rate():
    scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 100}}
    settings = translate(config(scheduler=scheduler, optimizer={"type": "Adam", "params": {"lr": 0.01}}), ranks=1)
    assert [settings.lr(step) for step in range(3)] == pytest.approx([0.0, 0.0, 0.01 * math.log(2) / math.log(100)])
    assert settings.optimizer is not None and (settings.optimizer.kind, settings.optimizer.weight_decay) == ("adamw", 0.0)


def test_warm_up_rises_with_the_logarithm_or_straight():
    curve = Warmup("constant", 0.0, 3e-5, 50)
    expected = [0.0, 5.3155e-6, 1.76578e-5, 2.46845e-5, 3e-5]
    assert [curve.lr(i) for i in (0, 1, 9, 24, 49)] == pytest.approx(expected, rel=1e-5)
    straight = Warmup("constant", 0.0, 3e-5, 50, log=False)
    assert [straight.lr(i) for i in (0, 1, 9, 24, 49)] == pytest.approx([0, 6e-7, 5.4e-6, 1.44e-5, 2.94e-5], rel=1e-12)
    assert curve.lr(50) == curve.lr(1000) == 3e-5


def test_decay_and_cosine_end_where_they_should():
    decay = Warmup("decay", 1e-5, 1e-3, 10, True, 110)
    assert [decay.lr(i) for i in (10, 60, 110, 500)] == pytest.approx([1e-3, 1e-5 + 0.5 * 9.9e-4, 1e-5, 1e-5])
    cosine = Warmup("cosine", 0.0, 1e-3, 10, True, 110, 0.1)
    assert cosine.lr(59) == pytest.approx(1e-3 * (0.1 + 0.9 * 0.5)) and cosine.lr(109) == pytest.approx(1e-4)


def test_one_cycle_goes_up_and_down_in_stairs_and_then_decays():
    params = {
        "cycle_min_lr": 0.004, "cycle_max_lr": 0.015, "cycle_first_step_size": 1000, "cycle_second_step_size": 100,
        "cycle_first_stair_count": 100, "cycle_second_stair_count": 100, "decay_lr_rate": 0.01, "decay_step_size": 1000,
    }  # fmt: skip
    cycle = translate(config(scheduler={"type": "OneCycle", "params": params}), ranks=1).schedule
    assert isinstance(cycle, OneCycle)
    expected = [0.004, 0.004, 0.00411, 0.00411, 0.015, 0.0095, 0.004, 0.00399996, 0.0039604]
    assert [cycle.lr(i) for i in (0, 8, 9, 18, 999, 1049, 1099, 1100, 2099)] == pytest.approx(expected, rel=1e-6)
    assert cycle.betas(-1) == (0.8, 0.99) and cycle.betas(999) == (pytest.approx(0.8), 0.99)
    assert cycle.betas(1099) == (pytest.approx(0.9), 0.99)
    assert "cycle_max_lr: is needed" in refusal(config(scheduler={"type": "OneCycle", "params": {"cycle_min_lr": 1}}))[0]


# ---- the text

TEXT = """{
  # comment
  "train_micro_batch_size_per_gpu": 2,
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},  /* and
  one over two lines */
  "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, }}, // a comma behind the last
  "steps_per_print": 5,
}
"""


def test_comments_and_last_commas_are_read_and_a_missing_highest_rate_is_told(tmp_path: Path):
    file = tmp_path / "ds.json"
    file.write_text("\ufeff" + TEXT, encoding="utf-8")
    settings = translate(file, ranks=2)
    assert settings.schedule is not None and settings.schedule.lr(10) == 1e-5 and settings.steps_per_print == 5
    (warning,) = settings.warnings
    assert "warmup_max_lr" in str(warning) and "1e-05" in str(warning) and "0.001" in str(warning)
    assert translate(TEXT, ranks=2) == translate(json.loads(json.dumps(json.loads(plain(TEXT)))), ranks=2)


def plain(text: str) -> str:
    """The same by hand."""
    lines = [line for line in text.splitlines() if "#" not in line]
    text = "\n".join(lines).replace("/* and\n  one over two lines */", "").replace("// a comma behind the last", "")
    return text.replace("10, }", "10}").replace("5,\n}", "5\n}")


def test_a_key_that_is_there_twice_is_refused_by_name_and_text_in_a_string_is_text():
    (text,) = refusal(TEXT.replace("5,\n}", '5,\n "steps_per_print": 1}'))
    assert "'steps_per_print' is there twice" in text
    (text,) = refusal('{"train_batch_size": 2, "a // b # c": ",}", "optimizer": {}', 1)
    assert "is not JSON" in text and "ds_config:1" in text
    assert warned(translate({**config(), "a // b": 1}, ranks=1)) == ["a // b"]
    assert "cannot be read" in refusal("no/such/file.json")[0]
    assert "is no JSON object" in refusal("{}".replace("{}", "# nothing\n[]"))[0]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"train_batch_size": 1e400}, "train_batch_size: inf is no finite number"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping: nan is no finite number"),
        ({"steps_per_print": 1e400}, "steps_per_print: inf is no finite number"),
        ({"fp16": {"enabled": True, "initial_scale_power": 1e9}}, "fp16.initial_scale_power: 1000000000.0 is above 127"),
        ({"fp16": {"enabled": True, "loss_scale": 1e400}}, "fp16.loss_scale: inf is no finite number"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": -5}}, "reduce_bucket_size: -5 is below 1"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": [1]}}, "zero_optimization.offload_optimizer: is no object"),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [1.5, 0.9]}}},
            r"betas: \[1.5, 0.9\] are not two numbers of at least 0",
        ),
        ({"optimizer": {"type": "SGD", "params": {"nesterov": True}}}, "nesterov: needs a momentum and no dampening"),
        ({"optimizer": {"type": "SGD", "params": [1]}}, "optimizer.params: is no object but"),
        ({"scheduler": {"type": ["WarmupLR"]}}, "scheduler.type: .* is not available here"),
    ],
)
def test_numbers_that_are_none_and_values_of_other_kinds_are_refused_by_name(more: dict[str, Any], said: str):
    """Each of them once ended in an error of Python's, torch's or pydantic's own, or was taken."""
    given = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **more}
    with pytest.raises(ConfigError, match=said):
        translate(given, ranks=2)


def test_a_text_that_is_nested_without_end_is_refused_in_plain_words():
    with pytest.raises(ConfigError, match="ds_config: is nested too deeply"):
        translate('{"a": ' + "[" * 100_000, ranks=1)
