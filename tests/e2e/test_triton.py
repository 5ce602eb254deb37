"""A real tritonserver loads exported repositories on a CPU and answers over HTTP.

The server comes from the package nvidia-pytriton, in a virtual environment of its own; without a way to get it the tests are
skipped. Its Python backend reads numpy's arrays by the layout of numpy 1, ignores PYTHONPATH, and finds modules beside its
libpython and in the folder that the server is started from: there are links to what this environment has, and a numpy 1.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import meshwright
from meshwright.export import graph
from meshwright.export.graph import Checks
from meshwright.export.triton import export_triton
from meshwright.models.generate import generate
from tests.unit.export_cases import source

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]

PACKAGES = ("nvidia-pytriton==0.7.0", "numpy<2")


@dataclass(frozen=True)
class Server:
    """binary and the folders that it needs."""

    packages: Path
    backends: Path
    modules: Path

    @contextmanager
    def serving(self, repository: Path, log: Path) -> Iterator[httpx.Client]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        flags = [f"--model-repository={repository}", f"--backend-directory={self.backends}", f"--http-port={port}"]
        flags += ["--http-address=127.0.0.1", "--allow-grpc=false", "--allow-metrics=false"]
        libraries = f"{self.packages / 'nvidia_pytriton.libs'}:{sysconfig.get_config_var('LIBDIR')}"
        command = [str(self.packages / "pytriton/tritonserver/bin/tritonserver"), *flags]
        with log.open("wb") as out:
            env = {**os.environ, "LD_LIBRARY_PATH": libraries}
            process = subprocess.Popen(command, cwd=self.modules, env=env, stdout=out, stderr=out)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                _wait(process, client, log)
                yield client
        finally:
            process.terminate()
            process.wait(60)


def _wait(process: subprocess.Popen[bytes], client: httpx.Client, log: Path) -> None:
    for _ in range(600):
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            if client.get("/v2/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(log.read_text(errors="replace")[-3000:])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    library = Path(sysconfig.get_config_var("LIBDIR") or "") / (sysconfig.get_config_var("INSTSONAME") or "none")
    if not library.name.startswith("libpython") or not library.is_file():
        pytest.skip("this Python has no shared library, which Triton's Python backend loads")
    if graph.missing("triton"):
        pytest.skip("needs the extra [export]")
    folder = tmp_path_factory.mktemp("tritonserver")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=120)
    pip = [str(folder / "venv/bin/pip"), "install", "-q", "--disable-pip-version-check", "--no-deps", *PACKAGES]
    if subprocess.run(pip, timeout=300, capture_output=True, check=False).returncode:
        pytest.skip(f"{' and '.join(PACKAGES)} cannot be installed here")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "venv/lib" / f"python{version}" / "site-packages"
    triton = packages / "pytriton/tritonserver"
    stub = triton / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        pytest.skip(f"the package has no Python backend for Python {version}")
    shutil.copytree(triton / "backends/python", folder / "backends/python")
    shutil.copy(stub, folder / "backends/python")
    modules = folder / "modules"
    modules.mkdir()
    for path in [*Path(np.__file__).parents[1].iterdir(), Path(meshwright.__file__).parent]:
        if not path.name.startswith(("numpy", "__", "meshwright-")) and path.suffix != ".pth":
            (modules / path.name).unlink(missing_ok=True)
            (modules / path.name).symlink_to(path)
    for path in packages.glob("numpy*"):
        (modules / path.name).symlink_to(path)
    return Server(packages, folder / "backends", modules)


def asked(client: httpx.Client, name: str, **inputs: Any) -> dict[str, Any]:
    answer = client.post(f"/v2/models/{name}/generate", content=json.dumps(inputs))
    return {**answer.json(), "status": answer.status_code}


def test_a_classifier_answers(server: Server, tmp_path: Path) -> None:
    """Mutation tried: logits instead of probabilities in model.py."""
    given = source("classify")
    export_triton(given, tmp_path / "out", checks=Checks(repeat=1))
    with server.serving(tmp_path / "out", tmp_path / "log") as client:
        texts = ["one", "some text", "x" * 30, "y"] * 4
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda text: asked(client, "classify", text_input=text), texts))
        long = asked(client, "classify", text_input="x" * 90)
        metadata = client.get("/v2/models/classify").json()
    form = graph.describe(given, "logits")
    for text, answer in zip(texts, answers, strict=True):
        ids = torch.tensor([[*form["prefix"], *given.tokenizer.encode(text), *form["suffix"]]])
        with torch.no_grad():
            chances = given.model(ids)[0].softmax(-1)
        assert answer["scores"] == pytest.approx(chances.tolist(), abs=1e-5)
        assert answer["label"] == given.labels[int(chances.argmax())]
    assert long["status"] != 200 and "92 tokens, this model takes 48" in long["error"]
    assert [port["name"] for port in metadata["outputs"]] == ["label", "scores"]


def test_a_decoder_continues_many_at_once(server: Server, tmp_path: Path) -> None:
    """Mutation tried: max_tokens not read."""
    given = source("grouped")
    export_triton(given, tmp_path / "out")
    with server.serving(tmp_path / "out", tmp_path / "log") as client:
        prompts = [("one", 5), ("another", 9), ("a third prompt", 3), ("z", 20)] * 3
        with ThreadPoolExecutor(12) as pool:
            answers = list(
                pool.map(
                    lambda p: asked(client, "grouped", text_input=p[0], max_tokens=p[1], temperature=0, seed=1),
                    prompts,
                )
            )
        refused = asked(client, "grouped", text_input="", max_tokens=3)
        whole = asked(client, "grouped", text_input="one", max_tokens=100)
    for (prompt, size), answer in zip(prompts, answers, strict=True):
        new = generate(given.model, given.tokenizer.encode(prompt), max_tokens=size, eos=given.tokenizer.eos)
        assert answer["text_output"] == given.tokenizer.decode(new) and answer["output_tokens"] == len(new)
    assert "has no tokens" in refused["error"] and "takes 48 tokens" in whole["error"]
