"""A watchdog thread that ends a rank which makes no progress, so that no run waits for ever in a collective."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from meshwright.distributed.stop import StopFlag
from meshwright.distributed.worker import open_log, record_failure

__all__ = ["EXIT_HUNG", "Watchdog"]

EXIT_HUNG = 75
"""Exit code of a rank that its watchdog ended (EX_TEMPFAIL of sysexits.h: starting again may help)."""


class Watchdog:
    """Ends the process with EXIT_HUNG, after writing every thread's stack to `log` (this rank's log), when

    - `beat()` was not called for `timeout` seconds (0: no such limit), or
    - `stop` was requested and for `grace` seconds since then, or since the last beat after it, `beat()` was not called.

    Use as a context manager, and call `beat()` at every step and around whatever may take long, such as a save. It works while
    the main thread is blocked inside a collective, as torch waits there without the interpreter's lock.
    """

    def __init__(
        self,
        timeout: float = 0.0,
        grace: float = 15.0,
        stop: StopFlag | None = None,
        log: TextIO | None = None,
        end: Callable[[int], object] = os._exit,
    ):
        self.timeout = timeout
        self.grace = grace
        self._stop = stop
        self._log = log if log is not None else open_log()
        self._end = end
        self._beat = time.monotonic()
        self._what = "the start"
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, what: str = "a step") -> None:
        """Progress was made; what comes next is `what`."""
        self._beat = time.monotonic()
        self._what = what

    def __enter__(self) -> Watchdog:
        self.beat("the start")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        limits = [limit for limit in (self.timeout, self.grace if self._stop else 0.0) if limit > 0]
        pause = min(0.25, min(limits, default=0.25) / 4)
        while not self._done.wait(pause):
            reason = self._overdue(time.monotonic())
            if reason is not None:
                self._give_up(reason)
                return

    def _overdue(self, now: float) -> str | None:
        quiet = now - self._beat
        if self.timeout > 0 and quiet > self.timeout:
            return f"no progress for {quiet:.1f} s (limit {self.timeout:g} s) in {self._what}"
        since = self._stop.since if self._stop is not None else None
        if since is not None and now - max(since, self._beat) > self.grace:
            return f"asked to stop {now - since:.1f} s ago and still in {self._what} (grace {self.grace:g} s)"
        return None

    def _give_up(self, reason: str) -> None:
        log = self._log or sys.stderr
        print(f"meshwright: watchdog: {reason}; ending this rank with exit code {EXIT_HUNG}", file=log, flush=True)
        faulthandler.dump_traceback(file=log, all_threads=True)
        log.flush()
        record_failure("hang", reason, exit_code=EXIT_HUNG)
        self._end(EXIT_HUNG)
