"""`meshwright export --to hf`: what transformers and vLLM look for in a folder, from every kind of source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from meshwright.cli import main
from meshwright.export import hf
from meshwright.runtime import exporting
from meshwright.runtime.trained import Trained
from tests.unit import hf_models
from tests.unit.export_cases import source
from tests.unit.serve_fakes import TEMPLATE, byte_tokenizer


def export(folder: Path, out: Path, *more: str) -> int:
    return main(["export", str(folder), "--to", "hf", "--out", str(out), *more])


def tensors(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


# Mutations tried: rope_scaling left out of config.json; the tie flag written as False.
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_of_hugging_face_again(tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Positions' scaling, ties, biases and the fields that nobody reads survive; transformers misses and finds no tensor too
    many, and gives the same logits at 200 positions."""
    scaling = {"rope_type": "linear", "factor": 2.0}
    settings = {
        **hf_models.GROUPED,
        "tie_word_embeddings": tied,
        "rope_scaling": {**scaling},  # transformers writes into it
        "rope_theta": 5e5,
        "attention_bias": True,
    }
    before = hf_models.saved(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)), tmp_path / "theirs")
    assert export(tmp_path / "theirs", tmp_path / "out") == 0
    assert "difference of logits| against transformers" in capsys.readouterr().out
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["rope_theta"] == 5e5 and raw["rope_scaling"] == scaling and raw["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in tensors(tmp_path / "out")) is not tied
    after, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = hf_models.tokens()
    with torch.no_grad():
        assert (after(tokens).logits - before(tokens).logits).abs().max() < 1e-5


def test_an_unknown_scaling_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf_models.saved("llama", tmp_path / "theirs")
    config = tmp_path / "theirs" / "config.json"
    raw = json.loads(config.read_text())
    raw.pop("rope_parameters", None)
    config.write_text(json.dumps({**raw, "rope_scaling": {"rope_type": "spiral", "factor": 2.0}}))
    assert export(tmp_path / "theirs", tmp_path / "out") == 2
    assert "rope_scaling.rope_type: 'spiral' is not known" in capsys.readouterr().err and not (tmp_path / "out").exists()


def run_of(given: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: tuple[str, ...] = ()) -> Path:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").touch()
    monkeypatch.setattr(exporting, "load_trained", lambda path, dtype: given)
    monkeypatch.setattr(exporting, "label_names", lambda path: labels)
    return run


# Mutation tried: `labels` not handed on to `export_tensors`: the classes are LABEL_0 and so on.
def test_a_classifier_keeps_the_names_of_its_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    made = source("classify")
    bert = source(
        "classify", token_types=2, final_norm=False, head_transform=True, mlp_bias=True, qkv_bias=True, attention_bias=True
    )
    given = Trained(bert.model, bert.config, "classify", made.tokenizer, None, tmp_path)
    run = run_of(given, tmp_path, monkeypatch, ("bill", "parcel", "help"))
    assert export(run, tmp_path / "out") == 0, capsys.readouterr().err
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.id2label == {0: "bill", 1: "parcel", 2: "help"} and config.label2id["help"] == 2
    run_of(given, tmp_path / "other", monkeypatch, ("bill", "parcel"))
    assert export(tmp_path / "other" / "run", tmp_path / "x") == 2
    assert "has 3 classes, and its data names 2" in capsys.readouterr().err


# Mutation tried: no generation_config.json.
def test_what_generation_needs_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, tokenizer = source("grouped"), byte_tokenizer(TEMPLATE)
    run = run_of(Trained(made.model, made.config, "lm", tokenizer, None, tmp_path), tmp_path, monkeypatch)
    assert export(run, tmp_path / "out", "--dtype", "bf16", "--compare", "weights") == 0
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    settings = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert (settings.eos_token_id, settings.pad_token_id) == (tokenizer.eos, tokenizer.pad)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert text.endswith("[user]hi\n[assistant]")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (
        model.dtype == torch.bfloat16 and model.generate(torch.tensor([[9, 8]]), max_new_tokens=3, do_sample=False).shape[1] > 2
    )


def test_a_checkpoint_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / "manifest.json").touch()
    assert hf.source_kind(tmp_path / "step-00000002") == "run"
