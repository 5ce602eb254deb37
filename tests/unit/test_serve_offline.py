"""Files of prompts and prompts that are typed, through an engine without a server."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.errors import DataError
from meshwright.serve import offline
from meshwright.serve.engine import LLMEngine
from meshwright.serve.fleet import Fleet
from meshwright.serve.layout import Serving
from meshwright.serve.offline import answer_file, check_prompts, complete, read_prompts, streamed
from meshwright.serve.prompts import Prompts
from meshwright.serve.sampling import SamplingParams
from tests.unit.serve_fakes import FakeEngine


def test_answers_come_in_the_order_of_the_prompts(monkeypatch: pytest.MonkeyPatch):
    """A window of three, and an engine that moves two at a time. Mutation tried: yielding what is ready first."""
    monkeypatch.setattr(offline, "AHEAD", 3)
    engine = FakeEngine(("a", "b"), running=2)
    found = list(complete(engine, (f"p{i}" for i in range(8)), SamplingParams(max_tokens=9, seed=20)))
    assert [(done.index, done.prompt, done.text, done.tokens, done.finish) for done in found] == [
        (i, f"p{i}", "ab", 2, "stop") for i in range(8)
    ]
    assert [request.params.seed for request in engine.seen] == list(range(20, 28))
    assert list(complete(engine, [], SamplingParams())) == []


def test_a_prompt_that_does_not_fit_is_named():
    with pytest.raises(DataError, match=r"prompt 2: .*64 tokens"):
        list(complete(FakeEngine(), ["a", "x" * 70], SamplingParams()))


def test_a_file_becomes_jsonl(tmp_path: Path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('\ufeff{"prompt": "你"}\n\n{"prompt": "b", "more": 1}\n', encoding="utf-8")
    assert answer_file(FakeEngine(), source, target, SamplingParams(max_tokens=2)) == (2, 4)
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert rows[0] == {"index": 0, "prompt": "你", "text": "ab", "tokens": 2, "finish": "length"} and rows[1]["prompt"] == "b"
    with pytest.raises(DataError, match="is there already"):
        answer_file(FakeEngine(), source, target, SamplingParams())


def test_prompts_of_a_file_that_cannot_be_read_are_named(tmp_path: Path):
    text, rows = tmp_path / "in.txt", tmp_path / "in.jsonl"
    text.write_bytes(b"one\r\n \ntwo\n\xff\n")
    reading = read_prompts(text)
    assert [next(reading), next(reading)] == ["one", "two"]
    with pytest.raises(DataError, match=r"in.txt:4: byte 0 is not UTF-8"):
        next(reading)
    for line in ("{", "[1]", '{"prompt": ""}', '{"text": "a"}'):
        rows.write_text(line)
        with pytest.raises(DataError, match=r"in.jsonl:1: "):
            list(read_prompts(rows))
    with pytest.raises(DataError, match="cannot be read"):
        list(read_prompts(tmp_path / "none"))


def test_everything_wrong_with_a_file_is_told_before_an_answer_file_is_made(tmp_path: Path):
    """Mutations tried: the target opened first (it stays, and the mended file is refused); the first finding raised."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": ""}\n\n' + json.dumps({"prompt": "x" * 70}) + "\n" + "[" * 100_000)
    with pytest.raises(DataError) as refused:
        answer_file(FakeEngine(), source, target, SamplingParams(max_tokens=2))
    assert [finding.where for finding in refused.value.findings] == [f"{source}:{line}" for line in (2, 4, 5)]
    assert "64 tokens" in refused.value.findings[1].what and not target.exists()
    source.write_text("1\n" * 20)
    assert len(found := check_prompts(source)) == 9 and "12 more lines" in found[-1].what
    source.write_text("\n\n")
    assert [finding.what for finding in check_prompts(source)] == ["has no prompts"]


@pytest.mark.parametrize("kept", [0, 2, 5])
def test_prompts_are_made_into_tokens_once(kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As far as there is room for their ids. A prompt that has changed since the check is answered as it is. Mutations tried,
    each red: ids of the prompt before; a prompt's digest not looked at; room that is never less."""
    monkeypatch.setattr(offline, "KEPT", kept * (offline.OBJECTS + 4 * 2))
    source, target, seen = tmp_path / "in.txt", tmp_path / "out.jsonl", list[str]()
    source.write_text("".join(f"p{n}\n" for n in range(5)))
    fitting, engine = offline._fitting, FakeEngine()

    def counted(reader: Prompts, text: str, params: SamplingParams) -> list[int]:
        seen.append(text)
        if len(seen) == 5:
            source.write_text("P0\np1\np2\np3\np4\n")
        return fitting(reader, text, params)

    monkeypatch.setattr(offline, "_fitting", counted)
    assert answer_file(engine, source, target, SamplingParams(max_tokens=2)) == (5, 10)
    assert seen[5:] == ["P0", *[f"p{n}" for n in range(1, 5) if n >= kept]]
    given = [engine.tokenizer.decode(list(request.tokens)) for request in engine.seen]
    assert given == [json.loads(line)["prompt"] for line in target.read_text().splitlines()] == ["P0", "p1", "p2", "p3", "p4"]


def test_a_key_that_a_row_has_twice_is_named(tmp_path: Path):
    """Mutation tried: plain json.loads, with which the last one is answered."""
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"prompt": "a", "prompt": "b"}\n{"prompt": "c", "x": [{"y": 1, "y": 1}]}\n{"prompt": "d"}\n')
    assert [(found.where, found.what) for found in check_prompts(rows)] == [
        (f"{rows}:1", "has the key 'prompt' more than once in an object"),
        (f"{rows}:2", "has the key 'y' more than once in an object"),
    ]


def test_a_disk_that_is_full_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Mutation tried: no fix, with which the next try is told that the file is there already."""
    source = tmp_path / "in.txt"
    source.write_text("a\n")
    before = Path.open

    def opened(path: Path, mode: str = "r", **more: str) -> object:
        return before(Path("/dev/full"), "w") if mode == "x" else before(path, mode, **more)

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(DataError, match=r"No space left on device.*remove this one, which is not whole"):
        answer_file(FakeEngine(), source, tmp_path / "out.jsonl", SamplingParams(max_tokens=2))


def test_ctrl_c_ends_an_answer_and_not_the_engine():
    engine = FakeEngine(ends=False)

    def show(text: str) -> None:
        if text == "c":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        streamed(engine, "hi", SamplingParams(max_tokens=50), show)
    assert engine.aborted == ["0"] and not engine.has_work


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(LLMEngine, "load", lambda source: FakeEngine())
    monkeypatch.setattr(Fleet, "plan", lambda self, task: (Serving(), []))
    monkeypatch.setattr(Fleet, "load", lambda self, serving: FakeEngine())
    (tmp_path / "in.txt").write_text("one\ntwo\n")
    assert (
        main(["generate", "m", "--prompts", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out"), "--max-tokens", "2"])
        == 0
    )
    assert "2 prompts, 4 tokens in" in capsys.readouterr().err and len((tmp_path / "out").read_text().splitlines()) == 2
    assert main(["generate", "m", "--prompts", str(tmp_path / "none"), "--output", str(tmp_path / "out")]) == 2
    os.mkfifo(tmp_path / "pipe")
    assert main(["generate", "m", "--prompts", str(tmp_path / "pipe"), "--output", str(tmp_path / "new")]) == 2
    (tmp_path / "rows.jsonl").write_text("1\n")
    files = ["--prompts", str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "no" / "out")]
    assert main(["generate", "m", *files, "--top-p", "7"]) == 2
    said = capsys.readouterr().err
    assert "top_p: 7.0" in said and "no such folder" in said and "rows.jsonl:1: " in said
    assert "pipe: is no regular file" in said
    assert "out: is there already" in said and "none: there is no such file" in said
    monkeypatch.setattr("sys.stdin", io.StringIO(f"hi\n\n{'x' * 80}\nyou\n"))
    assert main(["generate", "m", "--interactive", "--max-tokens", "3"]) == 0
    told = capsys.readouterr()
    assert told.out.split() == ["abc", "abc"] and "64 tokens" in told.err
    for wrong in (
        [],
        ["--prompt", "a", "--interactive"],
        ["--prompts", "x"],
        ["--interactive", "--best"],
        ["--output", "x"],
        ["--prompt", "a", "--dp", "2"],
    ):
        assert main(["generate", "m", *wrong]) == 2
        assert capsys.readouterr().err.startswith("meshwright generate: ")


def test_a_skipped_checkpoint_is_no_part_of_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Mutation tried: `print` as the store's report, with which it stands before the text of `generate --prompt`."""
    (tmp_path / "config.yaml").touch()
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    told = capsys.readouterr()
    assert not told.out and "step-00000003: skipped" in told.err


def test_prompts_of_a_file_need_nothing_of_the_server():
    """The extra `serve` may be missing. Red when a module on the way imports FastAPI."""
    script = "import sys; sys.modules |= dict.fromkeys(('fastapi', 'starlette', 'uvicorn')); import meshwright.serve.batch"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
