"""From a folder to the engine of a process: a decoder's or an encoder's, by the head of the model."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from meshwright.distributed import device as devices
from meshwright.errors import CheckpointError, Finding, UserError
from meshwright.runtime.trained import described, label_names, load_trained
from meshwright.serve.contract import Engine
from meshwright.serve.encoder import EncoderEngine
from meshwright.serve.engine import LLMEngine

__all__ = ["DTYPES", "encoder_findings", "load_engine", "phase", "say", "task_of"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OF_ENCODERS = ("device", "dtype", "dp")
"""Options of an engine that an encoder has too."""


def task_of(source: str | Path) -> str:
    """Head of the model in a folder that `load_trained` reads: "lm", "mlm" or "classify". A folder that is none of them counts
    as "lm", and its loading says what is wrong with it."""
    try:
        return described(source)[1]
    except CheckpointError:
        return "lm"


def load_engine(source: str | Path, *, name: str | None = None, **options: Any) -> Engine:
    """A decoder's or an encoder's engine, by the head of the model. name: that it is served under; default: the folder's.

    options: of `LLMEngine.load`; those that an encoder does not have are refused with UserError.
    """
    if task_of(source) == "lm":
        decoder = LLMEngine.load(source, **options)
        decoder.model_name = name or decoder.model_name
        return decoder  # type: ignore[return-value]  # one that was loaded has a tokenizer
    findings = encoder_findings(options)
    if findings:
        raise UserError(findings=findings)
    encoder = _encoder(Path(source), options.get("device"), options.get("dtype"))
    encoder.model_name = name or encoder.model_name
    return encoder


def encoder_findings(options: Mapping[str, Any]) -> list[Finding]:
    """Options that an encoder does not have."""
    what = "is for decoders, and this model is an encoder"
    return [Finding(f"--{key.replace('_', '-')}", what) for key in options if key not in OF_ENCODERS]


def _encoder(source: Path, device: str | None, dtype: torch.dtype | None) -> EncoderEngine:
    """On this rank's device."""
    kind = devices.pick(device)
    wanted = dtype or (None if kind == "cpu" else torch.bfloat16)
    trained = load_trained(source, device=devices.current(kind), dtype=wanted)
    labels = label_names(source) if trained.task == "classify" else ()
    return EncoderEngine(trained.model, trained.tokenizer, trained.task, model_name=source.absolute().name, labels=labels)


@contextmanager
def phase(what: str) -> Iterator[None]:
    """Say how long it took."""
    began = time.perf_counter()
    yield
    say(f"{what}: {time.perf_counter() - began:.1f} s")


def say(text: str) -> None:
    """Where a command says what it does: its answers go to another stream."""
    print(text, file=sys.stderr, flush=True)
