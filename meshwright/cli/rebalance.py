"""`meshwright rebalance`: layers of pipeline stages by the times that a run measured."""

from __future__ import annotations

from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    @app.command(epilog="Example: meshwright rebalance runs/big && meshwright train --resume runs/big")
    def rebalance(
        run: Path = typer.Argument(..., help="Run folder of a run with pipeline stages and a checkpoint."),
        as_json: bool = typer.Option(False, "--json", help="Print the numbers as JSON instead of a table."),
    ) -> int:
        """Even out the pipeline stages of a run: its next resume uses the split that is written into its plan.json."""
        import json
        from dataclasses import asdict

        from meshwright.runtime.folder import RunFolder
        from meshwright.runtime.rebalance import rebalanced

        folder = RunFolder(run)
        stages, plan = rebalanced(folder)
        plan.save(folder.plan)
        if as_json:
            print(json.dumps({**asdict(stages), "checkpoint": str(stages.checkpoint)}))
            return 0
        print(f"measured by {stages.checkpoint}")
        print("stage  ms a micro-batch  layers  balanced")
        for number, (seconds, now, better) in enumerate(zip(stages.seconds, stages.split, stages.better, strict=True)):
            print(f"{number:5}  {seconds * 1e3:16.2f}  {now:6}  {better:8}")
        if stages.better == stages.split:
            print("no better split: the plan stays as it is")
        else:
            print(f"{folder.plan} has the new split; go on with: meshwright train --resume {run}")
        return 0
