"""DeepSpeed: the plain encoder of `ddp`, ZeRO stage 1, 2 or 3, bf16, its own fused AdamW, compiled.

python -m torch.distributed.run --nproc-per-node N -m meshwright.bench.peers.deepspeed encoder-24x1024 --stage2 [--smoke]

DeepSpeed builds its optimizer with nvcc when it is first used (a minute or two). Stage 3 runs uncompiled: `engine.compile()`
traces its hooks, which torch 2.11 refuses ("b must be 2D"). On a CPU it runs torch's AdamW, uncompiled.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from meshwright.bench.measure import Laps
from meshwright.bench.peers import PEERS
from meshwright.bench.peers.common import Job, loader, measured, parse, report
from meshwright.bench.peers.ddp import EncoderModel
from meshwright.distributed import device as devices

STAGES = ("--stage1", "--stage2", "--stage3")


def main() -> None:
    job = parse(__doc__, PEERS["deepspeed-2"].workloads, *STAGES)
    import deepspeed

    devices.set_current(job.device)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    deepspeed.init_distributed(devices.backend(job.device.type))
    try:
        train(job, next((n for n in (1, 2, 3) if getattr(job.flags, f"stage{n}")), 0))
    finally:
        torch.distributed.destroy_process_group()


def settings(job: Job, stage: int) -> dict[str, Any]:
    """The configuration that its documentation recommends for bf16: overlapped communication, contiguous gradients."""
    on_gpu = job.device.type != "cpu"
    return {
        "train_micro_batch_size_per_gpu": job.workload.rows,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01, "torch_adam": not on_gpu}},
        "bf16": {"enabled": on_gpu},
        "zero_optimization": {"stage": stage, "overlap_comm": on_gpu, "contiguous_gradients": True},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def train(job: Job, stage: int) -> None:
    import deepspeed

    model = EncoderModel(job.model, job.vocab)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings(job, stage))
    if job.device.type != "cpu" and stage < 3:
        engine.compile()
    laps, losses = Laps(job.device), []
    for batch in loader(job):
        tokens, labels = (batch[name].to(job.device, non_blocking=True) for name in ("input_ids", "labels"))
        logits = engine(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
        laps.mark()
    report(job, measured(job, f"deepspeed-{stage}", laps, losses))


if __name__ == "__main__":
    main()
