"""The launcher with real ranks: failures, signals, restarts, ports, leftovers, two machines. Nothing may be left running."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from meshwright.distributed.launch import launch
from meshwright.distributed.watch import EXIT_HUNG
from meshwright.errors import DeviceError

pytestmark = pytest.mark.alone

SCRIPT = str(Path(__file__).parent / "scripts" / "reduce_rank.py")
LAUNCHER = """
import json, sys
from meshwright.distributed.launch import launch
from meshwright.errors import MeshwrightError
try:
    sys.exit(launch(**json.loads(sys.argv[1])))
except MeshwrightError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


class Launched:
    """A launcher in a process of its own."""

    def __init__(self, logs: Path, *argv: object, prefix: tuple[str, ...] = (), **options: object):
        import json

        self.logs = logs
        call = json.dumps({"argv": [SCRIPT, *map(str, argv)], "log_dir": str(logs), **options})
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", LAUNCHER, call],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(logs.parent)},
        )

    def wait_for(self, rank: int, text: str, timeout: float = 40.0) -> None:
        end = time.monotonic() + timeout
        while text not in self.log(rank):
            assert time.monotonic() < end and self.process.poll() is None, f"{self.log(rank)}\n{self.finish(1)}"
            time.sleep(0.05)

    def log(self, rank: int) -> str:
        path = self.logs / f"rank{rank}.log"
        return path.read_text() if path.exists() else ""

    def pids(self, ranks: int) -> list[int]:
        return [int(re.findall(rf"rank {rank} pid (\d+)", self.log(rank))[-1]) for rank in range(ranks)]

    def finish(self, timeout: float) -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
        return self.process.returncode, out, err


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone_within(pids: list[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "logs"
    yield folder
    for log in folder.glob("rank*.log"):
        left = [int(pid) for pid in re.findall(r"pid (\d+)", log.read_text()) if alive(int(pid))]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"a rank of {log} outlived the launcher"


@pytest.mark.parametrize(
    ("how", "culprit", "code", "message", "trace"),
    [
        ("raise", 1, 1, r"rank 1 failed \(exit code 1\): ValueError: a planted failure", True),
        ("user", 1, 2, r"rank 1 failed \(exit code 2\): corpus.jsonl, line 7: is no JSON. Mend the line", False),
        ("exit", 2, 7, r"rank 2 failed \(exit code 7\)", False),
        ("kill", 0, 137, r"rank 0 failed \(exit code 137\): ended by SIGKILL", False),
    ],
)
def test_the_first_culprit_gives_code_and_last_words_and_the_others_stop(capfd, logs, how, culprit, code, message, trace):
    assert launch([SCRIPT, "6", how, str(culprit), "3"], nproc=3, log_dir=logs) == code
    failed = float(re.search(r"failing at ([\d.]+)", (logs / f"rank{culprit}.log").read_text()).group(1))
    assert time.time() - failed < 10.0
    err = capfd.readouterr().err
    *_, said, where = err.strip().splitlines()
    assert re.match(rf"meshwright: {message}", said) and where == f"Its log: {logs / f'rank{culprit}.log'}"
    assert ("Traceback" in err) == trace
    assert "runpy" not in err and "closed by peer" not in err


def test_leftover_variables_do_not_reach_the_ranks_and_rank_0_speaks(capfd, logs, monkeypatch):
    for key, value in {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "192.0.2.10", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(key, value)
    assert launch([SCRIPT, "5"], nproc=2, log_dir=logs, env={"EXTRA": "1"}) == 0
    out = capfd.readouterr().out
    assert "rank 0 of 2 start 0 total 15" in out and "rank 1" not in out
    assert "rank 0 of 2 start 0 total 15" in (logs / "rank0.log").read_text()
    assert "rank 1 of 2 start 0 total 15" in (logs / "rank1.log").read_text()
    assert os.environ["RANK"] == "3" and "EXTRA" not in os.environ


def test_a_direct_run_among_leftovers_runs_alone_with_a_warning():
    env = {**os.environ, "RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "192.0.2.10"}
    done = subprocess.run([sys.executable, SCRIPT, "2"], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and "rank 0 of 1 start 0 total 2" in done.stdout
    assert "ignored RANK=3, WORLD_SIZE=8, MASTER_ADDR=192.0.2.10" in done.stderr


def test_all_ranks_start_again_after_a_failure_and_logs_go_on(capfd, logs):
    assert launch([SCRIPT, "5", "once", "1", "2"], nproc=2, log_dir=logs, max_restarts=2) == 0
    captured = capfd.readouterr()
    assert "rank 0 of 2 start 1 total 15" in captured.out
    assert "rank 1 failed: ValueError: a planted failure; all ranks start again (1 of 2)" in captured.err
    log = (logs / "rank1.log").read_text()
    assert "a planted failure" in log and "rank 1 of 2 start 1 total 15" in log


def test_a_users_mistake_is_not_tried_again(capfd, logs):
    assert launch([SCRIPT, "5", "user", "1", "2"], nproc=2, log_dir=logs, max_restarts=3) == 2
    assert "start again" not in capfd.readouterr().err
    assert (logs / "rank0.log").read_text().count("start 0") <= 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)])
def test_a_signal_lets_the_ranks_save_at_one_step_and_end(logs, number, code):
    run = Launched(logs, 100000, nproc=2, max_restarts=3)
    for rank in (0, 1):
        run.wait_for(rank, "made 5 steps")
    run.process.send_signal(number)
    returned, _, err = run.finish(15)
    assert returned == code, err
    saved = {re.search(r"saved at step (\d+)", run.log(rank)).group(1) for rank in (0, 1)}
    assert len(saved) == 1 and int(saved.pop()) > 0
    assert f"stopped by {signal.Signals(number).name}" in err.splitlines()[-1]


def test_a_rank_that_hangs_is_ended_within_the_grace_time_with_its_stacks_in_the_log(logs):
    run = Launched(logs, 100000, "hang", 1, 3, nproc=2, grace=3.0)
    run.wait_for(1, "hangs now")
    time.sleep(0.5)
    run.process.send_signal(signal.SIGTERM)
    start = time.monotonic()
    returned, _, err = run.finish(20)
    assert returned == 143 and time.monotonic() - start < 8.0, err
    # rank 0 is blocked in the collective, rank 1 in its own code: each is ended by its own watchdog, or by the other's end
    assert f"exit code {EXIT_HUNG}" in run.log(0) + run.log(1)
    assert "all_reduce" in run.log(0) or "in fail" in run.log(1)


@pytest.mark.slow
def test_a_second_signal_ends_everything_at_once(logs):
    run = Launched(logs, 100000, "hang", 1, 3, nproc=2, grace=60.0)
    run.wait_for(1, "hangs now")
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    run.process.send_signal(signal.SIGINT)
    start = time.monotonic()
    returned, _, err = run.finish(20)
    assert returned == 130 and time.monotonic() - start < 5.0, err


# mutation tried: without tie_to_parent in worker.py both ranks live on
def test_no_rank_outlives_a_launcher_that_is_killed(logs):
    run = Launched(logs, 100000, nproc=2)
    for rank in (0, 1):
        run.wait_for(rank, "made 5 steps")
    pids = run.pids(2)
    assert all(map(alive, pids))
    run.process.kill()
    run.process.wait(5)
    assert gone_within(pids, 3.0)
    run.finish(5)


def test_two_launchers_at_once_do_not_mix(tmp_path):
    runs = [Launched(tmp_path / name, steps, nproc=2) for name, steps in (("a", 7), ("b", 9))]
    for run, total in zip(runs, (21, 27), strict=True):
        returned, out, err = run.finish(60)
        assert returned == 0, err
        assert f"rank 0 of 2 start 0 total {total}" in out and f"total {total}" in run.log(1)


def test_a_named_port_that_is_taken_fails_at_once_and_a_free_one_works(capfd, logs):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(DeviceError, match=f"127.0.0.1:{port}.*port {port} is taken"):
            launch([SCRIPT, "5"], nproc=2, rdzv=f"127.0.0.1:{port}", log_dir=logs)
        assert time.monotonic() - start < 5.0
    assert launch([SCRIPT, "5"], nproc=2, rdzv=f"127.0.0.1:{port}", log_dir=logs) == 0
    assert "total 15" in capfd.readouterr().out


def test_every_problem_is_named_before_anything_starts(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(DeviceError) as caught:
        launch([str(tmp_path / "none.py")], nproc=0, nnodes=0, max_restarts=-1, log_dir=blocked / "logs")
    wheres = [finding.where for finding in caught.value.findings]
    assert wheres == ["--nproc 0", "--nnodes 0", "--max-restarts -1", str(tmp_path / "none.py"), str(blocked / "logs")]


# ---- two machines, as two network namespaces ----------------------------------------------------------------------------


@pytest.fixture
def machines() -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Command prefixes that run a program on one or the other of two machines with addresses 10.231.7.1 and .2."""
    ip = shutil.which("ip")
    if ip is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the ip command")
    names = [f"mw{os.getpid()}{side}" for side in "ab"]

    def run(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run([ip, *words], check=check, capture_output=True, text=True)

    try:
        for name in names:
            added = run("netns", "add", name, check=False)
            if added.returncode != 0:
                pytest.skip(f"network namespaces cannot be made here: {added.stderr.strip()}")
        ends = [f"v{name[-7:]}" for name in names]
        run("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
            run("link", "set", end, "netns", name)
            run("-n", name, "addr", "add", f"10.231.7.{number}/24", "dev", end)
            run("-n", name, "link", "set", end, "up")
            run("-n", name, "link", "set", "lo", "up")
        first, second = ((ip, "netns", "exec", name) for name in names)
        yield first, second
    finally:
        for name in names:
            run("netns", "del", name, check=False)


def start_on_both(machines, folder: Path, *argv: object) -> list[Launched]:
    options = {"nproc": 1, "nnodes": 2, "rdzv": "10.231.7.1:29411", "join_timeout": 60.0, "grace": 3.0}
    return [Launched(folder, *argv, prefix=prefix, **options) for prefix in machines]


def test_two_machines_train_as_one(machines, logs):
    for run in start_on_both(machines, logs, 5):
        returned, _, err = run.finish(60)
        assert returned == 0, err
    totals = [(logs / f"rank{rank}.log").read_text() for rank in (0, 1)]
    assert all(f"rank {rank} of 2 start 0 total 15" in text for rank, text in enumerate(totals))


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_when_one_machine_dies_the_other_ends_too(machines, logs, killed):
    runs = start_on_both(machines, logs, 100000)
    for rank in (0, 1):
        runs[0].wait_for(rank, "made 5 steps")
    victim = psutil.Process(runs[killed].process.pid)
    for process in [*victim.children(recursive=True), victim]:
        process.kill()
    start = time.monotonic()
    returned, _, err = runs[1 - killed].finish(20)
    assert returned not in (0, -signal.SIGKILL) and time.monotonic() - start < 10.0, err
    assert "Traceback" not in err.splitlines()[-1] and "meshwright: " in err
    runs[killed].finish(5)
