"""Ceilings, peers and our own run in turn, each in processes of its own, so that none can hold memory or break another."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from meshwright.bench.output import open_folder, write_results
from meshwright.bench.provenance import provenance
from meshwright.bench.strategies import Strategy, strategy_lines
from meshwright.bench.table import Result, combined, head, limits_of, markdown, notes, piped, scaling_lines
from meshwright.bench.tasks import Settings, Task, check, plan, scaling_plan, strategy_plan
from meshwright.bench.workloads import WORKLOADS
from meshwright.disk import writing

__all__ = ["Outcome", "Shell", "described", "failure_of", "last_record", "present", "run"]

ROOT = Path(__file__).resolve().parents[2]
_ERROR = re.compile(r"^[\s\[\]\w:.,]*?\b(\w*(?:Error|Exception|Interrupt)\b(?:: .*)?)$")
_NOISE = ("ChildFailedError", "torch.distributed.elastic", "SignalException", "ProcessRaisedException")
_GRACE = 10.0
"""Seconds that processes have to end by themselves after a time-out."""
RANKS_A_CORE = 4
"""Of a CPU: 8 ranks of a tiny shape on two cores show that a table runs, more would show nothing."""
SHORTEST = 30.0
"""Seconds below which no further engine is started: it would only be cut off."""


@dataclass
class Outcome:
    """strategies: our rows of the suite of that name, by (workload, engine, devices). made: commit, versions, command."""

    settings: Settings
    machine: dict[str, Any] | None = None
    ceilings: list[dict[str, Any]] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    strategies: dict[tuple[str, str, int], Strategy] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=provenance)

    def table(self) -> str:
        if self.settings.suite == "strategies":
            return self._strategies()
        if self.settings.suite == "ceilings":
            return "\n".join([*head(self.machine, self.ceilings), *notes(self.machine, limits_of(self.ceilings))]) + "\n"
        if self.settings.suite == "scaling":
            return "\n".join([*head(self.machine, self.ceilings), *piped(scaling_lines(combined(self.results)))]) + "\n"
        return markdown(combined(self.results), self.machine, self.ceilings)

    def _strategies(self) -> str:
        lines = head(self.machine, self.ceilings)
        limits = limits_of(self.ceilings)
        for workload in self.settings.workloads:
            mine = [result for result in combined(self.results) if result.workload == workload]
            rows = [(self.strategies.get((workload, r.engine, r.gpus)), r) for r in mine]
            limit = limits[workload]["limit"] if workload in limits else None
            lines += [f"{workload}", "", *piped(strategy_lines(rows, limit, self.settings.until)), ""]
        return "\n".join([*lines, *notes(self.machine, limits)]) + "\n"

    def as_dict(self) -> dict[str, Any]:
        chosen = asdict(self.settings)
        del chosen["out"], chosen["budget"]  # they change no number
        return {
            **self.made,
            "machine": self.machine,
            "settings": chosen,
            "ceilings": self.ceilings,
            "strategies": [{"workload": workload, **asdict(s)} for (workload, _, _), s in self.strategies.items()],
            "results": [asdict(result) for result in self.results],
        }


def run(settings: Settings, say: Callable[[str], None] = print) -> Outcome:
    """Measure everything asked for; every result is said as it comes. An engine that fails is a result with a reason.

    Raises UserError for settings that make no sense.
    """
    check(settings)
    outcome = Outcome(settings)
    until = time.monotonic() + settings.budget
    if settings.out is not None:
        open_folder(settings.out)
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as temporary:
        shell = Shell(Path(temporary), None if settings.out is None else settings.out / "log.txt")
        look(settings, outcome, shell, say)
        if settings.out is not None:
            write_results(settings.out, outcome.as_dict(), outcome.table())
        for task in planned(settings, outcome) * settings.repeat:
            timeout = min(settings.timeout, until - time.monotonic())
            if timeout < min(SHORTEST, settings.timeout):
                task = replace(task, refused=task.refused or f"not started: the {settings.budget:g} s of --budget are over")
            result = measure(task, timeout, shell)
            outcome.results.append(result)
            shown = result.figures if result.figures is not None else {"reason": result.reason}
            say(json.dumps({"workload": task.workload, "gpus": task.gpus, **shown, "engine": task.engine}))
            if settings.out is not None:  # after each, so that a benchmark that is killed keeps what it has
                write_results(settings.out, outcome.as_dict(), outcome.table())
    return outcome


def planned(settings: Settings, outcome: Outcome) -> list[Task]:
    """The subprocesses of the suite on this machine."""
    have = present(outcome.machine)
    if settings.suite == "strategies":
        memory = outcome.machine["memory"] if outcome.machine is not None and _accelerated(outcome.machine) else None
        return strategy_plan(settings, have, memory, outcome.strategies)
    if settings.suite == "scaling":
        return scaling_plan(settings, have)
    return plan(settings, have) if settings.suite == "engines" else []


def described(shell: Shell, timeout: float) -> dict[str, Any] | None:
    """The machine, with nothing measured that its data sheet says; None where it could not be asked in so many seconds."""
    _, text = shell.execute([sys.executable, "-m", "meshwright.bench.ceilings", "--describe"], timeout)
    return next((record for record in records(text) if record.get("what") == "machine"), None)


def present(machine: Mapping[str, Any] | None) -> int:
    """Devices for the ranks of an engine."""
    have = machine["count"] if machine else 1
    return have if _accelerated(machine) else max(have, RANKS_A_CORE * len(os.sched_getaffinity(0)))


def _accelerated(machine: Mapping[str, Any] | None) -> bool:
    return machine is not None and machine["type"] != "cpu"


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
        tied = [sys.executable, "-m", "meshwright.bench.tied", str(os.getpid()), *command]
        with _ending(), open(output, "wb") as sink:
            process = subprocess.Popen(tied, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment())
            try:
                code: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end(process)
        text = output.read_text(encoding="utf-8", errors="replace")
        if self.log is not None:
            with writing(self.log), open(self.log, "a", encoding="utf-8") as file:
                file.write(f"$ {' '.join(command)}\n{text}\n[exit code {code}, {time.monotonic() - start:.1f} s]\n\n")
        return code, text


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """Meanwhile a signal that ends this process ends it as an error would, which leaves no subprocess and no folder behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    words = (line.strip() for line in reversed(text.splitlines()) if re.search(r"\w", line))  # torchrun ends with a ruled line
    why = next(iter(errors), "") or next(words, "no output")
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
