"""`meshwright devices`: what this machine has."""

from __future__ import annotations

import typer

EXAMPLE = "Example: meshwright devices --json"


def register(app: typer.Typer) -> None:
    @app.command(help="What this machine has: devices, memory, driver, cores.", epilog=EXAMPLE)
    def devices(as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table.")) -> int:
        import json

        from meshwright.distributed.inventory import take_inventory

        machine = take_inventory()
        if as_json:
            print(json.dumps(machine.to_dict(), indent=2))
            return 0
        from rich.console import Console
        from rich.table import Table

        gib = 1 << 30
        console = Console()
        table = Table("device", "name", "memory", "free", "capability")
        for each in machine.devices:
            name = f"{machine.device_type}:{each.index}"
            table.add_row(
                name, each.name, f"{each.memory_total / gib:.1f} GiB", f"{each.memory_free / gib:.1f} GiB", each.capability
            )
        table.add_row("cpu", machine.cpu, f"{machine.memory_total / gib:.1f} GiB", f"{machine.memory_free / gib:.1f} GiB", "")
        console.print(table)
        console.print(f"Training runs on {machine.device_type}, ranks talk over {machine.backend}; {machine.cores} CPU cores.")
        driver = f", driver {machine.driver}" if machine.driver else ""
        console.print(f"{machine.host}: {machine.system}, Python {machine.python}, torch {machine.torch}{driver}")
        return 0
