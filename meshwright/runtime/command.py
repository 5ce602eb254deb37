"""What `meshwright train` does, as a value: a launcher on a machine, or one rank where somebody else started the ranks.

Whatever loads torch is imported where it is needed: a mistake in the settings is answered a second sooner.
"""

from __future__ import annotations

import atexit
import gc
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.config.load import Resolved, load_config
from meshwright.errors import ConfigError, Finding, counted
from meshwright.runtime.folder import RunFolder
from meshwright.spec.plan import read_plan

if TYPE_CHECKING:
    from meshwright.distributed.environment import Nodes, World
    from meshwright.runtime.setup import Ready, Target

__all__ = ["TrainCommand", "target_of"]

STOPPED = 143
"""Exit code of a rank without a launcher of ours that saved and stopped: SIGTERM's, so that a job is not taken for done."""

SERVED = ("decoder", "encoder")
"""Architectures that `meshwright serve` has an engine for."""

Show = Callable[["Resolved", "Ready"], None]


@dataclass(frozen=True)
class TrainCommand:
    """Fields are the options of the command; see its help."""

    config: str | None
    overrides: list[str] = field(default_factory=list)
    nproc: int | None = None
    devices: str | None = None
    plan: str | None = None
    resume: str | None = None
    rebalance: bool = False
    max_restarts: int = 0
    nnodes: int = 1
    rdzv: str | None = None
    dry_run: bool = False
    profile: str | None = None

    def run(self, show: Show) -> int:
        """The exit code of the run. Raises MeshwrightError for what is wrong before it starts."""
        from meshwright.distributed.environment import read_nodes, read_world

        resolved = self.resolved()
        atexit.register(gc.freeze)  # else the end of the process looks through every object of torch, for a third of a second
        from meshwright.runtime.modules import load_modules

        load_modules(resolved.config.run.modules)
        nodes = read_nodes()
        world = read_world(warn=nodes is None)
        if world.source != "single" and nodes is None:
            return self.as_rank(resolved, world, show)
        return self.launch(resolved, show, nodes)

    def resolved(self) -> Resolved:
        if self.config is None and self.resume in (None, "latest"):
            raise ConfigError(findings=[Finding("CONFIG", "is missing", "Name a YAML file, or a run with --resume RUN")])
        if self.resume not in (None, "latest"):
            run = RunFolder(self.resume)
            run.create(resume=True)
            resolved = load_config(self.config or run.config, [*self.overrides, f"--run.dir={self.resume}"])
        else:
            resolved = load_config(self.config or "", self.overrides)
        return resolved

    def launch(self, resolved: Resolved, show: Show, nodes: Nodes | None) -> int:
        """Start the ranks of this machine and wait for them. On several machines their rank 0 prepares, so that one does."""
        from meshwright.distributed.launch import launch
        from meshwright.distributed.rendezvous import parse_endpoint
        from meshwright.observe.trace import Profile
        from meshwright.runtime.setup import set_up

        Profile(self.profile)  # a range that cannot be is refused before anything is prepared
        if self.rdzv is not None:
            parse_endpoint(self.rdzv)
        target, env = target_of(resolved, self.nproc, self.devices)
        folder = RunFolder(resolved.config.run.dir)
        nnodes, rdzv = (nodes.nnodes, nodes.rdzv) if nodes is not None else (self.nnodes, self.rdzv)
        resume = self._is_resume(folder)
        if self.resume == "latest" and not resume:
            _say(f"{folder.path}: there is no run to resume; this one begins at step 1")
        alone = nnodes == 1 or self.dry_run
        if alone:
            plan = self._plan(folder)
            whole = replace(target, world=target.world * nnodes)
            ready = set_up(
                resolved, whole, folder, plan=plan, resume=resume, write=not self.dry_run, say=_say, profile=self.profile
            )
            show(ready.resolved, ready)
        if self.dry_run:
            kept = f"; prepared data stays in {folder.data} for the run" if folder.data.is_dir() else ""
            _say(f"dry run: nothing was started{kept}")
            return 0
        code = launch(
            self._worker(folder, target.device_type, resume) if alone else ["-m", "meshwright", "train", *self._arguments()],
            nproc=target.world,
            nnodes=nnodes,
            rdzv=rdzv,
            max_restarts=self.max_restarts,
            log_dir=folder.logs,
            grace=resolved.config.run.grace,
            env=env,
        )
        if code == 0 and alone:
            finish(folder, self.profile)
        return code

    def _plan(self, folder: RunFolder) -> dict[str, Any] | None:
        """What is given of a plan: by --plan, or of a resumed run by the times of its pipeline stages."""
        if not self.rebalance:
            return read_plan(self.plan) if self.plan is not None else None
        if self.plan is not None or not self._is_resume(folder):
            what = "is for a resumed run, whose own plan it changes"
            raise ConfigError(findings=[Finding("--rebalance", what, "Give --resume RUN, and no --plan")])
        from meshwright.runtime.rebalance import rebalanced

        stages, plan = rebalanced(folder)
        _say(f"stages: {list(stages.split)} layers -> {list(stages.better)}, by the times of {stages.checkpoint}")
        return plan.to_dict()

    def _worker(self, folder: RunFolder, device_type: str, resume: bool) -> list[str]:
        argv = ["-m", "meshwright.runtime.worker", str(folder.path), "--device", device_type]
        argv += ["--resume"] if resume else []
        return argv + (["--profile", self.profile] if self.profile else [])

    def _arguments(self) -> list[str]:
        """The same command for a rank, which finds its place in the environment."""
        given = {"--plan": self.plan, "--resume": self.resume, "--profile": self.profile}
        options = [part for name, value in given.items() if value for part in (name, value)]
        options += ["--rebalance"] if self.rebalance else []
        return [*([self.config] if self.config else []), *options, *self.overrides]

    def as_rank(self, resolved: Resolved, world: World, show: Show) -> int:
        """One rank that torchrun, Slurm, Kubernetes or a launcher of several machines started: the first one prepares."""
        from meshwright.runtime.alike import settings
        from meshwright.runtime.setup import Target, set_up
        from meshwright.runtime.worker import Job, start

        self._refuse_launching(world)
        folder = RunFolder(resolved.config.run.dir)
        device_type = _device_type(resolved)
        resume = self._is_resume(folder) or (world.restart > 0 and folder.config.is_file())
        plan = self._plan(folder)

        def prepare() -> None:
            target = Target(world.world, device_type, _device_bytes(device_type), world.local_world)
            ready = set_up(resolved, target, folder, plan=plan, resume=resume, write=True, say=_say, profile=self.profile)
            show(ready.resolved, ready)

        outcome = start(world, Job(folder, resume, self.profile, settings(resolved.config, plan)), device_type, prepare)
        if not outcome.finished:  # an elastic agent says so itself, and would take a code for a failure
            return 0 if world.source == "elastic" else STOPPED
        if world.rank == 0:
            finish(folder, self.profile)
        return 0

    def _refuse_launching(self, world: World) -> None:
        """Options that only mean something where we start the ranks. The inner ranks of our own launcher have none of them."""
        given = {
            "--dry-run": self.dry_run,
            "--nproc": self.nproc is not None,
            "--devices": self.devices is not None,
            "--nnodes": self.nnodes > 1,
            "--rdzv": self.rdzv is not None,
            "--max-restarts": self.max_restarts > 0,
        }
        what = f"has no effect: the ranks were started by {world.source} already"
        findings = [
            Finding(option, what, "Give it to whatever starts the ranks") for option, is_given in given.items() if is_given
        ]
        if findings:
            raise ConfigError(findings=findings)

    def _is_resume(self, folder: RunFolder) -> bool:
        return self.resume is not None and (self.resume != "latest" or folder.config.is_file())


def target_of(resolved: Resolved, nproc: int | None = None, chosen: str | None = None) -> tuple[Target, dict[str, str]]:
    """Where the ranks of this machine go, and the environment in which they see only the `chosen` devices ("0,2").

    nproc: ranks; default: one a device, two on a CPU. Raises ConfigError for more ranks than devices.
    """
    from meshwright.distributed import device as devices
    from meshwright.runtime.setup import Target

    device_type = _device_type(resolved)
    env = {}
    have = devices.count(device_type)
    if chosen is not None:
        env = devices.visible(chosen, device_type, have)
        have = len(chosen.split(","))
    world = nproc or (have if device_type != "cpu" else devices.default_ranks(device_type))
    if device_type != "cpu" and world > have:
        what = f"{counted(world, 'rank')} on {counted(have, 'device')}"
        raise ConfigError(findings=[Finding("--nproc", what, f"Start at most {have}")])
    return Target(world, device_type, _device_bytes(device_type), local=world), env


def finish(folder: RunFolder, profile: str | None) -> None:
    """After the ranks are gone: the sample of generated text, the report, where things are, and how to serve the model.

    profile: of --profile.
    """
    config = folder.read_config().config
    log = config.log
    if log.sample is not None:
        from meshwright.runtime.trained import continue_text, load_trained

        text = continue_text(
            load_trained(folder.path), log.sample, max_tokens=log.sample_tokens, temperature=log.sample_temperature
        )
        _say(f"sample: {text}")
    if log.report:
        from meshwright.observe.report import write_report

        _say(f"report: {write_report(folder.path)}")
    if profile is not None:
        traced = folder.profile.is_dir() and any(folder.profile.iterdir())
        _say(f"profile: {folder.profile}" if traced else f"profile: none of the steps {profile} was run")
    _say(f"run folder: {folder.path}")
    if config.model.arch in SERVED:
        _say(f"serve: {_program()} serve {shlex.quote(str(folder.path))}")


def _program() -> str:
    """What calls this program again from here: the words that called it, where its name alone would not."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py" and called.parent.name == "meshwright":
        return f"{shlex.quote(sys.executable)} -m meshwright"
    found = shutil.which("meshwright")
    if called.name != "meshwright" or (found is not None and Path(found).resolve() == called.resolve()):
        return "meshwright"
    return shlex.quote(str(called))


def _device_type(resolved: Resolved) -> str:
    from meshwright.distributed import device as devices

    return devices.pick(resolved.config.run.device)


def _device_bytes(device_type: str) -> int | None:
    """Memory of one device; on a CPU it is no limit that a plan could know."""
    from meshwright.distributed import device as devices

    return None if device_type == "cpu" else devices.memory_total(devices.rank_device(device_type, 0))[1]


def _say(text: str) -> None:
    print(text, file=sys.stdout, flush=True)
