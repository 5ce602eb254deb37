"""The kernels of a decode step are timed one by one."""

from __future__ import annotations

import json

import pytest

from meshwright.bench import kernels


def test_kernels_of_a_step_are_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        "sys.argv", ["kernels", "llama-1b", "--smoke", "--rows", "1", "3", "--context", "40", "--prompt", "7", "9"]
    )
    kernels.main()
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["what"] for record in found].count("decode") == 2
    assert [record["tokens"] for record in found if record["what"] == "prompt"] == [7, 9]
    assert {"qkv", "qkv by torch", "down", "head", "add_norm", "best"} <= {record["what"] for record in found}
    moved = {record["what"]: record["us"] * record["gb_per_s"] * 1e3 for record in found if "gb_per_s" in record}
    assert moved["down"] == pytest.approx(64 * 128 * 4, rel=0.3)  # bytes of a matrix; both numbers are rounded
