"""The stop flag and the watchdog, without ranks."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.distributed import launch
from meshwright.distributed.failure import Failure, ended, first_culprit
from meshwright.distributed.stop import StopFlag
from meshwright.distributed.watch import EXIT_HUNG, Watchdog
from meshwright.distributed.worker import ERROR_FILE, _Tee, follows, record_failure


def test_a_signal_only_sets_the_flag_and_the_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopFlag() as stop:
        assert not stop.local and stop.since is None
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.local and stop.signal == signal.SIGTERM and stop.since <= time.monotonic()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


class Ending:
    def __init__(self) -> None:
        self.event = threading.Event()
        self.code: int | None = None

    def __call__(self, code: int) -> None:
        self.code = code
        self.event.set()


def test_a_rank_without_progress_is_ended_with_its_stacks_and_a_record(tmp_path, monkeypatch):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    ending = Ending()
    with open(tmp_path / "log", "w+") as log, Watchdog(timeout=0.2, log=log, end=ending) as watch:
        watch.beat("the gradient reduction")
        assert ending.event.wait(5.0) and ending.code == EXIT_HUNG
    text = (tmp_path / "log").read_text()
    assert "no progress for" in text and "in the gradient reduction" in text
    assert "test_a_rank_without_progress" in text  # the main thread's stack
    record = json.loads((tmp_path / "error.json").read_text())
    assert record["kind"] == "hang" and record["exit_code"] == EXIT_HUNG and "no progress" in record["message"]


def test_beats_keep_a_rank_alive_and_leaving_ends_the_watch(tmp_path):
    ending = Ending()
    with open(tmp_path / "log", "w") as log, Watchdog(timeout=0.4, log=log, end=ending) as watch:
        for _ in range(10):
            time.sleep(0.08)
            watch.beat()
        assert not ending.event.is_set()
    assert not ending.event.wait(0.6)


def test_the_grace_time_counts_from_the_request_and_anew_from_each_beat(tmp_path):
    ending, stop = Ending(), StopFlag()
    with open(tmp_path / "log", "w") as log, Watchdog(grace=0.4, stop=stop, log=log, end=ending) as watch:
        time.sleep(0.6)  # long without a beat, but no limit holds before the request
        stop.request(signal.SIGTERM)
        for _ in range(8):
            time.sleep(0.08)
            watch.beat("saving")
        assert not ending.event.is_set()
        assert ending.event.wait(3.0)
    assert "still in saving" in (tmp_path / "log").read_text()


def test_only_the_first_record_of_a_rank_counts(tmp_path, monkeypatch):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    record_failure("internal", "first")
    record_failure("hang", "second")
    assert json.loads((tmp_path / "error.json").read_text())["message"] == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]
    monkeypatch.delenv(ERROR_FILE)
    record_failure("internal", "nobody asked")


@pytest.mark.parametrize(
    ("failures", "culprit"),
    [
        # what only follows is no culprit, however early
        ([Failure(0, 1, "internal", "Connection closed by peer [127.0.0.1]", time=1.0), ended(1, -9)], 1),
        # a rank that the agent ended is none either
        ([ended(0, -15), Failure(2, 1, "internal", "ValueError: x", time=5.0)], 2),
        # gloo aborts the process when sizes differ; the rank that raised is why
        ([ended(0, -6), Failure(1, 1, "internal", "ValueError: x", time=5.0)], 1),
        # a hang often waits for a rank that failed
        ([Failure(0, 75, "hang", "no progress", time=1.0), Failure(1, 2, "user", "bad row", time=2.0)], 1),
        # between two that failed on their own the first
        ([Failure(0, 1, "internal", "a", time=2.0), Failure(1, 1, "internal", "b", time=1.0)], 1),
        # alone, even a rank that follows has to be named
        ([Failure(3, 1, "internal", "Connection reset by peer", time=1.0)], 3),
    ],
)
def test_the_first_culprit_is_chosen(failures, culprit):
    assert first_culprit(failures).rank == culprit
    assert first_culprit(failures[::-1]).rank == culprit


def test_exit_codes_of_ranks_that_left_no_record():
    assert [ended(0, code).exit_code for code in (7, -9, -11, -15, -40)] == [7, 137, 139, 143, 168]
    assert "SIGKILL" in ended(0, -9).message and "exit code 7" in ended(0, 7).message
    assert first_culprit([]) is None


def test_what_follows_from_another_rank_is_known():
    assert follows("[gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
    assert follows("NCCL communicator was aborted on rank 1.")
    assert not follows("ValueError: the corpus is closed")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_log_of_rank_0_has_plain_lines_while_the_terminal_has_all():
    terminal, log = Terminal(), io.StringIO()
    tee = _Tee(terminal, log)
    text = "plain\n\rstep 1\rstep 2\x1b[2K\rstep 3\nend"
    for part in (text[:9], text[9:20], text[20:]):
        tee.write(part)
    tee.write("\n")
    assert terminal.getvalue() == text + "\n" and tee.isatty()
    assert log.getvalue() == "plain\nstep 3\nend\n"


def test_a_terminal_that_went_away_does_not_end_the_run(tmp_path: Path):
    log = io.StringIO()
    with open(tmp_path / "terminal", "w") as terminal:
        tee = _Tee(terminal, log)
    tee.write("still here\n")
    tee.flush()
    assert log.getvalue() == "still here\n"


def test_ranks_are_asked_once_to_stop_whatever_time_they_get(tmp_path, capsys):
    """Mutation tried: a deadline of infinity for "not asked yet", with which `--drain inf` said it ten times a second."""
    launching = launch._Launch(SimpleNamespace(ranks=list), tmp_path, tmp_path, float("inf"), 0)
    launching.told, launching.signals = {1}, [signal.SIGTERM]
    assert launching._stopping() and launching._stopping()
    assert capsys.readouterr().err.count("asking the ranks") == 1 and (tmp_path / "stop").exists()
