"""Suite `data`: tokens a second of the loader from the page cache, and of `prepare`, in one process.

python -m meshwright.bench.host.data --repeat 5
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.bench.host.corpus import Numbers, write_store
from meshwright.bench.host.measures import Measure, of_repeats, say
from meshwright.config.schema import Config, Source
from meshwright.data.batch import Batch
from meshwright.data.dataset import RowDataset, build_datasets
from meshwright.data.loader import Loader, StepData
from meshwright.data.prepare import prepare
from meshwright.data.readers import documents
from meshwright.data.shards import TokenStore
from meshwright.data.tokenizer import Tokenizer

__all__ = ["CASES", "Case", "copy_rate", "loader_measures", "main", "prepare_measures"]

STEP_TOKENS = 16_384
"""Of a step of this rank: 4 rows of 4,096, or 32 of 512."""
PREFETCH = 8
CAUSAL_TARGET, MASKED_TARGET = 20e6, 5e6
WAIT_TARGET = 0.01
MATMULS = 40
"""Of the step beside which the loader is measured: about 0.2 s of one core."""


@dataclass(frozen=True)
class Case:
    """One kind of rows. seq_len: tokens of a row."""

    name: str
    objective: str
    seq_len: int
    document_mask: bool
    target: float
    prefetch: int = 0


CASES = (
    Case("causal LM, seq 4096", "causal_lm", 4096, False, CAUSAL_TARGET),
    Case("causal LM, seq 4096, document mask", "causal_lm", 4096, True, CAUSAL_TARGET),
    Case("causal LM, seq 4096, document mask, prefetch", "causal_lm", 4096, True, CAUSAL_TARGET, PREFETCH),
    Case("causal LM, seq 512, document mask", "causal_lm", 512, True, CAUSAL_TARGET),
    Case("masked LM, seq 512", "masked_lm", 512, False, MASKED_TARGET),
    Case("masked LM, seq 512, document mask", "masked_lm", 512, True, MASKED_TARGET),
    Case("masked LM, seq 512, document mask, prefetch", "masked_lm", 512, True, MASKED_TARGET, PREFETCH),
)


def loader_measures(store: TokenStore, numbers: Numbers, repeat: int, seconds: float) -> Iterator[Measure]:
    """The rate of every case against the copy rate of this machine, the cases in turn; then what a step waits for its data."""
    loaders = {case: _loader(case, store, numbers) for case in CASES}
    steps = {case: _steps(loader) for case, loader in loaders.items()}
    widths = {case: _token_bytes(next(it).micro[0]) for case, it in steps.items()}
    rates: dict[Case, list[float]] = {case: [] for case in CASES}
    copied = []
    for _ in range(repeat):
        copied.append(copy_rate())
        for case, it in steps.items():
            for _ in range(case.prefetch):  # what was made while the others ran
                next(it)
            start, rows = time.perf_counter(), 0
            while (taken := time.perf_counter() - start) < seconds:
                rows += next(it).rows
            rates[case].append(rows * case.seq_len / taken)
    for case, loader in loaders.items():
        loader.close()
        limit = statistics.median(copied) / (store.manifest.itemsize + widths[case])
        why = f"copying {store.manifest.itemsize} bytes read and {widths[case]:.1f} written of each token, at the measured rate"
        more: dict[str, Any] = {"limit": limit, "limited_by": why, "target": case.target}
        yield of_repeats(case.name, rates[case], "tokens/s", **more)
    yield from _beside_a_step(store, numbers, repeat, seconds)


def _loader(case: Case, store: TokenStore, numbers: Numbers) -> Loader:
    return Loader(_rows(case, store, numbers), micro_batch=STEP_TOKENS // case.seq_len, prefetch=case.prefetch)


def _steps(loader: Loader) -> Iterator[StepData]:
    """One micro-batch a step."""
    return loader.steps(0, lambda consumed: loader.micro_batch)


def _rows(case: Case, store: TokenStore, numbers: Numbers) -> RowDataset:
    config = Config.model_validate(
        {
            "model": {"arch": "encoder" if case.objective == "masked_lm" else "decoder"},
            "data": {
                "train": [{"path": str(store.folder)}],
                "valid_fraction": 0.0,
                "seq_len": case.seq_len,
                "document_mask": case.document_mask,
            },
            "objective": {"kind": case.objective},
        }
    )
    return build_datasets(config, [store], [], numbers)[0]


def _token_bytes(batch: Batch) -> float:
    """Bytes of a batch for each of its tokens."""
    tensors = [getattr(batch, field.name) for field in fields(batch)]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None) / batch.tokens.numel()


def copy_rate(size: int = 1 << 26) -> float:
    """Bytes read and written a second by one thread that copies `size` bytes; the best of three."""
    source, target = np.ones(size, dtype=np.uint8), np.empty(size, dtype=np.uint8)
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        np.copyto(target, source)
        best = max(best, 2 * size / (time.perf_counter() - start))
    return best


def _beside_a_step(store: TokenStore, numbers: Numbers, repeat: int, seconds: float) -> Iterator[Measure]:
    """What a step loses to its data: a thread of the process makes rows ahead while the step computes. Steps on rows that are
    there and steps on rows of the loader, in turn."""
    case = CASES[2]
    loader = _loader(case, store, numbers)
    steps = _steps(loader)
    held = next(steps)
    matrix = torch.ones(512, 512)

    def step(rows: Iterator[StepData]) -> tuple[float, float]:
        """Seconds of a step, and of them waited."""
        start = time.perf_counter()
        next(rows)
        waited = time.perf_counter() - start
        for _ in range(MATMULS):
            matrix @ matrix
        return time.perf_counter() - start, waited

    waits, slower = [], []
    for _ in range(repeat):
        count = max(3, round(seconds / step(itertools.repeat(held))[0]))
        without = [step(itertools.repeat(held))[0] for _ in range(count)]
        beside = [step(steps) for _ in range(count)]
        waits.append(sum(waited for _, waited in beside) / sum(taken for taken, _ in beside))
        slower.append(statistics.median(taken for taken, _ in beside) / statistics.median(without))
    loader.close()
    note = f"{STEP_TOKENS:,} tokens a step of {MATMULS} matmuls of 512³"
    yield of_repeats("data wait, of a step", waits, "", higher=False, target=WAIT_TARGET, note=note)
    yield of_repeats("step with the loader / without", slower, "", higher=False, limit=1.0, note=note)


def prepare_measures(folder: Path, megabytes: int, repeat: int) -> Iterator[Measure]:
    """Text bytes a second that one worker of `prepare` turns into shards, beside the tokenizer's library by itself."""
    text = folder / "text.jsonl"
    texts = _write_text(text, megabytes << 20)
    size = sum(len(each.encode("utf-8")) for each in texts)
    tokenizer = Tokenizer.train(iter(texts[: 1 + len(texts) // 4]), 2048)
    tokenizer.save(folder / "tokenizer")
    alone, ours = [], []
    for turn in range(repeat):
        alone.append(size / _library_seconds(folder / "tokenizer", texts))
        start = time.perf_counter()
        prepare([Source(path=str(text))], folder / f"prepared-{turn}", tokenizer=tokenizer, workers=1)
        ours.append(size / (time.perf_counter() - start))
    library = "the `tokenizers` library alone on the same texts, one thread"
    note = f"bytes of text, {megabytes} MB, one worker, its start and the shards' digests included"
    yield of_repeats("prepare", ours, "bytes/s", limit=statistics.median(alone), limited_by=library, note=note)


def _write_text(path: Path, size: int) -> list[str]:
    """Documents of the text that every Python carries, `size` bytes of it or all."""
    texts, total = [], 0
    with open(path, "w", encoding="utf-8") as file:
        for document in documents(Source(path="embedded")):
            texts.append(document.text)
            total += len(document.text)
            file.write(json.dumps({"text": document.text}) + "\n")
            if total >= size:
                break
    return texts


def _library_seconds(folder: Path, texts: list[str]) -> float:
    from tokenizers import Tokenizer as Library

    library = Library.from_file(str(folder / "tokenizer.json"))
    start = time.perf_counter()
    group, held = [], 0
    for text in texts:  # in groups, since one call with everything is slower and holds all of it
        group.append(text)
        held += len(text)
        if held >= 1 << 19:
            library.encode_batch_fast(group, add_special_tokens=False)
            group, held = [], 0
    library.encode_batch_fast(group, add_special_tokens=False)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.2, help="of each case and repeat")
    parser.add_argument("--tokens", type=int, default=1 << 25, help="of the corpus")
    parser.add_argument("--megabytes", type=int, default=8, help="of text for prepare")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    numbers = Numbers()
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as temporary:
        folder = Path(temporary)
        store = write_store(folder / "store", args.tokens, numbers)
        for measure in loader_measures(store, numbers, args.repeat, args.seconds):
            say(measure)
        for measure in prepare_measures(folder, args.megabytes, min(args.repeat, 3)):
            say(measure)


if __name__ == "__main__":
    main()
