"""The results of the whole product: complete, right, and of the present code. `python -m tests.parity.product` makes them."""

from __future__ import annotations

import itertools
import json
import time

import pytest

from meshwright.verify.compare import Worst
from tests.parity import array, product, runner
from tests.parity.cells import Outcome, compiled_alike, limits_of
from tests.ranks.pool import RankError


def results_and_git():
    """Skips outside of a checkout, and while there are no results at all."""
    git = product.Git()
    try:
        git.code()
    except RuntimeError as error:
        pytest.skip(f"how old results are cannot be told: {error}")
    results = product.read()
    if not results:
        pytest.skip("docs/parity-results.jsonl has no results yet")
    return results, git


@pytest.mark.slow
def test_the_results_are_complete_and_right():
    results, _ = results_and_git()
    assert product.covered_by(results, array.whole_product()) == []
    assert {line["cell"]: line["wrong"] for line in results.values() if line["wrong"]} == {}


@pytest.mark.slow
def test_no_result_is_older_than_the_code():
    results, git = results_and_git()
    assert product.stale(results.values(), git) == []


def test_the_newest_line_of_a_cell_counts(tmp_path):
    first, second = (cell.id for cell in array.whole_product()[:2])
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    for cell, commit in ((second, "1"), (first, "1"), ("gone", "1"), (second, "2")):
        product.append({"cell": cell, "commit": commit}, one)
    product.append({"cell": first, "commit": "3"}, two)
    assert product.read(one)[second]["commit"] == "2" and product.read(tmp_path / "none") == {}
    assert product.merge([two], one) == 2
    assert [json.loads(line) for line in one.read_text().splitlines()] == [
        {"cell": first, "commit": "3"},
        {"cell": second, "commit": "2"},
    ]


def test_results_of_other_code_are_stale(tmp_path):
    # Red when any commit counts as the present one, and when a change beside the code does.
    import subprocess

    def run(*arguments: str) -> str:
        options = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", *options, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    def commit(name: str, text: str) -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        run("add", "-A")
        run("commit", "-qm", text)
        return run("rev-parse", "HEAD").strip()

    run("init", "-q")
    git = product.Git(tmp_path)
    first, second, third = commit("meshwright/spec/a", "1"), commit("meshwright/spec/a", "2"), commit("README", "3")
    assert git.code() == second and git.clean()
    lines = [{"cell": name, "commit": name[:12]} for name in (first, second, third, "0" * 40)]
    assert product.stale(lines, git) == [first, "0" * 40]
    (tmp_path / "meshwright/spec/a").write_text("4")
    assert not git.clean()


def test_every_cell_is_given_out_once_and_those_that_compile_alike_together():
    # Red when a worker that helps another leaves the cells with both.
    cells = array.whole_product()
    work, given = runner.Work(cells), {worker: [] for worker in range(3)}
    assert work.left() == len(cells)
    while (turn := [(worker, work.next_of(worker)) for worker in given]) and any(cell for _, cell in turn):
        for worker, cell in turn:
            given[worker] += [cell] if cell else []
    assert work.left() == 0
    assert sorted(cell.id for part in given.values() for cell in part) == sorted(cell.id for cell in cells)
    changes = 0
    for part in given.values():
        assert [cell.world for cell in part] == sorted((cell.world for cell in part), reverse=True)
        assert len(part) > len(cells) / 4
        changes += sum(compiled_alike(one) != compiled_alike(other) for one, other in itertools.pairwise(part))
    batches = {(cell.world, *compiled_alike(cell)) for cell in cells}
    assert len(batches) - 20 < changes < len(batches) + 20, "hardly any is shared out"


def test_nothing_is_given_out_after_the_end():
    cells = array.whole_product()[:50]
    work = runner.Work(cells, time.monotonic() + 60)
    assert work.next_of(0) is not None
    work.stop()
    assert work.next_of(0) is None and work.next_of(1) is None and work.left() == 49
    assert runner.Work(cells, time.monotonic() - 1).next_of(0) is None


def test_what_breaks_one_cell_is_its_line_and_the_others_go_on(monkeypatch):
    cells = [cell for cell in array.whole_product() if cell.world == 2][:6]

    def broken(ranks, cell, timeout):
        if cell is cells[1]:
            raise RankError("rank 1 of 2: the process ended (signal SIGKILL)\n-- its output --\nlast words", 1, 137)
        if cell is cells[3]:
            raise ValueError("a planted failure")
        return Outcome({kind: Worst() for kind in limits_of(cell)})

    monkeypatch.setattr(runner, "run_cell", broken)
    lines = []
    runner.run_all(runner.Work(cells), "c" * 40, 2, lines.append)
    wrong = {line["cell"]: line["wrong"] for line in lines}
    assert sorted(wrong) == sorted(cell.id for cell in cells) and {line["commit"] for line in lines} == {"c" * 12}
    assert wrong.pop(cells[1].id) == ["rank 1 of 2: the process ended (signal SIGKILL)", "last words"]
    assert wrong.pop(cells[3].id) == ["ValueError: a planted failure"]
    assert set(map(tuple, wrong.values())) == {()}


@pytest.mark.slow
def test_the_next_cells_of_the_product(ranks):
    """A slice that moves with the commit, without touching the file: the product itself is a command of hours."""
    cells = array.whole_product()
    start = int(product.Git().code(), 16) % 97 if (product.ROOT / ".git").exists() else 0
    wrong = {cell.id: line["wrong"] for cell in cells[start::97] if (line := runner.done(ranks, cell, ""))["wrong"]}
    assert wrong == {}


def test_a_broken_file_of_results_is_named_line_by_line_and_nothing_is_written(tmp_path):
    # Red when a file that is not there counts as an empty one, and when what was there is written before all is read.
    cell = array.whole_product()[0].id
    out, bad = tmp_path / "out.jsonl", tmp_path / "bad.jsonl"
    product.append({"cell": cell, "commit": "1"}, out)
    before = out.read_bytes()
    bad.write_bytes(b'{"cell": \n[1]\n\n{"cell": "x"}\n{"cell": "x", "commit": "1"}\n\xff\n')
    with pytest.raises(SystemExit) as caught:
        product.main(["--out", str(out), "--merge", str(bad)])
    assert [line.split(":")[1] for line in str(caught.value).splitlines()] == ["1", "2", "4", "6"]
    with pytest.raises(SystemExit, match=r"no\.jsonl: there is no such file"):
        product.main(["--out", str(out), "--merge", str(tmp_path / "no.jsonl")])
    assert out.read_bytes() == before


@pytest.mark.parametrize("text", ["9/4", "0/4", "1", "a/b", "-1/4", "1/0"])
def test_a_slice_that_is_none_runs_nothing(text, capsys):
    # Red when 9/4 is every fourth cell from the ninth on, as an index would have it.
    with pytest.raises(SystemExit) as caught:
        product.main([f"--slice={text}", "--limit", "0"])
    assert caught.value.code == 2 and "is no K/N with 1 <= K <= N" in capsys.readouterr().err
