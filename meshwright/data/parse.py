"""Raw pieces of files become documents. Runs in the worker processes, so it imports nothing heavy.

A JSONL row ends at byte 0A only; a CR before it is white space; other line separators of Unicode are text. NUL is kept
where the format can hold it: in plain text as it is, in JSON as \\u0000 (a raw control byte is an error of the row).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.data import encoding
from meshwright.errors import Finding

__all__ = ["BadRow", "Document", "Keys", "Piece", "parse"]

SHOWN_KEYS = 12
SKIP_FIX = "Mend the row, or set data.on_bad_row: skip to leave such rows out and count them"


@dataclass(frozen=True)
class Keys:
    """Names of the values of a row: text, and label where there is one."""

    text: str = "text"
    label: str | None = None


@dataclass(frozen=True)
class Piece:
    """Consecutive bytes of one file, cut so that they can be parsed alone.

    kind    "lines": JSONL, whole lines · "text": a plain document or a part of one · "rows": JSON list of rows read
            elsewhere, each [number, text, label, prompt, response], or [number, what is wrong, what to do (may be left out)]
    file    its name in messages
    unit    "line" or "row": what `line` counts, from 1
    offset  byte offset of the data in the (decompressed) file
    first, last   whether the data begin and end a document; both true except in parts of a long plain document
    """

    kind: str
    file: str
    data: bytes
    codec: str = "utf-8"
    unit: str = "line"
    line: int = 1
    offset: int = 0
    first: bool = True
    last: bool = True


@dataclass(frozen=True, slots=True)
class Document:
    """One text, or a prompt with its response. `line` is the physical line (or row) where it begins.

    first, last   false where a plain document longer than the reader holds at a time comes in parts
    """

    file: str
    line: int
    text: str
    label: str | int | None = None
    prompt: str | None = None
    first: bool = True
    last: bool = True

    @property
    def empty(self) -> bool:
        """Nothing to learn from. In rows only the empty string; a whole text file also when it is blank."""
        return not self.text


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used. `fatal`: whatever the policy, because part of its document was used already."""

    file: str
    unit: str
    line: int
    what: str
    fix: str = SKIP_FIX
    fatal: bool = False

    def finding(self) -> Finding:
        return Finding(f"{self.file}, {self.unit} {self.line}", self.what, self.fix)


def parse(piece: Piece, keys: Keys) -> Iterator[Document | BadRow]:
    """Documents and bad rows of a piece, in their order. Blank lines are counted and left out."""
    if piece.kind == "lines":
        yield from _lines(piece, keys)
    elif piece.kind == "text":
        yield _text(piece)
    else:
        for number, *values in json.loads(piece.data):
            if len(values) < 4:
                yield BadRow(piece.file, piece.unit, number, *values)
            else:
                yield _document(piece, number, keys, *values)


def _text(piece: Piece) -> Document | BadRow:
    try:
        text = piece.data.decode(piece.codec)
    except UnicodeDecodeError as error:
        return _bad_bytes(piece, error)
    if piece.first and piece.last and not text.strip():
        text = ""
    return Document(piece.file, piece.line, text, first=piece.first, last=piece.last)


def _bad_bytes(piece: Piece, error: UnicodeDecodeError) -> BadRow:
    line = piece.data.count(b"\n", 0, error.start)
    begin = piece.data.rfind(b"\n", 0, error.start) + 1
    in_line = error.start - begin if begin or piece.first else None
    what = encoding.bad_byte(piece.data[error.start], piece.codec, in_line, piece.offset + error.start)
    fatal = not (piece.first and piece.last)
    return BadRow(piece.file, piece.unit, piece.line + line, what, encoding.OFFER, fatal)


def _lines(piece: Piece, keys: Keys) -> Iterator[Document | BadRow]:
    try:
        lines: list[str] | list[bytes] = piece.data.decode(piece.codec).split("\n")
    except UnicodeDecodeError:
        lines = piece.data.split(b"\n")
    number, offset = piece.line, piece.offset
    for line in lines:
        if isinstance(line, str):
            text = line
        else:
            start, offset = offset, offset + len(line) + 1
            try:
                text = line.decode(piece.codec)
            except UnicodeDecodeError as error:
                what = encoding.bad_byte(line[error.start], piece.codec, error.start, start + error.start)
                yield BadRow(piece.file, "line", number, what, encoding.OFFER)
                number += 1
                continue
        if text.strip(" \t\r"):
            yield _json_row(piece, number, text, keys)
        number += 1


def _json_row(piece: Piece, number: int, line: str, keys: Keys) -> Document | BadRow:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return BadRow(piece.file, "line", number, f"not valid JSON: {error.msg}, column {error.pos + 1}")
    except RecursionError:
        return BadRow(piece.file, "line", number, "JSON that is nested too deeply to be a row")
    except ValueError:
        return BadRow(piece.file, "line", number, "a number with too many digits")
    if not isinstance(row, dict):
        what = f"the row is {_kind(row)}, not an object"
        return BadRow(piece.file, "line", number, what, "Each line holds one object {...}")
    if keys.text in row:
        text, prompt, response = row[keys.text], None, None
    elif "prompt" in row and "response" in row:
        text, prompt, response = None, row["prompt"], row["response"]
    else:
        fix = "Set text_key to the key that holds the text, or use rows with prompt and response"
        return BadRow(piece.file, "line", number, f"no key {keys.text!r}; the keys are {shown(row)}", fix)
    if keys.label is not None and keys.label not in row:
        fix = "Set label_key to the key that holds the class"
        return BadRow(piece.file, "line", number, f"no key {keys.label!r} for the label; the keys are {shown(row)}", fix)
    label = row[keys.label] if keys.label is not None else None
    return _document(piece, number, keys, text, label, prompt, response)


def shown(names: Any) -> str:
    """Keys or columns for a message: a few, none of them long."""
    cut = [repr(name if len(name) <= 40 else name[:40] + "...") for name in list(names)[:SHOWN_KEYS]]
    more = len(names) - len(cut)
    return (", ".join(cut) or "none at all") + (f" and {more} more" if more else "")


def _document(
    piece: Piece, number: int, keys: Keys, text: Any, label: Any, prompt: Any = None, response: Any = None
) -> Document | BadRow:
    """Null counts as empty text. A row with a prompt is empty when its response is."""
    paired = prompt is not None or response is not None
    named = [("prompt", prompt), ("response", response)] if paired else [(keys.text, text)]
    for key, value in named:
        if value is None or isinstance(value, str):
            if value is None or value.isascii() or (problem := _surrogate(value)) is None:
                continue
            return BadRow(piece.file, piece.unit, number, f"{key!r} has {problem}")
        return BadRow(piece.file, piece.unit, number, f"{key!r} is {_kind(value)}, not a string")
    if keys.label is not None:
        problem = label_problem(label)
        if problem:
            return BadRow(piece.file, piece.unit, number, f"label {keys.label!r} is {problem}")
        label = int(label) if isinstance(label, float) else str(label).lower() if isinstance(label, bool) else label
    if paired:
        return Document(piece.file, number, response or "", label, prompt or "")
    return Document(piece.file, number, text or "", label)


def _surrogate(value: str) -> str | None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"half of a surrogate pair, U+{ord(value[error.start]):04X}, at character {error.start + 1}"
    return None


def _kind(value: Any) -> str:
    kinds = ((bool, "a boolean"), (list, "an array"), (dict, "an object"), (str, "a string"), (type(None), "null"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "a number")


def label_problem(label: Any) -> str | None:
    """Why this value cannot be a label, or None. Whole numbers may be written as floats (a column with nulls)."""
    if label is None or label == "" or label != label:  # a null in a column of numbers may come as NaN
        return "empty"
    if isinstance(label, float):
        return None if label.is_integer() else "a fraction, not a class"
    if isinstance(label, str):
        return _surrogate(label)
    return None if isinstance(label, int) else f"{_kind(label)}, not a string or a whole number"
