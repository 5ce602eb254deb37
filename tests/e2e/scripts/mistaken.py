"""Asks for a device that is not there, calls things in the wrong order, or has a loss that is not finite."""

import sys

import torch
from torch import nn

import meshwright as mw

run = mw.init("abacus" if sys.argv[1] == "device" else "cpu")
model = nn.Linear(3, 1)
model, optimizer, _ = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
if sys.argv[1] == "order":
    run.update()
if sys.argv[1] == "plain":
    model(torch.ones(2, 3)).sum().backward()
run.step(torch.ones(2, 3), lambda model, batch: (model(batch).sum() * float("nan"), 2))
