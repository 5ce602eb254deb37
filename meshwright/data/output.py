"""The data files that `prepare` appends to, in the order of the corpus.

Each finished chunk has a record in the journal with the sha256 of what it wrote. After a kill the files may hold more than the
journal says; `adopt` checks what the journal says and cuts off the rest, so that a run goes on where it was.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from meshwright.data.journal import write_all
from meshwright.data.manifest import FileRecord, sync_folder
from meshwright.data.shards import digest_of
from meshwright.data.tokenize import SHOWN, Result
from meshwright.errors import DataError, Finding

__all__ = ["COLUMNS", "Output", "Totals"]

COLUMNS = ("offsets.bin", "prompt_lengths.bin", "labels.raw")
LABELS = "labels.bin"
MAX_LABELS = 1 << 16
_READ = 1 << 24


@dataclass
class Totals:
    """Sums over finished chunks, of the whole corpus or of one source."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    empty: int = 0
    skipped: int = 0

    def add(self, record: dict[str, Any]) -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + record[name])


class Output:
    """folder       where, existing; files of an earlier try stay until `adopt` or `clear`
    itemsize     bytes of a token; shard_bytes: size at which a token file ends
    sources      number of sources
    label_names  fixed names, or None: collected as they appear and sorted at the end
    """

    def __init__(self, folder: Path, itemsize: int, shard_bytes: int, sources: int, label_names: Sequence[str] | None):
        self.folder = folder
        self._itemsize = itemsize
        self._shard_bytes = shard_bytes // itemsize * itemsize
        self.totals = Totals()
        self.by_source = [Totals() for _ in range(sources)]
        self.first_skipped: list[str] = []
        self.longest = 0
        self._fixed_names = label_names is not None
        self._names = {name: i for i, name in enumerate(label_names or ())}
        self._labelled = self._prompted = False
        self._last_end = 0
        self._digests: list[Any] = []
        self._columns: list[IO[bytes]] = []
        self._shard: IO[bytes] | None = None
        self._open_number = -1

    # -- what an earlier, killed run left ---------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove all data files and begin new ones."""
        self.close()
        for path in [*self.folder.glob("tokens-*.bin"), *(self.folder / name for name in (*COLUMNS, LABELS))]:
            path.unlink(missing_ok=True)
        self._open_columns()
        write_all(self._columns[0], (0).to_bytes(8, "little"))  # the first document begins at token 0

    def adopt(self, records: Sequence[dict[str, Any]]) -> int:
        """Check the files against the journal's records and take over as many chunks as are whole. Returns their number."""
        done = 0
        for record in records:
            if not self._whole(record):
                break
            self.account(record)
            done += 1
        if not done:
            self.clear()
            return 0
        self._open_columns()
        self.cut_back()
        for number in range(-(-self.totals.tokens * self._itemsize // self._shard_bytes)):
            with open(self._shard_path(number), "rb") as file:
                self._digests.append(hashlib.file_digest(file, "sha256"))
        return done

    def _whole(self, record: dict[str, Any]) -> bool:
        digest = hashlib.sha256()
        begin = self.totals.tokens * self._itemsize
        try:
            for number, start, size in self._spans(begin, record["tokens"] * self._itemsize):
                _feed(digest, self._shard_path(number), start, size)
            columns = hashlib.sha256()
            for name, start, size in self._column_spans(record["documents"]):
                _feed(columns, self.folder / name, start, size)
        except (OSError, EOFError):
            return False
        return digest.hexdigest() == record["output"] and columns.hexdigest() == record["columns"]

    def _column_spans(self, documents: int) -> list[tuple[str, int, int]]:
        return [(name, 8 * (self.totals.documents + (name == COLUMNS[0])), 8 * documents) for name in COLUMNS]

    def _spans(self, begin: int, size: int) -> list[tuple[int, int, int]]:
        """(shard, offset in it, bytes) of a range of the token stream, in bytes."""
        spans = []
        while size:
            number, start = divmod(begin, self._shard_bytes)
            part = min(size, self._shard_bytes - start)
            spans.append((number, start, part))
            begin, size = begin + part, size - part
        return spans

    def _shard_path(self, number: int) -> Path:
        return self.folder / f"tokens-{number:05d}.bin"

    # -- writing ----------------------------------------------------------------------------------------------------------

    def _open_columns(self) -> None:
        self._columns = [open(self.folder / name, "ab", buffering=0) for name in COLUMNS]  # noqa: SIM115

    def write(self, number: int, source: int, digest_in: str, result: Result) -> dict[str, Any]:
        """Append a chunk's result and return its record, which counts only after `account`. Raises OSError (a full disk)."""
        ends = np.frombuffer(result.ends, "<i8") + self.totals.tokens
        prompts = np.frombuffer(result.prompts, "<i8")
        labelled = any(label is not None for label in result.labels)
        labels = np.zeros(len(ends), "<i8")
        new: list[str] = []
        if labelled:
            new = [name for name in dict.fromkeys(map(str, result.labels)) if name not in self._names]
            numbers = {**self._names, **{name: len(self._names) + i for i, name in enumerate(new)}}
            labels = np.array([numbers[str(label)] for label in result.labels], "<i8")
        lengths = np.diff(ends, prepend=self._last_end)
        at = 0
        for shard, start, size in self._spans(self.totals.tokens * self._itemsize, len(result.tokens)):
            self._append(shard, start, result.tokens[at : at + size])
            at += size
        columns = hashlib.sha256()
        for file, values in zip(self._columns, (ends, prompts, labels), strict=True):
            columns.update(values.tobytes())
            write_all(file, values.tobytes())
        return {
            "chunk": number,
            "source": source,
            "documents": len(ends),
            "tokens": len(result.tokens) // self._itemsize,
            "bytes": result.text_bytes,
            "empty": result.empty,
            "skipped": result.skipped,
            "longest": int(lengths.max(initial=0)),
            "end": int(ends[-1]) if len(ends) else self._last_end,
            "prompted": bool(prompts.any()),
            "labelled": labelled,
            "names": new,
            "bad": [str(bad) for bad in result.bad],
            "input": digest_in,
            "output": result.sha256,
            "columns": columns.hexdigest(),
        }

    def _append(self, number: int, start: int, data: bytes) -> None:
        if self._shard is None or number != self._open_number:
            if self._shard is not None:
                os.fsync(self._shard.fileno())
                self._shard.close()
            self._shard = open(self._shard_path(number), "ab", buffering=0)  # noqa: SIM115
            self._open_number = number
            if number == len(self._digests):
                self._digests.append(hashlib.sha256())
        write_all(self._shard, data)
        self._digests[number].update(data)

    def account(self, record: dict[str, Any]) -> None:
        """Count a chunk whose data and journal line are written."""
        self.totals.add(record)
        self.by_source[record["source"]].add(record)
        self.longest = max(self.longest, record["longest"])
        self._last_end = record["end"]
        self._prompted = self._prompted or record["prompted"]
        self._labelled = self._labelled or record["labelled"]
        for name in record["names"]:
            self._names.setdefault(name, len(self._names))
        self.first_skipped += record["bad"][: SHOWN - len(self.first_skipped)]

    def cut_back(self) -> None:
        """Cut off what was written after the last chunk that counts."""
        tokens = self.totals.tokens * self._itemsize
        for path in self.folder.glob("tokens-*.bin"):
            keep = tokens - int(path.stem.removeprefix("tokens-")) * self._shard_bytes
            if keep <= 0:
                path.unlink()
            elif path.stat().st_size > keep:
                os.truncate(path, min(keep, self._shard_bytes))
        for name, size, _ in self._column_spans(0):
            os.truncate(self.folder / name, size)

    def close(self) -> None:
        for file in [*self._columns, *([self._shard] if self._shard is not None else [])]:
            file.close()
        self._columns, self._shard = [], None

    # -- the end ----------------------------------------------------------------------------------------------------------

    def finish(self) -> dict[str, Any]:
        """Bring everything to the disk. Returns the fields of the manifest that describe files and counts."""
        names = self._write_labels() if self._labelled else None
        for file in [*self._columns, *([self._shard] if self._shard is not None else [])]:
            os.fsync(file.fileno())
        self.close()
        shards = []
        for number, digest in enumerate(self._digests):
            path = self._shard_path(number)
            shards.append(FileRecord(path.name, path.stat().st_size, digest.hexdigest()))
        sync_folder(self.folder)
        return {
            **vars(self.totals),
            "longest": self.longest,
            "shards": shards,
            "offsets": self._record(COLUMNS[0]),
            "prompt_lengths": self._record(COLUMNS[1]) if self._prompted else None,
            "labels": self._record(LABELS) if names is not None else None,
            "label_names": names,
            "first_skipped": self.first_skipped,
        }

    def remove_leftovers(self) -> None:
        """Files that the manifest does not name."""
        for name, needed in ((COLUMNS[1], self._prompted), (COLUMNS[2], False), (LABELS, self._labelled)):
            if not needed:
                (self.folder / name).unlink(missing_ok=True)

    def _record(self, name: str) -> FileRecord:
        path = self.folder / name
        return FileRecord(name, path.stat().st_size, digest_of(path))

    def _write_labels(self) -> list[str]:
        """Number the labels in the order of their names: as numbers where all are whole numbers, else as strings."""
        names = list(self._names)
        if not self._fixed_names:
            names.sort(key=int if all(map(_whole_number, names)) else None)
        number_of = {name: i for i, name in enumerate(names)}
        change = np.array([number_of[name] for name in self._names], "<i8")
        with open(self.folder / COLUMNS[2], "rb") as raw, open(self.folder / LABELS, "wb") as file:
            while part := raw.read(_READ):
                file.write(change[np.frombuffer(part, "<i8")].tobytes())
            file.flush()
            os.fsync(file.fileno())
        return names

    def check_labels(self, where: str) -> None:
        """Raises DataError when there are more different labels than a classification can mean."""
        if len(self._names) > MAX_LABELS:
            what = f"more than {MAX_LABELS} different labels"
            raise DataError(findings=[Finding(where, what, "Is label_key the class, or a number of the row?")])


def _whole_number(name: str) -> bool:
    digits = name.removeprefix("-")
    return len(name) < 19 and name.isascii() and digits.isdigit() and str(int(name)) == name


def _feed(digest: Any, path: Path, start: int, size: int) -> None:
    with open(path, "rb") as file:
        file.seek(start)
        while size:
            data = file.read(min(size, _READ))
            if not data:
                raise EOFError
            digest.update(data)
            size -= len(data)
