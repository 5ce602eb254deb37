"""What is done with a run afterwards: labels, tokenizer and model are those it was trained with, or it is refused.

Mutations tried, each red: labels of the evaluated file in place of the run's; stores opened without `verify`; config.yaml
believed in place of the checkpoint's settings; no comparison of tokenizers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import CheckpointError, DataError
from meshwright.runtime.evaluation import evaluate_run
from meshwright.runtime.trained import continue_text, load_trained
from tests.e2e import helpers as e2e
from tests.ranks.pool import RankError

SHORT = {"steps": 4, "schedule": {"warmup": 0}}


def rows(path: Path, label: str) -> str:
    path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text in e2e.texts(12, seed=9)))
    return str(path)


def test_labels_are_those_of_the_run(ranks, tmp_path):
    config = e2e.settings(
        tmp_path / "config.yaml",
        e2e.raw(),
        model={"arch": "encoder"},
        data={"train": [{"path": str(e2e.raw()), "label_key": "label"}], "tokenizer": {"vocab": 320}, "workers": 1},
        objective={"kind": "classify"},
        train=SHORT,
    )
    e2e.train_in(ranks(1), config, tmp_path / "run")
    figures = [
        evaluate_run(tmp_path / "run", [rows(tmp_path / f"{name}.jsonl", name)])[0] for name in ("long", "short", "medium")
    ]
    # the same texts under each of the three labels: every text is right under exactly one of them
    assert sum(figure["val_accuracy"] for figure in figures) == pytest.approx(1.0)
    assert len({round(figure["val_loss"], 6) for figure in figures}) == 3
    with pytest.raises(DataError, match="cat"):
        evaluate_run(tmp_path / "run", [rows(tmp_path / "cat.jsonl", "cat")])


def test_a_changed_byte_of_the_corpus_is_named(ranks, tmp_path):
    shutil.copytree(e2e.corpus(), tmp_path / "prepared")
    shard = next((tmp_path / "prepared").glob("tokens-*"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    config = e2e.settings(tmp_path / "config.yaml", tmp_path / "prepared")
    with pytest.raises(DataError, match=shard.name):
        e2e.train_in(ranks(1), config, tmp_path / "run")


def test_the_checkpoint_says_which_model_it_is(ranks, tmp_path):
    config = e2e.settings(tmp_path / "config.yaml", train=SHORT)
    run = tmp_path / "run"
    e2e.train_in(ranks(1), config, run)
    before = continue_text(load_trained(run), "mesh ring", max_tokens=8)
    edited = (run / "config.yaml").read_text(encoding="utf-8").replace("heads: 4", "heads: 2")
    (run / "config.yaml").write_text(edited, encoding="utf-8")
    assert continue_text(load_trained(run), "mesh ring", max_tokens=8) == before
    corpus = json.loads((run / "data" / "corpus.json").read_text(encoding="utf-8"))
    Tokenizer.train(iter(e2e.texts(50, seed=1)), 300).save(tmp_path / "other")
    (run / "data" / "corpus.json").write_text(json.dumps({**corpus, "tokenizer": str(tmp_path / "other")}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="is not the one that step-00000004 was trained with"):
        load_trained(run)


def test_a_resume_without_a_whole_checkpoint_is_refused(ranks, tmp_path):
    config = e2e.settings(tmp_path / "config.yaml", train=SHORT)
    e2e.train_in(ranks(1), config, tmp_path / "run")
    shard = next((tmp_path / "run" / "checkpoints" / "step-00000004").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-10])
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(RankError, match="none of its 1 checkpoints is whole"):
        e2e.train_in(ranks(1), config, tmp_path / "run", "--train.steps=8", resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == lines
