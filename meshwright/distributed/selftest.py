"""A timed collective over every pair of ranks, and over all of them: does each hear each, rightly, and how fast?

The ranks are started by the launcher in a process of their own, so that the test ends within its time limit whatever hangs.
`python -m meshwright.distributed.selftest start NPROC DEVICE OUT` is that process.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.distributed.worker import tie_to_parent

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from meshwright.distributed.world import Ranks

__all__ = ["Link", "SelfTest", "measure_links", "run_selftest"]

_SMALL = 8
"""Elements of fp32 of the latency test."""
_LARGE = {"cpu": 1 << 20}
"""Elements of fp32 of the bandwidth test, by device type; elsewhere 64 MiB."""


@dataclass(frozen=True)
class Link:
    """An all-reduce over `ranks`. latency_s: of 32 bytes, median. bytes_per_s: size of the tensor over the time of a large one.
    right: whether both results were the exact sums.
    """

    ranks: tuple[int, ...]
    latency_s: float
    bytes_per_s: float
    right: bool


@dataclass(frozen=True)
class SelfTest:
    """What a self-test found. error: why it did not end well, "" if it did."""

    device: str
    ranks: int
    links: tuple[Link, ...] = ()
    seconds: float = 0.0
    error: str = ""

    @property
    def good(self) -> bool:
        return not self.error and all(link.right for link in self.links)


def run_selftest(device_type: str, ranks: int, timeout: float = 60.0) -> SelfTest:
    """Start `ranks` ranks here, measure every pair and the whole; never longer than `timeout` seconds."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="meshwright-selftest-") as folder:
        out = Path(folder) / "links.json"
        command = [sys.executable, "-m", __name__, "start", str(ranks), device_type, str(out)]
        try:
            env = {**os.environ, "TMPDIR": folder}  # what a launcher that is killed leaves behind goes with the folder
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
        except subprocess.TimeoutExpired:
            what = f"{ranks} ranks did not finish within {timeout:g} s"
            return SelfTest(device_type, ranks, (), time.monotonic() - start, what)
        seconds = time.monotonic() - start
        if done.returncode != 0 or not out.exists():
            error = done.stderr.strip() or f"ended with exit code {done.returncode}"
            return SelfTest(device_type, ranks, (), seconds, error)
        links = tuple(Link(**{**link, "ranks": tuple(link["ranks"])}) for link in json.loads(out.read_text(encoding="utf-8")))
        return SelfTest(device_type, ranks, links, seconds)


def _start(ranks: int, device_type: str, out: str) -> int:
    """Runs in the process that `run_selftest` bounds; its ranks end with it."""
    from meshwright.distributed.launch import launch
    from meshwright.errors import MeshwrightError

    tie_to_parent()
    try:
        return launch(["-m", __spec__.name, "rank", device_type, out], nproc=ranks)
    except MeshwrightError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _rank(device_type: str, out: str) -> None:
    from meshwright.distributed.environment import read_world
    from meshwright.distributed.world import init_world

    with init_world(read_world(), device_type, timeout=30.0, join_timeout=60.0) as ranks:
        links = measure_links(ranks)
        if ranks.rank == 0:
            Path(out).write_text(json.dumps([asdict(link) for link in links]), encoding="utf-8")


def measure_links(ranks: Ranks) -> list[Link]:
    """Every pair of ranks in turn, then all together; the same list on every rank. Collective."""
    import torch.distributed as dist

    from meshwright.distributed.reduce import barrier, gather_json

    wanted: list[tuple[int, ...]] = [*itertools.combinations(range(ranks.size), 2)]
    if ranks.size != 2:
        wanted.append(tuple(range(ranks.size)))
    mine = []
    for members in wanted:
        group = dist.new_group(list(members))
        if ranks.rank in members:
            mine.append(asdict(_measure(members, group, ranks.device)))
        barrier(ranks.control, 30.0, f"the self-test of ranks {members}")
        if ranks.rank in members:
            dist.destroy_process_group(group)
    # of each link the report of its lowest rank; a wrong sum on any rank counts
    found: dict[tuple[int, ...], Link] = {}
    for reports in gather_json(mine, ranks.control):
        for report in reports:
            link = Link(**{**report, "ranks": tuple(report["ranks"])})
            first = found.setdefault(link.ranks, link)
            found[link.ranks] = replace(first, right=first.right and link.right)
    return [found[members] for members in wanted]


def _measure(members: tuple[int, ...], group: dist.ProcessGroup, device: torch.device) -> Link:
    import torch

    size = _LARGE.get(device.type, 1 << 24)
    small_s, small_right = _time(torch.empty(_SMALL, device=device), members, group, times=20)
    large_s, large_right = _time(torch.empty(size, device=device), members, group, times=3)
    return Link(members, small_s, 4 * size / large_s, small_right and large_right)


def _time(tensor: torch.Tensor, members: tuple[int, ...], group: dist.ProcessGroup, times: int) -> tuple[float, bool]:
    """Median seconds of an all-reduce, and whether each sum was exact; the first one, which connects, is not counted."""
    import torch.distributed as dist

    from meshwright.distributed import device

    expected = float(sum(member + 1 for member in members))
    seconds, right = [], True
    for _ in range(times + 1):
        tensor.fill_(float(dist.get_rank() + 1))
        device.synchronize(tensor.device)
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        device.synchronize(tensor.device)
        seconds.append(time.perf_counter() - start)
        right = right and bool((tensor == expected).all())
    return statistics.median(seconds[1:]), right


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        _rank(sys.argv[2], sys.argv[3])
    else:
        sys.exit(_start(int(sys.argv[2]), sys.argv[3], sys.argv[4]))
