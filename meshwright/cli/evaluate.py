"""`meshwright evaluate`: held-out figures of a trained model on other data."""

from __future__ import annotations

import typer

from meshwright.cli.flags import said_as_flags

EXAMPLE = "Example: meshwright evaluate runs/quickstart notes.txt --json"


def register(app: typer.Typer) -> None:
    @app.command(epilog=EXAMPLE)
    def evaluate(
        run: str = typer.Argument(..., help="Run folder."),
        data: list[str] = typer.Argument(..., help="Files, folders, globs or prepared folders."),
        best: bool = typer.Option(False, "--best", help="The checkpoint with the best held-out loss instead of the newest."),
        text_key: str | None = typer.Option(None, help="Default: as in the run."),
        label_key: str | None = typer.Option(None, help="Default: as in the run."),
        encoding: str | None = typer.Option(None, help="Default: as in the run."),
        micro_batch: int = typer.Option(8, min=1, help="Rows at a time."),
        json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    ) -> int:
        """Loss, perplexity and accuracy (accuracy and F1 of a classifier) of a run on data that it has not seen."""
        from meshwright.runtime.evaluation import evaluate_run

        keys = {"text_key": text_key, "label_key": label_key, "encoding": encoding}
        given = {key: value for key, value in keys.items() if value is not None}
        with said_as_flags(*keys):
            figures, notes = evaluate_run(run, data, best=best, micro_batch=micro_batch, keys=given)
        for note in notes:
            typer.echo(note, err=True)
        if json:
            import json as codec
            import math

            typer.echo(codec.dumps({k: v if math.isfinite(v) else None for k, v in figures.items()}))
        else:
            for key, value in figures.items():
                typer.echo(f"{key.removeprefix('val_').replace('_', ' '):<18} {value:,.6g}")
        return 0
