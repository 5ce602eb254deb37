"""From the sources of a config to token stores on disk: prepared folders are taken as they are, the rest is prepared once."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.config.schema import Config, Source
from meshwright.disk import room
from meshwright.errors import DataError, DeviceError, Finding, not_json

if TYPE_CHECKING:
    from meshwright.data.dataset import RowDataset
    from meshwright.data.tokenizer import Tokenizer

__all__ = ["Corpus", "prepare_corpus"]

_NAME = "corpus.json"
_FORMS = {"lm": "causal_lm", "mlm": "masked_lm", "classify": "classify"}
"""Head of the model -> how `prepare` frames a document; a registered objective has one of these heads too."""


@dataclass(frozen=True)
class Corpus:
    """Where the stores of a run are: one for each source of data.train and data.valid."""

    train: tuple[Path, ...]
    valid: tuple[Path, ...]
    tokenizer_path: Path

    @classmethod
    def load(cls, folder: Path) -> Corpus:
        """Raises DataError where the folder has no note of `save`, or a damaged one."""
        try:
            values = json.loads((folder / _NAME).read_text(encoding="utf-8"))
            train, valid = (tuple(folder / path for path in values[kind]) for kind in ("train", "valid"))
            return cls(train, valid, folder / values["tokenizer"])
        except OSError as error:
            what = f"cannot be read: {error.strerror}"
        except (KeyError, TypeError):
            what = "does not say where the prepared data is"
        except (ValueError, RecursionError) as error:
            what = not_json(error)
        raise DataError(findings=[Finding(str(folder / _NAME), what, "Put the run's data/ folder back, or begin a new run")])

    def save(self, folder: Path) -> None:
        """What lies inside `folder` is noted relative to it, so that a run folder can be moved; the rest by its whole path."""

        def noted(path: Path) -> str:
            inside = path.is_relative_to(folder.absolute())
            return str(path.relative_to(folder.absolute()) if inside else path)

        values = {
            "train": list(map(noted, self.train)),
            "valid": list(map(noted, self.valid)),
            "tokenizer": noted(self.tokenizer_path),
        }
        (folder / _NAME).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    def tokenizer(self) -> Tokenizer:
        from meshwright.data.tokenizer import Tokenizer

        return Tokenizer.load(self.tokenizer_path)

    def datasets(
        self, config: Config, tokenizer: Tokenizer, task: str | None = None, *, verify: bool = False
    ) -> tuple[RowDataset, RowDataset | None]:
        """The training and the held-out samples. verify: read every byte of the stores and compare their digests, as is done
        once before a run starts. Raises ConfigError and DataError with all findings."""
        from meshwright.data.dataset import build_datasets
        from meshwright.data.shards import TokenStore

        train = [TokenStore.open(path, verify) for path in self.train]
        valid = [TokenStore.open(path, verify) for path in self.valid]
        return build_datasets(config, train, valid, tokenizer, task)

    def digests(self) -> tuple[str, ...]:
        """sha256 of each store's manifest, which has those of its files: the same digests, the same tokens."""
        from meshwright.data.sources import MANIFEST

        return tuple(hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest() for path in (*self.train, *self.valid))

    def other_forms(self, task: str) -> list[str]:
        """A line for each store that was prepared for another objective than the head `task` has, and serves all the same."""
        from meshwright.data.manifest import Manifest

        wanted = _FORMS[task]
        made = {path: Manifest.read(path).objective for path in (*self.train, *self.valid)}
        return [
            f"{path} was prepared for {form}, this run is {wanted}: its documents are used as they were framed then"
            for path, form in made.items()
            if form != wanted
        ]

    def label_names(self) -> tuple[str, ...]:
        """Names of the classes of the training corpora, in the order of their numbers; empty without labels."""
        from meshwright.data.shards import TokenStore

        return tuple(TokenStore.open(self.train[0]).label_names or ())


def prepare_corpus(
    config: Config, folder: Path, *, task: str, say: Callable[[str], None], label_names: Sequence[str] | None = None
) -> Corpus:
    """label_names: classes that the labels must be of; default: those of the first source.

    Make the stores that are not there yet, under `data.cache` or `folder`, and note in `folder` where all of them are.

    The tokenizer is data.tokenizer.path, else that of a prepared source, else one trained on the text of data.train. What lies
    in `folder` may be made anew; what lies under `data.cache` may be another run's, so that one made from something else is a
    DataError.
    """
    from meshwright.data.prepare import OtherCorpus, prepare

    base = Path(config.data.cache) if config.data.cache else folder
    own = base.absolute() == folder.absolute()
    for path, where in ((base, "data.cache"), (folder, "run.dir")):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"{path} cannot be made: {error.strerror}"
            raise DeviceError(findings=[Finding(where, what, "Choose a folder that can be written")]) from None
    with room(base):
        tokenizer, tokenizer_path = _tokenizer(config, base, own, say)

    def store(kind: str, number: int, source: Source) -> Path:
        nonlocal label_names
        prepared = _prepared(source)
        if prepared is not None:
            return prepared.absolute()
        out = base / f"{kind}-{number}"
        try:
            manifest = prepare(
                [source],
                out,
                tokenizer=tokenizer,
                objective=_FORMS[task],
                on_bad_row=config.data.on_bad_row,
                workers=config.data.workers,
                label_names=label_names,
                progress=lambda update: say(update.note) if update.note else None,
                overwrite=own,
            )
        except OtherCorpus as error:
            raise _others(out, error.findings[0].what) from None
        label_names = label_names or manifest.label_names
        if manifest.skipped or manifest.empty:
            first = f", first: {manifest.first_skipped[0]}" if manifest.first_skipped else ""
            say(f"{source.path}: left out {manifest.skipped} bad and {manifest.empty} empty documents{first}")
        return out.absolute()

    train = tuple(store("train", i, source) for i, source in enumerate(config.data.train))
    valid = tuple(store("valid", i, source) for i, source in enumerate(config.data.valid))
    corpus = Corpus(train, valid, tokenizer_path.absolute())
    with room(folder):
        corpus.save(folder)
    return corpus


def _others(path: Path, what: str) -> DataError:
    """What lies under data.cache was made from something else."""
    fix = "Another run may need it: name another data.cache, or remove this folder"
    return DataError(findings=[Finding(str(path), what, fix)])


def _prepared(source: Source) -> Path | None:
    from meshwright.data.sources import is_prepared

    return Path(source.path) if is_prepared(source.path) else None


def _tokenizer(config: Config, base: Path, own: bool, say: Callable[[str], None]) -> tuple[Tokenizer, Path]:
    from meshwright.data.tokenizer import Tokenizer

    wanted = config.data.tokenizer
    prepared = [path for path in map(_prepared, config.data.train) if path is not None]
    if wanted.path is not None:
        path = Path(wanted.path)
    elif prepared:
        path = prepared[0] / "tokenizer"
    else:
        path = _trained(config, base, own, say)
    return Tokenizer.load(path), path


def _trained(config: Config, base: Path, own: bool, say: Callable[[str], None]) -> Path:
    """The folder of a tokenizer trained on the training text; the one there already if it was made of the same settings. own:
    whether one of other settings may be replaced."""
    from meshwright.data.sample import tokenizer_for
    from meshwright.data.sources import find

    wanted = config.data.tokenizer
    path, note = base / "tokenizer", base / "tokenizer" / "made-from.json"
    files = [[entry.name, entry.size, entry.modified_ns] for entries in find(config.data.train) for entry in entries]
    settings = {"vocab": wanted.vocab, "sample_bytes": wanted.sample_bytes, "files": files}
    with contextlib.suppress(OSError, ValueError):  # none yet, or one that was cut short: it is made again
        made = json.loads(note.read_text(encoding="utf-8"))
        if made == settings:
            return path
        if not own and isinstance(made, dict):
            differ = sorted(key for key in settings if made.get(key) != settings[key])
            raise _others(path, f"holds a tokenizer made from something else ({', '.join(differ)} differ)")
    say(f"training a byte-level BPE of {wanted.vocab} tokens")
    tokenizer_for(config.data.train, wanted, config.data.on_bad_row).save(path)
    note.write_text(json.dumps(settings), encoding="utf-8")
    return path
