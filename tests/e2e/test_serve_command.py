"""`meshwright serve` from the command line: what it refuses before it loads, and a model that it serves."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch

from meshwright.cli import main
from meshwright.config.schema import ModelConfig
from meshwright.errors import DeviceError
from meshwright.models import build, initialize
from meshwright.models.files import save_model
from meshwright.serve.command import ServeCommand
from meshwright.serve.encoder import EncoderEngine
from meshwright.serve.engine import LLMEngine
from meshwright.serve.fleet import OUTCOME, Fleet
from meshwright.serve.layout import Serving
from meshwright.serve.loading import load_engine, task_of
from meshwright.serve.server import ServerOptions, reserve, run_server
from tests.docs.markdown import ROOT
from tests.unit.serve_fakes import TEMPLATE, FakeEngine, byte_tokenizer


def folder(path: Path, task: str = "lm", max_len: int = 64) -> Path:
    arch = "decoder" if task == "lm" else "encoder"
    shape = {"arch": arch, "layers": 2, "width": 16, "heads": 2, "ffn": 32, "vocab": 262, "max_len": max_len}
    config = ModelConfig(**shape, classes=2 if task == "classify" else None)  # type: ignore[arg-type]
    model = build(config, task)
    initialize(model, 0, torch.device("cpu"))
    tokenizer = path.parent / "tokenizer"
    byte_tokenizer(TEMPLATE).save(tokenizer)
    named = {"model_type": "bert", "kept": {"id2label": {"1": "bad", "0": "good"}}} if task == "classify" else None
    save_model(path, model, config, task, tokenizer, huggingface=named)
    return path


def test_mistakes_are_told_together_before_anything_is_loaded(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    args = ["serve", str(tmp_path / "none"), "--host", "0.0.0.0", "--dtype", "fp4"]
    assert main(args) == 2
    said = capsys.readouterr().err
    for part in ("--host: 0.0.0.0 is reached from other machines", "neither a run folder", "'fp4' is unknown"):
        assert part in said
    lm, mlm = str(folder(tmp_path / "lm")), str(folder(tmp_path / "mlm", "mlm"))
    assert main(["serve", lm, "--device", "cpu", "--tp", "3", "--pp", "3", "--dtype", "fp4"]) == 2
    said = capsys.readouterr().err
    for part in ("--tp: 3 ranks, but only 2 query heads", "--pp: 3 stages for 2 layers", "'fp4' is unknown"):
        assert part in said
    assert main(["serve", mlm, "--device", "cpu", "--tp", "2", "--blocks", "4"]) == 2
    said = capsys.readouterr().err
    assert "--tp: is for decoders" in said and "--blocks: is for decoders" in said
    assert main([*args[:2], "--api-key-file", str(tmp_path / "keys")]) == 2
    assert "keys: cannot be read" in capsys.readouterr().err
    assert main(args[:2]) == 2 and "neither a run folder" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """With all else that is wrong, in one process and of several. Mutation tried: the address is reserved after the plan is
    made and the model loaded, as it was."""
    model = str(folder(tmp_path / "model"))
    started: list[str] = []
    monkeypatch.setattr(Fleet, "load", lambda self, serving: started.append("loaded"))
    monkeypatch.setattr(Fleet, "launch", lambda self, *rest: started.append("launched"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        args = ["serve", model, "--port", str(port), "--device", "cpu"]
        for more in ([], ["--tp", "2"], ["--dry-run"], ["--dtype", "fp4"]):
            assert main([*args, *more]) == 2
            said = capsys.readouterr().err
            what = f"--port: 127.0.0.1:{port} is in use by another process. End that process, or name another port; 0 takes"
            assert what in said and said.count("--port") == 1 and ("'fp4' is unknown" in said) == ("fp4" in more), said
    assert main(["serve", model, "--host", "192.0.2.1", "--no-key", "--device", "cpu"]) == 2  # an address for documents only
    assert "--host: 192.0.2.1 is no address of this machine. Name one that it has" in capsys.readouterr().err
    assert main(["serve", model, "--host", "a" * 70, "--no-key", "--device", "cpu"]) == 2
    assert "is no address of this machine: " in capsys.readouterr().err
    assert started == []


def test_the_port_is_held_while_the_model_loads(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """By whom nothing connects to yet; of two that came so far the second one to listen is told, and closes its engine."""
    with reserve("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(("127.0.0.1", port))
        late, engine = reserve("127.0.0.1", port), FakeEngine()
        held.listen()
        with pytest.raises(DeviceError, match=rf"127.0.0.1:{port} is in use by another process"):
            run_server(engine, ServerOptions(port=port), late)
        assert engine.closed and late.fileno() == -1


def test_ranks_take_the_port_before_they_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The first of them. Mutation tried: `before` is called after `load`."""
    order: list[str] = []
    monkeypatch.setattr("meshwright.serve.fleet.init_world", lambda *rest: nullcontext(SimpleNamespace(rank=0, size=1)))
    monkeypatch.setattr("meshwright.serve.command.reserve", lambda *rest: order.append("reserved") or nullcontext("held"))
    monkeypatch.setattr("meshwright.serve.command.run_server", lambda engine, options, held, say: order.append(held) or 0)
    monkeypatch.setattr(Fleet, "load", lambda self, serving: order.append("loaded"))
    monkeypatch.setenv(OUTCOME, str(tmp_path / "code"))
    assert ServeCommand("model", ServerOptions(port=0), {"device": "cpu"}).as_rank(Serving(tp=2)) == 0
    assert order == ["reserved", "loaded", "held"] and (tmp_path / "code").read_text() == "0"


def test_the_head_of_a_model_decides_how_it_is_served(tmp_path: Path):
    for task, tasks in (("mlm", {"embed", "fill-mask"}), ("classify", {"embed", "classify"})):
        source = folder(tmp_path / task, task)
        assert task_of(source) == task
        engine = load_engine(source, name="mine", device="cpu")
        assert isinstance(engine, EncoderEngine) and engine.tasks == tasks and engine.model_name == "mine"
    assert engine.labels == ("good", "bad")
    assert task_of(tmp_path / "none") == "lm"


def test_devices_are_counted_and_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Four accelerators, as this machine would tell them; the tiny model fits each, or by its measure none."""
    model = str(folder(tmp_path / "model"))
    room = [2**30]
    for name, value in (
        ("pick", lambda wanted=None: "cuda"),
        ("count", lambda kind: 4),
        ("memory_total", lambda one: (0, room[0])),
    ):
        monkeypatch.setattr(f"meshwright.serve.fleet.devices.{name}", value)
    serving, findings = Fleet(model, {}).plan()
    assert serving is not None and (serving.tp, serving.pp, serving.dp, findings) == (1, 1, 4, [])
    chosen, _ = Fleet(model, {"tp": 2}, devices="1,3").plan()
    assert chosen is not None and (chosen.tp, chosen.dp) == (2, 1)
    assert Fleet(model, {}, devices="1,7").plan()[1][0].what == "there is no device 7"
    room[0] = 2**10
    assert "does not fit 0.0 GiB a device" in Fleet(model, {}).plan()[1][0].what
    serving, findings = Fleet(str(folder(tmp_path / "mlm", "mlm")), {"blocks": 3}).plan("lm")
    assert serving is None and "has the task 'mlm'" in findings[0].what


def test_a_dry_run_says_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    model = str(folder(tmp_path / "model"))
    assert main(["serve", model, "--device", "cpu", "--dry-run"]) == 0
    assert capsys.readouterr().err == "plan: tp 1 x pp 1 x dp 1: a CPU has one rank where no more are asked for\n"
    assert main(["serve", model, "--device", "cpu", "--dry-run", "--pp", "2", "--dp", "3"]) == 0
    assert capsys.readouterr().err == "plan: tp 1 x pp 2 x dp 3: as asked\n"
    assert main(["serve", model, "--device", "cpu", "--dry-run", "--devices", "0"]) == 2
    assert "devices here are of type cpu, which have no numbers" in capsys.readouterr().err
    assert main(["serve", model, "--device", "cpu", "--dry-run", "--blocks", "40"]) == 0
    capsys.readouterr()
    assert main(["serve", model, "--device", "cpu", "--dry-run", "--blocks", "99999999999"]) == 2
    assert "--blocks: 99,999,999,999 of " in capsys.readouterr().err  # not looked at before: red


def test_blocks_of_a_cpu_are_as_wide_as_the_weights_and_its_ranks_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Mutations tried, each red: 2 bytes for weights that are stored in 4; the whole memory for each rank."""
    model = str(folder(tmp_path / "model"))
    one = Fleet(model, {"device": "cpu", "blocks": 10**12}).plan()[1][0]
    each = int(re.findall(r"of ([\d,]+) bytes", one.what)[0].replace(",", ""))
    narrow = Fleet(model, {"device": "cpu", "blocks": 10**12, "dtype": "bf16"}).plan()[1][0]
    assert f" of {each // 2:,} bytes " in narrow.what
    engine = LLMEngine.load(model, device="cpu", blocks=4)
    assert each == sum(page[:1].nbytes for pages in engine.runner._forward.cache for page in pages)
    monkeypatch.setattr("meshwright.serve.fleet.devices.memory_total", lambda one: (2**30, 2**30))
    fits = 2**29 // each
    assert not Fleet(model, {"device": "cpu", "blocks": fits}).plan()[1]
    assert Fleet(model, {"device": "cpu", "blocks": fits, "dp": 2}).plan()[1][0].where == "--blocks"


def serve(model: Path, *options: str, blocks: int | None = 40) -> tuple[subprocess.Popen[str], str]:
    """(the process, its address), once it is ready."""
    command = [
        sys.executable,
        "-m",
        "meshwright",
        "serve",
        str(model),
        "--port",
        "0",
        "--device",
        "cpu",
        *([] if blocks is None else ["--blocks", str(blocks)]),
        *options,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MESHWRIGHT_API_KEY": "s3cret"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if (found := re.match(r"ready: (http://\S+)", line)) is not None:
            return process, found[1]
    process.wait()
    raise AssertionError("".join(said))


@pytest.mark.parametrize(
    "options",
    [[], pytest.param(["--tp", "2"], marks=pytest.mark.slow), pytest.param(["--pp", "2"], marks=pytest.mark.slow)],
    ids=["one", "tensor", "stages"],
)
def test_a_model_is_served(tmp_path: Path, options: list[str]):
    process, address = serve(folder(tmp_path / "model"), *options)
    try:
        with httpx.Client(base_url=address, timeout=30) as http:
            assert http.get("/v1/models").status_code == 401
            http.headers["authorization"] = "Bearer s3cret"
            body = http.post(
                "/v1/completions", json={"prompt": "hi", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
            ).json()
            assert body["model"] == "model" and body["usage"]["completion_tokens"] == 5
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0 and "Traceback" not in err and "s3cret" not in err, err
    finally:
        process.kill()
        process.communicate()
