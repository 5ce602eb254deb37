"""docs/own-loop.md: its commands run at toy size, its Python blocks run, and its diff is that of the two files."""

from __future__ import annotations

import difflib
import io
import re
import runpy
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.docs.markdown import ROOT, blocks, commands
from tests.ranks.pool import joined

PAGE = ROOT / "docs" / "own-loop.md"
TOYS = {
    "simple_transformer.py": "--layers 2 --width 16 --heads 2 --positions 16 --steps 2 --batch 4",
    "text_classifier.py": "--epochs 1 --width 8",
    "text_classifier_single.py": "--epochs 1 --width 8",
}


def in_rank(argv: list[str]) -> str:
    """What a script prints as a rank of the pool, whose process group it finds open."""
    from meshwright.distributed.world import Ranks

    said, before, ranks = io.StringIO(), sys.argv, joined()
    sys.argv = argv
    try:
        with redirect_stdout(said), mock.patch.object(Ranks, "adopt", lambda *args, **more: ranks):
            runpy.run_path(argv[0], run_name="__main__")
    finally:
        sys.argv = before
    return said.getvalue()


def script_of(command: str) -> list[str]:
    words = shlex.split(command)
    at = next(number for number, word in enumerate(words) if word.endswith(".py"))
    return [str(ROOT / words[at]), *(str(ROOT / w) if w.startswith("examples/") else w for w in words[at + 1 :])]


@pytest.mark.parametrize("command", commands(PAGE))
def test_every_command_runs(ranks, command: str):
    """Options of launchers are parsed by them (tests/docs/test_readme.py); the script runs on at most two ranks."""
    from tests.docs.test_readme import check_arguments

    words = shlex.split(command)
    if words[0] == "meshwright":
        check_arguments(words[1:])
    argv = script_of(command)
    toy = TOYS[Path(argv[0]).name].split()
    if "--deepspeed_config" in argv:
        toy = toy[:-2]  # the batch is that of the config
    world = 1 if words[0] == "python" else 4 if "tp" in command else 2
    said = ranks(world).run(in_rank, [*argv, *toy], timeout=120)[0]
    assert re.search(r"loss", said), said


def losses(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss(?: of the last batch)? (\d+\.\d+)", text)]


@pytest.mark.parametrize(("precision", "near"), [("fp32", 2e-6), ("fp16", 5e-3)])
def test_the_classifier_has_the_losses_of_the_single_device(ranks, precision: str, near: float):
    """347 rows in batches of 16: the last has 11. Printed with 6 digits. Mutation tried: `weight_fn` of one (5e-3 in fp32)."""
    options = ["--epochs", "3", "--width", "16", "--precision", precision]
    single = losses(ranks(1).run(in_rank, [str(ROOT / "examples/text_classifier_single.py"), *options])[0])
    many = losses(ranks(2).run(in_rank, [str(ROOT / "examples/text_classifier.py"), *options])[0])
    assert len(single) == 3 and max(abs(a - b) for a, b in zip(single, many, strict=True)) <= near


@pytest.mark.parametrize("plan", ["ddp", "zero2", "zero3"])
def test_the_transformer_has_the_losses_of_one_device(ranks, plan: str):
    argv = [str(ROOT / "examples/simple_transformer.py"), *TOYS["simple_transformer.py"].split(), "--precision", "fp64"]
    one = losses(ranks(1).run(in_rank, argv)[0])
    assert len(one) == 2 and one == losses(ranks(2).run(in_rank, [*argv, "--plan", plan, "--micro-batch", "1"])[0])


def test_the_transformer_split_by_layers_and_matrices_has_the_losses_of_one_device(ranks):
    argv = [str(ROOT / "examples/simple_transformer.py"), *TOYS["simple_transformer.py"].split(), "--precision", "fp64"]
    one = losses(ranks(1).run(in_rank, argv)[0])
    split = [*argv, "--plan", '{"layout": {"pp": 2, "tp": 2}}', "--micro-batch", "2"]
    assert len(one) == 2 and one == losses(ranks(4).run(in_rank, split)[0])


def test_the_diff_is_that_of_the_two_files():
    (shown,) = blocks(PAGE, "diff")
    texts = [(ROOT / "examples" / name).read_text(encoding="utf-8") for name in TOYS if name.startswith("text")]
    many, single = (text[text.index("def main()") :].splitlines() for text in texts)
    changed = [line for line in difflib.unified_diff(single, many, lineterm="", n=0) if line[:2] not in ("--", "++", "@@")]
    assert shown.text.splitlines() == changed


def run_blocks(sources: list[str], folder: str) -> int:
    """The page's Python blocks one after another, with what they take for granted."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from meshwright.distributed.world import Ranks

    def again() -> dict[str, Any]:
        model = nn.Linear(3, 1)
        data = DataLoader(TensorDataset(torch.randn(8, 3), torch.randn(8, 1)), batch_size=4)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3), "loader": data}

    ranks = joined()
    names: dict[str, Any] = {**again(), "folder": folder}
    names["loss_fn"] = lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean()
    with mock.patch.object(Ranks, "adopt", lambda *args, **more: ranks), redirect_stdout(io.StringIO()):
        for number, source in enumerate(sources):
            exec(compile(source, f"block {number}", "exec"), names)
            if "scheduler" not in names:
                names["scheduler"] = torch.optim.lr_scheduler.StepLR(names["optimizer"], 1)
    names["run"].close()
    return names["run"].result is not None and len(names["weights"])


def test_the_python_blocks_run(ranks, tmp_path: Path):
    sources = [block.text for block in blocks(PAGE, "python")]
    assert len(sources) == 5
    assert ranks(1).run(run_blocks, sources, str(tmp_path)) == [2]
