"""Hugging Face `config.json` to `ModelConfig` and back.

Every field that changes the mathematics is mapped, or must have the one value that our models compute, or is refused by
name. The rest travels along unread (`HfConfig.kept`) and is written again on export. Whether a model can be exported as
a family is not decided by a second set of rules: its config is written, read back, and must come back the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from meshwright.config.schema import ModelConfig, RopeScaling
from meshwright.errors import ConfigError, Finding
from meshwright.models.hf_families import FAMILIES, SILENT, Family
from meshwright.models.hf_rope import read_rope, write_rope

__all__ = ["HfConfig", "from_hf", "to_hf"]


@dataclass(frozen=True)
class HfConfig:
    """What a config.json says. kept: fields that we do not read. notes: what a user should know, one line each."""

    family: str
    task: str
    config: ModelConfig
    kept: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


_WINDOWED = ("qwen2", "qwen3", "qwen3_moe")
_WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
_TRAINING_ONLY = frozenset(
    {
        "dropout",
        "attention_dropout",
        "head_dropout",
        "init_std",
        "init_depth_scaled",
        "balance_coefficient",
        "router_z_loss",
    }
)
_UNSEEN = frozenset({"recipe", "options", *_TRAINING_ONLY})


def from_hf(raw: Mapping[str, Any], where: str, task: str | None = None, tensors: frozenset[str] = frozenset()) -> HfConfig:
    """Read the parsed config.json `raw`; `where` names it in messages.

    task     "lm", "mlm" or "classify"; default: from `architectures`, else from the names of the weights in `tensors`
    Raises ConfigError with every field that is missing, wrong or not computed by our models.
    """
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(findings=[Finding(f"{where}: model_type", f"{name!r} is not known", f"Known: {', '.join(FAMILIES)}")])
    family = FAMILIES[name]
    raw = {family.aliases.get(key, key): value for key, value in raw.items()}
    findings: list[Finding] = []
    notes: list[str] = []
    values: dict[str, Any] = dict(family.constants)
    for ours, key in family.fields.items():
        if key not in raw and key not in family.defaults:
            findings.append(Finding(f"{where}: {key}", "is missing", f"Every {name} model has it"))
        else:
            values[ours] = raw.get(key, family.defaults.get(key))
    for key, allowed in family.fixed.items():
        if raw.get(key, allowed[0]) not in allowed:
            findings.append(Finding(f"{where}: {key}", f"{raw[key]!r} is not supported", f"Only {allowed[0]!r} is"))
    key, known = family.activation
    spelled = raw.get(key, next(iter(known)))
    if isinstance(spelled, str) and spelled in known:
        values["activation"] = known[spelled]
    else:
        findings.append(Finding(f"{where}: {key}", f"{spelled!r} is not supported", f"Known: {', '.join(known)}"))
    task = _task(family, raw, where, task, tensors, findings)
    _specials(name, raw, where, task, values, findings, notes)
    if values["positions"] == "rope":
        read_rope(raw, where, values, findings, notes)
    if findings:
        raise ConfigError(f"{where} is not a model that can be computed here", findings)
    read = {*family.fields.values(), *family.fixed, key, "vocab_size"}
    kept = {k: v for k, v in raw.items() if k not in read and k not in _READ_BY_CODE}
    unknown = sorted(k for k in kept if k not in SILENT)
    if unknown:
        notes.append(f"kept without being read, as transformers does for {name}: {', '.join(unknown)}")
    return HfConfig(name, task, _validated(values, family, where), kept, tuple(notes))


_READ_BY_CODE = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "architectures", "model_type", *_WINDOW_KEYS})


def _validated(values: dict[str, Any], family: Family, where: str) -> ModelConfig:
    try:
        return ModelConfig.model_validate(values, strict=True)  # transformers does not take "2" for a number either
    except ValidationError as error:
        findings = []
        for problem in error.errors():
            ours = str(problem["loc"][0])
            path = ".".join([family.fields.get(ours, ours), *map(str, problem["loc"][1:])])
            findings.append(Finding(f"{where}: {path}", f"{problem['input']!r}: {problem['msg']}"))
        raise ConfigError(findings=findings) from None


def _task(
    family: Family, raw: Mapping[str, Any], where: str, task: str | None, tensors: frozenset[str], findings: list[Finding]
) -> str:
    """The task that is asked for, else that of `architectures`, else the one whose head is in the file."""
    first = next(iter(family.tasks))
    known = ", ".join(family.tasks.values())
    if task is not None:
        if task not in family.tasks:
            findings.append(Finding(f"{where}: model_type", f"{raw['model_type']} has no task {task!r}", f"Known: {known}"))
        return task
    named = raw.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        findings.append(Finding(f"{where}: architectures", f"{named!r} is no list of names"))
        return first
    for ours, theirs in family.tasks.items():
        if theirs in named:
            return ours
    if len(family.tasks) == 1 and (not named or any(n.endswith(("Model", "LMHead")) for n in named)):
        return first
    if any(n.startswith("classifier.") for n in tensors):
        return "classify"
    if any(n.startswith(("cls.predictions.", "lm_head.")) for n in tensors):
        return "mlm"
    findings.append(Finding(f"{where}: architectures", f"{named!r} has no head that is known", f"Known: {known}"))
    return first


def _specials(
    name: str,
    raw: Mapping[str, Any],
    where: str,
    task: str,
    values: dict[str, Any],
    findings: list[Finding],
    notes: list[str],
) -> None:
    """What one family does differently from a plain renaming of its keys."""
    if name == "gpt2":
        if values.get("ffn") is None and isinstance(values.get("width"), int):
            values["ffn"] = 4 * values["width"]
        embedding = raw.get("embd_pdrop", 0.1)
        if embedding != values.get("dropout"):
            findings.append(
                Finding(
                    f"{where}: embd_pdrop",
                    f"{embedding} differs from resid_pdrop {values.get('dropout')}, and there is one dropout",
                    "Make them equal (dropout plays no part outside of training)",
                )
            )
    width, heads = values.get("width"), values.get("heads")
    if isinstance(width, int) and isinstance(heads, int) and heads > 0 and values.get("head_dim") == width / heads:
        values["head_dim"] = None  # one spelling for one model
    if "kv_heads" in values and values["kv_heads"] is None:
        values["kv_heads"] = heads
    if name in _WINDOWED:
        values["sliding_window"] = _window(raw, where, values.get("layers"), findings)
    if name == "roberta":
        pad = raw.get("pad_token_id", 1)
        if not isinstance(pad, int) or pad < 0:
            findings.append(Finding(f"{where}: pad_token_id", f"is {pad}", "RoBERTa's positions start after it"))
            return
        values["position_offset"] = offset = pad + 1
        if isinstance(values.get("max_len"), int):
            values["max_len"] -= offset
        if task == "mlm" and values.get("activation") != "gelu":
            findings.append(
                Finding(f"{where}: hidden_act", "RoBERTa's language-model head always uses gelu", "Only gelu is supported")
            )
        notes.append("positions are counted over all tokens of a row; transformers does not count pad tokens inside of it")
    if name == "ernie" and raw.get("embedding_size", values.get("width")) != values.get("width"):
        findings.append(
            Finding(f"{where}: embedding_size", f"{raw['embedding_size']} differs from hidden_size", "Not supported")
        )
    if task == "classify":
        labels = raw.get("id2label")
        values["classes"] = len(labels) if labels else raw.get("num_labels", 2)


def _window(raw: Mapping[str, Any], where: str, layers: Any, findings: list[Finding]) -> int | None:
    """Qwen's window: on every layer, on none, or (refused) on some."""
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    kinds = raw.get("layer_types")
    first = raw.get("max_window_layers", 28)
    wrong = {"sliding_window": window} if window is not None and type(window) is not int else {}
    if window is not None and kinds is None and type(first) is not int:
        wrong["max_window_layers"] = first
    findings += [Finding(f"{where}: {key}", f"{value!r} is no whole number") for key, value in wrong.items()]
    if kinds is not None and (not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds)):
        findings.append(Finding(f"{where}: layer_types", f"{kinds!r} is no list of names"))
        return None
    if wrong:
        return None
    if kinds is None and window is not None and isinstance(layers, int):
        kinds = ["full_attention"] * (first > 0) + ["sliding_attention"] * (first < layers)
    different = set(kinds or ["full_attention"])
    if different == {"full_attention"}:
        return None
    if different == {"sliding_attention"} and window is not None:
        return window
    findings.append(
        Finding(
            f"{where}: layer_types",
            f"{', '.join(sorted(different))} with use_sliding_window {raw.get('use_sliding_window', False)}",
            "All layers must have the window, or none",
        )
    )
    return None


def to_hf(
    config: ModelConfig, task: str, *, family: str | None = None, kept: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], HfConfig]:
    """config.json for a model of ours, and how it reads back.

    family  `model_type` to write; default: the first that computes the same
    kept    fields of the config.json that the model came from
    Raises ConfigError with what stands against each family where none fits.
    """
    against: dict[str, list[str]] = {}
    for name in [family] if family else FAMILIES:
        if name not in FAMILIES:
            raise ConfigError(findings=[Finding("model_type", f"{name!r} is not known", f"Known: {', '.join(FAMILIES)}")])
        if task not in FAMILIES[name].tasks:
            against[name] = [f"it has no {task} head"]
            continue
        raw = _write(config, task, name, kept or {})
        try:
            back = from_hf(raw, f"{name} config.json", task)
        except ConfigError as error:
            against[name] = [f"{finding.where.rpartition(': ')[2]}: {finding.what}" for finding in error.findings]
            continue
        against[name] = _differences(config, back.config, task)
        if not against[name]:
            return raw, HfConfig(name, task, back.config, kept or {}, tuple(_training_notes(config, back.config, name)))
    nearest = sorted(against, key=lambda name: (task not in FAMILIES[name].tasks, len(against[name])))[:3]
    raise ConfigError(
        "no Hugging Face family computes this model",
        [Finding(name, "; ".join(against[name])) for name in nearest],
    )


def _write(config: ModelConfig, task: str, name: str, kept: Mapping[str, Any]) -> dict[str, Any]:
    family = FAMILIES[name]
    key, known = family.activation
    spelled = {ours: theirs for theirs, ours in reversed(list(known.items()))}
    raw: dict[str, Any] = {**kept, "architectures": [family.tasks[task]], "model_type": name}
    for ours, theirs in family.fields.items():
        raw[theirs] = getattr(config, ours)
    raw[key] = spelled.get(config.activation, config.activation)
    if "kv_heads" in family.fields:
        raw["num_key_value_heads"] = config.kv_heads or config.heads
        raw["head_dim"] = config.head_dim or config.width // config.heads
    if config.positions == "rope":
        write_rope(config, raw)
    if name in _WINDOWED:
        kind = "full_attention" if config.sliding_window is None else "sliding_attention"
        raw["use_sliding_window"] = config.sliding_window is not None
        raw["sliding_window"], raw["max_window_layers"] = config.sliding_window, 0 if config.sliding_window else config.layers
        raw["layer_types"] = [kind] * config.layers
    if config.experts:  # a family that has no dense layers has one name for the width
        raw["moe_intermediate_size" if "moe_ffn" in family.fields else "intermediate_size"] = config.moe_ffn or config.ffn
    if name == "gpt2":
        raw["embd_pdrop"] = config.dropout
    if name == "roberta":
        raw["max_position_embeddings"] = config.max_len + config.position_offset
        raw["pad_token_id"] = config.position_offset - 1 if config.position_offset else None
    if task == "classify" and len(raw.get("id2label") or ()) != config.classes:
        raw["id2label"] = {str(index): f"LABEL_{index}" for index in range(config.classes or 0)}
        raw["label2id"] = {f"LABEL_{index}": index for index in range(config.classes or 0)}
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):  # else transformers fills in those of its own model
        raw.setdefault(token, None)
    return raw


def _plain(config: ModelConfig, task: str) -> dict[str, Any]:
    """Numbers that the mathematics sees: defaults resolved, fields without effect on this task left out."""
    values = config.model_dump()
    values["kv_heads"] = config.kv_heads or config.heads
    values["head_dim"] = config.head_dim or config.width // config.heads
    values["moe_ffn"] = (config.moe_ffn or config.ffn) if config.experts else None
    if config.experts:
        values["ffn"] = None  # no dense layer has it
    values["balance"] = "bias" if config.balance == "bias" else "loss"  # that of a loss, or of none, is no part of inference
    scaling = config.rope_scaling or RopeScaling()
    values["rope_scaling"] = None if scaling.rope_type == "default" else scaling.model_dump()
    if scaling.rope_type == "dynamic":  # its stretch begins where the original length ends, which theirs calls max_len
        values["max_len"] = values["rope_scaling"]["original_max_position_embeddings"] = (
            scaling.original_max_position_embeddings or config.max_len
        )
    without = {"classes", "pooler"} if task != "classify" else {"tied", "head_bias", "head_transform"}
    if config.positions != "rope":
        without |= {"rope_theta", "rope_scaling"}
    return {key: value for key, value in values.items() if key not in without}


def _differences(ours: ModelConfig, back: ModelConfig, task: str) -> list[str]:
    mine, theirs = _plain(ours, task), _plain(back, task)
    return [
        f"{key} {mine[key]} would become {theirs.get(key)}"
        for key in mine
        if key not in _UNSEEN and mine[key] != theirs.get(key)
    ]


def _training_notes(ours: ModelConfig, back: ModelConfig, name: str) -> list[str]:
    lost = [key for key in ("dropout", "attention_dropout") if getattr(ours, key) != getattr(back, key)]
    return [f"{name} has no {key} ({getattr(ours, key)}); it plays no part outside of training" for key in lost]
