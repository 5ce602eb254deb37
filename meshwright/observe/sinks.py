"""Other places that metrics go to: TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.config.schema import LogConfig
from meshwright.errors import ConfigError, Finding

__all__ = ["Sink", "TensorBoardSink", "WandbSink", "missing_sinks", "open_sink"]

_WANDB = Finding("log.wandb", "Weights & Biases is not installed", "pip install 'meshwright[wandb]', or log.wandb: false")


class Sink:
    """Takes the numbers of each step. This one drops them: where nothing is asked for, and on other ranks."""

    def write(self, record: dict[str, Any]) -> None:
        """record: `step` and numbers by name, also in dicts; other values are left out."""

    def close(self) -> None:
        """Write out what is left."""


def _scalars(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(name/of/scalar, value) of every number of a line, NaN and infinity included, so that they show."""
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _scalars(value, f"{name}/")
        elif isinstance(value, (int, float)) and key not in ("step", "process"):
            yield name, float(value)


class TensorBoardSink(Sink):
    """Event files in `folder`. After a resume TensorBoard hides what it has of steps beyond `resume_step`."""

    def __init__(self, folder: str | Path, resume_step: int = 0):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step else None)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in _scalars(record):
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WandbSink(Sink):
    """One Weights & Biases run for one run folder, also over resumes. WANDB_MODE=offline and the other variables of that
    library do what they always do. Raises ConfigError when the library is not installed."""

    def __init__(self, run_dir: str | Path, project: str, config: dict[str, Any]):
        try:
            import wandb
        except ImportError:
            raise ConfigError(findings=[_WANDB]) from None
        identity = Path(run_dir) / "wandb_id"
        if not identity.exists():
            identity.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
        self._run = wandb.init(
            project=project,
            dir=str(run_dir),
            name=Path(run_dir).resolve().name,
            id=identity.read_text(encoding="utf-8").strip(),
            resume="allow",
            config=config,
        )

    def write(self, record: dict[str, Any]) -> None:
        self._run.log(dict(_scalars(record)), step=record["step"])

    def close(self) -> None:
        self._run.finish()


class _Several(Sink):
    def __init__(self, sinks: list[Sink]):
        self._sinks = sinks

    def write(self, record: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def open_sink(log: LogConfig, run_dir: str | Path, config: dict[str, Any], resume_step: int = 0) -> Sink:
    """The sinks that `log` asks for, as one. config: the resolved settings, stored beside the curves by W&B."""
    sinks: list[Sink] = []
    if log.wandb:
        sinks.append(WandbSink(run_dir, log.wandb_project, config))
    if log.tensorboard:
        sinks.append(TensorBoardSink(Path(run_dir) / "tensorboard", resume_step))
    return sinks[0] if len(sinks) == 1 else _Several(sinks) if sinks else Sink()


def missing_sinks(log: LogConfig) -> list[Finding]:
    """Libraries that `log` asks for and that are not installed."""
    return [_WANDB] if log.wandb and importlib.util.find_spec("wandb") is None else []
