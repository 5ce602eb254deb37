"""What is exported: a trained model with all that goes beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from meshwright.config.schema import ModelConfig
from meshwright.data.tokenize import Form
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import ConfigError, Finding
from meshwright.models.trunk import Trunk

__all__ = ["LoadRun", "Source", "framed"]


@dataclass(frozen=True)
class Source:
    """task: "lm", "mlm" or "classify". labels: names of the classes in the order of their numbers; empty where none are known.
    name: of the folder that it came from."""

    model: nn.Module
    config: ModelConfig
    task: str
    tokenizer: Tokenizer
    labels: tuple[str, ...] = ()
    name: str = "model"

    @property
    def class_names(self) -> tuple[str, ...]:
        """`labels`, or LABEL_0 and so on; empty where there are no classes."""
        return self.labels or tuple(f"LABEL_{number}" for number in range(self.config.classes or 0))

    @property
    def trunk(self) -> Trunk:
        """The model. Raises ConfigError where it is none of ours."""
        if not isinstance(self.model, Trunk):
            what = f"{self.config.arch!r} is an architecture of your own, which nothing here can write for another program"
            raise ConfigError(findings=[Finding(f"{self.name}: model.arch", what, "Known: decoder, encoder")])
        return self.model

    def in_dtype(self, dtype: torch.dtype) -> Source:
        """Its model's weights turned to this type, in place."""
        self.model.to(dtype)
        return self


LoadRun = Callable[[Path, torch.dtype | None], Source]
"""(folder, dtype of the weights or None for as stored) -> what is in it. `runtime` has it."""


def framed(source: Source) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(tokens before, tokens after) that training put around a text of an encoder."""
    form = Form.of({"mlm": "masked_lm"}.get(source.task, source.task), source.tokenizer)
    return form.prefix, form.suffix
