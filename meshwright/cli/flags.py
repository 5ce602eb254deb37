"""Hints that name settings of a config file, said with the flags of the command that was called."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.errors import DataError, Finding

__all__ = ["said_as_flags"]

_WORDS = ("format", "encoding")
"""Settings whose names are words too: they are meant where a value follows."""


@contextmanager
def said_as_flags(*settings: str) -> Iterator[None]:
    """Around the work of a command that has a flag for each of `settings` ("text_key": --text-key): "Set text_key to ..." of
    a DataError becomes "Set --text-key to ...", "data.on_bad_row: skip" becomes "--on-bad-row skip"."""
    try:
        yield
    except DataError as error:
        findings = [
            Finding(*(_spoken(text, settings) for text in (found.where, found.what, found.fix))) for found in error.findings
        ]
        raise (DataError(findings=findings) if findings else error) from None


def _spoken(text: str, settings: tuple[str, ...]) -> str:
    for name in settings:
        flag = f"--{name.replace('_', '-')}"
        text = re.sub(rf"(?<![\w.-])(?:data\.)?{name}: (?=\w)", f"{flag} ", text)
        if name not in _WORDS:
            text = re.sub(rf"(?<![\w.-])(?:data\.)?{name}(?!\w)", flag, text)
    return text
