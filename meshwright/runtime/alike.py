"""What all ranks of a run must have been started with, by name: settings, code, data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import meshwright
from meshwright.config.load import flatten
from meshwright.config.schema import Config
from meshwright.distributed.agreement import source_digests

__all__ = ["code", "settings"]


def settings(config: Config, plan: Mapping[str, Any] | None) -> dict[str, str]:
    """Every value of the config and of the plan (or of the part that is given), as JSON by its dotted key."""
    values = dict(flatten(config.model_dump(mode="json")))
    values.update(flatten({"plan": plan} if plan is not None else {}))
    return {key: json.dumps(value, ensure_ascii=False) for key, value in values.items()}


def code() -> dict[str, str]:
    """Digests of the source files of this package, and the release of torch."""
    folder = Path(meshwright.__file__).parent
    files = {str(path.relative_to(folder.parent)): path for path in sorted(folder.rglob("*.py"))}
    return {"torch": torch.__version__, **source_digests(files)}
