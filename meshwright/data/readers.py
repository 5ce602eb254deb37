"""Files become pieces: bytes cut where a row or a document ends, so that any process can parse them.

Memory stays bounded by the longest row (MAX_ROW at most), never by the file. How text files become documents:

- `.txt`: one file is one document, up to WHOLE bytes. A longer file is cut at the first blank line after every CUT bytes; a
  stretch without blank lines stays one document of any length (it is handed on in parts).
- `.jsonl`, `.csv`, `.parquet`: one row is one document. The row has the text key, or `prompt` and `response`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from meshwright.data import encoding
from meshwright.data.parse import Document, Keys, Piece, parse
from meshwright.data.sources import Entry, find
from meshwright.data.streams import BLOCK, Meter, blocks
from meshwright.data.tables import csv_pieces, parquet_pieces, row_pieces
from meshwright.errors import DataError

if TYPE_CHECKING:
    from meshwright.config.schema import Source

__all__ = ["documents", "keys_of", "pieces"]

WHOLE = 1 << 20
CUT = 1 << 16
MAX_ROW = 1 << 28
"""Bytes of the longest JSONL line; a file without line breaks is most likely no JSONL."""

BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")


def documents(source: Source, on_bad_row: str = "stop", entries: Sequence[Entry] | None = None) -> Iterator[Document]:
    """Every document of a source in order, as a stream. A long text file's document may come in parts (`Document.last`).

    on_bad_row   "stop" raises DataError at the first bad row, "skip" leaves bad rows out
    entries      the files to read; default: all that `find` finds
    """
    if entries is None:
        entries = find([source])[0]
    for entry in entries:
        for piece in pieces(entry, source):
            for item in parse(piece, keys_of(source)):
                if isinstance(item, Document):
                    yield item
                elif item.fatal or on_bad_row == "stop":
                    raise DataError(findings=[item.finding()])


def keys_of(source: Source) -> Keys:
    return Keys(source.text_key, source.label_key)


def pieces(entry: Entry, source: Source, meter: Meter | None = None) -> Iterator[Piece]:
    """The file's pieces, in order. Raises DataError for a file that cannot be read as a whole.

    meter: counts bytes read on disk.
    """
    meter = meter if meter is not None else Meter()
    if entry.format == "parquet":
        yield from parquet_pieces(entry, keys_of(source), meter)
    elif entry.format in ("txt", "jsonl", "csv"):
        stream = blocks(entry.path, meter)
        head = next(stream, b"")
        skip = encoding.skip_mark(head[:1024], source.encoding, entry.name)
        codec = _codec(entry, source)
        stream = chain([head[skip:]] if head[skip:] else [], stream)
        if entry.format == "csv":
            yield from csv_pieces(stream, entry.name, codec, skip, keys_of(source))
        else:
            yield from (line_pieces if entry.format == "jsonl" else text_pieces)(stream, entry.name, codec, skip)
    else:
        from meshwright.data import corpus

        rows = ([line, text, None, None, None] for line, text in corpus.documents(entry.path, entry.format))
        yield from row_pieces(rows, entry.name, "line")
    meter.finish(entry.size)


def _codec(entry: Entry, source: Source) -> str:
    if source.encoding == encoding.AUTO:
        return encoding.decide(lambda: blocks(entry.path), entry.name)
    return "utf-8" if encoding.is_utf8(source.encoding) else source.encoding


def line_pieces(stream: Iterator[bytes], file: str, codec: str, offset: int = 0) -> Iterator[Piece]:
    """JSONL in pieces of whole lines, about a block each. `offset`: bytes of the file before the stream."""
    parts: list[bytes] = []
    have, line = 0, 1
    for block in stream:
        end = block.rfind(b"\n") + 1
        if not end:
            have += len(block)
            parts = [] if have > MAX_ROW else [*parts, block]
            continue
        data = b"".join([*parts, block[:end]])
        if have > MAX_ROW:
            yield _too_long(file, line)
            begin = block.find(b"\n") + 1
            data, offset, line = block[begin:end], offset + have + begin, line + 1
        if data:
            yield Piece("lines", file, data, codec, line=line, offset=offset)
        offset += len(data)
        line += data.count(b"\n")
        parts, have = [block[end:]], len(block) - end
    if have > MAX_ROW:
        yield _too_long(file, line)
    elif have:
        yield Piece("lines", file, b"".join(parts), codec, line=line, offset=offset)


def _too_long(file: str, line: int) -> Piece:
    what = f"longer than {MAX_ROW >> 20} MiB without a line break, so this is no JSONL row"
    return next(row_pieces(iter([[line, what]]), file, "line"))


def text_pieces(stream: Iterator[bytes], file: str, codec: str, offset: int = 0) -> Iterator[Piece]:
    """A text file as whole documents, or as parts of one where it is longer than a block without a blank line."""
    cutter = _TextCutter(file, codec, offset)
    held = b""
    whole = True
    for block in stream:
        held += block
        whole = whole and len(held) <= WHOLE
        if whole:
            continue
        start = 0
        while (cut := cutter.cut(held, start)) is not None:
            end, last = cut
            yield cutter.take(held[start:end], last)
            start = end
        held = held[start:]
    if held or not cutter.first:
        yield cutter.take(held, True)


class _TextCutter:
    """Where documents and parts of documents end, and the position of each in the file."""

    def __init__(self, file: str, codec: str, offset: int):
        self.file, self.codec = file, codec
        self.offset, self.line = offset, 1
        self.first = True

    def cut(self, held: bytes, start: int) -> tuple[int, bool] | None:
        """(end of what to take from `start`, whether a document ends there), or None to wait for more."""
        match = BLANK_LINES.search(held, start + CUT if self.first else start)
        if match and match.end() < len(held):
            return match.end(), True
        if len(held) - start <= BLOCK + CUT:  # a blank line may be yet to come
            return None
        low, high = start + CUT, start + BLOCK
        end = held.rfind(b"\n", low, high) + 1 or held.rfind(b" ", low, high)
        if end <= 0:  # text without spaces
            end = start + encoding.whole_characters(held[start:high], self.codec)
        return end, False

    def take(self, data: bytes, last: bool) -> Piece:
        piece = Piece("text", self.file, data, self.codec, "line", self.line, self.offset, self.first, last)
        self.line += data.count(b"\n")
        self.offset += len(data)
        self.first = last
        return piece
