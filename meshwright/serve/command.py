"""`meshwright serve`: from a folder to an engine, and from an engine to a server, in one process or one a rank."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshwright.config.load import load_config
from meshwright.distributed import device as devices
from meshwright.distributed.environment import read_world
from meshwright.distributed.launch import launch
from meshwright.distributed.world import init_world
from meshwright.errors import Finding, UserError
from meshwright.models.files import DESCRIPTION, read_description
from meshwright.models.hf import CONFIG, HfFolder
from meshwright.runtime.modules import load_modules
from meshwright.runtime.trained import label_names, load_trained, run_folder
from meshwright.serve.contract import Engine
from meshwright.serve.encoder import EncoderEngine
from meshwright.serve.engine import LLMEngine
from meshwright.serve.gate import VARIABLE, Keys, read_keys
from meshwright.serve.http import Limits
from meshwright.serve.server import LAST_S, ServerOptions, run_server
from meshwright.train.objectives import make_objective

__all__ = ["ServeCommand", "load_engine", "task_of"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OUTCOME = "MESHWRIGHT_SERVE_OUTCOME"
"""Names the file in which the first rank leaves its exit code: to the launcher every end by a signal is the same."""


def task_of(source: str | Path) -> str:
    """Head of the model in a folder that `load_trained` reads: "lm", "mlm" or "classify". A folder that is none of them counts
    as "lm", and its loading says what is wrong with it."""
    path = Path(source)
    run = run_folder(path)
    if run is not None:
        config = load_config(str(run.config), []).config
        load_modules(config.run.modules)
        return make_objective(config.objective, config.model.classes or 0).task
    if (path / DESCRIPTION).is_file():
        return read_description(path).task
    if (path / CONFIG).is_file():
        with HfFolder.open(path) as folder:
            return folder.hf.task
    return "lm"


def load_engine(source: str | Path, *, name: str | None = None, **options: Any) -> Engine:
    """A decoder's or an encoder's engine, by the head of the model. name: that it is served under; default: the folder's.

    options: of `LLMEngine.load`; those that an encoder does not have are refused with UserError.
    """
    if task_of(source) == "lm":
        decoder = LLMEngine.load(source, **options)
        decoder.model_name = name or decoder.model_name
        return decoder  # type: ignore[return-value]  # one that was loaded has a tokenizer
    encoder = _encoder(Path(source), **options)
    encoder.model_name = name or encoder.model_name
    return encoder


def _encoder(source: Path, *, device: str | None = None, dtype: torch.dtype | None = None, **others: Any) -> EncoderEngine:
    if others:
        findings = [Finding(f"--{key.replace('_', '-')}", "is for decoders, and this model is an encoder") for key in others]
        raise UserError(findings=findings)
    kind = devices.pick(device)
    wanted = dtype or (None if kind == "cpu" else torch.bfloat16)
    trained = load_trained(source, device=devices.rank_device(kind, 0), dtype=wanted)
    labels = label_names(source) if trained.task == "classify" else ()
    return EncoderEngine(trained.model, trained.tokenizer, trained.task, model_name=source.absolute().name, labels=labels)


@contextmanager
def phase(say: Callable[[str], None], what: str) -> Iterator[None]:
    """Say how long it took."""
    began = time.perf_counter()
    yield
    say(f"{what}: {time.perf_counter() - began:.1f} s")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class ServeCommand:
    """model: a folder. options: without keys, which are read from `key_file` or the environment. engine: options of
    `load_engine` that were given, a dtype by its name. no_key: serve an address that others reach without one."""

    model: str
    options: ServerOptions
    engine: dict[str, Any] = field(default_factory=dict)
    name: str | None = None
    key_file: str | None = None
    no_key: bool = False

    def run(self) -> int:
        """Load and serve; the exit code. Raises UserError with all findings before anything is loaded."""
        findings, keys = self._check()
        if findings:
            raise UserError(findings=findings)
        if self.engine.get("tp", 1) > 1:
            return self._launch()
        with phase(_say, f"load {self.model}"):
            engine = load_engine(self.model, name=self.name, **self._engine())
        return run_server(engine, dataclasses.replace(self.options, keys=keys), say=_say)

    def _check(self) -> tuple[list[Finding], Keys | None]:
        findings: list[Finding] = []
        keys: Keys | None = None
        try:
            keys = None if self.no_key else read_keys(self.key_file)
        except UserError as error:
            findings += error.findings
        else:
            if self.no_key and self.key_file is not None:
                findings.append(Finding("--no-key", "and --api-key-file contradict each other", "Leave one of them out"))
            elif keys is None and not self.no_key and not _loopback(self.options.host):
                what = f"{self.options.host} is reached from other machines, and there is no key"
                findings.append(Finding("--host", what, f"Give --api-key-file or set {VARIABLE}; --no-key serves everybody"))
        if self.engine.get("dp", 1) != 1:
            fix = "Start one server a copy and put a balancer before them"
            findings.append(Finding("--dp", "one server has one copy of the model", fix))
        if self.engine.get("pp", 1) != 1:
            findings.append(Finding("--pp", "the server starts ranks for tensor parallelism only", "Use --tp"))
        if self.engine.get("dtype", "fp32") not in DTYPES:
            findings.append(Finding("--dtype", f"{self.engine['dtype']!r} is unknown", f"Known: {', '.join(DTYPES)}"))
        return findings, keys

    def _engine(self) -> dict[str, Any]:
        given = {key: value for key, value in self.engine.items() if key != "dp"}
        if "dtype" in given:
            given["dtype"] = DTYPES[given["dtype"]]
        return given

    def _launch(self) -> int:
        """A process a rank: the first serves, the others follow it. None outlives this one."""
        with tempfile.TemporaryDirectory() as folder:
            outcome = Path(folder) / "code"
            code = launch(
                ["-m", "meshwright.serve.command", json.dumps(dataclasses.asdict(self))],
                nproc=self.engine["tp"],
                grace=self.options.drain_s + 2 * LAST_S,
                env={OUTCOME: str(outcome)},
            )
            return int(outcome.read_text()) if outcome.is_file() else code

    def as_rank(self) -> int:
        """One rank of `_launch`."""
        kind = devices.pick(self.engine.get("device"))
        with init_world(read_world(), kind) as ranks:
            if ranks.rank:
                for number in (signal.SIGTERM, signal.SIGINT):  # the first rank drains, and says when it is over
                    signal.signal(number, signal.SIG_IGN)
            with phase(_say, f"load {self.model} on {ranks.size} ranks"):
                engine = load_engine(self.model, name=self.name, **self._engine())
            if ranks.rank:
                assert isinstance(engine, LLMEngine)
                engine.follow()
                return 0
            code = run_server(engine, dataclasses.replace(self.options, keys=self._check()[1]), say=_say)
            Path(os.environ[OUTCOME]).write_text(str(code))
            return code


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _main() -> int:
    given = json.loads(sys.argv[1])
    options = given.pop("options")
    options["limits"] = Limits(**options["limits"])
    return ServeCommand(options=ServerOptions(**options), **given).as_rank()


if __name__ == "__main__":
    sys.exit(_main())
