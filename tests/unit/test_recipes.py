"""Shipped recipes: every name builds, and has the number of parameters that was published for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.config.recipes import recipe, recipes
from meshwright.config.schema import ModelConfig
from meshwright.errors import ConfigError
from meshwright.models import build
from meshwright.spec.counts import active_parameters, expert_parameters, parameter_count, parameter_groups
from meshwright.spec.model_rules import check

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-1b": 1_498_482_688,  # 3.2 1B and a second 128,256 x 2,048 matrix: a shape, no published model
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "bert-base-chinese": 102_290_312,
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    "ernie-3.0-base-zh": 117_984_064,  # without the three task-type rows (2,304 values)
    "encoder-24x1024": 304_046_928,  # torch's own layer: see below
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "debug": 125_248,  # with 512 tokens
    "debug-moe": 353_600,
    "debug-encoder": 137_536,
}


def resolved(name: str, **changes: object) -> ModelConfig:
    return ModelConfig(**{"vocab": 512, **recipe(name), **changes})


def task_of(config: ModelConfig) -> str:
    return "lm" if config.arch == "decoder" else "mlm"


def test_every_recipe_has_a_published_count():
    assert set(recipes()) == set(PUBLISHED)


@pytest.mark.parametrize("name", recipes())
def test_counts(name):
    # Mutations that turned this red: position_offset left out of the table, tied head counted, kv_heads ignored.
    config = resolved(name)
    assert check(config, task_of(config), config.max_len) == []
    model = build(config, task_of(config))
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]
    assert parameter_count(config, task_of(config)) == PUBLISHED[name]


@pytest.mark.parametrize(
    "name", ["debug", "debug-moe", "debug-encoder", "gpt2", "qwen3-0.6b", "roberta-base", "encoder-24x1024"]
)
@pytest.mark.parametrize("task", ["own", "classify"])
@pytest.mark.parametrize("pooler", [True, False])
def test_groups_equal_the_module(name, task, pooler):
    config = resolved(name, classes=3, pooler=pooler)
    task = task_of(config) if task == "own" else task
    counted = dict.fromkeys(("embedding", "attention", "mlp", "norms", "head"), 0)
    for parameter_name, parameter in build(config, task).named_parameters():
        if parameter_name.startswith(("head.", "pooler.", "classifier.")):
            group = "head"
        elif "norm" in parameter_name:
            group = "norms"
        elif parameter_name.split(".")[0].endswith("embedding"):
            group = "embedding"
        else:
            group = "attention" if ".attention." in parameter_name else "mlp"
        counted[group] += parameter.numel()
    assert parameter_groups(config, task) == counted


# Published as 12.9 and 3.3 billion. Mutation: the router left out of what every token passes: the first is red.
@pytest.mark.parametrize(("name", "active"), [("mixtral-8x7b", 12_879_925_248), ("qwen3-30b-a3b", 3_353_032_704)])
def test_active_parameters(name, active):
    config = resolved(name)
    assert active_parameters(config, "lm") == active
    expert = 3 * config.width * (config.moe_ffn or config.ffn)
    assert expert_parameters(config) == expert
    assert PUBLISHED[name] - active == config.layers * (config.experts - config.experts_per_token) * expert


def test_a_dense_model_is_all_active():
    assert active_parameters(resolved("debug"), "lm") == PUBLISHED["debug"] and expert_parameters(resolved("debug")) == 0


def test_encoder_24x1024_is_torch_s_own_encoder():
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(1024, 16, 2048)
        rest = nn.ModuleList([nn.Embedding(50_000, 1024), nn.Linear(1024, 50_000)])
    count = 24 * sum(p.numel() for p in layer.parameters()) + sum(p.numel() for p in rest.parameters())
    assert count == PUBLISHED["encoder-24x1024"]


def test_counts_against_transformers():
    transformers = pytest.importorskip("transformers")
    for name in recipes():
        c = resolved(name)
        common = {"hidden_size": c.width, "num_hidden_layers": c.layers, "num_attention_heads": c.heads, "vocab_size": c.vocab}
        common |= {"intermediate_size": c.ffn, "max_position_embeddings": c.max_len + c.position_offset}
        llama = common | {"num_key_value_heads": c.kv_heads or c.heads, "tie_word_embeddings": c.tied}
        llama |= {"head_dim": c.head_dim or c.width // c.heads}
        bert = common | {"type_vocab_size": c.token_types}
        moe = {"moe_intermediate_size": c.moe_ffn, "num_experts": c.experts, "num_experts_per_tok": c.experts_per_token}
        if name.startswith("mixtral"):
            made = transformers.MixtralConfig(**llama, num_local_experts=c.experts)
        elif name == "debug-moe":
            continue
        elif name == "qwen3-30b-a3b":
            made = transformers.Qwen3MoeConfig(**llama, **moe)
        elif name.startswith(("llama", "debug")) and c.arch == "decoder":
            made = transformers.LlamaConfig(**llama)
        elif name.startswith("mistral"):
            made = transformers.MistralConfig(**llama)
        elif name.startswith("qwen2"):
            made = transformers.Qwen2Config(**{k: v for k, v in llama.items() if k != "head_dim"})
        elif name.startswith("qwen3"):
            made = transformers.Qwen3Config(**llama)
        elif name.startswith("gpt2"):
            sizes = {"n_embd": c.width, "n_layer": c.layers, "n_head": c.heads, "n_positions": c.max_len}
            made = transformers.GPT2Config(**sizes, vocab_size=c.vocab, n_inner=c.ffn)
        elif name.startswith("roberta"):
            made = transformers.RobertaConfig(**bert)
        elif name.startswith("ernie"):
            made = transformers.ErnieConfig(**bert, use_task_id=False)
        elif name.startswith(("bert", "debug")):
            made = transformers.BertConfig(**bert)
        else:
            continue
        kind = transformers.AutoModelForCausalLM if c.arch == "decoder" else transformers.AutoModelForMaskedLM
        with torch.device("meta"):
            count = sum(p.numel() for p in kind.from_config(made).parameters())
        assert count == PUBLISHED[name], name


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match=r"llama-3-8b"):
        recipe("llama3-8b")
    with pytest.raises(ConfigError, match=r"Known: .*gpt2"):
        recipe("zzzzzz")


def test_a_recipe_is_a_copy():
    recipe("llama-3.2-1b")["rope_scaling"]["factor"] = 1.0
    assert recipe("llama-3.2-1b")["rope_scaling"]["factor"] == 32.0
