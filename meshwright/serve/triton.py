"""A decoder in Triton's Python backend: requests of all clients run together in one engine, whenever they come.

Triton hands over requests in groups; they are queued, and a thread that steps the engine answers each when it is done. So a
request that comes later joins those that are under way, which answering a group at a time would not allow.
"""

from __future__ import annotations

import importlib
import itertools
import queue
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import UserError
from meshwright.serve.engine import LLMEngine
from meshwright.serve.faults import ApiError
from meshwright.serve.prompts import Prompts
from meshwright.serve.request import Output, Request
from meshwright.serve.sampling import SamplingParams

__all__ = ["DecoderModel"]

SETTINGS = {"max_tokens": int, "temperature": float, "top_p": float, "top_k": int, "seed": int}
"""Optional inputs, by the names of `SamplingParams`, with its defaults."""


@dataclass
class _Asked:
    """A request of Triton: a row is a prompt. left: rows that are under way."""

    request: Any
    sender: Any
    left: set[str] = field(default_factory=set)
    texts: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


class DecoderModel:
    """What Triton calls `TritonPythonModel`. backend: its module `triton_python_backend_utils`; None: imported."""

    def __init__(self, backend: Any = None) -> None:
        self.backend = backend or importlib.import_module("triton_python_backend_utils")  # Triton has it in the path

    def initialize(self, args: dict[str, str]) -> None:
        self.engine = LLMEngine.load(Path(args["model_repository"]) / args["model_version"] / "model")
        assert self.engine.tokenizer is not None  # one that was loaded has it
        self.prompts = Prompts(self.engine.tokenizer, self.engine.max_len)  # type: ignore[arg-type]  # a whole Tokenizer
        self._numbers = itertools.count()
        self._new: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._under: dict[str, tuple[_Asked, int]] = {}
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Queue them; the answers go through their senders."""
        for request in requests:
            self._new.put(_Asked(request, request.get_response_sender()))

    def finalize(self) -> None:
        """Finish what is under way, and end."""
        self._new.put(None)
        self._thread.join()

    # ---- the engine's thread

    def _work(self) -> None:
        open_ = True
        while open_ or self._under:
            while open_ and (not self._new.empty() or not self._under):
                asked = self._new.get()
                if asked is None:
                    open_ = False
                else:
                    self._begin(asked)
            try:
                self._step()
            except Exception as error:  # whatever it is, nobody may be left waiting
                print(f"the engine failed: {error!r}", file=sys.stderr, flush=True)
                for asked in {id(asked): asked for asked, _ in self._under.values()}.values():
                    self._refuse(asked, f"the engine failed: {error}")

    def _begin(self, asked: _Asked) -> None:
        try:
            texts = self._input(asked.request, "text_input", required=True)
            params = self._params(asked.request, len(texts))
            ids = [self.prompts.text(text.decode("utf-8"), "text_input") for text in texts]
            for row, setting in zip(ids, params, strict=True):
                self.prompts.room(len(row), setting.max_tokens, "text_input")
            asked.texts, asked.counts, asked.reasons = [""] * len(ids), [0] * len(ids), [""] * len(ids)
            for number, (row, setting) in enumerate(zip(ids, params, strict=True)):
                id = str(next(self._numbers))
                self.engine.add(Request(id, tuple(row), setting))
                self._under[id] = (asked, number)
                asked.left.add(id)
        except (UserError, ApiError, ValueError) as error:
            self._refuse(asked, str(error))

    def _step(self) -> None:
        for asked in {id(asked): asked for asked, _ in self._under.values()}.values():
            if asked.request.is_cancelled():
                self._refuse(asked, "the client left")
        for output in self.engine.step() if self.engine.has_work else ():
            if output.id in self._under:
                self._take(*self._under[output.id], output)

    def _take(self, asked: _Asked, number: int, output: Output) -> None:
        asked.texts[number] += output.text
        asked.counts[number] += len(output.tokens)
        if output.finish is None:
            return
        del self._under[output.id]
        asked.left.discard(output.id)
        asked.reasons[number] = output.finish
        if output.finish == "error":
            self._refuse(asked, "the model gave logits that are no numbers")
        elif not asked.left:
            self._answer(asked)

    def _answer(self, asked: _Asked) -> None:
        def column(values: list[Any], dtype: Any) -> np.ndarray:
            return np.array(values, dtype=dtype).reshape(-1, 1)

        tensors = [
            self.backend.Tensor("text_output", column([text.encode("utf-8") for text in asked.texts], np.object_)),
            self.backend.Tensor("finish_reason", column([reason.encode() for reason in asked.reasons], np.object_)),
            self.backend.Tensor("output_tokens", column(asked.counts, np.int32)),
        ]
        self._send(asked, self.backend.InferenceResponse(tensors))

    def _refuse(self, asked: _Asked, why: str) -> None:
        """An error for the whole request; none of its rows is worked for any more."""
        for id in asked.left:
            self.engine.abort(id)
            self._under.pop(id, None)
        asked.left.clear()
        self._send(asked, self.backend.InferenceResponse(error=self.backend.TritonError(why)))

    def _send(self, asked: _Asked, response: Any) -> None:
        asked.sender.send(response, flags=self.backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    # ---- what a request says

    def _input(self, request: Any, name: str, required: bool = False) -> Any:
        tensor = self.backend.get_input_tensor_by_name(request, name)
        if tensor is None:
            if required:
                raise ValueError(f"{name} is missing")
            return None
        return tensor.as_numpy().reshape(-1)

    def _params(self, request: Any, rows: int) -> list[SamplingParams]:
        given: list[dict[str, Any]] = [{} for _ in range(rows)]
        for name, kind in SETTINGS.items():
            values = self._input(request, name)
            if values is not None:
                if len(values) != rows:
                    raise ValueError(f"{name} has {len(values)} values for {rows} rows")
                for row, value in zip(given, values, strict=True):
                    row[name] = kind(value)
        return [SamplingParams(**row) for row in given]
