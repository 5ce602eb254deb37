"""What a script has in place of its optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from meshwright.errors import ConfigError, Finding

if TYPE_CHECKING:
    from meshwright.runtime.training import Training

__all__ = ["ParallelOptimizer"]


class ParallelOptimizer(torch.optim.Optimizer):
    """What a script has in place of its optimizer. It shares the `param_groups` of it: schedulers and scripts that change a
    learning rate there, in either of the two, change that of the next update.

    `step()` ends the step of the run as `run.update()` does; with several optimizers, that of the last one. `state_dict()`
    has the settings and the number of steps; moments lie in pieces on the ranks, and are saved by `run.save`.
    `load_state_dict` takes that, or the state of a torch optimizer on one device with its moments.
    """

    def __init__(self, original: torch.optim.Optimizer, training: Training, number: int):
        self._training, self._number = training, number
        super().__init__(original.param_groups, original.defaults)

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise ConfigError(findings=[Finding("optimizer.step", "takes no closure", "Use run.step(batch, loss_fn)")])
        return self._training.step_of(self._number)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: a step begins without gradients, and its micro-batches add up until the update."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._training.optimizers:
            what = "cannot take another group of parameters: the memory for the model is laid out"
            raise ConfigError(findings=[Finding("optimizer", what, "Add it before run.parallelize")])
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        groups = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in self.param_groups]
        return {"step": self._training.own.state()["steps"][self._number], "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            what = f"has {len(groups)} groups, this optimizer {len(self.param_groups)}"
            raise ConfigError(findings=[Finding("optimizer state", what)])
        for mine, theirs in zip(self.param_groups, groups, strict=True):
            mine.update({k: v for k, v in theirs.items() if k not in ("params", "param_names")})
        own = self._training.own
        if "state" in state_dict and self._training.members is not None:
            what = "has moments of parameters, which lie in other tensors under tp, pp or cp"
            fix = "Leave out its `state`, or take a checkpoint of run.save"
            raise ConfigError(findings=[Finding("optimizer state", what, fix)])
        if "state" not in state_dict:
            own.set_steps(self._number, int(state_dict.get("step", 0)))
            return
        order = [number for group in groups for number in group["params"]]
        mine_all = [id(parameter) for group in self.param_groups for parameter in group["params"]]
        known = {key: state_dict["state"].get(number) for key, number in zip(mine_all, order, strict=True)}
        own.take(self._number, lambda parameter: known.get(id(parameter)))
