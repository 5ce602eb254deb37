"""Hints of the data layer name settings; a command says its own flags instead."""

from __future__ import annotations

import errno
import os
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


def test_generate_without_the_servers_packages_says_what_to_install(tmp_path: Path, capsys, monkeypatch):
    # mutation tried: without the check the import of fastapi ends in a traceback
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for flags in (["--prompts", "p.txt", "--output", "a.jsonl"], ["--interactive"]):
        assert main(["generate", str(tmp_path), *flags]) == 2
        said = capsys.readouterr().err
        assert f"{flags[0]}: runs on the engine of the server, which needs fastapi. Install it with: pip install" in said
    assert main(["generate", str(tmp_path)]) == 2
    assert "Give one of --prompt TEXT, --prompts FILE with --output FILE, and --interactive" in capsys.readouterr().err


def test_a_comparison_that_cannot_be_made_is_refused_before_anything_is_written(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr("meshwright.export.hf.find_spec", lambda name: None)
    monkeypatch.setattr("meshwright.export.hf.source_kind", lambda source: "ours")
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), "--compare", "logits"]) == 2
    assert "--compare logits: needs transformers" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_warm_up_longer_than_the_epochs_is_told(tmp_path: Path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"text": "a few words"}\n' * 40)
    config = tmp_path / "c.yaml"
    config.write_text(
        f"run: {{dir: {tmp_path}/run}}\nmodel: {{recipe: debug}}\n"
        f"data: {{train: [{{path: {tmp_path}/rows.jsonl}}], seq_len: 16, tokenizer: {{vocab: 300}}, workers: 1}}\n"
        "train: {epochs: 1, batch: 16, schedule: {warmup: 50}}\n"
    )
    assert main(["train", str(config), "--dry-run", "--nproc", "1", "--run.device=cpu"]) == 0
    assert "train.schedule.warmup: 50 steps are more than the" in capsys.readouterr().out
    assert main(["train", str(config), "--dry-run", "--nproc", "1", "--run.device=cpu", "--train.schedule.warmup=1"]) == 0
    assert "train.schedule.warmup: 1" not in capsys.readouterr().out


def test_a_disk_that_takes_nothing_more_is_the_users_to_mend(capsys, monkeypatch):
    # Red, with a traceback, without `is_full`; any other error of the system is shown whole.
    def read(folder: Path) -> None:
        raise OSError(number, os.strerror(number), "kept.json")

    monkeypatch.setattr("meshwright.bench.history.read_folder", read)
    number = errno.EROFS
    assert main(["bench", "history", "folder"]) == 2
    assert capsys.readouterr().err.startswith(
        "meshwright bench: kept.json: cannot be written: Read-only file system. Free space"
    )
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        main(["bench", "history", "folder"])
