"""A user's own torch optimizers on the flat buffers: their groups, their settings at each update, one pass a range.

The parameters of one group of one optimizer share flat groups (`Kind.label`), so that each range has one set of settings,
which is read from the optimizer's `param_groups` when it is updated: what a scheduler wrote there counts. A range gets

    AdamW; Adam without weight decay     the fused kernel of `kernels.adamw`
    SGD without dampening and nesterov   the fused kernel
    other elementwise optimizers         their own `step`, on each range as one 1-d parameter (ELEMENTWISE, or declared so)
    all others                           refused: what they do to a matrix cannot be done to a piece of it
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.config.schema import OptimizerConfig
from meshwright.errors import ConfigError, Finding
from meshwright.kernels.adamw import adamw_, sgd_
from meshwright.parallel.buffers import Range
from meshwright.parallel.flat import FlatParameters
from meshwright.parallel.optimizer import FlatOptimizer

__all__ = ["ELEMENTWISE", "Labels", "OwnOptimizer"]

ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""Optimizers of torch that treat each element by itself, so that a piece of a parameter gets what it would get in the whole."""


@dataclass(frozen=True)
class Labels:
    """Groups of all optimizers, numbered through: group `label` is `groups[label]` of optimizer `owner[label]`."""

    optimizers: tuple[torch.optim.Optimizer, ...]
    groups: tuple[dict[str, Any], ...] = field(init=False)
    owner: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        pairs = [(number, group) for number, each in enumerate(self.optimizers) for group in each.param_groups]
        object.__setattr__(self, "owner", tuple(number for number, _ in pairs))
        object.__setattr__(self, "groups", tuple(group for _, group in pairs))

    def by_parameter(self) -> dict[int, int]:
        """Label by the id of the parameter. Raises ConfigError for one that several groups hold."""
        found: dict[int, int] = {}
        for label, group in enumerate(self.groups):
            for parameter in group["params"]:
                if found.setdefault(id(parameter), label) != label:
                    what = f"a parameter of shape {tuple(parameter.shape)} is in two groups or two optimizers"
                    raise ConfigError(findings=[Finding("optimizer", what, "Give each parameter to one")])
        return found


def rule_of(optimizer: torch.optim.Optimizer, elementwise: bool) -> str:
    """ "adamw", "sgd" or "torch": how its ranges are updated. Raises ConfigError for what cannot be done in pieces."""
    kind, groups = type(optimizer), optimizer.param_groups
    ours = kind.__module__.startswith("torch.optim")
    plain = not any(group.get("maximize") or group.get("amsgrad") for group in groups)
    decoupled = all(group.get("decoupled_weight_decay") or not group.get("weight_decay") for group in groups)
    if ours and plain and (kind.__name__ == "AdamW" or (kind.__name__ == "Adam" and decoupled)):
        return "adamw"
    if ours and plain and kind.__name__ == "SGD" and not any(g["dampening"] or g["nesterov"] for g in groups):
        return "sgd"
    if elementwise or (ours and kind.__name__ in ELEMENTWISE):
        return "torch"
    fix = f"Use one of {', '.join(ELEMENTWISE)}"
    if not ours:
        fix += ", or say elementwise=True if it treats each element of a parameter by itself"
    what = f"{kind.__module__}.{kind.__name__} may need a parameter as a whole, of which a rank may hold a piece"
    raise ConfigError(findings=[Finding("optimizer", what, fix)])


class OwnOptimizer(FlatOptimizer):
    """labels: whose settings count. elementwise: the user says that optimizers unknown to us are.

    active: numbers of the optimizers that the next update is for; the ranges of others stay as they are, bit for bit.
    Raises ConfigError for optimizers that cannot be run here, and for one that has made steps already.
    """

    def __init__(self, labels: Labels, parameters: FlatParameters, elementwise: bool = False):
        self.labels = labels
        super().__init__(OptimizerConfig(kind="sgd"), parameters)  # which keeps no moments
        self.active = tuple(range(len(labels.optimizers)))
        self._rules = [rule_of(optimizer, elementwise) for optimizer in labels.optimizers]
        self._refuse_state()
        self._steps = [torch.zeros_like(self._updates) for _ in labels.optimizers]
        self._shadows: dict[int, tuple[torch.optim.Optimizer, nn.Parameter]] = {}
        """By number of the range: the user's kind of optimizer on it."""
        self.moments = [self._fresh(number, part) for number, part in enumerate(parameters.ranges)]

    def _refuse_state(self) -> None:
        used = [each for each in self.labels.optimizers if any(_counted(state) for state in each.state.values())]
        if used:
            what = f"{type(used[0]).__name__} has made steps already, and its state would be lost"
            fix = "Parallelize first, then load_state_dict(...) into the optimizer that comes back"
            raise ConfigError(findings=[Finding("optimizer", what, fix)])

    def _fresh(self, number: int, part: Range) -> dict[str, torch.Tensor]:
        owner = self.labels.owner[part.label]
        if self._rules[owner] == "adamw":
            return {"exp_avg": part.buffer(), "exp_avg_sq": part.buffer()}
        if self._rules[owner] == "sgd":
            return {"momentum": part.buffer()} if self.labels.groups[part.label]["momentum"] else {}
        flat = nn.Parameter(part.master, requires_grad=False)
        self._shadows[number] = (_shadow(self.labels.optimizers[owner], self.labels.groups[part.label], flat), flat)
        return self._kept(number)

    def _kept(self, number: int) -> dict[str, torch.Tensor]:
        """What torch's optimizer keeps of a range, element by element."""
        optimizer, flat = self._shadows[number]
        state = optimizer.state.get(flat, {})
        return {name: value for name, value in state.items() if _like(value, flat)}

    def step(self, lr: float, scale: torch.Tensor, skip: torch.Tensor) -> None:
        """One update of the ranges of the active optimizers from gradient * scale; `lr` is not looked at."""
        skip, scale = skip.to(self._updates.device), scale.to(self._updates.device)  # offloaded: waits for the device
        self.parameters.settle()
        counts = [count + 1 for count in self._steps]
        for number, part in enumerate(self.parameters.ranges):
            owner = self.labels.owner[part.label]
            if owner not in self.active:
                self.parameters.publish(part)  # nothing new, but every rank's pieces are published in one order
                continue
            if self._rules[owner] == "torch":
                self._run_torch(number, part, scale, skip)
            elif self._stage is None:
                working = part.working if part.mixed else None
                self._run(part, part.master, part.gradient, self.moments[number], working, counts[owner], scale, skip)
            elif not bool(skip):
                for span, gradient, working in self._stage.windows(part):
                    mine = {name: moment[span] for name, moment in self.moments[number].items()}
                    self._run(part, part.master[span], gradient, mine, working, counts[owner], scale, skip)
            self.parameters.publish(part)
        self._updates += ~skip
        for owner in self.active:
            self._steps[owner] += ~skip

    def _run(
        self,
        part: Range,
        master: torch.Tensor,
        gradient: torch.Tensor,
        moments: Mapping[str, torch.Tensor],
        working: torch.Tensor | None,
        count: torch.Tensor,
        scale: torch.Tensor,
        skip: torch.Tensor,
    ) -> None:
        group = self.labels.groups[part.label]
        optimizer = self.labels.optimizers[self.labels.owner[part.label]]
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        if self._rules[self.labels.owner[part.label]] == "adamw":
            if decay and type(optimizer).__name__ == "Adam" and not group.get("decoupled_weight_decay"):
                what = f"weight_decay became {decay:g} after parallelize"
                raise ConfigError(findings=[Finding("optimizer", f"Adam: {what}", "Set it before, or use AdamW")])
            beta1, beta2 = map(float, group["betas"])
            kept = moments["exp_avg"], moments["exp_avg_sq"]
            options: dict[str, Any] = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": group["eps"], "step": count}
            adamw_(master, gradient, *kept, weight_decay=decay, grad_scale=scale, working=working, skip=skip, **options)
            return
        options = {"lr": lr, "momentum": float(group["momentum"]), "weight_decay": decay}
        sgd_(master, gradient, moments.get("momentum"), grad_scale=scale, working=working, skip=skip, **options)

    def _run_torch(self, number: int, part: Range, scale: torch.Tensor, skip: torch.Tensor) -> None:
        optimizer, flat = self._shadows[number]
        if bool(skip):
            return
        _copy_settings(self.labels.groups[part.label], optimizer.param_groups[0])
        flat.grad = part.gradient.to(flat.device, flat.dtype) * scale.to(flat.dtype)
        optimizer.step()
        flat.grad = None
        self.moments[number] = self._kept(number)
        if part.mixed:
            part.working.copy_(part.master)

    # ---- state beside the tensors

    def state(self) -> dict[str, Any]:
        """JSON values: updates of each optimizer, and by label the numbers that torch's own optimizers count."""
        scalars: dict[str, dict[str, float]] = {}
        for number, part in enumerate(self.parameters.ranges):
            if number in self._shadows:
                optimizer, flat = self._shadows[number]
                kept = optimizer.state.get(flat, {})
                numbers = {name: float(value) for name, value in kept.items() if not _like(value, flat)}
                scalars.setdefault(str(part.label), numbers)
        return {"steps": [int(count) for count in self._steps], "scalars": scalars}

    def prepare_load(self, state: Mapping[str, Any]) -> None:
        """Before the moments of a checkpoint are taken: makes those that torch's own optimizers have not made yet, and takes
        `state`."""
        for count, value in zip(self._steps, state["steps"], strict=True):
            count.fill_(value)
        for number, part in enumerate(self.parameters.ranges):
            kept = state["scalars"].get(str(part.label), {})
            if number not in self._shadows or not state["steps"][self.labels.owner[part.label]]:
                continue
            self._prime(number, kept)
            optimizer, flat = self._shadows[number]
            for name, value in kept.items():
                old = optimizer.state[flat].get(name)
                if isinstance(old, torch.Tensor):
                    old.fill_(value)
                else:
                    optimizer.state[flat][name] = type(old)(value) if old is not None else value
            self.moments[number] = self._kept(number)

    def _prime(self, number: int, known: Mapping[str, Any]) -> None:
        """One step from no gradient, so that torch's optimizer makes its state, where it has none; the weights are put back."""
        optimizer, flat = self._shadows[number]
        if any(_like(value, flat) or name in known for name, value in optimizer.state[flat].items()):
            return
        before = flat.detach().clone()
        flat.grad = torch.zeros_like(flat)
        optimizer.step()
        flat.grad = None
        flat.data.copy_(before)

    def set_steps(self, owner: int, steps: int) -> None:
        """The number of updates that optimizer `owner` has made."""
        self._steps[owner].fill_(steps)

    def take(self, owner: int, values: Callable[[nn.Parameter], Mapping[str, Any] | None]) -> None:
        """Moments in torch's own form: of a parameter, the state that a torch optimizer keeps of it ("exp_avg", "step", ...).

        Raises ConfigError where the parameters of an optimizer have made different numbers of steps.
        """
        names = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum": "momentum_buffer"}
        steps = set()
        for number, part in enumerate(self.parameters.ranges):
            if self.labels.owner[part.label] != owner:
                continue
            given = [(run, state) for run in part.runs() if (state := values(run.slot.parameter))]
            if given and number in self._shadows:
                self._take_numbers(number, given[0][1])
            for run, state in given:
                steps.add(int(state.get("step", 0)))
                for name, buffer in self.moments[number].items():
                    whole = state.get(names.get(name, name))
                    if whole is not None:
                        run.of(buffer).copy_(whole.reshape(-1)[run.first : run.first + run.size])
        if len(steps) > 1:
            what = f"its parameters have made {' and '.join(map(str, sorted(steps)))} steps"
            raise ConfigError(findings=[Finding("optimizer state", what, "Parameters of one optimizer step together here")])
        for step in steps:
            self._steps[owner].fill_(step)

    def _take_numbers(self, number: int, given: Mapping[str, Any]) -> None:
        """Makes the state that torch's optimizer has not made yet, with what it counts of a parameter."""
        self._prime(number, {})
        optimizer, flat = self._shadows[number]
        for name, old in optimizer.state[flat].items():
            if isinstance(old, torch.Tensor) and not _like(old, flat) and given.get(name) is not None:
                old.fill_(float(given[name]))
        self.moments[number] = self._kept(number)


def _like(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == flat.shape


def _counted(state: Mapping[str, Any]) -> bool:
    """Whether a parameter's state is that of an optimizer which has made a step."""
    return float(state.get("step", 0)) > 0 or state.get("momentum_buffer") is not None


def _copy_settings(source: Mapping[str, Any], target: dict[str, Any]) -> None:
    target.update({key: value for key, value in source.items() if key not in ("params", "param_names")})


def _shadow(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], flat: nn.Parameter) -> torch.optim.Optimizer:
    """The same kind of optimizer with the same settings on one flat parameter."""
    known: Sequence[str] = list(inspect.signature(type(optimizer).__init__).parameters)
    settings = {key: value for key, value in group.items() if key in known and key != "params"}
    made = type(optimizer)([flat], **settings)
    _copy_settings(group, made.param_groups[0])
    return made
