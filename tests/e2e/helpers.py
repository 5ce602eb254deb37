"""What the end-to-end tests share: one prepared corpus, one small model, runs of the real command, and runs in warm ranks.

A run of the command costs three interpreters with torch (about ten seconds of one core), so tests that are about numbers use
`train_in(ranks(n), ...)`: the same code on a pool that is loaded already. Tests about processes use `Command`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch

from meshwright.checkpoint import CheckpointStore, Piece, inspect
from meshwright.checkpoint.pieces import DTYPES
from meshwright.config.load import load_config
from meshwright.observe.metrics import read_metrics
from meshwright.runtime.folder import RunFolder
from meshwright.runtime.setup import Target, set_up
from meshwright.spec.plan import Plan
from tests.e2e.planted import TAG, Plant, planted, to_environment
from tests.ranks.pool import Pool, joined

PLANTED = Path(__file__).with_name("planted.py")
TIMING = ("split", "tokens_per_s", "samples_per_s", "mfu", "memory", "process")
"""What may differ between two runs that compute the same."""

# ---- inputs -------------------------------------------------------------------------------------------------------------


@functools.cache
def base() -> Path:
    """A folder for what is made once a test session."""
    folder = Path(tempfile.mkdtemp(prefix="meshwright-e2e-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def texts(count: int, seed: int) -> list[str]:
    """Sentences of 1 to 60 words: uneven documents, with enough order in them that a loss falls."""
    draw = random.Random(seed)
    words = ["mesh", "ring", "shard", "tensor", "batch", "step", "loss", "token", "plan", "rank", "a", "of", "and", "to", "the"]
    out = []
    for _ in range(count):
        at = draw.randrange(len(words))
        picked = [at := (at + draw.choice((1, 1, 1, 2, 5))) % len(words) for _ in range(draw.randint(1, 60))]
        out.append(" ".join(words[index] for index in picked))
    return out


@functools.cache
def raw() -> Path:
    """The corpus as JSON lines, each with a label that the text tells."""
    path = base() / "corpus.jsonl"
    lines = [{"text": text, "label": ("short", "medium", "long")[min(2, len(text) // 100)]} for text in texts(400, seed=5)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@functools.cache
def corpus(objective: str = "causal_lm") -> Path:
    """The corpus as a prepared folder."""
    from meshwright.config.schema import Source
    from meshwright.data.prepare import prepare
    from meshwright.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.train(iter(texts(400, seed=5)), 320)
    source = Source(path=str(raw()), label_key="label" if objective == "classify" else None)
    prepare([source], base() / objective, tokenizer=tokenizer, objective=objective, workers=1)
    return base() / objective


DECODER: dict[str, Any] = {
    "model": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "max_len": 64, "dropout": 0.1},
    "data": {"valid_fraction": 0.05, "seq_len": 32},
    "train": {"steps": 20, "batch": 10, "lr": 3e-3, "clip": 0.5, "schedule": {"warmup": 5}},
    "run": {"device": "cpu", "grace": 10},
    "log": {"report": False},
}
"""Ten rows are a ragged batch for 4 ranks (3, 3, 3, 1) and for micro-batches of 4; the clip is felt in the first steps."""


def settings(path: Path, source: Path | None = None, **changed: Any) -> Path:
    """A config file: DECODER on `source` (default: the prepared corpus), with sections merged in. YAML reads JSON."""
    values = json.loads(json.dumps(DECODER))
    values["data"]["train"] = [{"path": str(source or corpus())}]
    _merge(values, changed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")
    return path


def _merge(values: dict[str, Any], changed: Mapping[str, Any]) -> None:
    for key, value in changed.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _merge(values[key], value)
        else:
            values[key] = value


# ---- the real command ---------------------------------------------------------------------------------------------------


class Command:
    """`meshwright ARGS...` in a process group of its own. Plants make it load `planted.py` as a user's module."""

    started: ClassVar[list[Command]] = []

    def __init__(
        self,
        *args: object,
        plants: Sequence[Plant] = (),
        env: Mapping[str, str] | None = None,
        start: Sequence[str] = ("-m", "meshwright"),
    ):
        self.tag = uuid.uuid4().hex
        self.log = base() / f"{self.tag}.txt"
        argv = [sys.executable, *start, *map(str, args)]
        variables = {**os.environ, TAG: self.tag, "OMP_NUM_THREADS": "1", **(env or {})}
        if plants:
            argv.append(f"--run.modules=[{PLANTED}]")
            variables.update(to_environment(*plants))
        with open(self.log, "wb") as out, open(self.log.with_suffix(".err"), "wb") as err:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=variables, start_new_session=True
            )
        self.started.append(self)

    @property
    def out(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def err(self) -> str:
        return self.log.with_suffix(".err").read_text(encoding="utf-8", errors="replace")

    def wait(self, code: int | None = 0, timeout: float = 150.0, gone: float = 15.0) -> Command:
        """Until it ends, with this exit code (None: any); all its processes are gone within `gone` seconds of that."""
        try:
            ended = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"still running after {timeout} s\n{self.out}\n{self.err}") from None
        left = self.left_after(gone)
        self.end()
        assert not left, f"left running: {left}\n{self.err}"
        assert code is None or ended == code, f"exit code {ended}, not {code}\n{self.out}\n{self.err}"
        return self

    def left_after(self, seconds: float) -> list[str]:
        """The processes of this run that still live after so many seconds at most."""
        end = time.monotonic() + seconds
        while (left := alive(self.tag)) and time.monotonic() < end:
            time.sleep(0.1)
        return [f"{process.pid} {process.cmdline()}" for process in left]

    def end(self) -> None:
        for process in alive(self.tag):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(10)

    def until(self, reached: Any, timeout: float = 120.0) -> None:
        """Wait until `reached()`, while the command runs."""
        end = time.monotonic() + timeout
        while not reached():
            if self.process.poll() is not None or time.monotonic() > end:
                self.end()
                raise AssertionError(f"it ended, or waited too long\n{self.out}\n{self.err}")
            time.sleep(0.02)

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to the process group of the terminal."""
        os.killpg(self.process.pid, signal.SIGINT)


def alive(tag: str) -> list[psutil.Process]:
    """Processes, zombies left out, that inherited the tag of a run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(TAG) == tag and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def train(config: Path, folder: Path, *flags: object, nproc: int = 2, **options: Any) -> Command:
    """Start `meshwright train`."""
    return Command("train", config, f"--run.dir={folder}", "--nproc", nproc, *flags, **options)


# ---- the same code in a warm pool of ranks -------------------------------------------------------------------------------


def train_in(
    pool: Pool,
    config: Path,
    folder: Path,
    *flags: str,
    plan: Plan | None = None,
    resume: bool = False,
    plants: Sequence[Plant] = (),
    timeout: float = 120.0,
) -> str:
    """Set a run up as the command does and train it on the ranks of the pool; what rank 0 says."""
    resolved = load_config(config, [f"--run.dir={folder}", *flags])
    target = Target(pool.world, "cpu", None)
    set_up(resolved, target, RunFolder(folder), plan=plan and plan.to_dict(), resume=resume, write=True, say=lambda text: None)
    return pool.run(_run, str(folder), resume, list(plants), timeout=timeout)[0]


def _run(folder: str, resume: bool, plants: list[Plant]) -> str:
    """On every rank of a pool."""
    from meshwright.runtime.worker import Job, run_job

    said = io.StringIO()
    with contextlib.redirect_stdout(said), planted(*plants):
        run_job(Job(RunFolder(folder), resume), joined())
    return said.getvalue()


# ---- what a run left ----------------------------------------------------------------------------------------------------


def records(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "metrics.jsonl")


def column(folder: Path, key: str) -> list[Any]:
    return [record[key] for record in records(folder)]


def steps_done(folder: Path) -> int:
    """Lines of metrics.jsonl, while it is being written."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def newest(folder: Path) -> Path:
    with CheckpointStore(folder / "checkpoints", write=False) as store:
        found = store.newest()
    assert found is not None, f"no whole checkpoint in {folder}"
    return found


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole: weights, moments and averages."""
    kinds = {name: dtype for dtype, name in DTYPES.items()}
    stored = inspect(checkpoint)["tensors"]
    pieces = []
    for name, facts in stored.items():
        shape = tuple(facts["shape"])
        pieces.append(Piece(name, torch.empty(shape, dtype=kinds[facts["dtype"]]), shape, (0,) * len(shape)))
    with CheckpointStore(checkpoint.parent, write=False) as store:
        store.load(checkpoint, pieces)
    return {piece.name: piece.tensor for piece in pieces}


def state(checkpoint: Path) -> dict[str, Any]:
    return inspect(checkpoint)["meta"]["state"]


def largest_difference(a: Path, b: Path, kind: str = "") -> float:
    """Between the newest checkpoints of two runs, over all tensors whose name begins with `kind`."""
    first, second = tensors(newest(a)), tensors(newest(b))
    assert first.keys() == second.keys() and first
    return max((first[name] - second[name]).abs().max().item() for name in first if name.startswith(kind))


def assert_same(folder: Path, reference: Path) -> None:
    """Each step once, every number of every step bitwise the reference's, timings aside; final tensors and state too."""
    mine, theirs = records(folder), records(reference)
    assert [r["step"] for r in mine] == [r["step"] for r in theirs] == list(range(1, len(theirs) + 1))
    for a, b in zip(mine, theirs, strict=True):
        differing = {key for key in a.keys() | b.keys() if key not in TIMING and a.get(key) != b.get(key)}
        assert not differing, f"step {a['step']}: {[(key, a.get(key), b.get(key)) for key in sorted(differing)]}"
    first, second = tensors(newest(folder)), tensors(newest(reference))
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    a, b = state(newest(folder)), state(newest(reference))
    assert {**a, "seconds": 0} == {**b, "seconds": 0}
