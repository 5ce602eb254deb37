"""What `meshwright verify` does: a temporary run folder, the ranks that try every plan in it, and what they found.

Each rank runs `python -m meshwright.runtime.verification FOLDER --device TYPE`; under a launcher that is not ours every rank
runs the command itself, and the first one prepares.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.config.load import Resolved, load_config
from meshwright.config.schema import Config, EvaluateConfig, ScheduleConfig
from meshwright.errors import ConfigError, Finding, LayoutError
from meshwright.runtime.choose import compile_mode
from meshwright.runtime.command import target_of
from meshwright.runtime.folder import RunFolder
from meshwright.runtime.modules import load_modules
from meshwright.runtime.setup import Target, set_up
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.train.objectives import make_objective
from meshwright.verify.layouts import load_plans, plans, select

if TYPE_CHECKING:
    from meshwright.distributed.world import Ranks

__all__ = ["VerifyCommand"]

NOTE, RESULT = "verify.json", "verified.json"
TOKENS = 2048
"""Tokens a micro-batch at most, where train.micro_batch does not say: what is verified does not depend on it."""


@dataclass(frozen=True)
class VerifyCommand:
    """Fields are the options of the command; see its help."""

    config: str
    overrides: list[str] = field(default_factory=list)
    layouts: str = "auto"
    nproc: int | None = None
    devices: str | None = None
    steps: int = 3
    rows: int | None = None
    precision: str = "fp64"
    quiet: bool = False

    def run(self) -> dict[str, Any] | None:
        """What was found: {"verdict", "tolerance", "precision", "notes", "rows": [...]}; None on a rank that is not the first.

        Raises MeshwrightError for what is wrong before, and for ranks that fail.
        """
        from meshwright.distributed.environment import read_world

        world = read_world()
        resolved = load_config(self.config, [*self.overrides, f"--precision={self.precision}"])
        if self.precision == "fp8":
            what = "fp8 rounds what ranks compute to 3 bits, and a number that lies between two of them to either"
            fix = "Verify the same layouts with bf16, or fp64, which tells a mistake from rounding best"
            raise ConfigError(findings=[Finding("--precision", what, fix)])
        load_modules(resolved.config.run.modules)
        if world.source != "single":
            return self._as_rank(resolved)
        folder, failed = Path(tempfile.mkdtemp(prefix="meshwright-verify-")), False
        try:
            return self._launch(resolved, RunFolder(folder / "run"))
        except SystemExit:
            failed = True  # the launcher has named a log in the folder
            raise
        finally:
            if not failed:
                shutil.rmtree(folder, ignore_errors=True)

    def _launch(self, resolved: Resolved, folder: RunFolder) -> dict[str, Any]:
        from meshwright.distributed.launch import launch

        target, env = target_of(resolved, self.nproc, self.devices)
        self._prepare(resolved, folder, target)
        code = launch(
            ["-m", "meshwright.runtime.verification", str(folder.path), "--device", target.device_type],
            nproc=target.world,
            log_dir=folder.logs,
            grace=resolved.config.run.grace,
            env=env,
        )
        if code:
            raise SystemExit(code)  # the launcher has shown whose fault it is
        return json.loads((folder.path / RESULT).read_text(encoding="utf-8"))

    def _as_rank(self, resolved: Resolved) -> dict[str, Any] | None:
        """One rank that torchrun, Slurm or Kubernetes started. The folder lies beside that of the run, where all see it."""
        from meshwright.distributed.environment import read_world
        from meshwright.distributed.world import init_world
        from meshwright.runtime.worker import on_the_first

        options = {"--nproc": self.nproc, "--devices": self.devices}
        if given := [option for option, value in options.items() if value is not None]:
            what = "has no effect: the ranks were started already"
            raise ConfigError(findings=[Finding(o, what, "Give it to whatever starts the ranks") for o in given])
        target, _ = target_of(resolved, 1)
        folder = RunFolder(f"{resolved.config.run.dir}.verify")
        with init_world(read_world(), target.device_type) as ranks:
            whole = Target(ranks.size, target.device_type, target.device_bytes)
            on_the_first(lambda: self._prepare(resolved, folder, whole), ranks)
            found = verify_on(ranks, folder)
        if ranks.rank:
            return None
        shutil.rmtree(folder.path, ignore_errors=True)
        return found

    def _prepare(self, resolved: Resolved, folder: RunFolder, target: Target) -> None:
        """Corpus, config and the plans, in the folder. Raises what `set_up` raises, and LayoutError for a bad --layouts."""
        from meshwright.verify.run import without_sync

        config, said = without_sync(resolved.config)
        rows = self.rows or min(config.train.batch, 4 * target.world - 1)
        origin = {**resolved.origin, "train.batch": "--rows", "train.steps": "--steps"}
        limits = {"steps": self.steps, "tokens": None, "epochs": None, "hours": None}
        short = {"batch": rows, "micro_batch": None, "ramp": None, "schedule": ScheduleConfig(kind="constant"), **limits}
        train = config.train.model_copy(update=short)
        resolved = Resolved(config.model_copy(update={"train": train, "evaluate": EvaluateConfig()}), origin)
        micro = config.train.micro_batch or max(1, TOKENS // config.data.seq_len)
        base = Plan(
            Layout(dp_replicate=target.world),
            micro_batch=min(micro, rows),
            precision=self.precision,
            compile=compile_mode(config, target.device_type),
        )
        ready = set_up(resolved, target, folder, plan=base.to_dict(), resume=False, write=True, say=self._say)
        tried = self._plans(base, ready.resolved.config, target.world, rows)
        note = {"plans": [plan.to_dict() for plan in tried], "micro_batch": base.micro_batch, "quiet": self.quiet, "said": said}
        (folder.path / NOTE).write_text(json.dumps(note), encoding="utf-8")

    def _plans(self, base: Plan, config: Config, world: int, rows: int) -> list[Plan]:
        task = make_objective(config.objective, config.model.classes or 0).task
        model, length = config.model, config.data.seq_len
        if self.layouts not in ("auto", "all"):
            return load_plans(self.layouts, world, base, model, task, length)
        every = plans(world, base, model, task, length, rows)
        if not every:
            what = f"there is no layout of {world} ranks for this model"
            raise LayoutError(findings=[Finding("--nproc", what, "Start another number of ranks")])
        return every if self.layouts == "all" else select(every, rows)

    def _say(self, text: str) -> None:
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)


def verify_on(ranks: Ranks, folder: RunFolder) -> dict[str, Any]:
    """Try the plans of a prepared folder on these ranks. Collective; every rank gets what was found."""
    from meshwright.distributed.reduce import broadcast_json
    from meshwright.runtime.corpus import Corpus
    from meshwright.spec.model_rules import ARCHITECTURES
    from meshwright.verify.cases import Case
    from meshwright.verify.compare import TOLERANCES
    from meshwright.verify.layouts import describe
    from meshwright.verify.rows import rows_finding
    from meshwright.verify.run import Row, settled, verify

    note = json.loads((folder.path / NOTE).read_text(encoding="utf-8"))
    config = folder.read_config().config
    load_modules(config.run.modules)
    config, notes = settled(config, config.precision, config.train.steps or 1)
    corpus = Corpus.load(folder.data)
    task = make_objective(config.objective, config.model.classes or 0).task
    data, _ = corpus.datasets(config, corpus.tokenizer(), task)
    tried = [Plan.from_dict(plan) for plan in note["plans"]]
    tolerance, done = TOLERANCES[config.precision], 0

    def told(row: Row) -> None:
        nonlocal done
        done += 1
        if ranks.rank == 0 and not note["quiet"]:
            words = ", ".join(filter(None, describe(row.plan, config.train.batch)))
            print(f"{done} of {len(tried)}: {words}: {row.verdict(tolerance)}", file=sys.stderr, flush=True)

    case = Case(config, data, config.train.steps or 1)
    if config.model.arch not in ARCHITECTURES:
        finding = rows_finding(case, ranks, note["micro_batch"]) if ranks.rank == 0 else None
        notes += [text] if (text := broadcast_json(str(finding) if finding else "", ranks.control)) else []
    rows = verify(case, tried, ranks, micro_batch=note["micro_batch"], told=told)
    verdicts = [row.verdict(tolerance) for row in rows]
    found = {
        "verdict": "differs" if "differs" in verdicts or "same" not in verdicts else "same",
        "precision": config.precision,
        "tolerance": tolerance,
        "batch": config.train.batch,
        "steps": case.steps,
        "notes": [*note["said"], *notes],
        "rows": [row.to_dict(tolerance) for row in rows],
    }
    if ranks.rank == 0:
        (folder.path / RESULT).write_text(json.dumps(found), encoding="utf-8")
    return found


def main(argv: list[str] | None = None) -> None:
    from meshwright.distributed.environment import read_world
    from meshwright.distributed.world import init_world

    parser = argparse.ArgumentParser(prog="meshwright.runtime.verification")
    parser.add_argument("folder")
    parser.add_argument("--device", required=True)
    args = parser.parse_args(argv)
    with init_world(read_world(), args.device) as ranks:
        verify_on(ranks, RunFolder(args.folder))


if __name__ == "__main__":
    main(sys.argv[1:])
