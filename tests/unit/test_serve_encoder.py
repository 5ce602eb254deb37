"""Encoders behind the same service: rows together are as rows alone, and the routes say what they mean."""

from __future__ import annotations

import asyncio
import base64
import functools
import struct
from typing import Any

import pytest
import torch

from meshwright.config.schema import ModelConfig
from meshwright.errors import UserError
from meshwright.models import build, initialize
from meshwright.serve.encoder import EncoderEngine
from meshwright.serve.encoder_work import EncoderWork
from tests.unit.serve_fakes import byte_tokenizer, served


@functools.cache
def engine(task: str, **options: Any) -> EncoderEngine:
    shape = {"arch": "encoder", "layers": 2, "width": 16, "heads": 2, "ffn": 32, "vocab": 262, "max_len": 48}
    config = ModelConfig(**shape, classes=3 if task == "classify" else None)  # type: ignore[arg-type]
    model = build(config, task, torch.float64)
    initialize(model, 0, torch.device("cpu"))
    labels = ("x", "y", "z") if task == "classify" else ()
    return EncoderEngine(model, byte_tokenizer(), task, model_name="enc", labels=labels, **options)


def work(id: str, size: int, kind: str = "embed") -> EncoderWork:
    return EncoderWork(id, tuple(6 + (7 * i + size) % 250 for i in range(size)), kind)


def values(engine: EncoderEngine, works: list[EncoderWork]) -> dict[str, Any]:
    for one in works:
        engine.add(one)
    found = {}
    while engine.has_work:
        found.update({output.id: output.value for output in engine.step()})
    return found


@pytest.mark.parametrize(("task", "kind"), [("mlm", "embed"), ("classify", "embed"), ("classify", "classify")])
def test_rows_of_a_batch_are_as_rows_alone(task: str, kind: str):
    """Mutation tried: without `documents` the padding is attended to (1e-2)."""
    here = engine(task)
    works = [work(f"{size}", size, kind) for size in (10, 12, 11, 40, 3)]
    together = values(here, works)
    for one in works:
        alone = values(here, [one])[one.id]
        assert torch.allclose(torch.tensor(together[one.id]), torch.tensor(alone), rtol=0, atol=1e-12)
        total = sum(value**2 for value in alone) if kind == "embed" else sum(alone)
        assert total == pytest.approx(1.0, abs=1e-12)


def test_an_embedding_is_the_mean_of_the_last_hidden_states():
    """Against torch's own mean over a whole row through the model's parts. Mutation tried: the first state instead."""
    here = engine("mlm")
    one = work("a", 9)
    model, tokens = here.model, torch.tensor([one.tokens])
    with torch.no_grad():
        x = model.run_layers(model.embed(tokens, None, None), (0, 2), tokens, None, None, None, None)
        x = x if model.norm is None else model.norm(x)
    wanted = x[0].mean(0)
    assert torch.allclose(torch.tensor(values(here, [one])["a"], dtype=torch.float64), wanted / wanted.norm(), atol=1e-12)


def test_rows_of_like_length_and_kind_run_together():
    here = engine("classify", batch_tokens=40)
    for one in (work("a", 10), work("b", 40), work("c", 12), work("d", 11, "classify"), work("e", 9), work("f", 10)):
        here.add(one)
    steps = []
    while here.has_work:
        steps.append(sorted(output.id for output in here.step()))
    assert steps == [["a", "e", "f"], ["b"], ["c"], ["d"]]  # "c" would make 4 rows of 12, past 40 tokens
    here.add(work("g", 5))
    here.abort("g")
    assert not here.has_work
    with pytest.raises(UserError, match="not fill-mask"):
        here.add(work("h", 5, "fill-mask"))
    with pytest.raises(UserError, match="takes 48"):
        here.add(work("i", 49))


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 20))


def test_the_routes_of_a_masked_model():
    async def story() -> None:
        async with served(engine("mlm")) as here:
            card = (await here.http.get("/v1/models")).json()["data"][0]
            assert card["tasks"] == ["embed", "fill-mask"] and card["mask_token"] == "<|mask|>"
            body = (await here.post("/v1/fill-mask", input="a[MASK]c<|mask|>", top_k=3)).json()
            assert [len(found) for found in body["data"]] == [3, 3]
            first = body["data"][0][0]
            assert first["score"] >= body["data"][0][1]["score"] > 0
            assert first["sequence"] == f"a{first['token_str']}c<|mask|>" and body["usage"]["prompt_tokens"] == 6
            for text, code in (("none", "no_mask"), ("[MASK]" * 50, "context_length_exceeded"), ("", "invalid_value")):
                assert (await here.post("/v1/fill-mask", input=text)).json()["error"]["code"] == code
            floats = (await here.post("/v1/embeddings", input=["hi", "you"])).json()["data"]
            packed = (await here.post("/v1/embeddings", input=["hi", "you"], encoding_format="base64")).json()["data"]
            for one, other in zip(floats, packed, strict=True):
                raw = base64.b64decode(other["embedding"])
                assert struct.unpack("<16f", raw) == pytest.approx(one["embedding"], abs=1e-7)
            assert (await here.post("/v1/completions", prompt="a")).json()["error"]["code"] == "unsupported_task"
            assert (await here.post("/v1/classify", input="a")).json()["error"]["code"] == "unsupported_task"

    run(story())


def test_the_routes_of_a_classifier():
    async def story() -> None:
        async with served(engine("classify")) as here:
            body = (await here.post("/v1/classify", input=["good", "bad"])).json()
            for index, row in enumerate(body["data"]):
                assert row["index"] == index and list(row["scores"]) == ["x", "y", "z"]
                assert row["score"] == max(row["scores"].values()) == row["scores"][row["label"]]
                assert sum(row["scores"].values()) == pytest.approx(1.0)
            assert body["usage"]["prompt_tokens"] == 4 + 3 + 2 * 2  # [cls] and [sep] around each

    run(story())


def test_labels_must_be_as_many_as_classes():
    made = engine("classify")
    with pytest.raises(UserError, match="3 classes and 2 labels"):
        EncoderEngine(made.model, made.tokenizer, "classify", model_name="m", labels=("a", "b"))
