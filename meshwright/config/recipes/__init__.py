"""Shipped models by name. Every file of this folder maps recipe names to fields of `ModelConfig`."""

from __future__ import annotations

import copy
import difflib
import functools
from importlib.resources import files
from typing import Any

import yaml

from meshwright.errors import ConfigError, Finding

__all__ = ["recipe", "recipes"]


@functools.cache
def _all() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for file in sorted(files(__name__).iterdir(), key=lambda f: f.name):
        if file.name.endswith(".yaml"):
            found.update(yaml.load(file.read_text(encoding="utf-8"), Loader=loader))
    return {name: fields for name, fields in found.items() if not name.startswith("_")}


def recipes() -> list[str]:
    """Names of all recipes, sorted."""
    return sorted(_all())


def recipe(name: str) -> dict[str, Any]:
    """Fields of `ModelConfig` that the recipe sets. Raises ConfigError with the nearest names for an unknown one."""
    known = _all()
    if name not in known:
        near = difflib.get_close_matches(name, known, 3)
        fix = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"Known: {', '.join(sorted(known))}"
        raise ConfigError(findings=[Finding("model.recipe", f"{name!r} is unknown", fix)])
    return copy.deepcopy(known[name])
