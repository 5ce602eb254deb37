"""Ends from outside, and starts by others: nothing is left running, nothing mixes, and the numbers are the same.

SIGINT and SIGTERM to a healthy run, and what a resume makes of them, are in test_train_resume.py. Mutations tried, each red:
the watchdog never started; `tie_to_parent` not called; a Slurm task that takes itself for a run of its own.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from meshwright.distributed.watch import EXIT_HUNG
from tests.e2e import helpers as e2e
from tests.e2e.planted import Plant

BLOCKED = Plant("sleep", "before reduce", nth=12, rank=1, value=600)
"""Rank 1 hangs before a collective, in which rank 0 then waits."""


@pytest.fixture(scope="module")
def plain(ranks, tmp_path_factory) -> Path:
    """The plain run on two ranks; beside it its config."""
    folder = tmp_path_factory.mktemp("plain")
    config = e2e.settings(folder / "config.yaml")
    e2e.train_in(ranks(2), config, folder / "run")
    return folder


def hung(folder: Path, grace: int) -> e2e.Command:
    """A run in which rank 1 hangs."""
    config = e2e.settings(folder / "config.yaml", run={"grace": grace})
    run = e2e.train(config, folder / "run", plants=[BLOCKED])
    run.until(lambda: e2e.steps_done(folder / "run") >= 1)
    time.sleep(1.5)
    assert run.process.poll() is None and e2e.steps_done(folder / "run") < 20
    return run


def logs(folder: Path) -> str:
    return "".join(path.read_text() for path in (folder / "run" / "logs").glob("rank*.log"))


@pytest.mark.alone
def test_a_blocked_rank_is_ended_by_its_watchdog_within_the_grace_time(tmp_path):
    run = hung(tmp_path, grace=3)
    run.process.send_signal(signal.SIGTERM)
    start = time.monotonic()
    run.wait(143, timeout=15)
    assert 2.5 < time.monotonic() - start < 10
    said = rf"watchdog: asked to stop 3\.\d s ago and still in a step \(grace 3 s\); ending .* exit code {EXIT_HUNG}"
    assert re.search(said, logs(tmp_path))
    assert "stopped by SIGTERM" in run.err and "Traceback" not in run.err + run.out


@pytest.mark.alone
@pytest.mark.slow
def test_a_second_signal_ends_a_blocked_run_at_once(tmp_path):
    run = hung(tmp_path, grace=300)
    run.interrupt()
    time.sleep(1.0)
    assert run.process.poll() is None
    run.interrupt()
    start = time.monotonic()
    run.wait(130, timeout=20)
    assert time.monotonic() - start < 6


@pytest.mark.alone
@pytest.mark.slow
def test_a_run_that_makes_no_progress_ends_itself(tmp_path):
    config = e2e.settings(tmp_path / "config.yaml", run={"timeout": 4})
    said = e2e.train(config, tmp_path / "run", plants=[BLOCKED]).wait(EXIT_HUNG)
    assert "no progress for 4" in said.err and "(limit 4 s) in a step" in said.err


@pytest.mark.alone
def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path):
    config = e2e.settings(tmp_path / "config.yaml", train={"steps": 100000})
    run = e2e.train(config, tmp_path / "run")
    run.until(lambda: e2e.steps_done(tmp_path / "run") >= 3)
    assert len(e2e.alive(run.tag)) >= 3
    run.process.kill()
    run.wait(-9, gone=5)


@pytest.mark.alone
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_a_signal_during_the_preparation_leaves_nothing_running(tmp_path, number, code):
    big = tmp_path / "big.jsonl"
    big.write_bytes(e2e.raw().read_bytes() * 100)  # enough to be shared out
    data = {"workers": 2, "tokenizer": {"path": str(e2e.corpus() / "tokenizer")}}
    config = e2e.settings(tmp_path / "config.yaml", big, data=data)
    run = e2e.train(config, tmp_path / "run", plants=[Plant("sleep", "before journal", value=600)])
    run.until(lambda: len(e2e.alive(run.tag)) >= 2)  # a tokenising process is there
    time.sleep(0.5)
    os.killpg(run.process.pid, number)
    run.wait(code, timeout=15)
    assert "Traceback" not in run.err
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_two_runs_at_once_with_a_stale_environment_do_not_mix(plain, tmp_path):
    stale = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "192.0.2.10", "MASTER_PORT": "1"}
    runs = [e2e.train(plain / "config.yaml", tmp_path / name, env=stale) for name in ("a", "b")]
    for name, run in zip(("a", "b"), runs, strict=True):
        run.wait()
        e2e.assert_same(tmp_path / name, plain / "run")
        assert run.err.count("ignored RANK=3, WORLD_SIZE=8") == 1


def test_a_run_folder_in_use_is_refused(plain, tmp_path):
    run = tmp_path / "run"
    first = e2e.train(plain / "config.yaml", run, "--train.steps=100000", "--checkpoint.every=1000")
    first.until(lambda: e2e.steps_done(run) >= 1)
    second = e2e.train(plain / "config.yaml", run, "--resume", "latest", nproc=1).wait(2)
    assert "is writing" in second.err and str(run) in second.err and "Traceback" not in second.err
    before = e2e.steps_done(run)
    first.until(lambda: e2e.steps_done(run) > before)
    first.process.send_signal(signal.SIGTERM)
    first.wait(143)
    assert e2e.column(run, "step") == list(range(1, e2e.steps_done(run) + 1))


def test_torchrun_starts_it_with_the_same_losses(plain, tmp_path):
    run = tmp_path / "run"
    by = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "meshwright")
    said = e2e.Command("train", plain / "config.yaml", f"--run.dir={run}", "--resume", "latest", start=by).wait()
    e2e.assert_same(run, plain / "run")
    assert said.out.count("20 steps done") == 1 and said.out.count(f"run folder: {run}") == 1


def slurm(rank: int, port: int) -> dict[str, str]:
    """What srun gives to one of two tasks on one node."""
    step = {"JOB_ID": 4711, "STEP_ID": 0, "STEP_NUM_TASKS": 2, "STEP_NUM_NODES": 1, "STEP_TASKS_PER_NODE": 2, "NODEID": 0}
    task = {"PROCID": rank, "LOCALID": rank, "STEP_NODELIST": "localhost"}
    return {**{f"SLURM_{key}": str(value) for key, value in {**step, **task}.items()}, "MASTER_PORT": str(port)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_slurm_tasks_train_as_one_and_a_signal_to_one_stops_both(plain, tmp_path):
    run = tmp_path / "run"
    args = ("train", plain / "config.yaml", f"--run.dir={run}", "--resume", "latest")

    def tasks(*plants: Plant) -> list[e2e.Command]:
        port = free_port()
        return [e2e.Command(*args, env=slurm(rank, port), plants=plants) for rank in (0, 1)]

    both = tasks(Plant("sleep", "before step", value=0.25))
    both[0].until(lambda: e2e.steps_done(run) >= 4)
    both[1].process.send_signal(signal.SIGTERM)
    for task in both:
        task.wait(143)
    done = e2e.steps_done(run)
    assert 4 <= done < 20 and e2e.newest(run).name == f"step-{done:08d}"
    for task in tasks():
        task.wait()
    e2e.assert_same(run, plain / "run")
