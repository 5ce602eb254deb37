"""A user's mistake costs seconds: exit code 2, one message with the numbers and what to do, no traceback, nothing started.

Mutations tried, each red: `set_up` leaving the folder that it made; `MetricsSink` letting OSError through.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from meshwright.cli import main
from tests.e2e import helpers as e2e
from tests.e2e.planted import Plant


@pytest.fixture
def refused(tmp_path, capfd):
    """`refused(*flags, says=[...])`: the command on the usual config ends with 2 and says so, and leaves nothing."""
    config = e2e.settings(tmp_path / "config.yaml")

    def call(*flags: str, says: list[str], config: Path = config, nproc: str | None = "2", left: tuple[str, ...] = ()) -> str:
        run = tmp_path / "run"
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        counted = ["--nproc", nproc] if nproc else []
        assert main(["train", str(config), *counted, f"--run.dir={run}", *flags]) == 2
        said = capfd.readouterr().err
        for words in says:
            assert words in said, said
        assert "Traceback" not in said and len(re.findall("^(meshwright train|Error): ", said, re.M)) == 1
        assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
        assert sorted(path.name for path in run.iterdir()) == sorted(left) if left else not run.exists(), list(run.rglob("*"))
        return said

    return call


def test_settings(refused, tmp_path, monkeypatch):
    said = refused("--train.stepz=3", "--model.width=-1", says=["--train.stepz", "Did you mean 'steps'?", "--model.width"])
    assert "greater than or equal to 1" in said
    refused("--model.heads=5", says=["config.yaml:", " model.width: 64 is not divisible by model.heads 5"])
    refused("--model.positions=learned", "--data.seq_len=128", says=["data.seq_len: 128 is more than the 64 learned positions"])
    refused("--evaluate.every=5", "--data.valid_fraction=0", says=["evaluate.every", "nothing is held out"])
    refused("--objective.kind=masked_lm", says=["objective.kind", "decoder"])
    refused("--objective.kind=nonsense", says=["objective.kind: 'nonsense' is not known", "causal_lm"])
    refused("--run.modules=[/nowhere/mine.py]", says=["run.modules: there is no file /nowhere/mine.py"])
    broken = tmp_path / "mine.py"
    broken.write_text("x = 1\nraise ValueError('mine')\n")
    refused(f"--run.modules=[{broken}]", says=[f"{broken}:2: ValueError: mine"])
    broken.write_text("import sys\n\nsys.exit(3)\n")
    refused(f"--run.modules=[{broken}]", says=[f"{broken}:3: ends the program (exit code 3)"])
    broken.write_text("x = 1\ndef f(:\n")
    refused(f"--run.modules=[{broken}]", says=[f"{broken}:2: SyntaxError: "])
    broken.write_text("import json\njson.loads('{')\n")
    refused(f"--run.modules=[{broken}]", says=[f"{broken}:2: JSONDecodeError: "])
    fp16 = "--precision=fp16"
    refused(fp16, "--loss_scale.growth=0.5", says=["loss_scale.growth", "greater than or equal to 1, not 0.5"])
    refused(fp16, "--loss_scale.backoff=1.5", says=["loss_scale.backoff", "less than 1, not 1.5"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused("--log.wandb=true", says=["log.wandb: Weights & Biases is not installed", "log.wandb: false"])


def test_files(refused, tmp_path):
    refused(config=tmp_path / "none.yaml", says=[f"{tmp_path / 'none.yaml'}", "there is no such file"])
    refused("--data.train=[{path: /nowhere/corpus.txt}]", says=["/nowhere/corpus.txt"])
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    refused(f"--data.train=[{{path: {empty}}}]", says=[str(empty)])
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "good"}\n\n{"text": "cut\n')
    refused(f"--data.train=[{{path: {broken}}}]", says=[f"{broken}, line 3"])
    other = tmp_path / "other.jsonl"
    other.write_text('{"body": "good"}\n')
    refused(f"--data.train=[{{path: {other}}}]", says=[str(other), "'text'", "body"])


def test_a_corpus_that_does_not_fit(refused, tmp_path):
    dropping = "--train.tail=drop"
    refused("--train.batch=1000", dropping, says=["data.train", "rows of 32 tokens, fewer than one global batch of 1000"])
    refused("--model.vocab=100", says=["model.vocab", "the tokenizer has 315 tokens, the model only 100"])
    three = tmp_path / "three.jsonl"
    three.write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n')
    flags = (f"--data.train=[{{path: {three}}}]", f"--data.tokenizer.path={e2e.corpus() / 'tokenizer'}", "--data.workers=1")
    asked = (*flags, "--train.batch=1", "--evaluate.every=1")  # without it a corpus this small trains and holds nothing out
    said = refused(*asked, says=["data.valid_fraction: 0.05 of 3 documents is 0 held out"], left=("data",))
    assert "Set it to 0.33 or more" in said
    small = (*flags, "--data.valid_fraction=0", dropping)
    refused(*small, says=["the corpus has 1 row of 32 tokens, fewer than one global batch of 10"], left=("data",))


def test_options(refused, tmp_path):
    refused("--nproc", "0", nproc=None, says=["Invalid value for '--nproc'", "greater than or equal to 1"])
    refused("--nproc=many", nproc=None, says=["Invalid value for '--nproc'", "integer"])
    for spec in ("10", "5:2", "0:1", "a:b"):
        refused("--profile", spec, says=[f"--profile: {spec!r} is not FIRST:LAST", "--profile 10:12"])
    refused("--profile", "50:60", says=["--profile: begins at step 50, but the run has 20 steps"])
    refused("--rdzv", "nowhere", says=["--rdzv nowhere: is no HOST:PORT"])
    refused("--rdzv", "127.0.0.1:99999", says=["--rdzv 127.0.0.1:99999: is no HOST:PORT with a port in 1..65535"])
    refused("--max-restarts", "-1", says=["Invalid value for '--max-restarts'"])
    refused("--resume", str(tmp_path / "nowhere"), says=[str(tmp_path / "nowhere"), "is no run folder"])
    assert not (tmp_path / "nowhere").exists()


def test_plans(refused, tmp_path):
    path = tmp_path / "plan.json"

    def plan(says: list[str], nproc: str = "2", **values: object) -> None:
        path.write_text(json.dumps({"layout": {"dp_replicate": 2}, "micro_batch": 5, **values}))
        refused("--plan", str(path), says=says, nproc=nproc)

    refused("--plan", str(path), says=[f"{path}: cannot be read: No such file"])
    path.write_text("{")
    refused("--plan", str(path), says=[f"{path}: is not JSON"])
    plan([f"{path}: unknown key 'micro'"], micro=3)
    plan(["plan.precision", "fp31", "plan.micro_batch", "0"], precision="fp31", micro_batch=0)
    plan(["--plan: is for 4 ranks, but 2 are started", "Give --nproc 4"], layout={"dp_replicate": 4})
    plan(["plan.context: ring, but there are no ranks to spread the positions of a row over with cp: 1"], context="ring")
    plan(["data.seq_len", "cp"], layout={"cp": 7}, nproc="7")
    plan(["layout.ep: 2, but every token goes through the same feed-forward layers"], layout={"dp_replicate": 2, "ep": 2})
    plan(["layout.tp: 8 ranks, but only 4 query heads", "Use tp: 4 or less"], layout={"tp": 8}, nproc="8")
    plan(["layout.pp: 8 stages for 2 layers", "Use pp * chunks <= 2"], layout={"pp": 8}, nproc="8")
    plan(["--plan: tp 3 does not divide 8 ranks", "Start 6, 9 ranks"], layout={"tp": 3}, nproc="8")
    refused("--plan", '{"graphs": true}', says=["plan.graphs: true, but a cpu device does not record launches"])
    plan(["plan.overlap: 'yes' is neither true nor false"], overlap="yes")
    plan(["plan.micro_batch: 9999999999999999999999 is not a whole number"], micro_batch=9999999999999999999999)
    plan(["--plan: is for 2 ranks, but 4 are started"], nproc="4")
    refused("--plan", '{"compile": "eager"}', "--compile=off", says=["--plan: says compile eager, but the config says off"])
    refused("--plan", "[" * 5000, says=["--plan: is not JSON"])
    refused("--plan", "", says=["cannot be read"])
    refused("--plan", '{"layout": {"tp": 2}, "chunks": 2}', says=["plan.chunks: 2, but this schedule has one stage a rank"])
    plan(["--plan: says precision fp64, but the config says fp32"], precision="fp64")


def test_folders(refused, tmp_path, capfd):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    refused(says=[f"{tmp_path / 'run'}: is not empty (notes.txt)", "--resume latest"], left=("notes.txt",))
    refused("--resume", "latest", says=["is not empty (notes.txt)"], left=("notes.txt",))
    shutil.rmtree(tmp_path / "run")
    blocked = tmp_path / "file"
    blocked.write_text("")
    for folder, why in (
        (blocked, "it is a file"),
        (blocked / "run", "Not a directory"),
        (Path("/proc/none/run"), "cannot be used"),
    ):
        assert main(["train", str(tmp_path / "config.yaml"), f"--run.dir={folder}"]) == 2
        said = capfd.readouterr().err
        assert str(folder) in said and why in said and "Traceback" not in said
    config = e2e.settings(tmp_path / "config.yaml")
    assert (
        main(
            [
                "train",
                str(config),
                f"--run.dir={tmp_path / 'run'}",
                "--data.cache=/proc/none",
                f"--data.train=[{{path: {e2e.raw()}}}]",
            ]
        )
        == 2
    )
    said = capfd.readouterr().err
    assert "/proc/none" in said and "Traceback" not in said and not (tmp_path / "run").exists()


def test_a_dry_run_leaves_nothing(tmp_path, capfd):
    config = e2e.settings(tmp_path / "config.yaml")
    assert main(["train", str(config), "--nproc", "2", f"--run.dir={tmp_path / 'run'}", "--dry-run"]) == 0
    assert "dry run: nothing was started" in capfd.readouterr().out and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "parameters"),
    [((), 3), (("--train.optimizer.kind=sgd",), 1), (("--train.ema=0.9",), 4), (("--precision=fp64",), 6)],
)
def test_a_disk_without_room_is_refused_before_anything_starts(refused, monkeypatch, flags, parameters):
    # Four bytes each of weight and moments (fp64: eight). Parameters by hand: embedding and head 2 x 315 x 64, two layers of
    # 64 x 128 (qkv), 64 x 64 (out), 3 x 64 x 128 (feed-forward) and 2 x 64 (norms), final norm 64.
    bytes_needed = parameters * 4 * (2 * 315 * 64 + 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("meshwright.runtime.setup.shutil.disk_usage", lambda path: usage._replace(free=bytes_needed - 1))
    refused(*flags, says=["room for 1 checkpoint of about ", " are free", "Free space, lower checkpoint.keep"])
    monkeypatch.setattr("meshwright.runtime.setup.shutil.disk_usage", lambda path: usage._replace(free=bytes_needed))
    refused("--plan=/nowhere/plan.json", *flags, says=["/nowhere/plan.json: cannot be read"])


# ---- a disk that fills up -----------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None or os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run([umount, "-l", str(folder)], check=True)


@pytest.mark.parametrize("at", ["before save", pytest.param("before step", marks=pytest.mark.slow)])
def test_a_disk_that_fills_up_costs_no_checkpoint(ranks, small_disk, tmp_path, at):
    config = e2e.settings(tmp_path / "config.yaml", checkpoint={"every": 4})
    e2e.train_in(ranks(2), config, tmp_path / "whole")
    run = small_disk / "run"
    fill = Plant("fill", at, nth=2 if at == "before save" else 6, rank=0, path=str(small_disk / "ballast"))
    said = e2e.train(config, run, plants=[fill]).wait(2)
    assert "free" in said.err and "Traceback" not in said.err, said.err
    assert e2e.newest(run).name == "step-00000004"
    (small_disk / "ballast").unlink()
    e2e.train(config, run, "--resume", "latest").wait()
    e2e.assert_same(run, tmp_path / "whole")


def test_a_disk_that_takes_no_tokenizer_and_no_note_of_the_corpus_is_named(refused, tmp_path, monkeypatch):
    # Red, with a traceback and a folder that stays, without `room` around either.
    def full(path, text, **more):
        if path.name in ("tokenizer.json", "corpus.json"):
            raise OSError(28, "No space left on device")
        return write(path, text, **more)

    write, cache = Path.write_text, tmp_path / "cache"
    (tmp_path / "text.txt").write_text("some words " * 400)
    monkeypatch.setattr(Path, "write_text", full)
    refused(says=[f"{tmp_path / 'run' / 'data'}: cannot be written: No space left on device"])
    text = [f"--data.train.0.path={tmp_path / 'text.txt'}", "--data.tokenizer.vocab=300"]
    refused(*text, f"--data.cache={cache}", says=[f"{cache}: cannot be written: No space left on device"])


def test_shards_and_tokenizer_of_another_run_in_the_cache_stay(refused, tmp_path):
    # Red with overwrite=True whatever the folder, and with a trained tokenizer that is always made anew.
    from meshwright.config.schema import Config
    from meshwright.runtime.corpus import prepare_corpus

    (tmp_path / "text.txt").write_text("some words " * 400)
    cache, text = tmp_path / "cache", tmp_path / "text.txt"
    data = {"train": [{"path": str(text)}], "cache": str(cache), "workers": 1, "tokenizer": {"vocab": 300}, "valid_fraction": 0}
    config = Config.model_validate({"model": {"arch": "decoder"}, "data": data})
    prepare_corpus(config, tmp_path / "first", task="lm", say=lambda note: None)
    held = {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}
    same = [f"--data.train.0.path={text}", f"--data.cache={cache}", "--data.tokenizer.vocab=300"]
    refused(*same[:2], "--data.tokenizer.vocab=280", says=["a tokenizer made from something else (vocab differ)", "data.cache"])
    encoder = ["--model.arch=encoder", "--objective.kind=masked_lm"]
    refused(*same, *encoder, says=["a prepared corpus made from something else (objective", "name another data.cache"])
    assert {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()} == held


def test_a_disk_that_is_too_small_is_refused_before_the_first_step(small_disk, tmp_path):
    config = e2e.settings(tmp_path / "config.yaml", model={"vocab": 20000})
    said = e2e.train(config, small_disk / "run").wait(2)
    numbers = r"room for 1 checkpoint of about [\d.]+ MiB is needed: [\d.]+ MiB more, [\d.]+ MiB are free"
    assert re.search(numbers, said.err), said.err
    assert "Traceback" not in said.err and not (small_disk / "run").exists()


def test_a_limit_on_file_size_is_named_before_the_first_step(tmp_path):
    config = e2e.settings(tmp_path / "config.yaml")
    code = "import resource as r, runpy; r.setrlimit(r.RLIMIT_FSIZE, (200_000,) * 2); "
    limited = ("-c", f"{code}runpy.run_module('meshwright', run_name='__main__')")
    said = e2e.Command("train", config, f"--run.dir={tmp_path / 'run'}", "--nproc", 2, start=limited).wait(2)
    assert "limit on file size is 195.3 KiB" in said.err and "ulimit -f" in said.err and "Traceback" not in said.err
