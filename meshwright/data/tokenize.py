"""Pieces of text become token bytes: the work of one chunk, the same in this process and in a worker process."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from meshwright.data.parse import BadRow, Document, Keys, Piece, parse
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import Finding

__all__ = ["Form", "Job", "Result"]

SHOWN = 10
"""Bad rows of a chunk that are told one by one."""


@dataclass(frozen=True)
class Form:
    """What is put around the tokens of a document, and the bytes of a token (2 or 4)."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, objective: str, tokenizer: Tokenizer) -> Form:
        """[cls] text [sep] for masked_lm and classify where the tokenizer has both, else text eos, with bos where its template
        has it; nothing where the tokenizer has none of them."""
        itemsize = 2 if tokenizer.vocab_size <= 2**16 else 4
        if objective in ("masked_lm", "classify") and tokenizer.cls is not None and tokenizer.sep is not None:
            return cls((tokenizer.cls,), (tokenizer.sep,), itemsize)
        prefix = (tokenizer.bos,) if tokenizer.adds_bos and tokenizer.bos is not None else ()
        return cls(prefix, () if tokenizer.eos is None else (tokenizer.eos,), itemsize)


@dataclass
class Result:
    """Tokens of a chunk.

    tokens   little-endian bytes
    ends     int64: end of each document that ends in this chunk, in tokens from the chunk's start
    prompts  int64: leading tokens of each of them that are no targets
    labels   of each of them (None where there are no labels)
    bad      the first bad rows; `skipped` counts all of them. With `failed`, the chunk is of no use.
    """

    tokens: bytes = b""
    ends: bytes = b""
    prompts: bytes = b""
    labels: list[str | int | None] = field(default_factory=list)
    text_bytes: int = 0
    empty: int = 0
    skipped: int = 0
    failed: bool = False
    bad: list[Finding] = field(default_factory=list)
    sha256: str = ""

    def header(self) -> dict[str, Any]:
        """Everything but the three byte strings, for JSON."""
        values = {key: value for key, value in self.__dict__.items() if key not in ("tokens", "ends", "prompts", "bad")}
        return {**values, "bad": [asdict(finding) for finding in self.bad]}

    @classmethod
    def from_header(cls, values: dict[str, Any], tokens: bytes, ends: bytes, prompts: bytes) -> Result:
        values["bad"] = [Finding(**finding) for finding in values["bad"]]
        return cls(tokens, ends, prompts, **values)


@dataclass(frozen=True)
class Job:
    """How every chunk is worked on.

    keys         of each source
    on_bad_row   "stop" or "skip"
    label_names  the only labels that are allowed, or None for any
    """

    tokenizer: Tokenizer
    form: Form
    keys: Sequence[Keys]
    on_bad_row: str = "stop"
    label_names: frozenset[str] | None = None

    def run(self, source: int, pieces: Sequence[Piece]) -> Result:
        """Tokens of the pieces of one source. A document may have begun in the chunk before, and may end in a later one."""
        result = Result()
        documents = self._documents(source, pieces, result)
        if result.failed:
            return result
        texts, owners = [], []
        for document in documents:
            if document.prompt is not None:
                texts.append(document.prompt)
                owners.append((document, True))
            texts.append(document.text)
            owners.append((document, False))
        ids: list[list[list[int]]] = [[] for _ in texts]
        for number, part in self.tokenizer.encode_parts(texts):
            ids[number].append(part)
        self._lay_out(owners, texts, ids, result)
        return result

    def _documents(self, source: int, pieces: Sequence[Piece], result: Result) -> list[Document]:
        kept = []
        for piece in pieces:
            for item in parse(piece, self.keys[source]):
                bad = item if isinstance(item, BadRow) else self._unknown_label(piece, item)
                if bad is not None:
                    result.skipped += 1
                    stops = bad.fatal or self.on_bad_row == "stop"
                    result.failed = result.failed or stops
                    if len(result.bad) < SHOWN:  # of a row that is left out the user has decided already
                        result.bad.append(bad.finding() if stops else replace(bad.finding(), fix=""))
                elif isinstance(item, Document):
                    if item.first and item.last and item.empty:
                        result.empty += 1
                    else:
                        kept.append(item)
        return kept

    def _unknown_label(self, piece: Piece, item: Document) -> BadRow | None:
        if self.label_names is None or item.label is None or str(item.label) in self.label_names:
            return None
        names = ", ".join(sorted(self.label_names)[:SHOWN])
        what = f"label {str(item.label)[:40]!r} is none of the {len(self.label_names)} that are known ({names})"
        return BadRow(piece.file, piece.unit, item.line, what)

    def _lay_out(
        self, owners: list[tuple[Document, bool]], texts: list[str], ids: list[list[list[int]]], result: Result
    ) -> None:
        tokens = array("H" if self.form.itemsize == 2 else "I")
        ends, prompts = array("q"), array("q")
        prompt, prompt_bytes, prompt_ids = 0, 0, array(tokens.typecode)
        for (document, is_prompt), text, parts in zip(owners, texts, ids, strict=True):
            size = len(text) if text.isascii() else len(text.encode("utf-8"))
            if is_prompt:
                prompt_ids = _joined(tokens.typecode, parts)
                prompt, prompt_bytes = len(self.form.prefix) + len(prompt_ids), size
                continue
            text_ids = _joined(tokens.typecode, parts)
            if document.first and document.last and not text_ids:  # a tokenizer may make nothing of white space
                result.empty += 1
            else:
                if document.first:
                    tokens.extend(self.form.prefix)
                tokens.extend(prompt_ids)
                tokens.extend(text_ids)
                result.text_bytes += size + prompt_bytes
                if document.last:
                    tokens.extend(self.form.suffix)
                    ends.append(len(tokens))
                    prompts.append(prompt)
                    result.labels.append(document.label)
            prompt, prompt_bytes, prompt_ids = 0, 0, array(tokens.typecode)
        for values in (tokens, ends, prompts):
            if sys.byteorder == "big":
                values.byteswap()
        result.tokens, result.ends, result.prompts = tokens.tobytes(), ends.tobytes(), prompts.tobytes()
        result.sha256 = hashlib.sha256(result.tokens).hexdigest()


def _joined(typecode: str, parts: list[list[int]]) -> array[int]:
    joined = array(typecode)
    for part in parts:
        joined.fromlist(part)
    return joined
