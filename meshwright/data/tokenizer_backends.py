"""The tokenizer libraries behind `Tokenizer`: Hugging Face `tokenizers`, and SentencePiece where it is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.errors import DataError, Finding

CONFIG_FILES = ("special_tokens_map.json", "tokenizer_config.json")  # later ones win
CHAT_TEMPLATE = "chat_template.jinja"  # wins over the one in tokenizer_config.json, as in transformers
MODEL_NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


def open_backend(path: Path) -> tuple[Any, dict[str, Any]]:
    """(backend, what the configuration files beside it say). Raises DataError."""
    if not path.exists():
        raise _error(path, "there is no such tokenizer", "Give a tokenizer.json, a SentencePiece .model, or a folder with one")
    file = path if path.is_file() else _file_in(path)
    config = _read_config(file.parent)
    if file.suffix == ".model":
        return SentencePiece(_read(file), file), config
    return HuggingFace(_text(file, "not a tokenizer.json: "), file), config


def _file_in(folder: Path) -> Path:
    for name in ("tokenizer.json", *MODEL_NAMES):
        if (folder / name).is_file():
            return folder / name
    models = sorted(folder.glob("*.model"))
    if len(models) == 1:
        return models[0]
    what = f"the folder has {len(models)} .model files" if models else "the folder has no tokenizer.json and no .model file"
    raise _error(folder, what, "Name the file")


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise _error(file, f"cannot be read: {error.strerror}") from None


def _text(file: Path, otherwise: str = "") -> str:
    try:
        return _read(file).decode("utf-8")
    except UnicodeDecodeError:
        raise _error(file, f"{otherwise}the file is not UTF-8 text") from None


def _read_config(folder: Path) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in CONFIG_FILES:
        file = folder / name
        if not file.is_file():
            continue
        try:
            values = json.loads(_text(file))
        except (ValueError, RecursionError) as error:
            raise _error(file, f"not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise _error(file, "not a JSON object")
        merged.update({key: value for key, value in values.items() if value is not None})
    template = folder / CHAT_TEMPLATE
    if template.is_file():
        merged["chat_template"] = _text(template)
    return merged


def _error(path: Path, what: str, fix: str = "") -> DataError:
    return DataError(findings=[Finding(str(path), what, fix)])


class HuggingFace:
    """A `tokenizers.Tokenizer`. Truncation, padding and BPE dropout saved in the file are switched off: they are settings
    of some earlier use, and would cut or randomise a corpus."""

    def __init__(self, text: str, file: Path | None = None):
        import tokenizers

        self._text = text
        where = file or Path("tokenizer")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise _error(where, f"not a tokenizer.json that `tokenizers` {tokenizers.__version__} can read: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        model = self._tokenizer.model
        if getattr(model, "dropout", None):
            model.dropout = None
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise _error(where, "the tokenizer has no tokens")
        self.vocab_size = max(vocabulary.values()) + 1

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int], skip_special: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special)

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def token_of(self, number: int) -> str | None:
        return self._tokenizer.id_to_token(number)

    def special_ids(self) -> dict[str, int]:
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        number = self.id_of(unknown) if unknown else None
        return {} if number is None else {"unk": number}

    def prefix_with_bos(self) -> bool:
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        # a template that also closes the text (BERT's [CLS] a [SEP]) is one for encoders, not a start token
        return len(whole) == len(plain) + 1 and whole[1:] == plain

    def identity(self) -> bytes:
        values = json.loads(self._text)
        values["truncation"] = values["padding"] = None
        return json.dumps(values, sort_keys=True).encode()

    def write(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text(self._text, encoding="utf-8")


class SentencePiece:
    """A SentencePiece model, through the optional `sentencepiece` package."""

    def __init__(self, model: bytes, file: Path):
        try:
            import sentencepiece
        except ImportError:
            fix = "Install it with: pip install 'meshwright[hf]'"
            raise _error(file, "a SentencePiece model needs the package sentencepiece", fix) from None
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            loaded = self._processor.LoadFromSerializedProto(model)
        except (RuntimeError, ValueError) as error:
            raise _error(file, f"not a SentencePiece model: {error}") from None
        if not loaded or not len(self._processor):
            raise _error(file, "not a SentencePiece model")
        self.vocab_size = len(self._processor)
        self._control = {n for n in range(self.vocab_size) if self._processor.IsControl(n)}

    def encode(self, texts: list[str]) -> list[list[int]]:
        return self._processor.Encode(texts, out_type=int, num_threads=1)

    def decode(self, ids: list[int], skip_special: bool) -> str:
        if skip_special:
            return self._processor.Decode([number for number in ids if number not in self._control])
        # control tokens have no surface in SentencePiece, so their names are put between the decoded runs
        text = ""
        run: list[int] = []
        for number in ids:
            if number in self._control:
                text += self._processor.Decode(run) + self._processor.IdToPiece(number)
                run = []
            else:
                run.append(number)
        return text + self._processor.Decode(run)

    def id_of(self, token: str) -> int | None:
        number = self._processor.PieceToId(token)
        return number if self._processor.IdToPiece(number) == token else None

    def token_of(self, number: int) -> str | None:
        return self._processor.IdToPiece(number)

    def special_ids(self) -> dict[str, int]:
        ids = {name: getattr(self._processor, f"{name}_id")() for name in ("bos", "eos", "pad", "unk")}
        return {name: number for name, number in ids.items() if number >= 0}

    def prefix_with_bos(self) -> bool:
        return False

    def identity(self) -> bytes:
        return self._model

    def write(self, folder: Path) -> None:
        (folder / "tokenizer.model").write_bytes(self._model)


def train_backend(texts: Iterator[str], vocab_size: int, special: list[str]) -> HuggingFace:
    """A byte-level BPE (GPT-2's pre-tokenisation, no prefix space) trained on the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return HuggingFace(tokenizer.to_str())
