"""From a config to a model on meta; a user's own architectures join here."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable

import torch
from torch import nn

from meshwright.config.schema import ModelConfig
from meshwright.errors import ConfigError, Finding
from meshwright.models.decoder import Decoder
from meshwright.models.encoder import Encoder
from meshwright.models.initialize import CONSTRUCTOR
from meshwright.spec.model_rules import ARCHITECTURES, check
from meshwright.spec.parameters import Rule, Table

__all__ = ["architectures", "build", "register_model"]

Factory = Callable[[ModelConfig, str], nn.Module]
_registered: dict[str, Factory] = {}


def register_model(name: str, factory: Factory) -> None:
    """Make `model.arch: NAME` build `factory(config, task)`, from a file of `run.modules`.

    The module takes part in training as ours do: `forward(tokens, *, documents, cu_seqlens, positions, select, labels,
    dropout_key, smoothing, z_loss)` gives logits, or `LossParts` when labels are given. It is made on the meta device.
    `initialize` then gives it the values that its constructor makes on a CPU under the run's seed, the same on every
    rank; a `module.table` (spec.parameters.Table) of its own overrides them, name by name. Registering a name again
    replaces it; the names of our own models are refused.
    """
    if name in ARCHITECTURES:
        raise ConfigError(findings=[Finding("model.arch", f"{name!r} is one of our own", "Register it under another name")])
    _registered[name] = factory


def architectures() -> list[str]:
    """Every name that `model.arch` may have."""
    return [*ARCHITECTURES, *sorted(_registered)]


def build(config: ModelConfig, task: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model on the meta device, without values.

    config  resolved: a recipe's numbers are already in it
    task    "lm", "mlm" or "classify"
    Raises ConfigError with everything that is wrong, before any memory is taken.
    """
    if config.arch not in architectures():
        near = difflib.get_close_matches(config.arch, architectures(), 1)
        fix = f"Did you mean {near[0]!r}? " if near else ""
        fix += f"Known: {', '.join(architectures())}; others are registered by a file of run.modules"
        raise ConfigError(findings=[Finding("model.arch", f"{config.arch!r} is unknown", fix)])
    findings = check(config, task)
    if findings:
        raise ConfigError(findings=findings)
    if config.arch == "decoder":
        return Decoder(config, task, dtype)
    if config.arch == "encoder":
        return Encoder(config, task, dtype)
    return _build_registered(_registered[config.arch], config, task, dtype)


def _build_registered(factory: Factory, config: ModelConfig, task: str, dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        module = factory(config, task)
    if not isinstance(module, nn.Module):
        what = f"its factory returned {type(module).__name__}, not a torch.nn.Module"
        raise ConfigError(findings=[Finding(f"model.arch: {config.arch}", what)])
    module = module.to(dtype)
    module.remake = functools.partial(factory, config, task)  # type: ignore[assignment]
    if not isinstance(getattr(module, "table", None), Table):
        module.table = Table((Rule("*", init=CONSTRUCTOR),), ties=_ties(module))  # type: ignore[assignment]
    return module


def _ties(module: nn.Module) -> tuple[tuple[str, str], ...]:
    first: dict[int, str] = {}
    names = [(name, first.setdefault(id(p), name)) for name, p in module.named_parameters(remove_duplicate=False)]
    return tuple((canonical, name) for name, canonical in names if name != canonical)
