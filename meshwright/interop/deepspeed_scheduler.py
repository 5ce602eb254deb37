"""The scheduler section of a DeepSpeed config, whose rates depend on the optimizer's."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.interop import deepspeed_keys as keys
from meshwright.interop.deepspeed_reader import AUTO, Reader
from meshwright.interop.deepspeed_schedule import OneCycle, Schedule, Warmup

__all__ = ["OptimizerSettings", "ScheduleReader"]


@dataclass(frozen=True)
class OptimizerSettings:
    """kind: "adamw", "adam" (decay joins the gradient) or "sgd"."""

    kind: str
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    dampening: float = 0.0


class ScheduleReader(Reader):
    """Reads it."""

    def schedule(self, data: Mapping[str, Any], optimizer: OptimizerSettings | None) -> Schedule | None:
        section = self.section(data, "scheduler")
        kind = section.get("type")
        if kind is None:
            return None
        self.unknown(section, ("type", "params"), "scheduler.")
        if not isinstance(kind, str) or kind not in keys.SCHEDULERS:
            near = difflib.get_close_matches(str(kind), keys.SCHEDULERS, n=1, cutoff=0.6)
            fix = f"Did you mean {near[0]!r}?" if near else f"Use one of {', '.join(keys.SCHEDULERS)}"
            self.refuse("scheduler.type", f"{kind!r} is not available here", fix)
            return None
        params = self.section(section, "params", "scheduler.")
        self.unknown(params, keys.SCHEDULERS[kind], "scheduler.params.")
        if self.whole(params, "last_batch_iteration", -1, key="scheduler.params.last_batch_iteration") != -1:
            self.refuse("scheduler.params.last_batch_iteration", "is set by a checkpoint here", "Leave it out")
        return self._one_cycle(params) if kind == "OneCycle" else self._warmup(kind, params, optimizer)

    def _warmup(self, kind: str, params: Mapping[str, Any], optimizer: OptimizerSettings | None) -> Warmup:
        def number(name: str, default: Any, argument: str = "") -> Any:
            return self.number(params, name, default, key=f"scheduler.params.{name}", argument=argument)

        rate = optimizer.lr if optimizer is not None else float(self.arguments.get("lr", 1e-3))
        warmup = self.whole(params, "warmup_num_steps", 1000, key="scheduler.params.warmup_num_steps", argument="warmup", low=0)
        log = str(params.get("warmup_type", "log"))
        if log not in ("log", "linear"):
            self.refuse("scheduler.params.warmup_type", f"{log!r} is none of log, linear")
        total = 0
        if kind != "WarmupLR":
            given = self.whole(params, "total_num_steps", None, key="scheduler.params.total_num_steps", argument="total", low=1)
            if given is None and params.get("total_num_steps") != AUTO:
                self.refuse("scheduler.params.total_num_steps", f"is needed by {kind}")
            total = given or 1
            if given is not None and given < warmup:
                self.warn("scheduler.params.total_num_steps", f"{given} is less than the warm-up of {warmup} steps")
        length = max(2, warmup)
        if kind == "WarmupCosineLR":
            low = float(number("warmup_min_ratio", 0.0)) * rate
            return Warmup("cosine", low, rate, length, log == "log", total, float(number("cos_min_ratio", 1e-4)))
        if "warmup_max_lr" not in params:
            what = f"is not given: the optimizer's lr {rate:g} is taken, as current DeepSpeed does; older releases took 0.001"
            self.warn("scheduler.params.warmup_max_lr", what)
        low = number("warmup_min_lr", 0.0, "warmup_min_lr") if params.get("warmup_min_lr") != AUTO else self._auto_low()
        high = number("warmup_max_lr", rate, "lr")
        return Warmup("decay" if kind == "WarmupDecayLR" else "constant", float(low), float(high), length, log == "log", total)

    def _auto_low(self) -> float:
        """Hugging Face's trainer writes 0 for an "auto" lowest rate; without its other numbers nothing is filled."""
        if "lr" not in self.arguments:
            self.unresolved.append("scheduler.params.warmup_min_lr")
        return 0.0

    def _one_cycle(self, params: Mapping[str, Any]) -> OneCycle:
        def value(name: str, default: Any, whole: bool = False) -> Any:
            read = self.whole if whole else self.number
            return read(params, name, default, key=f"scheduler.params.{name}", low=0)

        for name in ("cycle_min_lr", "cycle_max_lr"):
            if name not in params:
                self.refuse(f"scheduler.params.{name}", "is needed by OneCycle")
        first = value("cycle_first_step_size", 2000, whole=True) or 1
        stairs = value("cycle_first_stair_count", 0, whole=True)
        return OneCycle(
            low=float(value("cycle_min_lr", 0.0)),
            high=float(value("cycle_max_lr", 0.0)),
            first=first,
            second=value("cycle_second_step_size", first, whole=True) or 1,
            first_stairs=stairs,
            second_stairs=value("cycle_second_stair_count", stairs, whole=True),
            decay_step=value("decay_step_size", 0, whole=True),
            decay_rate=float(value("decay_lr_rate", 0.0)),
            cycle_momentum=bool(self.flag(params, "cycle_momentum", True, "scheduler.params.cycle_momentum")),
            low_momentum=float(value("cycle_min_mom", 0.8)),
            high_momentum=float(value("cycle_max_mom", 0.9)),
            momentum_decay=float(value("decay_mom_rate", 0.0)),
        )
