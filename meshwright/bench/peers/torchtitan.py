"""torchtitan's own trainer (0.2.2) on the workload's Llama shape: compiled blocks, bf16, FSDP2 on several GPUs, no recompute.

python -m torch.distributed.run --nproc-per-node N -m meshwright.bench.peers.torchtitan llama-1b [--smoke]

Needs an accelerator: torchtitan has no CPU route. It trains on text, so a JSON file of random words and a tokenizer that knows
them are made in a temporary folder. Its log lines carry tokens/s of a device over the last few steps and the reserved memory.
Start it as a module: as a file it would hide the package of the same name.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from meshwright.bench.measure import GIB, figures
from meshwright.bench.peers import PEERS, missing
from meshwright.bench.peers.common import Job, parse, report, skip
from meshwright.distributed import device as devices

__all__ = ["LogLine", "flags", "parse_lines", "summarise", "write_corpus"]

WINDOW = 5
"""Steps that one log line covers; torchtitan waits for the device when it writes one, so not every step."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_LINE = re.compile(
    r"step:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>\S+)\s+grad_norm:\s*\S+\s+memory:\s*(?P<memory>[\d.]+)GiB\S*\s+tps:\s*(?P<tps>[\d,]+)"
)


@dataclass(frozen=True)
class LogLine:
    """step: the last of the window. loss: global mean. reserved_gib: peak of rank 0. tps: tokens/s of a device."""

    step: int
    loss: float
    reserved_gib: float
    tps: float


def parse_lines(text: str) -> list[LogLine]:
    """The progress lines of torchtitan's log, with or without colours; other lines are passed over."""
    found = _LINE.finditer(_ANSI.sub("", text))
    return [LogLine(int(m["step"]), float(m["loss"]), float(m["memory"]), float(m["tps"].replace(",", ""))) for m in found]


def summarise(lines: list[LogLine], *, warm: int, rows: int, seq_len: int, world: int, peak_gib: float) -> dict[str, Any]:
    """Figures over the windows that lie beyond `warm` whole. rows: of a device. Raises ValueError when there is none."""
    steady = [line for line in lines if line.step - WINDOW >= warm]
    if not steady:
        raise ValueError(f"torchtitan logged {len(lines)} steps, none of them {WINDOW} steps past the warm-up of {warm}")
    seconds = [rows * seq_len / line.tps for line in steady]
    losses = (lines[0].loss, lines[-1].loss)
    reserved = max(line.reserved_gib for line in lines)
    return figures(
        "torchtitan", seconds, rows=rows * world, seq_len=seq_len, losses=losses, peak_gib=peak_gib, reserved_gib=reserved
    )


def write_corpus(folder: Path, vocab: int, *, documents: int = 300, length: int = 4_096) -> None:
    """`assets/`: a tokenizer of `vocab` tokens, a word each; `data/`: documents of random words. Written by one process."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    rng = random.Random(0)
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|unknown|>"]
    known = [f"w{number}" for number in range(vocab - len(special))]
    vocabulary = {word: number for number, word in enumerate([*special, *known])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special[2]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    (folder / "assets").mkdir(parents=True)
    (folder / "data").mkdir()
    with open(folder / "data" / "data.json", "w", encoding="ascii") as file:
        for _ in range(documents):
            file.write(json.dumps({"text": " ".join(rng.choices(known, k=length))}) + "\n")
    settings = {"bos_token": special[0], "eos_token": special[1], "add_bos_token": True, "add_eos_token": True}
    (folder / "assets" / "tokenizer_config.json").write_text(json.dumps(settings), encoding="ascii")
    tokenizer.save(str(folder / "assets" / "tokenizer.json"))


def flags(job: Job, folder: Path) -> list[str]:
    """torchtitan's command line. One step more than asked for, which writes no line: the memory peak is that step's."""
    return [
        *("--model.name", "llama3", "--model.flavor", "workload", "--model.hf_assets_path", str(folder / "assets")),
        *("--training.dataset", "c4_test", "--training.dataset_path", str(folder / "data")),
        *("--training.dataloader.num_workers", "1", "--training.dataloader.pin_memory"),
        *("--training.local_batch_size", str(job.workload.rows), "--training.seq_len", str(job.workload.seq_len)),
        *("--training.steps", str(job.steps // WINDOW * WINDOW + 1), "--metrics.log_freq", str(WINDOW)),
        *("--optimizer.lr", "1e-4", "--optimizer.beta2", "0.999", "--optimizer.weight_decay", "0.01"),
        *("--lr_scheduler.warmup_steps", "0", "--lr_scheduler.min_lr_factor", "1.0"),
        *("--compile.enable", "--activation_checkpoint.mode", "none"),
        *("--debug.seed", "0", "--job.dump_folder", str(folder / "out")),
    ]


def shape(job: Job) -> dict[str, Any]:
    """Arguments of torchtitan's model. It wants a factor on 8/3 of the width, rounded up to a multiple, for the ffn width."""
    ours = job.model
    return {
        "dim": ours.width,
        "n_layers": ours.layers,
        "n_heads": ours.heads,
        "n_kv_heads": ours.kv_heads or ours.heads,
        "ffn_dim_multiplier": ours.ffn / (8 * ours.width // 3),
        "multiple_of": 64,
        "rope_theta": ours.rope_theta,
        "vocab_size": job.vocab,
    }


class Tee:
    """A text stream that also keeps what is written."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.kept: list[str] = []

    def write(self, text: str) -> int:
        self.kept.append(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main() -> None:
    job = parse(__doc__, PEERS["torchtitan"].workloads)
    lacking = missing(PEERS["torchtitan"])
    if lacking:
        skip(job, "torchtitan", f"not installed: {', '.join(lacking)}")
    elif job.device.type == "cpu":
        skip(job, "torchtitan", "needs an accelerator: it has no CPU route")
    else:
        train(job)


def train(job: Job) -> None:
    folder = Path(tempfile.gettempdir()) / f"meshwright-titan-{os.environ.get('MASTER_PORT', '0')}-{os.getppid()}"
    done = folder / "written"
    try:
        if job.rank == 0:
            write_corpus(folder, job.vocab)
            done.touch()
        while not done.exists():
            time.sleep(0.1)
        lines = run(job, folder)
    finally:
        if job.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    peak = devices.memory(job.device).allocated_peak / GIB
    size = {"rows": job.workload.rows, "seq_len": job.workload.seq_len, "world": job.world}
    report(job, summarise(lines, warm=job.warm, peak_gib=peak, **size))


def run(job: Job, folder: Path) -> list[LogLine]:
    """Train with torchtitan's own entry point; what it logged."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    os.environ.update(offline, TOKENIZERS_PARALLELISM="false")
    sys.argv = [sys.argv[0], *flags(job, folder)]  # before the import, which reads them
    import torchtitan.models.llama3 as llama
    from torchtitan.train import Trainer
    from torchtitan.train import main as train_all

    llama.llama3_args["workload"] = llama.TransformerModelArgs(**shape(job))
    tee = Tee(sys.stdout)
    with contextlib.redirect_stdout(tee):
        train_all(Trainer)
    return parse_lines("".join(tee.kept))


if __name__ == "__main__":
    main()
