"""From outputs of the engine to answers of the API: whole ones and streams, of completions and of chats."""

from __future__ import annotations

import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import MeshwrightError
from meshwright.serve.faults import ApiError, from_engine
from meshwright.serve.protocol import Sampling
from meshwright.serve.replies import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    ErrorBody,
    FinishReason,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from meshwright.serve.request import Request
from meshwright.serve.sampling import SamplingParams
from meshwright.serve.service import Generation
from meshwright.serve.stream import DONE, event

__all__ = ["Answer", "ChatAnswers", "CompletionAnswers", "sampling"]

SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""Fields of a request that SamplingParams calls the same."""


def sampling(body: Sampling, number: int, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """Settings of answer `number` to a prompt. Raises UserError."""
    given: dict[str, Any] = {name: getattr(body, name) for name in SAME if getattr(body, name) is not None}
    if body.stop is not None:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.stop_token_ids is not None:
        given["stop_ids"] = tuple(body.stop_token_ids)
    if body.logit_bias is not None:
        given["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    if body.seed is not None:
        given["seed"] = (body.seed + number) % 2**63
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)


@dataclass
class Answer:
    """What has come of one answer."""

    text: str = ""
    tokens: int = 0
    logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None
    offset: int = 0

    def take(self, output: Any) -> None:
        """Raises ApiError where the engine could not go on."""
        if output.finish == "error":
            raise ApiError(500, "the model gave logits that are no numbers", code="engine_error")
        if output.finish == "abort":
            raise ApiError(503, "the request was given up", code="aborted")
        self.text += output.text
        self.tokens += len(output.tokens)
        self.logprobs += output.logprobs or ()
        self.finish = output.finish

    @property
    def reason(self) -> FinishReason:
        return "stop" if self.finish == "stop" else "length"

    @property
    def mean_logprob(self) -> float:
        values = [entry.logprob for entry in self.logprobs]
        return sum(values) / len(values) if values else -math.inf


class Answers(ABC):
    """The answers to one HTTP request: `each` to every prompt, numbered through."""

    prefix: Literal["cmpl", "chatcmpl"]

    def __init__(self, model: str, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], each: int, body: Sampling):
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.model, self.tokenizer, self.prompts, self.each = model, tokenizer, prompts, each
        self.created = int(time.time())
        self.answers = [Answer() for _ in range(len(prompts) * each)]
        self.usage_wanted = body.stream_options is not None and body.stream_options.include_usage is True

    def requests(self, params: Sequence[SamplingParams]) -> list[Request]:
        """params: one an answer."""
        return [
            Request(f"{self.id}-{index}", tuple(self.prompts[index // self.each]), params[index])
            for index in range(len(self.answers))
        ]

    async def gather(self, generation: Generation) -> None:
        """Wait for all of them."""
        async for index, output in generation:
            self.answers[index].take(output)

    def usage(self) -> Usage:
        prompt, made = sum(map(len, self.prompts)), sum(answer.tokens for answer in self.answers)
        return Usage(prompt_tokens=prompt, completion_tokens=made, total_tokens=prompt + made)

    def token(self, number: int) -> str:
        return self.tokenizer.decode([number], skip_special=False)

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The stream: chunks, the usage where it is wanted, and [DONE]; or an error, which is its end."""
        for data in self.openings():
            yield data
        try:
            async for index, output in generation:
                answer = self.answers[index]
                answer.take(output)
                if output.text or output.logprobs or output.finish is not None:
                    yield self.chunk(index, output)
        except MeshwrightError as error:
            yield event(ErrorBody.model_validate(from_engine(error).body()))
            return
        if self.usage_wanted:
            yield self.last()
        yield DONE

    def openings(self) -> list[bytes]:
        return []

    @abstractmethod
    def chunk(self, index: int, output: Any) -> bytes:
        """The event for what is new of answer `index`."""

    @abstractmethod
    def last(self) -> bytes:
        """The event with the usage."""


class CompletionAnswers(Answers):
    """`/v1/completions`. tops: alternatives beside each token, None without log-probabilities. echo: texts of the prompts."""

    prefix = "cmpl"

    def __init__(self, *args: Any, tops: int | None, echo: Sequence[str] | None = None):
        super().__init__(*args)
        self.tops, self.echo = tops, echo

    def openings(self) -> list[bytes]:
        if self.echo is None:
            return []
        texts = [self.echo[index // self.each] for index in range(len(self.answers))]
        return [self._event([CompletionChoice(index=i, text=text, finish_reason=None)]) for i, text in enumerate(texts)]

    def chunk(self, index: int, output: Any) -> bytes:
        answer = self.answers[index]
        reason = answer.reason if output.finish is not None else None
        choice = CompletionChoice(index=index, text=output.text, finish_reason=reason, logprobs=None)
        if self.tops is not None:
            choice.logprobs = self._logprobs(answer, output.logprobs or [])
        return self._event([choice])

    def last(self) -> bytes:
        return self._event([], self.usage())

    def whole(self, n: int) -> Completion:
        """Of all answers to a prompt the `n` of the largest mean log-probability, where there are more."""
        choices: list[CompletionChoice] = []
        for prompt in range(len(self.prompts)):
            answers = self.answers[prompt * self.each : (prompt + 1) * self.each]
            if n < self.each:
                answers = sorted(answers, key=lambda answer: -answer.mean_logprob)[:n]
            for answer in answers:
                text = answer.text if self.echo is None else self.echo[prompt] + answer.text
                logprobs = None if self.tops is None else self._logprobs(answer, answer.logprobs)
                choices.append(CompletionChoice(index=len(choices), text=text, finish_reason=answer.reason, logprobs=logprobs))
        return Completion(id=self.id, created=self.created, model=self.model, choices=choices, usage=self.usage())

    def _event(self, choices: list[CompletionChoice], usage: Usage | None = None) -> bytes:
        chunk = Completion(id=self.id, object="text_completion", created=self.created, model=self.model, choices=choices)
        if self.usage_wanted:
            chunk.usage = usage
        return event(chunk)

    def _logprobs(self, answer: Answer, entries: Sequence[Any]) -> CompletionLogprobs:
        names = [self.token(entry.token) for entry in entries]
        offsets = []
        for name in names:
            offsets.append(answer.offset)
            answer.offset += len(name)
        tops = [self._named(entry.top[: self.tops]) for entry in entries] if self.tops else None
        values = [entry.logprob for entry in entries]
        return CompletionLogprobs(tokens=names, token_logprobs=values, top_logprobs=tops, text_offset=offsets)

    def _named(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        named: dict[str, float] = {}
        for token, value in top:
            named.setdefault(self.token(token), value)  # parts of characters share a name: the likeliest stays
        return named


class ChatAnswers(Answers):
    """`/v1/chat/completions`. tops: alternatives beside each token, None without log-probabilities."""

    prefix = "chatcmpl"

    def __init__(self, *args: Any, tops: int | None):
        super().__init__(*args)
        self.tops = tops

    def openings(self) -> list[bytes]:
        delta = Delta(role="assistant", content="")
        return [self._event([ChunkChoice(index=i, delta=delta, finish_reason=None)]) for i in range(len(self.answers))]

    def chunk(self, index: int, output: Any) -> bytes:
        reason = self.answers[index].reason if output.finish is not None else None
        delta = Delta(content=output.text) if output.text else Delta()
        choice = ChunkChoice(index=index, delta=delta, finish_reason=reason, logprobs=None)
        if self.tops is not None:
            choice.logprobs = self._logprobs(output.logprobs or [])
        return self._event([choice])

    def last(self) -> bytes:
        return self._event([], self.usage())

    def whole(self) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=index,
                message=ChatAnswer(content=answer.text),
                finish_reason=answer.reason,
                logprobs=None if self.tops is None else self._logprobs(answer.logprobs),
            )
            for index, answer in enumerate(self.answers)
        ]
        return ChatCompletion(id=self.id, created=self.created, model=self.model, choices=choices, usage=self.usage())

    def _event(self, choices: list[ChunkChoice], usage: Usage | None = None) -> bytes:
        chunk = ChatChunk(id=self.id, object="chat.completion.chunk", created=self.created, model=self.model, choices=choices)
        if self.usage_wanted:
            chunk.usage = usage
        return event(chunk)

    def _logprobs(self, entries: Sequence[Any]) -> ChatLogprobs:
        def one(token: int, value: float) -> dict[str, Any]:
            name = self.token(token)
            return {"token": name, "logprob": value, "bytes": None if "\ufffd" in name else list(name.encode())}

        content = [
            TokenLogprob(
                **one(entry.token, entry.logprob),
                top_logprobs=[TopLogprob(**one(*pair)) for pair in entry.top[: self.tops]],
            )
            for entry in entries
        ]
        return ChatLogprobs(content=content)
