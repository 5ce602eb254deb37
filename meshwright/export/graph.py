"""A model's graph as files for other programs: ONNX, its int8 variant, and torch.export's archive. Each is read back from disk,
held against the model itself, and timed.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.errors import ConfigError, Finding
from meshwright.export.parity import Parity, Run, batches, compare, expected, latency_ms
from meshwright.export.plain import PlainModel, example
from meshwright.export.source import Source, framed
from meshwright.models.shards import new_folder

__all__ = [
    "DESCRIPTION",
    "Checks",
    "GraphFile",
    "Measure",
    "describe",
    "export_onnx",
    "export_torch",
    "missing",
    "onnx_run",
    "save_beside",
    "weight_bytes",
    "write_onnx",
]

DESCRIPTION = "export.json"
INPUTS = ("input_ids", "attention_mask")
ONNX_FILE, INT8_FILE, TORCH_FILE = "model.onnx", "model.int8.onnx", "model.pt2"
EXTERNAL_BYTES = 1_500_000_000
"""From here on weights stand in a file beside the graph: a protobuf ends at 2 GiB."""

Row = tuple[tuple[int, ...], int]
"""(tokens, number of the class) of a labelled row."""


@dataclass(frozen=True)
class Checks:
    """repeat: rows that are timed. length: their tokens, at most the model's. labelled: rows on which a classifier's accuracy
    is told."""

    repeat: int = 20
    length: int = 128
    labelled: tuple[Row, ...] = ()


@dataclass(frozen=True)
class GraphFile:
    """What was written, as it reads back. bytes: with the weights beside it. accuracy: of labelled rows, None without some.

    exact: it computes the same in fp32, so that `parity.good` is the verdict
    """

    name: str
    bytes: int
    latency_ms: float
    parity: Parity
    accuracy: float | None
    exact: bool = True

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.name,
            "bytes": self.bytes,
            "latency_ms": self.latency_ms,
            "largest_difference": self.parity.difference,
            "largest_value": self.parity.scale,
            "same_argmax": self.parity.same,
            "accuracy": self.accuracy,
        }


def missing(target: str) -> list[Finding]:
    """Packages that writing and checking an ONNX file needs, and that are not there."""
    names = [name for name in ("onnx", "onnxscript", "onnxruntime") if not find_spec(name)]
    if not names:
        return []
    what = f"needs {', '.join(names)}, which {'is' if len(names) == 1 else 'are'} not installed"
    return [Finding(f"--to {target}", what, "pip install 'meshwright[export]'")]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporters say of themselves: deprecations of their own calls, packages of other kinds of models."""
    loggers = [(logger, logger.level) for logger in (logging.getLogger("torch.onnx"), logging.getLogger())]
    for logger, _ in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in loggers:
            logger.setLevel(level)


def _traced(plain: PlainModel) -> torch.export.ExportedProgram:
    arguments, dims = example(plain)
    with _quiet(), torch.no_grad():
        program = torch.export.export(plain, arguments, dynamic_shapes=dims, strict=False)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # else every file has paths of this machine, many times over
    return program


def write_onnx(plain: PlainModel, file: Path) -> None:
    """Inputs `input_ids` and `attention_mask` [batch, sequence], output of the model's `output` name."""
    with _quiet():
        program = torch.onnx.export(
            _traced(plain),
            dynamo=True,
            input_names=list(INPUTS),
            output_names=[plain.output],
            dynamic_shapes=example(plain)[1],
            verbose=False,
        )
        assert program is not None  # it is with dynamo
        program.save(str(file), external_data=weight_bytes(plain) > EXTERNAL_BYTES)


def weight_bytes(plain: PlainModel) -> int:
    """Of a graph; a tied matrix stands twice, since one of the two is transposed."""
    return sum(value.numel() * value.element_size() for value in plain.state_dict().values())


def _write_int8(full: Path, file: Path, *, external: bool, per_channel: bool) -> None:
    """Weights of matrix products and embeddings as int8, a scale a column or a matrix; activations are scaled as they come."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quiet():
        quantize_dynamic(full, file, weight_type=QuantType.QInt8, per_channel=per_channel, use_external_data_format=external)


def onnx_run(file: Path) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])

    def run(tokens_BS: np.ndarray, mask_BS: np.ndarray) -> np.ndarray:
        return session.run(None, {INPUTS[0]: tokens_BS, INPUTS[1]: mask_BS})[0]

    return run


def torch_run(file: Path) -> Run:
    module = torch.export.load(str(file)).module()

    @torch.no_grad()
    def run(tokens_BS: np.ndarray, mask_BS: np.ndarray) -> np.ndarray:
        return module(torch.from_numpy(tokens_BS), torch.from_numpy(np.ascontiguousarray(mask_BS))).numpy()

    return run


def accuracy(run: Run, rows: Sequence[Row]) -> float | None:
    """Share of the labelled rows whose class has the largest logit, one row at a time."""
    if not rows:
        return None
    right = 0
    for tokens, label in rows:
        tokens_1S = np.array([tokens], dtype=np.int64)
        right += int(run(tokens_1S, np.ones_like(tokens_1S))[0].argmax() == label)
    return right / len(rows)


class Measure:
    """Holds written files against the model."""

    def __init__(self, source: Source, output: str, checks: Checks):
        trunk = source.trunk
        self.output, self.checks = output, checks
        self.length = min(checks.length, trunk.max_len)
        self.batches = batches(source.config.vocab or 1, trunk.max_len)
        self.wanted = [expected(trunk, batch, output) for batch in self.batches]

    def __call__(self, file: Path, run: Run, exact: bool = True) -> GraphFile:
        size = sum(path.stat().st_size for path in file.parent.glob(f"{file.name}*"))
        parity = compare(run, self.batches, self.wanted, self.output)
        time = latency_ms(run, self.length, self.checks.repeat)
        return GraphFile(file.name, size, time, parity, accuracy(run, self.checks.labelled), exact)


def describe(source: Source, output: str, files: Sequence[GraphFile] = ()) -> dict[str, Any]:
    """What a program needs beside the graph: names, lengths, classes, and what stands around the text of a row."""
    prefix, suffix = framed(source)
    described: dict[str, Any] = {
        "format": "meshwright-export",
        "version": 1,
        "task": source.task,
        "output": output,
        "inputs": list(INPUTS),
        "max_len": source.config.max_len,
        "prefix": list(prefix),
        "suffix": list(suffix),
        "pad_token_id": source.tokenizer.pad or 0,
        "mask_token_id": source.tokenizer.mask,
        "vocab_size": source.tokenizer.vocab_size,
    }
    if source.task == "classify":
        described["id2label"] = {str(number): name for number, name in enumerate(source.class_names)}
    if files:
        described["files"] = [file.to_json() for file in files]
    return described


def save_beside(folder: Path, source: Source, described: dict[str, Any]) -> None:
    source.tokenizer.save(folder)
    text = json.dumps(described, indent=2, ensure_ascii=False)
    (folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def _export(
    source: Source,
    target: Path,
    output: str,
    checks: Checks,
    to: str,
    write: Callable[[PlainModel, Path, Measure], list[GraphFile]],
) -> list[GraphFile]:
    source = source.in_dtype(torch.float32)
    plain = PlainModel(source.trunk, output, to)
    measure = Measure(source, output, checks)
    with new_folder(target, 2 * weight_bytes(plain)) as partial:
        files = write(plain, partial, measure)
        save_beside(partial, source, describe(source, output, files))
    return files


def export_onnx(
    source: Source, target: Path, *, output: str = "logits", int8: bool = True, checks: Checks = Checks()
) -> list[GraphFile]:
    """Write model.onnx, with `int8` model.int8.onnx, the tokenizer and export.json into a new folder.

    source: on the CPU; its weights are turned to fp32. Raises ConfigError for a model that has no such graph, and where
    packages are missing.
    """
    lacking = missing("onnx")
    if lacking:
        raise ConfigError(findings=lacking)

    def write(plain: PlainModel, folder: Path, measure: Measure) -> list[GraphFile]:
        write_onnx(plain, folder / ONNX_FILE)
        files = [measure(folder / ONNX_FILE, onnx_run(folder / ONNX_FILE))]
        if int8:
            # the matrices of all experts are one tensor, of which onnxruntime takes one scale only
            several = not source.config.experts
            _write_int8(
                folder / ONNX_FILE, folder / INT8_FILE, external=weight_bytes(plain) > EXTERNAL_BYTES, per_channel=several
            )
            files.append(measure(folder / INT8_FILE, onnx_run(folder / INT8_FILE), exact=False))
        return files

    return _export(source, target, output, checks, "onnx", write)


def export_torch(source: Source, target: Path, *, output: str = "logits", checks: Checks = Checks()) -> list[GraphFile]:
    """Write model.pt2, which `torch.export.load` reads, the tokenizer and export.json into a new folder. As `export_onnx`."""

    def write(plain: PlainModel, folder: Path, measure: Measure) -> list[GraphFile]:
        program = _traced(plain)
        with _quiet():
            torch.export.save(program, str(folder / TORCH_FILE))
            run = torch_run(folder / TORCH_FILE)
        return [measure(folder / TORCH_FILE, run)]

    return _export(source, target, output, checks, "torch", write)
