"""Which files a corpus is: files, folders, globs and the embedded text, in an order that depends on nothing but the names."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.data import corpus, encoding
from meshwright.data.streams import compression_of
from meshwright.errors import DataError, Finding, counted

if TYPE_CHECKING:
    from meshwright.config.schema import Source

__all__ = ["Entry", "find", "is_prepared"]

ENDINGS = {".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".csv": "csv"}
KEYED = ("jsonl", "parquet", "csv")
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Entry:
    """One file of a corpus.

    name    how messages call it
    format  txt, jsonl, parquet, csv, or a kind of the embedded text (`corpus.KINDS`)
    size    bytes on disk; modified_ns: time of the last change
    """

    path: Path
    name: str
    format: str
    size: int
    modified_ns: int


def is_prepared(path: str | Path) -> bool:
    """Whether the path is a folder of token shards, finished or not."""
    folder = Path(path)
    return folder.is_dir() and ((folder / MANIFEST).is_file() or (folder / "journal.jsonl").is_file())


def find(sources: Sequence[Source]) -> list[list[Entry]]:
    """The files of each source. Raises DataError with everything that is missing, unreadable or contradictory, at once."""
    found: list[list[Entry]] = []
    findings: list[Finding] = []
    for source in sources:
        entries, problems = _find_one(source)
        found.append(entries)
        findings += problems
    if findings:
        raise DataError(findings=list(dict.fromkeys(findings)))
    return found


def _find_one(source: Source) -> tuple[list[Entry], list[Finding]]:
    where = source.path
    problem = encoding.problem_with(source.encoding)
    problems = [Finding(where, problem)] if problem else []
    if source.path in corpus.NAMES:
        files, more = corpus.files(source.path)
        return [_entry(path, str(path), kind) for path, kind in files], problems + more + _check_keys(source, ["txt"])
    if is_prepared(source.path):
        problems.append(Finding(where, "already holds token shards, not text", "Name it where tokens are read, not prepared"))
        return [], problems
    paths, more = _paths(source.path)
    problems += more
    entries: list[Entry] = []
    if paths and not more:
        entries, more = _entries(source, paths)
        problems += more + _check_keys(source, [entry.format for entry in entries])
    return entries, problems


def _check_keys(source: Source, formats: Sequence[str]) -> list[Finding]:
    problems = []
    if source.label_key is not None and "txt" in formats:
        what = f"label_key is {source.label_key!r}, but plain text has no keys"
        problems.append(Finding(source.path, what, "Labels need rows: .jsonl, .csv or .parquet"))
    if "parquet" in formats and source.encoding != encoding.AUTO and not encoding.is_utf8(source.encoding):
        what = f"encoding is {source.encoding}, but text in Parquet is UTF-8 by its format"
        problems.append(Finding(source.path, what, "Set encoding: utf-8 or auto"))
    return problems


def _paths(pattern: str) -> tuple[list[Path], list[Finding]]:
    path = Path(pattern)
    if path.is_file():
        return [path], []
    if path.is_dir():
        inside = list(_walk(path))
        return inside, [] if inside else [Finding(pattern, "the folder has no files")]
    if path.exists():
        return [], [Finding(pattern, "neither a file nor a folder")]
    if not glob.has_magic(pattern):
        near = path.parent
        what = "no such file or folder" if near.exists() else f"no such file or folder; {near} is not there either"
        return [], [Finding(pattern, what)]
    matches = [Path(name) for name in sorted(glob.glob(pattern, recursive=True), key=os.fsencode)]
    if not matches:
        return [], [Finding(pattern, "no file matches this pattern")]
    found = [file for match in matches for file in (_walk(match) if match.is_dir() else [match])]
    # links to folders can make a pattern find a file under many names; the shortest stands for it
    places: dict[tuple[str, str], Path] = {}
    for file in sorted(found, key=lambda file: len(file.parts)):
        places.setdefault((os.path.realpath(file.parent), file.name), file)
    chosen = set(places.values())
    return [file for file in dict.fromkeys(found) if file in chosen], []


def _walk(folder: Path) -> Iterator[Path]:
    """Files below the folder, sorted by their path from it; hidden ones are left out, links are followed once."""
    seen: set[str] = set()
    files: list[Path] = []
    for here, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(here)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted((name for name in folders if not name.startswith(".")), key=os.fsencode)
        files += [Path(here, name) for name in names if not name.startswith(".")]
    yield from sorted(files, key=lambda file: [os.fsencode(part) for part in file.relative_to(folder).parts])


def _format(path: Path) -> str | None:
    name = path.name.lower()
    kind = compression_of(name)
    return ENDINGS.get(os.path.splitext(name[: -len(kind) - 1] if kind else name)[1])


def _entries(source: Source, paths: Sequence[Path]) -> tuple[list[Entry], list[Finding]]:
    """A file named alone must have a known ending; among many, others are left out. A given format takes every file."""
    known = ", ".join(sorted(ENDINGS))
    entries: list[Entry] = []
    problems: list[Finding] = []
    for path in paths:
        kind = _format(path) if source.format == "auto" else source.format
        if kind is None:
            if len(paths) == 1 and str(path) == source.path:
                fix = f"Set format: txt, jsonl, parquet or csv (by itself: {known}, each also .gz or .zst)"
                problems.append(Finding(str(path), "the name does not say what the file is", fix))
            continue
        problem = _unreadable(path)
        if problem:
            problems.append(Finding(str(path), problem))
        else:
            entries.append(_entry(path, str(path), kind))
    if not entries and not problems:
        others = sorted({path.suffix or path.name for path in paths})[:5]
        what = f"has {counted(len(paths), 'file')}, none of them {known} (it has {', '.join(others)})"
        problems.append(Finding(source.path, what, "Set format: txt, jsonl, parquet or csv to read them as that"))
    return entries, problems


def _unreadable(path: Path) -> str | None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not stat.S_ISREG(mode):
        return "not a regular file, so it cannot be read twice"
    return None if os.access(path, os.R_OK) else "cannot be read: Permission denied"


def _entry(path: Path, name: str, kind: str) -> Entry:
    status = path.stat()
    return Entry(path, name, kind, status.st_size, status.st_mtime_ns)
