"""Building by name, and what is refused before any weight is made."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.config.schema import ModelConfig, RopeScaling
from meshwright.errors import ConfigError
from meshwright.models import Decoder, Encoder, architectures, build, registry
from meshwright.spec.model_rules import check

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def config(**changes) -> ModelConfig:
    return ModelConfig(**{"vocab": 100, "width": 64, "heads": 4, **changes})


def test_build():
    assert isinstance(build(config(), "lm"), Decoder)
    model = build(config(arch="encoder", classes=2), "classify", torch.float64)
    assert isinstance(model, Encoder) and model.classifier.weight.dtype == torch.float64
    assert not hasattr(model, "head")


def test_unknown_architecture_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match=r"model.arch: 'decodr' is unknown. Did you mean 'decoder'\? Known: decoder, encoder"):
        build(config(arch="decodr"), "lm")


def test_registered_architecture(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    registry.register_model("mine", lambda config, task: nn.Linear(config.width, config.options["out"]))
    assert architectures() == ["decoder", "encoder", "mine"]
    model = build(config(arch="mine", options={"out": 3}), "lm", torch.float16)
    assert model.weight.shape == (3, 64) and model.weight.dtype == torch.float16 and model.weight.is_meta
    registry.register_model("bad", lambda config, task: 3)
    with pytest.raises(ConfigError, match="returned int, not a torch"):
        build(config(arch="bad"), "lm")
    with pytest.raises(ConfigError, match="one of our own"):
        registry.register_model("encoder", lambda config, task: nn.Identity())


GOOD = [
    (config(), "lm", 10_000),
    (config(arch="encoder", positions="learned", max_len=512), "mlm", 512),
    (config(classes=2), "classify", None),
    (config(rope_scaling=RopeScaling(**LLAMA3, original_max_position_embeddings=64)), "lm", None),
    (
        config(rope_scaling=RopeScaling(rope_type="yarn", factor=2.0, original_max_position_embeddings=64, truncate=False)),
        "lm",
        None,
    ),
    (config(rope_scaling=RopeScaling(rope_type="dynamic", factor=2.0)), "lm", None),
    (config(rope_scaling=RopeScaling()), "lm", None),
    (config(heads=3, head_dim=20), "lm", None),
    (config(arch="somebody-elses", vocab=None), "lm", None),
]


@pytest.mark.parametrize("case", GOOD)
def test_nothing_to_say(case):
    assert check(*case) == []


BAD = [
    (config(head_dim=65), "lm", None, ["65 is odd"]),
    (config(width=65, heads=1), "lm", None, ["65 is odd"]),
    (config(heads=3), "lm", None, ["64 is not divisible by model.heads 3", "21 is odd"]),
    (config(heads=4, kv_heads=3), "lm", None, ["model.kv_heads: model.heads 4 is not divisible by 3"]),
    (config(vocab=None), "lm", None, ["model.vocab: is missing"]),
    (config(arch="encoder", sliding_window=8), "mlm", None, ["model.sliding_window: 8"]),
    (config(), "classify", None, ["model.classes: is missing"]),
    (config(classes=1), "classify", None, ["model.classes: 1 leaves"]),
    (config(arch="encoder"), "lm", None, ["encoder cannot do lm", "arch: decoder"]),
    (config(), "mlm", None, ["decoder cannot do mlm", "arch: encoder"]),
    (config(), "translate", None, ["cannot do translate", "Known: lm, classify"]),
    (config(positions="learned", max_len=512), "lm", 513, ["data.seq_len: 513 is more than the 512"]),
    (config(positions="none", position_offset=2), "lm", None, ["model.position_offset: 2 has no effect"]),
    (config(positions="learned", rope_scaling=RopeScaling()), "lm", None, ["model.rope_scaling: has no effect"]),
    (
        config(rope_scaling=RopeScaling(**LLAMA3)),
        "lm",
        None,
        ["original_max_position_embeddings: is missing, and rope_type llama3"],
    ),
    (
        config(rope_scaling=RopeScaling(rope_type="llama3")),
        "lm",
        None,
        ["original_max_position_embeddings: is missing", "low_freq_factor: is missing", "high_freq_factor: is missing"],
    ),
    (
        config(rope_scaling=RopeScaling(rope_type="yarn", factor=2.0)),
        "lm",
        None,
        ["original_max_position_embeddings: is missing"],
    ),
    (config(rope_scaling=RopeScaling(rope_type="linear", factor=0.5)), "lm", None, ["0.5 is under 1"]),
    (
        config(rope_scaling=RopeScaling(factor=2.0)),
        "lm",
        None,
        ["rope_scaling.factor: 2.0 has no effect with rope_type default"],
    ),
    (
        config(rope_scaling=RopeScaling(rope_type="linear", factor=2.0, beta_fast=3.0)),
        "lm",
        None,
        ["beta_fast: 3.0 has no effect"],
    ),
    (
        config(rope_scaling=RopeScaling(**{**LLAMA3, "high_freq_factor": 1.0}, original_max_position_embeddings=64)),
        "lm",
        None,
        ["high_freq_factor: 1.0 is not above low_freq_factor 1.0"],
    ),
    (config(head_dim=2, rope_scaling=RopeScaling(rope_type="dynamic", factor=2.0)), "lm", None, ["2 is too small"]),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[3][0])
def test_refusals(case):
    # Each of these numbers was once accepted by a tool and failed, or lied, much later.
    settings, task, seq_len, parts = case
    found = check(settings, task, seq_len)
    text = "\n".join(map(str, found))
    assert all(part in text for part in parts), text
    if seq_len is None:
        with pytest.raises(ConfigError) as raised:
            build(settings, task)
        assert raised.value.findings == tuple(found)


def test_all_findings_at_once():
    found = check(config(vocab=None, heads=3, kv_heads=2, classes=1), "classify")
    assert [f.where for f in found] == ["model.width", "model.kv_heads", "model.vocab", "model.head_dim", "model.classes"]


def test_the_rules_need_no_torch():
    import subprocess
    import sys

    code = "import sys; from meshwright.spec import counts, model_rules, model_table; import meshwright.config.recipes;"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
