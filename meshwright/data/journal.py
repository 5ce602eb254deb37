"""The list of finished chunks beside the data files of an unfinished preparation: a header line, then a line a chunk."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

from meshwright.errors import DataError, DeviceError, Finding

__all__ = ["NAME", "Journal", "write_all"]

NAME = "journal.jsonl"


class Journal:
    """Open for one process at a time. Lines after the first broken one (a kill while writing) are not there."""

    def __init__(self, folder: Path):
        """Raises DeviceError when the folder cannot be written, DataError when another process is at it."""
        self._path = folder / NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "a+b", buffering=0)  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            fix = "Choose a folder that can be written"
            raise DeviceError(findings=[Finding(str(folder), f"cannot be written: {error.strerror}", fix)]) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            what = "another process is preparing this folder now"
            raise DataError(findings=[Finding(str(folder), what, "Wait for it, or choose another folder")]) from None
        self.header: dict[str, Any] | None = None
        self.records: list[dict[str, Any]] = []
        self._ends: list[int] = []
        self._read()

    def _read(self) -> None:
        self._file.seek(0)
        at = 0
        for line in self._file.readall().split(b"\n")[:-1]:
            try:
                values = json.loads(line)
            except ValueError:
                break
            at += len(line) + 1
            self._ends.append(at)
            if self.header is None:
                self.header = values
            else:
                self.records.append(values)

    def restart(self, header: dict[str, Any]) -> None:
        """Forget all records and write another header."""
        self._file.truncate(0)
        self.header, self.records, self._ends = header, [], []
        self._write(header)

    def keep(self, records: int) -> None:
        """Drop what follows the first `records` records, broken lines included."""
        del self.records[records:], self._ends[records + 1 :]
        self._file.truncate(self._ends[-1])

    def append(self, record: dict[str, Any]) -> None:
        """Add a finished chunk. Raises OSError (a full disk); `keep` then cuts off what was written of it."""
        self._write(record)
        self.records.append(record)

    def _write(self, values: dict[str, Any]) -> None:
        line = json.dumps(values).encode("ascii") + b"\n"
        write_all(self._file, line)
        self._ends.append((self._ends[-1] if self._ends else 0) + len(line))

    def close(self, remove: bool = False) -> None:
        if remove:
            self._path.unlink(missing_ok=True)
        self._file.close()


def write_all(file: Any, data: bytes) -> None:
    """Write to an unbuffered file, which may take less than it is given. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
