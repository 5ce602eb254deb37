"""Recorded losses and gradient norms of 100 steps, and the command that records them.

    python -m tests.numerics.goldens                     # compare a fresh run with what is recorded; exit 1 if it differs
    python -m tests.numerics.goldens --pinned            # the same under the pinned environment (below)
    python -m tests.numerics.goldens --fp32              # half of it
    python -m tests.numerics.goldens [--pinned] --write  # record what is missing; values that differ are shown and refused
    python -m tests.numerics.goldens [--pinned] --write --replace       # ... and overwritten; if it is more than bits of
                                                         # fp32 that changed, the other machines must be recorded again

**Every change of a recorded value needs its reason in the message of the commit that makes it**: which change of the code
moved the numbers, and why the new ones are right. A golden that nobody can explain is worth nothing.

Each case has, in `goldens/CASE.json`:

rows, weights  digests of the first samples and of the initial weights, the same on every machine. Where they differ it is
               the data or the initialisation that changed, not the arithmetic of a step.
fp64           decimal numbers. They hold to 1e-10 on every machine, and are always compared.
fp32           `float.hex` of every number, by the key of the machine. Compared bit for bit where the key is known.

What decides the bits of fp32 was tried out on one machine by changing one thing at a time. Nothing differed from run to run,
with OMP_NUM_THREADS (a run here computes on one thread), or with the variants of exp and log that the C library chooses by
the CPU (GLIBC_TUNABLES). The bits do differ by each of: the vector instructions of torch's own kernels
(ATEN_CPU_CAPABILITY), the code path of MKL (MKL_CBWR, else chosen by the maker and model of the CPU), that of oneDNN
(ONEDNN_MAX_CPU_ISA, else by the instructions of the CPU). So the key names torch, capability and CPU. `PINNED` sets all
three to the least that every x86-64 CPU has: under it the key names the C library and no CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.config.schema import Config
from meshwright.data.dataset import RowDataset
from meshwright.models import build, initialize
from meshwright.train.objectives import make_objective
from tests.numerics.jobs import DECODER, ENCODER, configure, corpus, dataset, execute

__all__ = ["CASES", "FOLDER", "PINNED", "TOLERANCE", "Case", "Golden", "differences", "key", "main", "measure", "merge"]

FOLDER = Path(__file__).parent / "goldens"
STEPS = 100
TOLERANCE = 1e-10
"""Largest relative difference of an fp64 number. Between the code paths that one machine could be forced into: 2e-15."""

PINNED = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}

Series = dict[str, list[float]]
"""`loss` and `grad_norm` of every step."""


@dataclass(frozen=True)
class Case:
    """micro_batch: rows a forward, fewer than the batch, so that a step accumulates."""

    config: Callable[[str], Config]
    rows: Callable[[Config], RowDataset]
    micro_batch: int


def _decoder(precision: str) -> Config:
    return configure(
        {**DECODER, "width": 64, "ffn": 96, "dropout": 0.1},
        data={"seq_len": 48},
        objective={"kind": "causal_lm", "z_loss": 1e-3},
        train={"steps": STEPS, "tail": "step", "lr": 2e-3},
        precision=precision,
    )


def _encoder(precision: str) -> Config:
    return configure(
        {**ENCODER, "width": 64, "ffn": 128, "dropout": 0.1},
        data={"seq_len": 48, "packing": "none"},
        objective={"kind": "masked_lm"},
        train={"steps": STEPS, "lr": 2e-3, "optimizer": {"betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0.01}},
        precision=precision,
    )


def _classifier(precision: str) -> Config:
    return configure(
        {**ENCODER, "dropout": 0.1, "classes": 3},
        data={"seq_len": 32},
        objective={"kind": "classify", "label_smoothing": 0.1},
        train={"steps": STEPS, "tail": "drop", "lr": 1e-3, "optimizer": {"eps": 1e-6}},
        precision=precision,
    )


CASES = {
    # packed documents under a block mask, grouped queries, rotary positions, swiglu, query and key norms, tied matrices
    "decoder": Case(_decoder, lambda config: dataset(config, corpus(150, 60)), micro_batch=3),
    # learned positions, layer norm after the sum, head transform, 15% of the positions, one document a row
    "encoder": Case(_encoder, lambda config: dataset(config, corpus(150, 60, seed=1)), micro_batch=8),
    # one label a row from the pooled first position
    "classifier": Case(_classifier, lambda config: dataset(config, corpus(150, 60, classes=3, seed=2)), micro_batch=4),
}


@dataclass(frozen=True)
class Golden:
    """The recorded numbers of a case, floats as floats. fp32: by the key of the machine."""

    rows: str
    weights: str
    fp64: Series
    fp32: dict[str, Series]

    @classmethod
    def load(cls, name: str, folder: Path = FOLDER) -> Golden | None:
        try:
            data = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        fp32 = {
            machine: {figure: [float.fromhex(text) for text in texts] for figure, texts in series.items()}
            for machine, series in data["fp32"].items()
        }
        return cls(data["rows"], data["weights"], data["fp64"], fp32)

    def save(self, name: str, folder: Path = FOLDER) -> None:
        """One series a line, so that a change reads well."""
        lines = [f'  "rows": "{self.rows}",', f'  "weights": "{self.weights}",', '  "fp64": {']
        lines += _joined(f'    "{figure}": {json.dumps(values)}' for figure, values in self.fp64.items())
        lines += ["  },", '  "fp32": {']
        machines = []
        for machine, series in sorted(self.fp32.items()):
            inner = [f'      "{figure}": {json.dumps([value.hex() for value in values])}' for figure, values in series.items()]
            machines.append("\n".join([f"    {json.dumps(machine)}: {{", *_joined(inner), "    }"]))
        lines += [*_joined(machines), "  }"]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text("\n".join(["{", *lines, "}"]) + "\n", encoding="utf-8")


def _joined(items: Any) -> list[str]:
    """Items of a JSON object, all but the last with a comma."""
    listed = list(items)
    return [item + ("," if number < len(listed) - 1 else "") for number, item in enumerate(listed)]


def key() -> str:
    """What decides the bits of fp32 on this machine."""
    start = f"torch {torch.__version__}, one thread"
    if all(os.environ.get(name) == value for name, value in PINNED.items()):
        return f"{start}, pinned, {' '.join(platform.libc_ver())}"
    return f"{start}, {torch.backends.cpu.get_cpu_capability()}, {_processor()}"


def _processor() -> str:
    """Maker, family and model of the CPU, by which MKL and oneDNN choose their code."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found: dict[str, str] = {}
    for name, _, value in (line.partition(":") for line in lines):
        found.setdefault(name.strip(), value.strip())
    words = [
        found.get("vendor_id", platform.machine()),
        "family",
        found.get("cpu family", "?"),
        "model",
        found.get("model", "?"),
    ]
    return " ".join(words)


def measure(name: str, precision: str) -> Series:
    """A fresh run of a case."""
    case = CASES[name]
    config = case.config(precision)
    with contextlib.redirect_stdout(io.StringIO()):
        result = execute(config, case.rows(config), case.micro_batch)
    return {"loss": result.losses, "grad_norm": result.norms}


def digests(name: str) -> tuple[str, str]:
    """Of the first 200 samples, and of the initial weights."""
    case = CASES[name]
    config = case.config("fp32")
    data, rows = hashlib.sha256(), case.rows(config)
    for sample in range(200):
        row = rows.row(sample)
        for part in (row.tokens, row.labels, row.documents, row.positions, row.select):
            if part is not None:
                data.update(part.astype("<i8").tobytes())
    task = make_objective(config.objective, config.model.classes or 0).task
    model = build(config.model, task)
    initialize(model, config.run.seed, "cpu")
    weights = hashlib.sha256()
    for parameter_name, parameter in sorted(model.named_parameters()):
        weights.update(parameter_name.encode() + parameter.detach().numpy().astype("<f4").tobytes())
    return data.hexdigest(), weights.hexdigest()


def differences(old: Series, new: Series, tolerance: float) -> list[str]:
    """One line for each figure that differs by more than `tolerance` of its value: the first step and the largest."""
    lines = []
    for figure in sorted(old.keys() | new.keys()):
        before, after = old.get(figure, []), new.get(figure, [])
        if len(before) != len(after):
            lines.append(f"{figure}: {len(before)} steps were recorded, there are {len(after)}")
            continue
        apart = [abs(b - a) / max(abs(a), 1e-300) for a, b in zip(before, after, strict=True)]
        wrong = [step for step, value in enumerate(apart) if not value <= tolerance]
        if wrong:
            first, worst = wrong[0], max(wrong, key=lambda step: apart[step])
            lines.append(
                f"{figure}: {len(wrong)} of {len(apart)} steps differ, first step {first + 1}: {before[first]!r} -> "
                f"{after[first]!r}, at most by {apart[worst]:.1e} of the value (step {worst + 1})"
            )
    return lines


def merge(old: Golden | None, new: Golden) -> tuple[Golden, list[str]]:
    """`old` with what `new` has beside it, and a line for every recorded value that `new` contradicts."""
    if old is None:
        return new, []
    lines = [
        f"{what} changed: {getattr(old, what)[:12]} -> {getattr(new, what)[:12]}"
        for what in ("rows", "weights")
        if getattr(old, what) != getattr(new, what)
    ]
    lines += [f"fp64 {line}" for line in differences(old.fp64, new.fp64, TOLERANCE)]
    for machine, series in new.fp32.items():
        lines += [f"fp32 {line} ({machine})" for line in differences(old.fp32.get(machine, series), series, 0.0)]
    return Golden(old.rows, old.weights, old.fp64, {**new.fp32, **old.fp32}), lines


def replace(new: Golden, old: Golden | None, lines: list[str]) -> Golden:
    """`new` over `old`. Other machines keep their fp32 only where nothing but fp32 changed: else it is stale."""
    bits_only = old is not None and all(line.startswith("fp32") for line in lines)
    return Golden(new.rows, new.weights, new.fp64, {**(old.fp32 if bits_only and old is not None else {}), **new.fp32})


def _fresh(name: str, old: Golden | None, fp32_only: bool) -> Golden:
    fp64 = old.fp64 if fp32_only and old is not None else measure(name, "fp64")
    return Golden(*digests(name), fp64, {key(): measure(name, "fp32")})


def main(argv: list[str] | None = None, folder: Path = FOLDER) -> int:
    """Exit code 0: all as recorded; 1: something differs; 3: nothing is recorded for this machine."""
    parser = argparse.ArgumentParser(prog="python -m tests.numerics.goldens")
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--write", action="store_true", help="record what is missing")
    parser.add_argument("--replace", action="store_true", help="with --write: overwrite what differs")
    parser.add_argument("--pinned", action="store_true", help="run under the pinned environment")
    parser.add_argument("--fp32", action="store_true", help="leave out fp64 where it is recorded")
    args = parser.parse_args(argv)
    if args.fp32 and args.replace:
        parser.error("--replace records fp64 too: leave --fp32 out")
    if args.pinned and any(os.environ.get(name) != value for name, value in PINNED.items()):
        os.execve(sys.executable, [sys.executable, "-m", "tests.numerics.goldens", *sys.argv[1:]], {**os.environ, **PINNED})
    unknown = changed = False
    for name in args.cases or CASES:
        old = Golden.load(name, folder)
        new = _fresh(name, old, args.fp32)
        kept, lines = merge(old, new)
        missing = old is None or key() not in old.fp32
        print(f"{name} ({key()}): {'not recorded' if missing else 'differs' if lines else 'as recorded'}")
        print("".join(f"  {line}\n" for line in lines), end="")
        unknown |= missing and not args.write
        changed |= bool(lines) and not (args.write and args.replace)
        if args.write and lines and args.replace:
            replace(new, old, lines).save(name, folder)
        elif args.write and missing and not lines:
            kept.save(name, folder)
    if changed and args.write:
        print("refused: give --replace to overwrite, and say why in the commit message")
    return 1 if changed else 3 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
