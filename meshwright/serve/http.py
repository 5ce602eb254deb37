"""The routes: `create_app` makes a FastAPI application around a service."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from meshwright import __version__
from meshwright.data.tokenize import Form
from meshwright.errors import MeshwrightError
from meshwright.serve import page
from meshwright.serve.answers import Answers, ChatAnswers, CompletionAnswers, sampling
from meshwright.serve.body import BodyRoute, RepeatedKey
from meshwright.serve.encoder_work import EncoderWork
from meshwright.serve.faults import ApiError, from_engine, from_validation, mask_missing
from meshwright.serve.gate import Gate, Keys, response_of
from meshwright.serve.metrics import CONTENT_TYPE
from meshwright.serve.openapi import answers, describe
from meshwright.serve.prompts import Prompts
from meshwright.serve.protocol import (
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    EmbeddingRequest,
    FillMaskRequest,
    Sampling,
)
from meshwright.serve.replies import (
    Candidate,
    ChatCompletion,
    Classification,
    ClassRow,
    Completion,
    Embedding,
    Embeddings,
    Filled,
    InputUsage,
    ModelCard,
    ModelList,
    State,
    dumped,
)
from meshwright.serve.sampling import SamplingParams
from meshwright.serve.service import Generation, Service
from meshwright.serve.stream import EventStream, Gone, until_gone

__all__ = ["Limits", "create_app"]

LONG_TEXT = 1 << 13
"""Characters of a body beyond which its prompts are tokenised beside the event loop, which other streams share."""


@dataclass(frozen=True)
class Limits:
    """max_body: bytes. body_s: seconds in which a body must have come. max_answers: of one request (prompts x n)."""

    max_body: int = 4 << 20
    body_s: float = 10.0
    max_answers: int = 128


class Routes:
    """The handlers, with what they share."""

    def __init__(self, service: Service, limits: Limits):
        self.service, self.limits = service, limits
        self.engine = service.engine
        self.model, self.tokenizer = service.engine.model_name, service.engine.tokenizer
        self.tasks: frozenset[str] = getattr(service.engine, "tasks", frozenset({"generate"}))
        self.prompts = Prompts(self.tokenizer, service.engine.max_len)
        self.form = Form.of("masked_lm", self.tokenizer)
        self.created = int(time.time())

    # ---- what is shared

    def check(self, model: str | None, task: str) -> None:
        """Raises ApiError for another model, and for what this one does not do."""
        if model is not None and model != self.model:
            raise ApiError(
                404, f"there is no model {model[:80]!r}; {self.model} is served", code="model_not_found", param="model"
            )
        if task not in self.tasks:
            what = f"the model {self.model} does {', '.join(sorted(self.tasks))}, not {task}"
            raise ApiError(400, what, code="unsupported_task", param="model")

    def unknown(self, model: str) -> ApiError:
        what = f"there is no model {model[:80]!r}; {self.model} is served"
        return ApiError(404, what, code="model_not_found", param="model")

    async def made(self, size: int, make: Callable[[], Any]) -> Any:
        """What `make` gives; long texts are encoded in a thread."""
        return await asyncio.to_thread(make) if size > LONG_TEXT else make()

    def settings(self, body: Sampling, prompts: Sequence[Any], each: int, wanted: int | None, logprobs: int | None) -> Any:
        """(settings of every answer). Raises ApiError."""
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream: true", code="invalid_value", param="stream_options")
        if len(prompts) * each > self.limits.max_answers:
            what = f"{len(prompts)} prompts with {each} answers each are more than {self.limits.max_answers} answers"
            raise ApiError(400, what, code="too_many_answers", param="n")
        rooms = [self.prompts.room(len(ids), wanted, self.field(body)) for ids in prompts]
        params: list[SamplingParams] = []
        for room in rooms:
            params += [sampling(body, number, room, logprobs) for number in range(each)]
        return params

    def field(self, body: Sampling) -> str:
        return "prompt" if isinstance(body, CompletionRequest) else "messages"

    def stream(self, answers: Answers, generation: Generation) -> Response:
        return EventStream(answers.events(generation), generation)

    # ---- generation

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        self.check(body.model, "generate")
        n, each = body.n or 1, max(body.best_of or 0, body.n or 1)
        if body.best_of is not None and (body.best_of < n or body.stream):
            what = f"best_of {body.best_of} must be at least n {n}, and has no meaning in a stream"
            raise ApiError(400, what, code="invalid_value", param="best_of")
        if body.echo and body.logprobs is not None:
            raise ApiError(400, "echo has no log-probabilities: leave one of them out", code="invalid_value", param="echo")
        size = _characters(body.prompt)
        ids = await self.made(size, lambda: self.prompts.of(body.prompt))
        wanted = 0 if body.logprobs is None and each > n else body.logprobs
        params = self.settings(body, ids, each, body.max_tokens or 16, wanted)
        echo = self.texts(body.prompt) if body.echo else None
        made = CompletionAnswers(self.model, self.tokenizer, ids, each, body, tops=body.logprobs, echo=echo)
        generation = self.service.submit(made.requests(params))
        if body.stream:
            return self.stream(made, generation)
        async with generation:
            await until_gone(request, made.gather(generation))
        return JSONResponse(dumped(made.whole(n)))

    def texts(self, given: Any) -> list[str]:
        """The prompts as texts, for echo."""
        if isinstance(given, str):
            return [given]
        if isinstance(given[0], int):
            return [self.tokenizer.decode(given)]
        return [one if isinstance(one, str) else self.tokenizer.decode(one) for one in given]

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        self.check(body.model, "generate")
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", code="invalid_value", param="top_logprobs")
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            raise ApiError(400, "max_tokens and max_completion_tokens differ", code="invalid_value", param="max_tokens")
        messages = [self.message(one) for one in body.messages]
        open_turn = body.add_generation_prompt is not False
        more = body.chat_template_kwargs or {}
        size = sum(len(one["content"]) for one in messages)
        ids = await self.made(size, lambda: self.prompts.chat(messages, open_turn, more))
        each = body.n or 1
        tops = (body.top_logprobs or 0) if body.logprobs else None
        params = self.settings(body, [ids], each, body.max_tokens or body.max_completion_tokens, tops)
        made = ChatAnswers(self.model, self.tokenizer, [ids], each, body, tops=tops)
        generation = self.service.submit(made.requests(params))
        if body.stream:
            return self.stream(made, generation)
        async with generation:
            await until_gone(request, made.gather(generation))
        return JSONResponse(dumped(made.whole()))

    def message(self, message: Any) -> dict[str, str]:
        """As templates expect it: the parts of a content joined, "developer" under its older name where it is the system."""
        parts = message.content
        content = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        role = "system" if message.role == "developer" else message.role
        return {"role": role, "content": content, **({"name": message.name} if message.name is not None else {})}

    # ---- encoders

    async def rows(self, request: Request, texts: Any, kind: str, top: int = 5) -> tuple[list[Any], list[list[int]]]:
        """(what the engine says of each input, the inputs' tokens)."""
        given = [texts] if isinstance(texts, str) or isinstance(texts[0], int) else list(texts)

        def encoded() -> list[list[int]]:
            return [self.framed(one) for one in given]

        ids = await self.made(_characters(given), encoded)
        if kind == "fill-mask" and self.tokenizer.mask not in ids[0]:
            name = None if self.tokenizer.mask is None else self.tokenizer.token(self.tokenizer.mask)
            raise mask_missing(name)
        group = uuid.uuid4().hex
        works = [EncoderWork(f"{kind}-{group}-{i}", tuple(one), kind, top) for i, one in enumerate(ids)]
        values: list[Any] = [None] * len(works)

        async def gather(generation: Generation) -> None:
            async for index, output in generation:
                values[index] = output.value

        async with self.service.submit(works) as generation:
            await until_gone(request, gather(generation))
        return values, ids

    def framed(self, given: Any) -> list[int]:
        """Tokens of an input with what training puts around a row. Ids are taken as they are."""
        if not isinstance(given, str):
            ids = self.prompts.ids(given, "input")
        else:
            ids = [*self.form.prefix, *self.prompts.encode(given, "input"), *self.form.suffix]
        if len(ids) > self.engine.max_len:
            what = f"input has {len(ids)} tokens, this model takes {self.engine.max_len}"
            raise ApiError(400, what, code="context_length_exceeded", param="input")
        return ids

    def input_usage(self, ids: Sequence[Sequence[int]]) -> InputUsage:
        tokens = sum(map(len, ids))
        return InputUsage(prompt_tokens=tokens, total_tokens=tokens)

    async def embed(self, request: Request, body: EmbeddingRequest) -> Response:
        self.check(body.model, "embed")
        values, ids = await self.rows(request, body.input, "embed")
        if body.encoding_format == "base64":
            values = [base64.b64encode(np.asarray(value, "<f4").tobytes()).decode() for value in values]
        data = [Embedding(index=index, embedding=value) for index, value in enumerate(values)]
        return JSONResponse(dumped(Embeddings(model=self.model, data=data, usage=self.input_usage(ids))))

    async def classify(self, request: Request, body: ClassifyRequest) -> Response:
        self.check(body.model, "classify")
        values, ids = await self.rows(request, body.input, "classify")
        labels: Sequence[str] = self.engine.labels  # type: ignore[attr-defined]  # it classifies
        data = []
        for index, chances in enumerate(values):
            best = max(range(len(labels)), key=chances.__getitem__)
            scores = dict(zip(labels, chances, strict=True))
            data.append(ClassRow(index=index, label=labels[best], score=chances[best], scores=scores))
        return JSONResponse(dumped(Classification(model=self.model, data=data, usage=self.input_usage(ids))))

    async def fill(self, request: Request, body: FillMaskRequest) -> Response:
        self.check(body.model, "fill-mask")
        mask = None if self.tokenizer.mask is None else self.tokenizer.token(self.tokenizer.mask)
        text = body.input.replace("[MASK]", mask) if mask is not None else body.input
        (found,), (ids,) = await self.rows(request, text, "fill-mask", body.top_k or 5)
        places = [at for at, token in enumerate(ids) if token == self.tokenizer.mask]
        inner = slice(len(self.form.prefix), len(ids) - len(self.form.suffix))
        data: list[list[Candidate]] = []
        for place, candidates in zip(places, found, strict=True):
            data.append([])
            for token, score in candidates:
                filled = [*ids[:place], token, *ids[place + 1 :]][inner]
                sequence = self.tokenizer.decode(filled, skip_special=False)
                data[-1].append(
                    Candidate(token=token, token_str=self.tokenizer.decode([token], False), score=score, sequence=sequence)
                )
        return JSONResponse(dumped(Filled(model=self.model, data=data, usage=self.input_usage([ids]))))

    # ---- about the server

    def card(self) -> ModelCard:
        mask = self.tokenizer.mask if "fill-mask" in self.tasks else None
        return ModelCard(
            id=self.model,
            created=self.created,
            owned_by="meshwright",
            max_model_len=self.engine.max_len,
            tasks=sorted(self.tasks),
            mask_token=None if mask is None else self.tokenizer.token(mask),
        )

    async def models(self) -> Response:
        return JSONResponse(dumped(ModelList(data=[self.card()])))

    async def one_model(self, model: str) -> Response:
        if model != self.model:
            raise ApiError(
                404, f"there is no model {model[:80]!r}; {self.model} is served", code="model_not_found", param="model"
            )
        return JSONResponse(dumped(self.card()))

    async def health(self) -> Response:
        """Whether the process is up."""
        return JSONResponse(dumped(State(status="ok")))

    async def ready(self) -> Response:
        """Whether a request would be answered: the engine has not failed, steps, and the server does not stop."""
        reason = self.service.trouble()
        state = State(status="ok") if reason is None else State(status="not ready", reason=reason)
        return JSONResponse(dumped(state), 200 if reason is None else 503)

    async def metrics(self) -> Response:
        self.service.metrics.ready.set(self.service.trouble() is None)
        return Response(self.service.metrics.text(), media_type=CONTENT_TYPE)

    async def page(self) -> Response:
        return Response(page.html(), media_type="text/html; charset=utf-8", headers=page.headers())


def create_app(service: Service, *, keys: Keys | None = None, limits: Limits | None = None) -> FastAPI:
    """The application. keys: None: every route is open. The service must be started on the event loop that runs it."""
    limits = limits or Limits()
    routes = Routes(service, limits)
    # the pages that FastAPI makes of the document load scripts from elsewhere
    app = FastAPI(title="Meshwright", version=__version__, docs_url=None, redoc_url=None, separate_input_output_schemas=False)
    app.router.route_class = BodyRoute
    stream, tasks = "text/event-stream", routes.tasks
    _post(app, "/v1/completions", routes.complete, answers(Completion, stream=stream), "generate" in tasks)
    _post(app, "/v1/chat/completions", routes.chat, answers(ChatCompletion, stream=stream), "generate" in tasks)
    _post(app, "/v1/embeddings", routes.embed, answers(Embeddings), "embed" in tasks)
    _post(app, "/v1/classify", routes.classify, answers(Classification), "classify" in tasks)
    _post(app, "/v1/fill-mask", routes.fill, answers(Filled), "fill-mask" in tasks)
    _get(app, "/v1/models", routes.models, answers(ModelList, body=False))
    _get(app, "/v1/models/{model:path}", routes.one_model, answers(ModelCard, body=False, missing=True))
    for path, handler in (("/health", routes.health), ("/ready", routes.ready)):
        # GET too, and before the documented ones: a 405 names what the first route of the path allows
        app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)(handler)
    _get(app, "/health", routes.health, {200: {"model": State}})
    _get(app, "/ready", routes.ready, {200: {"model": State}, 503: {"model": State, "description": "Not ready"}})
    _get(app, "/metrics", routes.metrics, answers(None, body=False, other="text/plain"))
    _get(app, "/", routes.page, answers(None, body=False, other="text/html"))
    _handlers(app)
    describe(app, keyed=keys is not None)
    app.add_middleware(Gate, keys=keys, max_body=limits.max_body, body_s=limits.body_s, metrics=service.metrics)
    return app


def _characters(given: Any) -> int:
    """Of the texts in it."""
    return len(given) if isinstance(given, str) else sum(len(one) for one in given if isinstance(one, str))


def _post(app: FastAPI, path: str, handler: Callable[..., Any], responses: Any, served: bool) -> None:
    """served: the model does it. Where it does not, the document has no such route, and a request is told why."""
    app.post(
        path,
        response_class=JSONResponse,
        response_model=None,
        responses=responses,
        tags=["model"],
        include_in_schema=served,
    )(handler)


def _get(app: FastAPI, path: str, handler: Callable[..., Any], responses: Any) -> None:
    app.get(path, response_class=JSONResponse, response_model=None, responses=responses, tags=["server"])(handler)


def _handlers(app: FastAPI) -> None:
    """Everything that goes wrong is answered in one shape."""

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        fields = FIELDS.get(getattr(request.scope.get("route"), "path", ""), {})
        return response_of(from_validation(error.errors(), fields))

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, MeshwrightError)
        return response_of(from_engine(error))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error, RepeatedKey):
            return response_of(ApiError(400, error.detail, code="repeated_key", param=error.key))
        if error.status_code == 400:  # of the reader of the body, for all that is no plain mistake of syntax
            text = "the body is not valid JSON in UTF-8, is nested too deeply, or has a number of too many digits"
            return response_of(ApiError(400, text, code="invalid_json"))
        text = f"{request.method} {request.url.path[:200]}: {error.detail}"
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        return response_of(ApiError(error.status_code, text, code=code, headers=error.headers))

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it; the number is for the count

    async def other(request: Request, error: Exception) -> Response:
        return response_of(ApiError(500, "the server made a mistake; its log has more", code="internal_error"))

    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(MeshwrightError, ours)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Gone, gone)
    app.add_exception_handler(Exception, other)


FIELDS = {
    "/v1/completions": CompletionRequest.model_fields,
    "/v1/chat/completions": ChatRequest.model_fields,
    "/v1/embeddings": EmbeddingRequest.model_fields,
    "/v1/classify": ClassifyRequest.model_fields,
    "/v1/fill-mask": FillMaskRequest.model_fields,
}
