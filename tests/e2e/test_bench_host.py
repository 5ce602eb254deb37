"""The suites of the host's side from the command line, with real runs; and the guard of `make bench-smoke`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.bench.host.measures import measures_in
from meshwright.bench.runner import environment, records


@pytest.mark.alone
def test_a_step_is_no_more_than_15_percent_over_a_bare_loop() -> None:
    """A ratio within one process, beyond its own noise; no absolute time. What `make bench-smoke` runs, with fewer repeats."""
    # mutation tried: 60 ms of sleep in `train.loop.advance`: red
    command = [sys.executable, "-m", "meshwright.bench.host.overhead", "--repeat", "3", "--steps", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment())
    assert done.returncode == 0, done.stderr
    found = measures_in(list(records(done.stdout)))
    guarded = [one for one in found if one.fails_at is not None]
    assert len(guarded) == 2
    assert not [one for one in guarded if one.regressed], found


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "names"),
    [
        ("data", ["causal LM, seq 4096", "masked LM, seq 512, document mask", "data wait, of a step", "prepare"]),
        ("checkpoint", ["first save: the loop waits", "save: written behind", "save: host memory of a rank", "restore"]),
        ("startup", ["meshwright --help", "import of a rank", "to the first step, cold", "to the first step, warm"]),
    ],
)
def test_suites_measure_and_compare(suite: str, names: list[str], tmp_path: Path) -> None:
    one = ["--devices", "1"] if suite != "data" else []
    command = [sys.executable, "-m", "meshwright", "bench"]
    done = subprocess.run(
        [*command, suite, "--repeat", "1", *one, "--out", str(tmp_path)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "results.json").read_text())
    found = {measure["name"]: measure for measure in kept["measures"]}
    assert set(names) <= set(found)
    assert all(found[name]["value"] > 0 for name in names if name != "data wait, of a step")
    assert kept["command"].startswith(f"meshwright bench {suite}")
    assert (tmp_path / "results.md").read_text() in done.stdout
    done = subprocess.run(
        [*command, "compare", str(tmp_path), str(tmp_path), "--json"], capture_output=True, text=True, timeout=60
    )
    assert {row["verdict"] for row in json.loads(done.stdout)} == {"same"}, done.stderr


def test_a_mistake_in_the_settings_is_answered_without_torch(tmp_path: Path) -> None:
    """It takes more than a second. Red with an import of `runtime.setup` at the top of runtime/command.py."""
    file = tmp_path / "run.yaml"
    file.write_text("model: {layerz: 3}\n")
    code = f"import sys; from meshwright.cli import main; print(main(['train', {str(file)!r}]), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.stdout.split() == ["2", "False"], done.stdout + done.stderr
    assert "Did you mean 'layers'?" in done.stderr
