"""Results that are kept: every file is one, tables are what their files give, the history has a point for each row."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.bench.history import history_table, points, read_folder, write_history
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
    with pytest.raises(UserError, match="holds no JSON file"):
        read_folder(tmp_path / "nothing")
