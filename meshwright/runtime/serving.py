"""`meshwright serve`: from a folder to an engine, and from an engine to a server."""

from __future__ import annotations

import dataclasses
import ipaddress
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.config.load import load_config
from meshwright.errors import Finding, UserError
from meshwright.models.files import DESCRIPTION, read_description
from meshwright.runtime.corpus import Corpus
from meshwright.runtime.folder import RunFolder
from meshwright.runtime.modules import load_modules
from meshwright.runtime.trained import load_trained
from meshwright.serve.encoder import EncoderEngine
from meshwright.serve.engine import LLMEngine
from meshwright.serve.gate import VARIABLE, read_keys
from meshwright.serve.server import ServerOptions, run_server
from meshwright.serve.service import Engine
from meshwright.train.objectives import make_objective

__all__ = ["ServeCommand", "load_engine", "task_of"]

DTYPES = ("fp32", "bf16", "fp16")


def task_of(source: str | Path) -> str:
    """Head of the model in a run folder or a model folder: "lm", "mlm" or "classify". What is neither counts as "lm", and its
    loading says what is wrong with it."""
    folder = RunFolder(source)
    if folder.config.is_file():
        config = load_config(str(folder.config), []).config
        load_modules(config.run.modules)
        return make_objective(config.objective, config.model.classes or 0).task
    if (folder.path / DESCRIPTION).is_file():
        return read_description(source).task
    return "lm"


def load_engine(source: str | Path, *, name: str | None = None, say: Callable[[str], None] = print, **options: Any) -> Engine:
    """A decoder's or an encoder's engine, by the head of the model. name: that it is served under; default: the folder's.

    options: of `LLMEngine.load`; those that an encoder does not have are refused with UserError.
    """
    with phase(say, f"load {source}"):
        if task_of(source) == "lm":
            engine: Engine = LLMEngine.load(source, **options)
        else:
            engine = _encoder(Path(source), **options)
    if name is not None:
        engine.model_name = name  # type: ignore[misc]  # read-only for a service
    return engine


def _encoder(source: Path, *, device: str | None = None, dtype: Any = None, **others: Any) -> EncoderEngine:
    import torch

    from meshwright.distributed import device as devices

    if others:
        findings = [Finding(f"--{key.replace('_', '-')}", "is for decoders, and this model is an encoder") for key in others]
        raise UserError(findings=findings)
    kind = devices.pick(device)
    wanted = dtype or (None if kind == "cpu" else torch.bfloat16)
    trained = load_trained(source, device=devices.rank_device(kind, 0), dtype=wanted)
    labels: tuple[str, ...] = ()
    if trained.task == "classify":
        labels = _labels(source, trained.config is not None)
    return EncoderEngine(
        trained.model, trained.tokenizer, trained.task, model_name=source.absolute().name, labels=labels
    )


def _labels(source: Path, run: bool) -> tuple[str, ...]:
    """Names of the classes, in the order of their numbers; empty where none are known."""
    if run:
        return Corpus.load(RunFolder(source).data).label_names()
    named = read_description(source).huggingface.get("kept", {}).get("id2label") or {}
    return tuple(named[key] for key in sorted(named, key=int))


@contextmanager
def phase(say: Callable[[str], None], what: str) -> Iterator[None]:
    """Say how long it took."""
    began = time.perf_counter()
    yield
    say(f"{what}: {time.perf_counter() - began:.1f} s")


@dataclass(frozen=True)
class ServeCommand:
    """model: a folder. engine: options of `load_engine` that were given. no_key: serve an address that others reach without one."""

    model: str
    options: ServerOptions
    engine: dict[str, Any] = field(default_factory=dict)
    name: str | None = None
    key_file: str | None = None
    no_key: bool = False

    def run(self) -> int:
        """Load and serve; the exit code. Raises UserError before anything is loaded where keys or the address are wrong."""
        keys = None if self.no_key else read_keys(self.key_file)
        if self.no_key and self.key_file is not None:
            raise UserError(findings=[Finding("--no-key", "and --api-key-file contradict each other", "Leave one of them out")])
        if keys is None and not self.no_key and not _loopback(self.options.host):
            what = f"{self.options.host} is reached from other machines, and there is no key"
            fix = f"Give --api-key-file or set {VARIABLE}; --no-key serves everybody"
            raise UserError(findings=[Finding("--host", what, fix)])
        given = dict(self.engine)
        if given.pop("dp", 1) != 1:
            fix = "Start one server a copy and put a balancer before them"
            raise UserError(findings=[Finding("--dp", "one server has one copy of the model", fix)])
        if "dtype" in given:
            given["dtype"] = _dtype(given["dtype"])
        say = lambda text: print(text, file=sys.stderr, flush=True)
        engine = load_engine(self.model, name=self.name, say=say, **given)
        return run_server(engine, dataclasses.replace(self.options, keys=keys), say=say)


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _dtype(name: str) -> Any:
    import torch

    if name not in DTYPES:
        raise UserError(findings=[Finding("--dtype", f"{name!r} is unknown", f"Known: {', '.join(DTYPES)}")])
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
