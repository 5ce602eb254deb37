"""Worker processes that tokenise, and the order of their results."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from meshwright.data.parse import Piece
from meshwright.data.tokenize import Job, Result
from meshwright.data.worker import receive, send
from meshwright.errors import MeshwrightError

__all__ = ["Chunk", "results"]

IN_FLIGHT = 1 << 23
"""Bytes a worker that may wait to be tokenised or written."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive pieces of one source. `position`: bytes on disk read up to here, for progress."""

    number: int
    source: int
    pieces: list[Piece]
    position: int

    @property
    def size(self) -> int:
        return sum(len(piece.data) for piece in self.pieces)


def results(chunks: Iterator[Chunk], job: Job, workers: int, tokenizer: Path) -> Generator[tuple[Chunk, Result], None, None]:
    """Each chunk with its result, in the order of the chunks. An error of the reader comes after the results before it.

    tokenizer: folder from which the workers load it. A corpus of one chunk is done in this process.
    """
    source = _Source(chunks)
    first, second = source.next(), source.next()
    if first is None:
        source.raise_error()
        return
    if second is None:
        yield first, job.run(first.source, first.pieces)
        source.raise_error()
        return
    with _Pool(job, workers, tokenizer) as pool:
        waiting: deque[tuple[Chunk, Future[Result]]] = deque()
        held = 0
        ahead: deque[Chunk] = deque([first, second])
        while True:
            while len(waiting) <= 2 * workers and held <= workers * IN_FLIGHT:
                chunk = ahead.popleft() if ahead else source.next()
                if chunk is None:
                    break
                waiting.append((chunk, pool.submit(chunk)))
                held += chunk.size
            if not waiting:
                break
            chunk, future = waiting.popleft()
            yield chunk, future.result()
            held -= chunk.size
    source.raise_error()


class _Source:
    """The chunks, with the reader's error kept until everything before it is done."""

    def __init__(self, chunks: Iterator[Chunk]):
        self._chunks = chunks
        self._error: MeshwrightError | None = None

    def next(self) -> Chunk | None:
        if self._error is not None:
            return None
        try:
            return next(self._chunks, None)
        except MeshwrightError as error:
            self._error = error
            return None

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class _Pool:
    """A thread for each process: it sends a chunk, waits for the result, takes the next chunk."""

    def __init__(self, job: Job, workers: int, tokenizer: Path):
        self._settings = {
            "tokenizer": str(tokenizer),
            "prefix": job.form.prefix,
            "suffix": job.form.suffix,
            "itemsize": job.form.itemsize,
            "keys": [asdict(keys) for keys in job.keys],
            "on_bad_row": job.on_bad_row,
            "label_names": None if job.label_names is None else sorted(job.label_names),
        }
        self._local = threading.local()
        self._lock = threading.Lock()
        self._closed = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tokenise")

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                try:
                    if stream is not None:
                        stream.close()
                except BrokenPipeError:  # what was still to be flushed has no reader any more
                    continue

    def submit(self, chunk: Chunk) -> Future[Result]:
        return self._threads.submit(self._run, chunk)

    def _run(self, chunk: Chunk) -> Result:
        fresh = not hasattr(self._local, "process")
        if fresh:
            self._local.process = self._start()
        process = self._local.process
        to, back = _pipes(process)
        heads = [(len(piece.data), {k: v for k, v in vars(piece).items() if k != "data"}) for piece in chunk.pieces]
        try:
            if fresh:
                send(to, self._settings)
            send(to, {"source": chunk.source, "pieces": heads}, *(piece.data for piece in chunk.pieces))
            values, data = receive(back)
        except (EOFError, OSError):
            code = process.wait()
            ended = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
            hint = "; the machine may be out of memory: use fewer --workers" if code == -9 else ""
            raise MeshwrightError(f"a tokenising process {ended}{hint}; finished chunks are kept, run it again") from None
        if "traceback" in values:
            raise MeshwrightError(f"tokenising {chunk.pieces[0].file} failed:\n{values['traceback']}")
        tokens, ends, _ = values["sizes"]
        parts = data[:tokens], data[tokens : tokens + ends], data[tokens + ends :]
        return Result.from_header(values["result"], *parts)

    def _start(self) -> subprocess.Popen[bytes]:
        # each process uses one core; the library's own threads would fight over them
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONUTF8": "1"}
        root = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-P", "-m", "meshwright.data.worker"]  # -P: no modules from the current folder
        with self._lock:
            if self._closed:
                raise MeshwrightError("interrupted")
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            self._processes.append(process)
        return process


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    if process.stdin is None or process.stdout is None:
        raise MeshwrightError("a tokenising process has no pipes")
    return process.stdin, process.stdout
