"""`meshwright launch`: a script of one's own on every device of this machine."""

from __future__ import annotations

import typer

EXAMPLE = "Example: meshwright launch --nproc 4 train.py --epochs 3"


def register(app: typer.Typer) -> None:
    @app.command(epilog=EXAMPLE, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
    def launch(
        script: str = typer.Argument(..., help="A Python file. Options for the launcher stand before it."),
        args: list[str] | None = typer.Argument(None, help="What the script gets."),
        nproc: int | None = typer.Option(None, min=1, help="Ranks on this machine; default: one a device, two on a CPU."),
        devices: str | None = typer.Option(None, help="Numbers of the devices to use, e.g. 0,2."),
        max_restarts: int = typer.Option(0, min=0, help="Start all ranks again after a failure, this often."),
        nnodes: int = typer.Option(1, min=1, help="Machines; start the same command on each."),
        rdzv: str | None = typer.Option(None, help="HOST:PORT where the machines meet."),
        log_dir: str | None = typer.Option(None, help="Folder for rankN.log; default: logs are kept if a rank fails."),
        grace: float = typer.Option(15.0, min=0.1, help="Seconds that ranks have to end after a signal."),
    ) -> int:
        """Run a Python script as several ranks that find each other by meshwright.init(). Without `launch` it is one rank."""
        from meshwright.runtime.script import run_script

        return run_script(
            [script, *(args or [])],
            nproc=nproc,
            devices=devices,
            max_restarts=max_restarts,
            nnodes=nnodes,
            rdzv=rdzv,
            log_dir=log_dir,
            grace=grace,
        )
