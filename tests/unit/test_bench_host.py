"""Arithmetic, table and comparison of the suites of the host's side; that they run is in tests/e2e/test_bench_host.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.bench.compare import compare, load
from meshwright.bench.host.corpus import Numbers, write_store
from meshwright.bench.host.data import CASES, Case, _rows, _token_bytes
from meshwright.bench.host.measures import Measure, lines, measures_in, of_repeats, say, shown
from meshwright.bench.host.overhead import Marks, of_pairs
from meshwright.bench.host.runner import HostOutcome, HostSettings, commands
from meshwright.bench.host.startup import PARTS, Start
from meshwright.bench.page import write_measures
from meshwright.bench.runner import records
from meshwright.cli import main
from meshwright.data.loader import Loader
from meshwright.data.shards import TokenStore

RATE = Measure("loader", 30e6, "tokens/s", spread=0.2, limit=120e6, target=20e6)
TIME = Measure("stall", 0.05, "s", spread=0.2, higher=False, limit=0.02, target=0.04, fails_at=0.045)


# --- one figure ------------------------------------------------------------------------------------------------------------


def test_share_target_and_regression_both_ways() -> None:
    # mutation tried: `share` without the turn for times (0.4 becomes 2.5): red
    assert (RATE.share, RATE.reached, RATE.regressed) == (0.25, True, False)
    assert (TIME.share, TIME.reached) == (pytest.approx(0.4), False)
    # 0.05 less half the spread of 20% is 0.045, the bound itself; a spread of 40% reaches below it
    # mutation tried: the whole spread in place of half of it: red
    assert TIME.regressed and not replace(TIME, spread=0.4).regressed
    assert not replace(TIME, fails_at=None).regressed
    slow = replace(RATE, fails_at=33e6)  # 30 + 10%
    assert slow.regressed and not replace(slow, fails_at=32.9e6).regressed
    assert replace(RATE, target=None).reached is None and replace(RATE, limit=None).share is None


def test_median_and_spread_of_repeats() -> None:
    one = of_repeats("a", [4.0, 1.0, 2.0], "s", ranks=2)
    assert (one.value, one.spread, one.ranks) == (2.0, 1.5, 2)
    # quartiles of five pairs: 1.0 and 1.2 around 1.1; the disturbed pair of 9 widens nothing
    pairs = of_pairs("b", [1.0, 1.1, 9.0, 1.2, 0.9])
    assert (pairs.value, pairs.spread) == (1.1, pytest.approx(0.2 / 1.1))


def test_steps_of_a_warm_block_are_not_counted() -> None:
    # three steps of the warm-up end at 10, then steps of 1 and 3 seconds
    marks = Marks(wall=[1.0, 5.0, 10.0, 11.0, 14.0], processor=[0.0, 0.0, 7.0, 7.5, 8.0])
    assert marks.medians() == (2.0, 0.5)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (59.7e6, "tokens/s", "59.7 M tokens/s"),
        (1.2e9, "bytes/s", "1.2 G bytes/s"),
        (12.0, "tokens/s", "12 tokens/s"),
        (0.0123, "s", "12.3 ms"),
        (2.5, "s", "2.50 s"),
        (1.0312, "", "1.031"),
        (170.2, "MiB", "170.2 MiB"),
    ],
)
def test_numbers_read_well(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text


def test_table_has_limit_share_and_target() -> None:
    table = lines([replace(RATE, limited_by="the copy rate"), replace(TIME, ranks=2, note="135 MiB")])
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table[2:4]]
    assert cells[0] == ["loader", "1", "30 M tokens/s", "20%", "120 M tokens/s", "25%", ">= 20 M tokens/s", "reached"]
    assert cells[1] == ["stall", "2", "50 ms", "20%", "20 ms", "40%", "<= 40 ms", "missed"]
    assert table[-2:] == ["stall: 135 MiB.", "Limit of loader: the copy rate."]


def test_measures_pass_from_a_subprocess(capsys: pytest.CaptureFixture[str]) -> None:
    say(RATE)
    print("a line of a library")
    say(TIME)
    assert measures_in(list(records(capsys.readouterr().out))) == [RATE, TIME]


# --- a suite ---------------------------------------------------------------------------------------------------------------


def test_a_regression_or_a_failure_is_no_success() -> None:
    outcome = HostOutcome(HostSettings("overhead"), measures=[RATE])
    assert outcome.ok
    assert not replace(outcome, failures=["checkpoint: exit code 1: OSError"]).ok
    worse = replace(outcome, measures=[RATE, TIME])
    assert not worse.ok and "regression: stall, 1 rank(s): 0.050" in worse.table()
    assert not HostOutcome(HostSettings("data")).ok


def test_suites_start_the_ranks_that_they_measure() -> None:
    checkpoint = commands(HostSettings("checkpoint", ranks=(1, 2), repeat=3))
    assert [command[command.index("--nproc-per-node") + 1] for _, command in checkpoint] == ["1", "2"]
    assert all(command[-3:] == ["meshwright.bench.host.checkpoint", "--repeat", "3"] for _, command in checkpoint)
    [(_, startup)] = commands(HostSettings("startup", ranks=(1, 2), repeat=3))
    assert startup[-2:] == ["--ranks", "1,2"]
    [(_, data)] = commands(HostSettings("data", ranks=(1, 2)))
    assert data[-1] == "5"


def result(folder: Path, *measures: Measure) -> Path:
    folder.mkdir()
    outcome = HostOutcome(HostSettings("data"), {"device": "a CPU", "torch": "2"}, list(measures))
    (folder / "results.json").write_text(json.dumps(outcome.as_dict()))
    return folder


def test_comparison_knows_which_way_is_better(tmp_path: Path) -> None:
    zero = Measure("commands", 0, "", higher=False)
    before = result(tmp_path / "a", RATE, TIME, zero, Measure("gone", 1.0, "s"))
    after = result(tmp_path / "b", replace(RATE, value=60e6), replace(TIME, value=0.1), replace(zero, value=2))
    rows, table = compare(load(before), load(after))
    # mutation tried: "better" for every rise: red in the second
    assert [row["verdict"] for row in rows] == ["better", "worse", "0 -> 2", "only in the first"]
    assert (rows[0]["ratio"], rows[0]["noise"]) == (2.0, pytest.approx(0.4))
    assert "30 M tokens/s" in table and "60 M tokens/s" in table and "100 ms" in table
    same, _ = compare(load(before), load(result(tmp_path / "c", replace(RATE, value=35e6))))
    assert same[0]["verdict"] == "same"  # 1.167, and half of both spreads is 0.23


def test_results_keep_what_they_were_made_with(tmp_path: Path) -> None:
    kept = load(result(tmp_path / "a", RATE))
    assert kept["measures"] == [asdict(RATE)]
    assert {"commit", "command", "date", "meshwright", "machine", "settings"} <= set(kept)
    write_measures(tmp_path / "page.html", "| the table |", [RATE])
    page = (tmp_path / "page.html").read_text()
    assert "| the table |" in page and "share of the limit" in page


def test_time_of_a_start_is_the_sum_of_its_parts() -> None:
    assert Start((1.0, 0.5, 2.0, 0.25), 4.0).total == 3.75
    assert len(PARTS) == 4


# --- its rows --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return write_store(tmp_path_factory.mktemp("store") / "store", 40_000, Numbers(vocab_size=1000))


def test_corpus_is_one_that_prepare_could_have_written(store: TokenStore) -> None:
    again = TokenStore.open(store.folder, verify=True)
    assert again.tokens == 40_000 and int(again.offsets[-1]) == 40_000
    assert np.all(np.diff(again.offsets) > 0)
    tokens = again.read(0, 40_000)
    assert tokens.min() >= 7 and tokens.max() < 1000


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_gives_the_rows_it_names(case: Case, store: TokenStore) -> None:
    loader = Loader(_rows(case, store, Numbers(vocab_size=1000)), micro_batch=2)
    batch = next(loader.steps(0, lambda consumed: 2)).micro[0]
    assert batch.tokens.shape == (2, case.seq_len)
    assert (batch.select is not None) == (case.objective == "masked_lm")
    assert (batch.positions is not None) == case.document_mask
    if case.name == "causal LM, seq 4096":  # tokens and labels of 8 bytes each; the two sample numbers are nothing beside them
        assert _token_bytes(batch) == pytest.approx(16, abs=0.01)


# --- the command -----------------------------------------------------------------------------------------------------------


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshwright", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)


def test_options_without_an_effect_are_refused_together() -> None:
    done = bench("data", "--workloads", "smoke", "--peers", "ddp", "--devices", "1")
    assert done.returncode == 2
    for name in ("workloads", "peers", "devices"):
        assert f"--{name}: has no effect on bench data" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serving", "--timeout", "nan", "--budget", "0"), ("--timeout: nan is no number of", "--budget: 0 is no number of")),
        (("startup", "--devices", "0"), ("--devices: '0' is no list of numbers from 1",)),
        (("engines", "--workloads", "", "--peers", ""), ("--workloads: '' is unknown", "--peers: '' is unknown")),
        (("engines", "--micro", "ddp=4", "--smoke"), ("--micro: has no effect on bench engines", "--smoke: has no effect")),
        (("ceilings", "--peers", "ddp"), ("--peers: has no effect on bench ceilings",)),
        (("compare", "a", "b", "--out", "c"), ("--out: has no effect on bench compare",)),
    ],
)
def test_options_that_mean_nothing_are_refused(
    arguments: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    # Red without `_refuse_seconds` (--budget 0 was no limit), with `if workloads` for `is not None`.
    assert main(["bench", *arguments]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words)


def test_unknown_suite_names_the_known_ones() -> None:
    done = bench("dataa")
    assert done.returncode == 2 and "data, checkpoint, startup, overhead, compare" in done.stderr
