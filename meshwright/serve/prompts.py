"""From what a request says to token ids: the one way on which text, ids and messages become a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes, parser

from meshwright.data.tokenizer import Tokenizer, pieces
from meshwright.errors import DataError
from meshwright.serve.faults import ApiError

__all__ = ["ChatTemplate", "Prompts"]

RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "raise_exception")
"""What `chat_template_kwargs` may not replace."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here they are words like others."""

    tags = {"generation"}  # noqa: RUF012  # as the class that is extended has it

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


def _json(value: Any, ensure_ascii: bool = False, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **more)


class ChatTemplate:
    """A Jinja template as `transformers` renders it: sandboxed, blocks trimmed, with its helpers.

    Raises DataError for one that does not parse.
    """

    def __init__(self, source: str, special: Mapping[str, str]):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"the chat template does not parse: line {error.lineno}: {error.message}") from None
        self._special = dict(special)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, open_turn: bool = True, more: Mapping[str, Any] | None = None
    ) -> str:
        """Text of the conversation. open_turn: the template begins the assistant's answer. Raises ApiError (400) with what
        the template says against the messages."""
        try:
            return self._template.render(
                {**(more or {}), **self._special},
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=open_turn,
            )
        except Exception as error:  # a template is a program, which may fail in any way
            text = f"the chat template refuses these messages: {error}"
            raise ApiError(400, text, code="chat_template_error", param="messages") from None


class Prompts:
    """Token ids of prompts for a model of at most `max_len` tokens. Raises ApiError (400)."""

    def __init__(self, tokenizer: Tokenizer, max_len: int):
        self.tokenizer, self.max_len = tokenizer, max_len
        source = tokenizer.chat_template
        self.template = None if source is None else ChatTemplate(source, tokenizer.special_names)

    def of(self, given: Any, param: str = "prompt") -> list[list[int]]:
        """Of every prompt in a field that may have a text, ids, or a list of either."""
        if isinstance(given, str):
            return [self.text(given, param)]
        if isinstance(given[0], int):
            return [self.ids(given, param)]
        return [self.text(one, param) if isinstance(one, str) else self.ids(one, param) for one in given]

    def text(self, text: str, param: str = "prompt") -> list[int]:
        """With bos where the tokenizer's own template begins a text with it, and never twice."""
        ids = self.encode(text, param)
        first = self.tokenizer.bos if self.tokenizer.adds_bos else None
        return ids if first is None or ids[:1] == [first] else [first, *ids]

    def encode(self, text: str, param: str) -> list[int]:
        """Ids of the text alone. One that is far too long is not read to its end."""
        ids: list[int] = []
        for piece in pieces(text):
            try:
                ids += self.tokenizer.encode(piece)
            except DataError as error:
                raise ApiError(400, f"{param}: {error}", code="invalid_value", param=param) from None
            if len(ids) > self.max_len and len(piece) < len(text):
                raise self.too_long(len(ids), param, more=True)
        if not ids:
            raise ApiError(400, f"{param} has no tokens", code="empty_prompt", param=param)
        return ids

    def ids(self, ids: Sequence[int], param: str = "prompt") -> list[int]:
        wrong = next((number for number in ids if number >= self.tokenizer.vocab_size), None)
        if wrong is not None:
            what = f"{param} has token {wrong}, and the largest is {self.tokenizer.vocab_size - 1}"
            raise ApiError(400, what, code="invalid_value", param=param)
        return list(ids)

    def chat(self, messages: Sequence[Mapping[str, Any]], open_turn: bool, more: Mapping[str, Any]) -> list[int]:
        if self.template is None:
            what = "the model's tokenizer has no chat template (chat_template in tokenizer_config.json, or chat_template.jinja)"
            raise ApiError(400, f"{what}; /v1/completions takes plain text", code="no_chat_template", param="messages")
        taken = sorted(set(more) & set(RESERVED))
        if taken:
            what = f"chat_template_kwargs may not replace {', '.join(taken)}"
            raise ApiError(400, what, code="invalid_value", param="chat_template_kwargs")
        return self.encode(self.template.render(messages, open_turn=open_turn, more=more), "messages")

    def room(self, tokens: int, wanted: int | None, param: str = "prompt") -> int:
        """Tokens that an answer may have: `wanted`, or all that are left. Raises ApiError when that does not fit."""
        if tokens + (wanted or 1) > self.max_len:
            raise self.too_long(tokens, param, wanted)
        return self.max_len - tokens if wanted is None else wanted

    def too_long(self, tokens: int, param: str, wanted: int | None = None, more: bool = False) -> ApiError:
        has = f"{param} has {'more than ' if more else ''}{tokens} tokens"
        asked = "" if wanted is None else f" and the answer may have {wanted}, {tokens + wanted} together"
        what = f"this model takes {self.max_len} tokens of prompt and answer; {has}{asked}"
        return ApiError(400, what, code="context_length_exceeded", param=param)
