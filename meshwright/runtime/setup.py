"""Everything before a device is taken: corpus, the open numbers of the config, all checks, the plan, the run folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.checkpoint import retain
from meshwright.checkpoint.retain import FolderLock, checkpoint_copies
from meshwright.checkpoint.ticket import readable
from meshwright.config.load import Resolved
from meshwright.config.schema import Config
from meshwright.distributed import device as devices
from meshwright.errors import ConfigError, DataError, DeviceError, Finding, LayoutError, MeshwrightError, counted
from meshwright.models import build
from meshwright.observe.metrics import read_metrics
from meshwright.observe.sinks import missing_sinks
from meshwright.observe.trace import Profile
from meshwright.plan.memory import WEIGHT_BYTES
from meshwright.runtime.choose import choose_plan, layout_name
from meshwright.runtime.corpus import Corpus, prepare_corpus
from meshwright.runtime.folder import RunFolder
from meshwright.runtime.identity import identity, refuse_other_replicas, refuse_other_run, saved_meta
from meshwright.spec import model_rules
from meshwright.spec.counts import parameter_count
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.plan_rules import refused_for
from meshwright.spec.slow_links import sync_findings
from meshwright.train.objectives import make_objective
from meshwright.train.schedule import Budget, total_steps

__all__ = ["Ready", "Target", "set_up"]

LOCK_PATIENCE = 10.0
"""Seconds to wait for the last process of a run that was just killed."""


@dataclass(frozen=True)
class Target:
    """Where a run will go. device_bytes: memory of one device, None on a CPU. local: ranks on one machine, default all."""

    world: int
    device_type: str
    device_bytes: int | None
    local: int | None = None


@dataclass(frozen=True)
class Ready:
    """A run that can be started: its folder holds config, plan and data. rows, held_out: to train on in an epoch, and not."""

    resolved: Resolved
    plan: Plan
    budget: Budget
    corpus: Corpus
    rows: int
    held_out: int


def set_up(
    resolved: Resolved,
    target: Target,
    folder: RunFolder,
    *,
    plan: dict[str, Any] | None,
    resume: bool,
    write: bool,
    say: Callable[[str], None],
    profile: str | None = None,
) -> Ready:
    """Check and prepare a run, and write its folder unless `write` is False (a dry run, which prepares only the data).

    plan: keys of a plan that are given; the others are chosen. profile: the range of --profile. Raises ConfigError,
    DataError, LayoutError, DeviceError, CheckpointError before anything of the run is written; what was prepared stays.
    """
    with resolved.placing():
        task = make_objective(resolved.config.objective, 2).task
        wrong = list(model_rules.check(_with_vocab(resolved.config, 1 << 20), task, resolved.config.data.seq_len))
        early = wrong + missing_sinks(resolved.config.log)
        if resolved.config.precision == "fp8":
            early += _fp8_findings(resolved.config, task, target.device_type, sized=not wrong)
        if early:
            raise ConfigError(findings=early)
        folder.create(resume=resume)
        if resume:
            FolderLock(folder.checkpoints, LOCK_PATIENCE).release()  # refused here while another process trains in this folder
            if folder.metrics.is_file():
                read_metrics(folder.metrics)  # its lines are kept: damaged ones are refused before anything is written
        try:
            ready = _prepare(resolved, target, folder, task, plan, resume, profile, say)
        except MeshwrightError:
            if not resume:
                folder.withdraw()
            raise
        if write:
            folder.write_config(ready.resolved)
            ready.plan.save(folder.plan)
        elif not resume:
            folder.withdraw()
        return ready


def _prepare(
    resolved: Resolved,
    target: Target,
    folder: RunFolder,
    task: str,
    plan: dict[str, Any] | None,
    resume: bool,
    profile: str | None,
    say: Callable[[str], None],
) -> Ready:
    """The corpus, and everything that can be known only with it."""
    saved = saved_meta(folder.checkpoints) if resume else None
    if saved is not None:  # the run keeps the rows and the tokenizer it began with, whatever became of its text
        _refuse_other_data(resolved.config, saved)
        corpus = Corpus.load(folder.data)
    else:
        corpus = prepare_corpus(resolved.config, folder.data, task=task, say=say)
    tokenizer = corpus.tokenizer()
    resolved = _resolve_open(resolved, tokenizer.vocab_size, corpus, task)
    config = resolved.config
    findings = model_rules.check(config.model, task, config.data.seq_len)
    if findings:
        raise ConfigError(findings=findings)
    train_data, valid_data = corpus.datasets(config, tokenizer, task, verify=True)
    if valid_data is None and config.data.valid_fraction:
        say(f"nothing is held out: data.valid_fraction {config.data.valid_fraction} of so few documents is none")
    if config.evaluate.every and valid_data is None:
        raise DataError(findings=[Finding("evaluate.every", "nothing is held out", "Set data.valid or data.valid_fraction")])
    if saved is None:
        for note in corpus.other_forms(task):
            say(note)
    else:
        now = identity(config, train_data.rows, tokenizer.fingerprint, corpus.digests())
        refuse_other_run(now, saved[1]["identity"], saved[0])
    budget = total_steps(config.train, train_data.rows, config.data.seq_len)
    Profile(profile, total=budget.steps)
    if saved is not None and plan is None:
        plan = _plan_before(folder, config, target, say)
    chosen = choose_plan(
        config,
        world=target.world,
        device_type=target.device_type,
        device_bytes=target.device_bytes,
        task=task,
        given=plan,
        local=target.local,
    )
    if findings := _unfit(chosen, plan or {}, config, task, target.device_type):
        raise LayoutError(findings=findings)
    if saved is not None:
        refuse_other_replicas(config, chosen, saved[1], saved[0])
    held_out = valid_data.rows if valid_data is not None else 0
    copies = checkpoint_copies(config, held_out > 0)
    if copies:
        _refuse_small_disk(config, task, folder, copies)
    else:
        say("nothing of this run will be saved: checkpoint.final is false and checkpoint.every 0")
    if saved is not None and (note := _finished(config, budget, saved)):
        say(note)
    return Ready(resolved, chosen, budget, corpus, train_data.rows, held_out)


def _refuse_small_disk(config: Config, task: str, folder: RunFolder, copies: int) -> None:
    """Before ranks are started, by the parameters' count; the ranks look again when they know each byte."""
    if config.model.arch not in ("decoder", "encoder"):
        return  # a registered model counts its parameters itself, once it is built
    kept = 1 + config.train.optimizer.moments + (config.train.ema > 0)
    size = kept * max(4, WEIGHT_BYTES[config.precision]) * parameter_count(config.model, task)
    present = sum(found.manifest.total_bytes for found in retain.find(folder.checkpoints) if found.manifest)
    need, free = max(size, copies * size - present), shutil.disk_usage(folder.path).free
    if need > free:
        each = f"{counted(copies, 'checkpoint')} of about {readable(size)}"
        what = f"room for {each} is needed: {readable(need)} more, {readable(free)} are free"
        fix = "Free space, lower checkpoint.keep, or use another run.dir"
        raise DeviceError(findings=[Finding(str(folder.checkpoints), what, fix)])


def _finished(config: Config, budget: Budget, saved: tuple[Path, dict[str, Any]]) -> str:
    """What to say where a resumed run has nothing left to do; else empty."""
    state, train = saved[1]["state"], config.train
    step, hours = state["step"], train.hours
    if budget.spent(step) is None and not (hours is not None and state["seconds"] >= hours * 3600):
        return ""
    limits = [f"train.{key}" for key in ("steps", "tokens", "epochs", "hours") if getattr(train, key) is not None]
    raised = " and ".join(limits) or "train.epochs (1 where nothing is given)"
    return f"this run is finished: {counted(step, 'step')} of {budget.steps or step} done. To go on, raise {raised}"


def _plan_before(folder: RunFolder, config: Config, target: Target, say: Callable[[str], None]) -> dict[str, Any] | None:
    """What a resumed run keeps of its plan: all but what its config says, as long as it has as many ranks. Raises LayoutError
    for a plan.json that cannot be read."""
    if not folder.plan.exists():
        return None
    before, world = Plan.load(folder.plan), target.world
    if before.layout.world != world:
        say(f"the plan before was for {before.layout.world} ranks ({layout_name(before.layout)}): one for {world} is chosen")
        return None
    decided = {"precision", "compile", *(["micro_batch"] if config.train.micro_batch else [])}
    decided |= set() if devices.records(target.device_type) else {"graphs"}
    return {key: value for key, value in before.to_dict().items() if key not in decided}


def _refuse_other_data(config: Config, saved: tuple[Path, dict[str, Any]]) -> None:
    """What decides the rows must be as it was: the sources, the held-out share and the tokenizer."""
    path, meta = saved
    now, then = config.data.model_dump(mode="json"), meta["config"]["data"]
    keys = ("train", "valid", "valid_fraction", "tokenizer", "cache", "on_bad_row")
    refuse_other_run({f"data.{key}": now[key] for key in keys}, {f"data.{key}": then.get(key) for key in keys}, path)


def _unfit(plan: Plan, given: dict[str, Any], config: Config, task: str, device_type: str) -> list[Finding]:
    """Why a plan cannot be used for this run. given: what of it was not chosen."""
    findings = refused_for(plan, config.model, task, config.data.seq_len)
    if plan.graphs and not devices.records(device_type):
        findings.append(Finding("plan.graphs", f"true, but a {device_type} device does not record launches", "Leave it out"))
    findings += sync_findings(config.train.sync, plan.layout)
    if config.compile != "auto" and given.get("compile", config.compile) != config.compile:
        what = f"says compile {given['compile']}, but the config says {config.compile}"
        findings.append(Finding("--plan", what, "Change one of them"))
    if plan.precision != config.precision:
        what = f"says precision {plan.precision}, but the config says {config.precision}"
        findings.append(Finding("--plan", what, "Change one of them"))
    return findings


def _fp8_findings(config: Config, task: str, device_type: str, sized: bool) -> list[Finding]:
    """Why this model cannot train in fp8 on such devices: what the ranks would say once they had built it. sized: its numbers
    are in order, so that it can be built here, without values."""
    from meshwright.parallel.fp8 import multiply_in_fp8

    device = devices.rank_device(device_type, 0)
    if (findings := devices.fp8_findings(device)) or not sized:
        return findings
    model = build(_with_vocab(config, 1 << 20), task)
    try:
        multiply_in_fp8(model, Plan(Layout(), precision="fp8"), device)
    except LayoutError as error:
        return [replace(finding, where="precision") for finding in error.findings]
    return []


def _with_vocab(config: Config, vocab: int):
    """The model as far as it is known before the corpus is: open numbers filled in, so that only real mistakes show."""
    model = config.model
    return model.model_copy(update={"vocab": model.vocab or vocab, "classes": model.classes or 2})


def _resolve_open(resolved: Resolved, vocab: int, corpus: Corpus, task: str) -> Resolved:
    """Fill model.vocab and model.classes from the tokenizer and the labels where the config leaves them open."""
    model, origin = resolved.config.model, dict(resolved.origin)
    updates: dict[str, int] = {}
    if model.vocab is None:
        updates["vocab"] = vocab
        origin["model.vocab"] = "tokenizer"
    if task == "classify" and model.classes is None:
        updates["classes"] = len(corpus.label_names())
        origin["model.classes"] = "labels of the data"
    if not updates:
        return resolved
    config = resolved.config.model_copy(update={"model": model.model_copy(update=updates)})
    return Resolved(config, origin)
