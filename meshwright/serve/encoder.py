"""Embeddings, classes and masked tokens from an encoder: rows that wait are run together by length.

Shapes: B rows of a batch, S positions of its longest, D width, K masks of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from meshwright.data.loader import boundaries
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import Finding, UserError
from meshwright.models.trunk import Trunk
from meshwright.serve.encoder_work import EncoderOutput, EncoderWork

__all__ = ["EncoderEngine"]

TASKS = {"mlm": frozenset({"embed", "fill-mask"}), "classify": frozenset({"embed", "classify"})}
"""What a model with this head answers."""

PADDED = 1.25
"""A batch holds rows of at most so many times the length of its shortest: the rest would be padding."""


class EncoderEngine:
    """Serves an encoder in the way that LLMEngine serves a decoder: `add`, then `step` until there is no work.

    task          head of the model, "mlm" or "classify"
    labels        names of the classes; default: LABEL_0, ...
    batch_tokens  positions of a batch, padding included (a longer row is a batch of its own)
    Raises UserError for another task, and for labels that do not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        task: str,
        *,
        model_name: str,
        labels: Sequence[str] = (),
        batch_tokens: int = 8192,
        max_rows: int = 64,
    ):
        if task not in TASKS or not isinstance(model, Trunk):
            fix = "An encoder with mlm or classify is served"
            raise UserError(findings=[Finding(model_name, f"has the head {task!r}", fix)])
        self.model, self.tokenizer, self.task, self.model_name = model.eval(), tokenizer, task, model_name
        self.tasks, self.max_len = TASKS[task], model.max_len
        self.batch_tokens, self.max_rows = batch_tokens, max_rows
        self.device = next(model.parameters()).device
        classes = model.config.classes or 0
        self.labels = tuple(labels) or tuple(f"LABEL_{number}" for number in range(classes))
        if task == "classify" and len(self.labels) != classes:
            raise UserError(findings=[Finding(model_name, f"has {classes} classes and {len(self.labels)} labels")])
        self._waiting: dict[str, EncoderWork] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def check(self, work: EncoderWork) -> None:
        """Raises UserError for what this model has no head for, and for a row that is too long."""
        if work.kind not in self.tasks:
            raise UserError(findings=[Finding("model", f"answers {', '.join(sorted(self.tasks))}, not {work.kind}")])
        if len(work.tokens) > self.max_len:
            raise UserError(findings=[Finding("input", f"has {len(work.tokens)} tokens, the model takes {self.max_len}")])

    def add(self, work: EncoderWork) -> None:
        """Queue a row. Raises UserError as `check` does."""
        self.check(work)
        self._waiting[work.id] = work

    def abort(self, id: str) -> None:
        self._waiting.pop(id, None)

    def stats(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        self._waiting.clear()

    def step(self) -> list[EncoderOutput]:
        """Run one batch: the row that waits longest, and rows of about its length and its kind."""
        batch = self._schedule()
        values = self._run(batch)
        for work in batch:
            del self._waiting[work.id]
        return [EncoderOutput(work.id, value) for work, value in zip(batch, values, strict=True)]

    def _schedule(self) -> list[EncoderWork]:
        first = next(iter(self._waiting.values()))
        near = [work for work in self._waiting.values() if work.kind == first.kind]
        near.sort(key=lambda work: abs(len(work.tokens) - len(first.tokens)))  # stable: of equals the one that came first
        batch, shortest, longest = [first], len(first.tokens), len(first.tokens)
        for work in near:
            size = len(work.tokens)
            low, high = min(shortest, size), max(longest, size)
            if len(batch) >= self.max_rows or high > PADDED * low or high * (len(batch) + 1) > self.batch_tokens:
                break
            if work is not first:
                batch.append(work)
                shortest, longest = low, high
        return batch

    @torch.no_grad()
    def _run(self, batch: list[EncoderWork]) -> list[Any]:
        lengths = np.array([len(work.tokens) for work in batch])
        size = int(lengths.max())
        tokens_BS = np.zeros((len(batch), size), dtype=np.int64)
        for row, work in enumerate(batch):
            tokens_BS[row, : len(work.tokens)] = work.tokens
        inputs: dict[str, torch.Tensor] = {"tokens": torch.from_numpy(tokens_BS).to(self.device)}
        if int(lengths.min()) < size:
            documents_BS = np.where(np.arange(size)[None] < lengths[:, None], 0, -1).astype(np.int32)
            inputs["documents"] = torch.from_numpy(documents_BS).to(self.device)
            inputs["cu_seqlens"] = torch.from_numpy(boundaries(documents_BS)).to(self.device)
        kind = batch[0].kind
        if kind == "embed":
            return self._embed(inputs, lengths)
        if kind == "classify":
            logits = self.model(**inputs)
            return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1).tolist()
        return self._fill(inputs, batch)

    def _embed(self, inputs: dict[str, torch.Tensor], lengths: np.ndarray) -> list[list[float]]:
        """Mean of the last hidden states over a row's tokens, [cls] and [sep] among them, scaled to length 1."""
        model, tokens, documents = self.model, inputs["tokens"], inputs.get("documents")
        x_BSD = model.embed(tokens, None, None)
        span = (0, len(model.layers))
        x_BSD = model.run_layers(x_BSD, span, tokens, documents, inputs.get("cu_seqlens"), None, None)
        if model.norm is not None:
            x_BSD = model.norm(x_BSD)
        x_BSD = x_BSD.to(torch.promote_types(x_BSD.dtype, torch.float32))
        counts_B1 = torch.from_numpy(lengths).to(self.device)[:, None]
        real_BS1 = (torch.arange(tokens.shape[1], device=self.device)[None] < counts_B1)[..., None]
        mean_BD = torch.where(real_BS1, x_BSD, 0.0).sum(1) / counts_B1
        return nn.functional.normalize(mean_BD, dim=-1).tolist()

    def _fill(self, inputs: dict[str, torch.Tensor], batch: list[EncoderWork]) -> list[list[list[tuple[int, float]]]]:
        masks = [[at for at, token in enumerate(work.tokens) if token == self.tokenizer.mask] for work in batch]
        most = max(map(len, masks))
        select_BK = torch.tensor([[*places, *[0] * (most - len(places))] for places in masks], device=self.device)
        logits_BKV = self.model(**inputs, select=select_BK)[..., : self.tokenizer.vocab_size]
        chance_BKV = logits_BKV.to(torch.promote_types(logits_BKV.dtype, torch.float32)).softmax(-1)
        found = chance_BKV.topk(min(max(work.top for work in batch), chance_BKV.shape[-1]))
        values, tokens = found.values.tolist(), found.indices.tolist()
        return [
            [list(zip(tokens[row][k][: work.top], values[row][k][: work.top], strict=True)) for k in range(len(masks[row]))]
            for row, work in enumerate(batch)
        ]
