"""`bench serving`: our engine and another one on the same prompts, each in processes of its own, in turn."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.bench.output import open_folder, write_results
from meshwright.bench.peers import Peer, missing
from meshwright.bench.provenance import provenance
from meshwright.bench.runner import SHORTEST, Shell, described, failure_of, free_port, last_record, present
from meshwright.bench.serve_table import serve_table
from meshwright.bench.serve_work import shape_of
from meshwright.bench.table import OURS, Result
from meshwright.config.recipes import recipes
from meshwright.errors import Finding, UserError

__all__ = ["DEFAULT", "SMOKE", "ServeOutcome", "ServeSettings", "ServeTask", "Work", "check", "parse_rows", "run", "serve_plan"]

PEER = Peer("hf", "meshwright.bench.peers.hf_serving", (), ("transformers",))
SHORT = 90.0
"""Seconds of a run up to which it is repeated."""


@dataclass(frozen=True)
class Work:
    """A row: so many sequences at a time, each with a prompt and an answer of so many tokens."""

    recipe: str
    sequences: int
    prompt: int
    answer: int

    @property
    def name(self) -> str:
        return f"{self.recipe}, {self.sequences}, {self.prompt} + {self.answer}"


DEFAULT = (
    Work("llama-1b", 1, 128, 256),
    Work("llama-1b", 256, 512, 256),
    Work("llama-3-8b", 1, 128, 128),
    Work("llama-3-8b", 256, 512, 256),
    Work("llama-3-8b", 256, 1000, 1000),
)
SMOKE = (Work("llama-1b", 4, 24, 12),)


@dataclass(frozen=True)
class ServeSettings:
    """works: the rows. peers: "hf" or "none". spread: ranks along tp, pp and dp of further rows of ours, each alone. repeat:
    how often what is short is run, in turn. smoke: tiny shapes. timeout: seconds of one run; budget: of everything. out: gets
    results.json, results.md and log.txt."""

    works: tuple[Work, ...] = DEFAULT
    peers: str = PEER.name
    spread: tuple[tuple[str, int], ...] = ()
    repeat: int = 2
    smoke: bool = False
    timeout: float = 240.0
    budget: float = float("inf")
    out: Path | None = None


@dataclass(frozen=True)
class ServeTask:
    """One run of one engine. layout: what is not 1 of tp, pp and dp."""

    work: Work
    engine: str
    layout: tuple[tuple[str, int], ...] = ()
    refused: str = ""

    @property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.layout)


@dataclass
class ServeOutcome:
    """results: a run each, unit tokens: those of answers. made: commit, versions, command."""

    settings: ServeSettings
    machine: dict[str, Any] | None = None
    results: list[Result] = field(default_factory=list)
    made: dict[str, str] = field(default_factory=provenance)

    def table(self) -> str:
        return serve_table(self.results, self.machine)

    def measured(self, task: ServeTask) -> bool:
        """Whether a run of it gave figures already."""
        keys = [(r.workload, r.engine) for r in self.results if r.figures is not None]
        return (task.work.name, task.engine) in keys

    def as_dict(self) -> dict[str, Any]:
        chosen = {**asdict(self.settings), "suite": "serving"}
        del chosen["out"], chosen["budget"]
        results = [asdict(result) for result in self.results]
        return {**self.made, "machine": self.machine, "settings": chosen, "ceilings": [], "results": results}


def parse_rows(text: str) -> tuple[Work, ...]:
    """`llama-1b:256:512:256,...`: recipe, sequences, tokens of prompt and answer. Raises UserError that names what is wrong."""
    found, findings = [], []
    for part in text.split(","):
        name, *numbers = part.strip().split(":")
        if len(numbers) != 3 or not all(number.isdigit() and int(number) for number in numbers):
            what = f"{part!r} is no recipe:sequences:prompt:answer"
            findings.append(Finding("--rows", what, "For example llama-1b:256:512:256"))
        elif name not in recipes():
            findings.append(Finding("--rows", f"{name!r} is no recipe", f"Known: {', '.join(recipes())}"))
        else:
            found.append(Work(name, *map(int, numbers)))
    if findings:
        raise UserError(findings=findings)
    return tuple(found)


def check(settings: ServeSettings) -> None:
    """Raises UserError with everything that is wrong."""
    findings = []
    if settings.peers not in (PEER.name, "none"):
        findings.append(Finding("--peers", f"{settings.peers!r} is unknown to bench serving", f"{PEER.name} or none"))
    for axis, size in settings.spread:
        if size < 2:
            findings.append(Finding(f"--{axis}", f"{size} is one device, whose rows are there anyway", "Give 2 or more"))
    for work in settings.works:
        shape, tokens = shape_of(work.recipe, settings.smoke), work.prompt + work.answer
        if shape.arch != "decoder":
            findings.append(Finding("--rows", f"{work.recipe} is an {shape.arch}, which writes no answers", "Name a decoder"))
        elif tokens > shape.max_len:
            what = f"{work.recipe} has {shape.max_len} positions, and prompt and answer are {tokens} tokens"
            findings.append(Finding("--rows", what, "Give fewer"))
    if findings:
        raise UserError(findings=findings)


def serve_plan(settings: ServeSettings, have: int) -> list[ServeTask]:
    """Every run of one round: row by row our engine, the other one, and ours over several devices.

    have: devices of this machine. What cannot run is in the list with its reason. One sequence is not spread over copies or
    stages, of which all but one would wait.
    """
    tasks = []
    for work in settings.works:
        tasks.append(ServeTask(work, OURS))
        if settings.peers != "none":
            lacking = missing(PEER)
            tasks.append(ServeTask(work, PEER.name, refused=f"not installed: {', '.join(lacking)}" if lacking else ""))
        for axis, size in settings.spread:
            if axis == "tp" or work.sequences >= size:
                refused = "" if size <= have else f"needs {size} devices, here {'is' if have == 1 else 'are'} {have}"
                tasks.append(ServeTask(work, f"{OURS} {axis} {size}", ((axis, size),), refused))
    return tasks


def run(settings: ServeSettings, say: Callable[[str], None] = print) -> ServeOutcome:
    """Measure; every result is said as it comes. An engine that fails is a result with a reason.

    Raises UserError for settings that make no sense.
    """
    check(settings)
    outcome = ServeOutcome(settings)
    until = time.monotonic() + settings.budget
    if settings.out is not None:
        open_folder(settings.out)
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as temporary:
        shell = Shell(Path(temporary), None if settings.out is None else settings.out / "log.txt")
        outcome.machine = described(shell, settings.timeout)
        tasks = serve_plan(settings, present(outcome.machine))
        for _ in range(settings.repeat):
            tasks = [task for task in tasks if _took(task, outcome, shell, until, say) <= SHORT]
    return outcome


def _took(task: ServeTask, outcome: ServeOutcome, shell: Shell, until: float, say: Callable[[str], None]) -> float:
    """Run it once and keep the result; its seconds, or infinity where it gave none and need not be tried again."""
    settings, began = outcome.settings, time.monotonic()
    timeout = min(settings.timeout, until - began)
    if timeout < min(SHORTEST, settings.timeout):
        if outcome.measured(task):
            return math.inf
        task = replace(task, refused=task.refused or f"not started: the {settings.budget:g} s of --budget are over")
    result = measure(task, settings.smoke, timeout, shell)
    outcome.results.append(result)
    shown = result.figures if result.figures is not None else {"reason": result.reason}
    say(json.dumps({"work": task.work.name, "gpus": task.ranks, **shown, "engine": task.engine}))
    if settings.out is not None:  # after each, so that a benchmark that is killed keeps what it has
        write_results(settings.out, outcome.as_dict(), outcome.table())
    return time.monotonic() - began if result.figures is not None else math.inf


def measure(task: ServeTask, smoke: bool, timeout: float, shell: Shell) -> Result:
    """Run one engine on one row."""
    work = task.work
    base = Result(work.name, task.ranks, task.engine, "tokens", 0.0, reason=task.refused)
    if task.refused:
        return base
    sizes = ["--requests", str(work.sequences), "--prompt", str(work.prompt), "--answer", str(work.answer)]
    sizes += ["--smoke"] if smoke else []
    module = PEER.module if task.engine == PEER.name else "meshwright.bench.serving"
    start = [sys.executable]
    if task.layout:
        rendezvous = ["--nproc-per-node", str(task.ranks), "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        start += ["-m", "torch.distributed.run", *rendezvous]
    layout = [part for axis, size in task.layout for part in (f"--{axis}", str(size))]
    code, text = shell.execute([*start, "-m", module, work.recipe, *sizes, *layout], timeout)
    record = last_record(text)
    if code != 0 or record is None:
        return replace(base, reason=failure_of(code, text, timeout))
    if "skipped" in record:
        return replace(base, reason=record["skipped"])
    return replace(base, figures=record)
