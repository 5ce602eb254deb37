"""What is said of a full disk, and files that are replaced whole."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright import disk
from meshwright.bench.page import write_measures
from meshwright.disk import readable, replacing, room, unwritable, write_whole, writing
from meshwright.errors import DeviceError
from meshwright.observe.metrics import MetricsWriter
from meshwright.observe.report import write_report
from meshwright.observe.summary import save_facts
from meshwright.runtime.folder import RunFolder


def test_sizes_have_the_unit_that_shows_them():
    shown = [readable(size) for size in (0, 1023, 1024, 1536, 3 << 20, 5 << 30, 7 << 40, 1 << 60)]
    assert shown == ["0 bytes", "1023 bytes", "1.0 KiB", "1.5 KiB", "3.0 MiB", "5.0 GiB", "7.0 TiB", "1,024.0 PiB"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "cannot be written: No space left on device (1.5 KiB free). Free space, or name another folder"),
        (errno.EDQUOT, "cannot be written: Disk quota exceeded (1.5 KiB free). Free space, or name another folder"),
        (errno.EFBIG, "cannot be written: File too large. Free space, or name another folder"),
        (errno.EROFS, "cannot be written: Read-only file system. Free space, or name another folder"),
        (errno.EACCES, "cannot be written: Permission denied. Name another place, or let it be written to"),
    ],
)
def test_a_full_disk_has_one_wording(number: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Space of the disk that a file would be on, though neither it nor its folder is there."""
    asked = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        if not path.exists():
            raise FileNotFoundError(path)
        return SimpleNamespace(free=1536)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    error, where = OSError(number, os.strerror(number)), tmp_path / "none" / "file"
    assert str(unwritable(where, error)) == f"{where}: {words}"
    assert str(unwritable(where, error, "Then go on")) == f"{where}: {words}. Then go on"
    told = str(unwritable(where, error, size=5 << 20))
    assert ("(5.0 MiB are needed, 1.5 KiB free)" in told) == ("free)" in words)
    assert asked == ([where, where.parent, tmp_path] * 3 if "free)" in words else [])
    assert str(unwritable("", OSError(number, "x"))).startswith("a file: cannot be written: x. ")
    with pytest.raises(DeviceError), writing(where):
        raise error
    with pytest.raises(OSError if number == errno.EACCES else DeviceError), room(where):
        raise error


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Through a link too, which stays one. Mutation tried: `path` itself is opened."""
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    write_whole(link, "n\u00e9w\n")
    assert link.is_symlink() and file.read_bytes() == "n\u00e9w\n".encode()
    with pytest.raises(RuntimeError), replacing(file) as out:
        out.write("half")
        out.flush()
        assert file.read_text(encoding="utf-8") == "n\u00e9w\n"
        raise RuntimeError
    with pytest.raises(DeviceError, match="no/file: cannot be written: No such file or directory"):
        write_whole(tmp_path / "no" / "file", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def _steps(folder: Path) -> None:
    writer = MetricsWriter(folder / "metrics.jsonl", resume_step=1)
    writer.write(step=2, loss=1.0, grad_norm=1.0, lr=0.1, tokens=8, tokens_per_s=1.0)
    writer.close()


WRITERS: dict[str, Callable[[Path], Any]] = {
    "metrics.jsonl": _steps,
    "report.html": write_report,
    "machine.json": lambda folder: save_facts(folder, machine={"devices": 2}),
    "result.json": lambda folder: RunFolder(folder).write_result({"loss": 1.0}),
    "results.html": lambda folder: write_measures(folder / "results.html", "table", []),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_a_full_disk_refuses_stays_as_it_was(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of all that is written into a run folder or that of a benchmark. Mutation tried: `write_text` on the file itself in
    save_facts, which says nothing of the full disk."""

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    old = '{"step": 1, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 4, "tokens_per_s": 1.0}\n'
    (tmp_path / "metrics.jsonl").write_text(old)
    if name != "metrics.jsonl":
        (tmp_path / name).write_text("old")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as disk_is_full:
        disk_is_full.setattr(disk.os, "fsync", full)
        with pytest.raises(DeviceError, match=f"{name}: cannot be written: No space left on device .* free.. Free space"):
            WRITERS[name](tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    WRITERS[name](tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == before.keys() and (tmp_path / name).read_bytes() != before[name]


def test_a_text_for_which_there_is_no_room_is_told_with_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Red when characters are counted in place of bytes.
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DeviceError, match=r"1\.5 KiB are needed, .* free"):
        write_whole(tmp_path / "page", "\u8bad" * 512)
