"""From a YAML file and `--a.b=v` flags to a checked `Config` that knows where each value came from.

Order of precedence: flag, file, recipe, default.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from meshwright.config.check import check
from meshwright.config.recipes import recipe
from meshwright.config.schema import Config
from meshwright.config.yaml_source import YamlSource, parse_scalar, read_yaml
from meshwright.errors import ConfigError, Finding, UserError, counted

__all__ = ["Resolved", "json_schema", "load_config", "resolve"]


@dataclass(frozen=True)
class Resolved:
    config: Config
    origin: dict[str, str]
    """Dotted key -> 'file:line', '--flag', 'recipe NAME'; keys that are absent are defaults."""

    def table(self) -> Iterator[tuple[str, str, str]]:
        """(key, value as JSON, origin) for every resolved value."""
        for key, value in flatten(self.config.model_dump(mode="json")):
            yield key, json.dumps(value, ensure_ascii=False), self.origin.get(key) or self._inherited(key)

    @contextlib.contextmanager
    def placing(self) -> Iterator[None]:
        """Around checks that know keys alone: what they find wrong is told with the file and line, or the flag, of the key."""
        try:
            yield
        except UserError as error:
            if not any(_is_key(finding.where) for finding in error.findings):
                raise
            raise type(error)(findings=[self._placed(finding) for finding in error.findings]) from None

    def _placed(self, finding: Finding) -> Finding:
        if not _is_key(finding.where):
            return finding
        return Finding(_place(finding.where, self.origin, ""), finding.what, finding.fix)

    def _inherited(self, key: str) -> str:
        """A flag or a recipe that gave a whole section or list gave what is inside; a line of a file says nothing of it."""
        while "." in key:
            key = key.rsplit(".", 1)[0]
            if self.origin.get(key, "").startswith(("--", "recipe ")):
                return self.origin[key]
        return "default"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Resolved:
    """Read `path`, apply flags such as `--train.lr=3e-4`, check everything. Raises ConfigError with all findings at once."""
    return resolve(read_yaml(Path(path)), str(path), overrides)


def resolve(source: YamlSource, file: str, overrides: Sequence[str] = ()) -> Resolved:
    values = copy.deepcopy(source.values)
    origin = {key: f"{file}:{line}" for key, line in source.lines.items()}
    findings = _apply_overrides(values, origin, overrides)
    findings += [Finding(_place(f.where, origin, file), f.what, f.fix) for f in _apply_recipe(values, origin)]
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        findings += [_finding(e, origin, file) for e in error.errors()]
        raise ConfigError(findings=findings) from None
    findings += [Finding(_place(f.where, origin, file), f.what, f.fix) for f in check(config)]
    if findings:
        raise ConfigError(findings=findings)
    return Resolved(config, origin)


def json_schema() -> dict[str, Any]:
    """JSON schema of a config file, for editors."""
    return Config.model_json_schema()


def flatten(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every leaf; empty containers are leaves."""
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from flatten(value, f"{prefix}{key}.")
    elif isinstance(values, list) and values and any(isinstance(v, dict) for v in values):
        for i, value in enumerate(values):
            yield from flatten(value, f"{prefix}{i}.")
    else:
        yield prefix[:-1], values


def _apply_overrides(values: dict[str, Any], origin: dict[str, str], overrides: Sequence[str]) -> list[Finding]:
    findings = []
    seen: dict[str, str] = {}
    for flag in overrides:
        key, equals, text = flag.removeprefix("--").partition("=")
        if not flag.startswith("--") or not equals or not key:
            findings.append(Finding(flag, "is not of the form --section.key=value"))
            continue
        if key in seen and seen[key] != text:
            findings.append(Finding(f"--{key}", f"is given twice, as {seen[key]!r} and {text!r}", "Keep one"))
        seen[key] = text
        try:
            value = parse_scalar(text)
        except ValueError as error:
            findings.append(Finding(f"--{key}", f"value {text!r} cannot be read: {error}"))
            continue
        problem = _put(values, key.split("."), value)
        if problem:
            findings.append(Finding(f"--{key}", problem))
        for stale in [k for k in origin if k == key or k.startswith(f"{key}.")]:
            del origin[stale]
        origin[key] = f"--{key}"
    return findings


def _put(values: Any, path: list[str], value: Any) -> str | None:
    """Set a nested value in dicts and lists (a number is a list index; the next one, or 0 where there is no list yet, adds an
    entry). Returns what is wrong, if anything."""
    for i, step in enumerate(path):
        last = i == len(path) - 1
        if isinstance(values, list):
            if step == str(len(values)):
                values.append(None if last else {})
            if not step.isdigit() or int(step) >= len(values):
                have = counted(len(values), "entry", "entries")
                return f"{'.'.join(path[:i])} has {have}, numbered from 0; {step!r} is none of them"
            if last:
                values[int(step)] = value
            else:
                values = values[int(step)]
        elif isinstance(values, dict):
            if last:
                values[step] = value
            else:
                if values.get(step) is None:
                    values[step] = [] if path[i + 1].isdigit() else {}
                values = values[step]
        else:
            return f"{'.'.join(path[:i])} is a single value and has no {step!r} inside"
    return None


def _apply_recipe(values: dict[str, Any], origin: dict[str, str]) -> list[Finding]:
    model = values.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("recipe"), str):
        return []
    try:
        base = recipe(model["recipe"])
    except ConfigError as error:
        return list(error.findings)
    for key in base:
        if key not in model:
            origin[f"model.{key}"] = f"recipe {model['recipe']}"
    values["model"] = {**base, **model}
    return []


def _place(key: str, origin: dict[str, str], file: str) -> str:
    """`file:line: key` or `--key`, whichever set the value; the nearest parent's line for a missing key, and
    what set a key inside it for a section that only a flag made."""
    probe = key
    while probe and probe not in origin:
        probe = probe.rpartition(".")[0]
    inside = (origin[set_by] for set_by in origin if set_by.startswith(f"{key}."))  # a flag may have made the section
    place = origin[probe] if probe else next(inside, file)
    return place if place == f"--{key}" else f"{place}: {key}" if place else key


def _is_key(text: str) -> bool:
    """Whether it is a key of a config, not a flag, nor a file such as train.jsonl."""
    return ".".join(part for part in text.split(".") if not part.isdigit()) in set(_all_keys())


_SHAPES = {
    "model_type": ("is no section", "Write `key: value` lines below it, or leave it out"),
    "list_type": ("is no list", "Put it in [ ], or begin each entry below it with `- `"),
    "dict_type": ("is no mapping", "Write `key: value` lines below it, or leave it out"),
}
"""What is wrong with a value of another shape, and what to do, by pydantic's name of the error."""


def _finding(error: Any, origin: dict[str, str], file: str) -> Finding:
    path = [str(step) for step in error["loc"]]
    key = ".".join(path)
    place = _place(key, origin, file)
    if error["type"] == "extra_forbidden":
        names = _names_at(path[:-1])
        near = difflib.get_close_matches(path[-1], names, n=1)
        if not near:
            near = [full for full in _all_keys() if full.rpartition(".")[2] == path[-1]][:1]
        fix = f"Did you mean {near[0]!r}?" if near else f"Known here: {', '.join(sorted(names))}"
        return Finding(place, "unknown key", fix)
    if error["type"] in _SHAPES:
        return Finding(place, *_SHAPES[error["type"]])
    shown = "" if isinstance(error["input"], (dict, list)) else f", not {error['input']!r}"
    return Finding(place, f"{error['msg'][:1].lower()}{error['msg'][1:]}{shown}")


def _names_at(path: list[str]) -> list[str]:
    fields: Any = Config
    for step in path:
        if step.isdigit():
            continue
        fields = (
            next(iter(_sections(fields.model_fields[step].annotation)), None)
            if fields and step in fields.model_fields
            else None
        )
    return list(fields.model_fields) if fields else []


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _sections(inner)


def _all_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for section in _sections(field.annotation):
            yield from _all_keys(section, f"{prefix}{name}.")
