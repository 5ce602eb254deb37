"""`meshwright convert`: Hugging Face folders to ours and back."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    import torch

    from meshwright.export.hf import Converted


class Task(StrEnum):
    lm = "lm"
    mlm = "mlm"
    classify = "classify"


class Dtype(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp64 = "fp64"


class How(StrEnum):
    auto = "auto"
    logits = "logits"
    weights = "weights"


def torch_dtype(dtype: Dtype | None) -> torch.dtype | None:
    import torch

    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    return types[dtype.value] if dtype else None


def compared(done: Converted, source: Path, target: Path, how: How) -> int:
    """Say what was written and how it compares; the exit code."""
    from meshwright.export import hf
    from meshwright.runtime.exporting import load_source

    print(f"{source} -> {target}: {done.direction}, {done.family}, task {done.task}")
    for note in done.notes:
        print(f"note: {note}")
    if done.unused:
        shown = ", ".join(done.unused[:4]) + (f" and {len(done.unused) - 4} more" if len(done.unused) > 4 else "")
        print(f"note: left out, since the task does not use them: {shown}")
    comparison = hf.compare(done, source, target, how.value, load_source)
    print(f"compared: {comparison}")
    if not comparison.good:
        print("the two sides disagree: do not use the result")
    return 0 if comparison.good else 1


def register(app: typer.Typer) -> None:
    @app.command(
        epilog="Examples: meshwright convert ~/models/Llama-3.2-1B models/llama-1b;  "
        "meshwright convert runs/quickstart exported --dtype bf16"
    )
    def convert(
        source: Path = typer.Argument(..., help="A Hugging Face folder, a model folder of ours, or a run folder."),
        target: Path = typer.Argument(..., help="Folder to write; it must not exist or be empty."),
        task: Task | None = typer.Option(None, help="From Hugging Face: the head, where config.json leaves it open."),
        family: str | None = typer.Option(None, help="To Hugging Face: model_type, e.g. llama; default: the first that fits."),
        dtype: Dtype | None = typer.Option(None, help="Type of the weights that are written; default: as they are."),
        shard_mib: int = typer.Option(4096, min=1, help="Largest file, in MiB."),
        compare: How = typer.Option(How.auto, help="What to compare afterwards: logits (needs transformers) or weights."),
    ) -> int:
        """Convert Hugging Face weights to ours, or a model or run of ours to Hugging Face, then reload and compare.

        The direction follows from what SOURCE holds.
        """
        from meshwright.errors import ConfigError, Finding
        from meshwright.export import hf
        from meshwright.runtime.exporting import load_source

        from_there = hf.source_kind(source) == "huggingface"
        given = [("--family", family)] if from_there else [("--task", task)]
        where = "from" if from_there else "to"
        findings = [Finding(flag, f"has no effect when converting {where} Hugging Face", "Remove it") for flag, v in given if v]
        if findings:
            raise ConfigError(findings=findings)
        hf.check_comparison(compare.value)
        done = hf.convert(
            source,
            target,
            task=task.value if task else None,
            family=family,
            dtype=torch_dtype(dtype),
            shard_bytes=shard_mib * 2**20,
            load_run=load_source,
        )
        return compared(done, source, target, compare)
