"""Same weights, same logits: transformers' models loaded here, ours exported and loaded there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from meshwright.config.schema import ModelConfig, RopeScaling
from meshwright.models import build, initialize
from meshwright.models.hf import export_hf, load_hf
from tests.unit import hf_models
from tests.unit.hf_models import GROUPED, MODELS, saved, tokens

TOLERANCE = 1e-5


def _reload(model: Any, folder: Path) -> Any:
    again, report = type(model).from_pretrained(folder, output_loading_info=True)
    trouble = {key: value for key, value in report.items() if value}
    assert not trouble, trouble  # no missing, unexpected, mismatched keys
    return again.eval()


@torch.no_grad()
def _both_ways(model: Any, source: Path, target: Path) -> None:
    ours, hf = load_hf(source)
    x = tokens()
    expected = model(x).logits
    torch.testing.assert_close(ours(x), expected, rtol=0, atol=TOLERANCE)
    origin = {"model_type": hf.family, "kept": hf.kept}
    written = export_hf(ours, hf.config, hf.task, target, huggingface=origin)
    assert (written.family, written.config) == (hf.family, hf.config)
    assert torch.equal(_reload(model, target)(x).logits, expected)  # the weights come back bit for bit
    again, _ = load_hf(target)
    for (name, a), (_, b) in zip(ours.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name


# Mutations, each red: q and k swapped in the map; c_attn not transposed; attention_norm and mlp_norm swapped; parts of a
# fused parameter taken as one run of rows; gate and value of an expert swapped; the weights of a token's experts always made
# to sum to 1; the bias of an untied BERT head taken from the parameter that is not read.
@pytest.mark.parametrize("name", MODELS)
def test_both_ways(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path / "theirs")
    _both_ways(model, tmp_path / "theirs", tmp_path / "back")


ORIGINAL = 64
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn-all": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.3,
        "truncate": False,
    },
}


# 200 positions, the original length is 64. Mutations, each red: rope_scaling not written; rope_theta left at its default;
# `truncate` dropped on the way in.
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", SCALINGS)
def test_positions_beyond_the_original_length(kind: str, spelling: str, tmp_path: Path) -> None:
    import transformers

    longest = ORIGINAL if kind == "dynamic" else 256
    scaling = SCALINGS[kind]
    rope = {"rope_parameters": {**scaling, "rope_theta": 500000.0}}
    kw = {**GROUPED, "max_position_embeddings": longest, "head_dim": 16, **rope}
    model = saved(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**kw)), tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    raw = json.loads(path.read_text())
    assert raw["rope_parameters"]["rope_type"] == scaling["rope_type"]
    if spelling == "rope_scaling":  # as transformers before 5 writes it, `type` included
        raw["rope_theta"] = raw.pop("rope_parameters")["rope_theta"]
        raw["rope_scaling"] = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
        path.write_text(json.dumps(raw))
    _, hf = load_hf(tmp_path / "theirs")
    assert hf.config.rope_theta == 500000.0 and hf.config.rope_scaling is not None
    read = hf.config.rope_scaling.model_dump(exclude_none=True)
    assert read == {**RopeScaling().model_dump(exclude_none=True), **scaling}
    _both_ways(model, tmp_path / "theirs", tmp_path / "back")
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert back["rope_theta"] == 500000.0 and back["rope_scaling"] == scaling
    assert back["max_position_embeddings"] == longest


DECODER = {"arch": "decoder", "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 40, "vocab": 50, "max_len": 64}
ENCODER = {
    **{**DECODER, "arch": "encoder", "kv_heads": None},
    **{"positions": "learned", "norm": "layer", "norm_order": "post", "final_norm": False, "embed_norm": True},
    **{"token_types": 2, "activation": "gelu", "qkv_bias": True, "attention_bias": True, "mlp_bias": True},
    **{"head_bias": True, "head_transform": True},
}
GPT = {"positions": "learned", "norm": "layer", "activation": "gelu_tanh", "kv_heads": None}
GPT |= {"qkv_bias": True, "attention_bias": True, "mlp_bias": True}
OWN: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "lm", DECODER),
    ("llama", "lm", {**DECODER, "tied": True, "ffn": 33, "qkv_bias": True, "attention_bias": True}),  # ffn: 33 groups of a row
    ("mistral", "lm", {**DECODER, "sliding_window": 5}),
    ("qwen2", "lm", {**DECODER, "qkv_bias": True}),
    ("qwen2", "lm", {**DECODER, "qkv_bias": True, "sliding_window": 5}),
    ("qwen3", "lm", {**DECODER, "qk_norm": True, "head_dim": 24, "tied": True}),
    ("mixtral", "lm", {**DECODER, "experts": 5, "experts_per_token": 2, "router_z_loss": 0.1}),
    ("qwen3_moe", "lm", {**DECODER, "qk_norm": True, "experts": 6, "experts_per_token": 3, "moe_ffn": 24, "tied": True}),
    ("qwen3_moe", "lm", {**DECODER, "qk_norm": True, "experts": 4, "router_normalised": False, "balance": "none"}),
    ("gpt2", "lm", {**DECODER, **GPT, "tied": True}),
    ("gpt2", "lm", {**DECODER, **GPT}),
    ("bert", "mlm", {**ENCODER, "tied": True}),
    ("bert", "mlm", ENCODER),
    ("bert", "classify", {**ENCODER, "classes": 3}),
    ("roberta", "mlm", {**ENCODER, "position_offset": 2, "tied": True}),
]


@pytest.mark.parametrize("family, task, numbers", OWN)
def test_a_model_of_our_own(family: str, task: str, numbers: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    config = ModelConfig(**numbers, init_std=0.1)
    model = build(config, task)
    initialize(model, 0, "cpu")
    hf = export_hf(model, config, task, tmp_path / "theirs")
    assert hf.family == family
    auto = {"lm": "AutoModelForCausalLM", "mlm": "AutoModelForMaskedLM", "classify": "AutoModelForSequenceClassification"}
    theirs, report = getattr(transformers, auto[task]).from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not {key: value for key, value in report.items() if value}
    x = tokens(60).remainder(45) + 5
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(x).logits, model(x), rtol=0, atol=TOLERANCE)


# Flag and tensors agree. Mutation: tie_word_embeddings not written: transformers ties the untied: red.
@pytest.mark.parametrize("tied", [True, False])
def test_tied_has_one_tensor_untied_two(tied: bool, tmp_path: Path) -> None:
    config = ModelConfig(**DECODER, tied=tied)
    model = build(config, "lm")
    initialize(model, 0, "cpu")
    export_hf(model, config, "lm", tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["tie_word_embeddings"] is tied
    with safe_open(tmp_path / "theirs" / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) is not tied  # noqa: SIM118 (no mapping)
    again, _ = load_hf(tmp_path / "theirs")
    assert (again.head.weight is again.embedding.weight) is tied


def test_bf16_stays_bf16(tmp_path: Path) -> None:
    import transformers

    model = hf_models.make("qwen3").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    ours, hf = load_hf(tmp_path / "theirs")
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    export_hf(ours, hf.config, hf.task, tmp_path / "back")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    assert again.dtype == torch.bfloat16
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
