"""`bench serving` by hand: figures of answers, the limit of a step on several devices, rows, what runs when, the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.bench import serve_suite
from meshwright.bench.provenance import VARIABLE, provenance
from meshwright.bench.runner import Shell
from meshwright.bench.serve_suite import SMOKE, ServeSettings, Work, check, parse_rows, run, serve_plan
from meshwright.bench.serve_table import median_runs, serve_lines
from meshwright.bench.serve_work import answered
from meshwright.bench.serving import step_limit
from meshwright.bench.table import Result
from meshwright.errors import UserError
from meshwright.serve.layout import Serving

WORK = Work("llama-1b", 256, 512, 256)


def test_figures_of_answers() -> None:
    # Two answers asked for at 10: all are under way from 11.5 to 13, with gaps of 0.5, 0.5, 0.5 and 0.5, 1.0.
    # Red when gaps outside of that count: 3.0 and 0.1 would move the median.
    found = answered("x", 10.0, 14.0, [[11.0, 11.4, 11.5, 12.0, 12.5, 13.0], [11.5, 12.0, 13.0, 13.1, 14.0]])
    assert found["tokens"] == 11 and found["tokens_per_s"] == 2.75 and found["samples_per_s"] == 0.5
    assert found["first_token"] == 1.0 and found["ttft"] == 1.25
    assert found["decode_step"] == 0.5 and found["decode_steps"] == 2
    assert answered("x", 0.0, 3.0, [[1.0, 1.1], [2.0, 3.0]])["decode_step"] is None, "never both at once"


@pytest.mark.parametrize(
    ("serving", "sequences", "weights", "cache"),
    [
        # 1,000 bytes of weights and 10 x 5 bytes a sequence at 100 bytes a second
        (Serving(), 4, 10.0, 2.0),
        (Serving(tp=2), 4, 5.0, 1.0),
        (Serving(dp=2), 4, 10.0, 1.0),
        (Serving(pp=2), 4, 10.0, 1.0),
        (Serving(tp=2, dp=2), 4, 5.0, 0.5),
        (Serving(pp=2), 1, 10.0, 0.5),
    ],
)
def test_the_limit_of_a_step_on_several_devices(serving: Serving, sequences: int, weights: float, cache: float) -> None:
    # Red when copies or stages divide the time of the weights, or one sequence is read by two stages at once.
    found = step_limit(1000, 10, sequences, 5.0, 100.0, serving)
    assert (found["weights_limit"], found["cache_limit"], found["step_limit"]) == (weights, cache, weights + cache)


def test_rows_are_parsed_and_all_mistakes_named() -> None:
    assert parse_rows("llama-1b:256:512:256, llama-3-8b:1:128:64") == (WORK, Work("llama-3-8b", 1, 128, 64))
    with pytest.raises(UserError) as caught:
        parse_rows("llama-1b:256:512,llama-9b:1:1:1,llama-1b:0:1:1")
    text = str(caught.value)
    assert "'llama-1b:256:512' is no" in text and "'llama-9b' is no recipe" in text and "'llama-1b:0:1:1' is no" in text
    with pytest.raises(UserError, match="'vllm' is unknown to bench serving") as caught:
        check(ServeSettings(peers="vllm", spread=(("tp", 1),)))
    assert "--tp" in str(caught.value)


def test_a_row_that_no_engine_can_answer_is_refused() -> None:
    works = parse_rows("bert-base:1:8:8,llama-1b:1:500:12,llama-1b:1:500:13")
    with pytest.raises(UserError) as caught:
        check(ServeSettings(works, smoke=True))
    assert [finding.what for finding in caught.value.findings] == [
        "bert-base is an encoder, which writes no answers",
        "llama-1b has 512 positions, and prompt and answer are 513 tokens",
    ]


def test_what_runs_when() -> None:
    one = Work("llama-1b", 1, 128, 256)
    settings = ServeSettings((one, WORK), spread=(("tp", 2), ("pp", 2), ("dp", 4)))
    found = [(task.work.sequences, task.engine, task.ranks, task.refused) for task in serve_plan(settings, 2)]
    assert found == [
        (1, "meshwright", 1, ""),
        (1, "hf", 1, ""),
        (1, "meshwright tp 2", 2, ""),
        (256, "meshwright", 1, ""),
        (256, "hf", 1, ""),
        (256, "meshwright tp 2", 2, ""),
        (256, "meshwright pp 2", 2, ""),
        (256, "meshwright dp 4", 4, "needs 4 devices, here are 2"),
    ]


def ran(engine: str, rate: float, gpus: int = 1, **more: float) -> Result:
    figures = {"tokens_per_s": rate, "seconds": 1000 / rate, "spread": 0.0, "ttft": 0.5, "decode_step": 0.004, **more}
    return Result(WORK.name, gpus, engine, "tokens", 0.0, figures)


def test_columns_by_hand() -> None:
    # ours 100 and 125 tokens/s: 10 and 8 s, median 9: 111.1, spread 2/9; hf 10 once. Of two devices 200: 1.8 times one.
    runs = [
        ran("meshwright", 100.0, step_limit=0.002, decode_step=0.003),
        ran("hf", 10.0, decode_step=0.02),
        ran("meshwright", 125.0, step_limit=0.002, decode_step=0.005),
        ran("meshwright tp 2", 200.0, 2, step_limit=0.001),
        Result(WORK.name, 2, "meshwright dp 2", "tokens", 0.0, None, "needs 2 devices"),
    ]
    lines = serve_lines(median_runs(runs))
    assert lines[1] == [WORK.name, "1", "meshwright", "111", "11.11", "–", "4", "2", "50.0%", "0.5"]
    assert lines[2] == [WORK.name, "1", "hf", "10", "1", "–", "20", "2", "10.0%", "0.5"]
    assert lines[3] == [WORK.name, "2", "meshwright tp 2", "200", "20.00", "1.80", "4", "1", "25.0%", "0.5"]
    assert lines[4][3:5] == ["needs 2 devices", "–"] and len(lines[4]) == len(lines[0])
    # both twice: half of both spreads, 2/9 and 0, on 11.11
    lines = serve_lines(median_runs([*runs, ran("hf", 10.0)]))
    assert lines[1][4] == "11.11 ± 1.23"


def test_engines_take_turns_and_what_failed_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Red when a failed engine is run in every round, or when the peer's record is taken for ours.
    started: list[str] = []

    def execute(self: Shell, command: list[str], timeout: float) -> tuple[int | None, str]:
        if "meshwright.bench.ceilings" in command:
            return 0, json.dumps({"what": "machine", "device": "H200", "torch": "2.11", "type": "cuda", "count": 1})
        started.append(command[2])
        if command[2].endswith("hf_serving"):
            return 1, "RuntimeError: no memory"
        return 0, json.dumps({"engine": "meshwright", "tokens_per_s": 50.0, "seconds": 2.0, "spread": 0.0, "ttft": 0.1})

    monkeypatch.setattr(Shell, "execute", execute)
    monkeypatch.setattr(serve_suite, "missing", lambda peer: [])
    outcome = run(ServeSettings(SMOKE, smoke=True, repeat=3, out=tmp_path), say=lambda text: None)
    ours, theirs = "meshwright.bench.serving", "meshwright.bench.peers.hf_serving"
    assert started == [ours, theirs, ours, ours]
    kept = json.loads((tmp_path / "results.json").read_text())
    assert [(r["engine"], r["reason"]) for r in kept["results"]][1] == ("hf", "exit code 1: RuntimeError: no memory")
    assert kept["settings"]["suite"] == "serving" and kept["machine"]["device"] == "H200"
    assert "| exit code 1: RuntimeError: no memory" in outcome.table()


def test_a_copy_without_history_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "abc123")
    monkeypatch.setattr(Path, "exists", lambda self: False)
    assert provenance()["commit"] == "abc123"
