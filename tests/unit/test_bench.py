"""The arithmetic, parsing and planning of benchmarks; that engines really run is in tests/e2e/test_bench.py."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch

from meshwright.bench import ceilings, runner
from meshwright.bench.ceilings import Matmul, attention_of, head_positions, limit, matmuls, step_flops
from meshwright.bench.measure import Laps, figures, median_seconds
from meshwright.bench.peers import BEST, PEERS, Peer, hf_trainer, torchtitan
from meshwright.bench.peers.common import TorchRows, small
from meshwright.bench.peers.torchtitan import LogLine, parse_lines, summarise, write_corpus
from meshwright.bench.runner import Shell, failure_of, last_record
from meshwright.bench.table import OURS, Result, best_peer, cells, markdown, ratio, scaling
from meshwright.bench.tasks import SUITES, Settings, check, plan
from meshwright.bench.workloads import WORKLOADS
from meshwright.data.batch import IGNORE
from meshwright.distributed import device as devices
from meshwright.errors import UserError
from meshwright.observe.flops import flops_per_token

CPU = torch.device("cpu")


# --- the floor of a step -------------------------------------------------------------------------------------------------


def test_llama_1b_by_hand() -> None:
    workload = WORKLOADS["llama-1b"]
    # 4 rows of 4,096; queries 32 * 64, keys and values 8 * 64 each; gate and up together
    assert matmuls(workload) == [
        Matmul("qkv", 16_384, 3_072, 2_048, 16),
        Matmul("attention.out", 16_384, 2_048, 2_048, 16),
        Matmul("mlp.up", 16_384, 16_384, 2_048, 16),
        Matmul("mlp.down", 16_384, 2_048, 8_192, 16),
        Matmul("head", 16_384, 128_256, 2_048),
    ]
    # docs/metrics.md works out 8,219,787,264 operations a token (mutations tried: causal=False, gates=1: both red)
    assert step_flops(workload) == 16_384 * 8_219_787_264
    assert limit(workload, 0.2) == 81_920  # tokens/s


def test_bert_large_by_hand() -> None:
    workload = WORKLOADS["bert-large"]
    assert head_positions(workload) == 77
    # a layer: 4 * 1024^2 + 2 * 1024 * 4096 = 12,582,912 weights; head: 1024 * 30,522 + 1024^2 = 32,303,104 on 64 * 77 positions
    blocks = 6 * 24 * 12_582_912 * 32_768
    head = 6 * 32_303_104 * 4_928
    attention = 12 * 24 * 1_024 * 64 * 512**2
    assert step_flops(workload) == blocks + head + attention
    assert limit(workload, 0.5) == 128  # samples/s


@pytest.mark.parametrize("name", ["llama-1b", "bert-large", "encoder-24x1024", "smoke"])
def test_operations_are_those_of_mfu(name: str) -> None:
    workload = WORKLOADS[name]
    model = workload.config(devices=1, steps=1, folder="unused").model
    task = "mlm" if workload.targets == "masked" else "lm"
    token = flops_per_token(model, workload.seq_len, task, head_positions(workload))
    assert step_flops(workload) == pytest.approx(token * workload.rows * workload.seq_len, rel=1e-12)


def test_floor_adds_every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def one_second(call: object, device: torch.device) -> float:
        assert callable(call)
        out = call()
        shapes.append(tuple(out.shape) if isinstance(out, torch.Tensor) else ())
        return 1.0

    monkeypatch.setattr(ceilings, "median_seconds", one_second)
    found = ceilings.floor(WORKLOADS["smoke"], CPU)
    # 4 matmuls in 2 layers and the head, three products each; attention of 2 layers (mutation: no count: red)
    assert (found.matmul, found.attention, found.seconds) == (27.0, 2.0, 29.0)
    assert shapes[:3] == [(256, 192), (256, 64), (192, 64)]  # qkv: forward, input gradient, weight gradient


def test_floor_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    # Red when the head is multiplied in 8 bits, and when a layer that does not divide by 16 is.
    monkeypatch.setattr(ceilings, "_three_products", lambda part, device: 1.0)
    monkeypatch.setattr(ceilings, "_three_products_fp8", lambda part, device: 0.25)
    monkeypatch.setattr(ceilings, "_attention", lambda part, device: (0.0, "math"))
    smoke = WORKLOADS["smoke"]
    assert ceilings.floor(smoke, CPU, "fp8").matmul == 2 * 4 * 0.25 + 1.0
    odd = replace(smoke, model={**smoke.model, "ffn": 72})
    assert ceilings.floor(odd, CPU, "fp8").matmul == 2 * (3 * 0.25 + 1.0) + 1.0


def test_products_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    # Red when the depth of a product is not that of bf16's.
    shapes = []

    def one_second(call: Callable[[], torch.Tensor], device: torch.device) -> float:
        shapes.append(tuple(call().shape))
        return 1.0

    monkeypatch.setattr(ceilings, "median_seconds", one_second)
    assert ceilings._three_products_fp8(Matmul("qkv", 64, 48, 32), CPU) == 3.0
    assert shapes == [(64, 48), (64, 32), (48, 32)]


def test_floor_may_pad_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []

    def by_alignment(part: Matmul, device: torch.device) -> float:
        widths.append(part.outputs)
        return 1.0 if part.outputs % 64 == 0 else 5.0

    monkeypatch.setattr(ceilings, "_three_products", by_alignment)
    monkeypatch.setattr(ceilings, "_attention", lambda part, device: (0.0, "math"))
    smoke = WORKLOADS["smoke"]
    odd = replace(smoke, model={**smoke.model, "vocab": 500})
    assert ceilings.floor(odd, CPU).matmul == 9.0
    assert widths[-2:] == [500, 512]


def test_attention_backend_that_refuses_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refuse_first(call: object, device: torch.device) -> float:
        calls.append(call)
        if len(calls) == 1:
            raise RuntimeError("No available kernel")
        return 3.0

    monkeypatch.setattr(ceilings, "median_seconds", refuse_first)
    assert ceilings._attention(attention_of(WORKLOADS["smoke"]), CPU) == (6.0, "math")
    monkeypatch.setattr(ceilings, "_CPU_BACKENDS", ceilings._CPU_BACKENDS[:1])
    calls.clear()
    with pytest.raises(RuntimeError, match="no attention backend"):
        ceilings._attention(attention_of(WORKLOADS["smoke"]), CPU)


# --- times ---------------------------------------------------------------------------------------------------------------


def test_laps_and_median() -> None:
    laps = Laps(CPU)
    for pause in (0.0, 0.2, 0.0):
        time.sleep(pause)
        laps.mark()
    first, second = laps.seconds()
    assert first >= 0.2 > second
    pauses = iter([0.3, 0.3, 0.0, 0.3, 0.0, 0.0])  # one of warm-up; of the others the median is short, the mean is not
    assert median_seconds(lambda: time.sleep(next(pauses)), CPU, warm=1, repeat=5) < 0.1


def test_figures() -> None:
    record = figures("x", [0.5, 0.4, 0.6], rows=8, seq_len=100, losses=(3.0, 2.0), peak_gib=1.0, reserved_gib=2.0)
    assert record["seconds"] == 0.5
    assert record["spread"] == pytest.approx(0.4)
    assert (record["tokens_per_s"], record["samples_per_s"]) == (1600.0, 16.0)
    assert (record["first_loss"], record["loss"]) == (3.0, 2.0)


# --- peers ---------------------------------------------------------------------------------------------------------------

TITAN = """[titan] 2026-01-05 10:00:00,001 - root - INFO - Training starts at step 1
[titan] 2026-01-05 10:00:09,000 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.25350  \x1b[38;2;180;60;0mgrad_norm:  1.9100  \x1b[38;2;54;234;195mmemory: 41.02GiB(29.34%)  \x1b[34mtps: 812  \x1b[36mtflops: 6.70  \x1b[35mmfu: 0.68%\x1b[39m
[titan] 2026-01-05 10:00:10,000 - root - INFO - \x1b[31mstep:  5  \x1b[32mloss: 12.01000  \x1b[38;2;180;60;0mgrad_norm: 10.5000  \x1b[38;2;54;234;195mmemory: 50.70GiB(36.26%)  \x1b[34mtps: 30,000  \x1b[36mtflops: 247.10  \x1b[35mmfu: 24.98%\x1b[39m
step: 10  loss: 11.90000  grad_norm:  1.0000  memory: 50.70GiB(36.26%)  tps: 59,000  tflops: 485.00  mfu: 49.0%
step: 15  loss: 11.80000  grad_norm:  1.0000  memory: 50.70GiB(36.26%)  tps: 60,000  tflops: 493.00  mfu: 49.8%
step: 20  loss: 11.70000  grad_norm:  1.0000  memory: 50.70GiB(36.26%)  tps: 64,000  tflops: 526.00  mfu: 53.2%
{"engine": "something else"}
"""  # noqa: E501


def test_torchtitan_lines_with_and_without_colours() -> None:
    lines = parse_lines(TITAN)
    assert [line.step for line in lines] == [1, 5, 10, 15, 20]
    assert lines[0] == LogLine(step=1, loss=12.2535, reserved_gib=41.02, tps=812.0)
    assert lines[1] == LogLine(step=5, loss=12.01, reserved_gib=50.7, tps=30_000.0)


def test_torchtitan_counts_whole_windows_past_the_warm_up() -> None:
    record = summarise(parse_lines(TITAN), warm=5, rows=4, seq_len=4096, world=2, peak_gib=40.0)
    # windows 6..10, 11..15, 16..20 of 59, 60, 64 thousand tokens/s a device (mutation: >= warm without the window: red)
    assert record["tokens_per_s"] == pytest.approx(120_000)
    assert record["seconds"] == pytest.approx(16_384 / 60_000)
    assert record["spread"] == pytest.approx(60 / 59 - 60 / 64)
    assert (record["first_loss"], record["loss"], record["reserved_gib"]) == (12.2535, 11.7, 50.7)
    with pytest.raises(ValueError, match="none of them 5 steps past the warm-up of 18"):
        summarise(parse_lines(TITAN), warm=18, rows=4, seq_len=4096, world=1, peak_gib=0.0)


def test_torchtitan_corpus_is_a_token_a_word(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_corpus(tmp_path / "c", 100, documents=3, length=50)
    tokenizer = Tokenizer.from_file(str(tmp_path / "c" / "assets" / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in (tmp_path / "c" / "data" / "data.json").read_text().splitlines()]
    ids = [tokenizer.encode(text).ids for text in texts]
    assert tokenizer.get_vocab_size() == 100
    assert [len(row) for row in ids] == [50, 50, 50]
    assert min(min(row) for row in ids) >= 3  # no special token, so no unknown word


def test_rows_for_peers() -> None:
    causal, masked = WORKLOADS["smoke"], small(WORKLOADS["bert-large"])
    shifted, own = TorchRows(causal, 2)[1], TorchRows(causal, 2, shifted=False)[1]
    assert torch.equal(shifted["input_ids"][1:], shifted["labels"][:-1])
    assert torch.equal(own["input_ids"], own["labels"])
    row = TorchRows(masked, 2)[0]
    assert row["labels"].shape == row["input_ids"].shape == (64,)
    assert int((row["labels"] != IGNORE).sum()) == 10  # round(0.15 * 64)
    assert torch.equal(TorchRows(masked, 2)[0]["labels"], row["labels"])


def test_small_keeps_the_kind() -> None:
    for name in ("llama-1b", "bert-large", "encoder-24x1024"):
        model, whole = (w.config(devices=1, steps=1, folder="unused").model for w in (small(WORKLOADS[name]), WORKLOADS[name]))
        for field in ("arch", "activation", "dropout", "attention_dropout", "tied", "head_transform"):
            assert getattr(model, field) == getattr(whole, field)
        assert (model.layers, model.vocab) == (2, 512)


@pytest.mark.parametrize(("peer", "flags"), [(hf_trainer, ["--liger"]), (torchtitan, [])])
def test_peer_that_cannot_run_here_says_why(
    peer: ModuleType, flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peer", "llama-1b", "--smoke", *flags])
    monkeypatch.setattr(devices, "pick", lambda: "cpu")
    monkeypatch.setattr(peer, "missing", lambda known: ["this", "that"])
    peer.main()
    assert "not installed: this, that" in json.loads(capsys.readouterr().out)["skipped"]
    monkeypatch.setattr(peer, "missing", lambda known: [])
    peer.main()
    assert "needs an accelerator" in json.loads(capsys.readouterr().out)["skipped"]


def test_registry_is_whole() -> None:
    for workload, names in BEST.items():
        assert all(workload in PEERS[name].workloads for name in names)
    assert set(SUITES["engines"]) <= set(BEST)
    assert {name for peer in PEERS.values() for name in peer.workloads} <= set(WORKLOADS)


# --- the table -----------------------------------------------------------------------------------------------------------


def result(engine: str, gpus: int, tokens_per_s: float, spread: float = 0.0, **more: float) -> Result:
    record = {"tokens_per_s": tokens_per_s, "samples_per_s": tokens_per_s / 100, "seconds": 1000 * gpus / tokens_per_s}
    memory = {"peak_gib": 40.0, "reserved_gib": 50.0, "first_loss": 11.76543}
    return Result("llama-1b", gpus, engine, "tokens", 5e12, {**record, **memory, "spread": spread, **more})


RESULTS = [
    result("slow", 1, 40_000.0),
    result("fast", 1, 50_000.0, spread=0.02),
    Result("llama-1b", 1, "absent", "tokens", 5e12, reason="not installed: absent"),
    result(OURS, 1, 60_000.0, spread=0.04, communication=0.0),
    result("fast", 2, 90_000.0, spread=0.1),
    result(OURS, 2, 114_000.0, spread=0.1, communication=0.025),
]


def test_rates_are_per_gpu_and_compared_on_as_many() -> None:
    ours_one, ours_two = RESULTS[3], RESULTS[5]
    assert (ours_one.rate, ours_two.rate) == (60_000.0, 57_000.0)
    assert best_peer(RESULTS, "llama-1b", 1) is RESULTS[1]
    assert best_peer(RESULTS, "llama-1b", 4) is None
    assert best_peer(RESULTS, "bert-large", 1) is None
    against = ratio(ours_one, RESULTS[1])
    # 1.2 with half of 2% and half of 4% of it
    assert (against.value, against.spread) == (pytest.approx(1.2), pytest.approx(0.036))
    assert ratio(ours_two, RESULTS[4]).value == pytest.approx(57 / 45)
    assert scaling(RESULTS, ours_two) == pytest.approx(0.95)
    assert scaling(RESULTS, ours_one) is None
    assert scaling(RESULTS[4:], ours_two) is None  # one GPU was not measured
    assert replace(ours_two, unit="samples").rate == 570.0


def test_cells() -> None:
    # a step of 1000 / 60,000 s and 5e12 operations on a peak of 1e15: 30%; a limit of 75,000: 80%
    assert cells(RESULTS, RESULTS[3], 1e15, 75_000.0) == [
        "llama-1b", "1", OURS, "60,000 tok/s", "1.200 ± 0.036", "80.0%", "30.0%", "40.0 / 50.0", "0.0%", "–", "11.765",
    ]  # fmt: skip
    two = cells(RESULTS, RESULTS[5], 1e15, 75_000.0)
    assert two[4:7] == ["1.267 ± 0.127", "76.0%", "28.5%"]
    assert two[8:10] == ["2.5%", "95.0%"]
    assert cells(RESULTS, RESULTS[1], None, None)[4:] == ["1", "–", "–", "40.0 / 50.0", "–", "–", "11.765"]
    assert cells(RESULTS, RESULTS[2], 1e15, 75_000.0) == ["llama-1b", "1", "absent", "not installed: absent", *["–"] * 7]
    alone = replace(RESULTS[3], figures={**(RESULTS[3].figures or {}), "peak_gib": 0.0, "reserved_gib": 0.0})
    assert cells([alone], alone, None, None)[4] == cells([alone], alone, None, None)[7] == "–"


def test_markdown() -> None:
    machine = {"device": "H200", "torch": "2.11.0", "python": "3.12.3", "peak": 989.4e12, "peak_source": "H200 data sheet"}
    floor = {
        "what": "limit", "workload": "llama-1b", "unit": "tokens", "limit": 76_820.0, "matmul_seconds": 0.17,
        "attention_seconds": 0.0433, "attention_backend": "cudnn",
    }  # fmt: skip
    matmul = {"what": "matmul", "precision": "bf16", "size": 8192, "flops_per_s": 791e12}
    text = markdown(RESULTS, machine, [matmul, {"what": "copy", "bytes": 1, "bytes_per_s": 4.2e12}, floor])
    lines = text.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + len(RESULTS)
    assert {line.count("|") for line in table} == {12}
    assert "H200, torch 2.11.0, Python 3.12.3." in lines
    assert "bf16 matmul 8192³ 791.00 TFLOP/s, copy 4,200 GB/s" in text
    assert "llama-1b 76,820 tokens/s (170.0 ms matmuls + 43.3 ms attention, cudnn)" in text
    assert "989.4 TFLOP/s: H200 data sheet" in text
    assert "MFU" in markdown(RESULTS, None, [])  # no machine known: the column stays, without numbers


# --- running -------------------------------------------------------------------------------------------------------------


def test_plan_names_what_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "ghost", Peer("ghost", "m.ghost", ("llama-1b",), ("no_such_package",), ("--fast",)))
    settings = Settings(("llama-1b", "encoder-24x1024"), peers="ghost,ddp", gpus=(1, 2), order=("ours", "peer"))
    tasks = plan(settings, have=1)
    assert [(t.workload, t.gpus, t.engine) for t in tasks] == [
        *(("llama-1b", gpus, engine) for gpus in (1, 2) for engine in (OURS, "ghost")),
        *(("encoder-24x1024", gpus, engine) for gpus in (1, 2) for engine in (OURS, "ddp")),
    ]
    assert [t.refused for t in tasks[:4]] == ["", "not installed: no_such_package", *["needs 2 devices, here is 1"] * 2]
    assert tasks[1].arguments == ("llama-1b", "--steps", "30", "--warm", "10", "--fast")
    assert [t.engine for t in plan(replace(settings, peers="none"), have=2)] == [OURS] * 4
    assert [t.engine for t in plan(replace(settings, peers="auto", order=("peer",)), 2)][:2] == list(BEST["llama-1b"])


def test_wrong_settings_are_found_at_once() -> None:
    with pytest.raises(UserError) as error:
        check(Settings(("llama-1b", "lama"), peers="ddp,dpp", gpus=(0,), steps=5, warm=5, order=("ours", "ours", "theirs")))
    text = str(error.value)
    for part in ("'lama' is unknown", "'dpp' is unknown", "ddp runs none of these", "'theirs'", "0 is no number", "5 of 5"):
        assert part in text
    check(Settings(("llama-1b",)))


def test_result_line_and_reasons() -> None:
    assert last_record('{"what": "x"}\nnoise\n{"engine": "a", "n": 1}\n{"engine": "b"}[rank1] bye\nend\n') == {"engine": "b"}
    assert last_record('{broken\n["engine"]\n') is None
    crash = (
        "Traceback (most recent call last):\n[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried | 2 GiB\n"
        "RuntimeError: later\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    )
    assert failure_of(1, crash, 9.0) == "exit code 1: OutOfMemoryError: CUDA out of memory. Tried / 2 GiB"
    assert failure_of(-9, "one\nlast words\n\n", 9.0) == "exit code -9: last words"
    box = "Root Cause (first observed failure):\n  traceback : Signal 6 (SIGABRT) received by PID 7\n======\n"
    assert failure_of(1, box, 9.0) == "exit code 1: traceback : Signal 6 (SIGABRT) received by PID 7"
    assert failure_of(0, "", 9.0) == "exit code 0: no output"
    assert failure_of(None, "ValueError: x", 9.0) == "not done after 9 s"


def test_time_out_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_GRACE", 0.5)
    # a child in a session of its own, as torchrun's ranks are, and a parent that does not listen to SIGTERM
    program = (
        "import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid, flush=True); time.sleep(60)"
    )
    shell = Shell(tmp_path, tmp_path / "log.txt")
    code, text = shell.execute([sys.executable, "-IS", "-c", program], timeout=3.0)
    assert code is None
    pid = int(text.strip())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert "[exit code None" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_benchmark_that_is_ended_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    # Red without `_ending` for the folder after SIGTERM, without `tied` for the process after SIGKILL.
    engine = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()) + '.'); time.sleep(60)"
    program = (
        "import sys, tempfile; from pathlib import Path; from meshwright.bench.runner import Shell\n"
        f"with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}, prefix='work-') as work:\n"
        f"    Shell(Path(work), None).execute([sys.executable, '-IS', '-c', {engine!r}], 60.0)\n"
    )
    benchmark = subprocess.Popen([sys.executable, "-c", program])
    until = time.monotonic() + 60
    while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text().endswith("."):
        assert benchmark.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    started = psutil.Process(int((tmp_path / "pid").read_text()[:-1]))
    benchmark.send_signal(number)
    assert benchmark.wait(30) == (143 if number == signal.SIGTERM else -signal.SIGKILL)
    _, alive = psutil.wait_procs([started], timeout=10)
    assert not alive
    assert bool(list(tmp_path.glob("work-*"))) == (number == signal.SIGKILL)


def test_failed_engine_is_a_row_and_the_budget_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"device": "d", "type": "cpu", "count": 2, "peak": 1e12, "peak_source": "s", "torch": "t", "python": "p"}
    machine = json.dumps({"what": "machine", **known})
    clock = iter([0.0, 1.0, 80.0])  # start, before the first engine, before the second

    class Fake(Shell):
        def execute(self, command: object, timeout: float) -> tuple[int | None, str]:
            assert isinstance(command, list)
            return (0, machine) if "meshwright.bench.ceilings" in command else (1, "ValueError: broken")

    monkeypatch.setattr(runner, "Shell", Fake)
    monkeypatch.setattr(runner.time, "monotonic", lambda: next(clock))
    said: list[str] = []
    settings = Settings(("smoke-encoder",), gpus=(1,), order=("peer", "ours"), out=tmp_path / "out", budget=100.0)
    outcome = runner.run(settings, said.append)
    assert [r.reason for r in outcome.results] == [
        "exit code 1: ValueError: broken", "not started: the 100 s of --budget are over",
    ]  # fmt: skip
    assert len(said) == 3
    assert "ValueError: broken" in (tmp_path / "out" / "results.md").read_text()


def test_help_has_an_example() -> None:
    done = subprocess.run([sys.executable, "-m", "meshwright", "bench", "--help"], capture_output=True, text=True, check=True)
    assert "bench strategies --workloads" in done.stdout


def test_serving_counts_every_token(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # Red when the warm-up's tokens count, or an answer may end early.
    from meshwright.bench import serving

    line = "serving llama-1b --smoke --requests 3 --prompt 20 --answer 9"
    monkeypatch.setattr("sys.argv", line.split())
    serving.main()
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 27 and found["decode_steps"] == 8 and 0 < found["first_token"] < found["seconds"]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["simple_transformer", "text_classifier"])
@pytest.mark.parametrize("engine", ["ours", "ddp"])
def test_scripts_of_examples_beside_each_other(script: str, engine: str) -> None:
    sizes = ["--layers", "1", "--width", "32", "--positions", "16", "--batch", "8", "--steps", "4", "--warm", "2"]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*start, "-m", "meshwright.bench.peers.script", script, "--engine", engine, *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["engine"] == engine and found["samples_per_s"] == pytest.approx(8 / found["seconds"])
