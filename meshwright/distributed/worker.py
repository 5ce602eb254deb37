"""The first code of every rank that our launcher starts: `python -m meshwright.distributed.worker`. No torch here.

It ties the rank to its launcher's life, gives it a log, runs the script or module, and leaves a record of how it failed
for the launcher to show. The record and the log travel by environment variables, so that a watchdog thread finds them too.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import re
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from meshwright.errors import MeshwrightError, NumericsError, UserError

__all__ = ["ERROR_FILE", "LOG_FILE", "PRIVATE", "follows", "open_log", "record_failure", "tie_to_parent"]

PRIVATE = "MESHWRIGHT_LAUNCH_DIR"
"""Folder of one launch, known to its ranks only; also tells which processes belong to the launch."""
ERROR_FILE = "MESHWRIGHT_ERROR_FILE"
LOG_FILE = "MESHWRIGHT_LOG_FILE"

START_LINE = "----"
"""How the line begins that each start of a rank adds to its log."""

_PR_SET_PDEATHSIG = 1
_FOLLOWING = re.compile(
    r"closed by (remote )?peer|reset by peer|broken pipe|connection (refused|was closed|closed)|communicator was aborted"
    r"|remote process exited|recv(value)? failed|socket closed|monitoredbarrier|timed out waiting",
    re.IGNORECASE,
)
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def tie_to_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Have the kernel send a signal to this process the moment its parent dies, however that dies (Linux; elsewhere nothing).

    parent: the parent's process id as the parent knew it. If this process has another parent by now, it ends at once: the
    parent died before the kernel was asked.
    """
    if sys.platform != "linux":
        return
    before = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != before:
        os._exit(128 + number)


def follows(message: str) -> bool:
    """Whether this is what a rank says when another one went away first."""
    return _FOLLOWING.search(message) is not None


def record_failure(kind: str, message: str, trace: str = "", exit_code: int = 1) -> None:
    """Leave for the launcher how this rank failed. Only the first record counts; without our launcher nothing is written.

    kind: "user" (can be mended, never started again), "numerics" (would fail again the same way), "hang", "exit" or "internal".
    """
    path = os.environ.get(ERROR_FILE)
    if path is None:
        return
    rank = int(os.environ.get("RANK", "0"))
    record = {"rank": rank, "kind": kind, "message": message, "traceback": trace, "time": time.time(), "exit_code": exit_code}
    part = f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError):  # a full disk must not hide the failure itself, which the log shows too
        Path(part).write_text(json.dumps(record), encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            os.link(part, path)
        os.unlink(part)


def open_log() -> TextIO | None:
    """This rank's log, for appending; None without our launcher."""
    path = os.environ.get(LOG_FILE)
    return open(path, "a", buffering=1, encoding="utf-8", errors="backslashreplace") if path else None


class _Tee:
    """Standard output of rank 0: to the terminal as it is, and to the log without control codes and overwritten lines."""

    def __init__(self, terminal: TextIO, log: TextIO):
        self._terminal: TextIO | None = terminal
        self._stream = terminal
        self._log = log
        self._line = ""

    def write(self, text: str) -> int:
        if self._terminal is not None:
            try:
                self._terminal.write(text)
            except (OSError, ValueError):
                self._terminal = None  # the terminal went away; the run and its log go on
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._log.write(_CONTROL.sub("", line.rstrip("\r").rpartition("\r")[2]) + "\n")
        if "\r" in self._line:
            self._line = self._line[self._line.rindex("\r") :]
        return len(text)

    def flush(self) -> None:
        if self._terminal is not None:
            try:
                self._terminal.flush()
            except (OSError, ValueError):
                self._terminal = None
        self._log.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _take_log(rank: int, path: Path) -> None:
    log = open(path, "a", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 - for this process's life
    start, world = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("WORLD_SIZE", "?")
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    log.write(f"{START_LINE} rank {rank} of {world}, start {int(start) + 1}, process {os.getpid()}, {now}\n")
    faulthandler.enable(file=log)
    if rank == 0:
        sys.stdout = _Tee(sys.stdout, log)
        sys.stderr = _Tee(sys.stderr, log)
        return
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _run(argv: list[str]) -> None:
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path[0] = str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames by which this file starts the script."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _fail(error: BaseException) -> int:
    """Record and print the failure; the exit code."""
    trace = "".join(traceback.format_exception(type(error), error, _own_frames(error.__traceback__)))
    message = str(error) or type(error).__name__
    if isinstance(error, MeshwrightError):
        kind = "user" if isinstance(error, UserError) else "numerics" if isinstance(error, NumericsError) else "internal"
        code, trace = error.exit_code, "" if isinstance(error, UserError) else trace
    elif isinstance(error, KeyboardInterrupt):
        kind, code, trace, message = "exit", 130, "", "interrupted"
    elif isinstance(error, SystemExit):
        text = isinstance(error.code, str)
        code = error.code if isinstance(error.code, int) else 1
        kind, trace, message = "exit", "", message if text else f"exit code {code}"
    else:
        kind, code, message = "internal", 1, f"{type(error).__name__}: {message}"
    record_failure(kind, message, "" if isinstance(error, MeshwrightError) else trace, code)
    log = open_log()
    print(trace or message, file=log if log is not None else sys.stderr, flush=True)
    return code


def _main() -> None:
    private, logs, parent, *argv = sys.argv[1:]
    tie_to_parent(int(parent))
    rank, start = int(os.environ["RANK"]), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    stop = Path(private) / "stop"
    if stop.exists():  # the run is being ended; the agent, which knows nothing of it, has started its ranks again
        os._exit(int(stop.read_text()))
    (Path(private) / f"start-{start}").touch()
    os.environ[PRIVATE] = private
    os.environ[ERROR_FILE] = str(Path(private) / f"error-{start}-{rank}.json")
    os.environ[LOG_FILE] = str(Path(logs) / f"rank{rank}.log")
    _take_log(rank, Path(os.environ[LOG_FILE]))
    try:
        _run(argv)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        code = _fail(error)
        if isinstance(error, (UserError, NumericsError)):
            stop.write_text("0" if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" else str(code))
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        # not by way of the interpreter's own end: threads of a half-dead process group could hold it there for minutes,
        # while the closing of its sockets is what tells the other ranks
        os._exit(code)


if __name__ == "__main__":
    _main()
