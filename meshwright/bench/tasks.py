"""What a suite runs: its settings, checked, as a list of subprocesses. No torch."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.bench.peers import BEST, PEERS, missing
from meshwright.bench.strategies import Strategy, strategies
from meshwright.bench.synthetic import token_findings
from meshwright.bench.table import OURS
from meshwright.bench.workloads import WORKLOADS
from meshwright.errors import Finding, UserError

__all__ = ["ORDER", "SUITES", "Settings", "Task", "check", "plan", "scaling_plan", "strategy_plan"]

SUITES = {
    "engines": ("llama-1b", "bert-large", "encoder-24x1024"),
    "strategies": ("encoder-24x1024", "bert-large", "llama-1b"),
    "scaling": ("encoder-24x1024", "bert-large", "llama-1b"),
    "ceilings": ("llama-1b", "bert-large", "encoder-24x1024"),
}
"""The workloads of a suite: ours beside other tools; our strategies beside each other; one to many devices; what the machine
can do at best."""
ORDER = ("ceilings", "peer", "ours")


@dataclass(frozen=True)
class Settings:
    """What to run. peers: "auto", "none" or names. gpus: numbers of devices; of strategies the largest is meant. micro: rows a
    device of a strategy, by name. repeat: how often the whole list is run, in turn. tokens: a .npy file of tokens or a prepared
    corpus, until: a loss whose steps and seconds are told. out: gets results.json, results.md and log.txt. timeout: seconds of
    one subprocess; when it is over, that engine has no result and the next one starts. budget: seconds of everything."""

    workloads: tuple[str, ...]
    suite: str = "engines"
    peers: str = "auto"
    gpus: tuple[int, ...] = (1, 2)
    micro: tuple[tuple[str, int], ...] = ()
    repeat: int = 1
    tokens: str | None = None
    until: float | None = None
    steps: int = 30
    warm: int = 10
    order: tuple[str, ...] = ORDER
    out: Path | None = None
    timeout: float = 240.0
    budget: float = float("inf")


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
        findings.append(Finding("--devices", f"{min(settings.gpus)} is no number of devices", "For example --devices 1,2"))
    if settings.tokens is not None:
        known = {name: WORKLOADS[name] for name in settings.workloads if name in WORKLOADS}
        findings += token_findings(settings.tokens, {name: (w.seq_len, w.model["vocab"]) for name, w in known.items()})
    elif settings.until is not None:
        fix = "Give --tokens with real text"
        findings.append(Finding("--until", "is never reached on random tokens, of which there is nothing to learn", fix))
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
    """Every subprocess of the suite `engines` but the ceilings, in order: workload by workload, one GPU before two, peers
    beside our run.

    have: devices of this machine. What cannot run is in the list with its reason.
    """
    tasks = []
    for workload in settings.workloads:
        for gpus in settings.gpus:
            for kind in settings.order:
                if kind == "peer":
                    tasks += [peer_task(settings, name, workload, gpus, have) for name in peers_of(settings, workload)]
                elif kind == "ours":
                    tasks.append(our_task(settings, OURS, workload, gpus, have))
    return tasks


def strategy_plan(
    settings: Settings, have: int, memory: int | None, found: MutableMapping[tuple[str, str, int], Strategy]
) -> list[Task]:
    """Every subprocess of the suite `strategies`; our rows go into `found`. memory: bytes of a device."""
    tasks = []
    devices = max(settings.gpus)
    for name in settings.workloads:
        for strategy in strategies(WORKLOADS[name], devices, dict(settings.micro), memory):
            found[name, strategy.name, strategy.devices] = strategy
            more = ("--precision", strategy.precision, "--rows", str(strategy.rows), "--plan", json.dumps(strategy.plan))
            tasks.append(our_task(settings, strategy.name, name, strategy.devices, have, *more))
        for peer in peers_of(settings, name):  # ours are named by their strategy, and one peer is called ddp
            tasks.append(replace(peer_task(settings, peer, name, devices, have), engine=f"peer {peer}"))
    return tasks


def scaling_plan(settings: Settings, have: int) -> list[Task]:
    """Every subprocess of the suite `scaling`: as many rows a device on each number of devices (weak), and as many in all as
    one device has (strong), as far as they divide."""
    tasks = []
    for name in settings.workloads:
        for gpus in settings.gpus:
            tasks.append(our_task(settings, "weak", name, gpus, have))
            rows, odd = divmod(WORKLOADS[name].rows, gpus)
            if gpus > 1 and not odd:
                layout = {"layout": {"dp_shard": gpus, "zero": 1}, "micro_batch": rows}
                more = ("--rows", str(WORKLOADS[name].rows), "--plan", json.dumps(layout))
                tasks.append(our_task(settings, "strong", name, gpus, have, *more))
    return tasks


def our_task(settings: Settings, engine: str, workload: str, gpus: int, have: int, *more: str) -> Task:
    arguments = (workload, *_counted(settings), *more)
    arguments += ("--tokens", settings.tokens) if settings.tokens else ()
    arguments += ("--until", str(settings.until)) if settings.until is not None else ()
    return Task("ours", workload, gpus, engine, "meshwright.bench.ours", arguments, _absent(gpus, have))


def peer_task(settings: Settings, name: str, workload: str, gpus: int, have: int) -> Task:
    peer = PEERS[name]
    lacking = missing(peer)
    refused = _absent(gpus, have) or (f"not installed: {', '.join(lacking)}" if lacking else "")
    return Task("peer", workload, gpus, name, peer.module, (workload, *_counted(settings), *peer.arguments), refused)


def _counted(settings: Settings) -> tuple[str, ...]:
    return ("--steps", str(settings.steps), "--warm", str(settings.warm))


def _absent(gpus: int, have: int) -> str:
    return "" if gpus <= have else f"needs {gpus} devices, here {'is' if have == 1 else 'are'} {have}"
