"""How a rank or the agent ended a run, and which of several failures was the first culprit."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from meshwright.distributed.rendezvous import Rendezvous
from meshwright.distributed.worker import follows

__all__ = ["Failure", "agent_trouble", "ended", "first_culprit"]


@dataclass(frozen=True)
class Failure:
    """How a rank ended the run. exit_code: its own, 128 + signal for a signal."""

    rank: int
    exit_code: int
    kind: str
    message: str
    traceback: str = ""
    time: float = 0.0

    @property
    def order(self) -> tuple[int, float]:
        """Culprits first: a rank's own error, then ends that may follow from it, then those that only follow, by time."""
        if self.kind == "killed":  # by the agent, once another rank had failed
            return (3, self.time)
        if follows(self.message):
            return (2, self.time)
        return (1 if self.kind in ("hang", "aborted") else 0, self.time)


def first_culprit(failures: list[Failure]) -> Failure | None:
    return min(failures, key=lambda failure: failure.order, default=None)


def ended(rank: int, code: int) -> Failure:
    """A rank that left no record: a signal, or os._exit."""
    if code >= 0:
        return Failure(rank, code, "ended", f"it ended itself with exit code {code}", time=time.time())
    number = -code
    known = number in set(signal.Signals)
    name = signal.Signals(number).name if known else f"signal {number}"
    kind = {int(signal.SIGTERM): "killed", int(signal.SIGABRT): "aborted"}.get(number, "ended")
    hint = "; the kernel does so when memory runs out (see dmesg)" if number == signal.SIGKILL else ""
    return Failure(rank, 128 + number, kind, f"ended by {name}{hint}", time=time.time())


def agent_trouble(error: BaseException, meeting: Rendezvous) -> str:
    name = type(error).__name__
    if "Rendezvous" not in name:
        return f"the ranks could not be started: {name}: {error}"
    if "Timeout" in name:
        fix = "Start the launcher on each machine, with the same --rdzv and --nnodes"
        return f"not all machines arrived at {meeting.endpoint} in time. {fix}"
    reason = (str(error).splitlines() or [name])[0]
    return f"the meeting place {meeting.endpoint} went away or could not be reached: {reason}"
