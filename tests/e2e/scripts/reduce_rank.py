"""A rank that trains as little as possible: argv STEPS [HOW RANK STEP]; one all-reduce a step, then one line of results."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from meshwright.distributed.environment import read_world
from meshwright.distributed.stop import StopFlag
from meshwright.distributed.watch import Watchdog
from meshwright.distributed.world import init_world
from meshwright.errors import DataError, Finding


def fail(how: str) -> None:
    print(f"failing at {time.time()}", flush=True)
    if how == "raise":
        raise ValueError("a planted failure")
    if how == "user":
        raise DataError(findings=[Finding("corpus.jsonl, line 7", "is no JSON", "Mend the line")])
    if how == "exit":
        os._exit(7)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    print("hangs now", flush=True)
    time.sleep(600)


def main() -> None:
    steps = int(sys.argv[1])
    how, culprit, at = (sys.argv[2], int(sys.argv[3]), int(sys.argv[4])) if len(sys.argv) > 2 else ("", -1, -1)
    world = read_world()
    torch.manual_seed(0)
    print(f"rank {world.rank} pid {os.getpid()}", flush=True)
    with StopFlag() as stop, Watchdog(grace=2.0, stop=stop) as watch, init_world(world) as ranks:
        total, step = 0.0, 0
        while step < steps:
            if world.rank == culprit and step == at and (how != "once" or world.restart == 0):
                fail("raise" if how == "once" else how)
            value = torch.tensor([float(world.rank + 1), float(stop.local)])
            dist.all_reduce(value, group=ranks.group)
            watch.beat()
            if value[1] > 0:
                print(f"rank {world.rank} saved at step {step}", flush=True)
                return
            total += value[0].item()
            step += 1
            if step == 5:
                print(f"rank {world.rank} made 5 steps", flush=True)
            if steps > 100:
                time.sleep(0.05)
        print(f"rank {world.rank} of {world.world} start {world.restart} total {total:g}", flush=True)


main()
