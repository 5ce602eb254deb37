"""OpenAI's own client against `meshwright serve`: what its users call works, and their mistakes are the errors they know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from meshwright.models import generate
from meshwright.runtime.trained import load_trained
from tests.e2e.live import KEY, live
from tests.e2e.test_serve_command import folder
from tests.e2e.test_serve_process import Server
from tests.unit.serve_fakes import byte_tokenizer

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
LONG = 4000
"""Tokens of an answer that takes seconds."""


def client_of(server: Server, key: str = KEY, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key, max_retries=0, timeout=30, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("openai") / "tiny", max_len=LONG + 96)


@pytest.fixture(scope="module")
def decoder(model: Path) -> Iterator[Server]:
    with live(model, "--max-running", "2", "--max-queue", "2", "--max-body", "20000", blocks=600) as here:
        yield here


@pytest.fixture(scope="module")
def client(decoder: Server) -> Iterator[openai.OpenAI]:
    with client_of(decoder) as made:
        yield made


def checked(kind: type[Any], raw: Any) -> Any:
    """The answer, after OpenAI's own types have accepted every field of it: the client itself lets anything through."""
    kind.model_validate_json(raw.text, strict=True)
    return raw.parse()


def test_models(client: openai.OpenAI):
    (card,) = client.models.list().data
    assert card.id == "tiny" and card.owned_by == "meshwright"
    assert checked(Model, client.models.with_raw_response.retrieve("tiny")) == card


def test_a_completion_is_what_the_model_says(client: openai.OpenAI, model: Path):
    """Mutation tried: of the tokens with one name (parts of characters) the unlikeliest kept in `top_logprobs`."""
    trained = load_trained(model)
    wanted = generate(trained.model, list(trained.tokenizer.encode("hi")), max_tokens=8)
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt="hi", max_tokens=8, temperature=0, logprobs=2, extra_body={"ignore_eos": True}
    )
    answer = checked(Completion, raw)
    (choice,) = answer.choices
    assert choice.text == trained.tokenizer.decode(wanted) and choice.finish_reason == "length"
    assert choice.logprobs.tokens == [trained.tokenizer.decode([token], False) for token in wanted]
    best = [max(tops.values()) for tops in choice.logprobs.top_logprobs]
    assert best == choice.logprobs.token_logprobs
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 8, 10)


def only(text: str) -> dict[str, Any]:
    """Settings under which an answer is of these letters, drawn at random and the same each time."""
    return {"logit_bias": {str(token): 100 for token in byte_tokenizer().encode(text)}, "seed": 5, "temperature": 1}


def test_several_answers_stop_strings_and_streams(client: openai.OpenAI):
    given: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 40, "n": 2, **only("ab")}
    whole = checked(Completion, client.completions.with_raw_response.create(**given))
    texts = [choice.text for choice in whole.choices]
    assert [len(text) for text in texts] == [40, 40] and set("".join(texts)) == {"a", "b"} and texts[0] != texts[1]
    streamed = ["", ""]
    for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **given):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts and chunk.usage.completion_tokens == 80
    stop = "ab" + texts[0][texts[0].index("ab") + 2]
    cut = client.completions.create(stop=[stop, "c"], **{**given, "n": 1}).choices[0]
    assert cut.text == texts[0][: texts[0].index(stop)] and cut.finish_reason == "stop"


def test_a_chat_whole_and_in_pieces(client: openai.OpenAI):
    given: dict[str, Any] = {
        "model": "tiny", "max_completion_tokens": 20, "n": 2, "stop": "bbbb", "logprobs": True, "top_logprobs": 3,
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        **only("abc"),
    }  # fmt: skip
    whole = checked(ChatCompletion, client.chat.completions.with_raw_response.create(**given))
    assert whole.usage.prompt_tokens == 1 + len("[system]be brief\n[user]hi\n[assistant]")
    for choice in whole.choices:
        assert choice.message.role == "assistant" and choice.message.content
        entries = choice.logprobs.content
        assert all(len(entry.top_logprobs) == 3 and bytes(entry.bytes).decode() == entry.token for entry in entries)
        assert "".join(entry.token for entry in entries).startswith(choice.message.content)
    texts, roles, reasons = ["", ""], ["", ""], ["", ""]
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **given):
        ChatCompletionChunk.model_validate(chunk.model_dump(exclude_unset=True), strict=True)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role or ""
            reasons[choice.index] += choice.finish_reason or ""
    assert texts == [choice.message.content for choice in whole.choices] and roles == ["assistant"] * 2
    assert reasons == [choice.finish_reason for choice in whole.choices] and chunk.usage == whole.usage
    given |= {"n": 1, "stop": texts[0][4:7]}
    with client.chat.completions.stream(**given) as helped:  # the client's own way of joining a stream
        assert helped.get_final_completion().choices[0].message.content == texts[0].partition(given["stop"])[0]


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
WRONG: list[tuple[dict[str, Any], type[openai.APIStatusError], str, str | None]] = [
    ({"extra_body": {"best": 1}}, openai.BadRequestError, "unknown_field", "best"),
    ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "unsupported_field", "response_format"),
    ({"response_format": SCHEMA}, openai.BadRequestError, "unsupported_field", "response_format"),
    ({"tools": [TOOL]}, openai.BadRequestError, "unsupported_field", "tools"),
    ({"tools": [TOOL], "tool_choice": "required"}, openai.BadRequestError, "unsupported_field", "tools"),
    ({"user": "me"}, openai.BadRequestError, "unsupported_field", "user"),
    ({"temperature": 3}, openai.BadRequestError, "invalid_value", "temperature"),
    ({"messages": []}, openai.BadRequestError, "invalid_value", "messages"),
    ({"max_tokens": LONG + 96}, openai.BadRequestError, "context_length_exceeded", "messages"),
    ({"model": "gpt-4o"}, openai.NotFoundError, "model_not_found", "model"),
]


def refused(call: Callable[[], Any]) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    return caught.value


def test_what_is_wrong_is_the_error_that_the_client_knows(client: openai.OpenAI, decoder: Server):
    for given, kind, code, param in WRONG:
        error = refused(lambda given=given: client.chat.completions.create(**{"model": "tiny", "messages": HELLO, **given}))
        assert (type(error), error.code, error.param) == (kind, code, param), error
    with client_of(decoder, "other") as stranger:
        error = refused(stranger.models.list)
        assert type(error) is openai.AuthenticationError and error.code == "invalid_api_key"
    error = refused(lambda: client.completions.create(model="tiny", prompt="x" * 20000))
    assert error.status_code == 413 and error.code == "body_too_large"
    error = refused(lambda: client.embeddings.create(model="tiny", input="x"))
    assert type(error) is openai.BadRequestError and error.code == "unsupported_task"
    assert client.completions.create(model="tiny", prompt="x", max_tokens=1).usage.completion_tokens == 1  # and it lives


def stream_long(client: openai.OpenAI) -> openai.Stream[Completion]:
    return client.completions.create(model="tiny", prompt="x", max_tokens=LONG, stream=True, extra_body={"ignore_eos": True})


def test_a_full_queue_and_clients_that_leave(client: openai.OpenAI, decoder: Server):
    """Two run, two wait, the fifth is refused. All leave: nothing runs, waits or holds cache any more."""
    with ExitStack() as stack:
        for number in range(4):
            one = stack.enter_context(stream_long(client))
            if number < 2:
                next(iter(one))
        decoder.until(lambda: decoder.metric("requests_waiting") == 2 and decoder.metric("requests_running") == 2)
        assert decoder.metric("kv_cache_used_ratio") > 0
        error = refused(lambda: client.completions.create(model="tiny", prompt="x"))
        assert type(error) is openai.RateLimitError and error.code == "queue_full"
        assert int(error.response.headers["retry-after"]) >= 1
    names = ("requests_running", "requests_waiting", "kv_cache_used_ratio")
    decoder.until(lambda: [decoder.metric(name) for name in names] == [0, 0, 0], 2)
    assert decoder.metric("requests_aborted_total") == 4 and decoder.metric("output_tokens_total") < LONG


def test_a_client_that_does_not_wait_for_its_answer(client: openai.OpenAI, decoder: Server):
    before = decoder.metric("requests_aborted_total")
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=LONG, extra_body={"ignore_eos": True}, timeout=0.3
        )
    decoder.until(lambda: decoder.metric("requests_aborted_total") == before + 1, 2)
    decoder.until(lambda: decoder.metric("kv_cache_used_ratio") == 0, 2)


def test_embeddings(tmp_path: Path):
    """As floats, and as the base64 that the client asks for where it is told nothing."""
    with live(folder(tmp_path / "encoder", "mlm")) as here, client_of(here) as client:
        texts = ["one", "another text", "one"]
        given: dict[str, Any] = {"model": "encoder", "input": texts}
        floats = checked(CreateEmbeddingResponse, client.embeddings.with_raw_response.create(encoding_format="float", **given))
        packed = client.embeddings.create(**given)
        assert [row.index for row in packed.data] == [0, 1, 2] and packed.usage == floats.usage
        for row, same in zip(packed.data, floats.data, strict=True):
            assert len(row.embedding) == 16 and row.embedding == pytest.approx(same.embedding, abs=1e-6)
            assert sum(value * value for value in row.embedding) == pytest.approx(1.0, abs=1e-6)
        first, other, again = (row.embedding for row in packed.data)
        assert first == pytest.approx(again, abs=1e-6) and first != pytest.approx(other, abs=1e-2)
        assert client.embeddings.create(model="encoder", input=[7, 8]).usage.prompt_tokens == 2
        error = refused(lambda: client.embeddings.create(model="encoder", input="a", dimensions=8))
        assert type(error) is openai.BadRequestError and (error.code, error.param) == ("unsupported_field", "dimensions")
