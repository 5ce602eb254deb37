"""Token shards: flat little-endian files, memory-mapped. All documents follow each other in one stream of tokens."""

from __future__ import annotations

import bisect
import hashlib
from pathlib import Path

import numpy as np

from meshwright.data.manifest import FileRecord, Manifest
from meshwright.errors import DataError, Finding

__all__ = ["TokenStore"]


class TokenStore:
    """Read-only view of a prepared corpus. Opening costs nothing per token: files are mapped, not read.

    documents, tokens      counts
    offsets                int64 [documents + 1], first token of each document, then `tokens`
    labels                 int64 [documents] index into label_names, or None
    prompt_lengths         int64 [documents] leading tokens of each document that are no targets, or None
    label_names            names of the classes, or None
    tokenizer_fingerprint  of the tokenizer that made the tokens; vocab_size, eos: of the same
    """

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder = folder
        self.manifest = manifest
        self.documents, self.tokens = manifest.documents, manifest.tokens
        self.label_names = manifest.label_names
        self.tokenizer_fingerprint: str = manifest.tokenizer["fingerprint"]
        self.vocab_size, self.eos = manifest.vocab_size, manifest.eos
        self.offsets = self._map(manifest.offsets, "<i8")
        self.labels = self._map(manifest.labels, "<i8") if manifest.labels else None
        self.prompt_lengths = self._map(manifest.prompt_lengths, "<i8") if manifest.prompt_lengths else None
        # plain views: memmap's own type slows every small slice
        self._shards = [np.asarray(self._map(record, f"<u{manifest.itemsize}")) for record in manifest.shards]
        self._starts = [0]
        for shard in self._shards:
            self._starts.append(self._starts[-1] + len(shard))

    @classmethod
    def open(cls, path: str | Path, verify: bool = False) -> TokenStore:
        """Open a prepared folder; sizes of all files are checked, with `verify` their sha256 too (reads every byte).

        Raises DataError naming each file that is missing, cut or changed.
        """
        folder = Path(path)
        manifest = Manifest.read(folder)
        findings = [*_check_counts(folder, manifest)]
        for record in manifest.files():
            problem = _problem(folder / record.name, record, verify)
            if problem:
                findings.append(Finding(str(folder / record.name), problem, "Copy it again, or prepare the corpus again"))
        if findings:
            raise DataError(findings=findings)
        return cls(folder, manifest)

    def __reduce__(self):  # a memory map would be pickled as its whole content
        return (TokenStore.open, (self.folder,))

    def _map(self, record: FileRecord, dtype: str) -> np.ndarray:
        return np.memmap(self.folder / record.name, dtype=dtype, mode="r")

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream, uint16 or uint32; read-only, without a copy where one shard holds them."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start} to {stop} of {self.tokens}")
        first = bisect.bisect_right(self._starts, start, hi=len(self._shards)) - 1
        parts: list[np.ndarray] = []
        for number in range(first, len(self._shards)):
            base = self._starts[number]
            if base >= stop and parts:
                break
            parts.append(self._shards[number][max(0, start - base) : stop - base])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def document(self, number: int) -> np.ndarray:
        """All tokens of one document, special ones included."""
        return self.read(int(self.offsets[number]), int(self.offsets[number + 1]))

    @property
    def tokenizer_path(self) -> Path:
        """Folder with the tokenizer that made the tokens."""
        return self.folder / "tokenizer"


def _check_counts(folder: Path, manifest: Manifest) -> list[Finding]:
    """The manifest's own numbers agree with each other."""
    wanted = [
        (manifest.offsets.name, manifest.offsets.bytes, 8 * (manifest.documents + 1)),
        ("all shards", sum(record.bytes for record in manifest.shards), manifest.tokens * manifest.itemsize),
    ]
    wanted += [(r.name, r.bytes, 8 * manifest.documents) for r in (manifest.labels, manifest.prompt_lengths) if r is not None]
    return [
        Finding(str(folder / "manifest.json"), f"says {have} bytes for {name}, but its counts need {need}")
        for name, have, need in wanted
        if have != need
    ]


def _problem(path: Path, record: FileRecord, verify: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"has {size} bytes, the manifest says {record.bytes}"
        if verify and digest_of(path) != record.sha256:
            return "its content has changed: the sha256 is not the manifest's"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def digest_of(path: Path) -> str:
    """sha256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
