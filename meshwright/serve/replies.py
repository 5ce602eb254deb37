"""Answers in the shape of OpenAI's API, and ours beside them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

__all__ = [
    "Candidate",
    "ChatAnswer",
    "ChatChoice",
    "ChatChunk",
    "ChatCompletion",
    "ChatLogprobs",
    "ChunkChoice",
    "ClassRow",
    "Classification",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
    "Delta",
    "Embedding",
    "Embeddings",
    "ErrorBody",
    "ErrorDetail",
    "Filled",
    "FinishReason",
    "InputUsage",
    "ModelCard",
    "ModelList",
    "State",
    "TokenLogprob",
    "TopLogprob",
    "Usage",
    "dumped",
]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class InputUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


FinishReason = Literal["stop", "length"]


class CompletionLogprobs(BaseModel):
    """text_offset: where a token begins in the text, counting the tokens' own texts."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None


class Completion(BaseModel):
    """Also what a chunk of a stream is."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """bytes: UTF-8 of the token, null where it is a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class ChatAnswer(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Embeddings(BaseModel):
    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: InputUsage


class ClassRow(BaseModel):
    """label, score: the likeliest class. scores: probability of every class."""

    index: int
    label: str
    score: float
    scores: dict[str, float]


class Classification(BaseModel):
    object: Literal["list"] = "list"
    model: str
    data: list[ClassRow]
    usage: InputUsage


class Candidate(BaseModel):
    """sequence: the text with this token in the mask's place (other masks stay)."""

    token: int
    token_str: str
    score: float
    sequence: str


class Filled(BaseModel):
    """data: for each mask, in order, its candidates, the likeliest first."""

    object: Literal["list"] = "list"
    model: str
    data: list[list[Candidate]]
    usage: InputUsage


class ModelCard(BaseModel):
    """max_model_len: most tokens of prompt and answer. tasks: what it answers. mask_token: for fill-mask."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int
    tasks: list[str]
    mask_token: str | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class State(BaseModel):
    """status: "ok"; or of /ready "not ready", with the reason."""

    status: str
    reason: str | None = None


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


def dumped(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json")
