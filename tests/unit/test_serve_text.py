"""Text in pieces: no half of a character, no beginning of a stop string, and joined the whole text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.tokenizer import Tokenizer
from meshwright.serve.text import Detokenizer, StopFilter


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the end of the other thing, 你好 你好"] * 3, 270)


@pytest.fixture(scope="module")
def bytes_of(tokenizer: Tokenizer) -> list[int]:
    """The token of each byte. A lone byte has no text of its own, so they are found by the characters that hold them."""
    found: dict[int, int] = {}
    inner = Tokenizer.train([], 262)
    for number in range(262):
        name = inner._backend.token_of(number)
        if number >= 6 and name is not None:
            found[_BYTES[name]] = number
    return [found[byte] for byte in range(256)]


def _byte_names() -> dict[str, int]:
    """GPT-2's printable names of bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in printable]
    return names | {chr(256 + index): byte for index, byte in enumerate(rest)}


_BYTES = _byte_names()


def streamed(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> tuple[list[str], str]:
    text = Detokenizer(tokenizer, prompt or [])
    return [text.push(token) for token in ids], text.end()


def test_characters_wait_for_their_last_byte(tokenizer: Tokenizer, bytes_of: list[int]):
    # Mutation tried: `_settled` gives all of the text: red.
    ids = [bytes_of[byte] for byte in bytes.fromhex("f09f9880e4bda0e5a5bd41")]
    pieces, rest = streamed(tokenizer, ids)
    assert pieces == ["", "", "", "😀", "", "", "你", "", "", "好", "A"] and rest == ""
    assert streamed(tokenizer, ids[:2]) == (["", ""], "�")


def test_a_prompt_that_ends_inside_of_a_character(tokenizer: Tokenizer, bytes_of: list[int]):
    ids = [bytes_of[byte] for byte in "😀".encode()]
    assert streamed(tokenizer, ids[2:], ids[:2]) == (["", "😀"], "")


def test_special_and_unknown_tokens_have_no_text(tokenizer: Tokenizer):
    word = tokenizer.encode("the")
    pieces, rest = streamed(tokenizer, [tokenizer.eos or 0, *word, 10**6, *word])
    assert "".join(pieces) + rest == "thethe"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_are_the_whole_text(data: st.DataObject, tokenizer: Tokenizer, bytes_of: list[int]):
    """Any bytes, valid or not, special tokens between them. Mutation tried: what is shown counts from before a cut: red."""
    text = data.draw(st.text("a 你😀�é", max_size=30))
    raw = data.draw(st.one_of(st.just(text.encode()), st.binary(max_size=40)))
    ids = [bytes_of[byte] for byte in raw]
    for at in data.draw(st.lists(st.integers(0, len(ids)), max_size=2)):
        ids.insert(at, tokenizer.eos or 0)
    pieces, rest = streamed(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids)


def test_the_window_stays_short(tokenizer: Tokenizer):
    text = Detokenizer(tokenizer)
    for token in tokenizer.encode("the end of the other thing " * 20):
        text.push(token)
        assert len(text._window) <= 40


def filtered(stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], str, bool]:
    stop = StopFilter(stops)
    out = [stop.push(piece) for piece in pieces]
    return out, stop.end(), stop.stopped


def test_a_stop_string_over_several_pieces():
    # Mutation tried: nothing is held back: red.
    pieces = ["alpha", " bet", "agam", "ma"]
    assert filtered(("tagam",), pieces) == (["alpha", " be", "", ""], "", True)
    assert filtered(("max",), pieces) == (["alpha", " bet", "aga", "m"], "ma", False)
    assert filtered(("bet", "beta"), pieces) == (["alpha", " ", "", ""], "", True)
    assert filtered((), pieces) == (pieces, "", False)
    assert filtered(("好",), ["你", "好"]) == (["你", ""], "", True)


@settings(max_examples=80, deadline=None)
@given(
    st.text("ab", max_size=14),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 14), max_size=6),
)
def test_pieces_do_not_matter_to_stop_strings(text: str, stops: list[str], cuts: list[int]):
    """Mutations tried: the stop string that begins first counts; a beginning is looked for one character short: each is red."""
    whole = filtered(tuple(stops), list(text))
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    out, rest, stopped = filtered(tuple(stops), pieces)
    assert ("".join(out) + rest, stopped) == ("".join(whole[0]) + whole[1], whole[2])
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if ends:
        expected = min(text.find(stop) for stop in stops if stop in text and text.find(stop) + len(stop) == min(ends))
        assert stopped and "".join(out) == text[:expected]
    else:
        assert not stopped and "".join(out) + rest == text
