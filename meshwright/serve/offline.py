"""Many prompts through an engine without a server: a file to JSONL at full throughput, or as they are typed."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.errors import DataError, Finding, counted
from meshwright.serve.contract import Engine
from meshwright.serve.faults import ApiError
from meshwright.serve.prompts import Prompts
from meshwright.serve.request import Request
from meshwright.serve.sampling import SamplingParams
from meshwright.serve.strict_json import RepeatedKeyError, once

__all__ = ["Completed", "answer_file", "check_prompts", "complete", "read_prompts", "streamed"]

AHEAD = 1024
"""Prompts that an engine is given at a time, for each copy of its model: enough to fill any batch, and a file of any length
stays out of memory."""
SHOWN = 8
"""Findings of a file that are told: one of another shape has as many as lines."""
KEPT = 1 << 28
"""Bytes of token ids that are kept from the check of a file; prompts behind them are made into tokens again."""
OBJECTS = 200
"""Bytes of a prompt that is kept, beside its ids."""

Kept = tuple[int, Sequence[int]]
"""hash() of a prompt, for it may have changed since, and its token ids."""


@dataclass(frozen=True)
class Completed:
    """What has come of prompt number `index`, from 0. tokens: of the answer. finish: "stop" or "length"."""

    index: int
    prompt: str
    text: str
    tokens: int
    finish: str


def read_prompts(path: str | Path) -> Iterator[str]:
    """A prompt a line; of a .jsonl file the key "prompt" of each. Empty lines do not count.

    Raises DataError naming file and line.
    """
    for _, found in _rows(Path(path)):
        if isinstance(found, Finding):
            raise DataError(findings=[found])
        yield found


def check_prompts(path: str | Path, wrong: Callable[[str], str | None] = lambda text: None) -> list[Finding]:
    """What is wrong with a file of prompts, by its lines: the first few, and the number of the others.

    wrong: what speaks against a prompt that can be read.
    """
    findings, empty = [], True
    try:
        for where, found in _rows(Path(path)):
            empty = False
            if isinstance(found, Finding):
                findings.append(found)
            elif (what := wrong(found)) is not None:
                findings.append(Finding(where, what))
    except DataError as error:
        return list(error.findings)
    if empty:
        findings.append(Finding(str(path), "has no prompts", 'Write one a line, or rows of .jsonl with "prompt"'))
    if len(findings) > SHOWN:
        findings[SHOWN:] = [Finding(str(path), f"{counted(len(findings) - SHOWN, 'more line')} cannot be used")]
    return findings


def _rows(path: Path) -> Iterator[tuple[str, str | Finding]]:
    """(file and line, its prompt or what is wrong with it) of every line that is not empty."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                where = f"{path}:{number}"
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    yield where, Finding(where, f"byte {error.start} is not UTF-8")
                    continue
                if line.strip():
                    yield where, _prompt(line, where) if path.suffix == ".jsonl" else line
    except OSError as error:
        raise DataError(findings=[Finding(str(path), f"cannot be read: {error.strerror}")]) from None


def _prompt(line: str, where: str) -> str | Finding:
    try:
        row = json.loads(line, object_pairs_hook=once)
    except RepeatedKeyError as error:
        return Finding(where, f"has the key {error.key!r} more than once in an object", "Keep one of them")
    except (ValueError, RecursionError) as error:
        return Finding(where, f"is not valid JSON: {error}")
    text = row.get("prompt") if isinstance(row, dict) else None
    return text if isinstance(text, str) and text else Finding(where, 'has no text under "prompt"')


def complete(
    engine: Engine, prompts: Iterable[str], params: SamplingParams, ahead: int = AHEAD, kept: Sequence[Kept] = ()
) -> Iterator[Completed]:
    """The answer to each prompt, in their order. With a seed, prompt i has seed + i. ahead: prompts under way at a time.
    kept: of the first prompts, which fit.

    Raises DataError for a prompt that is empty or does not fit the context with its answer.
    """
    reader = Prompts(engine.tokenizer, engine.max_len)
    waiting = enumerate(prompts)
    texts: dict[int, str] = {}
    parts: dict[int, list[Any]] = {}
    ready: dict[int, Completed] = {}
    following, more = 0, True
    while more or texts:
        while more and len(texts) < ahead:
            index, text = next(waiting, (-1, ""))
            more = index >= 0
            if more:
                texts[index], parts[index] = text, []
                digest, ids = kept[index] if index < len(kept) else (0, ())
                engine.add(_request(reader, index, text, params, ids if digest == hash(text) else ()))
        for output in engine.step() if engine.has_work else ():
            index = int(output.id)
            parts[index].append(output)
            if output.finish is not None:
                ready[index] = _completed(index, texts.pop(index), parts.pop(index))
        while following in ready:
            yield ready.pop(following)
            following += 1


def _request(reader: Prompts, index: int, text: str, params: SamplingParams, ids: Sequence[int] = ()) -> Request:
    """ids: where they are known."""
    try:
        ids = ids or _fitting(reader, text, params)
    except ApiError as error:
        raise DataError(findings=[Finding(f"prompt {index + 1}", str(error))]) from None
    seed = None if params.seed is None else (params.seed + index) % 2**63
    return Request(str(index), tuple(ids), replace(params, seed=seed))


def _fitting(reader: Prompts, text: str, params: SamplingParams) -> list[int]:
    """Tokens of a prompt. Raises ApiError where there is no room for it and its answer."""
    ids = reader.text(text)
    reader.room(len(ids), params.max_tokens)
    return ids


def _completed(index: int, prompt: str, outputs: list[Any]) -> Completed:
    last = outputs[-1].finish
    if last not in ("stop", "length"):
        raise DataError(findings=[Finding(f"prompt {index + 1}", f"its answer ended with {last!r}")])
    text = "".join(output.text for output in outputs)
    return Completed(index, prompt, text, sum(len(output.tokens) for output in outputs), last)


def answer_file(
    engine: Engine, source: str | Path, target: str | Path, params: SamplingParams, ahead: int = AHEAD
) -> tuple[int, int]:
    """Write a JSON object a prompt of `source` to `target`: index, prompt, text, tokens, finish. (prompts, tokens made).

    Raises DataError for a file that is there already, or cannot be written; for prompts that are wrong or do not fit, all of
    them and before the file is made.
    """
    made = tokens = 0
    reader, kept, room = Prompts(engine.tokenizer, engine.max_len), list[Kept](), KEPT

    def wrong(text: str) -> str | None:
        nonlocal room
        try:
            ids = array("i", _fitting(reader, text, params))
        except ApiError as error:
            return str(error)
        room -= ids.itemsize * len(ids) + OBJECTS
        if room >= 0:
            kept.append((hash(text), ids))
        return None

    findings = check_prompts(source, wrong)
    if findings:
        raise DataError(findings=findings)
    try:
        with Path(target).open("x", encoding="utf-8") as file:
            for done in complete(engine, read_prompts(source), params, ahead, kept):
                file.write(json.dumps(vars(done), ensure_ascii=False) + "\n")
                made, tokens = made + 1, tokens + done.tokens
    except FileExistsError:
        raise DataError(findings=[Finding(str(target), "is there already", "Name another file")]) from None
    except OSError as error:
        fix = "Free space or name a file elsewhere, and remove this one, which is not whole" if made else "Name another file"
        raise DataError(findings=[Finding(str(target), f"cannot be written: {error.strerror}", fix)]) from None
    return made, tokens


def streamed(engine: Engine, prompt: str, params: SamplingParams, show: Callable[[str], None]) -> None:
    """`show` gets the answer to one prompt piece by piece. Ctrl-C ends it, and the engine forgets it."""
    engine.add(_request(Prompts(engine.tokenizer, engine.max_len), 0, prompt, params))
    try:
        while engine.has_work:
            for output in engine.step():
                show(output.text)
    except BaseException:
        engine.abort("0")
        raise
