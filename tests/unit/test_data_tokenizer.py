"""Tokenizers of every kind give the same ids always, in linear time, and are refused by name when they are broken."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, processors

from meshwright.config.schema import Source, TokenizerConfig
from meshwright.data import tokenizer as module
from meshwright.data.readers import documents
from meshwright.data.sample import sample_texts, tokenizer_for
from meshwright.data.sources import find
from meshwright.data.tokenizer import SPECIAL_TOKENS, Tokenizer, pieces
from meshwright.errors import DataError

CORPUS = ["the cat sat on the mat", "训练数据 测试", "def f(x):\n    return x + 1\n"] * 20


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return Tokenizer.train(iter(CORPUS), 400)


def test_a_trained_tokenizer_has_bytes_and_special_tokens(trained: Tokenizer) -> None:
    assert [trained.bos, trained.eos, trained.pad, trained.mask, trained.cls, trained.sep] == list(range(6))
    assert trained.unk is None and not trained.adds_bos
    text = "anything: 😀\0\u2028 训"
    assert trained.decode(trained.encode(text)) == text
    assert max(trained.encode(text)) < trained.vocab_size <= 400
    assert trained.decode([0, *trained.encode("a"), 1]) == "a"
    assert trained.decode([0, *trained.encode("a"), 1], skip_special=False) == "<|bos|>a<|eos|>"


def test_training_is_repeatable_in_another_process(trained: Tokenizer) -> None:
    code = f"from meshwright.data.tokenizer import Tokenizer\nprint(Tokenizer.train(iter({CORPUS!r}), 400).fingerprint)"
    for threads in ("1", "2"):
        environment = {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads, "PYTHONPATH": ":".join(filter(None, sys.path))}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == trained.fingerprint
    assert Tokenizer.train(iter(CORPUS), 300).fingerprint != trained.fingerprint


def test_save_and_load_keep_everything(tmp_path: Path, trained: Tokenizer) -> None:
    trained.save(tmp_path / "t")
    for path in (tmp_path / "t", tmp_path / "t" / "tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert loaded.fingerprint == trained.fingerprint
        assert loaded.special == trained.special and loaded.vocab_size == trained.vocab_size
        assert loaded.encode_batch(CORPUS) == trained.encode_batch(CORPUS)


def test_transformers_reads_what_we_save(tmp_path: Path, trained: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    trained.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert theirs(CORPUS[:3], add_special_tokens=False)["input_ids"] == trained.encode_batch(CORPUS[:3])
    assert (theirs.eos_token_id, theirs.mask_token_id) == (trained.eos, trained.mask)


def test_a_vocabulary_without_room_is_refused() -> None:
    with pytest.raises(DataError, match="261 is too small: 256 bytes and 6 special tokens need 262"):
        Tokenizer.train(iter(CORPUS), 261)
    assert Tokenizer.train(iter(["", ""]), 262).vocab_size == 262


# -- other people's files ---------------------------------------------------------------------------------------------


def hugging_face(**vocabulary: int) -> tokenizers.Tokenizer:
    words = {"[UNK]": 0, "a": 1, "b": 2, **vocabulary}
    made = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def test_truncation_and_padding_of_an_earlier_use_are_off(tmp_path: Path) -> None:
    made = hugging_face()
    plain = tmp_path / "plain.json"
    made.save(str(plain))
    made.enable_truncation(2)
    made.enable_padding(length=4)
    made.save(str(tmp_path / "cut.json"))
    loaded = Tokenizer.load(tmp_path / "cut.json")
    assert loaded.encode_batch(["a b a b", "a"]) == [[1, 2, 1, 2], [1]]
    assert loaded.fingerprint == Tokenizer.load(plain).fingerprint


def test_bpe_dropout_is_off(tmp_path: Path) -> None:
    values = json.loads(module_text(Tokenizer.train(iter(CORPUS), 400), tmp_path))
    values["model"]["dropout"] = 0.9
    (tmp_path / "d.json").write_text(json.dumps(values))
    loaded = Tokenizer.load(tmp_path / "d.json")
    assert len({tuple(loaded.encode("the cat sat on the mat")) for _ in range(20)}) == 1
    assert len(loaded.encode("the cat sat on the mat")) < 12


def module_text(made: Tokenizer, folder: Path) -> str:
    made.save(folder / "t")
    return (folder / "t" / "tokenizer.json").read_text(encoding="utf-8")


def test_special_tokens_come_from_the_files_beside_it(tmp_path: Path) -> None:
    made = hugging_face(**{"<x>": 5, "<y>": 9, "</s>": 10})
    made.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).special == {
        "bos": None, "eos": 10, "pad": None, "mask": None, "cls": None, "sep": None, "unk": 0
    }  # fmt: skip
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<x>", "bos_token": {"content": "<x>"}}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "<y>"}, "pad_token": null, "mask_token": "gone"}'
    )
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.bos, loaded.eos, loaded.pad, loaded.mask) == (5, 9, None, None)
    assert loaded.vocab_size == 11  # the largest id counts, not the number of tokens


def test_a_template_that_starts_with_bos_is_followed(tmp_path: Path) -> None:
    made = hugging_face(**{"<s>": 3, "</s>": 4})
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    made.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).adds_bos
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    loaded = Tokenizer.load(tmp_path)
    assert not loaded.adds_bos and loaded.encode("a") == [1]
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 3), ("</s>", 4)])
    made.save(str(tmp_path / "other.json"))
    (tmp_path / "tokenizer_config.json").unlink()
    assert not Tokenizer.load(tmp_path / "other.json").adds_bos


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"model": {"type": "BPE"}}', b"\xff\xfe", b'{"version": "1.0"}']
)
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_what_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such tokenizer"):
        Tokenizer.load(tmp_path / "none")
    with pytest.raises(DataError, match=r"no tokenizer\.json and no \.model"):
        Tokenizer.load(tmp_path)
    hugging_face().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: not valid JSON"):
        Tokenizer.load(tmp_path)


def test_sentencepiece(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_prefix=str(tmp_path / "m"), vocab_size=60, minloglevel=2, hard_vocab_limit=False
    )
    loaded = Tokenizer.load(tmp_path / "m.model")
    assert (loaded.unk, loaded.bos, loaded.eos, loaded.pad, loaded.vocab_size) == (0, 1, 2, None, 31)
    ids = loaded.encode("the cat sat")
    assert loaded.decode([1, *ids, 2]) == "the cat sat"
    assert loaded.decode([1, *ids, 2], skip_special=False) == "<s>the cat sat</s>"
    loaded.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").fingerprint == loaded.fingerprint
    (tmp_path / "bad.model").write_bytes(b"no model")
    with pytest.raises(DataError, match=r"bad\.model: not a SentencePiece model"):
        Tokenizer.load(tmp_path / "bad.model")


def test_sentencepiece_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "m.model").write_bytes(b"x")
    with pytest.raises(DataError, match=r"meshwright\[hf\]"):
        Tokenizer.load(tmp_path / "m.model")


def test_half_a_surrogate_pair_is_refused(trained: Tokenizer) -> None:
    with pytest.raises(DataError, match="surrogate"):
        trained.encode("a\ud800")


# -- long texts -------------------------------------------------------------------------------------------------------


@given(st.text(st.sampled_from("ab \n\r训.\t"), max_size=200), st.integers(2, 30))
@settings(max_examples=200, deadline=None)
def test_pieces_are_the_text(text: str, limit: int) -> None:
    parts = list(pieces(text, limit))
    assert "".join(parts) == text
    assert all(len(part) <= limit for part in parts)
    assert all(parts) or parts == [""]


def test_pieces_of_real_text_give_the_ids_of_the_whole(trained: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    # red when `_border` cuts at the limit instead of where a word begins
    texts = [d.text for d in documents(Source(path="embedded"))][:200]
    whole = trained.encode_batch(texts)
    assert max(map(len, texts)) > 10_000
    monkeypatch.setattr(pieces, "__defaults__", (2000,))
    assert trained.encode_batch(texts) == whole


@pytest.mark.alone
@pytest.mark.parametrize("unit", ["a", "训"])
@pytest.mark.parametrize("split", [True, False])
def test_time_grows_linearly_without_spaces(unit: str, split: bool, trained: Tokenizer) -> None:
    # without pre-tokenisation the whole text is one word; red when each piece is encoded together with all before it
    made = trained if split else Tokenizer(plain_bpe(), {})
    seconds = []
    for size in (1 << 20, 1 << 21, 1 << 22) if split else (1 << 18, 1 << 19, 1 << 20):
        text = unit * (size // len(unit.encode()))
        start = time.process_time()
        ids = made.encode(text)
        seconds.append(time.process_time() - start)
        assert made.decode(ids) == text
    assert seconds[1] <= 2.6 * seconds[0] and seconds[2] <= 2.6 * seconds[1]


@pytest.mark.alone
def test_training_on_a_text_without_spaces_takes_linear_time() -> None:
    # red (13.7 times) when the text is trained on in parts of PIECE characters: a word costs the square of its length
    draw = random.Random(0)
    text = "".join(draw.choices([chr(0x4E00 + i) for i in range(3000)], k=1 << 15))
    seconds = []
    for size in (1 << 13, 1 << 15):
        start = time.process_time()
        Tokenizer.train([text[:size]], 1000)
        seconds.append(time.process_time() - start)
    assert seconds[1] <= 7 * seconds[0], "four times the text"


def plain_bpe() -> object:
    from meshwright.data.tokenizer_backends import HuggingFace

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, "aa"])}, [("a", "a")]))
    made.normalizer = normalizers.ByteLevel()
    made.decoder = tokenizers.decoders.ByteLevel()
    return HuggingFace(made.to_str())


# -- the sample it is trained on --------------------------------------------------------------------------------------


def test_the_sample_takes_a_share_of_every_file(tmp_path: Path) -> None:
    for name, size in (("a", 400), ("b", 200), ("c", 200)):
        (tmp_path / f"{name}.txt").write_text(name * size * 1000)
    source = Source(path=str(tmp_path))
    assert [(text[0], len(text)) for text in sample_texts([source], 2**30)] == [("a", 400_000), ("b", 200_000), ("c", 200_000)]
    assert [(text[0], len(text)) for text in sample_texts([source], 400_000)] == [
        ("a", 200_000),
        ("b", 100_000),
        ("c", 100_000),
    ]


def test_a_sample_of_many_small_files_is_bounded(tmp_path: Path) -> None:
    for i in range(100):
        (tmp_path / f"{i:03}.txt").write_text("训" * 10_000)
    taken = list(sample_texts([Source(path=str(tmp_path))], 300_000))
    assert 150_000 < sum(len(text.encode()) for text in taken) < 600_000
    assert len(taken) < 20


def test_the_tokenizer_of_a_run(tmp_path: Path, trained: Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "ppp", "response": "rrr"}\n')
    sources = [Source(path=str(tmp_path / "a.jsonl"))]
    assert tokenizer_for(sources, TokenizerConfig(vocab=264)).vocab_size == 264
    trained.save(tmp_path / "t")
    assert tokenizer_for(sources, TokenizerConfig(path=str(tmp_path / "t"))).fingerprint == trained.fingerprint
    (tmp_path / "b.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match=r"b\.jsonl: no documents"):
        tokenizer_for([Source(path=str(tmp_path / "b.jsonl"))], TokenizerConfig())
    assert len(find(sources)[0]) == 1
    assert len(SPECIAL_TOKENS) == 6 and module.PIECE <= 1 << 16
