"""An engine from every kind of folder that holds a model, and the tokens of `transformers` from its own."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import httpx
import pytest
import torch

from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import CheckpointError
from meshwright.models import generate
from meshwright.runtime.command import finish
from meshwright.runtime.folder import RunFolder
from meshwright.runtime.trained import described, load_trained
from meshwright.serve.engine import LLMEngine
from meshwright.serve.request import Request
from meshwright.serve.sampling import SamplingParams
from tests.e2e import helpers as e2e
from tests.e2e.test_serve_command import serve
from tests.unit import hf_models


def answer(engine: LLMEngine, prompt: list[int], length: int = 12) -> tuple[list[int], str]:
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    engine.add(Request("a", tuple(prompt), params))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return [token for output in outputs for token in output.tokens], "".join(output.text for output in outputs)


def served_by_its_last_line(run: Path, out: str) -> str:
    """What the server that the last line of a run starts makes of "mesh ring"."""
    line = out.splitlines()[-1]
    assert line == f"serve: meshwright serve {run}"
    process, address = serve(Path(shlex.split(line)[-1]))
    try:
        body = {"prompt": "mesh ring", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{address}/v1/completions", json=body, headers={"authorization": "Bearer s3cret"}, timeout=60)
        return answer.json()["choices"][0]["text"]
    finally:
        process.kill()
        process.communicate()


def test_a_run_and_one_of_its_checkpoints(ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = e2e.settings(
        tmp_path / "config.yaml", train={"steps": 4, "schedule": {"warmup": 0}}, checkpoint={"every": 2, "keep": 5}
    )
    e2e.train_in(ranks(1), config, tmp_path / "run")
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(checkpoints) == 2
    found, texts = [], []
    for source in (tmp_path / "run", checkpoints[-1], checkpoints[0]):
        trained = load_trained(source)
        assert described(source) == (trained.model_config, "lm")
        prompt = list(trained.tokenizer.encode("mesh ring"))
        engine = LLMEngine.load(source, device="cpu", blocks=20)
        assert engine.model_name == source.name and engine.max_len == 64 and engine.ends == {trained.tokenizer.eos}
        tokens, text = answer(engine, prompt)
        assert tokens == generate(trained.model, prompt, max_tokens=12)
        assert text == trained.tokenizer.decode([*prompt, *tokens])[len("mesh ring") :].removesuffix("�")
        texts.append(text)
        found.append([parameter.clone() for parameter in trained.model.parameters()])
    assert all(map(torch.equal, found[0], found[1])) and not all(map(torch.equal, found[0], found[2]))
    finish(RunFolder(tmp_path / "run"), None)
    assert served_by_its_last_line(tmp_path / "run", capsys.readouterr().out).removesuffix("�") == texts[0]


GENERATING = [name for name in hf_models.MODELS if "bert" not in name and "ernie" not in name]


@pytest.mark.parametrize("name", GENERATING)
def test_tokens_of_transformers(name: str, tmp_path: Path):
    """Every family, from the folder that transformers wrote."""
    theirs = hf_models.saved(name, tmp_path)
    Tokenizer.train([], 262).save(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    engine = LLMEngine.load(tmp_path, device="cpu", blocks=30, block_size=4, token_budget=7)
    assert engine.ends == {7, 9, 1}
    prompt = hf_models.tokens(20, 1)
    expected = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert answer(engine, prompt[0].tolist())[0] == expected[0, 20:].tolist()


def test_what_does_not_answer_is_refused(tmp_path: Path):
    hf_models.saved("bert", tmp_path / "bert")
    Tokenizer.train([], 262).save(tmp_path / "bert")
    with pytest.raises(CheckpointError, match=r"task 'mlm' and architecture 'encoder', .*Use a language model"):
        LLMEngine.load(tmp_path / "bert", device="cpu")
    assert described(tmp_path / "bert")[1] == "mlm"
    (tmp_path / "empty").mkdir()
    for call in (lambda path: LLMEngine.load(path, device="cpu"), described):
        with pytest.raises(CheckpointError, match=r"neither a run folder .* nor a model folder"):
            call(tmp_path / "empty")
