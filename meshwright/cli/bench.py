"""`meshwright bench`: speeds on this machine, in one table, a JSON file and a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from meshwright.bench.host.runner import HostSettings
    from meshwright.bench.serve_suite import ServeSettings
    from meshwright.bench.tasks import Settings

EXAMPLE = "Example: meshwright bench strategies --workloads encoder-24x1024 --devices 2 --peers ddp,deepspeed-2 --out bench"


def register(app: typer.Typer) -> None:
    @app.command(epilog=EXAMPLE)
    def bench(
        context: typer.Context,
        suite: str = typer.Argument(
            ...,
            help="strategies: plans of these devices beside one device; engines: ours beside other tools; scaling: one to many "
            "devices; ceilings: what the machine can do at best; serving: answers beside another engine's; data, checkpoint, "
            "startup, overhead: the host's side; compare A B: two results; history FOLDER: all that it holds, over time.",
        ),
        results: list[Path] | None = typer.Argument(
            None, help="compare: two folders that --out named, or results.json; history: a folder."
        ),
        workloads: str | None = typer.Option(None, help="Names with commas; default: the suite's."),
        peers: str | None = typer.Option(
            None, help="auto: the fastest known ones; none; or names (default: auto for engines, none for strategies)."
        ),
        devices: str | None = typer.Option(None, help="Numbers of devices, e.g. 1,2; default: 1 and all of them."),
        micro: str = typer.Option("", help="strategies: rows a device by strategy, e.g. zero-2=64,zero-3=128."),
        steps: int = typer.Option(30, min=2, help="Steps of each engine."),
        warm: int = typer.Option(10, min=1, help="First steps that are not counted."),
        repeat: int | None = typer.Option(None, min=1, help="Run the whole list so often, in turn (1; of the host's side 5)."),
        tokens: str | None = typer.Option(
            None, help="Prepared corpus, or .npy file of tokens, to train on; default: random ones."
        ),
        until: float | None = typer.Option(None, help="Tell the steps and seconds to this loss (with --tokens)."),
        order: str = typer.Option("ceilings,peer,ours", help="What runs, in this order."),
        timeout: float = typer.Option(240.0, help="Seconds of one engine's run."),
        budget: float | None = typer.Option(None, help="Seconds after which no further engine is started."),
        rows: str | None = typer.Option(None, help="serving: recipe:sequences:prompt:answer with commas; default: five rows."),
        tp: int | None = typer.Option(None, help="serving: further rows over so many devices that share every matrix."),
        pp: int | None = typer.Option(None, help="serving: the same, stages of layers behind each other."),
        dp: int | None = typer.Option(None, help="serving: the same, copies side by side."),
        smoke: bool = typer.Option(False, "--smoke", help="serving: tiny shapes, to see that it runs."),
        out: Path | None = typer.Option(
            None, help="Folder for results.json, results.md, results.html and log.txt; history: the page."
        ),
        json: bool = typer.Option(False, "--json", help="Print one JSON object in place of the table."),
    ) -> int:
        """Measure this machine. Every engine runs by itself, in turn, on the same shapes; each result keeps the machine, the
        versions, the commit and the command. Exit code 1 when nothing gave a result, or a step is 15% over a bare loop's."""
        from meshwright.bench.host.runner import HOST_SUITES, HostSettings
        from meshwright.bench.strategies import parse_micro
        from meshwright.bench.tasks import SUITES, Settings

        _refuse_unknown(suite, results or [])
        _refuse_unused(context, suite)
        _refuse_seconds({"--timeout": timeout, "--budget": budget})
        if suite == "compare":
            return _compare(results or [], json)
        if suite == "history":
            return _history(results or [], out, json)
        if suite == "serving":
            return _serving(
                serve_settings(rows, peers, {"tp": tp, "pp": pp, "dp": dp}, repeat, smoke, timeout, budget, out), json
            )
        gpus = _counts(devices) if devices is not None else _here()
        if suite in HOST_SUITES:
            return _host(HostSettings(suite, gpus, repeat or 5, timeout, out), json)
        settings = Settings(
            workloads=tuple(workloads.split(",")) if workloads is not None else SUITES[suite],
            suite=suite,
            peers=peers if peers is not None else ("auto" if suite == "engines" else "none"),
            gpus=gpus,
            micro=tuple(parse_micro(micro).items()),
            repeat=repeat or 1,
            tokens=tokens,
            until=until,
            steps=steps,
            warm=warm,
            order=tuple(order.split(",")),
            out=out,
            timeout=timeout,
            budget=budget if budget is not None else float("inf"),
        )
        return _measure(settings, json)


OF_ALL = {"suite", "repeat", "timeout", "out", "json"}
OF_ENGINES = OF_ALL | {"workloads", "devices", "steps", "warm", "tokens", "until", "order", "budget"}
TAKEN = {
    "engines": OF_ENGINES | {"peers"},
    "strategies": OF_ENGINES | {"peers", "micro"},
    "scaling": OF_ENGINES,
    "ceilings": OF_ALL | {"workloads"},
    "serving": OF_ALL | {"rows", "tp", "pp", "dp", "smoke", "peers", "budget"},
    "data": OF_ALL,
    "compare": {"suite", "results", "json"},
    "history": {"suite", "results", "out", "json"},
}
"""Options that a suite reads; the others of the host's side have the number of devices beside what all have."""


def _refuse_unknown(suite: str, results: list[Path]) -> None:
    from meshwright.bench.host.runner import HOST_SUITES
    from meshwright.bench.tasks import SUITES
    from meshwright.errors import Finding, UserError

    known = [*SUITES, "serving", *HOST_SUITES, "compare", "history"]
    if suite not in known:
        raise UserError(findings=[Finding("SUITE", f"{suite!r} is unknown", f"Known: {', '.join(known)}")])
    if results and suite not in ("compare", "history"):
        raise UserError(findings=[Finding("bench", f"{results[0]}: only compare and history take results")])


def _counts(devices: str) -> tuple[int, ...]:
    from meshwright.errors import Finding, UserError

    parts = devices.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise UserError(findings=[Finding("--devices", f"{devices!r} is no list of numbers from 1", "For example 1,2")])
    return tuple(map(int, parts))


def _refuse_unused(context: typer.Context, suite: str) -> None:
    """Options that mean nothing to a suite are a mistake, as a wrong number would be."""
    from meshwright.errors import Finding, UserError

    taken = TAKEN.get(suite, OF_ALL | {"devices"}) | {"results"}
    given = [name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    findings = [Finding(f"--{name}", f"has no effect on bench {suite}", "Leave it out") for name in given if name not in taken]
    if findings:
        raise UserError(findings=findings)


def _refuse_seconds(given: dict[str, float | None]) -> None:
    from meshwright.errors import Finding, UserError

    wrong = {name: value for name, value in given.items() if value is not None and not value > 0}  # NaN is none either
    if wrong:
        fix = "Give more than 0"
        raise UserError(findings=[Finding(name, f"{value:g} is no number of seconds", fix) for name, value in wrong.items()])


def _here() -> tuple[int, ...]:
    """One device and all of them."""
    from meshwright.distributed import device

    every = device.count(kind) if (kind := device.pick()) != "cpu" else device.default_ranks("cpu")
    return tuple(sorted({1, every}))


def _measure(settings: Settings, json: bool) -> int:
    import json as codec

    from meshwright.bench.page import write_page
    from meshwright.bench.runner import run

    outcome = run(settings, say=lambda text: typer.echo(text, err=json))
    if settings.out is not None:
        write_page(settings.out / "results.html", outcome.table(), outcome.results)
    typer.echo(codec.dumps(outcome.as_dict()) if json else "\n" + outcome.table())
    measured = any(result.figures is not None for result in outcome.results) or bool(outcome.ceilings)
    return 0 if measured else 1


def _host(settings: HostSettings, json: bool) -> int:
    import json as codec

    from meshwright.bench.host.runner import run
    from meshwright.bench.page import write_measures

    outcome = run(settings, say=lambda text: typer.echo(text, err=json))
    if settings.out is not None:
        write_measures(settings.out / "results.html", outcome.table(), outcome.measures)
    typer.echo(codec.dumps(outcome.as_dict()) if json else "\n" + outcome.table())
    return 0 if outcome.ok else 1


def serve_settings(
    rows: str | None,
    peers: str | None,
    spread: dict[str, int | None],
    repeat: int | None,
    smoke: bool,
    timeout: float,
    budget: float | None,
    out: Path | None,
) -> ServeSettings:
    from meshwright.bench.serve_suite import DEFAULT, PEER, SMOKE, ServeSettings, parse_rows

    return ServeSettings(
        works=parse_rows(rows) if rows is not None else (SMOKE if smoke else DEFAULT),
        peers=PEER.name if peers is None or peers == "auto" else peers,
        spread=tuple((axis, size) for axis, size in spread.items() if size is not None),
        repeat=repeat or 2,
        smoke=smoke,
        timeout=timeout,
        budget=budget if budget is not None else float("inf"),
        out=out,
    )


def _serving(settings: ServeSettings, json: bool) -> int:
    import json as codec

    from meshwright.bench.page import write_page
    from meshwright.bench.serve_suite import run

    outcome = run(settings, say=lambda text: typer.echo(text, err=json))
    if settings.out is not None:
        write_page(settings.out / "results.html", outcome.table(), outcome.results)
    typer.echo(codec.dumps(outcome.as_dict()) if json else "\n" + outcome.table())
    return 0 if any(result.figures is not None for result in outcome.results) else 1


def _history(results: list[Path], out: Path | None, json: bool) -> int:
    import json as codec

    from meshwright.bench.history import history_table, points, read_folder, write_history
    from meshwright.errors import Finding, UserError

    if len(results) != 1:
        raise UserError(findings=[Finding("bench history", f"{len(results)} folders", "Give one: bench history FOLDER")])
    found = points(read_folder(results[0]))
    if out is not None:
        write_history(out, found)
    typer.echo(codec.dumps([vars(point) for point in found]) if json else history_table(found))
    return 0


def _compare(results: list[Path], json: bool) -> int:
    import json as codec

    from meshwright.bench.compare import compare, load
    from meshwright.errors import Finding, UserError

    if len(results) != 2:
        raise UserError(findings=[Finding("bench compare", f"{len(results)} results", "Give two: bench compare A B")])
    rows, table = compare(load(results[0]), load(results[1]))
    typer.echo(codec.dumps(rows) if json else table)
    return 0
