"""Rotary positions in config.json: `rope_theta` + `rope_scaling` (up to 4.x), `rope_parameters` (5.x)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.config.schema import ModelConfig
from meshwright.errors import Finding

__all__ = ["read_rope", "write_rope"]

_DEFAULT_THETA = 10000.0
_THETAS = {"mixtral": 1e6}
"""Of families that have another default."""
_USED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
"""rope_type -> the numbers that `transformers` computes it from."""
_NEEDED = {"linear": ("factor",), "dynamic": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
_ALL = frozenset(key for keys in _USED.values() for key in keys)


def read_rope(raw: Mapping[str, Any], where: str, values: dict[str, Any], findings: list[Finding], notes: list[str]) -> None:
    """Put `rope_theta` and `rope_scaling` into `values` (fields of ModelConfig)."""
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    block, other = raw.get(key) or {}, raw.get("rope_scaling") or {}
    if not isinstance(block, Mapping) or any(isinstance(value, Mapping) for value in block.values()):
        findings.append(
            Finding(f"{where}: {key}", "is not one table of numbers", "Layers with different positions are not supported")
        )
        return
    if key == "rope_parameters" and other and _scaling(other) != _scaling(block):
        findings.append(Finding(f"{where}: rope_scaling", "says something else than rope_parameters", "Keep one of them"))
        return
    if wrong := _no_numbers(raw, key, block):
        findings += [Finding(f"{where}: {name}", f"{value!r} is no number") for name, value in wrong.items()]
        return
    thetas = {float(t) for t in (block.get("rope_theta"), raw.get("rope_theta")) if t is not None}
    if len(thetas) > 1:
        findings.append(
            Finding(f"{where}: rope_theta", f"{raw['rope_theta']} here, {block['rope_theta']} in {key}", "Keep one")
        )
    values["rope_theta"] = thetas.pop() if thetas else _THETAS.get(str(raw.get("model_type")), _DEFAULT_THETA)
    if (block.get("partial_rotary_factor") or 1.0) != 1.0:
        findings.append(
            Finding(
                f"{where}: {key}.partial_rotary_factor", f"{block['partial_rotary_factor']} is not supported", "Only 1.0 is"
            )
        )
    kind, numbers = _scaling(block)
    if not isinstance(kind, str) or kind not in _USED:
        findings.append(Finding(f"{where}: {key}.rope_type", f"{kind!r} is not known", f"Known: {', '.join(_USED)}"))
        return
    strange = sorted(k for k in numbers if k not in _ALL)
    if strange:
        findings.append(Finding(f"{where}: {key}", f"{', '.join(strange)} is not known", "Remove what has no effect"))
    idle = sorted(k for k in numbers if k in _ALL and k not in _USED[kind])
    if idle:
        notes.append(f"{key}: {', '.join(idle)} has no effect with rope_type {kind} and is left out")
    for number in _NEEDED.get(kind, ()):
        if numbers.get(number) is None:
            findings.append(Finding(f"{where}: {key}.{number}", "is missing", f"rope_type {kind} needs it"))
    values["rope_scaling"] = _resolved(raw, kind, numbers, values.get("max_len"), notes)


def _no_numbers(raw: Mapping[str, Any], key: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """What is something else where `transformers` computes with a number; text such as "2" is no number there either."""
    outer = ("rope_theta", "original_max_position_embeddings")
    found = {name: raw[name] for name in outer if raw.get(name) is not None}
    found |= {f"{key}.{name}": block[name] for name in (*_ALL, *outer) if block.get(name) is not None and name != "truncate"}
    return {name: value for name, value in found.items() if isinstance(value, bool) or not isinstance(value, int | float)}


def _scaling(block: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(type, numbers that are given) of either spelling."""
    kind = block.get("rope_type") or block.get("type") or "default"
    apart = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    return kind, {key: value for key, value in block.items() if key not in apart and value is not None}


def _resolved(
    raw: Mapping[str, Any], kind: str, numbers: dict[str, Any], max_len: Any, notes: list[str]
) -> dict[str, Any] | None:
    if kind == "default":
        return None
    used = {key: numbers[key] for key in _USED[kind] if key in numbers}
    if "original_max_position_embeddings" in _USED[kind]:
        outer = raw.get("original_max_position_embeddings")
        used["original_max_position_embeddings"] = outer or used.get("original_max_position_embeddings") or max_len
    if kind == "yarn" and isinstance(max_len, int):
        ratio = max_len / used["original_max_position_embeddings"]
        factor = used.setdefault("factor", ratio)
        if factor != ratio:
            notes.append(
                f"yarn factor {factor} is used; transformers before 5 takes max_position_embeddings / "
                f"original_max_position_embeddings = {ratio} instead"
            )
    return {"rope_type": kind, **used}


def write_rope(config: ModelConfig, raw: dict[str, Any]) -> None:
    """The older spelling, which every version reads. Original lengths stay inside of the block."""
    raw.pop("rope_parameters", None)
    raw.pop("original_max_position_embeddings", None)
    raw["rope_theta"], raw["rope_scaling"] = config.rope_theta, None
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type == "default":
        return
    values = scaling.model_dump(exclude_none=True)
    raw["rope_scaling"] = {"rope_type": scaling.rope_type, **{k: values[k] for k in _USED[scaling.rope_type] if k in values}}
    if scaling.rope_type == "dynamic" and scaling.original_max_position_embeddings:
        raw["max_position_embeddings"] = scaling.original_max_position_embeddings
