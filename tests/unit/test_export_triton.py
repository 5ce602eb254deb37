"""Model repositories for Triton: what is written, and what its Python backend is given, with a stand-in for Triton's module.

tests/e2e/test_triton.py has a real server.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.export import graph
from meshwright.export.graph import Checks
from meshwright.export.triton import SETTINGS as WRITTEN
from meshwright.export.triton import export_triton, repository_name
from meshwright.models.generate import generate
from meshwright.serve.triton import SETTINGS, DecoderModel
from tests.unit.export_cases import source

QUICK = Checks(repeat=1, length=16)


@dataclass
class Tensor:
    name: str
    values: np.ndarray

    def as_numpy(self) -> np.ndarray:
        return self.values


@dataclass
class Response:
    """error, tensors: as Triton's InferenceResponse."""

    tensors: list[Tensor] = field(default_factory=list)
    error: str | None = None

    def __getitem__(self, name: str) -> np.ndarray:
        return next(tensor.values for tensor in self.tensors if tensor.name == name)


class Asked:
    """A request, and where its one answer comes."""

    def __init__(self, **inputs: Any):
        kinds = {"text_input": np.object_, "temperature": np.float32, "top_p": np.float32, "seed": np.int64}
        self.inputs = {k: Tensor(k, np.array(v, dtype=kinds.get(k, np.int32)).reshape(-1, 1)) for k, v in inputs.items()}
        self.done, self.answers, self.gone = threading.Event(), [], False

    def get_response_sender(self) -> Asked:
        return self

    def send(self, response: Response, flags: int) -> None:
        assert flags == 1
        self.answers.append(response)
        self.done.set()

    def is_cancelled(self) -> bool:
        return self.gone

    @property
    def answer(self) -> Response:
        assert self.done.wait(30)
        (response,) = self.answers
        return response


def backend() -> types.ModuleType:
    module: Any = types.ModuleType("triton_python_backend_utils")
    module.Tensor, module.InferenceResponse, module.TritonError = Tensor, Response, str
    module.get_input_tensor_by_name = lambda request, name: request.inputs.get(name)
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    return module


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("triton") / "out"
    assert export_triton(source("grouped"), out) == []
    return out


def started(repository: Path) -> DecoderModel:
    model = DecoderModel(backend())
    model.initialize({"model_repository": str(repository / "grouped"), "model_version": "1"})
    return model


def test_a_repository_of_a_decoder(decoder: Path) -> None:
    text = (decoder / "grouped" / "config.pbtxt").read_text()
    assert 'name: "grouped"' in text and "dynamic_batching" in text and 'name: "text_input" data_type: TYPE_STRING' in text
    assert [name for name, *_ in WRITTEN] == list(SETTINGS) and text.count("optional: true") == len(SETTINGS)
    code = (decoder / "grouped" / "1" / "model.py").read_text()
    names: dict[str, Any] = {}
    exec(compile(code, "model.py", "exec"), names)
    assert issubclass(names["TritonPythonModel"], DecoderModel)


def test_requests_run_together_and_each_gets_its_own_answer(decoder: Path) -> None:
    """Against generation without a cache. Mutations tried: rows of a request answered in the order in which they end; the
    settings of the first row for all."""
    model, given = started(decoder), source("grouped")
    texts = [b"one", b"another text", b"3"]
    together = Asked(text_input=texts, max_tokens=[7, 3, 5], temperature=[0, 0, 0])
    alone = Asked(text_input=[b"one"], max_tokens=[4], temperature=[0])
    model.execute([together, alone])
    for asked, sizes in ((together, (7, 3, 5)), (alone, (4,))):
        for row, (text, size) in enumerate(zip(texts, sizes, strict=False)):
            ids = given.tokenizer.encode(text.decode())
            new = generate(given.model, ids, max_tokens=size, eos=given.tokenizer.eos)
            assert asked.answer["text_output"][row, 0] == given.tokenizer.decode(new).encode()
            assert asked.answer["output_tokens"][row, 0] == len(new)
            assert asked.answer["finish_reason"][row, 0] == (b"stop" if new[-1] == given.tokenizer.eos else b"length")
    model.finalize()


def test_a_bad_request_gets_an_error_and_the_next_an_answer(decoder: Path) -> None:
    model = started(decoder)
    cases = [
        (Asked(text_input=[b""]), "has no tokens"),
        (Asked(text_input=[b"\xff"]), "utf-8"),
        (Asked(text_input=[b"ab"], max_tokens=[47]), "takes 48 tokens"),
        (Asked(text_input=[b"good", b""]), "has no tokens"),
        (Asked(text_input=[b"ab"], temperature=[-1]), "temperature"),
    ]
    good = Asked(text_input=[b"ab"], max_tokens=[2], temperature=[0])
    model.execute([*(asked for asked, _ in cases), good])
    for asked, words in cases:
        assert asked.answer.error is not None and words in asked.answer.error
    assert good.answer.error is None and not model.engine.has_work
    model.finalize()


def test_a_client_that_left_is_worked_for_no_more(decoder: Path) -> None:
    """Mutation tried: `is_cancelled` not asked: the answer comes whole."""
    model = started(decoder)
    asked = Asked(text_input=[b"ab"], max_tokens=[40], temperature=[0])
    asked.gone = True
    model.execute([asked])
    assert asked.answer.error == "the client left"
    model.finalize()
    assert not model.engine.has_work


def test_when_the_engine_fails_everybody_hears_of_it(decoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = started(decoder)

    def broken() -> Any:
        raise RuntimeError("no more memory")

    model.engine.step = broken  # type: ignore[method-assign]
    many = [Asked(text_input=[b"ab"], max_tokens=[3]) for _ in range(3)]
    model.execute(many)
    assert [asked.answer.error for asked in many] == ["the engine failed: no more memory"] * 3
    model.finalize()
    assert "no more memory" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(bool(graph.missing("triton")), reason="needs the extra [export]")
@pytest.mark.parametrize("name", ["classify", "mlm", "embeddings"])
def test_an_encoder_answers_from_its_own_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation tried: no mask on the padding of a shorter row."""
    import torch

    given = source(name)
    output = "embeddings" if name == "embeddings" else "logits"
    (file,) = export_triton(given, tmp_path / "out", output=output, checks=QUICK)
    assert file.parity.good
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend())
    spec = importlib.util.spec_from_file_location("exported_model", tmp_path / "out" / name / "1" / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    model.initialize({"model_repository": str(tmp_path / "out" / name), "model_version": "1"})
    mark = b" [MASK] and [MASK]" if name == "mlm" else b""
    asked = [
        Asked(text_input=[b"a" + mark, b"longer text"[: 11 if name != "mlm" else 3] + mark]),
        Asked(text_input=[b"x" * 90]),
    ]
    first, second = model.execute(asked)
    assert second.error is not None and "this model takes 48" in second.error
    form = graph.describe(given, output)
    for row, text in enumerate(asked[0].inputs["text_input"].values[:, 0]):
        words = text.decode().replace("[MASK]", given.tokenizer.token(given.tokenizer.mask) or "")
        ids = torch.tensor([[*form["prefix"], *given.tokenizer.encode(words), *form["suffix"]]])
        with torch.no_grad():
            logits = given.model(ids)[0]
        if name == "classify":
            assert np.allclose(first["scores"][row], logits.softmax(-1), atol=1e-5)
            assert first["label"][row, 0] == given.labels[int(logits.argmax())]
        elif name == "mlm":
            places = [at for at, token in enumerate(ids[0].tolist()) if token == given.tokenizer.mask]
            best = logits[places].softmax(-1).topk(5)
            assert np.allclose(first["score"][row], best.values, atol=1e-5)
            assert first["token"][row, 1, 0] == given.tokenizer.decode([int(best.indices[1, 0])], False)
        else:
            assert np.linalg.norm(first["embedding"][row]) == pytest.approx(1.0, abs=1e-5)


def test_names() -> None:
    assert repository_name("step 0001/x") == "step-0001-x" and repository_name("llama-3.2") == "llama-3.2"
