"""schemathesis on the OpenAPI document of a live server: requests that it allows, and ones that it does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT
from tests.e2e.live import KEY, Live, live
from tests.e2e.test_serve_command import folder


def run(here: Live, folder: Path, phases: str, *more: str) -> str:
    """What it said. All its checks but the one that `openapi_hooks` has a truer form of; any failure of them fails here."""
    address = f"http://127.0.0.1:{here.port}/openapi.json"
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", address, "-H", f"Authorization: Bearer {KEY}", "--checks", "all",
        "--exclude-checks", "positive_data_acceptance", "--phases", phases, "--seed", "1", "--request-timeout", "60",
        "--continue-on-failure", "--generation-database", "none", "--no-color", *more,
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SCHEMATHESIS_HOOKS": "tests.e2e.openapi_hooks"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert not [line for line in here.said if "Traceback" in line], here.said
    return done.stdout


def made(said: str) -> int:
    """Requests that were made."""
    found = re.search(r"(\d+) generated", said)
    assert found is not None, said
    return int(found[1])


def test_the_boundaries_of_the_document_are_those_of_the_server(tmp_path: Path):
    """Every bound, type and field of one route, from both sides."""
    with live(folder(tmp_path / "masked", "mlm")) as here:
        said = run(here, tmp_path, "coverage", "--include-path-regex", "fill-mask|models|ready")
    assert made(said) >= 50


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("task", ["lm", "mlm", "classify"])
def test_the_document_is_true(task: str, tmp_path: Path):
    """All routes: their bounds, and 100 requests each that are drawn at random within and beyond the document.

    Mutation tried: `seed` up to 2**63 - 1, which a document's floats cannot say, is refused though allowed.
    """
    with live(folder(tmp_path / task, task)) as here:
        said = run(here, tmp_path, "examples,coverage,fuzzing,stateful", "--max-examples", "100")
        here.until(lambda: here.metric("requests_running") == 0)
    assert made(said) >= 200
