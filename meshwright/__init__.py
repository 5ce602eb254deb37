"""Meshwright: a model, a corpus and a machine in; a trained, proven and served model out.

In a script of your own:

    import meshwright as mw

    run = mw.init()
    model, optimizer, loader = run.parallelize(model, optimizer, loader)

`from meshwright import deepspeed` has what a script for DeepSpeed calls. Importing the package loads none of them, nor torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

__all__ = ["Run", "__version__", "deepspeed", "init"]

_FROM = {"init": "meshwright.runtime.init", "Run": "meshwright.runtime.run", "deepspeed": "meshwright.runtime.deepspeed"}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    module = importlib.import_module(_FROM[name])
    return module if name == "deepspeed" else getattr(module, name)
