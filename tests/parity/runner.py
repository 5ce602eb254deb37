"""Runs many cells, on several sets of ranks at once, until none are left or the time is over.

Cells that share what is compiled lie together in batches. Each of the threads here has a `Pools` of its own and takes batch
after batch, those of the widest worlds first; when all are taken, it helps with what is left of another's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from tests.parity.cells import Cell, compiled_alike, limits_of, run_cell
from tests.ranks.pool import Pools, RankError

__all__ = ["Work", "done", "run_all"]

MANY = 12
"""Cells of a batch that are worth another thread's compiling the same."""


class Work:
    """Cells to be done, by batch; `next_of` may be called by any thread. end: on `time.monotonic`; None: no end."""

    def __init__(self, cells: Iterable[Cell], end: float | None = None):
        batches: dict[tuple[Any, ...], list[Cell]] = {}
        for cell in cells:
            batches.setdefault((cell.world, *compiled_alike(cell)), []).append(cell)
        self._batches = sorted(batches.values(), key=lambda batch: (-batch[0].world, -len(batch)))
        self._taken: dict[int, list[Cell]] = {}
        """The batch of each worker."""
        self._end = end
        self._lock = threading.Lock()

    def next_of(self, worker: int) -> Cell | None:
        """What this worker does next; None: nothing any more."""
        with self._lock:
            if self._end is not None and time.monotonic() > self._end:
                return None
            if not self._taken.get(worker):
                self._taken[worker] = self._batches.pop(0) if self._batches else self._half()
            batch = self._taken[worker]
            return batch.pop(0) if batch else None

    def stop(self) -> None:
        """No cell is given out any more."""
        with self._lock:
            self._end = 0.0

    def left(self) -> int:
        with self._lock:
            return sum(map(len, [*self._batches, *self._taken.values()]))

    def _half(self) -> list[Cell]:
        """Of the longest batch that another worker still has."""
        longest = max(self._taken.values(), key=len, default=[])
        keep = (len(longest) + 1) // 2 if len(longest) >= MANY else len(longest)
        given = longest[keep:]
        del longest[keep:]
        return given


def done(ranks: Pools, cell: Cell, commit: str, timeout: float = 120.0) -> dict[str, Any]:
    """Runs one cell; its line. A rank that raises, dies or hangs makes the cell wrong, and the next one starts on new ranks."""
    start = time.perf_counter()
    worst: dict[str, float] = {}
    try:
        outcome = run_cell(ranks, cell, timeout=timeout)
        wrong = outcome.over(limits_of(cell))
        worst = {kind: float(f"{found.value:.1e}") for kind, found in sorted(outcome.worst.items())}
    except RankError as error:
        wrong = [str(error).strip().splitlines()[0], str(error).strip().splitlines()[-1]]
    except Exception as error:  # the next cell has nothing to do with it
        ranks.close()
        wrong = [f"{type(error).__name__}: {error}"]
    seconds = round(time.perf_counter() - start, 1)
    return {"cell": cell.id, "commit": commit[:12], "worst": worst, "wrong": wrong, "seconds": seconds}


def run_all(work: Work, commit: str, pools: int, take: Callable[[dict[str, Any]], None]) -> None:
    """take: gets each line, in one thread at a time. On Ctrl-C the present cells end, and KeyboardInterrupt follows."""
    one_at_a_time = threading.Lock()

    def serve(worker: int) -> None:
        ranks = Pools()
        try:
            while (cell := work.next_of(worker)) is not None:
                ranks.keep_only(cell.world)
                line = done(ranks, cell, commit)
                with one_at_a_time:
                    take(line)
        finally:
            ranks.close()

    threads = [threading.Thread(target=serve, args=(worker,), name=f"pool{worker}") for worker in range(pools)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        work.stop()
        for thread in threads:
            thread.join()
        raise
