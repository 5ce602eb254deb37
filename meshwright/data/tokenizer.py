"""Text to token ids and back: a Hugging Face `tokenizer.json`, a SentencePiece model, or a byte-level BPE trained here.

Ids never depend on how many texts are encoded at a time, nor on the number of workers. A text longer than PIECE characters is
encoded in pieces: memory stays bounded (a library holds some hundred bytes a token), and time is linear in the length of a text
whatever the library does with a word of megabytes. A piece ends where a line or a word does, so common tokenizers give the ids
of the whole text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from meshwright.errors import DataError, Finding

__all__ = ["SPECIAL_TOKENS", "Tokenizer", "pieces"]

PIECE = 1 << 15
"""Characters that are encoded at a time."""

WORD = 1 << 12
"""Characters that a tokenizer is trained on at a time: the library takes the square of a word's length."""

GROUP = 1 << 19
"""Characters that a library is given at a time: more is slower, for its results no longer fit the caches."""

WORD_END = re.compile(r"\S(?=\s)")

ROLES = ("bos", "eos", "pad", "mask", "cls", "sep", "unk")

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|mask|>", "<|cls|>", "<|sep|>")
"""Ids 0 to 5 of a tokenizer trained here, in the order of ROLES."""

COMMON_NAMES = {
    "bos": ("<|bos|>", "<s>", "<bos>", "<|begin_of_text|>", "[BOS]"),
    "eos": ("<|eos|>", "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "[EOS]"),
    "pad": ("<|pad|>", "<pad>", "[PAD]"),
    "mask": ("<|mask|>", "<mask>", "[MASK]"),
    "cls": ("<|cls|>", "[CLS]", "<cls>"),
    "sep": ("<|sep|>", "[SEP]", "<sep>"),
    "unk": ("<unk>", "[UNK]"),
}
"""Tried in order where no configuration beside the tokenizer names the special token."""


class Backend(Protocol):
    """What a tokenizer library has to do for us."""

    vocab_size: int

    def encode(self, texts: list[str]) -> list[list[int]]: ...

    def decode(self, ids: list[int], skip_special: bool) -> str: ...

    def id_of(self, token: str) -> int | None: ...

    def token_of(self, number: int) -> str | None: ...

    def special_ids(self) -> dict[str, int]: ...

    def prefix_with_bos(self) -> bool: ...

    def identity(self) -> bytes: ...

    def write(self, folder: Path) -> None: ...


class Tokenizer:
    """One tokenizer, whatever library it comes from.

    vocab_size   largest id + 1, added tokens included
    bos ... unk  ids of the special tokens, None where the tokenizer has none
    adds_bos     the tokenizer's own template starts a text with bos (Llama), so documents do too
    fingerprint  sha256 over vocabulary, rules and special ids: equal exactly when every text gets the same ids
    """

    def __init__(self, backend: Backend, config: dict[str, Any] | None = None):
        self._backend = backend
        self._config = dict(config or {})
        self.vocab_size = backend.vocab_size
        ids = self._resolve()
        self.bos, self.eos, self.pad = ids["bos"], ids["eos"], ids["pad"]
        self.mask, self.cls, self.sep, self.unk = ids["mask"], ids["cls"], ids["sep"], ids["unk"]

    def _resolve(self) -> dict[str, int | None]:
        found: dict[str, int | None] = dict.fromkeys(ROLES)
        native = self._backend.special_ids()
        for role in ROLES:
            named = token_text(self._config.get(f"{role}_token"))
            if named is not None:
                found[role] = self._backend.id_of(named)
            elif role in native:
                found[role] = native[role]
            else:
                ids = (self._backend.id_of(name) for name in COMMON_NAMES[role])
                found[role] = next((number for number in ids if number is not None), None)
        return found

    @property
    def special(self) -> dict[str, int | None]:
        """Role to id, for all roles."""
        return {role: getattr(self, role) for role in ROLES}

    @cached_property
    def adds_bos(self) -> bool:
        return self.bos is not None and bool(self._config.get("add_bos_token", self._backend.prefix_with_bos()))

    @property
    def special_names(self) -> dict[str, str]:
        """`bos_token` and so on to the token's text, for the roles that have one."""
        names = {f"{role}_token": self.token(number) for role, number in self.special.items() if number is not None}
        return {role: name for role, name in names.items() if name is not None}

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the template that turns messages into a prompt (the one called "default" of several)."""
        found = self._config.get("chat_template")
        if isinstance(found, list):
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            found = named.get("default")
        return found if isinstance(found, str) else None

    def token(self, number: int) -> str | None:
        """Name of a token in the vocabulary; None where the number has none."""
        return self._backend.token_of(number)

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(self._backend.identity())
        digest.update(json.dumps({**self.special, "adds_bos": self.adds_bos}, sort_keys=True).encode())
        return digest.hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens around it. Linear in the number of characters.

        Raises DataError for text that no file can hold (lone surrogates).
        """
        encoded: list[list[int]] = [[] for _ in texts]
        for number, ids in self.encode_parts(texts):
            if encoded[number]:
                encoded[number].extend(ids)
            else:
                encoded[number] = ids
        return encoded

    def encode_parts(self, texts: Sequence[str]) -> Iterator[tuple[int, list[int]]]:
        """(number of the text, its next ids), in order; a long text comes in several parts, so that memory stays bounded."""
        numbers: list[int] = []
        group: list[str] = []
        size = 0
        for number, text in enumerate(texts):
            for part in pieces(text):
                numbers.append(number)
                group.append(part)
                size += len(part)
                if size >= GROUP:
                    yield from zip(numbers, self._encode(group), strict=True)
                    numbers, group, size = [], [], 0
        yield from zip(numbers, self._encode(group), strict=True)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        try:
            return self._backend.encode(texts)
        except (UnicodeEncodeError, TypeError):
            # the libraries say TypeError for a lone surrogate; anything else of that kind is our own mistake
            for text in texts:
                if isinstance(text, str) and not encodable(text):
                    raise DataError("the text has half of a surrogate pair, which is no character") from None
            raise

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of the ids; special tokens are left out unless asked for."""
        return self._backend.decode([int(number) for number in ids], skip_special)

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer and the names of its special tokens; `load(folder)` gives the same fingerprint."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.write(folder)
        config = {key: value for key, value in self._config.items() if not key.endswith("_token") or key == "add_bos_token"}
        for role, number in self.special.items():
            config[f"{role}_token"] = None if number is None else self._backend.token_of(number)
        config["tokenizer_class"] = self._config.get("tokenizer_class", "PreTrainedTokenizerFast")
        config["add_bos_token"] = self.adds_bos
        text = json.dumps({key: value for key, value in config.items() if value is not None}, indent=1, sort_keys=True)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """A tokenizer.json, a SentencePiece .model, or a folder with one of them (as Hugging Face saves it).

        Raises DataError naming the file when it is missing or broken.
        """
        from meshwright.data.tokenizer_backends import open_backend

        backend, config = open_backend(Path(path))
        return cls(backend, config)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Byte-level BPE with SPECIAL_TOKENS as the first ids. Equal texts give an equal tokenizer.

        texts: an iterable that is read once. A small corpus may yield fewer than `vocab_size` tokens.
        Raises DataError when vocab_size has no room for the 256 bytes and the special tokens.
        """
        from meshwright.data.tokenizer_backends import train_backend

        least = 256 + len(SPECIAL_TOKENS)
        if vocab_size < least:
            what = f"{vocab_size} is too small: 256 bytes and {len(SPECIAL_TOKENS)} special tokens need {least}"
            raise DataError(findings=[Finding("data.tokenizer.vocab", what, f"Set it to {least} or more")])
        parts = chain.from_iterable(pieces(text, WORD) for text in texts)
        backend = train_backend(parts, vocab_size, list(SPECIAL_TOKENS))
        return cls(backend, {f"{role}_token": name for role, name in zip(ROLES, SPECIAL_TOKENS, strict=False)})


def pieces(text: str, limit: int = PIECE) -> Iterator[str]:
    """The text in parts of at most `limit` characters, cut where a word begins, in the last half of the limit.

    Best after a single line break, else before a single space, else before any white space, else at the limit.
    """
    start = 0
    while len(text) - start > limit:
        end = _border(text, start + limit // 2, start + limit)
        yield text[start:end]
        start = end
    yield text[start:] if start else text


def _border(text: str, low: int, high: int) -> int:
    for space, after in (("\n", 1), (" ", 0)):
        at = text.rfind(space, low, high - 1)
        while at > 0:
            # tokenizers treat a run of spaces as a whole, so only a single one is cut at
            if not text[at - 1].isspace() and not text[at + 1].isspace():
                return at + after
            at = text.rfind(space, low, at)
    run = WORD_END.search(text, low, high)
    return run.end() if run else high


def encodable(text: str) -> bool:
    """False for a string with lone surrogates, which no encoding of Unicode can hold."""
    try:
        text.isascii() or text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def token_text(value: Any) -> str | None:
    """A special token as Hugging Face files write it: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
