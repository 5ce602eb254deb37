"""Small random models of transformers, one for every family and head that converts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
GROUPED = {**COMMON, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "bos_token_id": 0, "eos_token_id": 0}


def _of(model: str, config: str, **kw: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**kw))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": _of("LlamaForCausalLM", "LlamaConfig", **GROUPED, head_dim=8),
    "llama-biases": _of("LlamaForCausalLM", "LlamaConfig", **GROUPED, head_dim=16, attention_bias=True, mlp_bias=True),
    "llama-tied": _of("LlamaForCausalLM", "LlamaConfig", **GROUPED, tie_word_embeddings=True, rope_theta=5e5),
    "mistral": _of("MistralForCausalLM", "MistralConfig", **GROUPED, head_dim=8, sliding_window=None),
    "mistral-window": _of("MistralForCausalLM", "MistralConfig", **GROUPED, head_dim=8, sliding_window=7),
    "qwen2": _of("Qwen2ForCausalLM", "Qwen2Config", **GROUPED),
    "qwen2-window": _of(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        **GROUPED,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=0,
    ),
    "qwen3": _of("Qwen3ForCausalLM", "Qwen3Config", **GROUPED, head_dim=16),
    "qwen3-tied": _of("Qwen3ForCausalLM", "Qwen3Config", **GROUPED, head_dim=8, tie_word_embeddings=True, attention_bias=True),
    "mixtral": _of("MixtralForCausalLM", "MixtralConfig", **GROUPED, head_dim=8, num_local_experts=5),
    "mixtral-window": _of("MixtralForCausalLM", "MixtralConfig", **GROUPED, head_dim=8, num_local_experts=3, sliding_window=7),
    "qwen3-moe": _of("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **GROUPED, **EXPERTS, norm_topk_prob=True),
    "qwen3-moe-plain": _of(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **GROUPED, **EXPERTS, norm_topk_prob=False, attention_bias=True
    ),
    "gpt2": _of("GPT2LMHeadModel", "GPT2Config", **GPT2),
    "gpt2-untied": _of(
        "GPT2LMHeadModel", "GPT2Config", **GPT2, n_inner=40, activation_function="gelu", tie_word_embeddings=False
    ),
    "bert": _of("BertForMaskedLM", "BertConfig", **COMMON),
    "bert-untied": _of("BertForMaskedLM", "BertConfig", **COMMON, tie_word_embeddings=False, hidden_act="gelu_new"),
    "bert-classify": _of("BertForSequenceClassification", "BertConfig", **COMMON, num_labels=5),
    "roberta": _of("RobertaForMaskedLM", "RobertaConfig", **{**COMMON, "max_position_embeddings": 258, "type_vocab_size": 1}),
    "roberta-classify": _of(
        "RobertaForSequenceClassification", "RobertaConfig", **{**COMMON, "max_position_embeddings": 258}, num_labels=3
    ),
    "ernie": _of("ErnieForMaskedLM", "ErnieConfig", **COMMON, type_vocab_size=4),
    "ernie-classify": _of("ErnieForSequenceClassification", "ErnieConfig", **COMMON, num_labels=2),
}


def make(name_or_factory: str | Callable[[], Any], seed: int = 0) -> Any:
    """The model with every parameter moved away from its initial value, so that no bias or norm is trivial."""
    torch.manual_seed(seed)
    model = (MODELS[name_or_factory] if isinstance(name_or_factory, str) else name_or_factory)()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def saved(name_or_factory: str | Callable[[], Any], folder: Path, **kw: Any) -> Any:
    model = make(name_or_factory)
    model.save_pretrained(folder, **kw)
    return model


def tokens(length: int = 200, rows: int = 2) -> torch.Tensor:
    """Ids that are no special ones of any of the models."""
    return torch.randint(5, 96, (rows, length), generator=torch.Generator().manual_seed(1))
