"""TensorBoard and Weights & Biases get every number of a line, and a resume goes on in the same place."""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path

import pytest

from meshwright.config.schema import LogConfig
from meshwright.errors import ConfigError
from meshwright.observe.sinks import Sink, TensorBoardSink, WandbSink, open_sink

LINE = {
    "step": 3,
    "loss": math.nan,
    "lr": 1e-3,
    "split": {"data": 0.25, "wall": 1.0},
    "mfu": None,
    "note": "x",
}


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_tensorboard_has_every_number(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(LINE)
    sink.write({"step": 4, "loss": 2.0, "lr": 5e-4, "grad_norm": math.inf})
    sink.close()
    found = events(tmp_path)
    assert set(found) == {"loss", "lr", "split/data", "split/wall", "grad_norm"}
    assert found["split/data"] == [(3, 0.25)]
    assert found["lr"] == [(3, pytest.approx(1e-3)), (4, pytest.approx(5e-4))]
    assert math.isnan(found["loss"][0][1]) and found["loss"][1] == (4, 2.0)
    assert found["grad_norm"] == [(4, math.inf)]


def test_a_resumed_run_replaces_what_came_after_its_step(tmp_path: Path) -> None:
    # mutation tried: purge_step left out -> red (steps 3 and 4 twice)
    for resume, steps, loss in ((0, (1, 2, 3, 4), 9.0), (2, (3, 4, 5), 1.0)):
        sink = TensorBoardSink(tmp_path, resume)
        for step in steps:
            sink.write({"step": step, "loss": loss})
        sink.close()
    assert events(tmp_path)["loss"] == [(1, 9.0), (2, 9.0), (3, 1.0), (4, 1.0), (5, 1.0)]


class FakeWandb(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits: list[dict] = []
        self.logged: list[tuple[dict, int]] = []
        self.finished = 0

    def init(self, **settings: object) -> FakeWandb:
        self.inits.append(settings)
        return self

    def log(self, values: dict, step: int) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        self.finished += 1


def test_wandb_is_one_run_over_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for _ in range(2):
        sink = WandbSink(tmp_path, "project", {"train": {"lr": 1}})
        sink.write({"step": 7, "loss": 2.0, "split": {"data": 0.5}})
        sink.close()
    first, second = wandb.inits
    assert first == second and first["resume"] == "allow" and len(first["id"]) == 12
    assert (first["project"], first["name"], first["dir"]) == ("project", tmp_path.name, str(tmp_path))
    assert "mode" not in first  # WANDB_MODE decides
    assert wandb.logged == [({"loss": 2.0, "split/data": 0.5}, 7)] * 2 and wandb.finished == 2


def test_wandb_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"log\.wandb: .* is not installed\. pip install 'meshwright\[wandb\]'"):
        open_sink(LogConfig(wandb=True), tmp_path, {})
    assert list(tmp_path.iterdir()) == []


def test_the_sinks_asked_for_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = open_sink(LogConfig(), tmp_path, {})
    nothing.write(LINE)
    nothing.close()
    assert type(nothing) is Sink and list(tmp_path.iterdir()) == []
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    both = open_sink(LogConfig(wandb=True, tensorboard=True, wandb_project="mine"), tmp_path, {"a": 1}, resume_step=0)
    both.write({"step": 1, "loss": 3.0})
    both.close()
    assert wandb.logged == [({"loss": 3.0}, 1)] and wandb.finished == 1 and wandb.inits[0]["project"] == "mine"
    assert events(tmp_path / "tensorboard") == {"loss": [(1, 3.0)]}
