"""`meshwright convert` from the command line, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from meshwright.cli import main
from meshwright.config.schema import ModelConfig
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import CheckpointError
from meshwright.export import hf
from meshwright.models import build, initialize
from meshwright.models.files import load_model, save_model
from meshwright.runtime import exporting
from meshwright.runtime.trained import Trained
from tests.unit import hf_models


def test_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = hf_models.saved("qwen3-tied", tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text('{"tokens": 1}')
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--shard-mib", "1"]) == 0
    out = capsys.readouterr().out
    assert "from Hugging Face, qwen3, task lm" in out and "difference of logits| against transformers" in out
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert "to Hugging Face, qwen3, task lm" in capsys.readouterr().out
    again = type(model).from_pretrained(tmp_path / "back")
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert (tmp_path / "back" / "tokenizer.json").read_text() == '{"tokens": 1}'
    before, after = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("theirs", "back"))
    for key in ("bos_token_id", "eos_token_id", "hidden_size", "tie_word_embeddings", "head_dim", "rms_norm_eps"):
        assert before[key] == after[key]


# Mutation: the comparison of weights reads the target twice and compares nothing: red through the edit below.
@pytest.mark.parametrize("name", ["gpt2", "bert-untied", "roberta-classify"])
def test_weights_are_compared_bit_for_bit(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf_models.saved(name, tmp_path / "theirs")
    args = [str(tmp_path / "theirs"), str(tmp_path / "ours")]
    assert main(["convert", *args, "--compare", "weights"]) == 0
    assert "are bitwise equal (no logits were compared)" in capsys.readouterr().out
    done = hf.convert(tmp_path / "ours", tmp_path / "back")
    assert hf.compare(done, tmp_path / "ours", tmp_path / "back", "weights").good
    model, config, task = load_model(tmp_path / "ours")
    with torch.no_grad():
        next(model.parameters())[3, 3] += 1e-6
    save_model(tmp_path / "changed", model, config, task)
    for how in ("weights", "logits"):
        comparison = hf.compare(done, tmp_path / "changed", tmp_path / "back", how)
        assert comparison.good is (how == "logits")  # 1e-6 in one weight is within the tolerance of logits
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    save_model(tmp_path / "more", model, config, task)
    assert not hf.compare(done, tmp_path / "more", tmp_path / "back", "logits").good


def test_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf_models.saved("llama", tmp_path / "theirs")
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--dtype", "bf16"]) == 0
    assert "difference of logits" in capsys.readouterr().out
    assert {p.dtype for p in load_model(tmp_path / "ours")[0].parameters()} == {torch.bfloat16}
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--compare", "weights"]) == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"


# Mutation: token ids not taken from the tokenizer: transformers' generate would not know the end: red.
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").touch()
    tokenizer = Tokenizer.train(["a few words to learn from, a few words"] * 5, 280)
    config = ModelConfig(layers=2, width=32, heads=4, ffn=48, vocab=tokenizer.vocab_size, max_len=64)
    model = build(config, "lm")
    initialize(model, 3, "cpu")
    loaded = Trained(model, config, "lm", tokenizer, None, run)
    monkeypatch.setattr(exporting, "load_trained", lambda path, dtype: loaded if path == run else pytest.fail(str(path)))
    assert main(["convert", str(run), str(tmp_path / "theirs")]) == 0
    assert "to Hugging Face, llama, task lm" in capsys.readouterr().out
    raw = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (raw["eos_token_id"], raw["pad_token_id"]) == (tokenizer.eos, tokenizer.pad)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert theirs.encode("few words") == tokenizer.encode("few words")
    with pytest.raises(CheckpointError, match="nothing here reads runs"):
        hf.convert(run, tmp_path / "x")


@pytest.mark.parametrize(
    "args, word",
    [
        (["nowhere", "x"], "is no folder"),
        (["theirs", "theirs"], "is not empty"),
        (["empty", "x"], "has neither config.json"),
        (["theirs", "x", "--family", "llama"], "--family: has no effect"),
        (["theirs", "x", "--task", "mlm"], "llama has no task 'mlm'"),
    ],
)
def test_mistakes(args: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf_models.saved("llama", tmp_path / "theirs")
    (tmp_path / "empty").mkdir()
    args = [str(tmp_path / a) if i < 2 else a for i, a in enumerate(args)]
    assert main(["convert", *args]) == 2
    error = capsys.readouterr().err
    assert word in error and "Traceback" not in error
    assert not (tmp_path / "x").exists()
