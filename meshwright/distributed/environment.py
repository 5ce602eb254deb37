"""Who am I? Rank, world and meeting place, read from the variables of whoever started this process.

Only a starter that leaves its own mark is believed: torch's elastic agent (our launcher, torchrun), a Slurm step, a
Kubernetes training job. RANK or WORLD_SIZE alone is what another job left in the shell; it is ignored, with a warning.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.errors import DeviceError, Finding

__all__ = ["STALE", "Nodes", "World", "expand_hosts", "read_nodes", "read_world"]

STALE = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables that confuse a run when another job left them behind."""


@dataclass(frozen=True)
class World:
    """This process's place. `node` and `nodes` count machines; `source` says who was believed."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    node: int = 0
    nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    source: str = "single"
    restart: int = 0
    run_id: str = ""
    agent_store: bool = False

    def __post_init__(self) -> None:
        where = f"ranks ({self.source})"
        findings = []
        for index, size in (("rank", "world"), ("local_rank", "local_world"), ("node", "nodes")):
            if not 0 <= getattr(self, index) < getattr(self, size):
                findings.append(Finding(where, f"{index} {getattr(self, index)} is outside 0..{getattr(self, size) - 1}"))
        if self.local_world > self.world:
            findings.append(Finding(where, f"{self.local_world} ranks on this machine, but {self.world} in the world"))
        if self.nodes > self.world:
            findings.append(Finding(where, f"{self.nodes} machines for {self.world} ranks"))
        if self.world > 1 and not 0 < self.master_port < 65536:
            findings.append(Finding(where, f"port {self.master_port} of {self.master_addr} is outside 1..65535"))
        if findings:
            raise DeviceError("The ranks do not fit together:", findings)


@dataclass(frozen=True)
class Nodes:
    """Several machines, each of which starts a launcher: what to give it as --nnodes and --rdzv."""

    nnodes: int
    rdzv: str
    source: str


def read_world(env: Mapping[str, str] = os.environ, warn: bool = True) -> World:
    """The World of this process. Leftovers that were ignored are named on stderr if `warn`.

    Raises DeviceError with every value that is missing, no number, or contradicts another.
    """
    if "TORCHELASTIC_RUN_ID" in env:
        return _elastic(env)
    ignored = [f"{key}={env[key]}" for key in STALE if key in env]
    if _slurm_step(env):
        return _slurm(env)
    if _kubernetes_job(env):
        return _kubernetes(env)
    if ignored and warn:
        print(
            f"meshwright: warning: ignored {', '.join(ignored)}: no launcher, torchrun, Slurm step or Kubernetes job set them, "
            "so they are leftovers; running as one process. Start several with --nproc N",
            file=sys.stderr,
        )
    return World()


def read_nodes(env: Mapping[str, str] = os.environ) -> Nodes | None:
    """The machines of a Slurm step with one task each, or of a Kubernetes job with several ranks a pod; None elsewhere."""
    if "TORCHELASTIC_RUN_ID" in env:
        return None
    if _slurm_step(env):
        world = _slurm(env)
        if world.world == world.nodes > 1:
            return Nodes(world.nodes, f"{world.master_addr}:{world.master_port}", "slurm")
    if "KUBERNETES_SERVICE_HOST" in env and env.get("PET_NNODES", "").isdigit() and int(env["PET_NNODES"]) > 1:
        address = env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR", "")
        port = env.get("PET_MASTER_PORT") or env.get("MASTER_PORT", "")
        if address and port:
            return Nodes(int(env["PET_NNODES"]), f"{address}:{port}", "kubernetes")
    return None


class _Reader:
    """Whole numbers out of an environment; keeps every problem for one error."""

    def __init__(self, env: Mapping[str, str], source: str):
        self.env = env
        self.source = source
        self.findings: list[Finding] = []

    def number(self, key: str, default: int | None = None) -> int:
        text = self.env.get(key)
        if text is None:
            if default is not None:
                return default
            self.findings.append(Finding(key, f"is not set, though {self.source} started this process"))
            return 0
        try:
            return int(text)
        except ValueError:
            self.findings.append(Finding(key, f"{text!r} is not a whole number"))
            return 0

    def done(self, *more: Finding) -> None:
        self.findings += more
        if self.findings:
            raise DeviceError(f"The environment of {self.source} does not fit together:", self.findings)


def _elastic(env: Mapping[str, str]) -> World:
    read = _Reader(env, "torch's elastic agent")
    values = {
        "rank": read.number("RANK"),
        "world": read.number("WORLD_SIZE"),
        "local_rank": read.number("LOCAL_RANK"),
        "local_world": read.number("LOCAL_WORLD_SIZE"),
        "node": read.number("GROUP_RANK", 0),
        "nodes": read.number("GROUP_WORLD_SIZE", 1),
        "master_port": read.number("MASTER_PORT"),
        "restart": read.number("TORCHELASTIC_RESTART_COUNT", 0),
    }
    if not env.get("MASTER_ADDR"):
        read.findings.append(Finding("MASTER_ADDR", "is not set, though torch's elastic agent started this process"))
    read.done()
    return World(
        **values,
        master_addr=env["MASTER_ADDR"],
        source="elastic",
        run_id=env["TORCHELASTIC_RUN_ID"],
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _slurm_step(env: Mapping[str, str]) -> bool:
    # a batch script sees SLURM_PROCID and SLURM_NTASKS too, but only what srun starts is a task of a step
    return "SLURM_PROCID" in env and ("SLURM_STEP_ID" in env or "SLURM_STEPID" in env) and "SLURM_STEP_NUM_TASKS" in env


def _slurm(env: Mapping[str, str]) -> World:
    read = _Reader(env, "Slurm")
    rank, world = read.number("SLURM_PROCID"), read.number("SLURM_STEP_NUM_TASKS")
    node, nodes = read.number("SLURM_NODEID", 0), read.number("SLURM_STEP_NUM_NODES", 1)
    job, step = read.number("SLURM_JOB_ID", 0), read.number("SLURM_STEP_ID", 0)
    hosts = expand_hosts(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or "")
    tasks = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if nodes > 1 and len(hosts) != nodes:
        read.findings.append(Finding("SLURM_STEP_NODELIST", f"names {len(hosts)} hosts for SLURM_STEP_NUM_NODES={nodes}"))
    if tasks and sum(tasks) != world:
        read.findings.append(Finding("SLURM_STEP_TASKS_PER_NODE", f"adds up to {sum(tasks)}, SLURM_STEP_NUM_TASKS is {world}"))
    if tasks and node >= len(tasks):
        read.findings.append(Finding("SLURM_NODEID", f"{node} is outside the {len(tasks)} nodes of SLURM_STEP_TASKS_PER_NODE"))
    local_rank = read.number("SLURM_LOCALID", 0)
    read.done()
    address = hosts[0] if nodes > 1 else "127.0.0.1"
    given = env.get("MASTER_ADDR", "")
    if nodes > 1 and given.startswith(address.split(".")[0]):
        address = given  # the same host by another of its names, such as node01-ib0
    # every rank derives the same port; the range keeps clear of privileged and of Linux's ephemeral ports (32768 and up)
    port = int(env["MASTER_PORT"]) if env.get("MASTER_PORT", "").isdigit() else 12000 + (job * 7 + step) % 20000
    local_world = tasks[node] if tasks else (world if nodes == 1 else 1)
    run_id = f"slurm-{job}-{step}"
    return World(rank, world, local_rank, local_world, node, nodes, address, port, "slurm", 0, run_id)


def _kubernetes_job(env: Mapping[str, str]) -> bool:
    pod = re.search(r"-(master|worker)-\d+$", env.get("HOSTNAME", ""))
    marked = pod is not None or "PET_NNODES" in env or "JOB_COMPLETION_INDEX" in env
    complete = all(key in env for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return "KUBERNETES_SERVICE_HOST" in env and marked and complete


def _kubernetes(env: Mapping[str, str]) -> World:
    read = _Reader(env, "the Kubernetes job")
    rank, world, port = read.number("RANK"), read.number("WORLD_SIZE"), read.number("MASTER_PORT")
    local_rank, local_world = read.number("LOCAL_RANK", 0), read.number("LOCAL_WORLD_SIZE", 1)
    a_pod = env.get("PET_NPROC_PER_NODE", "1")
    if a_pod not in ("1", "auto") and "LOCAL_RANK" not in env:
        read.findings.append(
            Finding("PET_NPROC_PER_NODE", f"{a_pod} ranks a pod, but this is one process", f"Start them with --nproc {a_pod}")
        )
    pod = re.search(r"-(master|worker)-(\d+)$", env.get("HOSTNAME", ""))
    if pod is not None and local_world == 1:
        # the operator numbers the master 0 and worker i as i + 1; without a master worker i is i
        index = int(pod.group(2))
        if rank not in ({index} if pod.group(1) == "master" else {index, index + 1}):
            read.findings.append(
                Finding("RANK", f"{rank} does not belong to pod {env['HOSTNAME']}", "Unset it; it is left over")
            )
    if local_world < 1 or world % local_world:
        read.findings.append(Finding("LOCAL_WORLD_SIZE", f"{local_world} does not divide WORLD_SIZE={world}"))
    read.done()
    node, nodes = rank // local_world, world // local_world
    return World(rank, world, local_rank, local_world, node, nodes, env["MASTER_ADDR"], port, "kubernetes")


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's "2(x3),1" as [2, 2, 2, 1]."""
    tasks: list[int] = []
    for many, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(many)] * int(times or 1)
    return tasks


def expand_hosts(text: str) -> list[str]:
    """Slurm's "node[01-03,07],gpu9" as the single names, in order; zeros in front of a number stay."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        names = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", item):
            pieces = [literal] if literal else [number for part in ranges.split(",") for number in _numbers(part)]
            names = [name + piece for name in names for piece in pieces]
        hosts += [name.strip() for name in names]
    return hosts


def _numbers(part: str) -> list[str]:
    first, dash, last = part.strip().partition("-")
    if not dash:
        return [first]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
