"""Every file of examples/ is loaded, checked and trained for two steps; the parts that are more than settings are tested."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from meshwright.cli import main
from meshwright.config.load import load_config
from meshwright.data import corpus
from meshwright.data.batch import IGNORE, Batch
from tests.docs.markdown import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
TINY = [
    "--train.steps=2", "--train.schedule.warmup=1", "--train.batch=4", "--train.micro_batch=2", "--data.tokenizer.vocab=300",
    "--data.seq_len=32", "--data.workers=1", "--evaluate.every=1", "--evaluate.rows=4", "--log.sample_tokens=2",
    "--run.device=cpu",
]  # fmt: skip


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch, one_rank: None, registries: None) -> None:
    """Paths in the examples are those of somebody who stands in the repository."""
    monkeypatch.chdir(ROOT)


def toy_text(folder: Path) -> Path:
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} bottles of tea on the wall. " * 8}) + "\n" for i in range(24)))
    return path


def test_the_examples_are_these():
    assert [path.stem for path in EXAMPLES] == [
        "bert-mlm", "classifier", "custom_model", "own-text", "quickstart-zh", "quickstart",
    ]  # fmt: skip


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_trains(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The model and all settings are the example's own, but for what TINY shortens and for text that is not here."""
    config = load_config(path).config
    assert config.run.dir == f"runs/{path.stem.replace('_', '-')}"
    arguments = ["train", str(path), *TINY, f"--run.dir={tmp_path / 'run'}", "--data.valid_fraction=0.2"]
    if config.data.train[0].path.startswith("embedded"):
        arguments.append(f"--data.train.0.path={toy_text(tmp_path)}")
    assert main(arguments) == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["val_loss"]) for line in lines)
    assert (tmp_path / "run" / "report.html").is_file()


def test_the_schema_line_of_each_example_names_the_schema():
    for path in EXAMPLES:
        first = path.read_text(encoding="utf-8").splitlines()[0]
        if first.startswith("# yaml-language-server"):
            assert (path.parent / first.split("$schema=")[1]).resolve() == ROOT / "docs" / "config.schema.json"


def test_labels_of_the_classifier_are_balanced_and_no_text_is_in_both_files():
    rows = {
        kind: [json.loads(line) for line in (ROOT / f"examples/data/desk-{kind}.jsonl").read_text().splitlines()]
        for kind in ("train", "valid")
    }
    for of_kind in rows.values():
        counts = {label: sum(row["label"] == label for row in of_kind) for label in ("billing", "technical", "delivery")}
        assert sum(counts.values()) == len(of_kind) and min(counts.values()) > len(of_kind) / 4
    assert not {row["text"] for row in rows["train"]} & {row["text"] for row in rows["valid"]}


@pytest.mark.slow
def test_the_classifier_learns_its_labels(tmp_path: Path):
    assert main(["train", str(ROOT / "examples/classifier.yaml"), f"--run.dir={tmp_path / 'run'}", "--data.workers=1"]) == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["figures"]["val_accuracy"] > 0.9


def test_without_the_chinese_packages_the_command_that_installs_them_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(corpus, "DEBIAN_LISTS", tmp_path / "none")
    assert main(["train", "examples/quickstart-zh.yaml", f"--run.dir={tmp_path / 'run'}"]) == 2
    message = capsys.readouterr().err
    assert re_command(message) == "apt-get install manpages-zh fortunes-zh debian-reference-zh-cn"


def re_command(text: str) -> str:
    return text[text.index("apt-get") :].splitlines()[0].rstrip(". ")


def test_with_the_chinese_packages_it_trains_on_their_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A root with one file of each package, as Debian installs them."""
    lists = tmp_path / "var/lib/dpkg/info"
    lists.mkdir(parents=True)
    reference = gzip.compress(("包管理系统安装软件包。" * 40 + "\n\n").encode() * 4)
    for package, name, content in (
        ("manpages-zh", "usr/share/man/zh_CN/man1/ls.1.gz", gzip.compress("列出目录内容。\n".encode() * 60)),
        (
            "fortunes-zh",
            "usr/share/games/fortunes/tang300",
            "床前明月光，疑是地上霜。\n%\n举头望明月，低头思故乡。\n%\n".encode() * 20,
        ),
        ("debian-reference-zh-cn", "usr/share/debian-reference/debian-reference.zh-cn.txt.gz", reference),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        (lists / f"{package}.list").write_text(f"/.\n/{name}\n")
    monkeypatch.setattr(corpus, "ROOT", tmp_path)
    monkeypatch.setattr(corpus, "DEBIAN_LISTS", lists)
    run = tmp_path / "run"
    assert main(["train", "examples/quickstart-zh.yaml", *TINY, f"--run.dir={run}", "--data.valid_fraction=0.1"]) == 0
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2


def custom():
    spec = importlib.util.spec_from_file_location("meshwright_user_example", ROOT / "examples" / "custom_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_custom_model_sees_neither_the_future_nor_other_documents():
    """Mutations tried: without the comparison of documents the second one changes; with taps ahead the past does."""
    from meshwright.config.schema import ModelConfig
    from meshwright.models import build, initialize

    custom()
    config = ModelConfig(arch="shift-mixer", layers=2, width=16, ffn=16, vocab=11, options={"reach": 4})
    model = build(config, "lm", torch.float64)
    initialize(model, 0, torch.device("cpu"))
    tokens = torch.arange(8)[None] % 11
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]], dtype=torch.int32)
    before = model(tokens, documents=documents)
    changed = tokens.clone()
    changed[0, 2] = 9
    after = model(changed, documents=documents)
    moved = (before != after).any(-1)[0].tolist()
    assert moved == [False, False, True, True, False, False, False, False]


def test_the_custom_loss_is_the_sum_of_its_formula():
    """Two equal logits: p = 1/2, so each target costs (1 - 1/2)^2 ln 2. Mutation tried: a mean gives a third."""

    class Coin(torch.nn.Module):
        def forward(self, tokens: torch.Tensor, **more: object) -> torch.Tensor:
            return torch.zeros(*tokens.shape, 2, dtype=torch.float64)

    module = custom()
    from meshwright.config.schema import ObjectiveConfig
    from meshwright.train.objectives import make_objective

    objective = make_objective(ObjectiveConfig(kind="focal_lm"), 0)
    assert isinstance(objective, module.FocalLoss)
    labels = torch.tensor([[0, IGNORE, 1]])
    parts = objective.loss(Coin(), Batch(torch.tensor([[0, 1, 0]]), labels, torch.tensor([0])), None)
    assert parts.loss_sum.dtype == torch.float64
    assert parts.loss_sum.item() == pytest.approx(2 * 0.25 * math.log(2), rel=1e-12)
    assert parts.correct.item() == 1  # of two equal logits the first is taken
