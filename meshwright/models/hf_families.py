"""The Hugging Face families that are known, as data: which key is which field, its default, what has one value only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FAMILIES", "SILENT", "Family"]


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    tasks      our task -> their architecture name
    fields     our field -> their key
    defaults   their key -> value where config.json has none (as in `transformers`); a mapped key without one is required
    constants  our fields that this family fixes
    fixed      their keys that must have one of these values; absent is the first
    activation their key, and its values that we know -> ours; the first is the default
    """

    tasks: Mapping[str, str]
    fields: Mapping[str, str]
    defaults: Mapping[str, Any]
    constants: Mapping[str, Any]
    fixed: Mapping[str, tuple[Any, ...]]
    activation: tuple[str, Mapping[str, str]]
    aliases: Mapping[str, str] = field(default_factory=dict)


_NOT_OURS = {"quantization_config": (None,), "is_encoder_decoder": (False,), "add_cross_attention": (False,)}
_ROPE_FIELDS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "max_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
    "attention_dropout": "attention_dropout",
    "tied": "tie_word_embeddings",
}
_ROPE_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}
_ROPE_CONSTANTS = {
    "arch": "decoder",
    "positions": "rope",
    "norm": "rms",
    "norm_order": "pre",
    "final_norm": True,
    "activation": "swiglu",
}
_SILU = ("hidden_act", {"silu": "swiglu", "swish": "swiglu"})
_GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


_ROUTED = {"experts_per_token": "num_experts_per_tok", "balance_coefficient": "router_aux_loss_coef"}
_ROUTED_DEFAULTS = {"router_aux_loss_coef": 0.001}
"""Their balance loss is of a whole micro-batch, ours of a row: the same at the optimum, and no part of inference."""


def _rope_family(
    name: str,
    fields: dict[str, str],
    defaults: dict[str, Any],
    constants: dict[str, Any],
    special: dict[str, tuple[Any, ...]] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Family:
    fixed = {**_NOT_OURS, "partial_rotary_factor": (1.0, None), "pretraining_tp": (1,), **(special or {})}
    return Family(
        tasks={"lm": f"{name}ForCausalLM"},
        fields={**_ROPE_FIELDS, **fields},
        defaults={**_ROPE_DEFAULTS, **defaults},
        constants={**_ROPE_CONSTANTS, **constants},
        fixed=fixed,
        activation=_SILU,
        aliases=aliases or {},
    )


def _encoder_family(name: str, fixed: dict[str, tuple[Any, ...]]) -> Family:
    return Family(
        tasks={"mlm": f"{name}ForMaskedLM", "classify": f"{name}ForSequenceClassification"},
        fields={
            "layers": "num_hidden_layers",
            "width": "hidden_size",
            "heads": "num_attention_heads",
            "ffn": "intermediate_size",
            "vocab": "vocab_size",
            "max_len": "max_position_embeddings",
            "token_types": "type_vocab_size",
            "norm_eps": "layer_norm_eps",
            "init_std": "initializer_range",
            "dropout": "hidden_dropout_prob",
            "attention_dropout": "attention_probs_dropout_prob",
            "head_dropout": "classifier_dropout",
            "tied": "tie_word_embeddings",
        },
        defaults={
            "max_position_embeddings": 512,
            "type_vocab_size": 2,
            "layer_norm_eps": 1e-12,
            "initializer_range": 0.02,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            "classifier_dropout": None,
            "tie_word_embeddings": True,
        },
        constants={
            "arch": "encoder",
            "positions": "learned",
            "norm": "layer",
            "norm_order": "post",
            "final_norm": False,
            "embed_norm": True,
            "qkv_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "head_bias": True,
            "head_transform": True,
            "pooler": True,
        },
        fixed={**_NOT_OURS, "is_decoder": (False,), "position_embedding_type": ("absolute", None), **fixed},
        activation=("hidden_act", _GELU),
    )


FAMILIES: Mapping[str, Family] = {
    "llama": _rope_family(
        "Llama",
        {"qkv_bias": "attention_bias", "attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
        {"attention_bias": False, "mlp_bias": False},
        {},
    ),
    "mistral": _rope_family(
        "Mistral",
        {"sliding_window": "sliding_window"},
        {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        {},
    ),
    "qwen2": _rope_family("Qwen2", {}, {"num_key_value_heads": 32, "max_position_embeddings": 32768}, {"qkv_bias": True}),
    "qwen3": _rope_family(
        "Qwen3",
        {"qkv_bias": "attention_bias", "attention_bias": "attention_bias"},
        {"attention_bias": False, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
        {"qk_norm": True},
    ),
    "mixtral": _rope_family(
        "Mixtral",
        {**_ROUTED, "experts": "num_local_experts", "sliding_window": "sliding_window"},
        {
            **_ROUTED_DEFAULTS,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
        },
        {"router_normalised": True, "balance": "loss"},
        {"router_jitter_noise": (0.0,)},
    ),
    "qwen3_moe": _rope_family(
        "Qwen3Moe",
        {
            **_ROUTED,
            "experts": "num_experts",
            "moe_ffn": "moe_intermediate_size",
            "router_normalised": "norm_topk_prob",
            "qkv_bias": "attention_bias",
            "attention_bias": "attention_bias",
        },
        {
            **_ROUTED_DEFAULTS,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "attention_bias": False,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
        },
        {"qk_norm": True, "balance": "loss"},
        {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
        {"num_local_experts": "num_experts"},  # as transformers 5 writes it
    ),
    "gpt2": Family(
        tasks={"lm": "GPT2LMHeadModel"},
        fields={
            "layers": "n_layer",
            "width": "n_embd",
            "heads": "n_head",
            "ffn": "n_inner",
            "vocab": "vocab_size",
            "max_len": "n_positions",
            "norm_eps": "layer_norm_epsilon",
            "init_std": "initializer_range",
            "dropout": "resid_pdrop",
            "attention_dropout": "attn_pdrop",
            "tied": "tie_word_embeddings",
        },
        defaults={
            "n_inner": None,
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.02,
            "resid_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "attn_pdrop": 0.1,
            "tie_word_embeddings": True,
        },
        constants={
            "arch": "decoder",
            "positions": "learned",
            "norm": "layer",
            "norm_order": "pre",
            "final_norm": True,
            "qkv_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
        fixed={**_NOT_OURS, "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
        activation=("activation_function", {"gelu_new": "gelu_tanh", **_GELU}),
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
    ),
    "bert": _encoder_family("Bert", {}),
    "roberta": _encoder_family("Roberta", {}),
    "ernie": _encoder_family("Ernie", {"use_task_id": (False,)}),
}

SILENT = frozenset(
    [
        "architectures",
        "model_type",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "_name_or_path",
        "chunk_size_feed_forward",
        "gradient_checkpointing",
        "output_router_logits",
        "task_specific_params",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
        "reorder_and_upcast_attn",
        "n_ctx",
        "task_type_vocab_size",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "original_max_position_embeddings",
        "max_window_layers",
        "layer_types",
        "use_sliding_window",
        "sliding_window",
        "_attn_implementation",
        "auto_map",
        "unsloth_version",
        "name_or_path",
        "directionality",
        "embd_pdrop",
    ]
)
"""Fields without a part in the mathematics, and those read by code rather than by a table. Others are named in a note."""
