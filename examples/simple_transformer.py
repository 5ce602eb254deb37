"""A language model as tutorials begin with one: embedding, `nn.TransformerEncoder`, output layer. In one of these ways:

python examples/simple_transformer.py                                     # one device
meshwright launch --nproc 8 examples/simple_transformer.py --plan ddp     # also zero1, zero2, zero3, or JSON
meshwright launch --nproc 4 examples/simple_transformer.py --plan '{"layout": {"pp": 2, "tp": 2}}' --micro-batch 4
meshwright launch --nproc 8 examples/simple_transformer.py --deepspeed_config examples/ds_config.json

The second form uses `run.step`, and so does the third, which splits every layer over two devices and the layers over two
pairs of them; the last uses the calls of DeepSpeed. Text: the bytes of this very file, over and over.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import meshwright as mw


class SimpleTransformer(nn.Module):
    """Next-byte logits [batch, positions, vocab] of tokens [batch, positions].

    `batch_first=True` matters: without it `nn.TransformerEncoderLayer` takes [positions, batch, width], and fed batch-first
    it attends across the batch, from one sample to another, without a word. A loss falls all the same, and the
    result then depends on which samples share a micro-batch, hence on the number of devices.
    """

    def __init__(self, vocab: int = 256, width: int = 1024, heads: int = 16, layers: int = 24, positions: int = 512):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.positions = nn.Parameter(torch.randn(positions, width) / width**0.5)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output = nn.Linear(width, vocab)
        mask = nn.Transformer.generate_square_subsequent_mask(positions)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        size = tokens.shape[1]
        hidden = self.embedding(tokens) + self.positions[:size]
        return self.output(self.encoder(hidden, self.mask[:size, :size], is_causal=True))


class Windows(Dataset):
    """Overlapping windows of a text, as (inputs, next bytes)."""

    def __init__(self, text: bytes, size: int):
        self.text, self.size = torch.tensor(list(text)), size

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.size

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = number * self.size
        window = self.text[start : start + self.size + 1]
        return window[:-1], window[1:]


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """(sum of the losses, their number): whatever way a batch is cut, the mean of all is what is trained."""
    tokens, targets = batch
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="auto", help="auto, ddp, zero1, zero2, zero3, JSON, or a file")
    parser.add_argument("--deepspeed_config", help="train by the calls of DeepSpeed with this file")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "fp64", "bf16", "fp16"))
    parser.add_argument("--batch", type=int, default=32, help="rows a step, over all devices")
    parser.add_argument("--micro-batch", type=int, help="rows a device puts through the model at once")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--positions", type=int, default=512)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    model = SimpleTransformer(width=args.width, heads=args.heads, layers=args.layers, positions=args.positions)
    text = Path(__file__).read_bytes()
    data = Windows(text * max(1, 64 * args.positions // len(text)), args.positions)
    if args.deepspeed_config:
        by_deepspeed(args, model, data)
    else:
        by_run(args, model, data)


def by_run(args: argparse.Namespace, model: nn.Module, data: Dataset) -> None:
    run = mw.init()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loader = DataLoader(data, batch_size=args.batch, shuffle=True, generator=torch.Generator().manual_seed(0))
    options = {"plan": args.plan, "precision": args.precision, "micro_batch": args.micro_batch, "clip": 1.0}
    model, optimizer, loader = run.parallelize(model, optimizer, loader, **options)
    done, start = 0, time.perf_counter()
    while done < args.steps:
        for batch in loader:
            loss = run.step(batch, loss_fn)
            done += 1
            run.print(f"step {done}: loss {float(loss):.9f}")
            if done == args.steps:
                break
    run.print(f"{args.steps * args.batch / (time.perf_counter() - start):.2f} samples/s on {run.size} devices")


def by_deepspeed(args: argparse.Namespace, model: nn.Module, data: Dataset) -> None:
    from meshwright import deepspeed  # was: import deepspeed

    engine, _, loader, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(), training_data=data)
    while engine.global_steps < args.steps:
        for tokens, targets in loader:
            logits = engine(tokens)
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            engine.backward(loss)
            engine.step()
            if engine.global_steps == args.steps:
                break


if __name__ == "__main__":
    main()
