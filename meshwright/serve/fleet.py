"""The processes of a served model: one, or a rank a device, of which the first does what was asked and the others compute.

first rank            the job over its engine; of several replicas over `Replicas`
first of a replica    computes what the first rank tells it over a line (`replicas.follow_line`)
others                follow the first of their replica (`LLMEngine.follow`)
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.distributed import device as devices
from meshwright.distributed.environment import read_world
from meshwright.distributed.launch import launch
from meshwright.distributed.world import init_world
from meshwright.errors import Finding, UserError
from meshwright.runtime.trained import described, stored_dtype
from meshwright.serve.cache import BLOCK_SIZE
from meshwright.serve.contract import Engine
from meshwright.serve.engine import LLMEngine
from meshwright.serve.layout import Serving, cache_findings, choose_serving
from meshwright.serve.loading import DTYPES, encoder_findings, load_engine, phase
from meshwright.serve.quantize import KV_DTYPES, QUANTIZATIONS
from meshwright.serve.replicas import Replicas, follow_line
from meshwright.serve.wire import Line, meet

__all__ = ["Fleet"]

AXES = ("tp", "pp", "dp")
OUTCOME = "MESHWRIGHT_SERVE_OUTCOME"
"""Names the file in which the first rank leaves its exit code: to the launcher every end by a signal is the same."""
BY_SIGNAL = (0, 128 + signal.SIGTERM, 128 + signal.SIGINT)
"""What the launcher says where no rank failed before the first one ended."""


@dataclass(frozen=True)
class Fleet:
    """model: a folder. engine: options of `load_engine` that were given, a dtype by its name, tp, pp and dp among them.
    name: that it is served under. devices: numbers of those to use ("0,2"); None: all."""

    model: str
    engine: Mapping[str, Any]
    name: str | None = None
    devices: str | None = None

    def findings(self) -> list[Finding]:
        """What is wrong with the options, before anything is read."""
        found = []
        if self.engine.get("dtype", "fp32") not in DTYPES:
            found.append(Finding("--dtype", f"{self.engine['dtype']!r} is unknown", f"Known: {', '.join(DTYPES)}"))
        for key, known in (("quantization", QUANTIZATIONS), ("kv_cache_dtype", tuple(KV_DTYPES))):
            if self.engine.get(key, known[0]) not in known:
                flag = f"--{key.replace('_', '-')}"
                found.append(Finding(flag, f"{self.engine[key]!r} is unknown", f"Known: {', '.join(known)}"))
        return found

    def plan(self, task: str | None = None) -> tuple[Serving | None, list[Finding]]:
        """The layout, given or chosen, and everything that is wrong with the options and the model; None where something is.

        task: the only one that will do.
        """
        found = self.findings()
        try:
            config, head = described(self.model)
            if task not in (None, head):
                what = f"has the task {head!r}, and {task!r} is what this needs"
                raise UserError(findings=[*found, Finding(self.model, what, "Use another model")])
            if head != "lm":
                found += encoder_findings({key: value for key, value in self.engine.items() if key not in AXES})
            kind = devices.pick(self.engine.get("device"))
            chosen = [str(index) for index in range(devices.count(kind))]
            if self.devices is not None:
                devices.visible(self.devices, kind, len(chosen))
                chosen = self.devices.split(",")
            memory = _memory(kind, int(chosen[0]))
            items = self._items(kind)
            serving = choose_serving(
                config,
                head,
                {key: self.engine[key] for key in AXES if key in self.engine},
                devices=len(chosen),
                device_bytes=None if kind == "cpu" else memory,
                item=items[0],
                matrix_item=items[1],
                cache_item=items[2],
            )
            if head == "lm" and "blocks" in self.engine:
                share = memory // serving.ranks if kind == "cpu" else memory  # ranks of a CPU have its memory together
                found += cache_findings(config, serving, self.engine["blocks"], BLOCK_SIZE, share, items)
        except UserError as error:
            return None, [*found, *error.findings]
        return (None if found else serving), found

    def _items(self, kind: str) -> tuple[int, int | None, int | None]:
        """As of `layout.held_bytes`. A CPU has weights as they are stored where nothing else is said."""
        if self.engine.get("dtype") in DTYPES:
            item = DTYPES[self.engine["dtype"]].itemsize
        else:
            item = stored_dtype(self.model).itemsize if kind == "cpu" and "blocks" in self.engine else 2
        return item, 1 if "quantization" in self.engine else None, 1 if "kv_cache_dtype" in self.engine else None

    def load(self, serving: Serving) -> Engine:
        """The engine of this process, or of this rank."""
        options = {key: value for key, value in self.engine.items() if key not in AXES}
        options |= {key: getattr(serving, key) for key in AXES if getattr(serving, key) > 1}
        if "dtype" in options:
            options["dtype"] = DTYPES[options["dtype"]]
        return load_engine(self.model, name=self.name, **options)

    def launch(self, serving: Serving, argv: list[str], grace: float) -> int:
        """A process a rank, each of which runs `argv` and comes to `as_rank`; none outlives this one. The exit code: the first
        rank's, or that of a rank that failed before."""
        with tempfile.TemporaryDirectory() as folder:
            outcome = Path(folder) / "code"
            env = {OUTCOME: str(outcome)}
            code = launch(argv, nproc=serving.ranks, devices=self.devices, grace=grace, env=env)
            return int(outcome.read_text()) if outcome.is_file() and code in BY_SIGNAL else code

    def as_rank(self, serving: Serving, job: Callable[[Engine], int], before: Callable[[], None] = lambda: None) -> int:
        """One rank of `launch`. job: of the first rank, gives its exit code and closes the engine. before: of the first rank,
        what it does before it loads."""
        kind = devices.pick(self.engine.get("device"))
        with init_world(read_world(), kind) as ranks:
            if ranks.rank:
                for number in (signal.SIGTERM, signal.SIGINT):  # the first rank ends, and then says so
                    signal.signal(number, signal.SIG_IGN)
            else:
                before()
            with phase(f"load {self.model} on {ranks.size} ranks"):
                engine = self.load(serving)
            lines = meet(ranks.control, ranks.rank, serving.leads[1:]) if serving.dp > 1 else []
            if ranks.rank:
                _compute(engine, lines)
                return 0
            whole = Replicas(engine, lines) if serving.dp > 1 else engine
            code = job(whole)
            if isinstance(whole, Replicas) and whole.failure is not None:
                raise SystemExit(whole.failure)  # not every rank comes to the meeting at the end
            Path(os.environ[OUTCOME]).write_text(str(code))
            return code


def _compute(engine: Engine, lines: list[Line]) -> None:
    """What a rank does that is not the first."""
    if lines:
        follow_line(engine, lines[0])
    else:
        assert isinstance(engine, LLMEngine)  # an encoder's ranks are replicas
        engine.follow()


def _memory(kind: str, index: int) -> int:
    """Bytes of a device, which the others are taken to be like: asking takes some of its memory. Of a CPU what is
    free."""
    free, total = devices.memory_total(devices.rank_device(kind, index))
    return free if kind == "cpu" else total
