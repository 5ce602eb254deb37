"""A text classifier on any number of devices: `text_classifier_single.py` with three lines changed.

meshwright launch --nproc 4 examples/text_classifier.py

The rows of a batch are dealt to the ranks, the autocast and the loss scaler are those of the run, and the losses are the same.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import meshwright as mw

DATA = Path(__file__).parent / "data"
LABELS = ("billing", "technical", "delivery")


class Classifier(nn.Module):
    """The mean of the bytes' embeddings, and two layers."""

    def __init__(self, width: int):
        super().__init__()
        self.embedding = nn.Embedding(257, width, padding_idx=256)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, len(LABELS)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        lengths = (tokens != 256).sum(1, keepdim=True)
        return self.layers(self.embedding(tokens).sum(1) / lengths)


def collate(rows: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [rows, longest], padded with 256, and labels [rows]."""
    texts = [torch.tensor(list(row["text"].encode())) for row in rows]
    labels = torch.tensor([LABELS.index(row["label"]) for row in rows])
    return nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=256), labels


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean over the rows."""
    tokens, labels = batch
    return nn.functional.cross_entropy(model(tokens), labels)


def rows(batch: tuple[torch.Tensor, torch.Tensor]) -> int:
    return len(batch[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--precision", choices=("fp32", "fp16"), default="fp16")
    args = parser.parse_args()

    torch.manual_seed(0)
    train = [json.loads(line) for line in (DATA / "desk-train.jsonl").read_text(encoding="utf-8").splitlines()]
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(train, batch_size=16, shuffle=True, generator=order, collate_fn=collate)
    model = Classifier(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run = mw.init()
    model, optimizer, loader = run.parallelize(model, optimizer, loader, precision=args.precision, clip=1.0)
    for epoch in range(args.epochs):
        for batch in loader:
            loss = run.step(batch, loss_fn, weight_fn=rows)
        schedule.step()
        run.print(f"epoch {epoch + 1}: loss of the last batch {float(loss):.6f}")


if __name__ == "__main__":
    main()
