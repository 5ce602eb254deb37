"""What a model cannot be, found before any weight is made."""

from __future__ import annotations

from meshwright.config.schema import ModelConfig
from meshwright.errors import Finding

__all__ = ["ARCHITECTURES", "check"]

ARCHITECTURES = ("decoder", "encoder")
"""Architectures with rules here; a registered one answers for itself."""

_TASKS = {"decoder": ("lm", "classify"), "encoder": ("mlm", "classify")}
_WHY = {
    "lm": "predicting the next token needs a model that cannot see it",
    "mlm": "filling in masked tokens needs a model that sees both sides",
}
_OTHER = {"lm": "decoder", "mlm": "encoder"}

_SCALING_NEEDS = {
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_max_position_embeddings",),
}
_SCALING_TAKES = {
    "default": (),
    "linear": (),
    "dynamic": ("original_max_position_embeddings",),
    "llama3": _SCALING_NEEDS["llama3"],
    "yarn": (
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}


def check(config: ModelConfig, task: str, seq_len: int | None = None) -> list[Finding]:
    """Every reason why this model cannot be built for the task ("lm", "mlm", "classify") and rows of `seq_len` tokens."""
    if config.arch not in ARCHITECTURES:
        return []
    return [*_shape(config), *_experts(config), *_positions(config, seq_len), *_head(config, task)]


def _shape(config: ModelConfig) -> list[Finding]:
    found = []
    width, heads, kv_heads = config.width, config.heads, config.kv_heads or config.heads
    if config.head_dim is None and width % heads:
        found.append(
            Finding("model.width", f"{width} is not divisible by model.heads {heads}", "Change one of them, or give head_dim")
        )
    if heads % kv_heads:
        found.append(
            Finding("model.kv_heads", f"model.heads {heads} is not divisible by {kv_heads}", "All groups have as many queries")
        )
    if config.vocab is None:
        found.append(Finding("model.vocab", "is missing", "Give the number of rows, at least the tokenizer's size"))
    if config.sliding_window is not None and config.arch == "encoder":
        found.append(
            Finding(
                "model.sliding_window",
                f"{config.sliding_window} is given, but a window is defined for a decoder only",
                "Remove it, or use arch: decoder",
            )
        )
    return found


_OF_EXPERTS = (
    "experts_per_token",
    "moe_ffn",
    "router_normalised",
    "balance",
    "balance_coefficient",
    "router_z_loss",
    "capacity",
)


def _experts(config: ModelConfig) -> list[Finding]:
    if not config.experts:
        changed = [key for key in _OF_EXPERTS if getattr(config, key) != type(config).model_fields[key].default]
        return [
            Finding(f"model.{key}", f"{getattr(config, key)} has no effect with experts: 0", "Remove it, or give model.experts")
            for key in changed
        ]
    found = []
    if config.arch != "decoder":
        found.append(Finding("model.experts", f"{config.experts}, but only a decoder has a router", "Use arch: decoder"))
    if config.experts_per_token > config.experts:
        what = f"{config.experts_per_token} is more than the {config.experts} experts there are"
        found.append(Finding("model.experts_per_token", what, f"Use at most {config.experts}"))
    if config.mlp_bias:
        found.append(Finding("model.mlp_bias", "experts have no biases", "Remove it, or use experts: 0"))
    if config.balance == "none" and config.balance_coefficient != type(config).model_fields["balance_coefficient"].default:
        what = f"{config.balance_coefficient} has no effect with balance: none"
        found.append(Finding("model.balance_coefficient", what, "Remove it, or use balance: loss or bias"))
    return found


def _positions(config: ModelConfig, seq_len: int | None) -> list[Finding]:
    found = []
    head_dim = config.head_dim or config.width // config.heads
    if config.positions == "rope" and head_dim % 2:
        found.append(Finding("model.head_dim", f"{head_dim} is odd, and rotary positions turn pairs", "Use an even head_dim"))
    if config.positions == "rope" and head_dim == 2 and config.rope_scaling and config.rope_scaling.rope_type == "dynamic":
        found.append(Finding("model.head_dim", "2 is too small for the dynamic rope scaling", "Use at least 4"))
    if config.positions != "rope" and config.rope_scaling is not None:
        found.append(
            Finding("model.rope_scaling", f"has no effect with positions: {config.positions}", "Remove it, or use rope")
        )
    if config.positions != "learned" and config.position_offset:
        found.append(
            Finding(
                "model.position_offset",
                f"{config.position_offset} has no effect with positions: {config.positions}",
                "Remove it, or use positions: learned",
            )
        )
    if config.positions == "learned" and seq_len is not None and seq_len > config.max_len:
        found.append(
            Finding(
                "data.seq_len",
                f"{seq_len} is more than the {config.max_len} learned positions of the model",
                "Lower data.seq_len or raise model.max_len",
            )
        )
    return found + _scaling(config)


def _scaling(config: ModelConfig) -> list[Finding]:
    scaling = config.rope_scaling
    if scaling is None:
        return []
    found = []
    kind = scaling.rope_type
    for key in _SCALING_NEEDS.get(kind, ()):
        if getattr(scaling, key) is None:
            found.append(Finding(f"model.rope_scaling.{key}", f"is missing, and rope_type {kind} needs it"))
    known = ("rope_type", *(("factor",) if kind != "default" else ()), *_SCALING_TAKES[kind])
    for key, value in scaling:
        if key not in known and value is not None and value != type(scaling).model_fields[key].default:
            found.append(
                Finding(
                    f"model.rope_scaling.{key}", f"{value} has no effect with rope_type {kind}", "Remove it, or change that"
                )
            )
    if kind != "default" and scaling.factor < 1:
        found.append(Finding("model.rope_scaling.factor", f"{scaling.factor} is under 1", "A factor stretches the context"))
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if kind == "llama3" and low is not None and high is not None and high <= low:
        found.append(
            Finding("model.rope_scaling.high_freq_factor", f"{high} is not above low_freq_factor {low}", "Llama 3 has 4 and 1")
        )
    return found


def _head(config: ModelConfig, task: str) -> list[Finding]:
    found = []
    if task not in _TASKS[config.arch]:
        fix = f"Use arch: {_OTHER[task]}" if task in _OTHER else f"Known: {', '.join(_TASKS[config.arch])}"
        why = _WHY.get(task, f"{task!r} is no task of it")
        found.append(Finding("model.arch", f"{config.arch} cannot do {task}: {why}", fix))
    if task == "classify":
        if config.classes is None:
            found.append(Finding("model.classes", "is missing", "Give the number of labels"))
        elif config.classes < 2:
            found.append(Finding("model.classes", f"{config.classes} leaves nothing to tell apart", "Use at least 2"))
    return found
