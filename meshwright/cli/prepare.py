"""`meshwright prepare`: text to token shards."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from meshwright.cli.flags import said_as_flags
from meshwright.errors import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwright.data.manifest import Manifest
    from meshwright.data.prepare import Update

EPILOG = "Example: meshwright prepare corpus/*.jsonl.zst -o prepared --vocab 32000 --on-bad-row skip"


def register(app: typer.Typer) -> None:
    @app.command(epilog=EPILOG)
    def prepare(
        inputs: Annotated[
            list[str],
            typer.Argument(
                metavar="INPUT...",
                help="Files, folders, globs (.txt .jsonl .parquet .csv, also .gz .zst), or embedded: text of this machine.",
            ),
        ],
        out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the shards.")],
        tokenizer: Annotated[
            str | None, typer.Option(help="tokenizer.json, a folder with one, or a SentencePiece .model. Default: train one.")
        ] = None,
        vocab: Annotated[int | None, typer.Option(min=1, help="Size of the BPE that is trained (8192).")] = None,
        objective: Annotated[
            Literal["causal_lm", "masked_lm", "classify"], typer.Option(help="Which special tokens go around a document.")
        ] = "causal_lm",
        format: Annotated[
            Literal["auto", "txt", "jsonl", "parquet", "csv"], typer.Option(help="auto: by the file's ending.")
        ] = "auto",
        text_key: Annotated[str, typer.Option(help="Key or column of the text.")] = "text",
        label_key: Annotated[str | None, typer.Option(help="Key or column of the label.")] = None,
        encoding: Annotated[str, typer.Option(help="utf-8, gbk, ..., or auto: decided for each file.")] = "utf-8",
        on_bad_row: Annotated[Literal["stop", "skip"], typer.Option(help="Malformed rows: stop, or skip and count.")] = "stop",
        workers: Annotated[int, typer.Option(min=0, help="Processes; 0: one a core.")] = 0,
        overwrite: Annotated[
            bool, typer.Option("--overwrite", help="Replace a corpus in the folder that was made from something else.")
        ] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    ) -> int:
        """Turn text into token shards. A run that was stopped goes on where it was."""
        from meshwright.config.schema import Source, TokenizerConfig
        from meshwright.data.prepare import prepare as run
        from meshwright.data.sample import tokenizer_for
        from meshwright.errors import ConfigError, Finding

        if tokenizer is not None and vocab is not None:
            what = "sizes a tokenizer that is trained, but --tokenizer names one"
            raise ConfigError(findings=[Finding("--vocab", what, "Leave one of them out")])
        keys = {"format": format, "text_key": text_key, "label_key": label_key, "encoding": encoding}
        sources = [Source(path=path, **keys) for path in inputs]
        flags = ("text_key", "label_key", "on_bad_row", "encoding", "format")
        with said_as_flags(*flags), _Progress() as progress:
            if tokenizer is None:
                progress.say("training a tokenizer on the corpus")
            config = TokenizerConfig(path=tokenizer, vocab=vocab or TokenizerConfig().vocab)
            made = run(
                sources,
                out,
                tokenizer=tokenizer_for(sources, config, on_bad_row),
                objective=objective,
                on_bad_row=on_bad_row,
                workers=workers,
                progress=progress.update,
                overwrite=overwrite,
            )
        _summary(made, out, progress, as_json)
        return 0


class _Progress:
    """A live line on a terminal; elsewhere a plain line every few seconds. Both on standard error."""

    EVERY = 5.0

    def __init__(self) -> None:
        self.last: Update | None = None
        self.seconds = 0.0
        self.ready = False
        self._printed = 0.0
        self._status: Any = None
        self._say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            from rich.console import Console

            console = Console(stderr=True, highlight=False)
            self._status = console.status("reading", spinner="line")
            self._say = lambda text: console.print(text, markup=False)
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        self._say(text)

    def update(self, update: Update) -> None:
        self.last = update
        self.seconds = update.seconds
        if update.note:
            self.say(update.note)
            self.ready = update.documents == 0 and update.read == 0
        if self._status is not None:
            from rich.text import Text

            self._status.update(Text(progress_line(update)))
        elif update.read and update.seconds - self._printed >= self.EVERY:
            self._printed = update.seconds
            self.say(progress_line(update))


def progress_line(update: Update) -> str:
    """Share done, counts, rate and the time that is left, from an update."""
    share = min(1.0, update.read / update.total) if update.total else 1.0
    rate = update.bytes / update.seconds / 1e6 if update.seconds else 0.0
    left = f", {update.seconds * (1 - share) / share:,.0f} s left" if 0 < share < 1 else ""
    counts = f"{counted(update.documents, 'document')}, {counted(update.tokens, 'token')}"
    lost = f", {update.empty:,} empty, {update.skipped:,} skipped" if update.empty or update.skipped else ""
    return f"{share:4.0%}  {counts}{lost}, {rate:.2f} MB/s{left}"


def _summary(made: Manifest, out: Path, progress: _Progress, as_json: bool) -> None:
    seconds = progress.seconds
    values = {
        "out": str(out),
        "documents": made.documents,
        "tokens": made.tokens,
        "bytes": made.bytes,
        "empty": made.empty,
        "skipped": made.skipped,
        "vocab": made.vocab_size,
        "labels": made.label_names,
        "encodings": _encodings(made),
        "seconds": round(seconds, 3),
        "mb_per_s": round(made.bytes / seconds / 1e6, 3) if seconds else None,
    }
    if as_json:
        print(json.dumps(values, ensure_ascii=False))
        return
    text = f"{made.bytes / 1e6:,.1f} MB" if made.bytes >= 1e5 else counted(made.bytes, "byte")
    held = f"{counted(made.documents, 'document')}, {counted(made.tokens, 'token')} of a vocabulary of {made.vocab_size:,}"
    print(f"{out}: {held}, {text} of text")
    print(f"left out: {counted(made.empty, 'empty document')} and {counted(made.skipped, 'bad row')}")
    for line in made.first_skipped[:5]:
        print(f"  {line}")
    if set(_encodings(made)) - {"utf-8"}:
        print("encodings: " + ", ".join(f"{counted(count, 'file')} {name}" for name, count in _encodings(made).items()))
    if made.label_names is not None:
        more = " ..." if len(made.label_names) > 10 else ""
        print(f"{counted(len(made.label_names), 'label')}: {', '.join(made.label_names[:10])}{more}")
    if not made.tokenizer["suffix"]:
        print("the tokenizer has no end-of-text token, so documents end without one")
    if seconds and not progress.ready:
        print(f"{seconds:.1f} s, {made.bytes / seconds / 1e6:.2f} MB/s")


def _encodings(made: Manifest) -> dict[str, int]:
    counts: dict[str, int] = {}
    for source in made.sources:
        for name, count in source["encodings"].items():
            counts[name] = counts.get(name, 0) + count
    return counts
