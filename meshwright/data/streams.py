"""Bytes of a file in blocks of one size, decompressed on the way; memory does not grow with the file."""

from __future__ import annotations

import gzip
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from meshwright.errors import DataError, Finding

__all__ = ["BLOCK", "Meter", "blocks", "compression_of", "seekable"]

BLOCK = 1 << 20
"""Bytes of a block; only the last of a file is shorter, so that what follows does not depend on how reads are split."""

_RAW = 1 << 12  # compressed bytes a step: a block of 4 bytes can unpack to 128 KiB


@dataclass
class Meter:
    """Bytes on disk that were read so far: of finished files, and of the one that is open."""

    finished: int = 0
    current: int = 0

    @property
    def position(self) -> int:
        return self.finished + self.current

    def finish(self, size: int) -> None:
        self.finished += size
        self.current = 0


def compression_of(name: str) -> str:
    """ "gz", "zst" or "" by the file's ending."""
    return next((kind for kind in ("gz", "zst") if name.lower().endswith("." + kind)), "")


def blocks(path: Path, meter: Meter | None = None, size: int = BLOCK) -> Iterator[bytes]:
    """The file's bytes, decompressed by its ending. Raises DataError for an unreadable, cut or damaged file."""
    parts: list[bytes] = []
    have = 0
    for part in _guarded(path, meter or Meter()):
        while have + len(part) >= size:
            parts.append(part[: size - have])
            part = part[size - have :]
            yield b"".join(parts)
            parts, have = [], 0
        if part:
            parts.append(part)
            have += len(part)
    if parts:
        yield b"".join(parts)


def seekable(path: Path, folder: Path | None = None) -> IO[bytes]:
    """The file opened for reading anywhere; a compressed one is unpacked into an unnamed temporary file first.

    folder: where the temporary file goes; default: the system's own place.
    """
    if not compression_of(path.name):
        try:
            return open(path, "rb")
        except OSError as error:
            raise _unreadable(path, error) from None
    unpacked = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (the caller closes it)
    try:
        for block in blocks(path):
            unpacked.write(block)
    except BaseException:
        unpacked.close()
        raise
    unpacked.seek(0)
    return unpacked


def _guarded(path: Path, meter: Meter) -> Iterator[bytes]:
    import zstandard

    kind = compression_of(path.name)
    unpack = {"": _plain, "gz": _gunzip, "zst": _unzstd}[kind]
    try:
        with open(path, "rb") as file:
            for part in unpack(file):
                meter.current = file.tell()
                yield part
    except EOFError:
        what = "cut short: the compressed data ends before its end mark"
        raise DataError(findings=[Finding(str(path), what, "Copy or download the file again")]) from None
    except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        what = f"damaged, or not a .{kind} file: {error}"
        raise DataError(findings=[Finding(str(path), what, "Copy or download the file again")]) from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(findings=[Finding(str(path), f"cannot be read: {error.strerror or error}")])


def _plain(file: BinaryIO) -> Iterator[bytes]:
    while part := file.read(BLOCK):
        yield part


def _gunzip(file: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file) as unpacked:
        while part := unpacked.read(BLOCK):
            yield part


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    # not stream_reader: it takes the end of a cut file for the end of the data
    import zstandard

    unpacker = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame = unpacker.decompressobj()
    started = False
    while raw := file.read(_RAW):
        while raw:
            started = True
            part = frame.decompress(raw)
            raw = b""
            if frame.eof:
                raw = frame.unused_data
                frame = unpacker.decompressobj()
                started = False
            if part:
                yield part
    if started:
        raise EOFError
