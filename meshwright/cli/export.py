"""`meshwright export`: a trained model as files that other programs load."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from meshwright.cli.convert import Dtype, How, compared, torch_dtype

if TYPE_CHECKING:
    from meshwright.export.graph import Checks, GraphFile
    from meshwright.export.source import Source

EXAMPLE = (
    "Examples: meshwright export runs/quickstart --to hf --out exported;  "
    "meshwright export runs/classifier --to onnx --out onnx --data examples/data/desk-valid.jsonl"
)


class Target(StrEnum):
    hf = "hf"
    onnx = "onnx"
    torch = "torch"
    triton = "triton"


class Output(StrEnum):
    logits = "logits"
    embeddings = "embeddings"


def register(app: typer.Typer) -> None:
    @app.command(epilog=EXAMPLE)
    def export(
        source: Path = typer.Argument(..., help="Run folder, checkpoint, model folder of ours, or Hugging Face folder."),
        to: Target = typer.Option(
            ...,
            help="hf: what transformers and vLLM load; onnx: a graph and its int8 variant; torch: a torch.export archive; "
            "triton: a model repository for Triton Inference Server.",
        ),
        out: Path = typer.Option(..., help="Folder to write; it must not exist or be empty."),
        family: str | None = typer.Option(None, help="hf: model_type, e.g. llama; default: the first that fits."),
        dtype: Dtype | None = typer.Option(None, help="hf: type of the weights that are written; default: as they are."),
        shard_mib: int | None = typer.Option(None, min=1, help="hf: largest file, in MiB; default: 4096."),
        compare: How | None = typer.Option(
            None, help="hf: what to compare afterwards: logits (needs transformers) or weights."
        ),
        output: Output | None = typer.Option(None, help="onnx, torch, triton: what the graph gives; default: logits."),
        int8: bool | None = typer.Option(None, "--int8/--no-int8", help="onnx: write model.int8.onnx too; default: yes."),
        data: str | None = typer.Option(None, help="Labelled rows on which a classifier's accuracy is told."),
        text_key: str | None = typer.Option(None, help="--data: key of the text; default: text."),
        label_key: str | None = typer.Option(None, help="--data: key of the label; default: label."),
        repeat: int | None = typer.Option(None, min=1, help="onnx, torch, triton: rows that are timed; default: 20."),
        length: int | None = typer.Option(None, min=1, help="Tokens of such a row, at most the model's max_len; default: 128."),
        name: str | None = typer.Option(None, help="triton: name of the model; default: that of SOURCE."),
        json: bool = typer.Option(False, "--json", help="onnx, torch, triton: print one JSON object."),
    ) -> int:
        """Write a model for another program, read back what was written, and hold it against the model.

        Exit code 1 if they disagree.
        """
        timed = {"--repeat": repeat, "--length": length}
        keys = {"--text-key": text_key, "--label-key": label_key}
        graph: dict[str, Any] = {"--output": output, "--data": data, "--json": json or None, **timed, **keys}
        huggingface = {"--family": family, "--dtype": dtype, "--shard-mib": shard_mib, "--compare": compare}
        idle = dict(graph) if to is Target.hf else {**huggingface, **({} if data else keys)}
        idle |= {} if to is Target.onnx else {"--int8": int8}
        idle |= {} if to is Target.triton else {"--name": name}
        _refuse(idle, f"with --to {to.value}" + ("" if data or to is Target.hf else " and without --data"))
        if output is Output.embeddings:
            _refuse({"--data": data}, "with --output embeddings, which name no class")
        from meshwright.export.graph import Checks, missing
        from meshwright.export.hf import source_kind
        from meshwright.runtime.exporting import check_target, labelled_rows, load_source

        source_kind(source)
        check_target(out, missing(to.value) if to is Target.onnx else [])
        if to is Target.hf:
            return _huggingface(source, out, family, dtype, shard_mib or 4096, compare or How.auto)
        from meshwright.config.schema import Source as DataSource

        found = load_source(source)
        if to is Target.triton and found.task == "lm":
            _refuse(timed, "for a decoder, of which nothing is timed")
        keyed = {"text_key": text_key or "text", "label_key": label_key or "label"}
        rows = labelled_rows(found, DataSource(path=data, **keyed)) if data else ()
        checks = Checks(repeat or 20, length or 128, rows)
        files = _graph(found, to, out, (output or Output.logits).value, int8 is not False, name, checks)
        return _say(files, out, min(checks.length, found.config.max_len), json)


def _graph(source: Source, to: Target, out: Path, output: str, int8: bool, name: str | None, checks: Checks) -> list[GraphFile]:
    from meshwright.export.graph import export_onnx, export_torch
    from meshwright.export.triton import export_triton

    if to is Target.onnx:
        return export_onnx(source, out, output=output, int8=int8, checks=checks)
    if to is Target.torch:
        return export_torch(source, out, output=output, checks=checks)
    return export_triton(source, out, name=name, output=output, checks=checks)


def _refuse(idle: dict[str, Any], why: str) -> None:
    from meshwright.errors import ConfigError, Finding

    findings = [Finding(flag, f"has no effect {why}", "Remove it") for flag, value in idle.items() if value is not None]
    if findings:
        raise ConfigError(findings=findings)


def _huggingface(source: Path, out: Path, family: str | None, dtype: Dtype | None, shard_mib: int, compare: How) -> int:
    from meshwright.export.hf import check_comparison, to_huggingface
    from meshwright.runtime.exporting import load_source

    check_comparison(compare.value)
    done = to_huggingface(
        source, out, family=family, dtype=torch_dtype(dtype), shard_bytes=shard_mib * 2**20, load_run=load_source
    )
    return compared(done, source, out, compare)


def _say(files: list[GraphFile], out: Path, length: int, json: bool) -> int:
    good = all(file.parity.good for file in files if file.exact)
    if json:
        import json as codec

        typer.echo(codec.dumps({"out": str(out), "good": good, "files": [file.to_json() for file in files]}))
        return 0 if good else 1
    for file in files:
        parity = file.parity
        typer.echo(
            f"{out}: {file.name}, {file.bytes / 2**20:.2f} MiB, 1 x {length} tokens in {file.latency_ms:.2f} ms (median, CPU)"
        )
        typer.echo(f"largest difference from the model itself {parity.difference:.1e} (largest value {parity.scale:.2f})")
        if file.exact:
            typer.echo("\n".join(parity.lines()))
        if parity.same is not None:
            typer.echo(f"same largest logit: {parity.same:.2%}")
        if file.accuracy is not None:
            lost = "" if file.exact else f", {files[0].accuracy - file.accuracy:+.2%} lost"  # type: ignore[operator]  # of both
            typer.echo(f"accuracy: {file.accuracy:.2%}{lost}")
    if not files:
        typer.echo(f"{out}: a repository for our engine; nothing was compared, it runs the model itself")
    if not good:
        typer.echo("it disagrees with the model: do not use it")
    return 0 if good else 1
