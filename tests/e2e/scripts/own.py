"""A user's script: workers, a seed of its own on every rank, and a mistake of the kind that the first argument names."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw

run = mw.init()
torch.manual_seed(run.rank)
model = nn.Linear(3, 1)
x = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(x), batch_size=4, num_workers=2)
model, optimizer, loader = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
mistake = sys.argv[1] if len(sys.argv) > 1 else ""
for (rows,) in loader:
    loss = run.step([rows], lambda m, b: (m(b[0]).square().sum(), len(b[0])))
    if mistake == "traceback" and run.rank == run.size - 1:
        raise ZeroDivisionError("the user's own")
    if mistake == "config":
        run.parallelize(nn.Linear(1, 1), None)
    if mistake == "exit":
        sys.exit(7)
run.print(f"rows {x.shape[0]} loss {float(loss):.6f} of {run.size} source {run.ranks.world.source} {os.getpid()}")
