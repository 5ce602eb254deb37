"""The suites of the host's side: a subprocess each, or one a number of ranks, with results as the other suites have them."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.bench.host.measures import Measure, lines, measures_in
from meshwright.bench.output import open_folder, write_results
from meshwright.bench.provenance import provenance
from meshwright.bench.runner import Shell, described, failure_of, free_port, records

__all__ = ["HOST_SUITES", "HostOutcome", "HostSettings", "run"]

HOST_SUITES = {
    "data": "tokens a second of the loader and of prepare",
    "checkpoint": "what a save costs, how long a restore takes",
    "startup": "seconds from the command to the first step",
    "overhead": "a step over that of a bare PyTorch loop",
}
MODULE = "meshwright.bench.host"


@dataclass(frozen=True)
class HostSettings:
    """suite: one of HOST_SUITES. ranks: numbers of ranks, each measured; `data` has one process. repeat: of every figure.
    timeout: seconds of one subprocess. out: gets results.json, results.md, results.html and log.txt."""

    suite: str
    ranks: tuple[int, ...] = (1, 2)
    repeat: int = 5
    timeout: float = 240.0
    out: Path | None = None


@dataclass
class HostOutcome:
    """failures: why a subprocess gave no, or not all, of its figures."""

    settings: HostSettings
    machine: dict[str, Any] | None = None
    measures: list[Measure] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    made: dict[str, str] = field(default_factory=provenance)

    @property
    def ok(self) -> bool:
        """Everything gave figures, and none is a regression."""
        return bool(self.measures) and not self.failures and not any(one.regressed for one in self.measures)

    def table(self) -> str:
        where = [] if self.machine is None else [f"{self.machine['device']}, torch {self.machine['torch']}.", ""]
        failed = [f"not measured: {why}" for why in self.failures]
        worse = [f"regression: {one.name}, {one.ranks} rank(s): {one.value:.3f}" for one in self.measures if one.regressed]
        return "\n".join([*where, *(lines(self.measures) if self.measures else []), *failed, *worse]) + "\n"

    def as_dict(self) -> dict[str, Any]:
        chosen = {**asdict(self.settings)}
        del chosen["out"]
        return {
            **self.made,
            "machine": self.machine,
            "settings": chosen,
            "ceilings": [],
            "results": [],
            "measures": [asdict(one) for one in self.measures],
            "failures": self.failures,
        }


def run(settings: HostSettings, say: Callable[[str], None] = print) -> HostOutcome:
    """Measure; every figure is said as it comes. A subprocess that fails leaves its reason."""
    outcome = HostOutcome(settings)
    if settings.out is not None:
        open_folder(settings.out)
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as temporary:
        shell = Shell(Path(temporary), None if settings.out is None else settings.out / "log.txt")
        outcome.machine = described(shell, settings.timeout)
        for name, command in commands(settings):
            code, text = shell.execute(command, settings.timeout)
            found = measures_in(list(records(text)))
            outcome.measures += found
            for one in found:
                say(json.dumps(asdict(one)))
            if code != 0:
                outcome.failures.append(f"{name}: {failure_of(code, text, settings.timeout)}")
    if settings.out is not None:
        write_results(settings.out, outcome.as_dict(), outcome.table())
    return outcome


def commands(settings: HostSettings) -> Sequence[tuple[str, list[str]]]:
    """(what it measures, command) of every subprocess."""
    module, repeat = f"{MODULE}.{settings.suite}", ["--repeat", str(settings.repeat)]
    if settings.suite == "data":
        return [("data", [sys.executable, "-m", module, *repeat])]
    if settings.suite == "startup":
        ranks = ",".join(map(str, settings.ranks))
        return [("startup", [sys.executable, "-m", module, *repeat, "--ranks", ranks])]
    made = []
    for count in settings.ranks:
        place = ["--nproc-per-node", str(count), "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        command = [sys.executable, "-m", "torch.distributed.run", *place, "-m", module, *repeat]
        made.append((f"{settings.suite}, {count} rank(s)", command))
    return made
