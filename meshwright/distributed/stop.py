"""Ending a run from outside: a signal only sets a flag, and all ranks act on it at the same step boundary."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from meshwright.distributed.reduce import max_scalars

__all__ = ["StopFlag"]


class StopFlag:
    """Set by SIGTERM or SIGINT while it is entered as a context manager (main thread only), or by `request`.

    A signal reaches one rank before another, so no rank may stop on its own flag: fold `local` into a reduction (MAX) that the
    step makes anyway, or ask `agreed`. Further signals change nothing here; the launcher ends a rank that does not end itself.
    """

    signals = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self._event = threading.Event()
        self._before: dict[int, Any] = {}
        self.signal: int | None = None
        self.since: float | None = None
        """time.monotonic() of the request."""

    @property
    def local(self) -> bool:
        """Whether this rank was asked to stop."""
        return self._event.is_set()

    def request(self, signum: int | None = None) -> None:
        if not self._event.is_set():
            self.signal = signum
            self.since = time.monotonic()
            self._event.set()

    def agreed(self, group: dist.ProcessGroup) -> bool:
        """Whether any rank was asked to stop; the same answer on all. Collective over a gloo group."""
        return max_scalars([float(self.local)], group)[0] > 0

    def __enter__(self) -> StopFlag:
        for number in self.signals:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.request(signum)
