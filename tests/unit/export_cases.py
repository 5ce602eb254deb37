"""Small models of every kind that is exported."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.config.schema import ModelConfig
from meshwright.export.source import Source
from meshwright.models import build, initialize
from tests.unit.serve_fakes import byte_tokenizer

BASE: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "ffn": 48, "vocab": 262, "max_len": 48}
BERT = {
    "arch": "encoder",
    "positions": "learned",
    "norm": "layer",
    "norm_order": "post",
    "activation": "gelu",
    "embed_norm": True,
}
HEAD = {"head_transform": True, "head_bias": True, "tied": True, "position_offset": 2, "token_types": 2, "final_norm": False}
GPT2 = {
    "positions": "learned",
    "norm": "layer",
    "activation": "gelu_tanh",
    "qkv_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
    "tied": True,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "grouped": ({"kv_heads": 2}, "lm", "logits"),
    "window": ({"kv_heads": 2, "sliding_window": 7, "qk_norm": True}, "lm", "logits"),
    "yarn": ({"rope_scaling": YARN, "head_dim": 16}, "lm", "logits"),
    "experts": ({"experts": 5, "experts_per_token": 2, "moe_ffn": 24}, "lm", "logits"),
    "gpt2": (GPT2, "lm", "logits"),
    "mlm": ({**BERT, **HEAD}, "mlm", "logits"),
    "embeddings": (BERT, "mlm", "embeddings"),
    "classify": ({**BERT, "classes": 3, "pooler": True}, "classify", "logits"),
    "classify-causal": ({"classes": 3}, "classify", "logits"),
}
"""Name -> settings beside BASE, task, output."""


def source(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> Source:
    settings, task, _ = CASES[name]
    config = ModelConfig(**{**BASE, **settings, **more})
    model = build(config, task, dtype)
    initialize(model, 0, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # no bias and no norm is trivial
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.1)
    labels = ("x", "y", "z") if task == "classify" else ()
    return Source(model.eval(), config, task, byte_tokenizer(), labels, name)
