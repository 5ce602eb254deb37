"""Everything before a device is taken: corpus, the open numbers of the config, all checks, the plan, the run folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.config.load import Resolved
from meshwright.config.schema import Config
from meshwright.errors import ConfigError, DataError, Finding, LayoutError
from meshwright.runtime.choose import choose_plan
from meshwright.runtime.corpus import Corpus, prepare_corpus
from meshwright.runtime.folder import RunFolder
from meshwright.runtime.identity import identity, refuse_other_run, saved_meta
from meshwright.spec import model_rules
from meshwright.spec.layout_rules import refused
from meshwright.spec.plan import Plan
from meshwright.train.objectives import make_objective
from meshwright.train.schedule import Budget, total_steps

__all__ = ["Ready", "Target", "set_up"]


@dataclass(frozen=True)
class Target:
    """Where a run will go. device_bytes: memory of one device, None on a CPU."""

    world: int
    device_type: str
    device_bytes: int | None


@dataclass(frozen=True)
class Ready:
    """A run that can be started: its folder holds config, plan and data."""

    resolved: Resolved
    plan: Plan
    budget: Budget
    corpus: Corpus
    rows: int


def set_up(
    resolved: Resolved,
    target: Target,
    folder: RunFolder,
    *,
    plan: Plan | None,
    resume: bool,
    write: bool,
    say: Callable[[str], None],
) -> Ready:
    """Check and prepare a run, and write its folder unless `write` is False (a dry run, which prepares only the data).

    Raises ConfigError, DataError, LayoutError, DeviceError before anything of the run is written.
    """
    task = make_objective(resolved.config.objective, 2).task
    early = list(model_rules.check(_with_vocab(resolved.config, 1 << 20), task, resolved.config.data.seq_len))
    if early:
        raise ConfigError(findings=early)
    folder.create(resume=resume)
    corpus = prepare_corpus(resolved.config, folder.data, say=say)
    tokenizer = corpus.tokenizer()
    resolved = _resolve_open(resolved, tokenizer.vocab_size, corpus, task)
    config = resolved.config
    findings = model_rules.check(config.model, task, config.data.seq_len)
    if findings:
        raise ConfigError(findings=findings)
    train_data, valid_data = corpus.datasets(config, tokenizer, task)
    if config.evaluate.every and valid_data is None:
        raise DataError(findings=[Finding("evaluate.every", "nothing is held out", "Set data.valid or data.valid_fraction")])
    if resume and (saved := saved_meta(folder.checkpoints)) is not None:
        refuse_other_run(identity(config, train_data.rows, tokenizer.fingerprint), saved[1]["identity"], saved[0])
    budget = total_steps(config.train, train_data.rows, config.data.seq_len)
    if plan is None:
        plan = choose_plan(
            config, world=target.world, device_type=target.device_type, device_bytes=target.device_bytes, task=task
        )
    elif plan.layout.world != target.world:
        raise LayoutError(
            findings=[Finding("--plan", f"is for {plan.layout.world} ranks, but {target.world} are started", "Give --nproc")]
        )
    elif findings := refused(plan.layout):
        raise LayoutError(findings=findings)
    if write:
        folder.write_config(resolved)
        plan.save(folder.plan)
    return Ready(resolved, plan, budget, corpus, train_data.rows)


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
