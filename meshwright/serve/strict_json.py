"""Objects of JSON in which no key stands twice: of two, the value that comes last would be taken without a word."""

from __future__ import annotations

from typing import Any

__all__ = ["RepeatedKeyError", "once"]


class RepeatedKeyError(ValueError):
    """An object has `key` twice."""

    def __init__(self, key: str):
        self.key = key[:80].encode("utf-8", "backslashreplace").decode()  # half of a surrogate pair cannot be answered
        super().__init__(self.key)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads: an object. Raises RepeatedKeyError, and UnicodeEncodeError for a key that is no text."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        raise RepeatedKeyError(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    for key in found:
        key.encode()  # one with half of a surrogate pair could not be named in an answer
    return found
