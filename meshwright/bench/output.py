"""The folder of a benchmark's results. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.disk import write_whole, writing

__all__ = ["open_folder", "write_results"]

PROBE = 1 << 16
"""Bytes that must have room before anything is measured."""


def open_folder(out: Path) -> None:
    """Makes the folder that --out names, and sees that it can be written: better now than after the first engine."""
    probe = out / ".probe"
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(bytes(PROBE))
        finally:
            probe.unlink(missing_ok=True)


def write_results(out: Path, values: dict[str, Any], table: str) -> None:
    """results.json and results.md, in the place of those that are there."""
    write_whole(out / "results.json", json.dumps(values, indent=1) + "\n")
    write_whole(out / "results.md", table)
