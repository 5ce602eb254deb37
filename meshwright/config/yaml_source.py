"""YAML to plain values, with the line of every key, and no key twice."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from meshwright.errors import ConfigError, Finding

__all__ = ["YamlSource", "parse_scalar", "read_yaml"]


DEEPEST, MOST_KEYS = 20, 10_000
"""Levels and keys that no config has."""

_NO_VALUE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""What the library raises for text that only looks like a date or a number, or under a tag that does not fit."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `3e-4` as a string and `on` as a truth value; people mean a number and a word."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in ("tag:yaml.org,2002:float", "tag:yaml.org,2002:bool")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


@dataclass
class YamlSource:
    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)
    """Dotted key -> line, from 1."""


def parse_scalar(text: str) -> Any:
    """The value of `--key=text`, read as YAML, so that lists and numbers can be given. Raises ValueError."""
    try:
        return yaml.load(text, Loader=_Loader)  # a subclass of SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(_reason(error)) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except _NO_VALUE as error:
        raise ValueError(_unfit(error)) from None


def read_yaml(path: Path) -> YamlSource:
    """Raises ConfigError with file and line: unreadable, not UTF-8, not YAML, a key twice, not a mapping."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(findings=[Finding(str(path), "there is no such file")]) from None
    except OSError as error:
        raise ConfigError(findings=[Finding(str(path), f"cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(findings=[Finding(str(path), f"is not UTF-8 at byte {error.start}", "Save it as UTF-8")]) from None
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return YamlSource({})
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(findings=[Finding(str(path), "must hold `key: value` lines, not a list or a single value")])
        source = YamlSource({})
        findings: list[Finding] = []
        source.values = _mapping(loader, node, "", source.lines, findings, str(path))
    except yaml.YAMLError as error:
        raise ConfigError(findings=[Finding(_where(path, error), f"is not YAML: {_reason(error)}")]) from None
    except RecursionError:
        raise ConfigError(findings=[Finding(str(path), "is nested too deeply")]) from None
    finally:
        if loader is not None:
            loader.dispose()
    if findings:
        raise ConfigError(findings=findings)
    return source


def _mapping(
    loader: _Loader, node: yaml.MappingNode, prefix: str, lines: dict[str, int], findings: list[Finding], file: str
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    loader.flatten_mapping(node)
    for key_node, value_node in node.value:
        key = str(_constructed(loader, key_node, file))
        dotted = f"{prefix}{key}"
        line = key_node.start_mark.line + 1
        if key in values:
            findings.append(Finding(f"{file}:{line}", f"{dotted} stands twice (first on line {lines[dotted]})", "Keep one"))
        lines[dotted] = line
        values[key] = _value(loader, value_node, dotted, lines, findings, file)
    return values


def _value(loader: _Loader, node: yaml.Node, dotted: str, lines: dict[str, int], findings: list[Finding], file: str) -> Any:
    if dotted.count(".") >= DEEPEST or len(lines) > MOST_KEYS:  # an alias inside itself, or aliases that multiply
        where = f"{file}:{node.start_mark.line + 1}"
        raise ConfigError(findings=[Finding(where, f"more than {MOST_KEYS} keys or {DEEPEST} levels", "Write aliases out")])
    if isinstance(node, yaml.MappingNode):
        return _mapping(loader, node, f"{dotted}.", lines, findings, file)
    if isinstance(node, yaml.SequenceNode):
        out = []
        for i, item in enumerate(node.value):
            lines[f"{dotted}.{i}"] = item.start_mark.line + 1
            out.append(_value(loader, item, f"{dotted}.{i}", lines, findings, file))
        return out
    return _constructed(loader, node, file)


def _constructed(loader: _Loader, node: yaml.Node, file: str) -> Any:
    try:
        return loader.construct_object(node, deep=True)
    except _NO_VALUE as error:
        what = f"is no value of YAML: {_unfit(error)}"
        raise ConfigError(findings=[Finding(f"{file}:{node.start_mark.line + 1}", what, "Put quotes around a text")]) from None


def _unfit(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else "the text does not fit its tag"


def _reason(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or error)


def _where(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f"{path}:{mark.line + 1}" if mark else str(path)
