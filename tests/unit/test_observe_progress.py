"""Progress lines and the final table, on terminals and elsewhere."""

from __future__ import annotations

import io
import sys
import types

import pytest

from meshwright.observe import progress as progress_module
from meshwright.observe.progress import NullProgress, Progress, print_summary
from meshwright.observe.summary import Summary, duration, load_facts, rows_of, save_facts, summarise


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def plain(encoding: str = "utf-8") -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)


def text_of(stream: io.TextIOWrapper) -> str:
    return stream.buffer.getvalue().decode()  # type: ignore[attr-defined]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    now = types.SimpleNamespace(value=1000.0)
    monkeypatch.setattr(progress_module, "time", types.SimpleNamespace(monotonic=lambda: now.value))
    return now


def test_plain_lines_come_every_n_steps_first_and_last(clock: types.SimpleNamespace) -> None:
    stream = plain()
    with Progress(8, every=3, stream=stream) as progress:
        for step in range(1, 9):
            clock.value += 30.0 if step == 1 else 2.0
            progress.update(step, loss=4.0 / step, tokens_per_s=12345.6)
    # a step takes 2 s; the first one, 30 s long, is no part of it
    assert text_of(stream).splitlines() == [
        "step 1/8  loss 4.0000  12,346 tokens/s",
        "step 3/8  loss 1.3333  12,346 tokens/s  ETA 0:10",
        "step 6/8  loss 0.6667  12,346 tokens/s  ETA 0:04",
        "step 8/8  loss 0.5000  12,346 tokens/s  ETA 0:00",
    ]


def test_time_left_follows_a_change_of_speed(clock: types.SimpleNamespace) -> None:
    stream = plain()
    progress = Progress(103, every=1, stream=stream)
    for step, wait in ((1, 9.0), (2, 1.0), (3, 11.0)):
        clock.value += wait
        progress.update(step, loss=1.0, tokens_per_s=1.0)
    assert text_of(stream).splitlines()[-1].endswith("ETA 3:20")  # 100 steps x (0.9 * 1 s + 0.1 * 11 s)


def test_without_a_total_the_caller_may_know_the_time_left(clock: types.SimpleNamespace) -> None:
    stream = plain()
    progress = Progress(None, every=1, stream=stream)
    progress.update(5, loss=None, tokens_per_s=10.0)
    progress.update(6, loss=float("nan"), tokens_per_s=10.0, remaining_s=3661.0)
    assert text_of(stream).splitlines() == ["step 5  loss -  10 tokens/s", "step 6  loss nan  10 tokens/s  ETA 1:01:01"]


def test_any_text_reaches_a_stream_that_cannot_show_it() -> None:
    # mutation tried: stream.write(text) alone -> red (UnicodeEncodeError)
    for encoding, shown in (
        ("ascii", "run \\u8bad\\u7ec3 \\xe9"),
        ("latin-1", "run \\u8bad\\u7ec3 \xe9"),
        ("utf-8", "run 训练 é"),
    ):
        stream = plain(encoding)
        Progress(1, stream=stream).note("run 训练 é")
        assert stream.buffer.getvalue().decode(encoding) == shown + "\n"  # type: ignore[attr-defined]


def test_a_terminal_has_one_live_line() -> None:
    stream = Terminal()
    progress = Progress(4, every=1000, stream=stream)
    for step in range(1, 5):
        progress.update(step, loss=1.5, tokens_per_s=2000.0, remaining_s=7.0)
    progress.note("[bold]checkpoint[/bold] 训练")
    assert progress._bar is not None
    progress._bar.refresh()
    progress.close()
    progress.close()
    shown = stream.getvalue()
    assert "step 4/4  loss 1.5000  2,000 tokens/s" in shown and "ETA 0:07" in shown
    assert "[bold]checkpoint[/bold] 训练\n" in shown  # markup in a note is text


def test_a_terminal_that_is_not_utf8_gets_plain_lines() -> None:
    stream = Terminal()
    stream.encoding = "ascii"
    progress = Progress(1, stream=stream)
    progress.update(1, loss=1.0, tokens_per_s=1.0)
    assert stream.getvalue() == "step 1/1  loss 1.0000  1 tokens/s\n"


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with NullProgress() as progress:
        progress.update(1, loss=1.0, tokens_per_s=1.0)
        progress.note("x")
    assert capsys.readouterr().out == ""


def record(step: int, *, wall: float, evaluate: float = 0.0, process: int = 1, **more: object) -> dict:
    split = {"compute": wall - evaluate, "evaluate": evaluate, "idle": 0.0, "wall": wall}
    return {"step": step, "loss": 5.0 - step, "tokens": 100 * step, "split": split, "process": process, **more}


def test_a_summary_by_hand() -> None:
    # mutations tried, each red: first steps kept; weights without "- evaluate"; plain mean of the rates
    records = [
        record(1, wall=60.0, tokens_per_s=1.0, samples_per_s=0.1, mfu=0.001),
        record(2, wall=1.0, tokens_per_s=100.0, samples_per_s=10.0, mfu=0.2),
        record(
            3,
            wall=8.0,
            evaluate=4.0,
            tokens_per_s=25.0,
            samples_per_s=2.5,
            mfu=0.05,
            val_loss=3.0,
            val_perplexity=20.1,
            skipped=0,
        ),
        record(4, wall=30.0, process=2, tokens_per_s=3.0, samples_per_s=0.3, mfu=0.002, skipped=1),
        record(5, wall=1.0, process=2, tokens_per_s=100.0, samples_per_s=10.0, mfu=0.2, val_loss=2.0, skipped=2),
    ]
    summary = summarise(records, devices=2, peak_rate=1e14, peak_source="X data sheet, bf16 dense")
    assert (summary.steps, summary.tokens, summary.seconds, summary.skipped) == (5, 500, 100.0, 2)
    assert summary.split == {"compute": 96.0, "evaluate": 4.0, "idle": 0.0}
    # steps 2, 3, 5: (100*1 + 25*4 + 100*1) tokens in 6 s
    assert summary.tokens_per_s == 50.0 and summary.samples_per_s == 5.0
    assert summary.mfu == pytest.approx(0.2)  # of the newest process alone, whose peak it is a share of
    # mutation tried: the rate of all processes over the newest one's devices, which gives 25
    assert ("tokens/s", "50 (50 a device since the last resume)") in rows_of(summary)
    assert (summary.first_loss, summary.last_loss, summary.val_loss) == (4.0, 0.0, 2.0)
    assert summary.perplexity == pytest.approx(7.389056)


def test_a_run_of_one_step_and_one_of_none() -> None:
    one = summarise([record(1, wall=2.0, tokens_per_s=50.0)])
    assert one.tokens_per_s == 50.0 and one.mfu is None and one.val_loss is None
    assert summarise([]).tokens_per_s is None and rows_of(summarise([])) == [("steps", "0 in 0:00"), ("tokens", "0")]


FULL = Summary(
    steps=1200, tokens=9_830_400, seconds=200.0, split={"compute": 150.0, "communication": 30.0, "data": 20.0},
    tokens_per_s=49_152.4, samples_per_s=96.0, mfu=0.4321, peak_rate=989.4e12, peak_source="H200 data sheet, bf16 dense",
    devices=2, first_loss=9.0, last_loss=3.5, val_loss=3.4, perplexity=29.96, skipped=3,
    usage={"gpu_percent": 93.4, "allocated_peak": 3 * 2**30, "allocated_mean": 2**30, "reserved_peak": 4 * 2**30,
           "reserved_mean": 2 * 2**30, "rss_peak": None, "cpu_percent": 101.0},
)  # fmt: skip


def test_the_table_says_every_figure() -> None:
    rows = dict(rows_of(FULL))
    assert rows == {
        "steps": "1,200 in 3:20",
        "tokens": "9,830,400",
        "skipped steps": "3",
        "training loss": "9.0000 -> 3.5000",
        "held-out loss": "3.4000 (perplexity 29.96)",
        "tokens/s": "49,152 (24,576 a device)",
        "samples/s": "96.00",
        "MFU": "43.2% of 2 x 989.4 TFLOP/s: H200 data sheet, bf16 dense",
        "GPU utilisation": "93%",
        "CPU of rank 0": "101% of one core",
        "memory allocated": "peak 3.00 GiB, mean 1.00 GiB",
        "memory reserved": "peak 4.00 GiB, mean 2.00 GiB",
        "time: compute": "150.00 s, 75.0%",
        "time: communication": "30.00 s, 15.0%",
        "time: data": "20.00 s, 10.0%",
    }
    stream = plain("ascii")
    print_summary(FULL, stream)
    assert "tokens/s             49,152 (24,576 a device)\n" in text_of(stream)
    terminal = Terminal()
    print_summary(FULL, terminal)
    assert "│" in terminal.getvalue() and "24,576 a device" in terminal.getvalue()


def test_durations() -> None:
    assert [duration(s) for s in (0, 59.6, 61, 3599.4, 3600, 90_061)] == [
        "0:00",
        "1:00",
        "1:01",
        "59:59",
        "1:00:00",
        "25:01:01",
    ]
    assert duration(-5) == "0:00"


def test_facts_come_back(tmp_path) -> None:
    assert load_facts(tmp_path) == ({}, {})
    save_facts(tmp_path, machine={"device": "某卡", "torch": "2.13"})
    save_facts(tmp_path, summary=FULL)
    machine, summary = load_facts(tmp_path)
    assert machine == {"device": "某卡", "torch": "2.13"} and Summary(**summary) == FULL
    (tmp_path / "machine.json").write_text("{cut")
    assert load_facts(tmp_path) == ({}, summary)


def test_reading_a_run_needs_no_torch() -> None:
    import subprocess

    script = "import sys, meshwright.observe.report, meshwright.observe.progress; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
