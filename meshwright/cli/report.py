"""`meshwright report`: the page of a run, written again from its folder."""

from __future__ import annotations

from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    @app.command(epilog="Example: meshwright report runs/quickstart")
    def report(
        run: Path = typer.Argument(..., help="Run folder (run.dir of a training run); it may still be training."),
        as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON instead of a table."),
    ) -> int:
        """Write report.html of a run again and print its figures."""
        import json

        from meshwright.observe.progress import print_summary
        from meshwright.observe.report import summary_of, write_report

        path = write_report(run)
        summary = summary_of(run)
        if as_json:
            print(json.dumps({"report": str(path), **summary.to_dict()}))
        else:
            print_summary(summary)
            print(f"report: {path}")
        return 0
