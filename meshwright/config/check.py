"""Settings that are each fine and together are not. One function a theme; each returns findings keyed by dotted key."""

from __future__ import annotations

from meshwright.config.schema import Config
from meshwright.errors import Finding

__all__ = ["check"]


def check(config: Config) -> list[Finding]:
    """Everything that can be known from the config alone."""
    return [*_data(config), *_objective(config), *_batch(config), *_optimizer(config), *_sync(config), *_precision(config)]


def _data(config: Config) -> list[Finding]:
    findings = []
    for name in ("train", "valid"):
        sources = getattr(config.data, name)
        weighted = [source.weight is not None for source in sources]
        if any(weighted) and not all(weighted):
            missing = [i for i, w in enumerate(weighted) if not w]
            findings.append(
                Finding(f"data.{name}.{missing[0]}.weight", "is missing while other sources carry one", "Give all or none")
            )
    if not config.data.train:
        findings.append(Finding("data.train", "names no source", "Give a path, or 'embedded'"))
    if config.evaluate.every and not config.data.valid and config.data.valid_fraction == 0:
        findings.append(
            Finding(
                "evaluate.every", f"is {config.evaluate.every} but nothing is held out", "Set data.valid or data.valid_fraction"
            )
        )
    if config.evaluate.patience and not config.evaluate.every:
        findings.append(
            Finding("evaluate.patience", f"is {config.evaluate.patience} but evaluate.every is 0", "Set evaluate.every")
        )
    return findings


def _objective(config: Config) -> list[Finding]:
    findings = []
    kind, data = config.objective.kind, config.data
    if kind == "masked_lm" and config.model.arch == "decoder":
        findings.append(
            Finding(
                "objective.kind", "masked_lm needs both directions; a decoder sees only the past", "Use model.arch: encoder"
            )
        )
    if kind == "masked_lm" and config.objective.mask_fraction == 0:
        findings.append(Finding("objective.mask_fraction", "is 0: nothing would be predicted"))
    if kind == "causal_lm" and config.model.arch == "encoder" and config.objective.response_only:
        findings.append(Finding("objective.response_only", "needs a decoder"))
    if kind == "classify":
        unlabelled = [
            i for i, source in enumerate(data.train) if source.label_key is None and source.path.startswith("embedded")
        ]
        findings += [
            Finding(f"data.train.{i}.path", "the embedded text has no labels", "Name a labelled corpus") for i in unlabelled
        ]
    return findings


def _batch(config: Config) -> list[Finding]:
    train = config.train
    findings = []
    if train.ramp and train.ramp.start > train.batch:
        findings.append(Finding("train.ramp.start", f"{train.ramp.start} is above train.batch {train.batch}"))
    if train.lr_scaling != "none" and train.lr_batch is None:
        findings.append(
            Finding(
                "train.lr_batch", f"is needed by lr_scaling {train.lr_scaling}", "Give the global batch that lr was tuned for"
            )
        )
    if train.lr_scaling == "none" and train.lr_batch is not None:
        findings.append(Finding("train.lr_batch", "has no effect while lr_scaling is none", "Set lr_scaling or drop it"))
    if train.micro_batch and train.micro_batch > train.batch:
        findings.append(Finding("train.micro_batch", f"{train.micro_batch} rows are more than train.batch {train.batch}"))
    total, warmup = train.schedule.total or train.steps, train.schedule.warmup
    if total is not None and warmup > total:
        findings.append(Finding("train.schedule.warmup", f"{warmup} steps are more than the {total} steps of the run"))
    return findings


def _optimizer(config: Config) -> list[Finding]:
    optimizer = config.train.optimizer
    if optimizer.kind != "sgd" and optimizer.momentum:
        return [Finding("train.optimizer.momentum", "belongs to sgd", "Set train.optimizer.kind: sgd, or use betas")]
    return []


def _sync(config: Config) -> list[Finding]:
    sync = config.train.sync
    belongs = dict.fromkeys(("outer_lr", "outer_momentum", "overlap"), "diloco") if sync.method != "diloco" else {}
    if not sync.local:
        belongs |= dict.fromkeys(("every", "warmup"), "local_sgd and diloco")
    if sync.compress != "powersgd":
        belongs["rank"] = "compress: powersgd"
    default = type(sync)()
    findings = [
        Finding(f"train.sync.{key}", f"belongs to {owner}", f"Drop it, or set train.sync to use {owner}")
        for key, owner in belongs.items()
        if getattr(sync, key) != getattr(default, key)
    ]
    if sync.local and config.train.ema:
        what = f"is {config.train.ema}, but with {sync.method} each replica would average weights of its own"
        findings.append(Finding("train.ema", what, "Set train.ema: 0"))
    steps = config.train.steps
    if sync.local and steps is not None and (steps <= sync.warmup or (steps - sync.warmup) % sync.every):
        below = sync.warmup + max(0, steps - sync.warmup) // sync.every * sync.every
        legal = [str(count) for count in (below, below + sync.every) if count > sync.warmup]
        what = f"{steps} is no whole number of rounds of {sync.every} steps" + f" after {sync.warmup}" * (sync.warmup > 0)
        findings.append(Finding("train.steps", f"{what}: the last steps would never be exchanged", f"Use {' or '.join(legal)}"))
    return findings


def _precision(config: Config) -> list[Finding]:
    if config.precision != "fp16" and config.loss_scale != type(config.loss_scale)():
        return [
            Finding(
                "loss_scale", f"has no effect with precision {config.precision}", "Only fp16 scales the loss; drop the section"
            )
        ]
    if config.loss_scale.floor > config.loss_scale.initial:
        return [
            Finding("loss_scale.floor", f"{config.loss_scale.floor} is above loss_scale.initial {config.loss_scale.initial}")
        ]
    return []
