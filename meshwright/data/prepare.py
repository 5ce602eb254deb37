"""Text to token shards: in parallel, as a stream, resumable after a kill, with equal bytes for any number of workers."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.data import manifest as manifests
from meshwright.data.journal import NAME as JOURNAL
from meshwright.data.journal import Journal
from meshwright.data.manifest import Manifest
from meshwright.data.output import COLUMNS, Output
from meshwright.data.parse import Piece
from meshwright.data.pool import Chunk, results
from meshwright.data.readers import keys_of, pieces
from meshwright.data.shards import TokenStore
from meshwright.data.sources import Entry, find
from meshwright.data.streams import BLOCK, Meter
from meshwright.data.tokenize import Form, Job
from meshwright.data.tokenizer import Tokenizer
from meshwright.disk import is_full, unwritable
from meshwright.errors import DataError, DeviceError, Finding, counted

if TYPE_CHECKING:
    from meshwright.config.schema import Source

__all__ = ["OtherCorpus", "Update", "prepare"]

SHARD_BYTES = 1 << 30
CHUNK_PIECES = 4096


@dataclass(frozen=True)
class Update:
    """Where a preparation is. `read` and `total` are bytes on disk, `bytes` UTF-8 bytes of the kept text; `note`: something
    that the user should know (a resume, a restart, a folder that was ready)."""

    read: int
    total: int
    documents: int
    tokens: int
    bytes: int
    empty: int
    skipped: int
    seconds: float
    note: str = ""


class OtherCorpus(DataError):
    """A folder holds a finished corpus that was made from something else, and may not be overwritten."""


def prepare(
    sources: Sequence[Source],
    out: str | Path,
    *,
    tokenizer: Tokenizer,
    objective: str = "causal_lm",
    on_bad_row: str = "stop",
    workers: int = 0,
    label_names: Sequence[str | int] | None = None,
    progress: Callable[[Update], None] | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> Manifest:
    """Write the sources' documents as token shards into `out` and return the manifest.

    objective    masked_lm and classify put [cls] and [sep] around a document where the tokenizer has them; everything else
                 ends it with eos (and begins it with bos where the tokenizer's own template does)
    on_bad_row   "stop", or "skip" and count
    workers      processes; 0: one a core. The output does not depend on it
    label_names  classes that the labels must be of, in this order; default: those found, sorted
    progress     called after every chunk, and for notes
    overwrite    replace a finished corpus in `out` that was made from something else

    A folder that already holds exactly this corpus is left as it is; an unfinished one is gone on with after its finished
    chunks were checked, or begun again when inputs or settings have changed. Raises OtherCorpus, DataError (bad input, with
    file and line), DeviceError (no space, a folder that cannot be written); what was finished is kept for the next try.
    """
    out = Path(out)
    entries = find(sources)
    _check(sources, objective, on_bad_row)
    names = None if label_names is None else [str(name) for name in label_names]
    run = _Run(sources, entries, out, tokenizer, objective, on_bad_row, names, shard_bytes, progress)
    try:
        ready = run.ready(overwrite)
        return ready if ready is not None else run.go(workers or available_cores())
    except OSError as error:
        if is_full(error):
            then = "The same command goes on after the chunks that are finished"
            raise unwritable(out, error, then) from None
        if error.filename is None:
            raise
        raise DeviceError(findings=[Finding(str(error.filename), f"cannot be used: {error.strerror}")]) from None


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(sources: Sequence[Source], objective: str, on_bad_row: str) -> None:
    findings = []
    if on_bad_row not in ("stop", "skip"):
        findings.append(Finding("on_bad_row", f"is {on_bad_row!r}", "Use stop or skip"))
    if not sources:
        findings.append(Finding("sources", "there are none", "Name a file, a folder, a glob, or embedded"))
    without = [source.path for source in sources if source.label_key is None]
    if without and objective == "classify":
        findings += [
            Finding(path, "classification needs labels", "Set label_key to the key that holds the class") for path in without
        ]
    elif without and len(without) < len(sources):
        findings += [Finding(path, "has no label_key, but another source of the same corpus has") for path in without]
    if findings:
        raise DataError(findings=findings)


@dataclass
class _Run:
    """One call of `prepare`."""

    sources: Sequence[Source]
    entries: list[list[Entry]]
    out: Path
    tokenizer: Tokenizer
    objective: str
    on_bad_row: str
    label_names: list[str] | None
    shard_bytes: int
    progress: Callable[[Update], None] | None

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.form = Form.of(self.objective, self.tokenizer)
        self.encodings: list[dict[str, int]] = [{} for _ in self.sources]
        self.total = sum(entry.size for entries in self.entries for entry in entries)

    def identity(self) -> dict[str, Any]:
        """What the output is a function of, part by part, so that a change can be named."""
        settings = ("path", "format", "text_key", "label_key", "encoding")
        form = {"prefix": self.form.prefix, "suffix": self.form.suffix, "itemsize": self.form.itemsize}
        values = {
            "sources": [{key: getattr(source, key) for key in settings} for source in self.sources],
            "files": [[[entry.name, entry.size] for entry in entries] for entries in self.entries],
            "tokenizer": self.tokenizer.fingerprint,
            "objective": [self.objective, form],
            "on_bad_row": self.on_bad_row,
            "label_names": self.label_names,
            "shard_bytes": self.shard_bytes,
            "version": manifests.VERSION,
        }
        return {key: _digest(value) for key, value in values.items()}

    def modified(self) -> str:
        return _digest([[entry.modified_ns for entry in entries] for entries in self.entries])

    # -- the folder -----------------------------------------------------------------------------------------------------

    def ready(self, overwrite: bool) -> Manifest | None:
        """The manifest of a folder that holds exactly this corpus. Raises DataError when it holds anything else and may not
        be overwritten."""
        if not (self.out / manifests.NAME).is_file():
            self._check_foreign()
            return None
        try:
            return self._same()
        except DataError:
            if not overwrite:
                raise
            (self.out / manifests.NAME).unlink()
            return None

    def _same(self) -> Manifest:
        present = Manifest.read(self.out)
        wanted = {**self.identity(), "modified": self.modified()}
        changed = sorted(key for key in wanted if present.identity.get(key) != wanted[key])
        if changed:
            what = f"holds a prepared corpus made from something else ({', '.join(changed)} differ)"
            fix = "Choose another folder, or replace this one with --overwrite"
            raise OtherCorpus(findings=[Finding(str(self.out), what, fix)])
        TokenStore.open(self.out)
        names = {JOURNAL, *COLUMNS} - {record.name for record in present.files()}
        for name in names:  # of a run that was killed between the manifest and its last lines
            (self.out / name).unlink(missing_ok=True)
        self._tell(None, 0, "the folder already holds this corpus: nothing to prepare")
        return present

    def _check_foreign(self) -> None:
        if not self.out.exists():
            return
        if not self.out.is_dir():
            raise DataError(findings=[Finding(str(self.out), "is a file, not a folder", "Choose another place")])
        names = sorted(path.name for path in self.out.iterdir())
        if names and JOURNAL not in names:
            what = f"is not empty (it has {', '.join(names[:3])}) and no corpus of ours"
            raise DataError(findings=[Finding(str(self.out), what, "Choose a new or empty folder")])

    def go(self, workers: int) -> Manifest:
        identity = self.identity()
        journal = Journal(self.out)
        output = self._new_output()
        try:
            done, note = self._resume(journal, output, identity)
            self._tell(output, 0, note)
            while True:
                try:
                    self._fill(journal, output, done, workers)
                    break
                except _InputChanged as changed:
                    output.close()
                    output = self._new_output()
                    self._restart(journal, output, identity)
                    done = []
                    self.encodings = [{} for _ in self.sources]
                    self._tell(output, 0, f"began again: {changed} has changed since the run that was not finished")
            return self._publish(journal, output, identity)
        finally:
            output.close()
            journal.close()

    def _new_output(self) -> Output:
        return Output(self.out, self.form.itemsize, self.shard_bytes, len(self.sources), self.label_names)

    def _restart(self, journal: Journal, output: Output, identity: dict[str, Any]) -> None:
        journal.restart(identity)
        output.clear()
        shutil.rmtree(self.out / "tokenizer", ignore_errors=True)
        self.tokenizer.save(self.out / "tokenizer")

    def _resume(self, journal: Journal, output: Output, identity: dict[str, Any]) -> tuple[list[str], str]:
        """Input digests of the chunks that are taken over, and what was decided, in words."""
        before = journal.header
        if before != identity:
            self._restart(journal, output, identity)
            if before is None:
                return [], ""
            changed = sorted(key for key in {*before, *identity} if before.get(key) != identity.get(key))
            return [], f"began again: {', '.join(changed)} changed since the run that was not finished"
        there = len(journal.records)
        done = output.adopt(journal.records)
        journal.keep(done)
        self.tokenizer.save(self.out / "tokenizer")
        damaged = f"; {there - done} more were damaged and are made again" if done < there else ""
        return [
            record["input"] for record in journal.records
        ], f"went on after {done} finished chunks{damaged}" if there else ""

    # -- the work -------------------------------------------------------------------------------------------------------

    def _fill(self, journal: Journal, output: Output, done: list[str], workers: int) -> None:
        job = Job(
            self.tokenizer,
            self.form,
            [keys_of(source) for source in self.sources],
            self.on_bad_row,
            None if self.label_names is None else frozenset(self.label_names),
        )
        with closing(self._chunks()) as chunks:
            for number, digest in enumerate(done):
                chunk = next(chunks, None)
                if chunk is None or input_digest(chunk) != digest:
                    first = chunk.pieces[0].file if chunk is not None else f"chunk {number}"
                    raise _InputChanged(f"{first} or a file after it")
            with closing(results(chunks, job, workers, self.out / "tokenizer")) as finished:
                for chunk, result in finished:
                    if result.failed:
                        more = result.skipped - len(result.bad)
                        bad = [*result.bad, Finding("", f"and at least {more:,} more")] if more else result.bad
                        raise DataError(findings=bad)
                    self._append(journal, output, chunk, result)
                    output.check_labels(self.sources[chunk.source].path)
                    self._tell(output, chunk.position)

    def _append(self, journal: Journal, output: Output, chunk: Chunk, result: Any) -> None:
        try:
            record = output.write(chunk.number, chunk.source, input_digest(chunk), result)
            journal.append(record)
        except OSError:
            output.cut_back()
            journal.keep(chunk.number)
            raise
        output.account(record)

    def _chunks(self) -> Generator[Chunk, None, None]:
        """Chunks depend on the files alone: about a block of text each, of one source."""
        meter = Meter()
        number = 0
        for source, entries in enumerate(self.entries):
            held: list[Piece] = []
            size = 0
            for entry in entries:
                seen = False
                for piece in pieces(entry, self.sources[source], meter):
                    if not seen:
                        seen = True
                        self.encodings[source][piece.codec] = self.encodings[source].get(piece.codec, 0) + 1
                    held.append(piece)
                    size += len(piece.data)
                    if size >= BLOCK or len(held) >= CHUNK_PIECES:
                        yield Chunk(number, source, held, meter.position)
                        number, held, size = number + 1, [], 0
            if held:
                yield Chunk(number, source, held, meter.position)
                number += 1

    def _publish(self, journal: Journal, output: Output, identity: dict[str, Any]) -> Manifest:
        if not output.totals.documents:
            raise self._no_documents(output)
        fields = output.finish()
        made = Manifest(
            objective=self.objective,
            dtype=f"uint{8 * self.form.itemsize}",
            tokenizer={
                "fingerprint": self.tokenizer.fingerprint,
                "vocab_size": self.tokenizer.vocab_size,
                "special": self.tokenizer.special,
                "prefix": list(self.form.prefix),
                "suffix": list(self.form.suffix),
            },
            sources=[self._describe(number, asdict(totals)) for number, totals in enumerate(output.by_source)],
            identity={**identity, "modified": self.modified()},
            **fields,
        )
        made.write(self.out)
        output.remove_leftovers()
        journal.close(remove=True)
        self._tell(output, self.total)
        return made

    def _describe(self, number: int, totals: dict[str, int]) -> dict[str, Any]:
        source, entries = self.sources[number], self.entries[number]
        return {
            "path": source.path,
            "text_key": source.text_key,
            "label_key": source.label_key,
            "encoding": source.encoding,
            "files": len(entries),
            "file_bytes": sum(entry.size for entry in entries),
            "encodings": dict(sorted(self.encodings[number].items())),
            **totals,
        }

    def _no_documents(self, output: Output) -> DataError:
        totals = output.totals
        counts = (
            f"{counted(sum(map(len, self.entries)), 'file')} with {counted(self.total, 'byte')}, "
            f"{totals.empty} empty and {counted(totals.skipped, 'bad row')}"
        )
        where = ", ".join(source.path for source in self.sources[:5])
        first = f"; the first bad one: {output.first_skipped[0]}" if output.first_skipped else ""
        return DataError(findings=[Finding(where, f"no documents ({counts}){first}")])

    def _tell(self, output: Output | None, position: int, note: str = "") -> None:
        if self.progress is not None:
            totals = (
                asdict(output.totals)
                if output is not None
                else dict.fromkeys(("documents", "tokens", "bytes", "empty", "skipped"), 0)
            )
            self.progress(Update(position, self.total, seconds=time.monotonic() - self.started, note=note, **totals))


class _InputChanged(Exception):
    """A finished chunk of an earlier run does not have the text that its file has now."""


def input_digest(chunk: Chunk) -> str:
    """sha256 of the text of a chunk and of how it is cut."""
    digest = hashlib.sha256()
    for piece in chunk.pieces:
        digest.update(f"{piece.kind} {piece.codec} {piece.first} {piece.last} {len(piece.data)}\n".encode())
        digest.update(piece.data)
    return digest.hexdigest()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("ascii")).hexdigest()
