"""Whether settings, tokenizer and corpora fit together, found out before any device is taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from meshwright.config.schema import Config, Source
from meshwright.data.blend import check_weights
from meshwright.data.rows import Store
from meshwright.errors import Finding, counted

__all__ = ["PreparedStore", "TokenizerInfo", "check_rows", "check_settings", "check_stores"]


class PreparedStore(Store, Protocol):
    """A token store with what is needed to check that it fits the run."""

    @property
    def label_names(self) -> Sequence[str] | None: ...
    @property
    def tokenizer_fingerprint(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...


class TokenizerInfo(Protocol):
    """What rows need of a tokenizer. Special ids may be None."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def bos(self) -> int | None: ...
    @property
    def eos(self) -> int | None: ...
    @property
    def pad(self) -> int | None: ...
    @property
    def mask(self) -> int | None: ...
    @property
    def cls(self) -> int | None: ...
    @property
    def sep(self) -> int | None: ...
    @property
    def unk(self) -> int | None: ...


def check_settings(config: Config, tokenizer: TokenizerInfo, task: str) -> list[Finding]:
    """Settings that contradict each other or the tokenizer. task: "lm", "mlm" or "classify"."""
    data, model, findings = config.data, config.model, []
    if model.vocab is not None and tokenizer.vocab_size > model.vocab:
        what = f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {model.vocab}"
        findings.append(Finding("model.vocab", what, f"Set it to {tokenizer.vocab_size} or more, or leave it out"))
    if model.positions == "learned" and data.seq_len > model.max_len:
        what = f"rows of {data.seq_len} tokens, but the learned position table ends at model.max_len {model.max_len}"
        findings.append(Finding("data.seq_len", what, f"Set it to {model.max_len} or less, or raise model.max_len"))
    findings += check_weights([source.weight for source in data.train], "data.train")
    for i, source in enumerate(data.valid):
        if source.weight is not None:
            what = "a held-out corpus is evaluated whole; a weight has no effect"
            findings.append(Finding(f"data.valid.{i}.weight", what, "Remove it"))
    if task == "mlm" and tokenizer.mask is None:
        findings.append(
            Finding("data.tokenizer", "has no mask token, which masked_lm needs", "Use one that has, or leave its path out")
        )
    if task == "mlm" and not config.objective.mask_fraction:
        findings.append(Finding("objective.mask_fraction", "is 0: nothing would be predicted", "0.15 is usual"))
    if task == "classify" and config.objective.response_only:
        findings.append(Finding("objective.response_only", "has no effect on classification", "Remove it"))
    if not data.document_mask and (task == "classify" or data.packing == "none"):
        findings.append(
            Finding("data.document_mask", "has no effect: rows hold one document each", "Remove it, or pack as stream")
        )
    return findings


def check_stores(
    config: Config,
    train_stores: Sequence[PreparedStore],
    valid_stores: Sequence[PreparedStore],
    tokenizer: TokenizerInfo,
    task: str,
) -> list[Finding]:
    """Stores that do not fit the tokenizer, the objective or each other."""
    pairs = [*zip(config.data.train, train_stores, strict=True), *zip(config.data.valid, valid_stores, strict=True)]
    findings = []
    for source, store in pairs:
        if store.tokenizer_fingerprint != tokenizer.fingerprint:
            what = (
                f"was prepared with tokenizer {store.tokenizer_fingerprint[:12]} ({counted(store.vocab_size, 'token')}), "
                f"the run has {tokenizer.fingerprint[:12]} ({counted(tokenizer.vocab_size, 'token')})"
            )
            findings.append(
                Finding(source.path, what, "Prepare it again, or set data.tokenizer.path to the one it was made with")
            )
        if not store.tokens:
            findings.append(
                Finding(source.path, f"has {counted(store.documents, 'document')} and no tokens", "Name a file with text")
            )
        if config.objective.response_only and store.prompt_lengths is None:
            what = "has no prompt and response, which objective.response_only needs"
            findings.append(Finding(source.path, what, "Use rows with both, or drop the option"))
        if task == "classify":
            findings += _check_labels(config, source, store, pairs[0][1].label_names)
    return findings


def _check_labels(config: Config, source: Source, store: PreparedStore, expected: Sequence[str] | None) -> list[Finding]:
    if store.labels is None or store.label_names is None:
        fix = "Set label_key of this source; a prepared folder is made with --objective classify --label-key KEY"
        return [Finding(source.path, "has no labels, which classify needs", fix)]
    names = list(store.label_names)
    if expected is not None and names != list(expected):
        what = f"has the labels {names}, the first training corpus has {list(expected)}"
        return [Finding(source.path, what, "Prepare all corpora with the same labels")]
    if config.model.classes is not None and len(names) > config.model.classes:
        what = f"is {config.model.classes}, but {source.path} has {counted(len(names), 'label')}"
        return [Finding("model.classes", what, f"Set it to {len(names)}, or leave it out")]
    labels = np.asarray(store.labels)
    wrong = np.flatnonzero((labels < 0) | (labels >= len(names)))
    if wrong.size:
        what = (
            f"a label outside 0 .. {len(names) - 1} in {counted(wrong.size, 'document')}, the first is number {int(wrong[0])}"
        )
        return [Finding(source.path, what, "Prepare it again")]
    return []


def check_rows(config: Config, rows: Sequence[int]) -> list[Finding]:
    """Corpora without rows, and corpora that together do not fill one step where a smaller one is dropped."""
    findings = [
        Finding(source.path, "gives no row: its training documents have no tokens", "Name a file with text")
        for source, count in zip(config.data.train, rows, strict=True)
        if not count
    ]
    if 0 < sum(rows) < config.train.batch and config.train.tail == "drop":
        total, batch, seq_len = sum(rows), config.train.batch, config.data.seq_len
        what = f"the corpus has {counted(total, 'row')} of {counted(seq_len, 'token')}, fewer than one global batch of {batch}"
        fix = f"Set train.batch to {total} or less, train.tail: step, data.seq_len lower, or add text"
        findings.append(Finding("data.train", what, fix))
    return findings
