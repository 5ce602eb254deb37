"""The routes, in process: what they answer, what they refuse, and in which words."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from meshwright.serve import http
from tests.unit.serve_fakes import FakeEngine, call, chunks, served


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 20))


COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def test_a_completion_has_the_shape_of_openai():
    async def story() -> None:
        async with served() as here:
            answer = await here.post(COMPLETE, model="fake", prompt="hi", max_tokens=9)
            assert answer.status_code == 200
            body = answer.json()
            assert body["id"].startswith("cmpl-") and body["object"] == "text_completion" and body["model"] == "fake"
            assert body["choices"] == [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop"}]
            assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
            (request,) = here.engine.seen
            assert request.tokens == tuple(here.engine.tokenizer.encode("hi"))
            assert here.service.waiting == here.service.running == 0

    run(story())


def test_every_setting_reaches_the_engine():
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "min_tokens": 1, "ignore_eos": True,
        "presence_penalty": 0.25, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "seed": 3,
    }  # fmt: skip

    async def story() -> None:
        async with served() as here:
            more = {"stop": "x", "stop_token_ids": [5], "logit_bias": {"7": -100}, "logprobs": 2, "n": 2, "max_tokens": 4}
            assert (await here.post(COMPLETE, prompt=[9, 8], **given, **more)).status_code == 200
            first, second = (request.params for request in here.engine.seen)
            assert {name: getattr(first, name) for name in given} == given
            assert (first.stop, first.stop_ids, first.logit_bias, first.logprobs) == (("x",), (5,), {7: -100}, 2)
            assert first.max_tokens == 4 and (first.seed, second.seed) == (3, 4)
            assert here.engine.seen[0].tokens == (9, 8)
            await here.post(COMPLETE, prompt="a", **dict.fromkeys([*given, *more]))
            plain = here.engine.seen[-1].params
            assert (await here.post(COMPLETE, prompt="a", max_tokens=5.0)).status_code == 200  # an integer, to JSON Schema
            assert here.engine.seen[-1].params.max_tokens == 5
            assert plain.max_tokens == 16 and plain.temperature == 1.0 and plain.seed is None and plain.stop == ()

    run(story())


def test_prompts_of_every_kind_and_several_answers_each():
    async def story() -> None:
        async with served(FakeEngine(("a", "b"))) as here:
            for prompt, count in (("hi", 1), (["hi", "you"], 2), ([7, 8], 1), ([[7], [8, 9]], 2)):
                body = (await here.post(COMPLETE, prompt=prompt, n=2)).json()
                assert [choice["index"] for choice in body["choices"]] == list(range(2 * count))
                assert {choice["text"] for choice in body["choices"]} == {"ab"}
            body = (await here.post(COMPLETE, prompt=["x", [7]][0], echo=True)).json()
            assert body["choices"][0]["text"] == "xab"

    run(story())


def test_best_of_keeps_the_likeliest():
    """The fake's later requests are likelier. Mutation tried: sorting the other way round."""

    async def story() -> None:
        async with served() as here:
            body = (await here.post(COMPLETE, prompt="x", best_of=3, n=1, logprobs=0)).json()
            (choice,) = body["choices"]
            assert choice["logprobs"]["token_logprobs"] == [-0.5 / 3] * 3  # of the last one
            assert len(here.engine.seen) == 3 and body["usage"]["completion_tokens"] == 9

    run(story())


def test_logprobs_of_completions_and_chats():
    async def story() -> None:
        async with served(FakeEngine(("a", "b"))) as here:
            choice = (await here.post(COMPLETE, prompt="x", logprobs=1)).json()["choices"][0]
            told = choice["logprobs"]
            name = ["a", "b"]
            assert told["tokens"] == name and told["token_logprobs"] == [-0.5, -0.5]
            assert told["top_logprobs"] == [{name[0]: -0.5}, {name[1]: -0.5}] and told["text_offset"] == [0, 1]
            choice = (await here.post(CHAT, messages=HELLO, logprobs=True, top_logprobs=2)).json()["choices"][0]
            entry = choice["logprobs"]["content"][0]
            assert entry["token"] == name[0] and entry["bytes"] == list(name[0].encode())
            assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.25, -1.25]  # of the second request
            parts = chunks((await here.post(CHAT, messages=HELLO, logprobs=True, stream=True)).text)
            assert parts[1]["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []

    run(story())


def test_a_stream_joins_to_the_whole_answer():
    async def story() -> None:
        async with served(FakeEngine(("你", "", "好", "!"))) as here:
            whole = (await here.post(COMPLETE, prompt="x", n=2)).json()
            answer = await here.post(COMPLETE, prompt="x", n=2, stream=True, stream_options={"include_usage": True})
            assert answer.headers["content-type"].startswith("text/event-stream")
            *parts, last, done = chunks(answer.text)
            assert done == "[DONE]" and last["choices"] == [] and last["usage"]["completion_tokens"] == 8
            assert all(part["usage"] is None and part["id"] == parts[0]["id"] for part in parts)
            for index in (0, 1):
                mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == index]
                assert "".join(choice["text"] for choice in mine) == whole["choices"][index]["text"] == "你好!"
                assert [choice["finish_reason"] for choice in mine] == [None, None, "stop"]  # a piece without text is not sent
            parts = chunks((await here.post(COMPLETE, prompt="x", stream=True)).text)
            assert parts[-1] == "[DONE]" and not any("usage" in part for part in parts[:-1])

    run(story())


def test_a_chat_is_rendered_once_and_streamed():
    async def story() -> None:
        async with served() as here:
            messages = [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            ]
            body = (await here.post(CHAT, messages=messages, max_completion_tokens=5)).json()
            assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
            assert body["choices"][0]["message"] == {"role": "assistant", "content": "abc"}
            tokens = here.engine.seen[0].tokens
            assert (
                tokens[0] == here.engine.tokenizer.bos and tokens.count(tokens[0]) == 1
            )  # the template writes it, nobody else
            assert here.engine.tokenizer.decode(tokens) == "[system]be brief\n[user]hi\n[assistant]"
            parts = chunks((await here.post(CHAT, messages=HELLO, stream=True)).text)
            deltas = [part["choices"][0]["delta"] for part in parts[:-1]]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert "".join(delta.get("content", "") for delta in deltas) == "abc"
            assert parts[-2]["choices"][0]["finish_reason"] == "stop" and parts[0]["object"] == "chat.completion.chunk"
            assert here.engine.seen[-1].params.max_tokens == 64 - len(here.engine.seen[-1].tokens)  # what the context has left

    run(story())


def test_without_a_chat_template_that_is_said():
    async def story() -> None:
        async with served(FakeEngine(template=None)) as here:
            error = (await here.post(CHAT, messages=HELLO)).json()["error"]
            assert error["code"] == "no_chat_template" and "/v1/completions" in error["message"]
        async with served() as here:
            wrong = [*HELLO, {"role": "system", "content": "late"}]
            error = (await here.post(CHAT, messages=wrong)).json()["error"]
            assert error["code"] == "chat_template_error" and "the system speaks first" in error["message"]

    run(story())


REFUSED = [
    (COMPLETE, {}, "missing_field", "prompt"),
    (COMPLETE, {"prompt": ""}, "invalid_value", "prompt"),
    (COMPLETE, {"prompt": []}, "invalid_value", "prompt"),
    (COMPLETE, {"prompt": [[]]}, "invalid_value", "prompt"),
    (COMPLETE, {"prompt": [""]}, "invalid_value", "prompt"),
    (COMPLETE, {"prompt": None}, "invalid_value", "prompt"),
    (COMPLETE, {"prompt": {"a": 1}}, "invalid_value", "prompt"),
    (COMPLETE, {"prompt": [True]}, "invalid_value", "prompt"),
    (COMPLETE, {"prompt": [262]}, "invalid_value", "prompt"),
    (COMPLETE, {"prompt": [-1]}, "invalid_value", "prompt"),
    (COMPLETE, {"prompt": "\ud800"}, "invalid_value", "prompt"),
    (CHAT, {"messages": []}, "invalid_value", "messages"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "invalid_value", "messages"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "invalid_value", "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "invalid_value", "messages"),
    (CHAT, {"messages": HELLO, "tools": []}, "unsupported_field", "tools"),
    (CHAT, {"messages": HELLO, "tool_choice": "auto"}, "unsupported_field", "tool_choice"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "unsupported_field", "response_format"),
    (CHAT, {"messages": HELLO, "store": True}, "unsupported_field", "store"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "invalid_value", "top_logprobs"),
    (CHAT, {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4}, "invalid_value", "max_tokens"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"messages": "x"}}, "invalid_value", "chat_template_kwargs"),
    (COMPLETE, {"prompt": "a", "suffix": "b"}, "unsupported_field", "suffix"),
    (COMPLETE, {"prompt": "a", "user": "u"}, "unsupported_field", "user"),
    (COMPLETE, {"prompt": "a", "max_token": 3}, "unknown_field", "max_token"),
    (COMPLETE, {"prompt": "a", "max_tokens": "5"}, "invalid_value", "max_tokens"),
    (COMPLETE, {"prompt": "a", "max_tokens": True}, "invalid_value", "max_tokens"),
    (COMPLETE, {"prompt": "a", "max_tokens": 0}, "invalid_value", "max_tokens"),
    (COMPLETE, {"prompt": "a", "max_tokens": 2.5}, "invalid_value", "max_tokens"),
    (COMPLETE, {"prompt": "a", "max_tokens": 10**18}, "invalid_value", "max_tokens"),
    (COMPLETE, {"prompt": "a", "temperature": True}, "invalid_value", "temperature"),
    (COMPLETE, {"prompt": "a", "temperature": 2.5}, "invalid_value", "temperature"),
    (COMPLETE, {"prompt": "a", "top_p": 0}, "invalid_value", "top_p"),
    (COMPLETE, {"prompt": "a", "n": 17}, "invalid_value", "n"),
    (COMPLETE, {"prompt": ["a"] * 100, "n": 2}, "too_many_answers", "n"),
    (COMPLETE, {"prompt": "a", "n": 2, "best_of": 1}, "invalid_value", "best_of"),
    (COMPLETE, {"prompt": "a", "best_of": 2, "stream": True}, "invalid_value", "best_of"),
    (COMPLETE, {"prompt": "a", "echo": True, "logprobs": 1}, "invalid_value", "echo"),
    (COMPLETE, {"prompt": "a", "logprobs": 21}, "invalid_value", "logprobs"),
    (COMPLETE, {"prompt": "a", "stop": [""]}, "invalid_value", "stop"),
    (COMPLETE, {"prompt": "a", "stop": ["x"] * 17}, "invalid_value", "stop"),
    (COMPLETE, {"prompt": "a", "logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
    (COMPLETE, {"prompt": "a", "logit_bias": {"7": 1, "07": 2}}, "invalid_value", "logit_bias"),
    (CHAT, {"messages": HELLO, "verbosity": "low"}, "unsupported_field", "verbosity"),
    (CHAT, {"messages": [{**HELLO[0], "tool_calls": []}]}, "invalid_value", "messages"),
    ("/v1/fill-mask", {"input": "a", "user": "u"}, "unsupported_field", "user"),
    (COMPLETE, {"prompt": "a", "logit_bias": {"1": 101}}, "invalid_value", "logit_bias"),
    (COMPLETE, {"prompt": "a", "min_tokens": 17}, "invalid_value", "min_tokens"),
    (COMPLETE, {"prompt": "a", "seed": 13}, "invalid_value", "seed"),
    (COMPLETE, {"prompt": "a", "stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    (COMPLETE, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "invalid_value", "stream_options"),
    ("/v1/embeddings", {"input": "a"}, "unsupported_task", "model"),
    ("/v1/embeddings", {"input": "a", "dimensions": 3}, "unsupported_field", "dimensions"),
    ("/v1/classify", {"input": "a"}, "unsupported_task", "model"),
    ("/v1/fill-mask", {"input": "a"}, "unsupported_task", "model"),
]


def test_what_cannot_be_done_is_refused_by_name():
    """Mutation tried: `extra="ignore"` in Strict lets the unknown fields through."""

    async def story() -> None:
        async with served() as here:
            for path, body, code, param in REFUSED:
                answer = await here.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
                assert answer.status_code == 400, (body, answer.text)
                error = answer.json()["error"]
                assert (error["code"], error["param"]) == (code, param), (body, error)
                assert error["type"] == "invalid_request_error" and param in error["message"], (body, error)
            assert (await here.post(COMPLETE, prompt="a")).status_code == 200  # and it lives

    run(story())


REPEATED = [
    (COMPLETE, b'{"prompt": "a", "max_tokens": 1, "max_tokens": 9}', "max_tokens"),
    (COMPLETE, b'{"prompt": "a", "prompt": "a"}', "prompt"),
    (COMPLETE, b'{"prompt": "a", "logit_bias": {"7": 1, "8": 1, "7": 2}}', "7"),
    (CHAT, b'{"messages": [{"role": "user", "content": "a", "role": "system"}]}', "role"),
    (CHAT, b'{"messages": 1, "odd": [[{"x": 1, "\\u0078": 2}]]}', "x"),
    ("/v1/embeddings", b'{"input": "a", "input": "b"}', "input"),
    ("/v1/classify", b'{"input": "a", "input": "b"}', "input"),
    ("/v1/fill-mask", b'{"input": "a", "\\ud800": 1, "\\ud800": 2}', "\\ud800"),
]


def test_a_key_that_stands_twice_is_refused_by_name():
    """In objects of any depth, of every route. Mutation tried: without `route_class` the last one wins."""

    async def story() -> None:
        async with served() as here:
            for path, content, key in REPEATED:
                answer = await here.http.post(path, content=content, headers={"content-type": "application/json"})
                error = answer.json()["error"]
                assert (answer.status_code, error["code"], error["param"]) == (400, "repeated_key", key), (content, error)
                assert error["message"].startswith(f"{key} stands more than once in an object of the body"), error
            several = b'{"prompt": ["a", "a"], "logit_bias": {"7": 1, "8": 1}, "stream_options": null, "max_tokens": 1}'
            answer = await here.http.post(COMPLETE, content=several, headers={"content-type": "application/json"})
            assert answer.status_code == 200, answer.text

    run(story())


OF_OPENAI = {
    COMPLETE: "best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty seed stop stream "
    "stream_options suffix temperature top_p user",
    CHAT: "audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens metadata "
    "modalities model n parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_retention "
    "reasoning_effort response_format safety_identifier seed service_tier stop store stream stream_options temperature "
    "tool_choice tools top_logprobs top_p user verbosity web_search_options",
    "/v1/embeddings": "dimensions encoding_format model user",
    "/v1/classify": "model user",
    "/v1/fill-mask": "model user",
}
"""The optional fields of its API reference; of routes that are ours, those that all of its routes have."""
NEEDED = {COMPLETE: {"prompt": "a"}, CHAT: {"messages": HELLO}}


def test_zero_is_not_false_and_a_byte_order_mark_is_no_text():
    """Mutation tried: `Literal[False]`, to which 0 is equal; the document says that it is not."""

    async def story() -> None:
        async with served() as here:
            for body in ({"store": 0}, {"stream": True, "stream_options": {"include_obfuscation": 0}}):
                answer = await here.post(CHAT, messages=HELLO, **body)
                assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter({*body} - {"stream"}))
            assert (await here.post(CHAT, messages=HELLO, store=False)).status_code == 200
            marked = b'\xef\xbb\xbf{"prompt": "a"}'
            answer = await here.http.post(COMPLETE, content=marked, headers={"content-type": "application/json"})
            assert answer.status_code == 200

    run(story())


def test_null_is_the_same_as_leaving_an_optional_field_out():
    """On every route, and of objects in the body; and the document says so. Mutations tried: `user` not of all requests;
    `include_usage: bool = False`; no `refusal` in Message."""
    answered = {**HELLO[0], **dict.fromkeys(["name", "refusal", "tool_calls", "function_call", "audio"]), "annotations": []}

    async def story() -> None:
        async with served() as here:
            for path, names in OF_OPENAI.items():
                known = http.FIELDS[path]
                optional = {*names.split(), *(name for name, field in known.items() if not field.is_required())}
                for name in optional:
                    answer = await here.post(path, **NEEDED.get(path, {"input": "a"}), **{name: None})
                    code = None if path in NEEDED else answer.json()["error"]["code"]
                    assert code == "unsupported_task" or answer.status_code == 200, (path, name, answer.text)
            options = {"include_usage": None, "include_obfuscation": None}
            answer = await here.post(CHAT, messages=[answered], stream=True, stream_options=options)
            assert answer.status_code == 200 and all("usage" not in one for one in chunks(answer.text)[:-1])
            schemas = (await here.http.get("/openapi.json")).json()["components"]["schemas"]
            for name in ("CompletionRequest", "ChatRequest", "Message", "StreamOptions"):
                for field, schema in schemas[name]["properties"].items():
                    kinds = [schema, *schema.get("anyOf", [])]
                    null = any(kind.get("type") == "null" for kind in kinds)
                    assert null or field in schemas[name]["required"], (name, field)

    run(story())


def test_every_finding_is_told_at_once_and_a_near_name_is_offered():
    async def story() -> None:
        async with served() as here:
            error = (await here.post(COMPLETE, prompt="a", max_token=3, n=0, temprature=1, tools=[1])).json()["error"]
            assert "max_token is no field of this request; did you mean max_tokens?" in error["message"]
            assert "temprature is no field" in error["message"] and "n should be greater than" in error["message"]
            many = {f"x{i}": 1 for i in range(50)}
            assert "and 42 more" in (await here.post(COMPLETE, prompt="a", **many)).json()["error"]["message"]

    run(story())


def test_what_a_field_may_be_is_said_for_its_route():
    """Mutation tried: one text for every "input", which offers token ids to a classifier and lists to fill-mask."""

    async def story() -> None:
        async with served() as here:

            async def said(path: str, **body: Any) -> str:
                return (await here.post(path, **body)).json()["error"]["message"]

            assert "at most 128 texts" in await said(COMPLETE, prompt=["a"] * 129)
            assert "at most 16" in await said(COMPLETE, prompt="a", stop=["a"] * 17)
            assert "token ids" in await said("/v1/embeddings", input=[-1])
            assert "token ids" not in (of_classes := await said("/v1/classify", input=[1])) and "128 texts" in of_classes
            assert await said("/v1/fill-mask", input=["a"]) == "input should be a valid string"

    run(story())


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"{", "invalid_json"), (b"[1]", None), (b'{"prompt": "a", "max_tokens": 1e400}', "invalid_value"),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_value"), (b"", None), (b"[" * 100_000, "invalid_json"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "invalid_json"), (b'{"prompt": "\xff"}', "invalid_json"),
        (b"null", None), ('{"prompt": "a"}'.encode("utf-16"), "invalid_json"), (b'{"prompt": "\xed\xa0\x80"}', "invalid_json"),
        (b'{"prompt": "a", "\\ud800": 1}', "invalid_json"),
    ],
    ids=range(12),
)  # fmt: skip
def test_bodies_that_are_no_request(content: bytes, code: str | None):
    async def story() -> None:
        async with served() as here:
            answer = await here.http.post(COMPLETE, content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["type"] == "invalid_request_error" and (code is None or error["code"] == code), error
            assert len(answer.content) < 2000

    run(story())


def test_prompt_and_answer_must_fit_the_context_exactly():
    async def story() -> None:
        async with served(FakeEngine(ends=False)) as here:
            for prompt, answer in ((63, 1), (10, 54)):
                body = (await here.post(COMPLETE, prompt="x" * prompt, max_tokens=answer)).json()
                assert body["choices"][0]["finish_reason"] == "length"
                assert body["usage"] == {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
            for prompt, wanted in ((64, 1), (10, 55), (65, 1), (10, 10**9)):
                refused = await here.post(COMPLETE, prompt="x" * prompt, max_tokens=wanted)
                error = refused.json()["error"]
                assert refused.status_code == 400 and error["code"] == "context_length_exceeded"
                assert "64 tokens" in error["message"] and f"{prompt} tokens" in error["message"]
            assert (await here.post(COMPLETE, prompt="x" * 63 + "y" * 10**6)).json()["error"][
                "code"
            ] == "context_length_exceeded"
            long = [{"role": "user", "content": "x" * 100}]
            assert (await here.post(CHAT, messages=long)).json()["error"]["param"] == "messages"

    run(story())


def test_another_model_and_unknown_routes_are_not_found():
    async def story() -> None:
        async with served() as here:
            answer = await here.post(COMPLETE, model="gpt-4", prompt="a")
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
            assert (await here.http.get("/v1/models/fake")).json()["id"] == "fake"
            assert (await here.http.get("/v1/models/x/y")).status_code == 404
            card = (await here.http.get("/v1/models")).json()["data"][0]
            assert card["max_model_len"] == 64 and card["tasks"] == ["generate"]
            for method, path, status in (("GET", "/v1/nothing", 404), ("GET", COMPLETE, 405), ("DELETE", "/health", 405)):
                answer = await here.http.request(method, path)
                assert answer.status_code == status and answer.json()["error"]["code"]

    run(story())


def test_a_full_queue_is_429_with_retry_after():
    async def story() -> None:
        engine = FakeEngine()
        async with served(engine, max_waiting=1) as here:
            engine.gate.clear()
            first = asyncio.create_task(here.post(COMPLETE, prompt="a"))
            await here.until(lambda: here.service.waiting == 1)
            for stream in (False, True):
                answer = await here.post(COMPLETE, prompt="a", stream=stream)
                assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["type"] == "rate_limit_error"
            engine.gate.set()
            assert (await first).status_code == 200

    run(story())


def test_a_client_that_leaves_a_stream_is_worked_for_no_more():
    """Mutation tried: without `generation.close()` in EventStream the engine goes on."""

    async def story() -> None:
        engine = FakeEngine(ends=False, max_len=10**7)
        async with served(engine) as here:
            body = json.dumps({"prompt": "a", "max_tokens": 10**6, "stream": True}).encode()
            await asyncio.gather(*(call(here.app, COMPLETE, body, leave_after=2) for _ in range(20)))
            await here.until(lambda: not engine.under)
            assert here.service.running == here.service.waiting == 0 and len(engine.aborted) == 20
            assert "meshwright_requests_aborted_total 20.0" in (await here.http.get("/metrics")).text
            engine.ends = True
            assert (await here.post(COMPLETE, prompt="a")).status_code == 200

    run(story())


def test_a_client_that_leaves_before_a_whole_answer_is_noticed():
    """Mutation tried: awaiting `gather` without `until_gone` never ends."""

    async def story() -> None:
        engine = FakeEngine(ends=False, max_len=10**7)
        async with served(engine) as here:
            gone = asyncio.Event()
            body, sent = json.dumps({"prompt": "a", "max_tokens": 10**6}).encode(), []

            async def receive() -> dict[str, Any]:
                if not sent:
                    sent.append(True)
                    return {"type": "http.request", "body": body, "more_body": False}
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message: dict[str, Any]) -> None: ...

            scope = {
                "type": "http", "method": "POST", "path": COMPLETE, "raw_path": b"", "query_string": b"", "root_path": "",
                "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
            }  # fmt: skip
            task = asyncio.create_task(here.app(scope, receive, send))  # type: ignore[arg-type]
            await here.until(lambda: engine.under)
            gone.set()
            await asyncio.wait_for(task, 2)
            await here.until(lambda: not engine.under)
            assert 'status="499"' in (await here.http.get("/metrics")).text

    run(story())


def test_ready_follows_the_engine_and_health_does_not():
    async def story() -> None:
        engine = FakeEngine(ends=False, max_len=10**7, fail=(3, RuntimeError("no device")))
        async with served(engine) as here:
            assert (await here.http.get("/ready")).json() == {"status": "ok", "reason": None}
            answer = await here.post(COMPLETE, prompt="a", max_tokens=100)
            assert answer.status_code == 503 and "no device" in answer.json()["error"]["message"]
            ready = await here.http.get("/ready")
            assert ready.status_code == 503 and "no device" in ready.json()["reason"]
            assert (await here.http.get("/health")).json()["status"] == "ok"
            assert [(await here.http.head(path)).status_code for path in ("/health", "/ready", "/metrics")] == [200, 503, 405]
            posted = [await here.http.post(path) for path in ("/health", "/ready")]
            assert [sorted(one.headers["allow"].split(", ")) for one in posted] == [["GET", "HEAD"]] * 2  # only GET before: red
            assert "meshwright_ready 0.0" in (await here.http.get("/metrics")).text
            again = await here.post(COMPLETE, prompt="a")
            assert again.status_code == 503 and again.headers["retry-after"]
        async with served(FakeEngine(ends=False, fail=(3, RuntimeError("no device")))) as here:
            *_, last = chunks((await here.post(COMPLETE, prompt="a", max_tokens=60, stream=True)).text)
            assert last["error"]["type"] == "server_error" and "no device" in last["error"]["message"]  # and no [DONE]

    run(story())


def test_logits_that_are_no_numbers_are_an_error_of_ours():
    async def story() -> None:
        engine = FakeEngine()
        inner = engine._output

        def broken(under: Any) -> Any:
            output = inner(under)
            engine.under.pop(output.id, None)
            return type(output)(output.id, [], "", "error")

        engine._output = broken  # type: ignore[method-assign]
        async with served(engine) as here:
            answer = await here.post(COMPLETE, prompt="a")
            assert answer.status_code == 500 and answer.json()["error"]["code"] == "engine_error"

    run(story())


def test_a_mistake_of_ours_has_the_shape_too(monkeypatch: pytest.MonkeyPatch):
    async def story() -> None:
        async with served() as here:
            monkeypatch.setattr(here.service, "submit", lambda requests: 1 / 0)
            answer = await here.post(COMPLETE, prompt="a")
            assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
            assert "division" not in answer.text

    run(story())


def test_silence_is_broken_so_that_nobody_hangs_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("meshwright.serve.stream.PING_S", 0.02)

    async def story() -> None:
        engine = FakeEngine()
        async with served(engine) as here:
            engine.gate.clear()
            task = asyncio.create_task(here.post(COMPLETE, prompt="a", stream=True))
            await asyncio.sleep(0.1)
            engine.gate.set()
            text = (await task).text
            assert ": waiting\n\n" in text and chunks(text)[-1] == "[DONE]"

    run(story())
