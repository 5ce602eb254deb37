"""Plain torch: nn.TransformerEncoder with an output layer, DistributedDataParallel, bf16 autocast, torch.compile, fused AdamW.

python -m torch.distributed.run --nproc-per-node N -m meshwright.bench.peers.ddp encoder-24x1024 [--smoke] [--eager]

As most loops of this kind it neither clips gradients nor compiles the loss. Against our model it has a dropout more inside the
feed-forward layer, and none on the embedding. On a CPU it runs uncompiled.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from meshwright.bench.measure import Laps
from meshwright.bench.peers import PEERS
from meshwright.bench.peers.common import Job, loader, measured, parse, report
from meshwright.config.schema import ModelConfig
from meshwright.distributed import device as devices


class EncoderModel(nn.Module):
    """Logits [B, S, vocab] for every position of tokens [B, S]; no positions, as in the workload."""

    def __init__(self, config: ModelConfig, vocab: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab, config.width)
        layer = nn.TransformerEncoderLayer(
            config.width, config.heads, config.ffn, config.dropout, activation="relu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        self.head = nn.Linear(config.width, vocab)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens_BS)))


def main() -> None:
    job = parse(__doc__, PEERS["ddp"].workloads, "--eager")
    devices.set_current(job.device)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    bound = None if job.device.type == "cpu" else job.device
    if job.world > 1:
        dist.init_process_group(devices.backend(job.device.type), device_id=bound)
    try:
        train(job)
    finally:
        if job.world > 1:
            dist.destroy_process_group()


def train(job: Job) -> None:
    device = job.device
    model: nn.Module = EncoderModel(job.model, job.vocab).to(device)
    if job.world > 1:
        ids = None if device.type == "cpu" else [job.local_rank]
        model = nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    if device.type != "cpu" and not job.flags.eager:
        model = torch.compile(model)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    laps, losses = Laps(device), []
    for batch in loader(job):
        tokens, labels = (batch[name].to(device, non_blocking=True) for name in ("input_ids", "labels"))
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        laps.mark()
    report(job, measured(job, "ddp", laps, losses))


if __name__ == "__main__":
    main()
