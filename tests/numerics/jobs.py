"""Whole runs of the product on small made-up corpora, in this process or on a rank of the pool.

    result = execute(config, dataset(config), micro_batch=3)                 # one rank, here
    results = ranks(4).run("tests.numerics.jobs:execute", config, dataset(config), 2)

A run is what `meshwright train` runs on a rank (loader, step, reduction, update), without corpus files and checkpoints.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from meshwright.config.load import Resolved
from meshwright.config.schema import Config
from meshwright.data.dataset import Dataset, RowDataset, build_datasets
from meshwright.distributed.environment import World
from meshwright.distributed.stop import StopFlag
from meshwright.distributed.world import Ranks, init_world
from meshwright.observe.flops import Peak
from meshwright.observe.metrics import read_metrics
from meshwright.parallel.apply import Engine
from meshwright.runtime import worker
from meshwright.runtime.folder import RunFolder
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.train.loop import train
from tests.ranks.pool import joined
from tests.unit.data_stores import FINGERPRINT, FakeStore, Words

__all__ = ["DECODER", "ENCODER", "SPECIAL", "Result", "configure", "corpus", "dataset", "execute", "largest_difference"]

SPECIAL = 7
"""Ids below it are special tokens (see `Words`)."""
VOCAB = 64

DECODER = {
    "arch": "decoder",
    "layers": 2,
    "width": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "vocab": VOCAB,
    "max_len": 64,
    "qk_norm": True,
    "tied": True,
    "init_std": 0.1,
}
"""Grouped queries, rotary positions, swiglu, norms of queries and keys, tied output matrix."""

ENCODER = {
    "arch": "encoder",
    "layers": 2,
    "width": 32,
    "heads": 4,
    "ffn": 48,
    "vocab": VOCAB,
    "max_len": 64,
    "positions": "learned",
    "norm": "layer",
    "norm_order": "post",
    "final_norm": False,
    "embed_norm": True,
    "token_types": 2,
    "activation": "gelu",
    "qkv_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
    "tied": True,
    "head_bias": True,
    "head_transform": True,
    "init_depth_scaled": False,
    "init_std": 0.1,
}
"""BERT in small."""


def configure(model: dict[str, Any], **sections: Any) -> Config:
    """Rows of 24 tokens, 8 of them a step, nothing held out or saved; each argument is laid over its section."""
    base: dict[str, Any] = {
        "model": model,
        "data": {"train": [{"path": "corpus"}], "valid_fraction": 0.0, "seq_len": 24, "prefetch": 0},
        "train": {"batch": 8, "lr": 3e-3, "schedule": {"kind": "cosine", "warmup": 4}},
        "precision": "fp64",
        "checkpoint": {"final": False},
        "log": {"every": 1 << 20, "report": False},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values} if isinstance(values, dict) else values
    return Config.model_validate(base)


def corpus(documents: int = 60, longest: int = 40, *, classes: int = 0, prompts: bool = False, seed: int = 0) -> FakeStore:
    """Documents of 1 .. `longest` tokens, each token most often the one that follows from the last, so that a model learns.

    classes: with labels, by the first token. prompts: with leading tokens that are no targets, often the whole document.
    The numbers are the raw words of numpy's Philox, a stream that no version may change.
    """
    stream = np.random.Philox(key=seed)

    def draw(below: int) -> int:
        return int(stream.random_raw()) % below

    parts, ordinary = [], VOCAB - SPECIAL
    for _ in range(documents):
        tokens = [SPECIAL + draw(ordinary)]
        for _ in range(draw(longest)):
            chance = draw(4)
            tokens.append(SPECIAL + draw(ordinary) if chance == 0 else SPECIAL + (5 * tokens[-1] + 3) % ordinary)
        parts.append(tokens)
    labels = np.array([part[0] % classes for part in parts]) if classes else None
    leading = np.array([draw(len(part) + 1) if draw(2) else len(part) for part in parts]) if prompts else None
    names = [str(number) for number in range(classes)] or None
    return FakeStore(parts, labels, leading, names)


def dataset(config: Config, store: FakeStore | None = None) -> RowDataset:
    """The rows of a run on `store` (default: a corpus that has what the objective needs)."""
    if store is None:
        classes = (config.model.classes or 0) if config.objective.kind == "classify" else 0
        store = corpus(classes=classes, prompts=config.objective.response_only)
    return build_datasets(config, [store], [], Words())[0]


@dataclass
class Result:
    """losses, norms: of every step, None where there was no target. records: the lines of metrics.jsonl.

    gradients: of the last step, after reduction, not clipped. weights: the masters; averages: of the weights. The first
    three are there on the first rank only, the others where no tensor is sharded.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    averages: dict[str, torch.Tensor] = field(default_factory=dict)


def execute(config: Config, rows: Dataset, micro_batch: int, layout: Layout | None = None) -> Result:
    """One run over all ranks of the pool, or over this process where it is no rank. layout: default: every rank has all."""
    with contextlib.ExitStack() as stack:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        stack.callback(torch.set_num_threads, threads)
        ranks = joined() if dist.is_initialized() else stack.enter_context(init_world(World(), "cpu"))
        folder = RunFolder(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="numerics-"))) / "run")
        plan = Plan(layout or Layout(dp_replicate=ranks.size), micro_batch, config.precision)
        return _run(config, rows, plan, folder, ranks, stack)


def _run(config: Config, rows: Dataset, plan: Plan, folder: RunFolder, ranks: Ranks, stack: contextlib.ExitStack) -> Result:
    folder.create(resume=False)
    folder.write_config(Resolved(config, {}))
    data = worker.RunData(rows, None, FINGERPRINT)
    with mock.patch.object(worker, "peak_rate", lambda *_: Peak(1e12, "given")):  # measuring takes longer than the run
        run = worker.build_context(worker.Job(folder), config, plan, data, ranks, StopFlag(), stack)
    train(run)
    records = read_metrics(folder.metrics) if ranks.rank == 0 else []
    result = Result([record["loss"] for record in records], [record["grad_norm"] for record in records], records)
    if not plan.layout.zero:
        _take_tensors(run.engine, result)
    return result


def _take_tensors(engine: Engine, result: Result) -> None:
    for group, slot in engine.parameters.each():
        result.gradients[slot.name] = slot.of(group.gradient).clone()
    for piece in engine.parameters_state():
        kind, _, name = piece.name.partition("/")
        if kind in ("model", "ema"):
            (result.weights if kind == "model" else result.averages)[name] = piece.tensor.clone()


def largest_difference(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Largest |ours - reference| of a tensor over the largest |element| of the reference tensor, over all tensors."""
    assert ours.keys() == reference.keys(), ours.keys() ^ reference.keys()
    worst = 0.0
    for name, expected in reference.items():
        scale = float(expected.abs().max())
        difference = float((ours[name] - expected).abs().max())
        worst = max(worst, difference / scale if scale else difference)
    return worst
