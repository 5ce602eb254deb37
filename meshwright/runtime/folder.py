"""The run folder: config.yaml, plan.json, metrics.jsonl, report.html, logs/, checkpoints/, data/. No torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.config.load import Resolved, load_config
from meshwright.disk import write_whole
from meshwright.errors import DeviceError, Finding

__all__ = ["RunFolder"]


class RunFolder:
    """Names of what is in a run folder, and its making."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    def create(self, *, resume: bool) -> None:
        """Make the folder. A new run refuses one that is not empty; a resumed one must be there.

        A `data/` folder alone does not count: it is what an earlier, interrupted start prepared.
        """
        try:
            if resume:
                if not self.config.is_file():
                    raise DeviceError(
                        findings=[Finding(str(self.path), "is no run folder: it has no config.yaml", "Name a run")]
                    )
            elif self.path.exists() and (found := self._content()):
                raise DeviceError(
                    findings=[
                        Finding(
                            str(self.path),
                            f"is not empty ({found})",
                            "Resume it with --resume latest, choose another --run.dir, or remove it",
                        )
                    ]
                )
            for folder in (self.path, self.logs, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path, os.W_OK):
                raise PermissionError(13, "Permission denied")
        except (PermissionError, NotADirectoryError, FileExistsError, OSError) as error:
            raise DeviceError(
                findings=[Finding(str(self.path), f"cannot be used: {error.strerror}", "Choose another --run.dir")]
            ) from None

    def withdraw(self) -> None:
        """Take back what `create` made, where nothing has been put into it: prepared data stays for the next try."""
        with contextlib.suppress(OSError):
            (self.data / "corpus.json").unlink()  # it only says where the data is, and is written anew
        for folder in (self.data, self.logs, self.checkpoints, self.path):
            with contextlib.suppress(OSError):  # not there, or not empty
                folder.rmdir()

    def _content(self) -> str:
        if not self.path.is_dir():
            return "it is a file"
        names = sorted(p.name for p in self.path.iterdir() if p.name != "data" and not (p.is_dir() and not any(p.iterdir())))
        return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")

    def write_config(self, resolved: Resolved) -> None:
        """The resolved values as YAML, each with where it came from as a comment."""
        lines = ["# Every value of this run and where it came from."]
        _emit(resolved.config.model_dump(mode="json"), "", 0, {key: place for key, _, place in resolved.table()}, lines)
        write_whole(self.config, "\n".join(lines) + "\n")

    def read_config(self) -> Resolved:
        return load_config(self.config)

    def write_result(self, values: Mapping[str, Any]) -> None:
        write_whole(self.result, json.dumps(values, indent=2, ensure_ascii=False) + "\n")

    def read_result(self) -> dict[str, Any]:
        try:
            return json.loads(self.result.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}


def _emit(values: Mapping[str, Any], prefix: str, depth: int, places: Mapping[str, str], lines: list[str]) -> None:
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            lines.append(f"{'  ' * depth}{key}:")
            _emit(value, f"{dotted}.", depth + 1, places, lines)
        else:
            place = places.get(dotted) or places.get(f"{dotted}.0.path") or "default"
            lines.append(f"{'  ' * depth}{key}: {json.dumps(value, ensure_ascii=False)}  # {place}")
