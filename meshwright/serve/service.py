"""An engine behind a bounded queue: it steps in a thread of its own, requests and streams live on the event loop.

    HTTP handlers ──submit──> inbox ──thread: add, abort, step──> outputs ──call_soon_threadsafe──> Generation (async iterator)

Nothing of the engine is touched from another thread, and nothing of the queue's bookkeeping outside of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.errors import MeshwrightError, UserError
from meshwright.serve.contract import Busy, Engine, NotReady, Work, reason_of
from meshwright.serve.metrics import Metrics

__all__ = ["Generation", "Service"]

PACE = 0.2
"""Weight of the newest interval in the running mean of the time between two requests' first outputs."""

LOOK_S = 1.0
"""An engine with nothing to do is looked at so often: a part of it may have ended."""

LONGEST_WAIT = 60
"""Largest Retry-After, seconds: an estimate over a longer time is worth nothing."""


@dataclass
class _Live:
    """A request that has not ended. Times are of time.monotonic()."""

    generation: Generation
    index: int
    prompt: int
    arrival: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0


class Generation:
    """The outputs of the requests that were submitted together, as (their index, output), in the order of their making.

    Leaving it (`async with`, or `close`) before its end aborts what has not ended. Raises NotReady when the engine fails or
    the service stops, UserError when the engine refuses a request.
    """

    def __init__(self, service: Service, ids: Sequence[str]):
        self._service = service
        self._open = dict.fromkeys(ids)
        self._queue: asyncio.Queue[tuple[int, Any] | MeshwrightError] = asyncio.Queue()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> tuple[int, Any]:
        if not self._open and self._queue.empty():
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, MeshwrightError):
            raise item
        return item

    def close(self) -> None:
        """Abort what has not ended."""
        self.drop(list(self._open))

    def drop(self, ids: Sequence[str]) -> None:
        self._service._abandon([id for id in ids if id in self._open])

    def _give(self, id: str, index: int, output: Any) -> None:
        if output.finish is not None:
            self._open.pop(id, None)
        self._queue.put_nowait((index, output))

    def _end(self, error: MeshwrightError) -> None:
        self._open.clear()
        self._queue.put_nowait(error)


class Service:
    """Takes requests for one engine while there is room, and gives their outputs back.

    max_waiting         requests that may wait for their first token; one more is refused with Busy
    max_waiting_tokens  tokens that the prompts of the waiting requests may have together
    stall_s             seconds after which a step that has not returned makes the service not ready
    A request that finds nobody waiting is always taken, however long its prompt.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_waiting: int = 256,
        max_waiting_tokens: int = 1 << 18,
        stall_s: float = 60.0,
        metrics: Metrics | None = None,
    ):
        self.engine, self.metrics = engine, metrics or Metrics()
        self.max_waiting, self.max_waiting_tokens, self.stall_s = max_waiting, max_waiting_tokens, stall_s
        self.failure: str | None = None
        self._on_failure: Callable[[str], None] = lambda reason: None
        self._live: dict[str, _Live] = {}
        self._waiting = self._waiting_tokens = 0
        self._pace, self._last_first, self._silent = 0.0, 0.0, 0.0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        # between the event loop and the thread
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # of the thread alone, but for readers of `_busy_since`
        self._inside: set[str] = set()
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- on the event loop ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Let the engine work. Call it on the event loop that the requests will come from."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def on_failure(self, call: Callable[[str], None]) -> None:
        """`call` gets the reason, once and on the event loop, when the engine fails."""
        self._on_failure = call

    @property
    def waiting(self) -> int:
        """Requests that have had no output yet."""
        return self._waiting

    @property
    def running(self) -> int:
        """Requests that have had an output and have not ended."""
        return len(self._live) - self._waiting

    def trouble(self) -> str | None:
        """Why no request would be answered now; None: it would."""
        if self.failure is not None:
            return f"the engine failed: {self.failure}"
        if self._draining or self._stopped:
            return "the server is stopping"
        if not self._thread.is_alive():
            return "the engine has not started"
        since = self._busy_since
        if since is not None and time.monotonic() - since > self.stall_s:
            return f"the engine has not finished a step for {time.monotonic() - since:.0f} s"
        if self._silent > self.stall_s:
            return f"a replica has not finished a step for {self._silent:.0f} s"
        return None

    def submit(self, works: Sequence[Work]) -> Generation:
        """Take these requests, all or none. Raises NotReady, and Busy when the queue is full."""
        if (reason := self.trouble()) is not None:
            self.metrics.refused.labels("not_ready").inc()
            raise NotReady(reason)
        tokens = sum(len(work.tokens) for work in works)
        over = self._waiting + len(works) > self.max_waiting or self._waiting_tokens + tokens > self.max_waiting_tokens
        if self._waiting and over:
            self.metrics.refused.labels("busy").inc()
            what = f"{self._waiting} requests with {self._waiting_tokens} tokens wait"
            limits = f"the queue takes {self.max_waiting} with {self.max_waiting_tokens}"
            raise Busy(f"{what}, and {limits}", self._retry_after())
        now = time.monotonic()
        generation = Generation(self, [work.id for work in works])
        for index, work in enumerate(works):
            assert work.id not in self._live, "ids of requests are ours, and unique"
            self._live[work.id] = _Live(generation, index, len(work.tokens), now)
        self._waiting += len(works)
        self._waiting_tokens += tokens
        self.metrics.prompt_tokens.inc(tokens)
        self._note()
        self._order(*(lambda work=work: self._add(work) for work in works))
        return generation

    async def drain(self, deadline_s: float) -> int:
        """Take no more, and wait until all is answered or `deadline_s` seconds are over. The number of requests cut off."""
        self._draining = True
        self._note()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), deadline_s)
        cut = len(self._live)
        self._end_all(NotReady("the server is stopping"))
        return cut

    async def close(self, timeout_s: float = 10.0) -> None:
        """End the engine's thread, after at most one more step, and the engine."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, timeout_s)
        self._end_all(NotReady("the server is stopping"))

    def _retry_after(self) -> int:
        return min(max(math.ceil(self._waiting * self._pace), 1), LONGEST_WAIT)

    def _abandon(self, ids: Sequence[str]) -> None:
        for id in ids:
            live = self._forget(id)
            if live is not None:
                live.generation._open.pop(id, None)
                self.metrics.aborted.inc()
                self._order(lambda id=id: self._abort(id))  # type: ignore[misc]
        self._note()

    def _end_all(self, error: NotReady) -> None:
        generations = {id(live.generation): live.generation for live in self._live.values()}
        for name in list(self._live):
            self._forget(name)
            self.metrics.aborted.inc()
            self._order(lambda name=name: self._abort(name))  # type: ignore[misc]
        for generation in generations.values():
            generation._end(error)
        self._note()

    def _forget(self, id: str) -> _Live | None:
        live = self._live.pop(id, None)
        if live is not None and live.first is None:
            self._waiting -= 1
            self._waiting_tokens -= live.prompt
        return live

    def _note(self) -> None:
        """Bring the gauges and `_idle` up to date."""
        self.metrics.waiting.set(self._waiting)
        self.metrics.waiting_tokens.set(self._waiting_tokens)
        self.metrics.running.set(self.running)
        self.metrics.ready.set(self.trouble() is None)
        if self._live:
            self._idle.clear()
        else:
            self._idle.set()

    def _deliver(self, outputs: Sequence[Any], stats: Mapping[str, float]) -> None:
        now = time.monotonic()
        for output in outputs:
            live = self._live.get(output.id)
            if live is None:  # the client left while the step ran
                continue
            if live.first is None:
                self._first(live, now)
            live.tokens += len(output.tokens)
            live.last = now
            self.metrics.output_tokens.inc(len(output.tokens))
            if output.finish is not None:
                self._forget(output.id)
                self._last(live, output.finish)
            live.generation._give(output.id, live.index, output)
        self.metrics.take(stats)
        self._silent = stats.get("silent_s", 0.0)
        self._note()

    def _first(self, live: _Live, now: float) -> None:
        live.first = now
        self._waiting -= 1
        self._waiting_tokens -= live.prompt
        self.metrics.first_token.observe(now - live.arrival)
        began = max(self._last_first, live.arrival)  # the time before it came is not one that it waited
        self._pace += PACE * (now - began - self._pace)
        self._last_first = now

    def _last(self, live: _Live, finish: str) -> None:
        assert live.first is not None
        self.metrics.finished.labels(finish).inc()
        self.metrics.request.observe(live.last - live.arrival)
        if live.tokens > 1:
            self.metrics.token.observe((live.last - live.first) / (live.tokens - 1))

    def _refused(self, id: str, error: UserError) -> None:
        live = self._forget(id)
        if live is not None:
            self.metrics.refused.labels("engine").inc()
            others = list(live.generation._open)
            live.generation._end(error)
            self._abandon([other for other in others if other != id])
        self._note()

    def _failed(self, reason: str) -> None:
        self.failure = reason
        self._end_all(NotReady(f"the engine failed: {reason}"))
        self._on_failure(reason)

    # ---- in the engine's thread, but for `_order` ------------------------------------------------------------------------

    def _order(self, *orders: Callable[[], None]) -> None:
        with self._wake:
            self._inbox += orders
            self._wake.notify()

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the event loop is closed: nobody is there to be told
            with self._wake:
                self._stopped = True

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # whatever it is, requests wait for an answer
            self._post(self._failed, reason_of(error))
        finally:
            self._busy_since = None
            with contextlib.suppress(Exception):  # what its ranks died of is told by them
                self.engine.close()

    def _turn(self) -> bool:
        """Carry out what was ordered, then one step. False when it is time to stop."""
        with self._wake:
            while not (self._inbox or self._stopped or self.engine.has_work):
                self._wake.wait(LOOK_S)
            if self._stopped:
                return False
            orders, self._inbox = self._inbox, []
        self._busy_since = time.monotonic()
        for order in orders:
            order()
        outputs = self.engine.step() if self.engine.has_work else ()
        self._inside.difference_update(output.id for output in outputs if output.finish is not None)
        self._busy_since = None
        self._post(self._deliver, outputs, dict(self.engine.stats()))
        return True

    def _add(self, work: Work) -> None:
        try:
            self.engine.add(work)
        except UserError as error:
            self._post(self._refused, work.id, error)
        else:
            self._inside.add(work.id)

    def _abort(self, id: str) -> None:
        if id in self._inside:  # it may have ended before the order came
            self._inside.discard(id)
            self.engine.abort(id)
