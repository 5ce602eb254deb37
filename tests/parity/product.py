"""The whole product of cells, in slices that can be stopped and go on.

    python -m tests.parity.product                                            # every cell that is not there yet
    python -m tests.parity.product --minutes 9                                # end in time; the same again goes on
    python -m tests.parity.product --slice 1/4                                # cells 0, 4, 8, ...
    python -m tests.parity.product --out A --commit SHA                       # on a machine that has the code but no git
    python -m tests.parity.product --merge A B                                # take the lines of other files in

Each cell that is done is a line of docs/parity-results.jsonl: its id, the commit of the code, the largest difference of each
kind, and what was wrong. A cell that stands there for the present code, right or wrong, is passed over, so the same command
goes on where it was stopped; a later line of a cell counts. Slices may append to the file side by side. Cells run on the CPU
alone, on as many sets of ranks at once as the machine has threes of cores.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.disk import write_whole
from meshwright.distributed.device import cores
from tests.parity import array
from tests.parity.cells import Cell
from tests.parity.runner import Work, run_all

__all__ = ["FILE", "Git", "covered_by", "main", "merge", "read", "stale"]

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "parity-results.jsonl"
CODE = ("meshwright/parallel", "meshwright/train", "meshwright/checkpoint", "meshwright/spec")
"""A result is of the code in these folders."""


@dataclass(frozen=True)
class Git:
    """A checkout, as far as results need it. Raises RuntimeError where `root` is none, or git is not there."""

    root: Path = ROOT

    def run(self, *arguments: str) -> str:
        try:
            done = subprocess.run(["git", *arguments], cwd=self.root, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise RuntimeError(f"{self.root}: no git checkout that can be asked ({error})") from None
        return done.stdout.strip()

    def code(self) -> str:
        """The newest commit that changed the code."""
        return self.run("log", "-1", "--format=%H", "--", *CODE)

    def clean(self) -> bool:
        """Whether the code is as committed."""
        return not self.run("status", "--porcelain", "--", *CODE)

    def since(self, commit: str) -> bool:
        """Whether the code is the same at `commit` as now: what lies between them changed none of it."""
        known = subprocess.run(["git", "cat-file", "-e", commit], cwd=self.root, capture_output=True)
        return known.returncode == 0 and not self.run("diff", "--name-only", commit, "HEAD", "--", *CODE)


def read(path: Path = FILE) -> dict[str, dict[str, Any]]:
    """The newest line of each cell. Raises SystemExit that names every line which is no result."""
    if not path.exists():
        return {}
    found, wrong = {}, []
    for number, text in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            line = json.loads(text) if text else None
            if line is not None:
                found[str(line["cell"])] = line | {"commit": str(line["commit"])}
        except (ValueError, RecursionError, KeyError, TypeError):
            wrong.append(f"{path}:{number}: is no result with a cell and a commit. Delete this line; its cell runs again")
    if wrong:
        sys.exit("\n".join(wrong))
    return found


def stale(lines: Iterable[dict[str, Any]], git: Git) -> list[str]:
    """Cells whose commit has other code than HEAD."""
    same: dict[str, bool] = {}
    old = []
    for line in lines:
        if line["commit"] not in same:
            same[line["commit"]] = git.since(line["commit"])
        if not same[line["commit"]]:
            old.append(line["cell"])
    return old


def covered_by(results: dict[str, dict[str, Any]], cells: Sequence[Cell]) -> list[str]:
    """Cells without a line."""
    return [cell.id for cell in cells if cell.id not in results]


def _text(line: dict[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"


def append(line: dict[str, Any], path: Path = FILE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(_text(line))


def merge(others: Iterable[Path], path: Path = FILE) -> int:
    """Writes the newest line of each cell of all files, in the order of the product, those of unknown cells left out. Returns
    how many. Raises SystemExit, with nothing written, where a file is not there or holds something else."""
    others = list(others)
    if gone := [f"{other}: there is no such file" for other in others if not other.is_file()]:
        sys.exit("\n".join(gone))
    found = read(path)
    for other in others:
        found |= read(other)
    lines = [found[cell.id] for cell in array.whole_product() if cell.id in found]
    write_whole(path, "".join(map(_text, lines)))
    return len(lines)


def _slice(text: str) -> tuple[int, int]:
    part, slash, parts = text.partition("/")
    if not slash or not part.isdecimal() or not parts.isdecimal() or not 1 <= int(part) <= int(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no K/N with 1 <= K <= N, for example 1/4")
    return int(part), int(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if a cell that ran is wrong."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(prog="tests.parity.product", description=__doc__)
    parser.add_argument("--slice", default=(1, 1), type=_slice, help="K/N: every N-th cell, from the K-th on")
    parser.add_argument("--limit", type=int, default=0, help="no more than so many cells")
    parser.add_argument("--minutes", type=float, default=0.0, help="start no cell after so many minutes")
    parser.add_argument("--pools", type=int, default=max(1, cores() // 3), help="sets of ranks at once")
    parser.add_argument("--every", action="store_true", help="print every cell, not the wrong ones alone")
    parser.add_argument("--out", type=Path, default=FILE, help="where lines go")
    parser.add_argument("--commit", help="of the code, where there is no git to ask")
    parser.add_argument("--merge", type=Path, nargs="+", help="take the lines of these files in, run nothing")
    args = parser.parse_args(argv)
    if args.merge:
        print(f"{merge(args.merge, args.out)} cells in {args.out}")
        return 0
    part, parts = args.slice
    known = read(args.out)
    if args.commit:
        commit, old = args.commit, {line["cell"] for line in known.values() if line["commit"] != args.commit[:12]}
    else:
        git = Git()
        if not git.clean():
            sys.exit(f"commit first: the code under {', '.join(CODE)} is not that of a commit")
        commit, old = git.code(), set(stale(known.values(), git))
    cells = array.whole_product()[part - 1 :: parts]
    todo = [cell for cell in cells if cell.id not in known or cell.id in old]
    todo = todo[: args.limit] if args.limit else todo
    return run(todo, commit, args)


def run(todo: Sequence[Cell], commit: str, args: argparse.Namespace) -> int:
    work, start, lines = Work(todo, time.monotonic() + 60 * args.minutes if args.minutes else None), time.monotonic(), []

    def take(line: dict[str, Any]) -> None:
        append(line, args.out)
        lines.append(line)
        if line["wrong"] or args.every:
            print(f"{line['cell']} {line['seconds']} s {'; '.join(line['wrong']) or 'same'}", flush=True)
        if len(lines) % 100 == 0:
            print(f"{len(lines)}/{len(todo)} cells in {time.monotonic() - start:.0f} s", flush=True)

    run_all(work, commit, args.pools, take)
    wrong = sum(bool(line["wrong"]) for line in lines)
    print(f"{len(lines)} cells in {time.monotonic() - start:.0f} s, {wrong} of them wrong, {len(todo) - len(lines)} left")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
