"""What a person sees while training: one live line on a terminal, plain lines elsewhere, a table at the end."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from meshwright.observe.summary import Summary, duration, rows_of

__all__ = ["NullProgress", "Progress", "print_summary"]


def _is_live(stream: TextIO) -> bool:
    """A terminal that can show any character. Elsewhere lines are plain, and characters it cannot show are escaped."""
    return stream.isatty() and (stream.encoding or "").lower().replace("-", "").startswith("utf")


def _say(stream: TextIO, text: str) -> None:
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()


class NullProgress:
    """Says nothing: for every rank but the first."""

    def update(
        self, step: int, *, loss: float | None, tokens_per_s: float, remaining_s: float | None = None, said: str = ""
    ) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Progress(NullProgress):
    """Step of total, loss, tokens/s, time left.

    total: the last step, None when the run ends by something else. every: steps between plain lines (the first and the last
    step always have one). start: steps done before this process. The time left is steps left x the running mean of a step's
    time (weight 0.1 for the newest; the first step, which compiles, left out), unless `update` is told better.
    """

    def __init__(self, total: int | None, *, every: int = 10, start: int = 0, stream: TextIO | None = None):
        self._total = total
        self._every = every
        self._start = start
        self._stream = stream if stream is not None else sys.stdout
        self._last: tuple[int, float] | None = None
        self._step_seconds: float | None = None
        self._bar = self._make_bar() if _is_live(self._stream) else None

    def _make_bar(self):
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        bar = Bar(
            TextColumn("{task.fields[text]}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[left]}", markup=False),
            console=Console(file=self._stream, force_terminal=True, highlight=False),
            transient=True,
        )
        self._task = bar.add_task("", total=self._total, completed=self._start, text="starting", left="")
        bar.start()
        return bar

    def update(
        self, step: int, *, loss: float | None, tokens_per_s: float, remaining_s: float | None = None, said: str = ""
    ) -> None:
        """Report `step` (counted from 1) as done. remaining_s: seconds left, where the caller knows (a budget of hours). said:
        more to say of it."""
        now = time.monotonic()
        if self._last is not None and step > self._last[0]:
            took = (now - self._last[1]) / (step - self._last[0])
            self._step_seconds = took if self._step_seconds is None else 0.9 * self._step_seconds + 0.1 * took
        first, self._last = self._last is None, (step, now)
        if remaining_s is None and self._total is not None and self._step_seconds is not None:
            remaining_s = (self._total - step) * self._step_seconds
        of = f"/{self._total}" if self._total is not None else ""
        text = f"step {step}{of}  loss {'-' if loss is None else format(loss, '.4f')}  {tokens_per_s:,.0f} tokens/s"
        text += f"  {said}" if said else ""
        left = "" if remaining_s is None else f"ETA {duration(remaining_s)}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=text, left=left)
        elif first or step % self._every == 0 or step == self._total:
            _say(self._stream, f"{text}  {left}".rstrip())

    def note(self, text: str) -> None:
        """A line of its own, above the live line: a checkpoint, an evaluation, a warning."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            _say(self._stream, text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def print_summary(summary: Summary, stream: TextIO | None = None) -> None:
    """The table at the end of a run: framed on a terminal, aligned plain lines elsewhere."""
    stream = stream if stream is not None else sys.stdout
    rows = rows_of(summary)
    if _is_live(stream):
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(show_header=False)
        for label, text in rows:
            table.add_row(Text(label), Text(text))
        Console(file=stream).print(table)
    else:
        width = max(len(label) for label, _ in rows)
        for label, text in rows:
            _say(stream, f"{label:<{width}}  {text}")
