"""config.json both ways: every field that changes the mathematics survives or is refused by name."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config.schema import ModelConfig, RopeScaling
from meshwright.errors import ConfigError
from meshwright.models.hf_config import from_hf, to_hf
from meshwright.models.hf_families import FAMILIES

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
}
BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    **{
        key: LLAMA[key]
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    },
}
QWEN = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}


def _refused(raw: dict[str, Any], *words: str, task: str | None = None) -> None:
    with pytest.raises(ConfigError) as error:
        from_hf(raw, "config.json", task)
    for word in words:
        assert word in str(error.value)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (LLAMA, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ("rope_scaling.rope_type", "'longrope'", "llama3")),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": "2"}}, ("rope_scaling.factor", "'2' is no number")),
    (QWEN, {"use_sliding_window": True, "sliding_window": "8"}, ("sliding_window", "'8' is no whole number")),
    (LLAMA, {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, ("rope_parameters.rope_type", "'spiral'")),
    (LLAMA, {"rope_scaling": {"type": "linear"}}, ("rope_scaling.factor", "is missing")),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2, "wobble": 3}}, ("wobble",)),
    (LLAMA, {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, ("rope_theta", "500000")),
    (
        LLAMA,
        {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "linear", "factor": 4}},
        ("rope_scaling", "rope_parameters"),
    ),
    (LLAMA, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ("rope_parameters", "different positions")),
    (LLAMA, {"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
    (LLAMA, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ("partial_rotary_factor", "0.5")),
    (LLAMA, {"hidden_act": "gelu"}, ("hidden_act", "'gelu'")),
    (LLAMA, {"pretraining_tp": 2}, ("pretraining_tp", "2")),
    (LLAMA, {"quantization_config": {"bits": 4}}, ("quantization_config",)),
    (LLAMA, {"model_type": "mamba"}, ("model_type", "'mamba'", "llama")),
    (LLAMA, {"model_type": ["llama"]}, ("model_type",)),
    (LLAMA, {"num_hidden_layers": 0}, ("num_hidden_layers", "greater than or equal to 1")),
    (LLAMA, {"hidden_size": "wide"}, ("hidden_size", "'wide'")),
    (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, ("architectures", "LlamaForSequenceClassification")),
    (QWEN, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, ("layer_types", "or none")),
    (QWEN, {"layer_types": ["sliding_attention", "full_attention"]}, ("layer_types",)),
    (QWEN, {"layer_types": ["chunked_attention"] * 2}, ("layer_types", "chunked_attention")),
    (GPT2, {"scale_attn_weights": False}, ("scale_attn_weights",)),
    (GPT2, {"scale_attn_by_inverse_layer_idx": True}, ("scale_attn_by_inverse_layer_idx",)),
    (GPT2, {"embd_pdrop": 0.0, "resid_pdrop": 0.1}, ("embd_pdrop", "resid_pdrop")),
    (GPT2, {"add_cross_attention": True}, ("add_cross_attention",)),
    (BERT, {"position_embedding_type": "relative_key"}, ("position_embedding_type", "relative_key")),
    ({**BERT, "model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}, {"pad_token_id": None}, ("pad_token_id",)),
    (BERT, {"is_decoder": True}, ("is_decoder",)),
    (BERT, {"hidden_act": "mish"}, ("hidden_act", "mish")),
    (BERT, {"architectures": ["BertForQuestionAnswering"]}, ("architectures", "BertForMaskedLM")),
    ({**BERT, "model_type": "ernie", "architectures": ["ErnieForMaskedLM"]}, {"use_task_id": True}, ("use_task_id",)),
    (
        {**BERT, "model_type": "roberta", "architectures": ["RobertaForMaskedLM"]},
        {"hidden_act": "relu"},
        ("hidden_act", "always uses gelu"),
    ),
]


# Mutation: an empty `fixed` table lets half of them pass: red.
@pytest.mark.parametrize("base, change, words", REFUSED, ids=[next(iter(c)) + f"-{i}" for i, (_, c, _) in enumerate(REFUSED)])
def test_refused_by_name(base: dict[str, Any], change: dict[str, Any], words: tuple[str, ...]) -> None:
    from_hf(base, "config.json")  # fine without the change
    _refused({**base, **change}, *words)


def test_all_findings_at_once() -> None:
    raw = {**LLAMA, "hidden_act": "gelu", "partial_rotary_factor": 0.5, "rope_scaling": {"type": "spiral"}}
    del raw["vocab_size"]
    _refused(raw, "hidden_act", "partial_rotary_factor", "spiral", "vocab_size: is missing")


YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 32, "truncate": True}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
WHOLE: list[dict[str, Any]] = [
    {**LLAMA, "rope_theta": 1e4, "rope_scaling": YARN, "head_dim": 16, "rms_norm_eps": 1e-6},
    {**QWEN, **WINDOW},
    {**QWEN, "layer_types": ["full_attention"] * 2},
    BERT,
    GPT2,
]
ODD = ["abc", "2", "1e-6", None, True, 0, -1, 1.5, float("inf"), float("nan"), [], [1], {}, {"a": 1}, 10**30]


@pytest.mark.parametrize("whole", WHOLE, ids=lambda raw: raw["model_type"])
def test_any_value_in_any_field_is_read_or_refused(whole: dict[str, Any]) -> None:
    # red before (each was an error of Python): text or lists for a rotary number, a rope type that is a list, architectures
    # and layer_types that are no list of names, 10**30 layers with a window
    def tried(**changed: Any) -> None:
        with contextlib.suppress(ConfigError):
            from_hf({**whole, **changed}, "config.json")

    from_hf(whole, "config.json")
    for key, odd in itertools.product({*whole, "rope_scaling", "rope_theta", "layer_types"}, ODD):
        tried(**{key: odd})
    for key, odd in itertools.product(whole.get("rope_scaling", {}), ODD):
        tried(rope_scaling={**YARN, key: odd})


@pytest.mark.parametrize("key", ["hidden_size", "num_key_value_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings"])
def test_text_is_no_number(key: str) -> None:
    # red when "2" is taken for 2: transformers, to which the field is written back, fails on it
    _refused({**LLAMA, key: "2"}, f"config.json: {key}: '2'")


def test_unknown_fields_are_kept_and_named() -> None:
    hf = from_hf({**LLAMA, "favourite_colour": "blue", "bos_token_id": 7, "torch_dtype": "bfloat16"}, "config.json")
    assert any("favourite_colour" in note and "bos_token_id" not in note for note in hf.notes)
    raw, back = to_hf(hf.config, hf.task, family="llama", kept=hf.kept)
    assert raw["favourite_colour"] == "blue" and raw["bos_token_id"] == 7
    assert back.config == hf.config


def test_defaults_are_those_of_transformers() -> None:
    import transformers

    kinds = ("Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe", "GPT2", "Bert", "Roberta", "Ernie")
    for name, kind in zip(FAMILIES, kinds, strict=True):
        full = getattr(transformers, f"{kind}Config")().to_dict()
        required = set(FAMILIES[name].fields.values()) - set(FAMILIES[name].defaults)
        task = next(iter(FAMILIES[name].tasks))
        sparse = {"model_type": name, **{key: full[key] for key in required}}
        if full.get("head_dim") is not None and full["head_dim"] * full["num_attention_heads"] == full["hidden_size"]:
            full["head_dim"] = None
        assert from_hf(sparse, "sparse", task).config == from_hf(full, "full", task).config, name


# Both spellings of 4.x and 5.x. Mutation: `rope_parameters` not read: red.
def test_spellings_of_positions() -> None:
    block = {"rope_type": "linear", "factor": 2.0}
    spellings = [
        {"rope_theta": 5e5, "rope_scaling": block},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {**block, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": block, "rope_scaling": block},
    ]
    configs = [from_hf({**LLAMA, **spelling}, "config.json").config for spelling in spellings]
    assert all(config == configs[0] for config in configs)
    assert configs[0].rope_theta == 5e5 and configs[0].rope_scaling == RopeScaling(rope_type="linear", factor=2.0)
    plain = from_hf({**LLAMA, "rope_scaling": {"rope_type": "default"}}, "config.json").config
    assert plain.rope_scaling is None and plain.rope_theta == 10000.0


def test_original_length_of_yarn_and_llama3() -> None:
    outer = {**LLAMA, "max_position_embeddings": 4096, "original_max_position_embeddings": 1024}
    scaling = from_hf({**outer, "rope_scaling": {"type": "yarn"}}, "c").config.rope_scaling
    assert scaling == RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024)
    numbers = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    inner = from_hf({**LLAMA, "max_position_embeddings": 4096, "rope_scaling": numbers}, "c").config.rope_scaling
    assert inner is not None and inner.original_max_position_embeddings == 4096
    odd = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024}
    hf = from_hf({**LLAMA, "max_position_embeddings": 4096, "rope_scaling": odd}, "c")
    assert hf.config.rope_scaling is not None and hf.config.rope_scaling.factor == 8.0
    assert any("transformers before 5" in note for note in hf.notes)


def test_numbers_without_effect_are_named_and_left_out() -> None:
    hf = from_hf({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}}, "config.json")
    assert hf.config.rope_scaling == RopeScaling(rope_type="linear", factor=2.0)
    assert any("beta_fast" in note for note in hf.notes)


@pytest.mark.parametrize(
    "named, tensors, task",
    [
        (["BertForMaskedLM"], [], "mlm"),
        (["BertForPreTraining"], ["cls.predictions.bias"], "mlm"),
        (["BertForSequenceClassification"], ["cls.predictions.bias"], "classify"),
        (None, ["classifier.weight"], "classify"),
    ],
)
def test_task(named: list[str] | None, tensors: list[str], task: str) -> None:
    assert from_hf({**BERT, "architectures": named}, "c", None, frozenset(tensors)).task == task
    assert from_hf({**BERT, "architectures": named}, "c", "mlm").task == "mlm"


def test_labels_survive() -> None:
    names = {"0": "no", "1": "yes", "2": "maybe"}
    raw = {**BERT, "architectures": ["BertForSequenceClassification"], "id2label": names}
    hf = from_hf(raw, "c")
    assert hf.config.classes == 3
    assert to_hf(hf.config, "classify", kept=hf.kept)[0]["id2label"] == names
    assert to_hf(hf.config.model_copy(update={"classes": 2}), "classify", kept=hf.kept)[0]["id2label"] == {
        "0": "LABEL_0",
        "1": "LABEL_1",
    }


DECODER = {"width": 64, "heads": 4, "vocab": 100, "ffn": 96, "layers": 2}
scalings = st.one_of(
    st.none(),
    st.builds(RopeScaling, rope_type=st.sampled_from(["linear", "dynamic"]), factor=st.floats(1, 8)),
    st.builds(
        RopeScaling,
        rope_type=st.just("llama3"),
        factor=st.floats(1, 8),
        original_max_position_embeddings=st.integers(16, 512),
        low_freq_factor=st.just(1.0),
        high_freq_factor=st.floats(2, 8),
    ),
    st.builds(
        RopeScaling,
        rope_type=st.just("yarn"),
        factor=st.floats(1, 8),
        original_max_position_embeddings=st.integers(16, 512),
        attention_factor=st.one_of(st.none(), st.floats(0.5, 2)),
        truncate=st.sampled_from([None, False]),
    ),
)


# Whatever is exported reads back as the same model, and what cannot be is refused. Mutation: any key left out of
# `_ROPE_FIELDS` (tried: norm_eps, sliding_window): red.
@settings(max_examples=150, deadline=None)
@given(
    kv_heads=st.sampled_from([None, 1, 2, 4]),
    head_dim=st.sampled_from([None, 16, 32]),
    rope_theta=st.floats(100, 1e7),
    rope_scaling=scalings,
    norm_eps=st.sampled_from([1e-5, 1e-6, 3e-4]),
    qkv_bias=st.booleans(),
    attention_bias=st.booleans(),
    mlp_bias=st.booleans(),
    qk_norm=st.booleans(),
    sliding_window=st.sampled_from([None, 5]),
    tied=st.booleans(),
    max_len=st.sampled_from([128, 4096]),
    activation=st.sampled_from(["swiglu", "swiglu", "swiglu", "gelu"]),
)
def test_export_is_the_same_model_or_refused(**numbers: Any) -> None:
    config = ModelConfig(**DECODER, **numbers)
    alike = config.qkv_bias == config.attention_bias
    fits = config.activation == "swiglu" and (
        (alike and not config.qk_norm and config.sliding_window is None)  # llama
        or not (config.qk_norm or config.qkv_bias or config.attention_bias or config.mlp_bias)  # mistral
        or (config.qkv_bias and not (config.qk_norm or config.attention_bias or config.mlp_bias))  # qwen2
        or (alike and config.qk_norm and not config.mlp_bias)  # qwen3
    )
    if not fits:
        with pytest.raises(ConfigError, match="no Hugging Face family"):
            to_hf(config, "lm")
        return
    raw, written = to_hf(config, "lm")
    back = from_hf(raw, "config.json").config
    for key in ("layers", "width", "ffn", "vocab", "norm_eps", "rope_theta", "sliding_window", "tied", "mlp_bias", "qk_norm"):
        assert getattr(back, key) == getattr(config, key), key
    for key in ("qkv_bias", "attention_bias", "activation", "norm", "norm_order", "positions"):
        assert getattr(back, key) == getattr(config, key), key
    assert (back.kv_heads or back.heads, back.head_dim or 16) == (config.kv_heads or 4, config.head_dim or 16)
    if config.rope_scaling is None:
        assert back.rope_scaling is None and back.max_len == config.max_len
    else:
        assert back.rope_scaling == config.rope_scaling
    assert written.config == back


def test_refusal_says_what_stands_against_the_nearest_families() -> None:
    encoder = ModelConfig(arch="encoder", positions="learned", norm="layer", norm_order="post", vocab=100, activation="gelu")
    with pytest.raises(ConfigError, match=r"bert: .*embed_norm False would become True"):
        to_hf(encoder, "mlm")
    with pytest.raises(ConfigError, match="llama: it has no classify head"):
        to_hf(ModelConfig(**DECODER, classes=2), "classify", family="llama")
    with pytest.raises(ConfigError, match="'mamba' is not known"):
        to_hf(ModelConfig(**DECODER), "lm", family="mamba")


def test_training_only_numbers_are_named() -> None:
    notes = to_hf(ModelConfig(**DECODER, dropout=0.1), "lm")[1].notes
    assert len(notes) == 1 and "llama has no dropout (0.1)" in notes[0]
