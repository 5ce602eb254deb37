"""JSON as people write it by hand: with #, // and /* */ comments and commas before a closing bracket. No key comes twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from meshwright.errors import ConfigError, Finding, not_json

__all__ = ["parse"]


def parse(text: str, where: str) -> Any:
    """The value in `text`. Raises ConfigError that names `where` and line, or every key that is there twice in one object."""
    plain = "".join(_without_commas(_without_comments(text.removeprefix("\ufeff"))))
    twice: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                twice.append(key)
            seen.add(key)
        return dict(pairs)

    try:
        value = json.loads(plain, object_pairs_hook=collect)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        place = f"{where}:{line}" if line is not None else where
        raise ConfigError(findings=[Finding(place, not_json(error))]) from None
    if twice:
        fix = "Keep one of them"
        raise ConfigError(findings=[Finding(where, f"the key {key!r} is there twice", fix) for key in dict.fromkeys(twice)])
    return value


def _tokens(text: str) -> Iterator[str]:
    """Strings and comments as one piece each, everything else character by character."""
    at, end = 0, len(text)
    while at < end:
        stop = at + 1
        if text[at] == '"':
            while stop < end and text[stop] != '"':
                stop += 2 if text[stop] == "\\" else 1
            stop += 1
        elif text[at] == "#" or text.startswith("//", at):
            found = text.find("\n", at)
            stop = end if found < 0 else found
        elif text.startswith("/*", at):
            found = text.find("*/", at + 2)
            stop = end if found < 0 else found + 2
        yield text[at:stop]
        at = stop


def _without_comments(text: str) -> Iterator[str]:
    """Lines keep their numbers."""
    for token in _tokens(text):
        yield "\n" * token.count("\n") + " " if token.startswith(("#", "//", "/*")) else token


def _without_commas(tokens: Iterator[str]) -> Iterator[str]:
    held = ""  # a comma and the white space behind it
    for token in tokens:
        if held and token not in "}]" and not token.isspace():
            yield held
            held = ""
        elif held and not token.isspace():
            yield held[1:]
            held = ""
        if token == "," or held:
            held += token
        else:
            yield token
    yield held
