"""Suite `startup`: seconds from the command to the end of the first step, and where they go. No torch in this process.

python -m meshwright.bench.host.startup --ranks 1,2 --repeat 3

cold: no tokenizer, no prepared corpus, no compiled kernels. warm: all of these are there from the run before. Moments are told
from outside, so that what is measured is the command as it is: the times of the files that it writes, and of the ranks' start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from meshwright.bench.host.measures import Measure, of_repeats, say

__all__ = ["PARTS", "Start", "main", "measures", "start"]

HELP_TARGET = 0.3
TEXT_BYTES = 1 << 20
RANK = "meshwright.distributed.worker"
"""The module that every rank begins in."""
PARTS = ("checks, data, plan", "ranks are started", "imports, meeting, model", "weights, first step")
NAMES = "from meshwright.cli import COMMANDS; print(*COMMANDS)"
"""Asked in a process of its own, as everything here: a benchmark is below the commands that it measures."""
LOOK = """
import sys
from meshwright.cli import main
main([{name!r}, "--help"])
print("torch" in sys.modules)
"""


@dataclass(frozen=True)
class Start:
    """Seconds of the parts, in the order of PARTS; `end`: from the first step's end to that of the command."""

    parts: tuple[float, ...]
    end: float

    @property
    def total(self) -> float:
        return sum(self.parts)


def start(config: Path, folder: Path, ranks: int, timeout: float = 300.0) -> Start:
    """Run `meshwright train` for the one step of this file. Raises RuntimeError with what it printed if it fails."""
    command = [sys.executable, "-m", "meshwright", "train", str(config), f"--run.dir={folder}", "--nproc", str(ranks)]
    output = folder.parent / f"{folder.name}.txt"
    with open(output, "wb") as sink:
        begun = time.time()
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            first_rank = None
            while process.poll() is None and time.time() - begun < timeout:
                if first_rank is None and _has_rank(process.pid):
                    first_rank = time.time()
                time.sleep(0.02)
            ended = time.time()
        finally:
            process.terminate()
            process.wait()
    if process.returncode != 0 or first_rank is None:
        raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode}\n{output.read_text(errors='replace')[-2000:]}")
    built, stepped = (folder / name for name in ("checkpoints/.lock", "metrics.jsonl"))
    marks = [begun, (folder / "plan.json").stat().st_mtime, first_rank, built.stat().st_mtime, stepped.stat().st_mtime]
    parts = tuple(stop - begin for begin, stop in pairwise(marks))
    return Start(parts, ended - marks[-1])


def _has_rank(parent: int) -> bool:
    """Whether the first rank has been started."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(parent).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if RANK in child.cmdline():
                    return True
    return False


def measures(ranks: Sequence[int], repeat: int, folder: Path) -> Iterator[Measure]:
    """`--help` and what it imports, then cold and warm starts on each number of ranks."""
    yield of_repeats(
        "meshwright --help",
        [_seconds("-m", "meshwright", "--help") for _ in range(repeat)],
        "s",
        higher=False,
        target=HELP_TARGET,
    )
    commands = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, check=True).stdout.split()
    importing = [name for name in commands if _imports_torch(name)]
    note = f"of {len(commands)}: {', '.join(importing) or 'none'}"
    yield Measure("commands whose --help imports torch", len(importing), "", higher=False, target=0, note=note)
    bare = statistics.median(_seconds("-c", "import torch") for _ in range(repeat))
    yield of_repeats(
        "import of a rank",
        [_seconds("-c", "import meshwright.runtime.worker") for _ in range(repeat)],
        "s",
        higher=False,
        limit=bare,
        limited_by="`import torch` in a process of its own",
    )
    text = folder / "text.txt"
    text.write_text(_text(TEXT_BYTES), encoding="utf-8")
    for count in ranks:
        yield from _starts(count, repeat, text, folder / f"ranks-{count}", bare)


def _starts(ranks: int, repeat: int, text: Path, folder: Path, bare: float) -> Iterator[Measure]:
    folder.mkdir()
    config = folder / "config.json"
    config.write_text(json.dumps(_settings(text, folder / "cache", ranks)), encoding="utf-8")  # JSON is YAML
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    cold = start(config, folder / "cold", ranks)
    warm = [start(config, folder / f"warm-{turn}", ranks) for turn in range(repeat)]
    more: dict[str, Any] = {
        "ranks": ranks,
        "higher": False,
        "limit": bare,
        "limited_by": "`import torch` in a process of its own",
    }
    shown = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in zip(PARTS, cold.parts, strict=True))
    yield Measure("to the first step, cold", cold.total, "s", note=f"{ranks} rank(s): {shown}", **more)
    yield of_repeats("to the first step, warm", [one.total for one in warm], "s", **more)
    for number, name in enumerate(PARTS):
        yield of_repeats(f"  warm: {name}", [one.parts[number] for one in warm], "s", ranks=ranks, higher=False)
    yield of_repeats("  warm: after the step, to the end", [one.end for one in warm], "s", ranks=ranks, higher=False)


def _settings(text: Path, cache: Path, ranks: int) -> dict[str, Any]:
    return {
        "data": {
            "train": [{"path": str(text)}],
            "cache": str(cache),
            "seq_len": 64,
            "valid_fraction": 0.0,
            "tokenizer": {"vocab": 512},
        },
        "model": {"layers": 2, "width": 64, "heads": 4, "ffn": 128, "max_len": 64},
        "train": {"batch": 4 * ranks, "steps": 1},
        "checkpoint": {"final": False},
        "log": {"report": False},
    }


def _seconds(*arguments: str) -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - begun


def _imports_torch(name: str) -> bool:
    done = subprocess.run([sys.executable, "-c", LOOK.format(name=name)], check=True, capture_output=True, text=True)
    return done.stdout.split()[-1] == "True"


def _text(size: int) -> str:
    from meshwright.config.schema import Source
    from meshwright.data.readers import documents

    parts, total = [], 0
    for document in documents(Source(path="embedded")):
        parts.append(document.text)
        total += len(document.text)
        if total >= size:
            break
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--ranks", default="1,2")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as temporary:
        for measure in measures([int(part) for part in args.ranks.split(",")], args.repeat, Path(temporary)):
            say(measure)


if __name__ == "__main__":
    main()
