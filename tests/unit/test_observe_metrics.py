"""metrics.jsonl: valid JSON, each step once, over kills and resumes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import UserError
from meshwright.observe.metrics import MetricsWriter, perplexity, read_metrics


def line(step: int, **more: object) -> dict:
    return {"step": step, "loss": 2.5, "grad_norm": 1.0, "lr": 1e-3, "tokens": 100 * step, "tokens_per_s": 50.0, **more}


def write(path: Path, steps: range, resume_step: int = 0, **more: object) -> None:
    with MetricsWriter(path, resume_step) as writer:
        for step in steps:
            writer.write(**line(step, **more))


def test_a_line_holds_what_was_given(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(
            **line(1, note="学习率", skipped=0, split={"data": 0.25}, mfu=None, loss_scale=np.float32(8), val=torch.tensor(3))
        )
    assert read_metrics(path) == [
        line(1, note="学习率", skipped=0, split={"data": 0.25}, mfu=None, loss_scale=8.0, val=3, process=1)
    ]


def test_numbers_come_back_bit_for_bit(tmp_path: Path) -> None:
    values = [1 / 3, 1e-300, 5e-324, 123456789.123456789, -0.0]
    with MetricsWriter(tmp_path / "m") as writer:
        for step, value in enumerate(values, start=1):
            writer.write(**line(step, loss=value))
    assert [r["loss"].hex() for r in read_metrics(tmp_path / "m")] == [value.hex() for value in values]


def test_what_is_not_finite_is_null_and_named(tmp_path: Path) -> None:
    # mutation tried: json.dumps with allow_nan=True and no cleaning -> red (NaN is no JSON)
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(**line(1, loss=math.nan, grad_norm=torch.tensor(math.inf), split={"data": -math.inf, "wall": 1.0}))
        writer.write(**line(2))

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} in JSON")

    first, second = (json.loads(text, parse_constant=refuse) for text in path.read_text().splitlines())
    assert first["loss"] is None and first["grad_norm"] is None and first["split"] == {"data": None, "wall": 1.0}
    assert first["nonfinite"] == ["loss", "grad_norm", "split.data"]
    assert "nonfinite" not in second


def test_each_line_is_there_at_once(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m")
    for step in (1, 2, 3):
        writer.write(**line(step))
        assert len(read_metrics(tmp_path / "m")) == step
    writer.close()


def test_resume_drops_the_lines_beyond_its_step(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write(path, range(1, 11))
    write(path, range(8, 13), resume_step=7)
    records = read_metrics(path)
    assert [r["step"] for r in records] == list(range(1, 13))
    assert [r["process"] for r in records] == [1] * 7 + [2] * 5
    assert os.listdir(tmp_path) == ["m"]


def test_a_new_run_keeps_nothing(tmp_path: Path) -> None:
    write(tmp_path / "m", range(1, 4))
    write(tmp_path / "m", range(1, 2))
    assert [(r["step"], r["process"]) for r in read_metrics(tmp_path / "m")] == [(1, 1)]


def test_missing_steps_can_be_seen(tmp_path: Path) -> None:
    write(tmp_path / "m", range(1, 4))
    with MetricsWriter(tmp_path / "m", resume_step=7) as writer:
        assert writer.last_step == 3


def test_a_step_is_written_once_and_in_order(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m") as writer:
        writer.write(**line(3))
        with pytest.raises(ValueError, match="step 3 after step 3"):
            writer.write(**line(3))
        with pytest.raises(TypeError, match="'lr' and 'tokens'"):
            writer.write(**{key: value for key, value in line(4).items() if key not in ("lr", "tokens")})
        with pytest.raises(TypeError, match="'history' is a list"):
            writer.write(**line(4, history=[1, 2]))
    assert len(read_metrics(tmp_path / "m")) == 1


@given(st.integers(0, 400))
def test_a_cut_file_reads_as_its_whole_lines(cut: int) -> None:
    # mutation tried: the tail parsed like any other line -> red
    text = "".join(json.dumps(line(step)) + "\n" for step in (1, 2, 3)).encode()
    cut = min(cut, len(text))
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m"
        path.write_bytes(text[:cut])
        whole = text[:cut].count(b"\n")
        ends = [i for i, byte in enumerate(text) if byte == ord("\n")]
        whole += cut in ends  # cut exactly before the newline: the line is whole all the same
        assert [r["step"] for r in read_metrics(path)] == list(range(1, whole + 1))
        with MetricsWriter(path, resume_step=whole) as writer:
            writer.write(**line(whole + 1))
        assert [r["step"] for r in read_metrics(path)] == list(range(1, whole + 2))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{broken", "is not JSON"),
        ("[1]", "no object with a whole number"),
        ('{"step": 1.5}', "no object with a whole number"),
        ('{"step": true}', "no object with a whole number"),
        ("", "is not JSON"),
        (json.dumps(line(1)), "has step 1 after step 1"),
        ("\udce9".encode("utf-8", "surrogateescape").decode("latin-1"), "is not JSON"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, bad: str, why: str) -> None:
    path = tmp_path / "m"
    path.write_bytes(f"{json.dumps(line(1))}\n".encode() + bad.encode("latin-1") + f"\n{json.dumps(line(3))}\n".encode())
    with pytest.raises(UserError, match=why) as caught:
        read_metrics(path)
    assert caught.value.findings[0].where == f"{path}:2" and len(caught.value.findings) == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_metrics(tmp_path / "none")


def test_a_killed_writer_loses_no_line(tmp_path: Path) -> None:
    # mutation tried: no flush after a line -> red
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from meshwright.observe.metrics import MetricsWriter
writer = MetricsWriter({str(tmp_path / "m")!r})
for step in range(1, 6):
    writer.write(step=step, loss=1.0, grad_norm=1.0, lr=1.0, tokens=step, tokens_per_s=1.0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL
    assert [r["step"] for r in read_metrics(tmp_path / "m")] == [1, 2, 3, 4, 5]


def test_a_kill_while_resuming_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m", range(1, 6))
    before = (tmp_path / "m").read_bytes()

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        MetricsWriter(tmp_path / "m", resume_step=2)
    monkeypatch.undo()
    assert (tmp_path / "m").read_bytes() == before
    write(tmp_path / "m", range(3, 4), resume_step=2)
    assert [r["step"] for r in read_metrics(tmp_path / "m")] == [1, 2, 3]


def test_perplexity_by_hand() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(math.log(50.0)) == pytest.approx(50.0)
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))
