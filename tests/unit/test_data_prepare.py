"""`prepare`: equal bytes for any number of workers, after any kill; every mistake has one message and nothing is lost."""

from __future__ import annotations

import functools
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from meshwright.cli import main
from meshwright.config.schema import Source
from meshwright.data import pool
from meshwright.data import prepare as module
from meshwright.data.journal import Journal
from meshwright.data.manifest import Manifest
from meshwright.data.prepare import Update, prepare
from meshwright.data.shards import TokenStore
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import DataError, DeviceError, MeshwrightError


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(iter(["the quick brown fox " * 50, "训练数据" * 20]), 300)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several chunks over several files and formats, with empty rows, prompts and a document over many chunks."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    words = ["the", "quick", "brown", "fox", "训练", "数据", "x\ny", "\u2028"]
    rows = [{"text": " ".join(draw.choices(words, k=draw.randrange(0, 400)))} for _ in range(1800)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    (folder / "b.txt").write_text("no blank line here " * 80_000)
    pq.write_table(pa.table({"text": [row["text"] or None for row in rows[:800]]}), folder / "c.parquet")
    pairs = [{"prompt": row["text"][:20], "response": row["text"][:9]} for row in rows[:300]]
    (folder / "d.jsonl.gz").write_bytes(gzip.compress("".join(map("{}\n".format, map(json.dumps, pairs))).encode()))
    (folder / "e.csv").write_text("text\nlast\n")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def expected(corpus: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("expected") / "out"
    prepare([Source(path=str(corpus))], out, tokenizer=tokenizer, workers=1)
    return contents(out)


def rows(folder: Path, *values: dict[str, Any] | str, name: str = "a.jsonl") -> Source:
    lines = [value if isinstance(value, str) else json.dumps(value) for value in values]
    (folder / name).write_text("\n".join(lines) + "\n")
    return Source(path=str(folder / name))


# -- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3])
def test_the_bytes_do_not_depend_on_the_workers(
    corpus: Path, tokenizer: Tokenizer, expected: dict[str, bytes], tmp_path: Path, workers: int
) -> None:
    prepare([Source(path=str(corpus))], tmp_path / "out", tokenizer=tokenizer, workers=workers)
    assert contents(tmp_path / "out") == expected


def test_results_keep_the_order_of_the_corpus(
    files: Source, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # red when results are written in the order in which the workers finish
    prepare([files], tmp_path / "fresh", tokenizer=tokenizer, workers=1)
    run = pool._Pool._run

    def slow(self: pool._Pool, chunk: pool.Chunk) -> Any:
        time.sleep(1.5 * (chunk.number == 0))
        return run(self, chunk)

    monkeypatch.setattr(pool._Pool, "_run", slow)
    prepare([files], tmp_path / "out", tokenizer=tokenizer, workers=2)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_every_document_is_there_in_order(
    corpus: Path, tokenizer: Tokenizer, expected: dict[str, bytes], tmp_path: Path
) -> None:
    for name, data in expected.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    store = TokenStore.open(tmp_path, verify=True)
    texts = [json.loads(line)["text"] for line in (corpus / "a.jsonl").read_bytes().split(b"\n") if line]
    pairs = [json.loads(line) for line in gzip.decompress((corpus / "d.jsonl.gz").read_bytes()).split(b"\n") if line]
    every = [*texts, (corpus / "b.txt").read_text(), *texts[:800], *(p["prompt"] + p["response"] for p in pairs), "last"]
    kept = [text for text in every if text]
    assert store.documents == len(kept)
    assert [tokenizer.decode(store.document(i)) for i in range(len(kept))] == kept
    assert store.manifest.empty == len(every) - len(kept) > 0
    assert store.manifest.bytes == sum(len(text.encode()) for text in kept)
    assert all(store.document(i)[-1] == tokenizer.eos for i in range(0, len(kept), 97))
    assert store.prompt_lengths is not None
    prompts = [len(tokenizer.encode(pair["prompt"])) for pair in pairs if pair["response"]]
    assert store.prompt_lengths.tolist() == [0] * (len(kept) - len(prompts) - 1) + prompts + [0]
    assert store.manifest.longest == max(len(store.document(i)) for i in range(len(kept)))
    assert store.manifest.sources[0]["encodings"] == {"utf-8": 5}


def test_an_empty_first_document(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = rows(tmp_path, *({"text": text} for text in ("", "ab", "   ", "cd")))
    manifest = prepare([source], tmp_path / "out", tokenizer=tokenizer)
    assert (manifest.documents, manifest.empty, manifest.skipped) == (3, 1, 0)
    store = TokenStore.open(tmp_path / "out")
    assert [tokenizer.decode(store.document(i)) for i in range(3)] == ["ab", "   ", "cd"]


def with_specials(folder: Path) -> Tokenizer:
    made = tokenizers.Tokenizer(
        models.WordLevel({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "</s>": 3, "a": 4, "b": 5}, unk_token="[UNK]")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "t.json"))
    return Tokenizer.load(folder / "t.json")


def test_special_tokens_follow_the_objective(tmp_path: Path, tokenizer: Tokenizer) -> None:
    made = with_specials(tmp_path)
    source = rows(tmp_path, {"text": "a b"}, {"text": "   "}, {"text": "b"})
    for objective, ids in (("causal_lm", [4, 5, 3, 5, 3]), ("masked_lm", [1, 4, 5, 2, 1, 5, 2])):
        manifest = prepare([source], tmp_path / objective, tokenizer=made, objective=objective)
        assert TokenStore.open(tmp_path / objective).read(0, manifest.tokens).tolist() == ids
        assert manifest.empty == 1  # a tokenizer that makes nothing of white space
    prompts = rows(tmp_path, {"prompt": "a b", "response": "b"}, name="p.jsonl")
    prepare([prompts], tmp_path / "p", tokenizer=made, objective="masked_lm")
    store = TokenStore.open(tmp_path / "p")
    assert store.read(0, 5).tolist() == [1, 4, 5, 5, 2] and store.prompt_lengths is not None
    assert store.prompt_lengths.tolist() == [3]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([10, 2, 2, 1], ["1", "2", "10"]),
        (["b", "a", "b", "10"], ["10", "a", "b"]),
        ([True, False, True, True], ["false", "true"]),
        ([1.0, 0.0, 0.0, 1.0], ["0", "1"]),
    ],
)
def test_labels_are_numbered_by_their_names(tmp_path: Path, tokenizer: Tokenizer, labels: list[Any], names: list[str]) -> None:
    source = rows(tmp_path, *({"text": "a", "y": label} for label in labels)).model_copy(update={"label_key": "y"})
    manifest = prepare([source], tmp_path / "out", tokenizer=tokenizer, objective="classify")
    assert manifest.label_names == names
    texts = [str(int(v)) if isinstance(v, float) else str(v).lower() if isinstance(v, bool) else str(v) for v in labels]
    store = TokenStore.open(tmp_path / "out")
    assert store.labels is not None and [names[i] for i in store.labels] == texts


def test_given_label_names_must_cover(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = rows(tmp_path, *({"text": "a", "y": label} for label in ("x", "y", "z"))).model_copy(update={"label_key": "y"})
    with pytest.raises(DataError, match=r"line 3: label 'z' is none of the 2 that are known \(x, y\)"):
        prepare([source], tmp_path / "out", tokenizer=tokenizer, label_names=["y", "x"])
    manifest = prepare([source], tmp_path / "out2", tokenizer=tokenizer, label_names=["z", "y", "x", "w"])
    assert manifest.label_names == ["z", "y", "x", "w"]
    labels = TokenStore.open(tmp_path / "out2").labels
    assert labels is not None and labels.tolist() == [2, 1, 0]


def test_bad_labels_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = rows(tmp_path, {"text": "a", "y": None}, {"text": "a", "y": 0.5}, {"text": "a", "y": [1]}, {"text": "a"})
    with pytest.raises(DataError) as error:
        prepare([source.model_copy(update={"label_key": "y"})], tmp_path / "out", tokenizer=tokenizer)
    assert [finding.where[-6:] for finding in error.value.findings] == ["line 1", "line 2", "line 3", "line 4"]
    with pytest.raises(DataError, match="Set label_key"):
        prepare([source], tmp_path / "out", tokenizer=tokenizer, objective="classify")


def test_bad_rows_are_counted_when_asked(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = rows(tmp_path, "", {"text": "a"}, "[]", {"text": ""}, "{", {"text": "b"})
    with pytest.raises(DataError) as error:
        prepare([source], tmp_path / "out", tokenizer=tokenizer)
    assert [finding.where for finding in error.value.findings] == [f"{source.path}, line 3", f"{source.path}, line 5"]
    manifest = prepare([source], tmp_path / "out", tokenizer=tokenizer, on_bad_row="skip")
    assert (manifest.documents, manifest.skipped, manifest.empty) == (2, 2, 1)
    assert [line.split(": ")[0] for line in manifest.first_skipped] == [f"{source.path}, line 3", f"{source.path}, line 5"]
    assert "on_bad_row" in str(error.value) and not any("on_bad_row" in line for line in manifest.first_skipped)
    assert not any("skip" in line for line in manifest.first_skipped), "they are skipped: that is no advice any more"
    TokenStore.open(tmp_path / "out", verify=True)


@pytest.mark.parametrize("content", ["", "\n \n\r\n", "  \n\t\n"])
@pytest.mark.parametrize("kind", ["jsonl", "txt", "csv"])
def test_nothing_to_prepare(tmp_path: Path, tokenizer: Tokenizer, kind: str, content: str) -> None:
    if kind == "csv" and " " in content:
        pytest.skip("a header of spaces is a missing column")
    path = tmp_path / f"a.{kind}"
    path.write_text(content, newline="")
    with pytest.raises(DataError, match=f"a.{kind}: no documents"):
        prepare([Source(path=str(path))], tmp_path / "out", tokenizer=tokenizer)


def test_the_first_mistake_of_the_corpus_is_told_whatever_the_workers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows(tmp_path, *[{"text": "x" * 500}] * 6000, "{", *[{"text": "y" * 500}] * 3000)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-5])
    with pytest.raises(DataError, match=r"a\.jsonl, line 6001: not valid JSON"):
        prepare([Source(path=str(tmp_path))], tmp_path / "out", tokenizer=tokenizer, workers=2)
    with pytest.raises(DataError, match=r"b\.jsonl\.gz: cut short"):
        prepare([Source(path=str(tmp_path))], tmp_path / "out", tokenizer=tokenizer, workers=2, on_bad_row="skip")
    assert not (tmp_path / "out" / "manifest.json").exists()


# -- the folder it is written to --------------------------------------------------------------------------------------


def notes(updates: list[Update]) -> str:
    return " | ".join(update.note for update in updates if update.note)


def test_a_finished_folder_is_left_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = rows(tmp_path, {"text": "a"})
    first = prepare([source], tmp_path / "out", tokenizer=tokenizer)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    updates: list[Update] = []
    assert prepare([source], tmp_path / "out", tokenizer=tokenizer, progress=updates.append) == first
    assert "nothing to prepare" in notes(updates)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    rows(tmp_path, {"text": "b"})
    os.utime(source.path, ns=(1, 1))
    with pytest.raises(DataError, match=r"made from something else \(modified differ\)\. .*--overwrite"):
        prepare([source], tmp_path / "out", tokenizer=tokenizer)
    with pytest.raises(DataError, match="on_bad_row"):
        prepare([source], tmp_path / "out", tokenizer=tokenizer, on_bad_row="skip")
    assert contents(tmp_path / "out")
    prepare([source], tmp_path / "out", tokenizer=tokenizer, overwrite=True)
    store = TokenStore.open(tmp_path / "out", verify=True)
    assert tokenizer.decode(store.document(0)) == "b"


def test_foreign_folders_are_not_touched(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = rows(tmp_path, {"text": "a"})
    with pytest.raises(DataError, match=r"is not empty \(it has a\.jsonl\)"):
        prepare([source], tmp_path, tokenizer=tokenizer)
    with pytest.raises(DataError, match="is a file, not a folder"):
        prepare([source], source.path, tokenizer=tokenizer)
    with pytest.raises(DeviceError, match="cannot be written"):
        prepare([source], "/proc/none/out", tokenizer=tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_two_at_a_time_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    held = Journal(tmp_path / "out")
    with pytest.raises(DataError, match="another process is preparing this folder now"):
        prepare([rows(tmp_path, {"text": "a"})], tmp_path / "out", tokenizer=tokenizer)
    held.close()


class Stopped(Exception):
    pass


def stop_after(chunks: int) -> Callable[[Update], None]:
    seen = iter(range(1000))

    def progress(update: Update) -> None:
        if update.documents and next(seen) + 1 == chunks:
            raise Stopped

    return progress


def stopped(source: Source, out: Path, tokenizer: Tokenizer, chunks: int = 3) -> None:
    with pytest.raises(Stopped):
        prepare([source], out, tokenizer=tokenizer, workers=1, progress=stop_after(chunks))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """Sixty small files in chunks of ten."""
    monkeypatch.setattr(module, "CHUNK_PIECES", 10)
    (tmp_path / "in").mkdir()
    for i in range(60):
        rows(
            tmp_path / "in",
            *({"prompt": "p" * (i % 5), "response": f"text {i} {k}", "y": k} for k in range(3)),
            name=f"{i:02}.jsonl",
        )
    return Source(path=str(tmp_path / "in"), label_key="y")


def test_it_goes_on_after_its_finished_chunks(files: Source, tokenizer: Tokenizer, tmp_path: Path) -> None:
    prepare([files], tmp_path / "fresh", tokenizer=tokenizer)
    out = tmp_path / "out"
    stopped(files, out, tokenizer)
    for name, more in (
        ("tokens-00000.bin", b"half a chunk"),
        ("offsets.bin", b"1234567"),
        ("journal.jsonl", b'{"chunk": 3, "so'),
    ):
        with open(out / name, "ab") as file:
            file.write(more)
    updates: list[Update] = []
    prepare([files], out, tokenizer=tokenizer, workers=1, progress=updates.append)
    assert notes(updates) == "went on after 3 finished chunks"
    assert updates[0].documents == 3 * 10 * 3
    assert contents(out) == contents(tmp_path / "fresh")


@pytest.mark.parametrize("name", ["tokens-00000.bin", "offsets.bin", "prompt_lengths.bin", "labels.raw"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_damaged_chunks_are_made_again(files: Source, tokenizer: Tokenizer, tmp_path: Path, name: str, harm: str) -> None:
    # red when `adopt` believes the journal without reading the files
    prepare([files], tmp_path / "fresh", tokenizer=tokenizer)
    out = tmp_path / "out"
    stopped(files, out, tokenizer)
    data = (out / name).read_bytes()
    if harm == "flip":
        (out / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif harm == "cut":
        (out / name).write_bytes(data[:-1])
    else:
        (out / name).unlink()
    updates: list[Update] = []
    prepare([files], out, tokenizer=tokenizer, workers=1, progress=updates.append)
    kept, damaged = (0, 3) if harm == "remove" else (2, 1)
    assert notes(updates) == f"went on after {kept} finished chunks; {damaged} more were damaged and are made again"
    assert contents(out) == contents(tmp_path / "fresh")


def test_a_kill_between_the_manifest_and_the_journal(files: Source, tokenizer: Tokenizer, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare([files], out, tokenizer=tokenizer)
    before = contents(out)
    for name in ("journal.jsonl", "labels.raw"):
        (out / name).write_bytes(b"{}\n")
    updates: list[Update] = []
    prepare([files], out, tokenizer=tokenizer, progress=updates.append)
    assert "nothing to prepare" in notes(updates)
    assert contents(out) == before


def test_changes_begin_again_and_are_named(files: Source, tokenizer: Tokenizer, tmp_path: Path) -> None:
    stopped(files, tmp_path / "out", tokenizer)
    path = tmp_path / "in" / "13.jsonl"
    path.write_text(path.read_text().replace("text", "TEXT", 1))  # same size
    updates: list[Update] = []
    prepare([files], tmp_path / "out", tokenizer=tokenizer, workers=1, progress=updates.append)
    assert f"began again: {tmp_path / 'in' / '10.jsonl'} or a file after it has changed" in notes(updates)
    prepare([files], tmp_path / "fresh", tokenizer=tokenizer, workers=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")

    stopped(files, tmp_path / "out2", tokenizer)
    updates.clear()
    prepare([files], tmp_path / "out2", tokenizer=tokenizer, workers=1, objective="classify", progress=updates.append)
    assert "began again: objective changed" in notes(updates)
    assert TokenStore.open(tmp_path / "out2", verify=True).label_names == ["0", "1", "2"]


SCRIPT = """
import os
import sys
import time
from meshwright.config.schema import Source
from meshwright.data.journal import Journal
from meshwright.data.prepare import prepare
from meshwright.data.tokenizer import Tokenizer
append = Journal.append
def slowly(*args):
    append(*args)
    time.sleep(float(os.environ.get("EACH", "0")))
Journal.append = slowly
prepare([Source(path=sys.argv[1])], sys.argv[2], tokenizer=Tokenizer.load(sys.argv[3]), workers=2)
"""


def start(corpus: Path, out: Path, tokenizer: Path, each: float = 0.0) -> subprocess.Popen[bytes]:
    """each: seconds that it waits behind every record of its journal."""
    # no `__main__` guard on purpose: a user's script has none either
    out.parent.joinpath("run.py").write_text(SCRIPT)
    command = [sys.executable, str(out.parent / "run.py"), str(corpus), str(out), str(tokenizer)]
    environment = {**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[2]), "EACH": str(each)}
    # a shell starts what it runs in the background with SIGINT ignored, and children inherit that
    listening = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, preexec_fn=listening)


def children_gone(children: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(children, timeout=5)
    return not alive


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while not condition() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)


def journal_lines(out: Path) -> int:
    path = out / "journal.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_killed_at_any_time_it_ends_with_the_same_bytes(
    corpus: Path, tokenizer: Tokenizer, expected: dict[str, bytes], tmp_path: Path
) -> None:
    tokenizer.save(tmp_path / "t")
    draw = random.Random(3)
    out = tmp_path / "out"
    for kill in range(5):
        process = start(corpus, out, tmp_path / "t")
        target = journal_lines(out) + draw.choice([1, 1, 2])
        wait_for(lambda target=target: journal_lines(out) >= target, process)  # type: ignore[misc]
        time.sleep(draw.random() * 0.05)
        children = psutil.Process(process.pid).children() if process.poll() is None else []
        process.kill()
        process.communicate()
        assert children_gone(children), kill
        assert (out / "manifest.json").exists() == (not (out / "journal.jsonl").exists())
    process = start(corpus, out, tmp_path / "t")
    assert process.communicate()[1] == b"" and process.returncode == 0
    assert contents(out) == expected


def test_ctrl_c_leaves_no_process_and_goes_on(
    corpus: Path, tokenizer: Tokenizer, expected: dict[str, bytes], tmp_path: Path
) -> None:
    tokenizer.save(tmp_path / "t")
    process = start(corpus, tmp_path / "out", tmp_path / "t", each=0.3)  # else the signal may come when it is through
    wait_for(lambda: journal_lines(tmp_path / "out") >= 2, process)
    children = psutil.Process(process.pid).children()
    assert children
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode in (-signal.SIGINT, 130)
    assert children_gone(children)
    prepare([Source(path=str(corpus))], tmp_path / "out", tokenizer=tokenizer, workers=1)
    assert contents(tmp_path / "out") == expected


def test_a_worker_that_dies_is_told(
    files: Source, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = pool.send

    def send_and_kill(to: Any, values: dict[str, Any], *parts: bytes) -> None:
        sent(to, values, *parts)
        if "pieces" in values:
            for child in psutil.Process().children():
                child.kill()

    monkeypatch.setattr(pool, "send", send_and_kill)
    with pytest.raises(MeshwrightError, match="was ended by signal 9; the machine may be out of memory"):
        prepare([files], tmp_path / "out", tokenizer=tokenizer, workers=1)


def test_our_own_mistake_in_a_worker_comes_with_its_traceback(
    files: Source, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = pool.send

    def send_wrong(to: Any, values: dict[str, Any], *parts: bytes) -> None:
        sent(to, {**values, "source": 7} if "source" in values else values, *parts)

    monkeypatch.setattr(pool, "send", send_wrong)
    with pytest.raises(MeshwrightError, match=r"(?s)tokenising .*Traceback.*IndexError"):
        prepare([files], tmp_path / "out", tokenizer=tokenizer, workers=1)


FULL = """
import resource, sys
from meshwright.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
sys.exit(main(sys.argv[2:]))
"""


def test_a_full_disk_is_told_and_nothing_is_lost(
    corpus: Path, tokenizer: Tokenizer, expected: dict[str, bytes], tmp_path: Path
) -> None:
    tokenizer.save(tmp_path / "t")
    arguments = ["prepare", str(corpus), "-o", str(tmp_path / "out"), "--tokenizer", str(tmp_path / "t"), "--workers", "1"]
    size = len(expected["tokens-00000.bin"]) // 2
    command = [sys.executable, "-c", FULL, str(size), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"{tmp_path / 'out'}: cannot be written: File too large. Free space" in done.stderr and "goes on" in done.stderr
    assert "Traceback" not in done.stderr
    left = journal_lines(tmp_path / "out") - 1
    assert left > 0
    records = [json.loads(line) for line in (tmp_path / "out" / "journal.jsonl").read_text().splitlines()[1:]]
    assert (tmp_path / "out" / "tokens-00000.bin").stat().st_size == 2 * sum(record["tokens"] for record in records)
    assert main(arguments) == 0
    assert contents(tmp_path / "out") == expected


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = rows(tmp_path, *({"content": text} for text in ("ab", "", "cd")))
    arguments = ["prepare", source.path, "-o", str(tmp_path / "out"), "--text-key", "content", "--vocab", "270"]
    assert main([*arguments, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["documents"], summary["empty"], summary["skipped"], summary["vocab"]) == (2, 1, 0, summary["vocab"])
    assert main(arguments) == 0
    output = capsys.readouterr()
    assert "2 documents" in output.out and "left out: 1 empty document and 0 bad rows" in output.out
    assert "nothing to prepare" in output.err
    Manifest.read(tmp_path / "out")


def test_the_command_refuses_without_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = rows(tmp_path, "{")
    assert main(["prepare", source.path, str(tmp_path / "no.txt"), "-o", str(tmp_path / "out")]) == 2
    assert f"{tmp_path / 'no.txt'}: no such file" in capsys.readouterr().err
    assert main(["prepare", source.path, "-o", str(tmp_path / "out")]) == 2
    assert f"{source.path}, line 1: not valid JSON" in capsys.readouterr().err
    assert main(["prepare", source.path, "-o", str(tmp_path / "out"), "--vocab", "10", "--tokenizer", "x"]) == 2
    assert main(["prepare"]) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"LC_ALL": "C", "PYTHONUTF8": "0"}, "训练"),
        ({"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "ascii"}, "\\u8bad\\u7ec3"),
        ({"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "gbk"}, "训练"),
    ],
)
def test_names_and_labels_of_any_language_under_any_locale(tmp_path: Path, environment: dict[str, str], name: str) -> None:
    # each red before the command settled what its output can hold, by a traceback
    source = tmp_path / "数据.jsonl"
    source.write_text('{"text": "训练", "类": "好"}\n{"text": "測試 😀", "类": "😀"}\n', encoding="utf-8")
    command = ["prepare", source, "-o", tmp_path / "训练", "--vocab", "300", "--objective", "classify", "--label-key", "类"]
    environment = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-m", "meshwright", *command], env=environment, capture_output=True, check=False)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
    said = done.stdout.decode("gbk" if environment.get("PYTHONIOENCODING") == "gbk" else "utf-8")
    assert f"{name}: 2 documents" in said
    assert Manifest.read(tmp_path / "训练").label_names == ["好", "😀"]
    assert not any("\ufffd" in entry.name for entry in tmp_path.iterdir())


def test_help_is_quick_and_has_an_example() -> None:
    code = "import sys\nfrom meshwright.cli import main\nmain(['prepare', '--help'])\n"
    code += "print([m for m in ('torch', 'pydantic', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Example: meshwright prepare" in done.stdout
    assert done.stdout.rstrip().endswith("[]")


def test_an_idle_worker_ends_with_its_input() -> None:
    # red when the listening thread returns instead of ending the process
    with subprocess.Popen([sys.executable, "-m", "meshwright.data.worker"], stdin=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        time.sleep(0.5)
        assert worker.poll() is None
        worker.stdin.close()
        try:
            assert worker.wait(timeout=20) == 0
        finally:
            worker.kill()


def test_workers_load_nothing_heavy() -> None:
    code = "import sys\nimport meshwright.data.tokenize, meshwright.data.worker, meshwright.data.tokenizer_backends\n"
    code += "print([m for m in ('torch', 'pydantic', 'numpy', 'pyarrow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.alone
def test_the_rate_is_that_of_the_library_alone(tmp_path: Path) -> None:
    """At least 90% of `encode_batch_fast` on the same text and cores, turn by turn, best of three each."""
    from meshwright.data.readers import documents

    texts = [d.text for d in documents(Source(path="embedded"))]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    made = Tokenizer.train(iter(texts[:500]), 8192)
    made.save(tmp_path / "t")
    alone = tokenizers.Tokenizer.from_file(str(tmp_path / "t" / "tokenizer.json"))
    rates: dict[str, list[float]] = {"alone": [], "prepare": []}
    size = sum(len(text.encode()) for text in texts) / 1e6
    for turn in range(3):
        begin = time.perf_counter()
        alone.encode_batch_fast(texts, add_special_tokens=False)
        rates["alone"].append(size / (time.perf_counter() - begin))
        begin = time.perf_counter()
        prepare([Source(path=str(tmp_path / "a.jsonl"))], tmp_path / f"{turn}", tokenizer=made)
        rates["prepare"].append(size / (time.perf_counter() - begin))
    ratio = max(rates["prepare"]) / max(rates["alone"])
    print(f"alone {max(rates['alone']):.2f} MB/s, prepare {max(rates['prepare']):.2f} MB/s, ratio {ratio:.3f}")
    assert ratio >= 0.9
