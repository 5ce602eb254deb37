"""`--profile a:b`: bad ranges refused; the files of the right steps."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pytest
import torch

from meshwright.errors import ConfigError
from meshwright.observe.trace import Profile


def train(profile: Profile, steps: range) -> None:
    for step in steps:
        with profile.step(step):
            (torch.ones(8, 8) @ torch.ones(8, 8)).sum()
    profile.close()


def traced_steps(folder: Path, rank: int = 0) -> list[str]:
    with gzip.open(folder / f"trace-rank{rank}.json.gz", "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    return sorted({event["name"] for event in events if str(event.get("name", "")).startswith("step ")})


@pytest.mark.parametrize("spec", ["", "3", ":", "3:", ":4", "4:3", "0:2", "-1:2", "a:b", "1:2:3", "1.5:2", "１:２"])
def test_bad_ranges_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"--profile: .* is not FIRST:LAST"):
        Profile(spec)


def test_a_range_beyond_the_run_is_refused() -> None:
    Profile("10:12", total=10)
    with pytest.raises(ConfigError, match="begins at step 11, but the run has 10 steps"):
        Profile("11:12", total=10)


def test_both_ends_are_included(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # mutation tried: `number > self._last` as the end -> red
    with caplog.at_level(logging.INFO, "meshwright"):
        train(Profile("2:3", tmp_path / "profile", rank=1), range(1, 6))
    assert traced_steps(tmp_path / "profile", rank=1) == ["step 2", "step 3"]
    assert "aten::mm" in (tmp_path / "profile" / "operators-rank1.txt").read_text()
    assert sorted(p.name for p in (tmp_path / "profile").iterdir()) == ["operators-rank1.txt", "trace-rank1.json.gz"]
    assert "no memory snapshot" in caplog.text


def test_a_run_that_ends_inside_keeps_what_it_has(tmp_path: Path) -> None:
    train(Profile("2:9", tmp_path), range(1, 4))
    assert traced_steps(tmp_path) == ["step 2", "step 3"]


def test_a_run_resumed_inside_starts_there(tmp_path: Path) -> None:
    train(Profile("2:4", tmp_path), range(3, 6))
    assert traced_steps(tmp_path) == ["step 3", "step 4"]


def test_nothing_is_traced_unasked_or_outside(tmp_path: Path) -> None:
    train(Profile(None, tmp_path / "a"), range(1, 4))
    train(Profile("7:8", tmp_path / "b"), range(1, 4))
    assert list(tmp_path.iterdir()) == []


def test_a_failing_step_stops_the_profiler(tmp_path: Path) -> None:
    profile = Profile("1:5", tmp_path)
    with pytest.raises(ZeroDivisionError), profile.step(1):
        raise ZeroDivisionError
    profile.close()
    assert list(tmp_path.iterdir()) == []
    train(Profile("1:1", tmp_path), range(1, 2))  # a new one can start: the old one is not running any more
    assert traced_steps(tmp_path) == ["step 1"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_a_device_has_kernels_and_a_memory_snapshot(tmp_path: Path) -> None:
    device = torch.device(torch.accelerator.current_accelerator())  # type: ignore[arg-type]
    profile = Profile("1:1", tmp_path, device=device)
    a = torch.ones(256, 256, device=device)
    with profile.step(1):
        a @ a
    with gzip.open(tmp_path / "trace-rank0.json.gz", "rt", encoding="utf-8") as file:
        assert any(event.get("cat") == "kernel" for event in json.load(file)["traceEvents"])
    with gzip.open(tmp_path / "memory-rank0.json.gz", "rt", encoding="utf-8") as file:
        assert sum(segment["allocated_size"] for segment in json.load(file)) >= a.numel() * 4
