"""What every rank runs: `python -m meshwright.runtime.worker RUN_FOLDER [--resume] [--profile A:B]`.

Builds the context of a run in the order in which its values depend on each other, trains, and writes the result.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from meshwright import __version__
from meshwright.checkpoint import CheckpointStore, inspect, retain
from meshwright.config.schema import Config
from meshwright.data.dataset import Dataset
from meshwright.data.loader import Loader
from meshwright.distributed import device as devices
from meshwright.distributed.agreement import refuse_different, source_digests
from meshwright.distributed.environment import World, read_world
from meshwright.distributed.mesh import build_mesh, data_rank
from meshwright.distributed.reduce import broadcast_json
from meshwright.distributed.stop import StopFlag
from meshwright.distributed.watch import Watchdog
from meshwright.distributed.world import Ranks, init_world
from meshwright.errors import CheckpointError, Finding, MeshwrightError, NumericsError, UserError, counted
from meshwright.models import build
from meshwright.observe.clock import StepClock
from meshwright.observe.flops import peak_rate
from meshwright.observe.metrics import MetricsWriter, read_metrics
from meshwright.observe.noise import NoiseScale, batch_warning
from meshwright.observe.progress import NullProgress, Progress, print_summary
from meshwright.observe.report import summary_of
from meshwright.observe.resources import Sampler, Usage
from meshwright.observe.sinks import open_sink
from meshwright.observe.summary import load_facts, save_facts, summarise
from meshwright.observe.trace import Profile
from meshwright.runtime.alike import code, settings
from meshwright.runtime.corpus import Corpus
from meshwright.runtime.folder import RunFolder
from meshwright.runtime.identity import identity, refuse_other_replicas, refuse_other_run
from meshwright.runtime.modules import load_modules
from meshwright.spec.plan import Plan
from meshwright.train.context import Context
from meshwright.train.engine import give_values, make_engine
from meshwright.train.figures import Figures
from meshwright.train.loop import Outcome, train
from meshwright.train.objectives import make_objective
from meshwright.train.recorder import MetricsSink, ProgressSink, Recorder
from meshwright.train.saving import restore
from meshwright.train.schedule import batch_at, total_steps

__all__ = ["Job", "RunData", "on_the_first", "run_job", "run_on", "start"]

NOTHING_UPDATED = "no target in the whole batch, or a gradient that was not finite; metrics.jsonl says which"


@dataclass(frozen=True)
class Job:
    """resume: go on from the newest whole checkpoint of the folder (from the start where there is none). settings: what this
    rank was started with, where each rank read it for itself."""

    folder: RunFolder
    resume: bool = False
    profile: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunData:
    """Rows to train on and held-out ones, the fingerprint of the tokenizer that made them, and what to say of them."""

    train: Dataset
    valid: Dataset | None
    tokenizer: str
    notes: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()


def run_job(job: Job, ranks: Ranks) -> Outcome:
    """Train one run on these ranks. Every rank calls it."""
    config, plan = job.folder.read_config().config, Plan.load(job.folder.plan)
    modules = source_digests({path: Path(path) for path in config.run.modules})
    refuse_different({"settings": settings(config, plan.to_dict()), "run.modules": modules}, ranks.control)
    load_modules(config.run.modules)
    corpus = Corpus.load(job.folder.data)
    tokenizer = corpus.tokenizer()
    stores = corpus.digests()
    names = [f"data.{kind}.{i}" for kind in ("train", "valid") for i in range(len(getattr(corpus, kind)))]
    refuse_different({"data": {**dict(zip(names, stores, strict=True)), "tokenizer": tokenizer.fingerprint}}, ranks.control)
    task = make_objective(config.objective, config.model.classes or 0).task
    train_data, valid_data = corpus.datasets(config, tokenizer, task)
    data = RunData(train_data, valid_data, tokenizer.fingerprint, train_data.notes, stores)
    return run_on(job, config, plan, data, ranks)


def run_on(job: Job, config: Config, plan: Plan, data: RunData, ranks: Ranks) -> Outcome:
    """Train on given rows; `run_job` takes them from the run folder."""
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopFlag())
        sampler = stack.enter_context(Sampler(ranks.device))
        run = build_context(job, config, plan, data, ranks, stop, stack)
        begun = run.state.step
        outcome = train(run)
        usage = sampler.stop()
        if run.is_lead:
            finish(job, run, outcome, usage if run.state.step > begun else None)
        if outcome.finished and run.state.step and not run.state.updates:
            raise NumericsError(f"no step of {run.state.step} updated the weights: {NOTHING_UPDATED}")
    return outcome


def build_context(
    job: Job, config: Config, plan: Plan, data: RunData, ranks: Ranks, stop: StopFlag, stack: contextlib.ExitStack
) -> Context:
    """Mesh, model, engine, recorder, then the weights: new ones, or those of a checkpoint."""
    lead = ranks.rank == 0
    mesh = build_mesh(plan.layout, ranks.device.type)
    place, _ = data_rank(mesh)
    budget = total_steps(config.train, data.train.rows, config.data.seq_len)
    objective = make_objective(config.objective, config.model.classes or 0)

    engine = make_engine(build(config.model, objective.task), config, plan, mesh, ranks.device)
    progress = stack.enter_context(_progress(config, budget.steps) if lead else NullProgress())
    store = stack.enter_context(
        CheckpointStore(
            job.folder.checkpoints,
            group=ranks.checkpoint if ranks.size > 1 else None,
            rank=ranks.rank,
            world=ranks.size,
            keep=config.checkpoint.keep,
            report=progress.note,
        )
    )
    newest = store.newest() if job.resume else None
    if job.resume and newest is None and (damaged := retain.find(job.folder.checkpoints)):
        what = f"none of its {len(damaged)} checkpoints is whole"
        fix = "Put back a whole one, or start anew in another --run.dir"
        raise CheckpointError(findings=[Finding(str(job.folder.checkpoints), what, fix)])
    meta = inspect(newest)["meta"] if newest is not None else None
    step = meta["state"]["step"] if meta else 0
    figures = Figures(
        config.model,
        objective.task,
        peak=_peak(ranks, config),
        world=ranks.size,
        parts=plan.layout.dp * (plan.accumulation(config.train.batch) if engine.gradients.noise_of_one_micro_step else 1),
        device=ranks.device,
        noise=NoiseScale(),
    )
    must_know = config.precision == "fp16" or config.train.on_nonfinite == "skip"
    recorder = Recorder(
        _sinks(job, config, progress, step) if lead else [],
        figures,
        deferred=ranks.device.type != "cpu",
        must_know_skips=must_know,
        stop_on_nonfinite=config.train.on_nonfinite == "stop",
    )
    prefetch = config.data.prefetch

    def loader(dataset, tail: str) -> Loader:
        made = Loader(
            dataset, dp_rank=place, dp_world=plan.layout.dp, micro_batch=plan.micro_batch, prefetch=prefetch, tail=tail
        )
        stack.callback(made.close)
        return made

    run = Context(
        config=config,
        plan=plan,
        ranks=ranks,
        device=ranks.device,
        data_rank=place,
        engine=engine,
        objective=objective,
        train_loader=loader(data.train, config.train.tail),
        valid_loader=loader(data.valid, "step") if data.valid is not None else None,
        store=store,
        clock=StepClock(ranks.device),
        recorder=recorder,
        progress=progress,
        profile=Profile(job.profile, job.folder.profile, rank=ranks.rank, device=ranks.device, total=budget.steps),
        stop=stop,
        watchdog=Watchdog(grace=config.run.grace, timeout=config.run.timeout, stop=stop),
        budget=budget,
        identity=identity(config, data.train.rows, data.tokenizer, data.stores),
    )
    if newest is not None and meta is not None:
        refuse_other_run(run.identity, meta["identity"], newest)
        refuse_other_replicas(config, plan, meta, newest)
        restore(run, newest, meta)
    else:
        if job.resume:
            progress.note(f"no whole checkpoint in {job.folder.checkpoints}: the run starts from the beginning")
        give_values(engine, config.run.seed, ranks.device)
    for note in (*data.notes, *engine.notes):
        progress.note(note)
    return run


def finish(job: Job, run: Context, outcome: Outcome, usage: Usage | None) -> None:
    """On the lead rank: the summary table, the report, the result. usage: None where no step was taken, as in the resume of a
    run that is finished: then devices, peak and usage stay those of the process whose steps the figures are of."""
    if usage is None and load_facts(job.folder.path)[1]:
        summary = summary_of(job.folder.path)
    else:
        summary = summarise(
            read_metrics(job.folder.metrics),
            devices=run.ranks.size,
            peak_rate=run.recorder.figures.peak.rate,
            peak_source=run.recorder.figures.peak.source,
            usage=usage.to_dict() if usage else None,
        )
        save_facts(job.folder.path, machine=_machine(run), summary=summary)
    run.progress.note(f"ended: {outcome.reason}")
    if not outcome.finished and run.saved_at is not None:
        run.progress.note(f"saved at step {run.saved_at}; go on with: meshwright train --resume {job.folder.path}")
    if run.state.skipped:
        run.progress.note(f"{run.state.skipped} of {run.state.step} steps updated nothing ({NOTHING_UPDATED})")
    if rows := left_out(run):
        run.progress.note(f"{counted(rows, 'row')} left out at the end of an epoch (train.tail: drop)")
    if warning := batch_warning(run.config.train.batch, run.recorder.figures.noise):
        run.progress.note(warning)
    run.progress.close()
    print_summary(summary)
    before = job.folder.read_result()
    figures = outcome.figures or (before.get("figures", {}) if before.get("step") == run.state.step else {})
    job.folder.write_result(
        {"reason": outcome.reason, "finished": outcome.finished, "step": run.state.step, "figures": figures}
    )


def left_out(run: Context) -> int:
    """Rows that the ends of epochs have cost so far, with those before the next step."""
    train, rows, consumed = run.config.train, run.train_loader.dataset.rows, run.state.consumed
    left = rows - consumed % rows
    return run.state.dropped + (left if train.tail == "drop" and left < batch_at(train, consumed) else 0)


def _progress(config: Config, total: int | None) -> Progress:
    return Progress(total, every=config.log.every)


def _peak(ranks: Ranks, config: Config):
    """Every rank measures where the data sheet says nothing: they share the machine in training too."""
    return peak_rate(ranks.device, config.precision, devices.name(ranks.device))


def _sinks(job: Job, config: Config, progress: NullProgress, step: int) -> list:
    folder = job.folder
    outside = open_sink(config.log, folder.path, config.model_dump(mode="json"), step)
    return [MetricsSink(MetricsWriter(folder.metrics, resume_step=step)), outside, ProgressSink(progress)]


def _machine(run: Context) -> dict[str, str]:
    return {
        "device": devices.name(run.device),
        "devices": str(run.ranks.size),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "meshwright": __version__,
    }


PREPARING_SECONDS = 24 * 3600.0
"""How long the other ranks wait while the first prepares; once training has begun, the watchdog's limit counts."""


def start(world: World, job: Job, device_type: str | None = None, prepare: Callable[[], object] | None = None) -> Outcome:
    """Meet the other ranks and run. After an automatic restart it goes on from the newest checkpoint by itself.

    prepare: called by the first rank once all have met, where nobody prepared the folder before; what it refuses ends all.
    """
    timeout = PREPARING_SECONDS if prepare is not None else 1800.0
    with init_world(world, device_type or devices.pick(), timeout=timeout) as ranks:
        refuse_different({"code": code(), "settings": job.settings}, ranks.control)
        if prepare is not None:
            on_the_first(prepare, ranks)
        # ranks that somebody else started looked at the folder at different times: the first one's answer counts
        resume = broadcast_json(job.resume or world.restart > 0, ranks.control)
        return run_job(replace(job, resume=resume), ranks)


def on_the_first(prepare: Callable[[], object], ranks: Ranks) -> None:
    """Call `prepare` on the first rank while the others wait. What it refuses is raised there, and ends the others too."""
    refusal: MeshwrightError | None = None
    if ranks.rank == 0:
        try:
            prepare()
        except MeshwrightError as error:
            refusal = error
    code = broadcast_json(refusal.exit_code if refusal is not None else 0, ranks.control)
    if refusal is not None:
        raise refusal
    if code:
        raise (UserError if code == UserError.exit_code else MeshwrightError)("rank 0 refused to start; its message says why")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="meshwright.runtime.worker")
    parser.add_argument("folder")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--profile")
    parser.add_argument("--device")
    args = parser.parse_args(argv)
    atexit.register(gc.freeze)  # else the end of the process looks through every object of torch, for a third of a second
    start(read_world(), Job(RunFolder(args.folder), args.resume, args.profile), args.device)


if __name__ == "__main__":
    main(sys.argv[1:])
