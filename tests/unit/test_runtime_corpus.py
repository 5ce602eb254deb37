"""The note of where the prepared data of a run is: damaged, it is named and said what to do of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import DataError
from meshwright.runtime.corpus import Corpus


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        ("[]", "does not say where the prepared data is"),
        ('{"train": [], "valid": [1], "tokenizer": "t"}', "does not say where the prepared data is"),
        ("{}", "does not say where the prepared data is"),
        ("{", "is not JSON: "),
        ("[" * 100_000, "is nested too deeply"),
    ],
)
def test_a_damaged_note_is_named(text: str | None, words: str, tmp_path: Path) -> None:
    # Red when the values are taken outside of the block that answers for them, and with the name in the system's words too.
    note = tmp_path / "corpus.json"
    if text is not None:
        note.write_text(text)
    with pytest.raises(DataError, match=words) as caught:
        Corpus.load(tmp_path)
    assert str(caught.value).count(str(note)) == 1 and "Put the run's data/ folder back" in str(caught.value)
