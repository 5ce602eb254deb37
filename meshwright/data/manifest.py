"""`manifest.json` of a folder of token shards: written last, so that a folder without one is unfinished."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.errors import DataError, Finding

__all__ = ["FORMAT", "NAME", "VERSION", "FileRecord", "Manifest"]

FORMAT = "meshwright-tokens"
VERSION = 1
NAME = "manifest.json"


@dataclass(frozen=True)
class FileRecord:
    """One file of the folder: its name, bytes, and sha256."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What the folder holds.

    dtype          "uint16" or "uint32", little-endian, of the token files
    tokens         all tokens, special ones included; documents: those kept
    bytes          UTF-8 bytes of the text of these documents
    empty, skipped documents left out because they are empty, because their row is bad
    longest        tokens of the longest document
    first_skipped  what was wrong with the first few skipped rows
    shards         token files in order; a document may go on in the next one
    offsets        int64 [documents + 1]: token at which each document begins, then the number of tokens
    labels         int64 [documents], an index into label_names
    prompt_lengths int64 [documents]: leading tokens that are no targets
    sources        for each source: path, keys, counts, files, and how many of them were in which encoding
    identity       what the output is a function of; equal inputs give equal bytes in every file
    """

    objective: str
    dtype: str
    tokens: int
    documents: int
    bytes: int
    empty: int
    skipped: int
    longest: int
    tokenizer: dict[str, Any]
    shards: list[FileRecord]
    offsets: FileRecord
    labels: FileRecord | None = None
    prompt_lengths: FileRecord | None = None
    label_names: list[str] | None = None
    sources: list[dict[str, Any]] = field(default_factory=list)
    first_skipped: list[str] = field(default_factory=list)
    identity: dict[str, Any] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer["vocab_size"]

    @property
    def eos(self) -> int | None:
        return self.tokenizer["special"]["eos"]

    @property
    def itemsize(self) -> int:
        return int(self.dtype.removeprefix("uint")) // 8

    def files(self) -> list[FileRecord]:
        extra = [record for record in (self.labels, self.prompt_lengths) if record is not None]
        return [*self.shards, self.offsets, *extra]

    def write(self, folder: Path) -> None:
        """Publish: to a temporary name, to the disk, then under the real name."""
        text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"
        temporary = folder / f".{NAME}.tmp"
        with open(temporary, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / NAME)
        sync_folder(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises DataError naming the file that is missing, damaged, or from a newer version."""
        path = folder / NAME
        try:
            values = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise _missing(folder) from None
        except OSError as error:
            raise DataError(findings=[Finding(str(path), f"cannot be read: {error.strerror}")]) from None
        except ValueError as error:
            what = f"damaged: {error}" if not isinstance(error, UnicodeDecodeError) else "damaged: not UTF-8"
            raise DataError(findings=[Finding(str(path), what, "Prepare the corpus again")]) from None
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise DataError(findings=[Finding(str(path), "not a manifest of token shards")])
        version = values.pop("version", None)
        if version != VERSION:
            what = f"has format version {version!r}; this meshwright reads version {VERSION}"
            raise DataError(
                findings=[Finding(str(path), what, "Use the meshwright that wrote it, or prepare the corpus again")]
            )
        try:
            for key in ("offsets", "labels", "prompt_lengths"):
                values[key] = None if values[key] is None else FileRecord(**values[key])
            values["shards"] = [FileRecord(**record) for record in values["shards"]]
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise DataError(findings=[Finding(str(path), f"damaged: {error}", "Prepare the corpus again")]) from None


def _missing(folder: Path) -> DataError:
    if (folder / "journal.jsonl").is_file():
        what = "the preparation of this folder has not finished"
        return DataError(findings=[Finding(str(folder), what, "Run the same `meshwright prepare` again: it goes on")])
    what = f"no {NAME}, so no prepared corpus" if folder.is_dir() else "no such folder"
    return DataError(findings=[Finding(str(folder), what, "Make one with `meshwright prepare`")])


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
