"""The scripts of `examples/` as they are, around plain DDP or DeepSpeed or Meshwright: same module, data, loss and optimizer.

python -m torch.distributed.run --nproc-per-node N -m meshwright.bench.peers.script simple_transformer --engine ddp

engine: ours, ddp, deepspeed-1, deepspeed-2, deepspeed-3. Nothing is compiled, as in the scripts. Gradients are clipped at 1.
ours and ddp: fp32 weights under autocast, the update fused; DeepSpeed: weights of the precision with fp32 masters, its own
fused AdamW. `simple_transformer` runs in bf16, `text_classifier` in fp16 with a loss scale. A step is one of `--batch` rows on
all devices together. From a checkout, which has the examples.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from meshwright.bench.measure import GIB, Laps, figures
from meshwright.distributed import device as devices

EXAMPLES = Path(__file__).parents[3] / "examples"
ENGINES = ("ours", "ddp", "deepspeed-1", "deepspeed-2", "deepspeed-3")


@dataclass
class Script:
    """What an example trains. mean: the loss of a batch by a model; step: the same as `run.step` takes it."""

    model: nn.Module
    data: Any
    collate: Callable[[list[Any]], Any] | None
    mean: Callable[[nn.Module, Any], torch.Tensor]
    step: Callable[[Any, Any], torch.Tensor]
    lr: float
    precision: str


def simple_transformer(args: argparse.Namespace) -> Script:
    import simple_transformer as example

    sizes = {"layers": args.layers, "width": args.width, "positions": args.positions}
    text = Path(example.__file__).read_bytes()
    data = example.Windows(text * (1 + args.batch * args.positions * 8 // len(text)), args.positions)

    def mean(model: nn.Module, batch: Any) -> torch.Tensor:
        total, count = example.loss_fn(model, batch)
        return total / count

    return Script(
        example.SimpleTransformer(**sizes), data, None, mean, lambda run, b: run.step(b, example.loss_fn), 3e-4, "bf16"
    )


def text_classifier(args: argparse.Namespace) -> Script:
    import text_classifier as example

    lines = (example.DATA / "desk-train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    data = rows * -(-args.batch * 4 // len(rows))

    def step(run: Any, batch: Any) -> torch.Tensor:
        return run.step(batch, example.loss_fn, weight_fn=example.rows)

    return Script(example.Classifier(args.width), data, example.collate, example.loss_fn, step, 3e-3, "fp16")


SCRIPTS = {"simple_transformer": simple_transformer, "text_classifier": text_classifier}


class Measured:
    """Laps and losses of the steps of one engine."""

    def __init__(self, device: torch.device):
        self.laps, self.losses = Laps(device), list[torch.Tensor]()

    def took(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.detach().clone())
        self.laps.mark()


def main() -> None:
    args = arguments()
    sys.path.insert(0, str(EXAMPLES))
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = devices.rank_device(devices.pick(), local)
    devices.set_current(device)
    torch.manual_seed(0)
    script = SCRIPTS[args.script](args)
    if device.type == "cpu":
        script.precision = "fp32"
    measured = Measured(device)
    if args.engine == "ours":
        by_run(args, script, measured)
    else:
        if args.engine == "ddp":
            dist.init_process_group(devices.backend(device.type))
            by_ddp(args, script, measured, device)
        else:
            by_deepspeed(args, script, measured, device)
        report(args, measured, device)
        dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", choices=SCRIPTS)
    parser.add_argument("--engine", choices=ENGINES, default="ours")
    parser.add_argument("--plan", default="ddp", help="of ours: ddp, zero1, zero2, zero3, JSON")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm", type=int, default=12)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--positions", type=int, default=512)
    args = parser.parse_args()
    if not 0 < args.warm < args.steps:
        parser.error(f"--warm {args.warm} leaves no step of --steps {args.steps}; give 0 < warm < steps")
    return args


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def report(args: argparse.Namespace, measured: Measured, device: torch.device) -> None:
    """One line of JSON, from rank 0. tokens_per_s is that of full rows of `--positions`."""
    if dist.get_rank():
        return
    memory = devices.memory(device)
    found = figures(
        args.engine,
        measured.laps.seconds()[args.warm - 1 :],  # the first lap is the second step
        rows=args.batch,
        seq_len=args.positions,
        losses=(float(measured.losses[0]), float(measured.losses[-1])),
        peak_gib=memory.allocated_peak / GIB,
        reserved_gib=memory.reserved_peak / GIB,
    )
    print(json.dumps(found), flush=True)


def by_run(args: argparse.Namespace, script: Script, measured: Measured) -> None:
    import meshwright as mw

    run = mw.init()
    optimizer = torch.optim.AdamW(script.model.parameters(), lr=script.lr)
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(script.data, args.batch, shuffle=True, generator=order, collate_fn=script.collate, drop_last=True)
    options = {"plan": args.plan, "precision": script.precision, "clip": 1.0}
    _, _, loader = run.parallelize(script.model, optimizer, loader, **options)
    for batch in islice(forever(loader), args.steps):
        measured.took(script.step(run, batch))
    report(args, measured, run.device)


def share(args: argparse.Namespace, script: Script) -> DataLoader[Any]:
    """This rank's rows of every step, as scripts for DDP and DeepSpeed load them."""
    ways = dist.get_world_size()
    sampler: DistributedSampler[Any] = DistributedSampler(script.data, drop_last=True)
    data: Dataset[Any] = script.data
    return DataLoader(data, args.batch // ways, sampler=sampler, collate_fn=script.collate, drop_last=True)


def by_ddp(args: argparse.Namespace, script: Script, measured: Measured, device: torch.device) -> None:
    ids = None if device.type == "cpu" else [device.index]
    model = nn.parallel.DistributedDataParallel(script.model.to(device), device_ids=ids, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=script.lr, fused=True)
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(script.precision)
    scaler = torch.amp.GradScaler(device.type, enabled=script.precision == "fp16")
    for batch in islice(forever(share(args, script)), args.steps):
        batch = tuple(part.to(device, non_blocking=True) for part in batch)
        with torch.autocast(device.type, low, enabled=low is not None):
            loss = script.mean(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        measured.took(loss)


def by_deepspeed(args: argparse.Namespace, script: Script, measured: Measured, device: torch.device) -> None:
    import deepspeed

    deepspeed.init_distributed(devices.backend(device.type))
    on_gpu = device.type != "cpu"
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.batch // dist.get_world_size(),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": script.lr, "weight_decay": 0.01, "torch_adam": not on_gpu}},
        "zero_optimization": {"stage": int(args.engine[-1]), "overlap_comm": on_gpu, "contiguous_gradients": True},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if script.precision != "fp32":
        settings[script.precision] = {"enabled": True}
    model = script.model
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    for batch in islice(forever(share(args, script)), args.steps):
        loss = script.mean(engine, tuple(part.to(device, non_blocking=True) for part in batch))
        engine.backward(loss)
        engine.step()
        measured.took(loss)


if __name__ == "__main__":
    main()
