"""Token shards are read as one stream; whatever is missing, cut or changed is named."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config.schema import Source
from meshwright.data.manifest import Manifest
from meshwright.data.prepare import prepare
from meshwright.data.shards import TokenStore
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import DataError

TEXTS = ["ab", "", "   ", "训练", "x" * 50, "cd"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(iter([""]), 262)


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    rows = [{"text": text, "label": i % 2} for i, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = Source(path=str(tmp_path / "a.jsonl"), label_key="label")
    prepare([source], tmp_path / "out", tokenizer=tokenizer, workers=1, shard_bytes=50)
    return tmp_path / "out"


def stream(tokenizer: Tokenizer) -> list[int]:
    return [number for text in TEXTS if text for number in [*tokenizer.encode(text), tokenizer.eos]]


def test_the_stream_over_shard_borders(folder: Path, tokenizer: Tokenizer) -> None:
    store = TokenStore.open(folder, verify=True)
    expected = stream(tokenizer)
    assert (store.documents, store.tokens) == (5, len(expected))
    assert len(store.manifest.shards) == -(-2 * len(expected) // 50) > 2
    for start in range(len(expected) + 1):
        for stop in range(start, len(expected) + 1):
            got = store.read(start, stop)
            assert got.dtype == np.uint16 and got.tolist() == expected[start:stop]
    for start, stop in ((-1, 2), (3, 2), (0, len(expected) + 1)):
        with pytest.raises(IndexError):
            store.read(start, stop)


def test_documents_and_their_facts(folder: Path, tokenizer: Tokenizer) -> None:
    store = TokenStore.open(folder)
    assert store.offsets.dtype == np.int64 and store.offsets[0] == 0 and store.offsets[-1] == store.tokens
    assert [tokenizer.decode(store.document(i)) for i in range(5)] == [text for text in TEXTS if text]
    assert store.labels is not None and store.labels.tolist() == [0, 0, 1, 0, 1]
    assert store.label_names == ["0", "1"] and store.prompt_lengths is None
    assert (store.vocab_size, store.eos) == (262, tokenizer.eos)
    assert store.tokenizer_fingerprint == tokenizer.fingerprint
    assert Tokenizer.load(store.tokenizer_path).fingerprint == tokenizer.fingerprint
    assert store.manifest.longest == 51


def test_a_store_travels_as_its_path(folder: Path) -> None:
    store = TokenStore.open(folder)
    data = pickle.dumps(store)
    assert len(data) < 500
    assert pickle.loads(data).read(0, 5).tolist() == store.read(0, 5).tolist()


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    import tokenizers
    from tokenizers import models, pre_tokenizers

    made = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 65_536, "</s>": 65_535}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("a a")
    manifest = prepare([Source(path=str(tmp_path / "a.txt"))], tmp_path / "out", tokenizer=Tokenizer.load(tmp_path / "t.json"))
    assert manifest.dtype == "uint32"
    assert TokenStore.open(tmp_path / "out").read(0, 3).tolist() == [65_536, 65_536, 65_535]


def test_opening_is_quick(folder: Path) -> None:
    start = time.process_time()
    for _ in range(10):
        TokenStore.open(folder)
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize("name", ["tokens-00001.bin", "offsets.bin", "labels.bin"])
def test_damage_is_named(folder: Path, name: str) -> None:
    path = folder / name
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(DataError, match=f"{name}: has {len(data) - 1} bytes, the manifest says {len(data)}"):
        TokenStore.open(folder)
    path.write_bytes(data[:3] + bytes([data[3] ^ 1]) + data[4:])
    TokenStore.open(folder)
    with pytest.raises(DataError, match=f"{name}: its content has changed"):
        TokenStore.open(folder, verify=True)
    path.unlink()
    with pytest.raises(DataError, match=f"{name}: missing"):
        TokenStore.open(folder)


def test_all_damage_at_once(folder: Path) -> None:
    (folder / "tokens-00000.bin").unlink()
    (folder / "labels.bin").write_bytes(b"")
    with pytest.raises(DataError) as error:
        TokenStore.open(folder)
    assert len(error.value.findings) == 2


def changed(folder: Path, **values: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_manifests_that_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "manifest.json").read_text()
    for values, what in (
        ({"version": 2}, "has format version 2; this meshwright reads version 1"),
        ({"format": "other"}, "not a manifest of token shards"),
        ({"documents": 7}, "its counts need 64"),
        ({"tokens": 1}, "its counts need 2"),
        ({"surprise": 1}, "damaged: "),
    ):
        (folder / "manifest.json").write_text(whole)
        changed(folder, **values)
        with pytest.raises(DataError, match=what):
            TokenStore.open(folder)
    for content in ("", "{", "[]", whole[:200]):
        (folder / "manifest.json").write_text(content)
        with pytest.raises(DataError, match=r"manifest\.json"):
            TokenStore.open(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"no manifest\.json"):
        TokenStore.open(folder)
    (folder / "journal.jsonl").write_text("")
    with pytest.raises(DataError, match="has not finished"):
        TokenStore.open(folder)
    with pytest.raises(DataError, match="no such folder"):
        TokenStore.open(tmp_path / "none")


def test_a_manifest_reads_back_as_it_was(folder: Path) -> None:
    manifest = Manifest.read(folder)
    before = (folder / "manifest.json").read_bytes()
    manifest.write(folder)
    assert (folder / "manifest.json").read_bytes() == before
    assert not list(folder.glob(".*tmp"))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 30))
@settings(max_examples=25, deadline=None)
def test_any_documents_in_any_shards(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], shard_tokens: int) -> None:
    folder = tmp_path_factory.mktemp("any")
    made = Tokenizer.train(iter([""]), 262)
    texts = ["abcdefghij"[i % 10] * length for i, length in enumerate(lengths)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = {"tokenizer": made, "workers": 1, "shard_bytes": 2 * shard_tokens}
    if not any(texts):
        with pytest.raises(DataError, match="no documents"):
            prepare([Source(path=str(folder / "a.jsonl"))], folder / "out", **arguments)  # type: ignore[arg-type]
        return
    prepare([Source(path=str(folder / "a.jsonl"))], folder / "out", **arguments)  # type: ignore[arg-type]
    store = TokenStore.open(folder / "out", verify=True)
    assert [made.decode(store.document(i)) for i in range(store.documents)] == [text for text in texts if text]
