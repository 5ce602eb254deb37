"""An encoder in Triton's Python backend, by ONNX Runtime. This file is copied into a model repository as it is, so it needs
numpy, onnxruntime and tokenizers, and nothing of what wrote it.

Shapes: B rows of all requests together, S positions of their longest, K masks of a row.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import tokenizers
import triton_python_backend_utils as pb

TOP = 5
"""Candidates for a mask."""


class TritonPythonModel:
    """text_input -> label and scores of a classifier, embedding, or token and score of each mask."""

    def initialize(self, args: dict[str, str]) -> None:
        here = Path(args["model_repository"]) / args["model_version"]
        self.facts = json.loads((here / "export.json").read_text(encoding="utf-8"))
        self.tokenizer = tokenizers.Tokenizer.from_file(str(here / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        known = ("CUDAExecutionProvider", "CPUExecutionProvider")
        providers = [name for name in known if name in onnxruntime.get_available_providers()]
        self.session = onnxruntime.InferenceSession(str(here / "model.onnx"), providers=providers)
        classes = self.facts.get("id2label") or {}
        self.labels = [classes[key] for key in sorted(classes, key=int)]
        self.mask = self.facts["mask_token_id"]
        self.mask_name = None if self.mask is None else self.tokenizer.id_to_token(self.mask)

    def execute(self, requests: list[Any]) -> list[Any]:
        """One run for the rows of all requests that came together. A request with a row that cannot be answered gets an error,
        and the others their answers."""
        rows: list[list[list[int]]] = []
        refused: dict[int, str] = {}
        for number, request in enumerate(requests):
            texts = pb.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)
            try:
                rows.append([self.encode(text.decode("utf-8")) for text in texts])
            except ValueError as error:  # UnicodeDecodeError is one
                rows.append([])
                refused[number] = str(error)
        values = self.run([row for group in rows for row in group])
        responses, at = [], 0
        for number, group in enumerate(rows):
            if number in refused:
                responses.append(pb.InferenceResponse(error=pb.TritonError(refused[number])))
            else:
                responses.append(pb.InferenceResponse(self.answer(group, values[at : at + len(group)])))
            at += len(group)
        return responses

    def encode(self, text: str) -> list[int]:
        """Token ids with what training puts around a row. Raises ValueError."""
        if self.facts["task"] == "mlm" and self.facts["output"] == "logits" and self.mask_name is not None:
            text = text.replace("[MASK]", self.mask_name)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        ids = [*self.facts["prefix"], *ids, *self.facts["suffix"]]
        if not ids:
            raise ValueError("text_input has no tokens")
        if len(ids) > self.facts["max_len"]:
            raise ValueError(f"text_input has {len(ids)} tokens, this model takes {self.facts['max_len']}")
        if self.facts["task"] == "mlm" and self.facts["output"] == "logits" and self.mask not in ids:
            raise ValueError(f"text_input has no {self.mask_name}")
        return ids

    def run(self, rows: list[list[int]]) -> np.ndarray:
        if not rows:
            return np.empty(0)
        size = max(map(len, rows))
        tokens = np.full((len(rows), size), self.facts["pad_token_id"], dtype=np.int64)
        mask = np.zeros_like(tokens)
        for number, row in enumerate(rows):
            tokens[number, : len(row)], mask[number, : len(row)] = row, 1
        return self.session.run(None, {"input_ids": tokens, "attention_mask": mask})[0]

    def answer(self, rows: list[list[int]], values: np.ndarray) -> list[Any]:
        if self.facts["output"] == "embeddings":
            return [pb.Tensor("embedding", values.astype(np.float32))]
        if self.facts["task"] == "classify":
            chances = softmax(values)
            best = np.array([[self.labels[number]] for number in chances.argmax(-1)], dtype=np.object_)
            return [pb.Tensor("label", best), pb.Tensor("scores", chances.astype(np.float32))]
        places = [[at for at, token in enumerate(row) if token == self.mask] for row in rows]
        most = max(map(len, places))
        tokens = np.full((len(rows), most, TOP), "", dtype=np.object_)
        scores = np.zeros((len(rows), most, TOP), dtype=np.float32)
        for number, masks in enumerate(places):
            for slot, at in enumerate(masks):
                chances = softmax(values[number, at, : self.facts["vocab_size"]])
                first = np.argsort(-chances, kind="stable")[:TOP]
                tokens[number, slot] = [self.tokenizer.decode([int(token)], skip_special_tokens=False) for token in first]
                scores[number, slot] = chances[first]
        return [pb.Tensor("token", tokens), pb.Tensor("score", scores)]


def softmax(values: np.ndarray) -> np.ndarray:
    raised = np.exp(values.astype(np.float64) - values.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)
