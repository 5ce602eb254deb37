"""What a script for DeepSpeed calls, run by the engine here: change `import deepspeed` to `from meshwright import deepspeed`.

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=...)
    for batch in data:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

As there, a loss is a mean over a micro-batch of one rank; the step's gradient is the mean over micro-batches and ranks, and a
step ends with every `gradient_accumulation_steps`-th call. The config is read by `interop.deepspeed`; what it has of other
features is refused there by name. Weights are kept in fp16 or bf16 with fp32 masters, and the module runs under autocast, so
that inputs need no cast. DeepSpeed's process group is one for the process; so is the `Run` of this module.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from meshwright.errors import CheckpointError, ConfigError, Finding
from meshwright.interop.deepspeed import OptimizerSettings, Settings, translate
from meshwright.interop.deepspeed_schedule import Schedule
from meshwright.runtime.init import init
from meshwright.runtime.run import Run
from meshwright.runtime.training import Training

__all__ = ["DeepSpeedEngine", "Scheduler", "add_config_arguments", "init_distributed", "initialize"]

EVERY = 1_000_000
"""Checkpoints kept: DeepSpeed removes none."""

_run: list[Run] = []


def init_distributed(dist_backend: str | None = None, *args: Any, **more: Any) -> None:
    """Opens the process groups, as `initialize` does by itself. The arguments are DeepSpeed's; who started the script and which
    devices are here is found out without them."""
    _the_run()


def _the_run(run: Run | None = None) -> Run:
    if run is not None:
        _run[:] = [run]
    if not _run:
        _run.append(init())
    return _run[0]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """--deepspeed and --deepspeed_config, as DeepSpeed adds them."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="The script uses initialize.")
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed json configuration file.")
    return parser


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    config_params: str | Path | Mapping[str, Any] | None = None,
    *,
    run: Run | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """(engine, optimizer, training loader or None, scheduler or None), with DeepSpeed's arguments.

    run: of `meshwright.init`, where the script has one. arguments: what "auto" values stand for, see `translate`.
    Raises ConfigError with everything that is wrong with the config, LayoutError for a layout that is not there.
    """
    held = _the_run(run)
    given = config if config is not None else config_params
    if given is None:
        given = getattr(args, "deepspeed_config", None)
    _check(model, given, mpu)
    assert model is not None and given is not None  # checked
    settings = translate(given, ranks=held.size, arguments=arguments, own_optimizer=optimizer is not None)
    for warning in settings.warnings:
        held.print(f"warning: {warning}")
    parameters = list(model_parameters) if model_parameters is not None else [p for p in model.parameters() if p.requires_grad]
    made = _optimizer(optimizer, settings.optimizer, parameters)
    data = _loader(training_data, settings, collate_fn, held.seed)
    zero = settings.zero if held.size > 1 else 0
    offload = settings.offload
    if offload == "parameters" and not zero:
        held.print("warning: offload_param: on one rank nothing is gathered, so weights stay on the device")
        offload = "optimizer"
    layout = {"zero": zero} if zero else {}
    plan: dict[str, Any] = {"layout": layout, "bucket_mib": settings.bucket_mib, "overlap": settings.overlap}
    _, parallel, loader = held.parallelize(
        model,
        made,
        data,
        plan={**plan, "offload": offload},
        precision=settings.precision if settings.precision != "fp32" else None,
        low_weights=settings.precision in ("fp16", "bf16"),
        loss_scale=settings.loss_scale,
        batch="rank",
        accumulate=settings.batch.accumulation,
    )
    training = parallel._training
    training.weight = float(settings.batch.accumulation * held.size)
    schedule = _scheduler(lr_scheduler, settings.schedule, parallel)
    engine = DeepSpeedEngine(held, training, settings, loader, schedule)
    return engine, parallel, loader, schedule


def _check(model: Any, config: Any, mpu: Any) -> None:
    findings = []
    if model is None:
        findings.append(Finding("initialize", "has no model", "Give model="))
    if config is None:
        findings.append(Finding("initialize", "has no config", "Give config=, or --deepspeed_config on the command line"))
    if mpu is not None:
        findings.append(Finding("initialize", "mpu is not available here", "Split the model by run.parallelize(plan=)"))
    if findings:
        raise ConfigError(findings=findings)


def _optimizer(given: Any, settings: OptimizerSettings | None, parameters: list[Any]) -> torch.optim.Optimizer:
    if isinstance(given, torch.optim.Optimizer):
        return given
    if given is not None:
        return given(parameters)
    assert settings is not None  # translate refuses a config without one
    if settings.kind == "sgd":
        options: dict[str, Any] = {
            "momentum": settings.momentum,
            "nesterov": settings.nesterov,
            "dampening": settings.dampening,
        }
        return torch.optim.SGD(parameters, lr=settings.lr, weight_decay=settings.weight_decay, **options)
    kind = torch.optim.Adam if settings.kind == "adam" else torch.optim.AdamW
    return kind(parameters, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)


def _loader(data: Any, settings: Settings, collate: Callable[..., Any] | None, seed: int) -> DataLoader | None:
    if data is None:
        return None
    stream = isinstance(data, torch.utils.data.IterableDataset)
    shuffle: dict[str, Any] = {} if stream else {"shuffle": True, "generator": torch.Generator().manual_seed(seed)}
    return DataLoader(data, batch_size=settings.batch.micro, collate_fn=collate, drop_last=settings.drop_last, **shuffle)


def _scheduler(given: Any, schedule: Schedule | None, optimizer: torch.optim.Optimizer) -> Any:
    if given is not None:
        return given(optimizer) if callable(given) and not hasattr(given, "step") else given
    return Scheduler(schedule, optimizer) if schedule is not None else None


class Scheduler:
    """A schedule of the config on an optimizer; `step()` after each optimizer step, which the engine calls."""

    def __init__(self, schedule: Schedule, optimizer: torch.optim.Optimizer):
        self.schedule, self.optimizer = schedule, optimizer
        self.last_batch_iteration = -1
        self._set()

    def step(self, last_batch_iteration: int | None = None) -> None:
        self.last_batch_iteration = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self._set()

    def _set(self) -> None:
        rate, betas = self.schedule.lr(self.last_batch_iteration), self.schedule.betas(self.last_batch_iteration)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
            if betas is not None and "betas" in group:
                group["betas"] = betas

    def get_lr(self) -> list[float]:
        return [self.schedule.lr(self.last_batch_iteration)] * len(self.optimizer.param_groups)

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.step(state["last_batch_iteration"])


class DeepSpeedEngine:
    """The first of what `initialize` returns. What it does not have itself is looked up in the module."""

    def __init__(self, run: Run, training: Training, settings: Settings, loader: Any, scheduler: Any):
        self.run, self.settings = run, settings
        self.module = training.model
        self.optimizer = training.optimizers[0]
        self.lr_scheduler, self.training_dataloader = scheduler, loader
        self.micro_steps = 0
        self.skipped_steps = 0
        self._training = training
        self._result: Any = None

    # ---- the loop

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.module.training and torch.is_grad_enabled():
            self._training.begin()
        return self.module(*args, **kwargs)

    forward = __call__

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backward of one micro-batch. loss: its mean, a scalar."""
        if retain_graph or not scale_wrt_gas:
            what = "retain_graph and scale_wrt_gas=False are not available here"
            raise ConfigError(findings=[Finding("engine.backward", what, "Add losses up before one backward")])
        self._training.begin()
        self._training.backward(loss, None, last=self.is_gradient_accumulation_boundary())
        return loss

    def step(self) -> None:
        """At the last micro-batch of a step: update and schedule, but not after an fp16 overflow; before it, only counts."""
        ends = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not ends:
            return
        self._result = self._training.update(self.settings.clip)
        if self._result.skipped is True:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step()
        if self.global_steps % self.settings.steps_per_print == 0:
            said = f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}"
            self.run.print(f"{said}, loss={float(self._result.loss):.6g}")

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self.settings.batch.accumulation == 0

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        self.module.train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: a step begins without gradients."""

    # ---- what scripts ask for

    @property
    def global_steps(self) -> int:
        return self._training.steps

    @property
    def global_samples(self) -> int:
        return self.global_steps * self.settings.batch.train

    @property
    def local_rank(self) -> int:
        return self.run.ranks.world.local_rank

    @property
    def global_rank(self) -> int:
        return self.run.rank

    @property
    def world_size(self) -> int:
        return self.run.size

    @property
    def device(self) -> torch.device:
        return self.run.device

    def train_batch_size(self) -> int:
        return self.settings.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.settings.batch.micro

    def gradient_accumulation_steps(self) -> int:
        return self.settings.batch.accumulation

    def gradient_clipping(self) -> float:
        return self.settings.clip

    def zero_optimization_stage(self) -> int:
        return self.settings.zero

    def zero_optimization(self) -> bool:
        return self.settings.zero > 0

    def fp16_enabled(self) -> bool:
        return self.settings.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self.settings.precision == "bf16"

    def loss_scale(self) -> float:
        return self._training.engine.loss_scale

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Of the last step, before clipping."""
        return None if self._result is None else float(self._result.grad_norm)

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # not set yet
            raise AttributeError(name)
        return getattr(self.module, name)

    # ---- checkpoints

    def save_checkpoint(
        self, save_dir: str | Path, tag: str | None = None, client_state: Mapping[str, Any] | None = None, **more: Any
    ) -> bool:
        """Every rank must call it. client_state: JSON values. The folder holds checkpoints of this program, not DeepSpeed's."""
        _refuse_options("save_checkpoint", more, {"save_latest": True, "exclude_frozen_parameters": False})
        kept = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        counts = {"micro_steps": self.micro_steps, "skipped_steps": self.skipped_steps}
        extra = {"client": dict(client_state or {}), "engine": counts, "scheduler": kept}
        self.run.save(save_dir, extra, keep=EVERY, tag=tag or f"global_step{self.global_steps}")
        return True

    def load_checkpoint(self, load_dir: str | Path, tag: str | None = None, **more: Any) -> tuple[str | None, dict[str, Any]]:
        """(folder, client_state); (None, {}) where there is no checkpoint. Every rank must call it."""
        known = {"load_module_strict": True, "load_optimizer_states": True, "load_lr_scheduler_states": True}
        _refuse_options("load_checkpoint", more, {**known, "load_module_only": False})
        try:
            extra = self.run.load(load_dir, tag=tag)
        except CheckpointError as error:
            if "no whole checkpoint" not in str(error):
                raise
            self.run.print(f"warning: {error}")
            return None, {}
        if self.lr_scheduler is not None and extra.get("scheduler") is not None:
            self.lr_scheduler.load_state_dict(extra["scheduler"])
        counts = extra.get("engine", {})
        self.micro_steps, self.skipped_steps = counts.get("micro_steps", 0), counts.get("skipped_steps", 0)
        return str(load_dir), dict(extra.get("client", {}))


def _refuse_options(what: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    findings = [
        Finding(f"engine.{what}", f"{name}={value!r} is not available here", "Leave it out")
        for name, value in given.items()
        if name not in known or value != known[name]
    ]
    if findings:
        raise ConfigError(findings=findings)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(
        f"meshwright's stand-in for DeepSpeed has no {name!r}: it has initialize, init_distributed and add_config_arguments"
    )
