"""ONNX files, their int8 variant and torch.export's archive, from the command line and by themselves."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli import main
from meshwright.errors import ConfigError
from meshwright.export import graph
from meshwright.export.graph import Checks, export_onnx, export_torch
from meshwright.models.files import save_model
from tests.unit.export_cases import CASES, source

QUICK = Checks(repeat=2, length=16)
needs_onnx = pytest.mark.skipif(bool(graph.missing("onnx")), reason="needs the extra [export]")


def saved(name: str, folder: Path, **more: object) -> Path:
    given = source(name, **more)
    given.tokenizer.save(folder / "tokenizer")
    huggingface = {"kept": {"id2label": {"0": "x", "1": "y", "2": "z"}}} if given.labels else None
    save_model(folder / name, given.model, given.config, given.task, folder / "tokenizer", huggingface=huggingface)
    return folder / name


@needs_onnx
def test_a_classifier_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutations tried: names of the inputs in the other order; accuracy of the first row only."""
    import onnx
    import onnxruntime

    folder, rows = saved("classify", tmp_path), tmp_path / "rows.jsonl"
    given = source("classify")
    texts = ["one", "a longer text", "x" * 100]
    run = graph.onnx_run
    args = ["export", str(folder), "--to", "onnx", "--out", str(tmp_path / "out"), "--repeat", "2", "--data", str(rows)]
    rows.write_text("".join(json.dumps({"text": text, "label": "y"}) + "\n" for text in texts))
    assert main([*args, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    full, small = said["files"]
    assert said["good"] and full["largest_difference"] < 1e-5 and full["bytes"] > 1.3 * small["bytes"]
    assert full["same_argmax"] == 1.0 and small["largest_difference"] > full["largest_difference"]
    out = tmp_path / "out"
    proto = onnx.load(out / "model.onnx")
    shapes = [
        [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in [*proto.graph.input, *proto.graph.output]
    ]
    assert [v.name for v in [*proto.graph.input, *proto.graph.output]] == ["input_ids", "attention_mask", "logits"]
    assert shapes == [["batch", "sequence"], ["batch", "sequence"], ["batch", 3]]
    facts = json.loads((out / "export.json").read_text())
    assert facts["id2label"] == {"0": "x", "1": "y", "2": "z"} and (out / "tokenizer.json").is_file()
    assert (facts["prefix"], facts["suffix"]) == ([given.tokenizer.cls], [given.tokenizer.sep])
    session = onnxruntime.InferenceSession(str(out / "model.int8.onnx"))
    assert [node.name for node in session.get_inputs()] == ["input_ids", "attention_mask"]
    found = []
    for text in texts:
        ids = [facts["prefix"][0], *given.tokenizer.encode(text)[:46], facts["suffix"][0]]
        logits = run(out / "model.onnx")(np.array([ids]), np.ones((1, len(ids)), dtype=np.int64))
        found.append(int(logits.argmax()))
    assert full["accuracy"] == pytest.approx(sum(one == 1 for one in found) / 3)


@needs_onnx
@pytest.mark.slow
def test_a_decoder_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "export",
        str(saved("gpt2", tmp_path)),
        "--to",
        "onnx",
        "--out",
        str(tmp_path / "out"),
        "--repeat",
        "2",
        "--no-int8",
    ]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "model.onnx" in out and "1 x 48 tokens in" in out and "same largest logit: 100.00%" in out
    assert "padding on the right" in out and "padding on the left" in out
    assert str(Path(graph.__file__).parents[2]).encode() not in (tmp_path / "out" / "model.onnx").read_bytes()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "export.json", "model.onnx", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_kind_as_onnx(name: str, tmp_path: Path) -> None:
    """Mutation tried: the mask of `PlainModel` (see test_export_plain) is red here too."""
    full, small = export_onnx(source(name), tmp_path / "out", output=CASES[name][2], checks=QUICK)
    assert full.parity.good and full.parity.difference < 2e-5
    assert small.bytes < full.bytes and small.parity.same in (None, pytest.approx(1.0, abs=0.15))


@needs_onnx
@pytest.mark.slow
def test_large_weights_stand_beside_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "EXTERNAL_BYTES", 0)
    files = export_onnx(source("classify"), tmp_path / "out", checks=QUICK)
    assert files[0].parity.good and (tmp_path / "out" / "model.onnx.data").is_file()
    beside = (tmp_path / "out" / "model.onnx.data").stat().st_size
    weights = sum(parameter.numel() * parameter.element_size() for parameter in source("classify").model.parameters())
    assert beside > 0.9 * weights and files[0].bytes == beside + (tmp_path / "out" / "model.onnx").stat().st_size


def test_an_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutation tried: dimensions not dynamic: the archive refuses every other size."""
    args = [
        "export",
        str(saved("grouped", tmp_path)),
        "--to",
        "torch",
        "--out",
        str(tmp_path / "out"),
        "--repeat",
        "2",
        "--json",
    ]
    assert main(args) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["files"][0]["file"] == "model.pt2" and said["files"][0]["largest_difference"] < 1e-5
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    with zipfile.ZipFile(tmp_path / "out" / "model.pt2") as archive:  # nothing of the machine that wrote it
        assert not [n for n in archive.namelist() if str(Path(graph.__file__).parents[2]).encode() in archive.read(n)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_kind_as_an_archive(name: str, tmp_path: Path) -> None:
    (file,) = export_torch(source(name), tmp_path / "out", output=CASES[name][2], checks=QUICK)
    assert file.parity.good


def test_missing_packages_are_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(graph, "find_spec", lambda name: None if name != "onnxruntime" else object())
    assert main(["export", str(saved("gpt2", tmp_path)), "--to", "onnx", "--out", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert "needs onnx, onnxscript, which are not installed. pip install 'meshwright[export]'" in error
    with pytest.raises(ConfigError, match="not installed"):
        export_onnx(source("gpt2"), tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["gpt2", "--to", "coreml", "--out", "x"], "coreml"),
        (["nowhere", "--to", "torch", "--out", "x"], "nowhere: is no folder"),
        (["empty", "--to", "torch", "--out", "x"], "has neither config.json"),
        (["gpt2", "--to", "torch", "--out", "gpt2"], "exists and is not empty"),
        (["gpt2", "--to", "hf", "--out", "gpt2"], "exists and is not empty"),
        (["gpt2", "--to", "torch", "--out", "x", "--output", "embeddings"], "this model is a decoder"),
        (["gpt2", "--to", "torch", "--out", "x", "--data", "rows.jsonl"], "gpt2 is no classifier"),
        (["gpt2", "--to", "torch", "--out", "x", "--family", "llama", "--int8"], "--family: has no effect with --to torch"),
        (["gpt2", "--to", "hf", "--out", "x", "--output", "logits"], "--output: has no effect with --to hf"),
        (["classify", "--to", "torch", "--out", "x", "--output", "embeddings", "--data", "rows.jsonl"], "which name no class"),
        (["gpt2", "--to", "hf", "--out", "x", "--repeat", "3"], "--repeat: has no effect with --to hf"),
        (["gpt2", "--to", "torch", "--out", "x", "--label-key", "k"], "--label-key: has no effect with --to torch and without"),
        (["gpt2", "--to", "triton", "--out", "x", "--length", "3"], "--length: has no effect for a decoder"),
        (["gpt2", "--to", "hf", "--out", "x", "--family", "llama"], "no Hugging Face family computes this model"),
        (["gpt2", "--to", "triton", "--out", "x", "--name", "a/b"], "'a/b' is no name for Triton. Use a-b"),
        (["dynamic", "--to", "torch", "--out", "x"], "model.rope_scaling: dynamic with max_len 48 beyond the original 24"),
        (["classify", "--to", "torch", "--out", "x", "--data", "rows.jsonl"], "rows.jsonl:2: has the label 'w'"),
        (["classify", "--to", "torch", "--out", "x", "--data", "rows.jsonl", "--label-key", "k"], "label"),
    ],
)
def test_mistakes(args: list[str], words: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if args[0] in CASES:
        saved(args[0], tmp_path)
    if args[0] == "dynamic":
        scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 24}
        saved("grouped", tmp_path, rope_scaling=scaling).rename(tmp_path / "dynamic")
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "label": "x"}\n{"text": "b", "label": "w"}\n')
    assert main(["export", *args]) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error
    assert not (tmp_path / "x").exists()
