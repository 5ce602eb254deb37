"""Ceilings, peers and our own run in turn, each in processes of its own, so that none can hold memory or break another."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.bench.peers import BEST, PEERS, missing
from meshwright.bench.table import OURS, Result, markdown
from meshwright.bench.workloads import WORKLOADS
from meshwright.errors import Finding, UserError

__all__ = ["SUITES", "Outcome", "Settings", "failure_of", "last_record", "plan", "run"]

SUITES = {"foundation": ("llama-1b", "bert-large", "encoder-24x1024"), "smoke": ("smoke-encoder",)}
ORDER = ("ceilings", "peer", "ours")
ROOT = Path(__file__).resolve().parents[2]
_ERROR = re.compile(r"^[\s\[\]\w:.,]*?\b(\w*(?:Error|Exception|Interrupt)\b(?:: .*)?)$")
_NOISE = ("ChildFailedError", "torch.distributed.elastic", "SignalException", "ProcessRaisedException")
_GRACE = 10.0
"""Seconds that processes have to end by themselves after a time-out."""
_SHORTEST = 30.0
"""Seconds below which no further engine is started: it would only be cut off."""


@dataclass(frozen=True)
class Settings:
    """What to run. peers: "auto", "none" or names. out: gets results.json, results.md and log.txt. timeout: seconds of one
    subprocess; when it is over, that engine has no result and the next one starts. budget: seconds of everything together."""

    workloads: tuple[str, ...]
    peers: str = "auto"
    gpus: tuple[int, ...] = (1, 2)
    steps: int = 30
    warm: int = 10
    order: tuple[str, ...] = ORDER
    out: Path | None = None
    timeout: float = 240.0
    budget: float = float("inf")


@dataclass
class Outcome:
    machine: dict[str, Any] | None = None
    ceilings: list[dict[str, Any]] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    def table(self) -> str:
        return markdown(self.results, self.machine, self.ceilings)

    def as_dict(self, settings: Settings) -> dict[str, Any]:
        chosen = asdict(settings)
        del chosen["out"], chosen["budget"]  # they change no number
        return {
            "machine": self.machine,
            "settings": chosen,
            "ceilings": self.ceilings,
            "results": [asdict(result) for result in self.results],
        }


@dataclass(frozen=True)
class Task:
    """One subprocess under torchrun. kind: ceilings, peer or ours. arguments: after `-m module`."""

    kind: str
    workload: str
    gpus: int
    engine: str
    module: str
    arguments: tuple[str, ...]
    refused: str = ""
    """Why it cannot be started at all."""


def check(settings: Settings) -> None:
    """Raises UserError with everything that is wrong."""
    findings = []
    for name in settings.workloads:
        if name not in WORKLOADS:
            findings.append(Finding("--workloads", f"{name!r} is unknown", f"Known: {', '.join(WORKLOADS)}"))
    for name in [] if settings.peers in ("auto", "none") else settings.peers.split(","):
        if name not in PEERS:
            findings.append(Finding("--peers", f"{name!r} is unknown", f"auto, none, or of {', '.join(PEERS)}"))
        elif not set(PEERS[name].workloads) & set(settings.workloads):
            fix = f"It runs {', '.join(PEERS[name].workloads)}"
            findings.append(Finding("--peers", f"{name} runs none of these workloads", fix))
    for part in settings.order:
        if part not in ORDER or settings.order.count(part) > 1:
            findings.append(
                Finding("--order", f"{part!r} is unknown or there twice", f"Of {', '.join(ORDER)}, each at most once")
            )
    if any(count < 1 for count in settings.gpus):
        findings.append(Finding("--gpus", f"{min(settings.gpus)} is no number of devices", "For example --gpus 1,2"))
    if not 0 < settings.warm < settings.steps:
        findings.append(Finding("--warm", f"{settings.warm} of {settings.steps} steps leaves none to count"))
    if findings:
        raise UserError(findings=findings)


def peers_of(settings: Settings, workload: str) -> list[str]:
    """Names of the peers to run on the workload."""
    if settings.peers in ("auto", "none"):
        return list(BEST.get(workload, ())) if settings.peers == "auto" else []
    return [name for name in settings.peers.split(",") if workload in PEERS[name].workloads]


def plan(settings: Settings, have: int) -> list[Task]:
    """Every subprocess but the ceilings, in order: workload by workload, one GPU before two, peers beside our run.

    have: devices of this machine. What cannot run is in the list with its reason.
    """
    tasks = []
    counted = ("--steps", str(settings.steps), "--warm", str(settings.warm))
    for workload in settings.workloads:
        for gpus in settings.gpus:
            absent = "" if gpus <= have else f"needs {gpus} devices, here {'is' if have == 1 else 'are'} {have}"
            for kind in settings.order:
                if kind == "peer":
                    for name in peers_of(settings, workload):
                        peer = PEERS[name]
                        lacking = missing(peer)
                        refused = absent or (f"not installed: {', '.join(lacking)}" if lacking else "")
                        arguments = (workload, *counted, *peer.arguments)
                        tasks.append(Task("peer", workload, gpus, name, peer.module, arguments, refused))
                elif kind == "ours":
                    tasks.append(Task("ours", workload, gpus, OURS, "meshwright.bench.ours", (workload, *counted), absent))
    return tasks


def run(settings: Settings, say: Callable[[str], None] = print) -> Outcome:
    """Measure everything asked for; every result is said as it comes. An engine that fails is a result with a reason.

    Raises UserError for settings that make no sense.
    """
    check(settings)
    outcome = Outcome()
    until = time.monotonic() + settings.budget
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as temporary:
        shell = Shell(Path(temporary), None if settings.out is None else settings.out / "log.txt")
        if settings.out is not None:
            settings.out.mkdir(parents=True, exist_ok=True)
        look(settings, outcome, shell, say)
        have = outcome.machine["count"] if outcome.machine else 1
        for task in plan(settings, have):
            timeout = min(settings.timeout, until - time.monotonic())
            if timeout < min(_SHORTEST, settings.timeout):
                task = replace(task, refused=task.refused or f"not started: the {settings.budget:g} s of --budget are over")
            result = measure(task, timeout, shell)
            outcome.results.append(result)
            shown = result.figures if result.figures is not None else {"reason": result.reason}
            say(json.dumps({"workload": task.workload, "gpus": task.gpus, "engine": task.engine, **shown}))
            if settings.out is not None:  # after each, so that a benchmark that is killed keeps what it has
                save(outcome, settings, settings.out)
    return outcome


def look(settings: Settings, outcome: Outcome, shell: Shell, say: Callable[[str], None]) -> None:
    """The machine, and its ceilings where they are asked for."""
    command = [sys.executable, "-m", "meshwright.bench.ceilings", "--workloads", ",".join(settings.workloads)]
    code, text = shell.execute(command if "ceilings" in settings.order else [*command, "--describe"], settings.timeout)
    for record in records(text):
        if record.get("what") == "machine":
            outcome.machine = record
        elif "what" in record:
            outcome.ceilings.append(record)
        say(json.dumps(record))
    if code != 0:
        say(f"ceilings: {failure_of(code, text, settings.timeout)}")


def save(outcome: Outcome, settings: Settings, out: Path) -> None:
    (out / "results.json").write_text(json.dumps(outcome.as_dict(settings), indent=1) + "\n", encoding="utf-8")
    (out / "results.md").write_text(outcome.table(), encoding="utf-8")


def measure(task: Task, timeout: float, shell: Shell) -> Result:
    """Run one engine on one workload."""
    from meshwright.bench.ceilings import step_flops

    workload = WORKLOADS[task.workload]
    base = Result(task.workload, task.gpus, task.engine, workload.unit, step_flops(workload), reason=task.refused)
    if task.refused:
        return base
    arguments = list(task.arguments)
    folder = shell.work / "run"
    if task.kind == "ours":
        arguments += ["--folder", str(folder)]
    rendezvous = ["--nproc-per-node", str(task.gpus), "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "-m", task.module, *arguments]
    code, text = shell.execute(command, timeout)
    shutil.rmtree(folder, ignore_errors=True)
    record = last_record(text)
    figures, reason = None, ""
    if code != 0 or record is None:
        reason = failure_of(code, text, timeout)
    elif "skipped" in record:
        reason = record["skipped"]
    else:
        figures = record
    return Result(task.workload, task.gpus, task.engine, workload.unit, base.flops, figures, reason)


def environment() -> dict[str, str]:
    """That of this process, with the package on the path, so that it need not be installed; one thread where none is named,
    as torchrun has it for more than one rank."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Shell:
    """Starts subprocesses. work: a folder for what they leave. log: gets all that they print."""

    work: Path
    log: Path | None

    def execute(self, command: Sequence[str], timeout: float) -> tuple[int | None, str]:
        """Exit code (None: ended after `timeout` seconds) and all that was printed."""
        output = self.work / "output.txt"
        start = time.monotonic()
        with open(output, "wb") as sink:
            process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment()
            )
            try:
                code: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end(process)
        text = output.read_text(encoding="utf-8", errors="replace")
        if self.log is not None:
            with open(self.log, "a", encoding="utf-8") as file:
                file.write(f"$ {' '.join(command)}\n{text}\n[exit code {code}, {time.monotonic() - start:.1f} s]\n\n")
        return code, text


def end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing of this subprocess running. Ranks are sessions of their own, so they are found before their parent ends."""
    import psutil

    if process.poll() is not None:
        return
    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        for child in family:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(family, timeout=_GRACE)  # until then they may hold the device's memory
    process.kill()
    process.wait()


def records(text: str) -> Iterator[dict[str, Any]]:
    """JSON objects that begin a line; what another rank wrote behind one is passed over."""
    for line in text.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                yield json.JSONDecoder().raw_decode(line)[0]


def last_record(text: str) -> dict[str, Any] | None:
    """The result line of an engine: the last JSON object that names one."""
    found = None
    for record in records(text):
        if "engine" in record:
            found = record
    return found


def failure_of(code: int | None, text: str, timeout: float) -> str:
    """Why a subprocess gave no result, in one line: its first error, since later ones mostly follow from it."""
    if code is None:
        return f"not done after {timeout:g} s"
    errors = _errors(text.splitlines())
    why = next(iter(errors), "") or next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")
    return f"exit code {code}: {why[:160].replace('|', '/')}"


def _errors(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        found = _ERROR.match(line)
        if found and not any(noise in line for noise in _NOISE):
            yield found.group(1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
