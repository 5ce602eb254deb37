"""`meshwright train`: check, prepare, choose a plan, start the ranks, report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from meshwright.errors import counted

if TYPE_CHECKING:
    from meshwright.config.load import Resolved
    from meshwright.runtime.setup import Ready

EXAMPLE = "Example: meshwright train examples/quickstart.yaml --train.lr=3e-4 --devices 0,2"


def register(app: typer.Typer) -> None:
    @app.command(
        epilog=EXAMPLE,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": True},
    )
    def train(
        context: typer.Context,
        config: str | None = typer.Argument(None, help="YAML file of the run. With --resume RUN it may be left out."),
        nproc: int | None = typer.Option(None, min=1, help="Ranks on this machine; default: one a device, two on a CPU."),
        devices: str | None = typer.Option(None, help="Numbers of the devices to use, e.g. 0,2."),
        plan: str | None = typer.Option(
            None, help='A plan.json, or JSON like \'{"layout": {"tp": 2}}\'. What it leaves out is chosen.'
        ),
        resume: str | None = typer.Option(
            None, help="A run folder, or 'latest' for run.dir: go on from its newest whole checkpoint."
        ),
        rebalance: bool = typer.Option(
            False, "--rebalance", help="With --resume: even out the pipeline stages by the times that the run measured."
        ),
        max_restarts: int = typer.Option(0, min=0, help="Start all ranks again after a failure, this often."),
        nnodes: int = typer.Option(1, min=1, help="Machines; start the same command on each."),
        rdzv: str | None = typer.Option(None, help="HOST:PORT where the machines meet."),
        dry_run: bool = typer.Option(False, "--dry-run", help="Check and prepare everything, print the plan, start nothing."),
        profile: str | None = typer.Option(None, help="Trace these steps, e.g. 10:12."),
    ) -> int:
        """Train a model on every device of this machine. Any setting of the file can be given as --section.key=value."""
        from meshwright.runtime.command import TrainCommand

        given = list(context.args)
        if config is not None and config.startswith("-"):  # `train --train.lr=1 --resume RUN`: the first flag is no file
            given, config = [config, *given], None
        overrides = joined_overrides(given)
        return TrainCommand(
            config=config,
            overrides=overrides,
            nproc=nproc,
            devices=devices,
            plan=plan,
            resume=resume,
            rebalance=rebalance,
            max_restarts=max_restarts,
            nnodes=nnodes,
            rdzv=rdzv,
            dry_run=dry_run,
            profile=profile,
        ).run(show)


def show(resolved: Resolved, ready: Ready) -> None:
    """What will be run: every value that is no default, with its origin, then the plan."""
    typer.echo("settings (all values and defaults: config.yaml in the run folder)")
    stored = f"{resolved.config.run.dir}/config.yaml:"  # a resumed run says only what is new
    for key, value, origin in resolved.table():
        if origin != "default" and not origin.startswith(stored):
            typer.echo(f"  {key} = {value}  ({origin})")
    plan = ready.plan
    config = ready.resolved.config
    warmup, total = config.train.schedule.warmup, config.train.schedule.total or ready.budget.steps
    if total is not None and warmup > total:  # what train.steps tells before the data is read is refused in config.check
        typer.echo(f"warning: train.schedule.warmup: {warmup} steps are more than the {counted(total, 'step')} of the run")
    accumulation = plan.accumulation(config.train.batch)
    steps = "until the hours are spent" if ready.budget.steps is None else counted(ready.budget.steps, "step")
    length = config.data.seq_len
    held_out = (
        f"{counted(ready.held_out, 'row')} ({counted(ready.held_out * length, 'token')})" if ready.held_out else "nothing"
    )
    typer.echo(f"data: {counted(ready.rows, 'row')} of {counted(length, 'token')} an epoch, held out: {held_out}; {steps}")
    if config.train.tail == "drop" and config.train.ramp is None and (left := ready.rows % config.train.batch):
        typer.echo(f"data: {counted(left, 'row')} left out at the end of each epoch (train.tail: drop)")
    typer.echo(
        f"plan: {plan.layout.dp} data-parallel ranks x {accumulation} micro-steps x {plan.micro_batch} rows, "
        f"{', '.join(plan.described())} ({plan.reason})"
    )
    from meshwright.train.schedule import peak_learning_rate

    if config.train.lr_scaling != "none":
        typer.echo(
            f"learning rate: {config.train.lr:g} at batch {config.train.lr_batch} -> {peak_learning_rate(config.train):g} "
            f"at batch {config.train.batch} ({config.train.lr_scaling} rule)"
        )


def joined_overrides(args: list[str]) -> list[str]:
    """`--a.b value` is the same as `--a.b=value`."""
    joined: list[str] = []
    for arg in args:
        if joined and joined[-1].startswith("--") and "=" not in joined[-1] and not arg.startswith("--"):
            joined[-1] += f"={arg}"
        else:
            joined.append(arg)
    return joined
