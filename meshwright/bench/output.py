"""The folder of a benchmark's results. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from meshwright.errors import DeviceError, Finding

__all__ = ["open_folder", "write_whole", "writing"]

PROBE = 1 << 16
"""Bytes that must have room before anything is measured."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what writes `path`. Raises DeviceError where it cannot be written."""
    try:
        yield
    except OSError as error:
        fix = "Free space, or name another place"
        raise DeviceError(findings=[Finding(str(path), f"cannot be written: {error.strerror}", fix)]) from None


def write_whole(path: Path, text: str) -> None:
    """Puts `text` in the place of the file, of which a full disk or a kill leaves the old text or the new one."""
    part = path.resolve().with_name(f"{path.name}.part")
    with writing(path):
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path.resolve())
        finally:
            part.unlink(missing_ok=True)


def open_folder(out: Path) -> None:
    """Makes the folder that --out names, and sees that it can be written: better now than after the first engine."""
    probe = out / ".probe"
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(bytes(PROBE))
        finally:
            probe.unlink(missing_ok=True)
