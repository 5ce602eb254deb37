"""The repeated blocks of a model: what ZeRO-3 gathers one after another, recompute runs again and compilation compiles.

Our models, and others that name them so, have them in `model.layers`. In any other module they are looked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from meshwright.parallel.buffers import Unit

__all__ = ["Blocks", "find_blocks"]


@dataclass(frozen=True, eq=False)
class Blocks:
    """name: of the list in the model (`transformer.h`); None where there is none. keys, modules: of its entries, in order; an
    entry is None where another stage of a pipeline has it."""

    name: str | None = None
    keys: tuple[str, ...] = ()
    modules: tuple[nn.Module | None, ...] = ()

    @property
    def declared(self) -> bool:
        """Whether the model says itself which they are."""
        return self.name == "layers"

    @property
    def here(self) -> list[nn.Module]:
        return [module for module in self.modules if module is not None]

    def unit(self, name: str) -> Unit:
        """(0, place in the list) of a parameter of the model; (0, -1) outside of the blocks."""
        if self.name is not None and name.startswith(prefix := f"{self.name}." if self.name else ""):
            key, dot, _ = name[len(prefix) :].partition(".")
            if dot and key in self.keys:
                return 0, self.keys.index(key)
        return 0, -1


def find_blocks(model: nn.Module) -> Blocks:
    """`model.layers` where that is an nn.ModuleList. Else, of every nn.ModuleList and nn.Sequential in which a class with
    parameters occurs at least twice, the one whose entries of that class have most parameters.

    A model with `gather_whole = True` says that it has none.
    """
    layers = getattr(model, "layers", None)
    if getattr(model, "gather_whole", False):
        return Blocks()
    if isinstance(layers, nn.ModuleList):
        return Blocks("layers", tuple(str(number) for number in range(len(layers))), tuple(layers))
    best, found = 0, Blocks()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            size = _repeated(module)
            if size > best:
                best, found = size, Blocks(name, *zip(*_entries(module), strict=True))
    return found


def _entries(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """With parameters; a list within a list is never called, so that its entries are no blocks."""
    for key, entry in module.named_children():
        if not isinstance(entry, nn.ModuleList | nn.ModuleDict | nn.ParameterList) and _size(entry):
            yield key, entry


def _repeated(module: nn.Module) -> int:
    """Parameters of the entries of the class that has most of them, if there are several of it."""
    sizes: Counter[type] = Counter()
    counts: Counter[type] = Counter()
    for _, entry in _entries(module):
        sizes[type(entry)] += _size(entry)
        counts[type(entry)] += 1
    return max((size for kind, size in sizes.items() if counts[kind] > 1), default=0)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
