"""One command starts all ranks of this machine over torch's elastic agent, and ends when they have ended.

    launch(["script.py", "--flag"], nproc=4, log_dir=Path("runs/x/logs"))

The agent runs in a thread; this thread handles signals. Every rank starts in `worker.py`, which ties it to this process, so
that nothing outlives a launcher, not even one that is killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from meshwright.distributed.environment import STALE
from meshwright.distributed.failure import Failure, agent_trouble, ended, first_culprit
from meshwright.distributed.rendezvous import Rendezvous, prepare
from meshwright.distributed.worker import PRIVATE, START_LINE, follows, tie_to_parent
from meshwright.errors import DeviceError, Finding

__all__ = ["Failure", "launch", "tie_to_parent"]

_LATE = 2.0
"""Seconds past the grace time, so that a rank's own watchdog ends it first and leaves its stacks in the log."""


def launch(
    argv: list[str],
    *,
    nproc: int,
    devices: str | None = None,
    nnodes: int = 1,
    rdzv: str | None = None,
    max_restarts: int = 0,
    log_dir: Path | str | None = None,
    grace: float = 15.0,
    join_timeout: float = 300.0,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run `argv` (["script.py", ...] or ["-m", "module", ...]) as `nproc` ranks here, `nnodes * nproc` in all; the exit code.

    0: every rank succeeded. Else the first culprit's own code (128 + signal if a signal ended it), its rank and message shown
    last on stderr. 130/143/129: ended by SIGINT/SIGTERM/SIGHUP, which the ranks were told and had `grace` seconds to obey; a
    second signal ends them at once. Ranks that fail with a UserError or NumericsError are not started again.

    devices: numbers among the visible ones ("0,2"). rdzv: HOST:PORT where several machines meet. max_restarts: how often all
    ranks are started anew after a failure (TORCHELASTIC_RESTART_COUNT counts). log_dir: gets rank{r}.log for each rank, added
    to; without it logs are kept only if a rank fails. join_timeout: seconds to wait for the other machines. env: added to each
    rank's environment.

    Raises DeviceError, with all findings, before anything is started.
    """
    logs_given = log_dir is not None
    private = Path(tempfile.mkdtemp(prefix="meshwright-launch-"))
    logs = Path(log_dir) if log_dir is not None else Path(tempfile.mkdtemp(prefix="meshwright-logs-"))
    code = 1
    try:
        extra = _check(argv, nproc, nnodes, max_restarts, devices, logs)
        meeting = prepare(nnodes, rdzv)
        command = [sys.executable, "-m", "meshwright.distributed.worker", str(private), str(logs), str(os.getpid()), *argv]
        with _environment(_rank_environment(nproc, meeting, {**extra, **(env or {})})):
            agent = _Agent(command, private, meeting, nproc, nnodes, max_restarts, join_timeout)
            code = _Launch(agent, private, logs, grace, max_restarts).run()
    finally:
        shutil.rmtree(private, ignore_errors=True)
        if not logs_given and code == 0:
            shutil.rmtree(logs, ignore_errors=True)
    return code


def _check(argv: list[str], nproc: int, nnodes: int, restarts: int, devices: str | None, logs: Path) -> dict[str, str]:
    """Every finding at once, before anything is started; the environment that narrows the devices."""
    findings = []
    for name, value, low in (("--nproc", nproc, 1), ("--nnodes", nnodes, 1), ("--max-restarts", restarts, 0)):
        if value < low:
            findings.append(Finding(f"{name} {value}", f"must be at least {low}"))
    if not argv or (argv[0] == "-m" and len(argv) < 2):
        findings.append(Finding("launch", "there is nothing to run", "Give a script, or -m and a module"))
    elif argv[0] != "-m" and not Path(argv[0]).is_file():
        findings.append(Finding(argv[0], "there is no such file"))
    try:
        logs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=logs):
            pass
    except OSError as error:
        findings.append(Finding(str(logs), f"logs cannot be written there: {error.strerror}", "Choose another folder"))
    extra: dict[str, str] = {}
    if devices is not None:
        from meshwright.distributed import device

        try:
            kind = device.pick()
            extra = device.visible(devices, kind, device.count(kind))
            if nproc > len(devices.split(",")):
                findings.append(Finding(f"--nproc {nproc}", f"more ranks than devices in --devices {devices}"))
        except DeviceError as error:
            findings += error.findings
    if findings:
        raise DeviceError(findings=findings)
    return extra


def _rank_environment(nproc: int, meeting: Rendezvous, extra: Mapping[str, str]) -> dict[str, str | None]:
    """Variables for the ranks; None removes what an earlier job left in this shell."""
    from meshwright.distributed.device import cores

    stale = {key: None for key in os.environ if key in STALE or key.startswith(("TORCHELASTIC_", "ROLE_"))}
    values: dict[str, str | None] = {**stale}
    if "OMP_NUM_THREADS" not in os.environ:
        values["OMP_NUM_THREADS"] = str(max(1, cores() // nproc))
    if "GLOO_SOCKET_IFNAME" not in os.environ and meeting.interface:
        values["GLOO_SOCKET_IFNAME"] = meeting.interface  # else gloo resolves the host's name, which often fails or misleads
    return {**values, **extra}


@contextlib.contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """The agent hands this process's environment to the ranks."""
    before = dict(os.environ)
    for key, value in changes.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _Agent(threading.Thread):
    """torch's elastic agent in a thread of its own, as it would take the main thread's signals. It is a daemon: should this
    process end first, the thread's death lets the kernel kill the ranks it started."""

    def __init__(
        self,
        command: list[str],
        private: Path,
        meeting: Rendezvous,
        nproc: int,
        nnodes: int,
        max_restarts: int,
        join_timeout: float,
    ):
        super().__init__(name="elastic-agent", daemon=True)
        self.private = private
        self.meeting = meeting
        self.error: BaseException | None = None
        self.failures: dict[int, Any] = {}
        self._command = command
        self._sizes = (nproc, nnodes, max_restarts, join_timeout)

    def run(self) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        for name in list(logging.root.manager.loggerDict):
            if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
                logging.getLogger(name).setLevel(logging.CRITICAL)  # we say what happened, once, in our own words
        nproc, nnodes, max_restarts, join_timeout = self._sizes
        config = LaunchConfig(
            min_nodes=nnodes,
            max_nodes=nnodes,
            nproc_per_node=nproc,
            run_id=self.meeting.run_id,
            rdzv_backend="c10d",
            rdzv_endpoint=self.meeting.endpoint,
            rdzv_configs={
                "is_host": self.meeting.host,
                "timeout": int(join_timeout),
                "read_timeout": int(min(60, join_timeout)),
            },
            local_addr=self.meeting.address,
            max_restarts=max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=str(self.private / "agent")),
        )
        try:
            elastic_launch(config, self._command[0])(*self._command[1:])
        except ChildFailedError as error:
            self.failures = error.failures
        except BaseException as error:
            self.error = error

    def ranks(self) -> list[int]:
        """Process ids of the ranks that live."""
        import psutil

        found = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if str(self.private) in child.cmdline():
                    found.append(child.pid)
        return found

    def kill(self) -> None:
        """End every process of this launch, also what a rank has started, at once."""
        import psutil

        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(PRIVATE) == str(self.private):
                    process.kill()
        for pid in self.ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class _Launch:
    """The main thread's part: signals, restarts shown, and the verdict at the end."""

    def __init__(self, agent: _Agent, private: Path, logs: Path, grace: float, max_restarts: int):
        self.agent = agent
        self.private = private
        self.logs = logs
        self.grace = grace
        self.max_restarts = max_restarts
        self.signals: list[int] = []
        self.told: set[int] = set()
        self.deadline: float | None = None
        self.starts = 0

    def run(self) -> int:
        with self._handlers():
            self.agent.start()
            while self.agent.is_alive():
                self.agent.join(0.1)
                self._show_restart()
                if self.signals and not self._stopping():
                    break
            self.agent.kill()
            self.agent.join(5.0)
        return self._verdict()

    @contextlib.contextmanager
    def _handlers(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.signals.append(signum)

    def _stopping(self) -> bool:
        """Tell every rank once, also one that is only now starting; False when they have had their time."""
        if self.deadline is None:
            self.deadline = time.monotonic() + self.grace + _LATE
            (self.private / "stop").write_text("0")
            name = signal.Signals(self.signals[0]).name
            _say(f"{name}: asking the ranks to finish and stop, within {self.grace:g} s; once more ends them at once")
        number = signal.SIGINT if self.signals[0] == signal.SIGINT else signal.SIGTERM
        ranks = self.agent.ranks()
        for pid in ranks:
            if pid not in self.told:
                self.told.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        if not ranks and not self.told:
            return False  # the agent still waits for other machines; there is nothing to save
        return len(self.signals) < 2 and time.monotonic() < self.deadline

    def _show_restart(self) -> None:
        while (self.private / f"start-{self.starts + 1}").exists():
            culprit = first_culprit(self._records(self.starts))
            named = culprit is not None and not follows(culprit.message)  # a killed rank leaves no record, only others' words
            why = f"rank {culprit.rank} failed: {culprit.message}" if culprit and named else "a rank ended"
            self.starts += 1
            if not self.signals:
                _say(f"{why}; all ranks start again ({self.starts} of {self.max_restarts})")

    def _records(self, start: int) -> list[Failure]:
        records = []
        for path in sorted(self.private.glob(f"error-{start}-*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            records.append(Failure(**record))
        return records

    def _verdict(self) -> int:
        starts = [int(path.name.removeprefix("start-")) for path in self.private.glob("start-*")]
        recorded = {failure.rank: failure for failure in self._records(max(starts, default=0))}
        seen = {rank: recorded.get(rank) or ended(rank, failure.exitcode) for rank, failure in self.agent.failures.items()}
        culprit = first_culprit(list({**recorded, **seen}.values()))
        if self.signals:
            if culprit is not None and culprit.kind == "internal" and not follows(culprit.message):
                self._show(culprit)
            _say(f"stopped by {signal.Signals(self.signals[0]).name}")
            return 128 + self.signals[0]
        if culprit is not None:
            self._show(culprit)
            return culprit.exit_code or 1
        if self.agent.error is not None:
            _say(agent_trouble(self.agent.error, self.agent.meeting))
            return 1
        return 0

    def _show(self, failure: Failure) -> None:
        log = self.logs / f"rank{failure.rank}.log"
        if failure.traceback:
            print(failure.traceback.rstrip(), file=sys.stderr)
        elif failure.kind in ("ended", "aborted") and (tail := _tail(log)):
            print("\n".join([f"The end of {log}:", *tail]), file=sys.stderr)
        hint = f"\nIts log: {log}" if log.exists() else ""
        _say(f"rank {failure.rank} failed (exit code {failure.exit_code}): {failure.message}{hint}")


def _tail(log: Path, lines: int = 15) -> list[str]:
    """The last lines that the rank wrote since it was last started."""
    written = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    starts = [index for index, line in enumerate(written) if line.startswith(f"{START_LINE} rank ")]
    return written[starts[-1] + 1 if starts else 0 :][-lines:]


def _say(text: str) -> None:
    print(f"meshwright: {text}", file=sys.stderr, flush=True)
