"""The rows of `bench strategies` and its columns, scaling, repeated runs and comparisons, by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshwright.bench.compare import compare, load
from meshwright.bench.page import write_page
from meshwright.bench.runner import Outcome, planned
from meshwright.bench.strategies import FULL, ONE, Strategy, parse_micro, strategies, strategy_lines
from meshwright.bench.synthetic import FileRows
from meshwright.bench.table import Result, combined, scaling_lines
from meshwright.bench.tasks import Settings, check
from meshwright.bench.workloads import WORKLOADS
from meshwright.data.batch import IGNORE
from meshwright.errors import UserError

ENCODER = WORKLOADS["encoder-24x1024"]


def result(engine: str, gpus: int, seconds: float, rows: int = 32, spread: float = 0.1, **more) -> Result:
    figures = {"seconds": seconds, "spread": spread, "samples_per_s": rows / seconds, "tokens_per_s": 512 * rows / seconds}
    return Result("encoder-24x1024", gpus, engine, "samples", 1e12, {**figures, **more})


def test_rows_of_eight_devices():
    # Red when the global batch follows the data ranks alone: a pipeline would then train on fewer rows.
    found = {s.name: s for s in strategies(ENCODER, 8, {"zero-2": 64, "zero-3": 128, "pipeline x tensor": 64}, 140 << 30)}
    assert list(found) == [
        FULL, ONE, "ddp", "zero-1", "zero-2", "zero-3", "pipeline", "tensor", "pipeline x tensor",
    ]  # fmt: skip
    assert (found[FULL].precision, found[FULL].devices, found[FULL].rows) == ("fp32", 1, 32)
    assert [found[name].rows for name in ("ddp", "zero-2", "zero-3", "pipeline x tensor")] == [256, 512, 1024, 512]
    assert found["zero-3"].plan == {"layout": {"dp_shard": 8, "zero": 3}, "micro_batch": 128}
    # 512 rows over two data ranks, in eight micro-batches of a pipeline of two stages
    assert found["pipeline x tensor"].plan == {
        "layout": {"pp": 2, "dp_shard": 2, "tp": 2, "zero": 1}, "micro_batch": 32,
    }  # fmt: skip
    assert [s.name for s in found.values() if s.chosen] == ["zero-1"]


def test_one_device_and_odd_numbers():
    assert [s.name for s in strategies(ENCODER, 1)] == [FULL, ONE]
    assert "tensor" not in {s.name for s in strategies(ENCODER, 3)}
    assert [s.name for s in strategies(ENCODER, 2) if s.chosen] == ["ddp"], "the rule of a CPU"


def test_a_wrong_micro_batch_is_named():
    assert parse_micro("zero-2=64,one device=16") == {"zero-2": 64, "one device": 16}
    with pytest.raises(UserError, match="'zero-9=4' is no strategy=rows"):
        parse_micro("ddp=4,zero-9=4")
    with pytest.raises(UserError, match="'ddp=0'"):
        parse_micro("ddp=0")


def test_columns_by_hand():
    # 32 rows in 0.4 s: 80/s; in 0.1: 320/s; 64 rows on two devices in 0.125: 512/s = 1.6 x 320 = 6.4 x 80, 80% of twice 320
    rows = [
        (Strategy(FULL, 1, {"micro_batch": 32}, 32, "fp32"), result(FULL, 1, 0.4)),
        (Strategy(ONE, 1, {"micro_batch": 32}, 32), result(ONE, 1, 0.1)),
        (
            Strategy("zero-1", 2, {"micro_batch": 32}, 64, chosen=True),
            result(
                "zero-1", 2, 0.125, 64, mean_gib=2.0, peak_gib=9.5, communication=0.031, mfu=0.4,
                reached={"step": 40, "seconds": 5.0},
            ),
        ),
        (Strategy("zero-3", 2, {"micro_batch": 32}, 64), Result("encoder-24x1024", 2, "zero-3", "samples", 1.0, None, "no")),
    ]  # fmt: skip
    lines = strategy_lines(rows, limit=640.0, target=6.5)
    assert lines[0][-1] == "to loss 6.5"
    assert lines[3] == [
        "zero-1 (chosen)", "2", "32", "64", "512.0", "262,144", "1.60", "6.40", "80.0%", "2.0 / 9.5", "–", "3.1%", "40.0%",
        "40.0%", "40 steps, 5.0 s",
    ]  # fmt: skip
    assert lines[4][:5] == ["zero-3", "2", "32", "64", "no"] and len(lines[4]) == len(lines[0])


def test_scaling_says_what_is_lost():
    # weak: 0.10 s on one, 0.125 on two: 80%; 20 of 125 ms more waiting, 5 more idle. strong: half of 0.10 would be 0.05
    parts = {"compute": 0.1, "communication": 0.0, "data": 0.0, "idle": 0.0, "wall": 0.1}
    two = {"compute": 0.1, "communication": 0.02, "data": 0.0, "idle": 0.005, "wall": 0.125}
    half = {"compute": 0.06, "communication": 0.02, "data": 0.0, "idle": 0.0, "wall": 0.08}
    found = [
        result("weak", 1, 0.1, parts=parts),
        result("weak", 2, 0.125, 64, parts=two),
        result("strong", 2, 0.08, 32, parts=half),
    ]
    lines = scaling_lines(found)
    assert lines[2][3:] == ["512.0 samples/s", "80.0%", "0.0%", "16.0%", "0.0%", "4.0%"]
    assert lines[3][3:] == ["400.0 samples/s", "62.5%", "12.5%", "25.0%", "0.0%", "0.0%"]


def test_repeated_runs_are_one_row_with_all_their_spread():
    # 0.10 s ± 5% and 0.12 s ± 5%: median 0.11, steps from 0.095 to 0.126
    (one,) = combined([result("ddp", 2, 0.10), result("ddp", 2, 0.12)])
    assert one.figures["seconds"] == pytest.approx(0.11)
    assert one.figures["samples_per_s"] == pytest.approx(32 / 0.11)
    assert one.spread == pytest.approx((0.126 - 0.095) / 0.11)
    failed = Result("encoder-24x1024", 2, "ddp", "samples", 1e12, None, "hung")
    assert combined([failed, result("ddp", 2, 0.1)])[0].reason == ""


def saved(folder, *results):
    folder.mkdir()
    entries = [{**vars(r)} for r in results]
    machine = {"device": "H200", "torch": "2.11"}
    (folder / "results.json").write_text(json.dumps({"commit": folder.name, "machine": machine, "results": entries}))
    return load(folder)


def test_a_change_within_the_noise_is_none(tmp_path):
    # 10% spread on both sides: half of each, added, on the ratio: ± 0.1
    before = saved(tmp_path / "a", result("x", 1, 0.1), result("y", 1, 0.1), result("z", 1, 0.1), result("gone", 1, 0.1))
    after = saved(tmp_path / "b", result("x", 1, 0.105), result("y", 1, 0.08), result("z", 1, 0.2))
    rows, table = compare(before, after)
    assert [row["verdict"] for row in rows] == ["same", "faster", "slower", "only in the first"]
    assert rows[1]["ratio"] == pytest.approx(1.25) and rows[1]["noise"] == pytest.approx(0.125)
    assert "commit a" in table and "different machines" not in table


def test_what_is_no_result_is_named(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path / "nothing")
    (tmp_path / "results.json").write_text("[1]")
    with pytest.raises(UserError, match="holds no results"):
        load(tmp_path)


def test_the_page_holds_the_table_and_bars(tmp_path):
    write_page(tmp_path / "results.html", "a < b", [result("ddp", 2, 0.1, mean_gib=1.0, peak_gib=2.0)])
    text = (tmp_path / "results.html").read_text()
    assert "a &lt; b" in text and text.count("Plotly.newPlot(") == 2


def test_a_peer_is_never_taken_for_one_of_our_rows(monkeypatch):
    # Red while the peer `ddp` had the name of our row: two engines became one, with the median of both.
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    outcome = Outcome(Settings(("smoke-encoder",), suite="strategies", peers="ddp", gpus=(8,)))
    tasks = planned(outcome.settings, outcome)
    names = [(task.engine, task.gpus) for task in tasks]
    assert len(set(names)) == len(names) and ("peer ddp", 8) in names and ("ddp", 8) in names
    assert [task.refused for task in tasks] == [""] * len(tasks), "a CPU has four ranks a core"
    outcome = Outcome(Settings(("smoke-encoder",), suite="strategies", gpus=(9,)))
    assert "needs 9 devices, here are 8" in {task.refused for task in planned(outcome.settings, outcome)}


def test_rows_of_real_text(tmp_path):
    # Red when the hidden tokens stay visible, or the labels are those of other positions.
    tokens = np.arange(0, 90, dtype=np.int32)
    np.save(tmp_path / "text.npy", tokens)
    plain = FileRows(str(tmp_path / "text.npy"), 20)
    assert plain.rows == 4 and plain.row(5).tokens.tolist() == list(range(20, 40))
    assert plain.row(5).labels.tolist() == list(range(21, 41))
    row = FileRows(str(tmp_path / "text.npy"), 20, "masked", 100).row(1)
    chosen = row.select[row.labels != IGNORE]
    assert len(set(chosen.tolist())) == 3, "15% of 20"
    assert (20 + chosen).tolist() == row.labels[:3].tolist() and (row.tokens[chosen] == 99).all()
    assert (np.delete(row.tokens, chosen) == np.delete(np.arange(20, 40), chosen)).all()
    assert tokens[20] == 20, "the file's own are left alone"


def test_tokens_that_cannot_be_used_are_named(tmp_path):
    np.save(tmp_path / "text.npy", np.array([1, 2, 600]))
    (tmp_path / "text.txt").write_text("no numbers")
    (tmp_path / "empty.npy").write_bytes(b"")
    np.savez(tmp_path / "several.npz", a=np.arange(100))
    (tmp_path / "several.npz").rename(tmp_path / "several.npy")
    for name, array in (
        ("below", np.arange(-1, 99)),
        ("floats", np.arange(100.0)),
        ("table", np.ones((100, 2), dtype=int)),
    ):
        np.save(tmp_path / f"{name}.npy", array)
    for tokens, words in (
        ("text.npy", ("tokens up to 600, and smoke-encoder knows 512", "has 3 tokens, and a row of smoke-encoder needs 65")),
        ("text.txt", ("is no .npy file, or a damaged one",)),
        ("gone.npy", ("is not there",)),
        ("empty.npy", ("is no .npy file, or a damaged one",)),  # an EOFError, which the command line took for Ctrl-C
        ("several.npy", ("it is no array",)),
        ("below.npy", ("has the token -1",)),
        ("floats.npy", ("it is 1-D, float64",)),
        ("table.npy", ("it is 2-D, int64",)),
        (".", ("manifest",)),
    ):
        with pytest.raises(UserError) as caught:
            check(Settings(("smoke-encoder",), tokens=str(tmp_path / tokens)))
        assert all(word in str(caught.value) for word in words), (tokens, str(caught.value))
    with pytest.raises(UserError, match="never reached on random tokens"):
        check(Settings(("smoke-encoder",), until=5.0))


def test_a_loss_that_was_not_reached_is_said():
    rows = [
        (Strategy("ddp", 2, {"micro_batch": 32}, 64), result("ddp", 2, 0.1, 64, reached=None)),
        (None, result("peer", 2, 0.1)),
    ]
    assert [line[-1] for line in strategy_lines(rows, None, 5.0)] == ["to loss 5", "not reached", "–"]
    assert strategy_lines(rows, None, None)[1][-1] == "–"
