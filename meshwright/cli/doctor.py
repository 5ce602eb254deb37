"""`meshwright doctor`: check this machine and say what to mend."""

from __future__ import annotations

import typer

EXAMPLE = "Example: meshwright doctor --json"


def register(app: typer.Typer) -> None:
    @app.command(help="Check this machine and say what to mend. Exit code 1 if something prevents training.", epilog=EXAMPLE)
    def doctor(
        as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
        timeout: float = typer.Option(60.0, min=1.0, help="Seconds that the self-test of the ranks may take."),
        ranks: int | None = typer.Option(None, min=2, max=64, help="Ranks of the self-test; default: one a device, 2 to 8."),
    ) -> int:
        import json
        from dataclasses import asdict

        from meshwright.distributed.checks import check_machine, check_selftest
        from meshwright.distributed.inventory import take_inventory
        from meshwright.distributed.selftest import run_selftest

        machine = take_inventory()
        checks = check_machine(machine)
        # a single accelerator has no peer, so its pair is tried with the CPU's backend
        many = ranks or min(len(machine.devices), 8)
        test = run_selftest(machine.device_type if many > 1 else "cpu", max(many, 2), timeout)
        checks.append(check_selftest(test))
        bad = any(check.state == "fail" for check in checks)
        if as_json:
            print(json.dumps({"ok": not bad, "checks": [asdict(c) for c in checks], "selftest": asdict(test)}, indent=2))
            return int(bad)
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console = Console()
        table = Table("", "check", "found", "what to do")
        for check in checks:
            style = {"ok": "green", "warn": "yellow", "fail": "bold red"}[check.state]
            table.add_row(f"[{style}]{check.state}[/]", check.name, escape(check.found), escape(check.fix))
        console.print(table)
        console.print("Something prevents training: see the lines marked fail." if bad else "This machine can train.")
        return int(bad)
