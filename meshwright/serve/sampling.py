"""How the tokens of an answer are chosen: what a request may ask for. No torch here; `serve.sampler` draws."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import Finding, UserError

__all__ = ["MAX_LOGPROBS", "MAX_STOPS", "SamplingParams"]

MAX_LOGPROBS = 20
"""Most alternatives that are told beside a token."""
MAX_STOPS = 64
"""Most stop strings, and most stop ids."""
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one answer. UserError with everything that is out of range.

    temperature         0: the largest logit, the first of equals
    top_k               draw among the k most likely; 0: all
    top_p               draw among the fewest most likely tokens whose probabilities sum to at least p (over what top_k leaves)
    min_p               no token less likely than this share of the most likely one
    repetition_penalty  a logit of a token of prompt or answer is divided by it if positive, multiplied if negative
                        (arXiv:1909.05858, section 4.1)
    presence_penalty    taken off the logits of tokens that the answer has
    frequency_penalty   taken off the logits once for each time that the answer has the token
    seed                0 to 2**63 - 1; equal seeds give equal draws at equal positions. None: another one each time
    logit_bias          token -> what is added to its logit, -100 to 100
    stop                strings that end the answer, and are not part of it
    stop_ids            tokens that end the answer; they have no text
    max_tokens          longest answer, at least 1
    min_tokens          neither an end token nor a stop string ends it before
    logprobs            alternatives to tell beside each token, 0 to 20; None: no probabilities at all
    ignore_eos          the tokenizer's end of text is a token like others
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    max_tokens: int = 16
    min_tokens: int = 0
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("stop", "stop_ids"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        findings = [*self._numbers(), *self._ends(), *self._biases()]
        if findings:
            raise UserError(findings=findings)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def plain(self) -> bool:
        """Whether nothing is asked for but the largest logit."""
        return self.greedy and self.logprobs is None and not self.logit_bias and not self.penalised

    @property
    def penalised(self) -> bool:
        """Whether the logits depend on which tokens came before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def filtered(self) -> bool:
        """Whether some tokens are never drawn."""
        return bool(self.top_k) or self.top_p < 1.0 or self.min_p > 0.0

    def _numbers(self) -> Iterator[Finding]:
        for name, low, high, why in (
            ("temperature", 0.0, 1e3, "Use 0 (greedy) to 1000"),
            ("min_p", 0.0, 1.0, "Use a share from 0 (all) to 1"),
            ("presence_penalty", -100.0, 100.0, "Use -100 to 100"),
            ("frequency_penalty", -100.0, 100.0, "Use -100 to 100"),
        ):
            if not _number(getattr(self, name), low, high):
                yield _wrong(name, getattr(self, name), why)
        if not _number(self.top_p, 0.0, 1.0) or self.top_p == 0:
            yield _wrong("top_p", self.top_p, "Use a share above 0, at most 1")
        if not _number(self.repetition_penalty, 0.0, 100.0) or self.repetition_penalty == 0:
            yield _wrong("repetition_penalty", self.repetition_penalty, "Use a number above 0 (1: none), at most 100")
        for name, least, most in (("top_k", 0, _LARGEST), ("max_tokens", 1, _LARGEST), ("min_tokens", 0, _LARGEST)):
            if not _whole(getattr(self, name), least, most):
                yield _wrong(name, getattr(self, name), f"Use a whole number from {least} to {most}")
        if self.seed is not None and not _whole(self.seed, 0, 2**63 - 1):
            yield _wrong("seed", self.seed, "Use 0 to 2**63 - 1")
        if self.logprobs is not None and not _whole(self.logprobs, 0, MAX_LOGPROBS):
            yield _wrong("logprobs", self.logprobs, f"Use 0 to {MAX_LOGPROBS}")
        if not isinstance(self.ignore_eos, bool):
            yield _wrong("ignore_eos", self.ignore_eos, "Use true or false")
        if _whole(self.min_tokens, 0, _LARGEST) and _whole(self.max_tokens, 1, _LARGEST) and self.min_tokens > self.max_tokens:
            yield Finding("min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}", "Lower it")

    def _ends(self) -> Iterator[Finding]:
        for name in ("stop", "stop_ids"):
            values = getattr(self, name)
            if not isinstance(values, tuple):
                yield _wrong(name, values, "Give a list")
            elif len(values) > MAX_STOPS:
                yield Finding(name, f"has {len(values)} entries", f"Use at most {MAX_STOPS}")
            elif name == "stop" and not all(isinstance(value, str) and value for value in values):
                yield Finding(name, "has an entry that is empty or no text", "Give strings of at least one character")
            elif name == "stop_ids" and not all(_whole(value, 0, _LARGEST) for value in values):
                yield Finding(name, "has an entry that is no token", "Give token ids")

    def _biases(self) -> Iterator[Finding]:
        if not isinstance(self.logit_bias, Mapping):
            yield _wrong("logit_bias", self.logit_bias, "Give token ids with a bias each")
            return
        for token, bias in self.logit_bias.items():
            if not _whole(token, 0, _LARGEST):
                yield Finding("logit_bias", f"{token!r} is no token", "Give token ids")
            elif not _number(bias, -100.0, 100.0):
                yield Finding("logit_bias", f"{bias!r} of token {token} makes no sense", "Use -100 to 100")


def _number(value: Any, low: float, high: float) -> bool:
    """A finite number from low to high; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high


def _whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _wrong(name: str, value: Any, fix: str) -> Finding:
    shown = repr(value)
    return Finding(name, f"{shown if len(shown) <= 60 else shown[:57] + '...'} makes no sense", fix)
