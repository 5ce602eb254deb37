"""The folder of a benchmark's results. No torch."""

from __future__ import annotations

from pathlib import Path

from meshwright.disk import writing

__all__ = ["open_folder"]

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
