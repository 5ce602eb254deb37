"""Bytes that are no text are named with line and offset; an encoding is never guessed in the middle of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config.schema import Source
from meshwright.data import encoding, readers
from meshwright.data.readers import documents
from meshwright.errors import DataError

TEXT = "训练数据 测试"
GBK = bytes.fromhex("d1b5c1b7cafdbedd20b2e2cad4")
UTF8 = bytes.fromhex("e8aeade7bb83e695b0e68dae20e6b58be8af95")
MARK = b"\xef\xbb\xbf"


def texts(path: Path, **settings: str) -> list[str]:
    return [document.text for document in documents(Source(path=str(path), **settings))]


def refused(path: Path, **settings: str) -> str:
    with pytest.raises(DataError) as error:
        texts(path, **settings)
    return str(error.value)


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv"])
def test_exactly_one_mark_at_the_start_is_dropped(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    before, after = {"txt": (b"", b""), "jsonl": (b'{"text": "', b'"}\n'), "csv": (b"text\n", b"\n")}[kind]
    inside = "a\ufeffb".encode()
    path.write_bytes(MARK + before + inside + after)
    assert texts(path) == ["a\ufeffb"]
    assert texts(path, encoding="utf-8-sig") == ["a\ufeffb"]
    assert texts(path, encoding="auto") == ["a\ufeffb"]
    path.write_bytes(MARK + MARK + before + inside + after)
    if kind == "txt":
        assert texts(path) == ["\ufeffa\ufeffb"]
    else:
        assert str(path) in refused(path)
    assert "byte-order mark of UTF-8, but encoding is gbk" in refused(path, encoding="gbk")


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv"])
@pytest.mark.parametrize("codec", ["utf-16", "utf-16-be", "utf-32", "utf-16-le"])
def test_utf16_and_utf32_are_refused_by_name(tmp_path: Path, kind: str, codec: str) -> None:
    path = tmp_path / f"a.{kind}"
    path.write_bytes('{"text": "ab"}\n'.encode(codec))
    for wanted in ("utf-8", "auto", "gbk"):
        message = refused(path, encoding=wanted)
        assert str(path) in message and ("UTF-32" if "32" in codec else "UTF-16") in message
    assert "does not keep the bytes of ASCII" in refused(path, encoding=codec)


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_gbk_is_named_then_read_when_told(tmp_path: Path, kind: str) -> None:
    before, after = (b"", b"\n") if kind == "txt" else (b'{"text": "', b'"}\n')
    path, other = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
    path.write_bytes(before + GBK + after)
    other.write_bytes(before + UTF8 + after)
    message = refused(path)
    offset = len(before) + 2  # d1 b5 happens to be a character of UTF-8 as well
    assert f"{path}, line 1: not utf-8: byte 0xC1 at byte offset {offset} of the line" in message
    assert "starts at byte offset 0 of the file" in message
    assert "encoding: gbk" in message
    for name in ("gbk", "GB18030", "auto"):
        assert texts(path, encoding=name) == texts(other) == [TEXT + ("\n" if kind == "txt" else "")]


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_mixed_lines_are_refused_at_the_first_bad_one(tmp_path: Path, kind: str) -> None:
    before, after = (b"", b"\n") if kind == "txt" else (b'{"text": "', b'"}\n')
    path = tmp_path / f"a.{kind}"
    good = before + UTF8 + after
    path.write_bytes(good + before + GBK + after)
    message = refused(path)
    assert f"{path}, line 2: not utf-8" in message
    assert f"starts at byte offset {len(good)} of the file" in message
    message = refused(path, encoding="auto")
    assert "mixed: " in message and f"{path}, line 2: " in message and "line 1 is UTF-8" in message
    assert f"byte offset {len(good) + len(before) + 2} of the file" in message


def test_bad_bytes_in_a_long_document_stop_whatever_the_policy(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    data = b"x" * (3 << 20) + b"\xff" + b"y" * (1 << 20)
    path.write_bytes(data)
    for policy in ("stop", "skip"):
        with pytest.raises(DataError, match=f"line 1: not utf-8: byte 0xFF at byte offset {3 << 20} of the file"):
            list(documents(Source(path=str(path)), policy))


def test_a_bad_text_file_can_be_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff")
    (tmp_path / "b.txt").write_bytes(b"fine")
    assert [d.text for d in documents(Source(path=str(tmp_path)), "skip")] == ["fine"]


def test_auto_decides_for_each_file(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_bytes(GBK)
    (tmp_path / "2.txt").write_bytes(UTF8)
    (tmp_path / "3.txt").write_bytes(b"plain")
    assert texts(tmp_path, encoding="auto") == [TEXT, TEXT, "plain"]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), st.integers(1, 7), st.sampled_from(["utf-8", "gb18030"]))
@settings(max_examples=100, deadline=None)
def test_the_decision_does_not_depend_on_blocks(text: str, size: int, codec: str) -> None:
    data = text.encode(codec)
    blocks = [data[i : i + size] for i in range(0, len(data), size)]
    try:
        expected = "utf-8" if data.decode("utf-8") is not None else ""
    except UnicodeDecodeError:
        expected = codec
    assert encoding.decide(lambda: blocks, "a") == expected


@given(st.binary(max_size=40), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_the_first_bad_byte_is_found_whatever_the_blocks(data: bytes, size: int) -> None:
    blocks = [data[i : i + size] for i in range(0, len(data), size)]
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        try:
            decided = encoding.decide(lambda: blocks, "a")
        except DataError as refusal:
            assert f"at byte offset {error.start} of the file" in str(refusal)
            assert f"line {data.count(10, 0, error.start) + 1}:" in str(refusal)
        else:
            assert decided == "gb18030"
            data.decode("gb18030")
    else:
        assert encoding.decide(lambda: blocks, "a") == "utf-8"


@pytest.mark.parametrize("codec", ["utf-8", "gbk", "gb18030", "big5", "shift_jis"])
def test_prefixes_of_whole_characters(codec: str) -> None:
    data = "漢字".encode(codec)
    first = len("漢".encode(codec))
    assert [encoding.whole_characters(data[:n], codec) for n in range(len(data) + 1)] == [
        len(data) if n == len(data) else first if n >= first else 0 for n in range(len(data) + 1)
    ]


def test_rows_of_other_encodings(tmp_path: Path) -> None:
    for codec in ("big5", "shift_jis", "latin-1", "gb18030"):
        text = "é" if codec == "latin-1" else "漢字"
        (tmp_path / "a.jsonl").write_bytes(json.dumps({"text": text}, ensure_ascii=False).encode(codec))
        assert texts(tmp_path / "a.jsonl", encoding=codec) == [text]
    for name in ("rot13", "utf-7x", "utf-16", "cp037"):
        assert encoding.problem_with(name)


def test_offsets_in_later_documents_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    good = (b"line\n" * 10 + b"\n") * 40_000
    path.write_bytes(good + b"ab\xffcd\n")
    assert len(good) > readers.WHOLE
    message = refused(path)
    assert f"{path}, line {good.count(10) + 1}: " in message
    assert f"byte offset 2 of the line, which starts at byte offset {len(good)} of the file" in message
