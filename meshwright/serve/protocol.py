"""Requests in the shape of OpenAI's API, and ours beside them.

Types are strict (`"5"` and `true` are no numbers) and no field is ignored: one that is unknown, or known and not supported,
is an error that names it. A field that means "no, thank you" (`"tools": null`) is taken.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from meshwright.serve.sampling import MAX_LOGPROBS

__all__ = ["ChatRequest", "ClassifyRequest", "CompletionRequest", "EmbeddingRequest", "FillMaskRequest"]

MAX_N = 16
"""Most answers to a prompt."""
MAX_PROMPTS = 128
"""Most prompts, or inputs, of a request."""
MAX_STOPS = 16
TEXTS = f"a text, or a list of 1 to {MAX_PROMPTS} texts; none of them empty"
TEXTS_OR_IDS = f"a text, a list of token ids, or a list of at most {MAX_PROMPTS} texts or such lists; none of them empty"
STOPS = f"a text of 1 to 256 characters, or a list of at most {MAX_STOPS} of them"


def _integer(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _boolean(value: Any) -> Any:
    if value is not None and not isinstance(value, bool):
        raise ValueError("should be false")  # of all errors this one is told of the field
    return value


WHOLE = BeforeValidator(_integer)
"""As JSON Schema has it, 5.0 is an integer. Not of token ids: a call each for a million of them would hold up every stream."""
Whole = Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Off = Annotated[Literal[False], BeforeValidator(_boolean)]
"""0 is not false, which Python takes for equal."""
Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[Token], Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
TokenKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
"""One way to write a number: 7 and 07 would be two keys of one token."""
Bias = Annotated[float, Field(ge=-100, le=100)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool | None = Field(None, description="A last chunk with the usage and without choices. Default false.")
    include_obfuscation: Off | None = None


class TextFormat(Strict):
    type: Literal["text"]


class Asked(Strict):
    """What all requests have in common. In each of them null is the same as leaving an optional field out."""

    model: Text | None = Field(None, description="The served model's name; any other is answered with 404.")
    user: None = None


class Sampling(Asked):
    """What the two ways of generating have in common."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="0: the most likely token. Default 1.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="Default 1.")
    top_k: Whole | None = Field(None, description="0, the default: all.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="Default 0.")
    n: Annotated[int, Field(ge=1, le=MAX_N), WHOLE] | None = Field(None, description="Answers to a prompt. Default 1.")
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = Field(None, description=STOPS)
    stop_token_ids: Annotated[list[Whole], Field(max_length=MAX_STOPS)] | None = None
    min_tokens: Whole | None = None
    ignore_eos: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: (
        Annotated[dict[TokenKey, Bias], Field(max_length=1024, json_schema_extra={"additionalProperties": False})] | None
    ) = Field(None, description="Token id to bias.")
    # what every reader of JSON holds exactly, the bounds of the OpenAPI document too, which are floats
    seed: Annotated[int, Field(ge=0, le=2**53 - 1), WHOLE] | None = Field(None, description="Answer j of n has seed + j.")
    stream: bool | None = Field(None, description="Server-sent events; the last one is [DONE].")
    stream_options: StreamOptions | None = None


class CompletionRequest(Sampling):
    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
    ) = Field(description=TEXTS_OR_IDS)
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = Field(None, description="Default 16.")
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        None, description="Alternatives beside each token."
    )
    echo: bool | None = Field(None, description="The prompt before the answer. Not together with logprobs.")
    best_of: Annotated[int, Field(ge=1, le=MAX_N), WHOLE] | None = Field(
        None,
        description="Answers that are made, of which the n of the largest mean log-probability are given. Not in a stream.",
    )
    suffix: None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: Text | None = None
    # an answer of OpenAI's library, given back as a message of the conversation, has these
    refusal: None = None
    tool_calls: None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ChatRequest(Sampling):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = Field(
        None, description="Default: what the context has left."
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = Field(
        None, description="The newer name of it."
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(None, description="Needs logprobs: true.")
    add_generation_prompt: bool | None = Field(None, description="Default true: the template opens the assistant's turn.")
    chat_template_kwargs: dict[str, str | bool | int | float | None] | None = Field(None, description="For the chat template.")
    response_format: TextFormat | None = None
    tools: None = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: None = None
    functions: None = None
    function_call: Literal["none"] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    service_tier: None = None
    store: Off | None = None
    metadata: None = None
    prompt_cache_key: None = None
    prompt_cache_retention: None = None
    safety_identifier: None = None
    verbosity: None = None
    web_search_options: None = None


UNSUPPORTED = {
    "suffix": "text is continued, never filled in",
    "response_format": "only {'type': 'text'} can be promised",
    "tools": "no tools are called",
    "tool_choice": "no tools are called",
    "parallel_tool_calls": "no tools are called",
    "functions": "no functions are called",
    "function_call": "no functions are called",
    "modalities": "answers are text",
    "audio": "answers are text",
    "prediction": "there is no prediction to check",
    "reasoning_effort": "the chat template decides; see chat_template_kwargs",
    "service_tier": "there is one tier",
    "store": "nothing is stored",
    "metadata": "nothing is stored",
    "user": "nothing is stored",
    "prompt_cache_key": "the server decides what it keeps",
    "prompt_cache_retention": "the server decides what it keeps",
    "safety_identifier": "nothing is stored",
    "verbosity": "the chat template decides; see chat_template_kwargs",
    "web_search_options": "nothing is searched",
    "dimensions": "embeddings have the model's width",
}
"""Fields of OpenAI's API that are known and not supported, and why."""

UNIONS = ("prompt", "input", "stop")
"""Fields for which the checker has an error for each way that failed: their description is said instead."""


class EmbeddingRequest(Asked):
    input: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
    ) = Field(description=TEXTS_OR_IDS)
    encoding_format: Literal["float", "base64"] | None = Field(None, description="base64: little-endian fp32. Default float.")
    dimensions: None = None


class ClassifyRequest(Asked):
    input: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)] = Field(description=TEXTS)


class FillMaskRequest(Asked):
    input: Text = Field(
        description="Text with the tokenizer's mask token in it, which /v1/models names; [MASK] means the same."
    )
    top_k: Annotated[int, Field(ge=1, le=100), WHOLE] | None = Field(None, description="Candidates for each mask. Default 5.")
