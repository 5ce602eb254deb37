"""`meshwright verify`: every layout against one device, as a table."""

from __future__ import annotations

from typing import Any

import typer

EXAMPLE = "Example: meshwright verify examples/quickstart.yaml --nproc 4 --layouts auto"


def register(app: typer.Typer) -> None:
    @app.command(
        epilog=EXAMPLE,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": True},
    )
    def verify(
        context: typer.Context,
        config: str = typer.Argument(..., help="YAML file of a run."),
        layouts: str = typer.Option(
            "auto",
            help="auto: a few plans in which every two choices meet; all: every plan; or a JSON file with a list of plans.",
        ),
        nproc: int | None = typer.Option(None, min=1, help="Ranks on this machine; default: one a device, two on a CPU."),
        devices: str | None = typer.Option(None, help="Numbers of the devices to use, e.g. 0,2."),
        steps: int = typer.Option(3, min=1, help="Steps that are trained and compared."),
        rows: int | None = typer.Option(
            None, min=1, help="Rows a step; default: train.batch, at most 4 x ranks - 1 (which no layout divides evenly)."
        ),
        precision: str = typer.Option("fp64", help="fp64, fp32, bf16 or fp16: fp64 tells a mistake from rounding best."),
        json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    ) -> int:
        """Train a few steps on one device and under every layout, from the same weights and samples, and compare the loss, the
        gradient norm, every gradient and the updated weights. Exit code 1 if any differs by more than rounding.

        Any setting of the file can be given as --section.key=value. What is prepared for this is removed
        afterwards, unless data.cache names a folder.
        """
        from meshwright.cli.train import joined_overrides
        from meshwright.runtime.verification import VerifyCommand

        found = VerifyCommand(
            config=config,
            overrides=joined_overrides(context.args),
            layouts=layouts,
            nproc=nproc,
            devices=devices,
            steps=steps,
            rows=rows,
            precision=precision,
            quiet=json,
        ).run()
        if found is None:  # a rank that somebody else started, and not the first
            return 0
        if json:
            import json as codec

            typer.echo(codec.dumps(_finite(found)))
        else:
            typer.echo(table(found))
        return 0 if found["verdict"] == "same" else 1


def table(found: dict[str, Any]) -> str:
    """layout, schedule, largest relative difference, where, verdict; one line a plan."""
    from meshwright.spec.plan import Plan
    from meshwright.verify.compare import KINDS
    from meshwright.verify.layouts import describe

    lines = [("layout", "how", "difference", "where", "verdict")]
    for row in found["rows"]:
        where, how = describe(Plan.from_dict(row["plan"]), found["batch"])
        if row["refused"]:
            lines.append((where, how, "", row["refused"], "refused"))
            continue
        kind = max(KINDS, key=lambda kind: row["worst"].get(kind, {"difference": -1.0})["difference"])
        worst = row["worst"][kind]
        place = "; ".join([f"{kind}: {worst['where']}", *row["trouble"]])
        lines.append((where, how, f"{worst['difference']:.1e}", place, row["verdict"]))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    text = ["  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[4]]) for line in lines]
    same = sum(row["verdict"] == "same" for row in found["rows"])
    text += [f"note: {note}" for note in found["notes"]]
    text.append(
        f"{same} of {len(found['rows'])} as one device: {found['steps']} steps of {found['batch']} rows, "
        f"{found['precision']}, differences up to {found['tolerance']:.0e}"
    )
    return "\n".join(text)


def _finite(value: Any) -> Any:
    """JSON has no infinity: null instead."""
    import math

    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
