"""From tokens to text that can be sent at once: no half of a character, no beginning of a stop string. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

__all__ = ["Decodes", "Detokenizer", "StopFilter"]

BROKEN = "�"
TAIL = 3
"""Most bytes of a character that lacks its end, hence most replacement characters that stand for one."""
CONTEXT, WINDOW = 5, 16
"""Tokens of the prompt that a decoder sees before the answer (one that strips a leading space would strip it of the answer),
and tokens that are decoded again with each new one at most, where text allows a cut."""


class Decodes(Protocol):
    """What is asked of a tokenizer."""

    vocab_size: int

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...


class Detokenizer:
    """Text of an answer, token by token. Joined, it is what the tokenizer makes of all of them after the prompt."""

    def __init__(self, tokenizer: Decodes, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._window = [token for token in prompt[-CONTEXT:] if token < tokenizer.vocab_size]
        self._shown = len(_settled(self._decode())) if self._window else 0
        self._cuts = (0, len(self._window))
        """Where the window may begin, and where it may next: nothing was held back at either."""

    def push(self, token: int) -> str:
        """The text that is certain now. A token that the tokenizer does not know has none."""
        if token >= self._tokenizer.vocab_size:
            return ""
        self._window.append(token)
        text = self._decode()
        settled = _settled(text)
        new = settled[self._shown :]
        self._shown = max(self._shown, len(settled))
        if len(settled) == len(text) and new:
            self._cut()
        return new

    def end(self) -> str:
        """What was held back, as it is."""
        text = self._decode()[self._shown :]
        self._window, self._shown, self._cuts = [], 0, (0, 0)
        return text

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window)

    def _cut(self) -> None:
        """Nothing is held back: the window may begin at this place, once there is some text after it."""
        first, second = self._cuts
        if len(self._window) > WINDOW and second > first:
            rest = self._tokenizer.decode(self._window[second:])
            if rest and not rest.startswith(BROKEN):
                del self._window[:second]
                self._shown = len(_settled(rest))
                second = 0
        self._cuts = (second, len(self._window))


def _settled(text: str) -> str:
    """Without what could become another character by the next bytes."""
    end = len(text)
    while end and len(text) - end < TAIL and text[end - 1] == BROKEN:
        end -= 1
    return text[:end]


class StopFilter:
    """Holds back what could begin a stop string, and ends at the first one that is complete."""

    def __init__(self, stops: Iterable[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is no part of a stop string; after one, `stopped` is true and nothing comes any more.

        The stop string that ends first counts, of several the longest one, whatever pieces the text comes in.
        """
        if self.stopped:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = self._beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """What was held back and has become no stop string."""
        text, self._held = self._held, ""
        return text

    def _beginning(self, text: str) -> int:
        """Characters at the end that are the beginning of a stop string."""
        for size in range(min(len(text), max(map(len, self._stops), default=1) - 1), 0, -1):
            if any(stop.startswith(text[len(text) - size :]) for stop in self._stops):
                return size
        return 0
