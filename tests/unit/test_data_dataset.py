from __future__ import annotations

import json
from dataclasses import fields, replace

import numpy as np
import pytest

from meshwright.config.schema import Source
from meshwright.data.batch import IGNORE
from meshwright.data.dataset import Block, build_datasets
from meshwright.data.prepare import prepare
from meshwright.data.shards import TokenStore
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import ConfigError, DataError
from tests.unit.data_stores import FINGERPRINT, FakeStore, Words, config, counting


def labelled(documents: list[list[int]], labels: list[int], names: list[str], **kwargs) -> FakeStore:
    return FakeStore(documents, labels=np.array(labels), label_names=names, **kwargs)


def rows_of(dataset, count: int | None = None):
    return [dataset.row(sample) for sample in range(dataset.rows if count is None else count)]


def refusal(kind, *args, **kwargs) -> str:
    with pytest.raises(kind) as caught:
        build_datasets(*args, **kwargs)
    return str(caught.value)


def test_packed_rows_with_borders():
    # Red when a document that began in an earlier row keeps that start, and when padding goes on counting.
    store = counting([3, 9, 1])
    train, valid = build_datasets(config(), [store], [], Words())
    assert valid is None and (train.rows, train.seq_len, train.classes) == (2, 8, 0)
    first, second = sorted(rows_of(train), key=lambda row: row.tokens[0] or -1)
    first, second = (first, second) if first.length == 8 else (second, first)
    assert first.tokens.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert first.labels.tolist() == [1, 2, IGNORE, 4, 5, 6, 7, 8]
    assert first.documents.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert first.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert second.tokens.tolist() == [8, 9, 10, 11, 12, 0, 0, 0]
    assert second.labels.tolist() == [9, 10, 11, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE]
    assert second.documents.tolist() == [0, 0, 0, 0, 1, -1, -1, -1]
    assert second.positions.tolist() == [0, 1, 2, 3, 0, 0, 1, 2]
    assert second.length == 5 and second.select is None
    assert first.tokens.dtype == first.labels.dtype == first.positions.dtype == np.int64
    assert first.documents.dtype == np.int32


def test_packed_rows_without_borders_are_plain():
    train, _ = build_datasets(config(data={"document_mask": False}), [counting([3, 9, 1])], [], Words())
    rows = rows_of(train)
    assert all(row.documents is None and row.positions is None for row in rows)
    assert sorted(label for row in rows for label in row.labels.tolist() if label != IGNORE) == list(range(1, 13))


def test_both_ways_attention_always_knows_the_padding():
    settings = config(data={"document_mask": False}, objective={"kind": "masked_lm"}, model={"arch": "encoder"})
    train, _ = build_datasets(settings, [counting([3, 9, 1])], [], Words())
    documents = sorted(row.documents.tolist() for row in rows_of(train))
    assert documents == [[0] * 5 + [-1] * 3, [0] * 8]


def test_unpacked_rows_begin_with_a_document():
    train, _ = build_datasets(config(data={"packing": "none"}), [counting([3, 9, 1])], [], Words())
    rows = sorted((row.tokens[: row.length].tolist(), row.labels.tolist(), row.documents.tolist()) for row in rows_of(train))
    i, pad = IGNORE, -1
    assert rows == [
        ([0, 1, 2], [1, 2, i, i, i, i, i, i], [0, 0, 0, pad, pad, pad, pad, pad]),
        ([3, 4, 5, 6, 7, 8, 9, 10], [4, 5, 6, 7, 8, 9, 10, 11], [0] * 8),
        ([11], [i] * 8, [0] + [pad] * 7),
        ([12], [i] * 8, [0] + [pad] * 7),
    ]


def test_masked_rows_draw_anew_each_epoch():
    settings = config(objective={"kind": "masked_lm", "mask_fraction": 0.25}, model={"arch": "encoder"})
    store = FakeStore([list(range(10, 40))])
    train, _ = build_datasets(settings, [store], [], Words())
    chosen = {}
    for sample in range(train.rows * 8):
        row = train.row(sample)
        assert row.select.shape == row.labels.shape == (2,)
        targets = row.labels[row.labels != IGNORE]
        assert targets.size == max(1, round(0.25 * row.length))
        chosen.setdefault(int(row.labels[0] - 10) // 8, set()).add(tuple(targets.tolist()))
        assert np.array_equal(train.row(sample).tokens, row.tokens)
    assert all(len(choices) > 1 for choices in chosen.values())


def test_classified_rows_have_one_label_and_say_what_was_cut():
    settings = config(objective={"kind": "classify"}, model={"arch": "encoder"})
    store = labelled([[4, 10, 5], [4, *range(10, 30), 5], [4, 11, 5]], [0, 1, 1], ["bad", "good"])
    train, _ = build_datasets(settings, [store], [], Words())
    rows = sorted((row.tokens.tolist(), int(row.labels), row.length) for row in rows_of(train))
    assert rows == [
        ([4, 10, 5, 0, 0, 0, 0, 0], 0, 3),
        ([4, 10, 11, 12, 13, 14, 15, 5], 1, 8),
        ([4, 11, 5, 0, 0, 0, 0, 0], 1, 3),
    ]
    assert all(row.labels.shape == () and row.positions is None for row in rows_of(train))
    assert (train.label_names, train.classes) == (("bad", "good"), 2)
    assert train.notes == ("longer than 8 tokens and cut: 1 of 3 documents",)


def test_only_responses_are_targets():
    # The first row's prompt fills all of its 8 positions, so the row has no target at all.
    store = counting([10, 5], prompt_lengths=np.array([9, 2]))
    settings = config(objective={"response_only": True}, data={"packing": "none"})
    train, _ = build_datasets(settings, [store], [], Words())
    targets = sorted([label for label in row.labels.tolist() if label != IGNORE] for row in rows_of(train))
    assert targets == [[], [9], [12, 13, 14]]


def test_held_out_documents_are_the_same_whatever_the_seed():
    store = counting([8] * 100)
    parts = []
    for seed in (0, 1):
        train, valid = build_datasets(config(run={"seed": seed}, data={"valid_fraction": 0.1}), [store], [], Words())
        assert (train.rows, valid.rows) == (90, 10)
        parts.append(([row.tokens[0] for row in rows_of(train)], [row.tokens[0] for row in rows_of(valid)]))
        assert sorted(parts[-1][0] + parts[-1][1]) == list(range(0, 800, 8))
    assert parts[0][1] == parts[1][1] != sorted(parts[0][1])
    assert parts[0][0] != parts[1][0] and sorted(parts[0][0]) == sorted(parts[1][0])


def test_a_held_out_corpus_of_its_own_leaves_all_documents_to_training():
    settings = config(data={"valid": [{"path": "held"}], "valid_fraction": 0.5})
    train, valid = build_datasets(settings, [counting([8] * 4)], [counting([8] * 3)], Words())
    assert (train.rows, valid.rows) == (4, 3)


def test_a_blend_of_corpora():
    settings = config(data={"train": [{"path": "a", "weight": 3}, {"path": "b", "weight": 1}]})
    train, _ = build_datasets(settings, [counting([8] * 10), FakeStore([[63] * 8])], [], Words())
    assert train.rows == 11
    second = sum(row.tokens[0] == 63 for row in rows_of(train, 256))
    assert second == 64


@pytest.mark.parametrize("kind", ["causal_lm", "masked_lm", "classify"])
@pytest.mark.parametrize("packing", ["stream", "none"])
@pytest.mark.parametrize("weights", [[None, None, None], [3.0, 1.0, 0.5]])
def test_samples_made_together_are_those_made_alone(kind, packing, weights):
    # Red when rows of several corpora come in the order of the corpora.
    random = np.random.default_rng(0)
    parts = [[random.integers(0, 64, size).tolist() for size in random.integers(0, 20, 40)] for _ in weights]
    stores = [labelled(part, [0, 1] * 20, ["x", "y"], prompt_lengths=random.integers(0, 6, 40)) for part in parts]
    train = [{"path": str(number), "weight": weight} for number, weight in enumerate(weights)]
    objective = {"kind": kind} if kind == "classify" else {"kind": kind, "response_only": True}
    settings = config(
        data={"train": train, **({} if kind == "classify" else {"packing": packing})},
        objective=objective,
        model={"arch": "decoder" if kind == "causal_lm" else "encoder"},
    )
    dataset, _ = build_datasets(settings, stores, [], Words())
    for start, stop in [(0, 1), (5, 37), (dataset.rows - 9, dataset.rows + 4)]:  # also over the end of an epoch
        alone = Block.of([dataset.row(sample) for sample in range(start, stop)])
        together = dataset.block(range(start, stop))
        for field in fields(Block):
            ours, theirs = getattr(together, field.name), getattr(alone, field.name)
            assert (ours is None) == (theirs is None)
            assert ours is None or (ours.dtype == theirs.dtype and np.array_equal(ours, theirs)), field.name


@pytest.mark.parametrize("response_only", [False, True])
def test_padding_is_never_asked_for(response_only):
    # Red when `eligible` goes to the masks without what is padding: id 0, which fills the rows then, is an ordinary one here.
    words = replace(Words(), pad=6, unk=None)
    store = FakeStore([[9] * 5, [9] * 3], prompt_lengths=np.array([1, 1]))
    objective = {"kind": "masked_lm", "mask_fraction": 0.9, "response_only": response_only}
    dataset, _ = build_datasets(
        config(data={"packing": "none"}, objective=objective, model={"arch": "encoder"}), [store], [], words
    )
    block = dataset.block(range(8))
    asked = block.labels != IGNORE
    assert np.all(block.labels[asked] == 9) and np.all((block.select < block.lengths[:, None])[asked])
    assert asked.sum(axis=1).tolist() == [round(0.9 * (length - response_only)) for length in block.lengths]


def test_a_held_out_part_that_would_be_empty_is_refused_with_the_numbers():
    asked = {"evaluate": {"every": 5}}
    text = refusal(DataError, config(data={"valid_fraction": 0.05}, **asked), [counting([8] * 3)], [], Words())
    assert (
        "data.valid_fraction" in text
        and "0.05 of 3 documents is 0 held out and 3 to train on" in text
        and "Set it to 0.33 or more, or name files" in text
    )
    assert build_datasets(config(data={"valid_fraction": 0.33}), [counting([8] * 3)], [], Words())[1].rows == 1
    text = refusal(DataError, config(data={"valid_fraction": 0.5}, **asked), [counting([8])], [], Words())
    assert "0.5 of 1 document is 0 held out" in text and "make several of it" in text
    assert "name files in data.valid, or set evaluate.every to 0 for no evaluation" in text
    for fraction in (0.0, 0.05):  # where no figures were asked for, a corpus that is too small to share out does without
        train, valid = build_datasets(config(data={"valid_fraction": fraction}), [counting([8] * 3)], [], Words())
        assert train.rows == 3 and valid is None
    text = refusal(DataError, config(data={"valid_fraction": 0.9}), [counting([8] * 3)], [], Words())
    assert "is 3 held out and 0 to train on" in text
    text = refusal(DataError, config(data={"valid": [{"path": "held"}]}), [counting([8])], [FakeStore([[]])], Words())
    assert "held: has 1 document and no tokens" in text


def test_a_corpus_smaller_than_one_batch_is_refused_with_the_numbers():
    text = refusal(DataError, config(train={"batch": 11, "tail": "drop"}), [counting([80])], [], Words())
    assert "10 rows of 8 tokens" in text and "global batch of 11" in text and "Set train.batch to 10" in text
    for fits in ({"batch": 10, "tail": "drop"}, {"batch": 11, "tail": "step"}):
        assert build_datasets(config(train=fits), [counting([80])], [], Words())[0].rows == 10


def test_every_setting_that_does_not_fit_is_named_at_once():
    settings = config(
        data={"seq_len": 65, "packing": "none", "document_mask": False, "valid": [{"path": "held", "weight": 1.0}],
              "train": [{"path": "a", "weight": 1.0}, {"path": "b"}]},
        model={"vocab": 63, "positions": "learned", "max_len": 64},
        objective={"kind": "masked_lm", "mask_fraction": 0.0},
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        build_datasets(settings, [counting([80])] * 2, [counting([80])], replace(Words(), mask=None))
    assert [finding.where for finding in caught.value.findings] == [
        "model.vocab", "data.seq_len", "data.train.1.weight", "data.valid.0.weight", "data.tokenizer",
        "objective.mask_fraction", "data.document_mask",
    ]  # fmt: skip
    assert "64 tokens, the model only 63" in str(caught.value) and "ends at model.max_len 64" in str(caught.value)


def test_settings_that_fit_exactly_pass():
    settings = config(model={"vocab": 64, "positions": "learned", "max_len": 8})
    assert build_datasets(settings, [counting([80])], [], Words())[0].rows == 10
    assert build_datasets(config(model={"max_len": 4}), [counting([80])], [], Words())[0].rows == 10  # rotary: no table


def test_every_store_that_does_not_fit_is_named_at_once():
    settings = config(
        data={"train": [{"path": "a"}, {"path": "b"}], "valid": [{"path": "c"}]}, objective={"response_only": True}
    )
    stores = [counting([80], prompt_lengths=np.array([3])), FakeStore([[], []], prompt_lengths=np.array([0, 0]))]
    other = counting([80], tokenizer_fingerprint="cd" * 32, vocab_size=99)
    with pytest.raises(DataError) as caught:
        build_datasets(settings, stores, [other], Words())
    assert [finding.where for finding in caught.value.findings] == ["b", "c", "c"]
    text = str(caught.value)
    assert "b: has 2 documents and no tokens" in text
    assert "cdcdcdcdcdcd (99 tokens)" in text and f"{FINGERPRINT[:12]} (64 tokens)" in text
    assert "objective.response_only needs" in text


def test_labels_are_checked():
    settings = config(
        data={"train": [{"path": "a"}, {"path": "b"}]}, objective={"kind": "classify"}, model={"arch": "encoder", "classes": 2}
    )
    good = labelled([[4, 5]] * 4, [0, 1, 1, 0], ["x", "y"])
    assert build_datasets(settings, [good, good], [], Words())[0].rows == 8
    assert "b: has no labels" in refusal(DataError, settings, [good, counting([8])], [], Words())
    swapped = labelled([[4, 5]], [0], ["y", "x"])
    assert "b: has the labels ['y', 'x'], the first training corpus has ['x', 'y']" in refusal(
        DataError, settings, [good, swapped], [], Words()
    )
    wrong = labelled([[4, 5]] * 3, [0, 2, -1], ["x", "y"])
    assert "a label outside 0 .. 1 in 2 documents, the first is number 1" in refusal(
        DataError, settings, [good, wrong], [], Words()
    )
    three = labelled([[4, 5]] * 3, [0, 2, 1], ["x", "y", "z"])
    assert "model.classes: is 2, but a has 3 labels" in refusal(DataError, settings, [three, three], [], Words())


def test_options_without_effect_on_classification_are_refused():
    store = labelled([[4, 5]] * 4, [0, 1, 1, 0], ["x", "y"], prompt_lengths=np.zeros(4, np.int64))
    settings = config(
        objective={"kind": "classify", "response_only": True}, model={"arch": "encoder"}, data={"document_mask": False}
    )
    text = refusal(ConfigError, settings, [store], [], Words())
    assert "objective.response_only: has no effect" in text and "data.document_mask: has no effect" in text


def test_a_registered_objective_gets_the_rows_of_its_task():
    store = FakeStore([list(range(10, 50))])
    settings = config(objective={"kind": "mine"}, model={"arch": "encoder"})
    assert build_datasets(settings, [store], [], Words())[0].row(0).select is None
    assert build_datasets(settings, [store], [], Words(), task="mlm")[0].row(0).select is not None


@pytest.mark.parametrize("packing", ["stream", "none"])
def test_a_prepared_store_gives_every_token_once(tmp_path, packing):
    words = ["alpha", "beta", "gamma", "delta", "\u6d4b\u8bd5"]
    texts = [" ".join(words[(i + j) % 5] for j in range(i % 17 + 1)) for i in range(120)]
    rows = "".join(json.dumps({"prompt": text[:5], "response": text[5:] + "."}) + "\n" for text in texts)
    (tmp_path / "rows.jsonl").write_text(rows, encoding="utf-8")
    tokenizer = Tokenizer.train(texts, 300)
    source = Source(path=str(tmp_path / "rows.jsonl"))
    prepare([source], tmp_path / "out", tokenizer=tokenizer, workers=1, shard_bytes=1000)
    store = TokenStore.open(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*"))) > 5 and store.documents == 120
    settings = config(
        data={"train": [source], "packing": packing, "valid_fraction": 0.1, "seq_len": 32}, objective={"response_only": True}
    )
    train, valid = build_datasets(settings, [store], [], tokenizer)
    tokens = [row.tokens[: row.length] for dataset in (train, valid) for row in rows_of(dataset)]
    assert np.array_equal(np.sort(np.concatenate(tokens)), np.sort(np.array(store.read(0, store.tokens))))
    targets = sum(int((row.labels != IGNORE).sum()) for dataset in (train, valid) for row in rows_of(dataset))
    lengths = np.diff(store.offsets)
    assert targets == int((lengths - np.maximum(store.prompt_lengths, 1)).sum())
