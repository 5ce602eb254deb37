"""Hints of the data layer name settings; a command says its own flags instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.cli.flags import said_as_flags
from meshwright.errors import DataError, Finding


def test_settings_become_flags_and_words_stay_words():
    with pytest.raises(DataError) as caught, said_as_flags("text_key", "on_bad_row", "encoding", "format"):
        fix = "Set text_key to the key, data.on_bad_row: skip, encoding: gbk or format: txt; the encoding and format are yours"
        raise DataError(findings=[Finding("on_bad_row", "my_text_key, context_key", fix)])
    (found,) = caught.value.findings
    assert (found.where, found.what) == ("--on-bad-row", "my_text_key, context_key")
    assert found.fix == (
        "Set --text-key to the key, --on-bad-row skip, --encoding gbk or --format txt; the encoding and format are yours"
    )


def test_an_error_without_findings_is_as_it_was():
    with pytest.raises(DataError, match="plain text_key"), said_as_flags("text_key"):
        raise DataError("plain text_key")


def test_prepare_says_its_own_flags(tmp_path: Path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "good"}\n')
    assert main(["prepare", str(rows), "-o", str(tmp_path / "out"), "--vocab", "300"]) == 2
    said = capsys.readouterr().err
    assert "Set --text-key to the key that holds the text" in said and "text_key" not in said
    rows.write_text('{"text": "good"}\n{"text": \n')
    assert main(["prepare", str(rows), "-o", str(tmp_path / "out"), "--vocab", "300"]) == 2
    assert "--on-bad-row skip" in capsys.readouterr().err
    rows.write_text('{"text": "good"}\n')
    assert main(["prepare", str(rows), "-o", str(tmp_path / "out"), "--vocab", "300", "--objective", "classify"]) == 2
    assert "Set --label-key to the key that holds the class" in capsys.readouterr().err
