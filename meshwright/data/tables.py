"""CSV and Parquet as pieces of rows. Both are read here, in one process: their own readers keep state over rows."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshwright.data import encoding
from meshwright.data.parse import Keys, Piece, shown
from meshwright.data.streams import BLOCK, Meter, seekable
from meshwright.errors import DataError, Finding

if TYPE_CHECKING:
    from meshwright.data.sources import Entry

__all__ = ["csv_pieces", "parquet_pieces", "row_pieces"]

MAX_FIELD = 1 << 28


def row_pieces(rows: Iterator[list[Any]], file: str, unit: str) -> Iterator[Piece]:
    """Rows ([number, text, label, prompt, response], or [number, what is wrong]) in pieces of about a block."""
    held: list[str] = []
    size = 0
    for row in rows:
        held.append(json.dumps(row, ensure_ascii=False))
        size += len(held[-1])
        if size >= BLOCK:
            yield _piece(held, file, unit)
            held, size = [], 0
    if held:
        yield _piece(held, file, unit)


def _piece(held: list[str], file: str, unit: str) -> Piece:
    return Piece("rows", file, ("[" + ",".join(held) + "]").encode("utf-8"), unit=unit)


def choose(names: list[str], keys: Keys, file: str, what: str) -> list[str | None]:
    """Columns for [text, label, prompt, response], None where there is none. Raises DataError with the names that exist."""
    findings = []
    columns: list[str | None] = [keys.text, keys.label, None, None]
    if keys.text not in names:
        if "prompt" in names and "response" in names:
            columns = [None, keys.label, "prompt", "response"]
        else:
            fix = "Set text_key to the one that holds the text, or use prompt and response"
            findings.append(Finding(file, f"no {what} {keys.text!r}; the {what}s are {shown(names)}", fix))
    if keys.label is not None and keys.label not in names:
        told = f"no {what} {keys.label!r} for the label; the {what}s are {shown(names)}"
        findings.append(Finding(file, told, "Set label_key to the one that holds the class"))
    if findings:
        raise DataError(findings=findings)
    return columns


class _Lines:
    """Decoded lines for `csv.reader`, counting them and remembering which held bytes that are no text."""

    def __init__(self, stream: Iterator[bytes], file: str, codec: str, offset: int):
        self._stream, self._file, self._codec = stream, file, codec
        self._lines: Iterator[bytes] = iter(())
        self._rest = b""
        self._offset = offset
        self.bad: str | None = None

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        raw = self._next_raw()
        start, self._offset = self._offset, self._offset + len(raw)
        try:
            return raw.decode(self._codec)
        except UnicodeDecodeError as error:
            self.bad = self.bad or encoding.bad_byte(raw[error.start], self._codec, error.start, start + error.start)
            return raw.decode("latin-1")  # keeps commas and quotes in place; the row is refused as a whole

    def _next_raw(self) -> bytes:
        while (raw := next(self._lines, None)) is None:
            parts, have = [self._rest], 0
            for block in self._stream:
                parts.append(block)
                have += len(block)
                if b"\n" in block:
                    break
                if have > MAX_FIELD:
                    what = f"more than {MAX_FIELD >> 20} MiB without a line break, so this is no CSV"
                    raise DataError(findings=[Finding(self._file, what)])
            data = b"".join(parts)
            if not data:
                raise StopIteration
            *whole, self._rest = data.split(b"\n")
            if not whole:
                whole, self._rest = [self._rest], b""
                return whole[0]
            self._lines = (line + b"\n" for line in whole)
        return raw


def csv_pieces(stream: Iterator[bytes], file: str, codec: str, offset: int, keys: Keys) -> Iterator[Piece]:
    """Comma-separated rows under a header line; fields in double quotes may hold commas and line breaks."""
    yield from row_pieces(_csv_rows(_Lines(stream, file, codec, offset), file, keys), file, "line")


def _csv_rows(lines: _Lines, file: str, keys: Keys) -> Iterator[list[Any]]:
    csv.field_size_limit(max(csv.field_size_limit(), MAX_FIELD))  # the module knows no limit for one reader alone
    reader = csv.reader(lines, strict=True)
    header: list[str] | None = None
    columns: list[int | None] = []
    while True:
        number = reader.line_num + 1
        problem: list[str] = []
        row: list[str] = []
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            problem = [f"not valid CSV: {error}"]
        if lines.bad is not None:
            problem, lines.bad = [lines.bad, encoding.OFFER], None
        if not problem and not row:
            continue  # a blank line
        if header is None:
            if problem:
                raise DataError(findings=[Finding(f"{file}, line {number}", *problem)])
            header = row
            columns = [None if name is None else header.index(name) for name in choose(header, keys, file, "column")]
        elif problem:
            yield [number, *problem]
        elif len(row) != len(header):
            yield [number, f"{len(row)} fields, but the header has {len(header)}"]
        else:
            yield [number, *(None if column is None else row[column] for column in columns)]


def parquet_pieces(entry: Entry, keys: Keys, meter: Meter) -> Iterator[Piece]:
    """Rows of a Parquet file; only the columns that are used are read, and no row group as a whole."""
    import pyarrow

    with seekable(entry.path) as file:
        try:
            yield from row_pieces(_parquet_rows(file, entry, keys, meter), entry.name, "row")
        except (pyarrow.ArrowException, OSError) as error:
            what = f"not a Parquet file, or damaged: {str(error).splitlines()[0][:200]}"
            raise DataError(findings=[Finding(entry.name, what)]) from None


def _parquet_rows(file: Any, entry: Entry, keys: Keys, meter: Meter) -> Iterator[list[Any]]:
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=BLOCK)
    schema = table.schema_arrow
    columns = choose(schema.names, keys, entry.name, "column")
    _check_types(schema, columns, entry.name)
    used = list(dict.fromkeys(name for name in columns if name is not None))
    size = sum(table.metadata.row_group(i).total_byte_size for i in range(table.num_row_groups))
    at_a_time = min(4096, max(1, BLOCK * table.metadata.num_rows // max(1, size)))
    number = 0
    for batch in table.iter_batches(batch_size=at_a_time, columns=used, use_threads=False):
        values = {name: _values(batch.column(name)) for name in used}
        for i in range(batch.num_rows):
            number += 1
            row = [None if name is None else values[name][i] for name in columns]
            if any(isinstance(value, bytes) for value in row):
                yield [number, "not utf-8: the column says it is a string, but its bytes are none"]
            else:
                yield [number, *row]
        meter.current = entry.size * number // max(1, table.metadata.num_rows)


def _check_types(schema: Any, columns: list[str | None], file: str) -> None:
    import pyarrow

    findings = []
    for role, name in zip(("text", "label", "text", "text"), columns, strict=True):
        if name is None:
            continue
        kind = schema.field(name).type
        plain = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        fine = any(
            test(plain) for test in (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
        ) or pyarrow.types.is_null(plain)
        if role == "label":
            fine = (
                fine or pyarrow.types.is_integer(plain) or pyarrow.types.is_floating(plain) or pyarrow.types.is_boolean(plain)
            )
        if not fine:
            findings.append(Finding(file, f"column {name!r} is {kind}, not {'a label' if role == 'label' else 'text'}"))
    if findings:
        raise DataError(findings=findings)


def _values(column: Any) -> list[Any]:
    """Python values; a string that is not UTF-8 comes as bytes."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_value(item) for item in column]


def _value(item: Any) -> Any:
    try:
        return item.as_py()
    except UnicodeDecodeError:
        return b""
