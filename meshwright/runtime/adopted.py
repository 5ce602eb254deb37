"""What a script calls in place of its module where that was adopted: the same arguments, logits back, on any layout.

    plain modules      model(tokens) -> logits
    of transformers    model(input_ids=, attention_mask=, position_ids=, labels=) -> an output with `.logits` and `.loss`

Shapes: B rows, S positions, V vocabulary, C classes.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.distributed.collectives import gather_alike
from meshwright.errors import ConfigError, Finding, MeshwrightError
from meshwright.kernels.dropout import position_keys
from meshwright.models.adopt import Adopted
from meshwright.parallel.engine import Engine
from meshwright.spec.context import chunks_of
from meshwright.spec.labels import IGNORE

__all__ = ["AdoptedModule", "AdoptedOutput"]

MICRO = 1 << 12
"""Numbers that a step has for its micro-batches."""
ROWS = 1 << 16
"""Numbers that a micro-batch has for its rows."""
SILENT = ("return_dict", "use_cache", "output_attentions", "output_hidden_states")
"""Arguments that change nothing of what is computed; those of the last three must be false."""


@dataclass
class AdoptedOutput:
    """As transformers gives it: by attribute, by name, or by place among what there is (loss first)."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, str):
            return getattr(self, key)
        return tuple(each for each in (self.loss, self.logits) if each is not None)[key]


class AdoptedModule(nn.Module):
    """Calls `adopted.model` as `adopted.origin` is called. With labels the loss is the mean over the targets that are not -100.

    Inside of a step the model may be one stage of a pipeline (see `through`); a call there ends at the stage that is not the
    last. Outside, a pipeline gives logits without gradients only, and every rank must call it. Logits are whole on every rank
    that gets them. Raises ConfigError for arguments that our models have no place for.
    """

    def __init__(self, adopted: Adopted, seed: int = 0):
        super().__init__()
        self.inner = adopted.model
        self.adopted = adopted
        self._seed = seed
        self._engine: Engine | None = None
        self._place = (0, 1)
        self._rank = 0
        self._through: Any = None
        self._number, self._calls = 0, 0
        self._shape: torch.Size | None = None
        self.train(adopted.origin.training)

    def lay_out(self, engine: Engine, place: tuple[int, int], rank: int) -> None:
        """place: (index, number) of the data rank. rank: of the world."""
        self._engine, self._place, self._rank = engine, place, rank

    @property
    def config(self) -> Any:
        """Of the origin, where it has one."""
        return getattr(self.adopted.origin, "config", None)

    # ---- in a step

    def begin(self, step: int) -> None:
        """A step begins; its micro-batches may have another shape than those of the one before."""
        self._number, self._calls, self._shape = step * MICRO, 0, None

    @contextmanager
    def through(self, model: Any, step: int, micro: int) -> Iterator[AdoptedModule]:
        """Calls go to `model`, the engine's or what stands in for it, as micro-batch `micro` of `step`."""
        self._through, self._number, self._calls = model, step * MICRO + micro, 0
        try:
            yield self
        finally:
            self._through = None

    # ---- called

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given, labels = self._read(args, kwargs)
        if self._through is None and self._pipelined:
            logits = self._evaluated(given)
        else:
            if self._through is not None and self._pipelined:
                self._check_call(given["tokens"])
            logits = self._logits(self.inner if self._through is None else self._through, given)
        if self.config is None:
            return logits
        return AdoptedOutput(logits, None if labels is None else self._loss(logits, labels))

    @property
    def _pipelined(self) -> bool:
        return self._engine is not None and "pp" in self._engine.axes.model

    def _check_call(self, tokens: torch.Tensor) -> None:
        fix = "Call it once, on rows joined by torch.cat, or use pp: 1"
        if self._calls:
            raise ConfigError(findings=[Finding("loss_fn", "calls the model twice, and a pipeline runs it once", fix)])
        if self._shape is not None and self._shape != tokens.shape:
            what = f"has tokens {list(tokens.shape)}, the first one of the step {list(self._shape)}"
            fix = "All micro-batches of a pipeline have one shape: pad the whole batch, and choose rows that divide"
            raise ConfigError(findings=[Finding("micro-batch", what, fix)])
        self._shape = tokens.shape

    def _logits(self, model: Any, given: dict[str, Any]) -> torch.Tensor:
        tokens = given["tokens"]
        rest = {key: value for key, value in given.items() if key != "tokens"}
        # the model keeps its own precision: what autocast would change is decided by its weights
        with torch.autocast(tokens.device.type, enabled=False), self._dropout(model, tokens, rest):
            self._calls += 1
            return self._whole_rows(model(tokens, **rest), tokens.shape[1])

    @contextmanager
    def _dropout(self, model: Any, tokens: torch.Tensor, given: dict[str, Any]) -> Iterator[None]:
        """Keys that no other row or step has; the generator of attention dropout is that of this place, and put back."""
        config = self.adopted.config
        if not self.training or not (config.dropout or config.head_dropout or config.attention_dropout):
            yield
            return
        index, ways = self._place
        rows = torch.arange(tokens.shape[0], device=tokens.device) + (self._number * ways + index) * ROWS
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        given["dropout_key"] = position_keys(self._seed + (self._calls << 40), rows, positions)
        with contextlib.ExitStack() as stack:
            if config.attention_dropout:
                devices = [] if tokens.device.type == "cpu" else [tokens.device]
                kind = tokens.device.type if devices else "cuda"
                stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
                parts = (self._seed, self._number, self._calls, self._rank, getattr(model, "span", None))
                digest = hashlib.blake2b(repr(parts).encode(), digest_size=7).digest()
                torch.manual_seed(int.from_bytes(digest, "little"))
            yield

    def _whole_rows(self, logits: torch.Tensor, length: int) -> torch.Tensor:
        """Of all positions, where ranks have some; each then gets the gradient of its own, which is counted once."""
        context: Any = getattr(self.inner, "context", None)
        if context is None:
            return logits
        if self.adopted.task == "classify":  # all have them already
            return logits if context.rank == 0 else torch.where(torch.zeros_like(logits) > 0, logits, logits.detach())
        joined = gather_alike(logits.contiguous(), 1, context.key)
        runs = [run for rank in range(context.size) for run in chunks_of(length, context.size, rank, context.pairs)]
        index = torch.cat([torch.arange(start, start + size) for start, size in runs])
        return joined.index_select(1, index.argsort().to(joined.device))

    def _evaluated(self, given: dict[str, Any]) -> torch.Tensor:
        """Through all stages, to every rank of the pipeline."""
        if torch.is_grad_enabled():
            fix = "Train by run.step(batch, loss_fn); evaluate inside torch.no_grad(), on every rank"
            raise ConfigError(findings=[Finding("model", "is a stage of a pipeline, and has no gradient by itself", fix)])
        assert self._engine is not None  # of which it is a stage
        found: list[torch.Tensor] = []
        self._engine.evaluate(1, lambda model, _: self._logits(model, given).flatten(), lambda _, flat: found.append(flat))
        config, tokens = self.adopted.config, given["tokens"]
        shape = (tokens.shape[0], config.classes) if self.adopted.task == "classify" else (*tokens.shape, config.vocab)
        return found[0].view(shape).to(next(self.inner.parameters()).dtype)

    # ---- arguments

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor | None]:
        """Arguments of ours, `tokens` among them, and the labels."""
        names = [name for name in inspect.signature(self.adopted.origin.forward).parameters if name != "self"]
        if len(args) > len(names):
            what = f"takes {len(names)} arguments, {len(args)} were given"
            raise ConfigError(findings=[Finding(type(self.adopted.origin).__name__, what)])
        every = {key: value for key, value in {**dict(zip(names, args, strict=False)), **kwargs}.items() if value is not None}
        first = "input_ids" if self.config is not None else names[0]
        if not isinstance(every.get(first), torch.Tensor):
            what = f"was called without {first}, the tokens"
            raise ConfigError(findings=[Finding("model", what, f"Call model({first}=...)")])
        given: dict[str, Any] = {"tokens": every.pop(first)}
        if self.config is None:
            self._refuse(every, first)
            return given, None
        if (mask := every.pop("attention_mask", None)) is not None:
            given["documents"] = mask.to(torch.int32) - 1
        if (positions := every.pop("position_ids", None)) is not None:
            given["positions"] = positions
        if (types := every.pop("token_type_ids", None)) is not None and bool(types.any()):
            what = "are not all 0, and our models have every token of type 0"
            raise ConfigError(findings=[Finding("token_type_ids", what, "Use tp: 1 and pp: 1, which run the module as it is")])
        labels = every.pop("labels", None)
        self._refuse({key: value for key, value in every.items() if key != SILENT[0] and (key not in SILENT or value)}, first)
        return given, labels

    def _refuse(self, left: dict[str, Any], first: str) -> None:
        if left:
            takes = first if self.config is None else f"{first}, attention_mask, position_ids and labels"
            what = f"was called with {', '.join(left)}; split over tensor, pipeline or context ranks it takes {takes}"
            fix = "Leave them out, or use tp: 1, pp: 1 and cp: 1, which run the module as it is"
            raise ConfigError(findings=[Finding("model", what, fix)])

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy over the targets; a decoder's labels are those of the position before."""
        task, classes = self.adopted.task, self.adopted.config.classes
        if task == "classify" and (classes == 1 or labels.is_floating_point()):
            what = "make no classification with one class a row"
            raise ConfigError(findings=[Finding("labels", what, "Compute the loss in loss_fn from output.logits")])
        if task == "lm":
            logits, labels = logits[:, :-1], labels[:, 1:]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
        return F.cross_entropy(wide, labels.reshape(-1).to(wide.device), ignore_index=IGNORE)

    # ---- weights

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        what = "holds parts of fused weights under other names than your module"
        fix = "run.state_dict() has them whole by your names, run.give_back() writes them into your module"
        raise MeshwrightError(f"the model {what}: {fix}")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise MeshwrightError("weights are loaded into your module before run.parallelize, or by run.load from a checkpoint")
