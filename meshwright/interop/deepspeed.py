"""A DeepSpeed config (`ds_config.json`) as settings of ours, with what was found in it.

    settings = translate("ds_config.json", ranks=8)
    for warning in settings.warnings: ...

What contradicts itself, has a wrong type, or asks for something that is not here is refused, all of it at once. What DeepSpeed
itself would leave without effect in silence is a warning. "auto" values are filled from `arguments`, as Hugging Face's trainer
fills them from its own, or refused by name.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.config.schema import LossScaleConfig
from meshwright.errors import ConfigError, Finding
from meshwright.interop import deepspeed_keys as keys
from meshwright.interop.deepspeed_reader import AUTO
from meshwright.interop.deepspeed_schedule import Schedule
from meshwright.interop.deepspeed_scheduler import OptimizerSettings, ScheduleReader
from meshwright.interop.relaxed_json import parse

__all__ = ["Batch", "OptimizerSettings", "Settings", "translate"]

MIB = 2**20
REDUCE_BYTES = 4
"""Gradients are summed in fp32."""
LARGEST_POWER = 127
"""Of 2, that fp32 has, in which losses are scaled."""


@dataclass(frozen=True)
class Batch:
    """train = micro * accumulation * ranks rows a step."""

    train: int
    micro: int
    accumulation: int


@dataclass(frozen=True)
class Settings:
    """What a config says. offload: as in `Plan`. bucket_mib: gradients reduced together. clip: 0 is off. warnings: what does
    not do what its writer may believe. without_effect: keys that change nothing that is computed, and nothing here."""

    ranks: int
    batch: Batch
    zero: int
    precision: str
    loss_scale: LossScaleConfig
    clip: float
    offload: str
    bucket_mib: int
    overlap: bool
    optimizer: OptimizerSettings | None
    schedule: Schedule | None
    steps_per_print: int
    drop_last: bool
    warnings: tuple[Finding, ...] = ()
    without_effect: tuple[str, ...] = ()

    def lr(self, step: int) -> float:
        """Learning rate of optimizer step `step`, from 0. Steps that were skipped do not count."""
        if self.schedule is not None:
            return self.schedule.lr(step - 1)
        return self.optimizer.lr if self.optimizer is not None else 0.0


def translate(
    config: str | Path | Mapping[str, Any],
    *,
    ranks: int,
    arguments: Mapping[str, Any] | None = None,
    own_optimizer: bool = False,
) -> Settings:
    """config: a file, its text, or what it holds. ranks: that see different rows. own_optimizer: the script brings one.

    arguments: what fills "auto" and what is absent: micro, accumulation, train, lr, betas, eps, weight_decay, warmup, total,
    clip, optimizer (a name). Raises ConfigError with every finding.
    """
    data, where = _read(config)
    reader = _Sections(where, dict(arguments or {}))
    if not isinstance(data, Mapping):
        raise ConfigError(findings=[Finding(where, f"is no JSON object but {type(data).__name__}")])
    reader.top(data)
    batch = reader.batch(data, ranks)
    precision, scale = reader.precision(data)
    zero = reader.zero(data)
    optimizer = reader.optimizer(data, own_optimizer)
    schedule = reader.schedule(data, optimizer)
    clip = reader.number(data, "gradient_clipping", 0.0, argument="clip", low=0.0)
    settings: dict[str, Any] = {"steps_per_print": reader.whole(data, "steps_per_print", 10, low=1)}
    settings["drop_last"] = reader.flag(data, "dataloader_drop_last", False)
    reader.raise_findings()
    assert batch is not None  # else there was a finding
    return Settings(
        ranks=ranks,
        batch=batch,
        precision=precision,
        loss_scale=scale,
        clip=clip,
        optimizer=optimizer,
        schedule=schedule,
        warnings=tuple(reader.warnings),
        without_effect=tuple(reader.dead),
        **zero,
        **settings,
    )


def _read(config: str | Path | Mapping[str, Any]) -> tuple[Any, str]:
    if isinstance(config, Mapping):
        return config, "ds_config"
    text = str(config)
    if isinstance(config, str) and text.lstrip().startswith(("{", "#", "//", "/*")) and not os.path.exists(text):
        return parse(text, "ds_config"), "ds_config"
    try:
        return parse(Path(text).read_text(encoding="utf-8"), text), text
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(findings=[Finding(text, what)]) from None


class _Sections(ScheduleReader):
    """The sections of a config, one after another."""

    def top(self, data: Mapping[str, Any]) -> None:
        self.unknown(data, keys.TOP_USED | keys.TOP_PLAIN | keys.TOP_FEATURES, "", strict=False)
        self.dead += [name for name in data if name in keys.TOP_PLAIN]
        for name in sorted(keys.TOP_FEATURES & data.keys()):
            value = data[name]
            on = value.get("enabled", True) if isinstance(value, Mapping) and value else value
            if on is True or on not in (0, 1, None, {}, []):
                self.refuse(name, "is not available here", "Leave it out, or set its enabled to false")
            else:
                self.dead.append(name)
        amp = self.section(data, "amp")
        if self.flag(amp, "enabled", False, "amp.enabled"):
            self.refuse("amp.enabled", "Apex AMP is not available here", "Use fp16 or bf16")

    def batch(self, data: Mapping[str, Any], ranks: int) -> Batch | None:
        """A missing one of the three follows by floor division, then they must fit."""
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        before = len(self.findings) + len(self.unresolved)
        train, micro, accum = (
            self._batch_value(data, name, argument)
            for name, argument in zip(names, ("train", "micro", "accumulation"), strict=True)
        )
        if len(self.findings) + len(self.unresolved) > before:
            return None
        given = (train, micro, accum)
        if train is None and micro is None:
            what = "neither is given" + ("" if accum is None else f" ({names[2]} alone says no batch)")
            self.refuse(f"{names[0]}, {names[1]}", what, "Give one of them")
            return None
        if train is None:
            assert micro is not None  # one of the two is there
            accum = accum or 1
            train = micro * accum * ranks
        elif micro is None:
            accum = accum or 1
            micro = train // ranks // accum
        elif accum is None:
            accum = train // micro // ranks
        assert micro is not None  # it was given, or has followed
        if train != micro * accum * ranks or not micro or not accum:
            self._refuse_batch(names, given, ranks)
            return None
        return Batch(train, micro, accum)

    def _batch_value(self, data: Mapping[str, Any], name: str, argument: str) -> int | None:
        """A batch key that is "auto" may follow from the two others, where arguments gave those."""
        if data.get(name) == AUTO and argument not in self.arguments:
            known = {"train": "micro", "micro": "train", "accumulation": "micro"}[argument]
            if known in self.arguments:
                return None
        value = self.whole(data, name, None, argument=argument, low=1)
        return None if value is None else int(value)

    def _refuse_batch(self, names: tuple[str, ...], given: tuple[int | None, ...], ranks: int) -> None:
        train, micro, accum = given
        if train is not None and micro is not None and accum is not None:
            product = f"{micro}*{accum}*{ranks}"
            what = f"{product} != {train} ({names[1]} * {names[2]} * ranks, {names[0]})"
            fit = train // (micro * accum)
            fix = (
                f"Start {fit} ranks, or change one of the three" if fit * micro * accum == train else "Change one of the three"
            )
        else:
            parts = " * ".join(str(value) for value in (micro, accum) if value is not None)
            what = f"{train} rows do not divide into {ranks} ranks" + (f" * {parts}" if parts else "")
            fix = "Change one of them, or the number of ranks"
        self.refuse(names[0], what, fix)

    def precision(self, data: Mapping[str, Any]) -> tuple[str, LossScaleConfig]:
        fp16 = self.section(data, "fp16")
        bf16 = self.section(data, "bf16")
        old = self.section(data, "bfloat16")
        if "bf16" in data and "bfloat16" in data and dict(bf16) != dict(old):
            what = "both are there, with different values; DeepSpeed takes bf16 in silence"
            self.refuse("bf16, bfloat16", what, "Keep bf16")
        name = "bf16" if "bf16" in data else "bfloat16"
        bf16 = bf16 if "bf16" in data else old
        for key in [key for key in bf16 if key in keys.FP16 and key not in keys.BF16]:
            self.warn(f"{name}.{key}", "is ignored: bf16 needs no loss scale, and current DeepSpeed refuses it", "Leave it out")
        self.unknown({k: v for k, v in bf16.items() if k not in keys.FP16}, keys.BF16, f"{name}.")
        self.unknown(fp16, keys.FP16, "fp16.")
        half = self.flag(fp16, "enabled", False, "fp16.enabled")
        brain = self.flag(bf16, "enabled", False, f"{name}.enabled")
        if half and brain:
            self.refuse("fp16, bf16", "both are enabled", "Keep one")
        for switch in ("fp16_master_weights_and_grads", "consecutive_hysteresis"):
            if half and self.flag(fp16, switch, False, f"fp16.{switch}"):
                self.refuse(f"fp16.{switch}", "true is not available here", "Leave it out")
        scale = self.number(fp16, "loss_scale", 0.0, key="fp16.loss_scale", low=0.0, high=2.0**LARGEST_POWER)
        power = self.number(fp16, "initial_scale_power", 16, key="fp16.initial_scale_power", low=0.0, high=LARGEST_POWER)
        floor = self.number(fp16, "min_loss_scale", 1.0, key="fp16.min_loss_scale")
        made = LossScaleConfig(
            initial=float(scale) if scale else 2.0 ** float(power),
            static=bool(scale),
            interval=self.whole(fp16, "loss_scale_window", 1000, key="fp16.loss_scale_window", low=1),
            hysteresis=self.whole(fp16, "hysteresis", 2, key="fp16.hysteresis", low=1),
            floor=float(floor) if floor and floor > 0 else 1.0,
        )
        return "fp16" if half else "bf16" if brain else "fp32", made

    def zero(self, data: Mapping[str, Any]) -> dict[str, Any]:
        section = {} if isinstance(data.get("zero_optimization"), bool) else self.section(data, "zero_optimization")
        stage = int(data["zero_optimization"]) if isinstance(data.get("zero_optimization"), bool) else None
        self.unknown(section, keys.ZERO, "zero_optimization.")
        if stage is None:
            stage = self.whole(section, "stage", 0, key="zero_optimization.stage", low=0)
            if stage > 3:
                self.refuse("zero_optimization.stage", f"{stage} is not a stage", "Use 0, 1, 2 or 3")
        for name in sorted(section.keys() & keys.ONLY_STAGE3):
            value = section[name]
            off = name in ("offload_param", "cpu_offload_param", "cpu_offload_params") and _is_off(value)
            if stage < 3 and not off:
                self.warn(f"zero_optimization.{name}", f"has no effect: it is for stage 3, and the stage is {stage}")
            elif name not in ("offload_param", "cpu_offload_param", "cpu_offload_params"):
                self.dead.append(f"zero_optimization.{name}")
        for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
            if self.flag(section, name, False, f"zero_optimization.{name}"):
                self.refuse(f"zero_optimization.{name}", "true is not available here", "Leave it out")
        for name, neutral in (("zero_hpz_partition_size", 1), ("mics_shard_size", -1)):
            if self.whole(section, name, neutral, key=f"zero_optimization.{name}") not in (neutral, 0):
                self.refuse(f"zero_optimization.{name}", f"{section[name]} is not available here", "Leave it out")
        elements = self.whole(
            section, "reduce_bucket_size", 500_000_000, key="zero_optimization.reduce_bucket_size", low=1, spare=True
        )
        return {
            "zero": stage,
            "offload": self.offload(section, stage),
            "bucket_mib": max(1, min(2**30, round(elements * REDUCE_BYTES / MIB))),
            "overlap": bool(self.flag(section, "overlap_comm", stage == 3, "zero_optimization.overlap_comm")),
        }

    def offload(self, section: Mapping[str, Any], stage: int) -> str:
        old = {"offload_optimizer": ("cpu_offload",), "offload_param": ("cpu_offload_param", "cpu_offload_params")}
        device, nvme = {}, []
        for name, before in old.items():
            given = [each for each in before if self.flag(section, each, False, f"zero_optimization.{each}")]
            block = self.section(section, name, "zero_optimization.")
            if given and name in section:
                self.refuse(f"zero_optimization.{given[0]}, {name}", "both are there, and mean the same", f"Keep {name}")
            self.unknown(block, keys.OFFLOAD, f"zero_optimization.{name}.")
            device[name] = "cpu" if given else str(block.get("device", "none"))
            if device[name] == "nvme":
                nvme.append(name)
            elif device[name] not in ("cpu", "none"):
                self.refuse(f"zero_optimization.{name}.device", f"{device[name]!r} is none of cpu, none")
        if nvme:
            where = ", ".join(f"zero_optimization.{name}.device" for name in nvme)
            self.refuse(where, "nvme is not available here", "Use cpu, or none")
        if block := self.section(section, "offload_optimizer"):
            ratio = self.number(block, "ratio", 1.0, key="zero_optimization.offload_optimizer.ratio")
            if ratio != 1.0:
                self.refuse("zero_optimization.offload_optimizer.ratio", f"{ratio} is not available here", "Use 1.0")
        if stage == 0 and device["offload_optimizer"] == "cpu":
            self.warn("zero_optimization.offload_optimizer", "has no effect in DeepSpeed at stage 0; here it has")
        if stage == 3 and device["offload_param"] == "cpu":
            return "parameters"
        return "optimizer" if device["offload_optimizer"] == "cpu" else "none"

    def optimizer(self, data: Mapping[str, Any], own: bool) -> OptimizerSettings | None:
        section = self.section(data, "optimizer")
        kind = section.get("type") or self.arguments.get("optimizer")
        if kind is None:
            if not own:
                self.refuse("optimizer", "there is none", "Add one, or let the script bring it")
            return None
        self.unknown(section, ("type", "params", "legacy_fusion"), "optimizer.")
        params = self.section(section, "params", "optimizer.")
        kind = {name.lower(): name for name in keys.OPTIMIZER}.get(str(kind).lower(), str(kind))
        if kind not in keys.OPTIMIZER:
            near = difflib.get_close_matches(kind, keys.OPTIMIZER, n=1, cutoff=0.7)
            fix = (
                f"Did you mean {near[0]!r}?" if near else f"Use one of {', '.join(keys.OPTIMIZER)}, or let the script bring it"
            )
            self.refuse("optimizer.type", f"{kind!r} is not available here", fix)
            return None
        if "max_grad_norm" in params:
            self.refuse("optimizer.params.max_grad_norm", "is no setting of an optimizer", "Use gradient_clipping")
        self.unknown({k: v for k, v in params.items() if k != "max_grad_norm"}, keys.OPTIMIZER[kind], "optimizer.params.")
        return self._optimizer(kind, params)

    def _optimizer(self, kind: str, params: Mapping[str, Any]) -> OptimizerSettings:
        def number(name: str, default: float) -> float:
            return float(self.number(params, name, default, key=f"optimizer.params.{name}", argument=name, low=0.0))

        def off(name: str, neutral: bool) -> None:
            if self.flag(params, name, neutral, f"optimizer.params.{name}") is not neutral:
                self.refuse(f"optimizer.params.{name}", f"{params[name]!r} is not available here", "Leave it out")

        if "lr" not in params and "lr" not in self.arguments:
            self.warn("optimizer.params.lr", "is not given; 0.001 is taken")
        lr, decay = number("lr", 1e-3), number("weight_decay", 0.0)
        if kind == "SGD":
            nesterov = self.flag(params, "nesterov", False, "optimizer.params.nesterov")
            momentum, dampening = number("momentum", 0.0), number("dampening", 0.0)
            if nesterov and (not momentum or dampening):
                what = f"needs a momentum and no dampening, and they are {momentum:g} and {dampening:g}"
                self.refuse("optimizer.params.nesterov", what)
            return OptimizerSettings("sgd", lr, weight_decay=decay, momentum=momentum, nesterov=nesterov, dampening=dampening)
        off("bias_correction", True)
        off("amsgrad", False)
        plain = kind == "Adam" and not self.flag(params, "adam_w_mode", True, "optimizer.params.adam_w_mode")
        self.dead += [f"optimizer.params.{name}" for name in ("torch_adam", "set_grad_none") if name in params]
        betas = params.get("betas", (0.9, 0.999))
        betas = self.arguments.get("betas", (0.9, 0.999)) if betas == AUTO else betas
        if not isinstance(betas, list | tuple) or len(betas) != 2 or not all(_is_share(each) for each in betas):
            self.refuse("optimizer.params.betas", f"{betas!r} are not two numbers of at least 0 and below 1")
            betas = (0.9, 0.999)
        eps = number("eps", 1e-8)
        return OptimizerSettings("adam" if plain else "adamw", lr, (float(betas[0]), float(betas[1])), eps, decay)


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def _is_off(value: Any) -> bool:
    return not value or (isinstance(value, Mapping) and value.get("device", "none") == "none")
