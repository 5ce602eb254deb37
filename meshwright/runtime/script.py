"""What `meshwright launch` does: a user's script as the ranks of this machine."""

from __future__ import annotations

from typing import Any

from meshwright.errors import ConfigError, Finding

__all__ = ["run_script"]


def run_script(
    argv: list[str], *, nproc: int | None, devices: str | None, nnodes: int, rdzv: str | None, **options: Any
) -> int:
    """The exit code (see `distributed.launch.launch`, which has the options). Raises DeviceError for what is wrong before
    anything is started, ConfigError where somebody else has started ranks already."""
    from meshwright.distributed import device as kinds
    from meshwright.distributed.environment import read_nodes, read_world
    from meshwright.distributed.launch import launch

    nodes = read_nodes()
    world = read_world(warn=nodes is None)
    if world.source != "single" and nodes is None:
        what = f"this process is rank {world.rank} of {world.world} already, started by {world.source}"
        raise ConfigError(findings=[Finding("launch", what, f"Start the script itself: python {argv[0]}")])
    if nodes is not None:
        nnodes, rdzv = nodes.nnodes, rdzv or nodes.rdzv
    if nproc is None:
        nproc = len(devices.split(",")) if devices is not None else kinds.default_ranks(kinds.pick())
    return launch(argv, nproc=nproc, devices=devices, nnodes=nnodes, rdzv=rdzv, **options)
