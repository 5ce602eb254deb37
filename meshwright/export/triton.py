"""A model repository for Triton Inference Server: config.pbtxt, and a model.py for its Python backend.

REPOSITORY/NAME/config.pbtxt
REPOSITORY/NAME/1/model.py       of an encoder on its own; of a decoder it names our engine (`serve.triton`)
REPOSITORY/NAME/1/model.onnx     of an encoder or a classifier, beside tokenizer.json and export.json
REPOSITORY/NAME/1/model/         of a decoder: a model folder
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from meshwright.errors import ConfigError, DataError, Finding
from meshwright.export.graph import (
    ONNX_FILE,
    Checks,
    GraphFile,
    Measure,
    describe,
    missing,
    onnx_run,
    save_beside,
    weight_bytes,
    write_onnx,
)
from meshwright.export.plain import PlainModel
from meshwright.export.source import Source
from meshwright.models.files import model_tensors, save_model
from meshwright.models.shards import new_folder

__all__ = ["export_triton", "repository_name"]

ENCODER = Path(__file__).with_name("triton_encoder.py")
DECODER = '''"""A decoder behind Triton: needs meshwright in the Python that Triton's Python backend uses."""

from meshwright.serve.triton import DecoderModel


class TritonPythonModel(DecoderModel):
    """Triton looks for this name."""
'''
TEXT = ("text_input", "TYPE_STRING", (1,))
SETTINGS = (
    ("max_tokens", "TYPE_INT32", (1,)),
    ("temperature", "TYPE_FP32", (1,)),
    ("top_p", "TYPE_FP32", (1,)),
    ("top_k", "TYPE_INT32", (1,)),
    ("seed", "TYPE_INT64", (1,)),
)
"""Optional inputs of a decoder: those of `serve.triton`."""
ANSWER = (("text_output", "TYPE_STRING", (1,)), ("finish_reason", "TYPE_STRING", (1,)), ("output_tokens", "TYPE_INT32", (1,)))

Port = tuple[str, str, Sequence[int]]
"""(name, type, sizes without the batch)."""


def repository_name(name: str) -> str:
    """A name that Triton's addresses take."""
    return re.sub(r"[^\w.-]+", "-", name) or "model"


def _port(port: Port, optional: bool = False) -> str:
    name, kind, dims = port
    more = " optional: true" if optional else ""
    return f'  {{ name: "{name}" data_type: {kind} dims: [ {", ".join(map(str, dims))} ]{more} }}'


def _config(name: str, inputs: Sequence[str], outputs: Sequence[Port], rows: int) -> str:
    """Rows of requests that come within a millisecond of each other go to model.py together."""
    lines = [f'name: "{name}"', 'backend: "python"', f"max_batch_size: {rows}"]
    lines += ["input [", ",\n".join(inputs), "]", "output [", ",\n".join(map(_port, outputs)), "]"]
    lines += ["dynamic_batching { max_queue_delay_microseconds: 1000 }"]
    # model.py takes an accelerator by itself where there is one; KIND_GPU would start a copy on each
    lines += ["instance_group [ { kind: KIND_CPU count: 1 } ]"]
    return "\n".join(lines) + "\n"


def _outputs(source: Source, output: str) -> list[Port]:
    if output == "embeddings":
        return [("embedding", "TYPE_FP32", (source.config.width,))]
    if source.task == "classify":
        return [("label", "TYPE_STRING", (1,)), ("scores", "TYPE_FP32", (len(source.class_names),))]
    return [("token", "TYPE_STRING", (-1, 5)), ("score", "TYPE_FP32", (-1, 5))]


def export_triton(
    source: Source, target: Path, *, name: str | None = None, output: str = "logits", rows: int = 64, checks: Checks = Checks()
) -> list[GraphFile]:
    """Write a repository with one model into a new folder. What was measured of an encoder's graph; nothing for a decoder.

    source  as stored on the CPU; a graph is written in fp32
    rows    most rows of a batch
    Raises ConfigError and DataError with everything that stands against it.
    """
    name = name or repository_name(source.name)
    findings = []
    if repository_name(name) != name:
        findings.append(Finding("--name", f"{name!r} is no name for Triton", f"Use {repository_name(name)}"))
    if source.task == "lm":
        if output != "logits":
            findings.append(Finding("--output", f"{output} are an encoder's, and this model is a decoder", "Leave it out"))
        if findings:
            raise ConfigError(findings=findings)
        _decoder(source, target, name, rows)
        return []
    findings += missing("triton")
    if findings:
        raise ConfigError(findings=findings)
    return _encoder(source.in_dtype(torch.float32), target, name, output, rows, checks)


def _decoder(source: Source, target: Path, name: str, rows: int) -> None:
    trunk = source.trunk
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in model_tensors(trunk))
    inputs = [_port(TEXT), *(_port(port, optional=True) for port in SETTINGS)]
    with new_folder(target, size) as partial, tempfile.TemporaryDirectory() as tokenizer:
        source.tokenizer.save(tokenizer)
        version = partial / name / "1"
        version.mkdir(parents=True)
        save_model(version / "model", trunk, source.config, source.task, tokenizer)
        (version / "model.py").write_text(DECODER, encoding="utf-8")
        (partial / name / "config.pbtxt").write_text(_config(name, inputs, ANSWER, rows), encoding="utf-8")


def _encoder(source: Source, target: Path, name: str, output: str, rows: int, checks: Checks) -> list[GraphFile]:
    plain = PlainModel(source.trunk, output, "triton")
    measure = Measure(source, output, checks)
    with new_folder(target, weight_bytes(plain)) as partial:
        version = partial / name / "1"
        version.mkdir(parents=True)
        write_onnx(plain, version / ONNX_FILE)
        files = [measure(version / ONNX_FILE, onnx_run(version / ONNX_FILE))]
        save_beside(version, source, describe(source, output, files))
        if not (version / "tokenizer.json").is_file():
            what = "has a SentencePiece tokenizer, and model.py reads a tokenizer.json"
            raise DataError(findings=[Finding(source.name, what, "Save it with transformers as a fast tokenizer")])
        shutil.copyfile(ENCODER, version / "model.py")
        text = _config(name, [_port(TEXT)], _outputs(source, output), rows)
        (partial / name / "config.pbtxt").write_text(text, encoding="utf-8")
    return files
