"""Files of every format become the documents they hold, and everything that is wrong is named with its place."""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config.schema import Source
from meshwright.data import corpus, readers, sources
from meshwright.data.readers import documents, line_pieces, text_pieces
from meshwright.data.sources import find
from meshwright.errors import DataError

ROWS = [{"text": "one"}, {"text": 'zwei, "drei"\nvier'}, {"text": "训练 数据"}]


def texts(path: Path | str, **settings: str) -> list[str]:
    return [document.text for document in documents(Source(path=str(path), **settings))]


def refused(path: Path | str, **settings: str) -> str:
    with pytest.raises(DataError) as error:
        texts(path, **settings)
    return str(error.value)


def packed(data: bytes, ending: str) -> bytes:
    if ending == ".gz":
        return gzip.compress(data)
    return zstandard.ZstdCompressor().compress(data) if ending == ".zst" else data


def written(kind: str) -> bytes:
    if kind == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    if kind == "csv":
        file = io.StringIO(newline="")
        writer = csv.DictWriter(file, ["text"])
        writer.writeheader()
        writer.writerows(ROWS)
        return file.getvalue().encode()
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), sink)
    return sink.getvalue()


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_each_row_is_a_document(tmp_path: Path, kind: str, ending: str) -> None:
    path = tmp_path / f"a.{kind}{ending}"
    path.write_bytes(packed(written(kind), ending))
    assert texts(path) == [row["text"] for row in ROWS]


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_a_text_file_is_a_document(tmp_path: Path, ending: str) -> None:
    text = "first\r\n\r\n\x00second \u2028 line\n"
    (tmp_path / f"a.txt{ending}").write_bytes(packed(text.encode(), ending))
    assert texts(tmp_path / f"a.txt{ending}") == [text]


def test_a_long_text_file_is_cut_at_blank_lines_only(tmp_path: Path) -> None:
    paragraph = "word " * 200 + "\n\n\n"
    (tmp_path / "a.txt").write_text(paragraph * 1500)
    found = list(documents(Source(path=str(tmp_path / "a.txt"))))
    assert "".join(document.text for document in found) == paragraph * 1500
    assert all(document.first and document.last for document in found)
    assert len(found) > 10
    assert all(document.text.endswith("\n\n\n") and len(document.text) >= readers.CUT for document in found[:-1])
    assert [document.line for document in found] == [
        1 + 3 * sum(len(d.text) for d in found[:i]) // 1003 for i in range(len(found))
    ]


@pytest.mark.parametrize(("text", "codec"), [("a", "utf-8"), ("训", "utf-8"), ("训", "gbk"), ("a b", "utf-8")])
def test_a_text_without_blank_lines_stays_one_document_in_whole_characters(text: str, codec: str) -> None:
    data = (text * (3 << 20)).encode(codec)[: 3 << 20]
    data = data[: len(data) // len(text.encode(codec)) * len(text.encode(codec))]
    found = list(text_pieces((data[i : i + readers.BLOCK] for i in range(0, len(data), readers.BLOCK)), "a", codec))
    assert len(found) > 1
    assert [piece.first for piece in found] == [True] + [False] * (len(found) - 1)
    assert [piece.last for piece in found] == [False] * (len(found) - 1) + [True]
    assert "".join(piece.data.decode(codec) for piece in found) == data.decode(codec)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    peaks = []
    for size in (4, 16):
        with open(tmp_path / "a.jsonl", "w") as file:
            for _ in range(size * 1024):
                file.write(json.dumps({"text": "x" * 1000}) + "\n")
        tracemalloc.start()
        count = sum(1 for _ in documents(Source(path=str(tmp_path / "a.jsonl"))))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert count == size * 1024
    assert peaks[1] < 1.2 * peaks[0]


# -- JSONL ----------------------------------------------------------------------------------------------------------------


def test_only_a_line_feed_ends_a_row(tmp_path: Path) -> None:
    inside = "a\u2028b\u0085c\u2029\\u000b\\u000c\\u001c\\u0000"
    (tmp_path / "a.jsonl").write_bytes(('{"text": "' + inside + '"}\r\n{"text": "d"}').encode())
    assert texts(tmp_path / "a.jsonl") == ["a\u2028b\u0085c\u2029\u000b\u000c\u001c\0", "d"]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=8), st.booleans(), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_rows_survive_whatever_the_blocks(rows: list[str], ascii_only: bool, size: int) -> None:
    data = "".join(json.dumps({"text": row}, ensure_ascii=ascii_only) + "\n" for row in rows).encode()
    blocks = (data[i : i + size] for i in range(0, len(data), size))
    found = [
        json.loads(line)["text"] for piece in line_pieces(blocks, "a", "utf-8") for line in piece.data.split(b"\n") if line
    ]
    assert found == rows


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ('{"text": "c', "not valid JSON: Unterminated string"),
        ("[]", "an array"),
        ("1", "a number"),
        ("null", "null"),
        ('"x"', "a string"),
        ("true", "a boolean"),
        ('{"text": "a\x0bb"}', "Invalid control character"),
        ('{"text": "a\x00b"}', "Invalid control character"),
        ('{"text": "a\\ud800b"}', "half of a surrogate pair, U+D800, at character 2"),
        ('{"text": 5}', "'text' is a number"),
        ('{"text": ["a"]}', "'text' is an array"),
        ('{"content": "secret", "id": 1}', "no key 'text'; the keys are 'content', 'id'"),
        ('{"prompt": "secret"}', "no key 'text'; the keys are 'prompt'"),
        ("[" * 100_000, "nested too deeply"),
        ('{"text": ' + "1" * 5000 + "}", "too many digits"),
    ],
)
def test_a_bad_row_is_named_by_its_physical_line(tmp_path: Path, row: str, what: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"text": "a"}\n\n{"text": "b"}\n' + row)
    message = refused(path)
    assert f"{path}, line 5: " in message
    assert what in message
    assert "secret" not in message and len(message) < 600
    skipped = documents(Source(path=str(path)), on_bad_row="skip")
    assert [document.text for document in skipped] == ["a", "b"]


def test_lines_are_counted_over_blocks(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": "y" * 300})] * 9000
    lines[8123] = "{"
    path.write_text("\n\n".join(lines))
    assert f"{path}, line {2 * 8123 + 1}: " in refused(path)


def test_a_surrogate_pair_is_one_character(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}')
    assert texts(tmp_path / "a.jsonl") == ["😀"]


def test_prompt_and_response(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "response": "r"}, {"prompt": None, "response": "r"}, {"prompt": "p", "response": None}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = list(documents(Source(path=str(tmp_path / "a.jsonl"))))
    assert [(d.prompt, d.text, d.empty) for d in found] == [("p", "r", False), ("", "r", False), ("p", "", True)]


def test_a_line_without_end_is_refused_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_ROW", 1000)
    blocks = [b"x" * 600] * 5 + [b'y\n{"text": "a"}\n{"te', b'xt": "b"}\n']
    kinds = [(piece.kind, piece.line, piece.offset) for piece in line_pieces(iter(blocks), "a", "utf-8")]
    assert kinds == [("rows", 1, 0), ("lines", 2, 3002), ("lines", 3, 3016)]
    only = list(line_pieces(iter([b"x" * 600] * 5), "a", "utf-8"))
    assert [piece.kind for piece in only] == ["rows"] and b"no JSONL row" in only[0].data


# -- tables -----------------------------------------------------------------------------------------------------------------


def test_csv_rows_are_named_by_their_first_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfid,text\r\n1,"a\r\nb"\r\n\r\n2\r\n3,"c"x\r\n4,d\x00\r\n5,"end')
    found = documents(Source(path=str(path)), on_bad_row="skip")
    assert [(document.line, document.text) for document in found] == [(2, "a\r\nb"), (7, "d\x00")]
    assert f"{path}, line 5: 1 fields, but the header has 2" in refused(path)
    path.write_bytes(b'id,text\n3,"c"x\n')
    assert f"{path}, line 2: not valid CSV" in refused(path)
    path.write_bytes(b'id,text\n4,d\n5,"end')
    assert f"{path}, line 3: not valid CSV: unexpected end of data" in refused(path)


def test_csv_with_a_bad_byte_names_line_and_offset(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"text\na\n" + "训练".encode("gbk") + b"\n")
    assert f"{path}, line 3: not utf-8: byte 0xC1 at byte offset 2 of the line" in refused(path)
    assert "encoding: gbk" in refused(path)
    assert texts(path, encoding="gbk") == ["a", "训练"]


def test_missing_columns_show_those_that_exist(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,content\n1,a\n")
    assert "no column 'text'; the columns are 'id', 'content'" in refused(tmp_path / "a.csv")
    pq.write_table(pa.table({"id": [1], "content": ["a"]}), tmp_path / "a.parquet")
    assert "no column 'text'; the columns are 'id', 'content'" in refused(tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet", text_key="content") == ["a"]
    assert "column 'id' is int64, not text" in refused(tmp_path / "a.parquet", text_key="id")


def test_nulls_are_empty(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array(["a", None, "b"])}), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ["a", "", "b"]
    pq.write_table(pa.table({"text": pa.array(["a", "a", None]).dictionary_encode()}), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ["a", "a", ""]


def test_parquet_strings_that_are_no_utf8_name_the_row(tmp_path: Path) -> None:
    column = pa.StringArray.from_buffers(2, pa.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xff\xfe"))
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert "a.parquet, row 2: not utf-8" in refused(tmp_path / "a.parquet")


def test_damaged_parquet_is_named(tmp_path: Path) -> None:
    data = written("parquet")
    for content in (b"", data[:-10], b"no parquet at all" * 10):
        (tmp_path / "a.parquet").write_bytes(content)
        assert f"{tmp_path / 'a.parquet'}: not a Parquet file, or damaged" in refused(tmp_path / "a.parquet")


# -- files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv", "parquet"])
def test_a_cut_or_damaged_archive_is_named(tmp_path: Path, kind: str, ending: str) -> None:
    path = tmp_path / f"a.{kind}{ending}"
    whole = packed(written("jsonl" if kind == "txt" else kind) * 50, ending)
    path.write_bytes(whole[:-7])
    assert f"{path}: cut short" in refused(path)
    path.write_bytes(b"this is not an archive")
    assert f"{path}: damaged, or not a {ending} file" in refused(path)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_archives_of_several_parts(tmp_path: Path, ending: str) -> None:
    (tmp_path / f"a.txt{ending}").write_bytes(packed(b"one ", ending) + packed(b"two", ending))
    assert texts(tmp_path / f"a.txt{ending}") == ["one two"]


def test_folders_and_globs_in_one_order(tmp_path: Path) -> None:
    for name in ("b/1.txt", "a/2.jsonl", "a/1.txt", "a-b/1.txt", "Z.txt", "é.txt", ".hidden/1.txt", "a/.x.txt", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "j"}' if name.endswith("jsonl") else name)
    (tmp_path / "loop").symlink_to(tmp_path)
    expected = ["Z.txt", "a/1.txt", "j", "a-b/1.txt", "b/1.txt", "é.txt"]
    assert texts(tmp_path) == expected
    assert texts(f"{tmp_path}/*/1.txt") == ["a-b/1.txt", "a/1.txt", "b/1.txt"]
    assert texts(f"{tmp_path}/**/*.txt") == ["Z.txt", "a-b/1.txt", "a/1.txt", "b/1.txt", "é.txt"]
    (tmp_path / "a[1].txt").write_text("brackets")
    assert texts(tmp_path / "a[1].txt") == ["brackets"]


def test_all_missing_sources_are_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.md").write_text("x")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.pdf").write_text("x")
    names = ["no.txt", "none/at/all.txt", "*.jsonl", "empty", "a.md", "docs"]
    with pytest.raises(DataError) as error:
        find([Source(path=str(tmp_path / name)) for name in names])
    assert len(error.value.findings) == len(names)
    for name in names:
        assert str(tmp_path / name) in str(error.value)
    assert "it has .pdf" in str(error.value)


def test_a_given_format_reads_any_name(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("x")
    assert texts(tmp_path / "a.md", format="txt") == ["x"]
    assert texts(tmp_path, format="txt") == ["x"]


def test_what_is_no_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    assert "plain text has no keys" in refused(tmp_path / "a.txt", label_key="label")
    assert "there is no encoding 'utf-9'" in refused(tmp_path / "a.txt", encoding="utf-9")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    assert "text in Parquet is UTF-8" in refused(tmp_path / "a.parquet", encoding="gbk")
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "manifest.json").write_text("{}")
    assert "already holds token shards" in refused(tmp_path / "done")


# -- the embedded text --------------------------------------------------------------------------------------------------------


def test_the_embedded_corpus_is_large_and_repeatable() -> None:
    found = find([Source(path="embedded")])[0]
    assert found == find([Source(path="embedded")])[0]
    assert not any("/test/" in entry.name or "site-packages" in entry.name for entry in found)
    size = sum(len(document.text.encode()) for document in documents(Source(path="embedded")))
    assert 8_000_000 < size < 20_000_000
    assert next(documents(Source(path="embedded"))).text.strip()


def test_the_chinese_corpus_is_read_where_its_packages_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "DEBIAN_LISTS", tmp_path / "info")
    monkeypatch.setattr(corpus, "ROOT", tmp_path)
    assert "apt-get install manpages-zh fortunes-zh debian-reference-zh-cn" in refused("embedded:zh")
    made = {
        "manpages-zh": ("usr/share/man/zh_CN/man1/ls.1.gz", gzip.compress(MANUAL.encode())),
        "fortunes-zh": ("usr/share/games/fortunes/tang300", "\x1b[32m春眠\x1b[m\n不觉晓\n%\n床前\n".encode()),
        "debian-reference-zh-cn": (
            "usr/share/debian-reference/debian-reference.zh-cn.txt.gz",
            gzip.compress("手册\n".encode()),
        ),
    }
    (tmp_path / "info").mkdir()
    for package, (name, data) in made.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
        (tmp_path / "info" / f"{package}.list").write_text(f"/usr/share/doc/x\n/{name}\n")
    assert texts("embedded:zh") == ["名称\nls - 列出\n选项 -a\n", "春眠\n不觉晓", "床前\n", "手册\n"]


MANUAL = '.\\" comment\n.de Sh\n.PP\n..\n.TH LS 1\n.SH 名称\nls \\- 列出\n.PP\n.B "选项"\n'.replace(
    '.B "选项"', "选项 \\fB\\-a\\fP"
)


def test_results_do_not_depend_on_the_locale(tmp_path: Path) -> None:
    (tmp_path / "训练.jsonl").write_bytes('{"text": "训练 é"}\n'.encode())
    code = (
        "import sys\nfrom meshwright.config.schema import Source\nfrom meshwright.data.readers import documents\n"
        f"found = [d.text for d in documents(Source(path={str(tmp_path)!r}))]\nsys.stdout.write(ascii(found))\n"
    )
    (tmp_path / "run.py").write_text(code, encoding="utf-8")
    for environment in ({"LC_ALL": "C", "PYTHONUTF8": "0"}, {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}):
        done = subprocess.run(
            [sys.executable, tmp_path / "run.py"], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout == ascii(["训练 é"])


def test_endings_are_known() -> None:
    assert {sources._format(Path(f"a{ending}{packing}")) for ending in (".txt", ".CSV") for packing in ("", ".gz", ".ZST")} == {
        "txt",
        "csv",
    }
