"""Results that are kept: every file is one, tables are what their files give, the history has a point for each row."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.bench import pages
from meshwright.bench.compare import compare, load
from meshwright.bench.history import history_table, points, read_folder, write_history
from meshwright.bench.output import open_folder
from meshwright.bench.pages import BLOCK, filled, table_of
from meshwright.errors import UserError

DOCS = Path(__file__).resolve().parents[2] / "docs"
DOCUMENT = DOCS / "performance.md"
KEPT = sorted((DOCS / "performance").glob("*"))


def entry(engine: str, gpus: int, rate: float, **more: Any) -> dict[str, Any]:
    figures = {"tokens_per_s": rate, "seconds": 1.0, "spread": 0.1, **more}
    return {"workload": "x", "gpus": gpus, "engine": engine, "unit": "tokens", "flops": 1.0, "figures": figures, "reason": ""}


def keep(folder: Path, name: str, date: str, *results: dict[str, Any], **more: Any) -> None:
    data = {"date": date, "commit": name * 8, "machine": {"device": "H200"}, "results": list(results), **more}
    (folder / f"{name}.json").write_text(json.dumps(data))


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.name)
def test_every_kept_file_is_a_result(file: Path) -> None:
    """Its name has its date and suite; it says where its numbers are from."""
    (kept,) = [one for one in read_folder(file.parent) if one.file == file.name]
    date, suite = kept.data["date"][:10], kept.data["settings"]["suite"]
    assert re.fullmatch(rf"{date}-{suite}(-[a-z0-9-]+)?\.json", file.name)
    assert kept.data["commit"] or "by hand" in kept.data["note"]
    assert kept.data["machine"]["device"] and kept.data["machine"]["torch"]
    assert points([kept]), "at least one figure"


def test_tables_are_what_their_files_give() -> None:
    # Red when one digit of a table or of a file is changed (tried: 63,180 to 63,181 in the file).
    text = DOCUMENT.read_text(encoding="utf-8")
    assert filled(text, DOCS) == text, "run python -m meshwright.bench.pages docs/performance.md"


def test_every_table_names_its_file_and_every_file_is_shown() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert not re.findall(r"^\|.*", BLOCK.sub("", text), re.MULTILINE), "a table without a file"
    assert {found["file"].removeprefix("performance/") for found in BLOCK.finditer(text)} == {file.name for file in KEPT}


def test_a_table_by_hand() -> None:
    data = {"results": [entry("ours", 1, 100.0), entry("ours", 2, 150.0, communication=0.05), entry("hf", 1, 80.0)]}
    lines = table_of(data, ["engine", "GPUs", "rate", "scaling", "exposed communication"])
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]] == [
        ["ours", "1", "100.0 tokens/s", "–", "–"],
        ["ours", "2", "150.0 tokens/s", "75.0%", "5.0%"],
        ["hf", "1", "80.0 tokens/s", "–", "–"],
    ]
    with pytest.raises(UserError, match="'rat' is unknown"):
        table_of(data, ["engine", "rat"])


def test_history_is_by_date(tmp_path: Path) -> None:
    keep(tmp_path, "b", "2026-11-01T10:00:00+00:00", entry("ours", 2, 100.0))
    keep(tmp_path, "a", "2026-12-01T10:00:00+00:00", entry("ours", 2, 150.0), entry("hf", 1, 80.0))
    found = points(read_folder(tmp_path))
    assert [(one.engine, one.value, one.commit[0]) for one in found] == [
        ("ours", 100.0, "b"), ("ours", 150.0, "a"), ("hf", 80.0, "a"),
    ]  # fmt: skip
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in history_table(found).splitlines()[2:]]
    assert cells[0] == ["x", "ours", "2", "150 tokens/s", "2026-12-01", "aaaaaaaa", "100 tokens/s", "1.500"]
    assert cells[1][-2:] == ["–", "–"]
    write_history(tmp_path / "page.html", found)
    page = (tmp_path / "page.html").read_text()
    assert page.count("Plotly.newPlot(") == 1 and "ours x 2, H200" in page and "bbbbbbbb, b.json" in page


def test_what_is_no_result_is_named_with_all_others(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text("[1]")
    (tmp_path / "two.json").write_text('{"results": []}')
    with pytest.raises(UserError) as caught:
        read_folder(tmp_path)
    assert "one.json" in str(caught.value) and "two.json" in str(caught.value) and "has no date" in str(caught.value)
    (tmp_path / "empty").mkdir()
    for name, words in (("nothing", "there is no such folder"), ("one.json", "is no folder"), ("empty", "holds no JSON file")):
        with pytest.raises(UserError, match=f"{name}: {words}. Give a folder"):
            read_folder(tmp_path / name)
    (tmp_path / "one.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"one\.json: is nested too deeply\. Give what --out named"):
        load(tmp_path / "one.json")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"results": [1]}, ["results.0: is no object"]),
        (
            {"results": [{}]},
            ["results.0.workload: is no text", "results.0.gpus: is no whole number", "results.0.flops"],
        ),
        ({"results": [{**entry("x", 1, 1.0), "gpus": True}]}, ["results.0.gpus: is no whole"]),
        ({"results": [{**entry("x", 1, 1.0), "figures": 3}]}, ["results.0.figures: is no object"]),
        ({"results": [entry("x", 1, 0.0)]}, ["results.0.figures.tokens_per_s: is no rate"]),
        ({"results": [entry("x", 1, float("nan"))]}, ["results.0.figures.tokens_per_s: is no rate"]),
        ({"results": [entry("x", 1, 1.0, spread="wide")]}, ["results.0.figures.spread: is no number"]),
        ({"results": [], "measures": 3}, ["measures: is no list"]),
        ({"results": [], "measures": [{"name": "x", "unit": "s", "ranks": 0}]}, ["measures.0.value", "measures.0.ranks"]),
        ({"results": [], "machine": [1]}, ["machine: is no object"]),
    ],
)
def test_a_damaged_file_is_named_with_every_place(part: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    # Red, with a traceback, for each kind that `_damage` leaves out.
    file = tmp_path / "kept.json"
    file.write_text(json.dumps({"date": "2026-11-01", **part}))
    with pytest.raises(UserError) as caught:
        load(file)
    assert all(f"{file}: {word}" in str(caught.value) for word in words)


def test_what_was_entered_by_hand_is_compared_without_noise() -> None:
    old, new = ({"results": [entry("ours", 1, rate)]} for rate in (100.0, 150.0))
    for side in (old, new):
        del side["results"][0]["figures"]["spread"]
    rows, table = compare(old, new)
    assert rows[0]["verdict"] == "noise not known" and rows[0]["ratio"] == 1.5 and "| 1.500 |" in table


def test_text_between_a_comment_and_the_next_table_stays(tmp_path: Path) -> None:
    # Red without the count of comments: the first one reached to the end of the second table, and prose was replaced.
    keep(tmp_path, "kept", "2026-11-01", entry("ours", 1, 100.0))
    table = "<!-- rows of kept.json: engine -->\n<!-- end of rows -->\n"
    assert filled(table, tmp_path) == filled(filled(table, tmp_path), tmp_path) and "| ours " in filled(table, tmp_path)
    for text in (f"<!-- rows of kept.json: engine -->\n\nprose\n\n{table}", f"{table}\n<!-- end of rows -->\n"):
        with pytest.raises(UserError, match="2 times, and 1 tables have both"):
            filled(text, tmp_path)


def test_a_document_that_cannot_be_filled_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bytes.md").write_bytes(b"\xff")
    (tmp_path / "old.md").write_text("<!-- rows of kept.json: engine -->\nold\n<!-- end of rows -->\n")
    keep(tmp_path, "kept", "2026-11-01", entry("ours", 1, 100.0))
    for arguments, code, words in (
        (["gone.md"], 2, "gone.md: cannot be read"),
        (["bytes.md"], 2, "bytes.md: is no UTF-8"),
        (["old.md", "--check"], 1, "old.md: tables are not what their files give"),
        (["old.md"], 0, ""),
        (["old.md", "--check"], 0, ""),
    ):
        monkeypatch.setattr("sys.argv", ["pages", str(tmp_path / arguments[0]), *arguments[1:]])
        assert pages.main() == code
        assert words in capsys.readouterr().err


def test_where_results_cannot_be_written_is_said_before_they_are_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        open_folder(tmp_path / "file" / "out")
    open_folder(tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
