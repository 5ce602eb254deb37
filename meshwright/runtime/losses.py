"""What a user's loss function gave, and the weight of it in the step.

With loss sums S and weights W of all micro-batches of all data ranks, the loss of a step is sum(S) / sum(W), for each of
several losses by itself, and their total is what is trained. Where sum(W) is known before the first backward the loss is
divided by it. Where it is not (each micro-batch tells its own weight) it is divided by a guess that all ranks share, and the
gradients are corrected at the end of the step, before norm, clip and update: gradients are linear in the factor.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.distributed.reduce import max_scalars, sum_scalars
from meshwright.distributed.world import Ranks
from meshwright.errors import Finding, UserError
from meshwright.runtime.batches import rows_of

__all__ = ["LossError", "Term", "Window", "terms_of", "weights_of"]

Weight = float | torch.Tensor


class LossError(UserError):
    """A loss that cannot be trained on, or not weighed."""


@dataclass(frozen=True)
class Term:
    """One loss of one micro-batch. value: 0-d, a sum over what `weight` counts. bare: a mean that nobody weighed; weight 1."""

    name: str
    value: torch.Tensor
    weight: Weight
    bare: bool = False


def terms_of(output: Any, weights: Any = None) -> list[Term]:
    """The losses in what `loss_fn` returned: (sum, weight), or a mean with its weight in `weights`, or a bare mean; or a
    list or dict of several. weights: a number, or one for each name of the dict. Raises LossError with what is wrong."""
    if isinstance(output, Mapping):
        named = {str(name): value for name, value in output.items()}
    elif isinstance(output, list):
        named = {str(number): value for number, value in enumerate(output)}
    else:
        named = {"loss": output}
    if not named:
        raise LossError(findings=[Finding("loss", "there is none in what the loss function returned")])
    return [_term(name, value, _weight_for(name, weights)) for name, value in named.items()]


def _weight_for(name: str, weights: Any) -> Weight | None:
    if not isinstance(weights, Mapping):
        return weights
    if name not in weights:
        raise LossError(findings=[Finding(f"loss {name!r}", f"has no weight among {', '.join(map(str, weights))}")])
    return weights[name]


def _term(name: str, value: Any, weight: Weight | None) -> Term:
    where = "loss" if name == "loss" else f"loss {name!r}"
    bare = False
    if isinstance(value, tuple):
        if len(value) != 2 or (isinstance(value[1], torch.Tensor) and value[1].requires_grad):
            fix = "A tuple is (sum, weight); return several losses as a list or a dict"
            raise LossError(findings=[Finding(where, f"is a tuple of {len(value)} that is no (sum, weight)", fix)])
        if weight is not None:
            raise LossError(findings=[Finding(where, "has a weight of its own, and one of weight_fn", "Keep one of them")])
        value, weight = value
    elif weight is None:
        weight, bare = 1.0, True
    elif isinstance(value, torch.Tensor):
        value = value * weight
    _check_value(where, value)
    if isinstance(weight, torch.Tensor):
        weight = weight.detach()
    size = weight.numel() if isinstance(weight, torch.Tensor) else 1
    if size != 1 or not isinstance(weight, int | float | torch.Tensor):
        raise LossError(findings=[Finding(where, f"its weight is no number but {_what(weight)}")])
    return Term(name, value.reshape(()), weight, bare)


def _check_value(where: str, value: Any) -> None:
    fix = "Return (sum, weight): losses.sum(), losses.numel()"
    if not isinstance(value, torch.Tensor):
        raise LossError(findings=[Finding(where, f"is no tensor but {_what(value)}", fix)])
    if value.numel() != 1:
        raise LossError(findings=[Finding(where, f"is no scalar: its shape is {tuple(value.shape)}", fix)])
    if value.is_complex():
        fix = "Return its real part, or its absolute value"
        raise LossError(findings=[Finding(where, f"is complex ({value.dtype}), and has no gradient by itself", fix)])
    if not value.requires_grad:
        what = "does not depend on any parameter: it was detached, or computed under torch.no_grad()"
        raise LossError(findings=[Finding(where, what)])


def _what(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def weights_of(given: Any) -> dict[str, float]:
    """What `weight_fn` returned, as numbers by the name of the loss ("" for all). Raises LossError with what are none."""
    every = {str(name): value for name, value in given.items()} if isinstance(given, Mapping) else {"": given}
    findings = []
    for name, value in every.items():
        one = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
        where = f"weight_fn[{name!r}]" if name else "weight_fn"
        if not one and not isinstance(value, numbers.Real):
            findings.append(
                Finding(where, f"gave no number but {_what(value)}", "Return the weight of the batch, such as its rows")
            )
        elif not _weighs(float(value)):
            findings.append(Finding(where, f"gave {float(value):g}", "A weight is finite, and at least 0"))
    if findings:
        raise LossError(findings=findings)
    return {name: float(value) for name, value in every.items()}


def check_len(batch: Any) -> None:
    """Raises LossError where `len` of a batch is the number of its parts, and that of its rows is another."""
    rows = rows_of(batch)
    if isinstance(batch, list | tuple | Mapping) and rows is not None and rows != len(batch):
        what = f"is len, which counts the {len(batch)} parts of a {type(batch).__name__}, and it has {rows} rows"
        raise LossError(findings=[Finding("weight_fn", what, "Give one that counts rows: lambda batch: len(batch[0])")])


def _weighs(weight: float) -> bool:
    return math.isfinite(weight) and weight >= 0


@dataclass
class Window:
    """The micro-batches of one step, from the first to the update.

    counts: whether this rank's weights count (one rank of those that hold parts of one model). guess: what all ranks divide by
    while the weight is not known; None: agreed on at the first micro-batch. planned: micro-batches that the step will have on
    each rank. known: weights over all ranks, where they are known ahead, by name ("" for all). alone: other ranks do not see
    the losses while micro-batches run, so that there is a guess from the start, and nothing is agreed on before `close`.
    """

    ranks: Ranks
    device: torch.device
    counts: bool
    guess: float | None
    planned: int
    known: dict[str, float] | None = None
    alone: bool = False
    names: tuple[str, ...] = ()
    count: int = 0
    _weights: list[list[Weight]] = field(default_factory=list)
    _sums: list[torch.Tensor] = field(default_factory=list)
    _rows: list[float] = field(default_factory=list)
    _bare: bool = False
    _measured: bool = False
    """Whether `known` was summed at the first micro-batch, the only one that was planned."""

    def add(self, terms: Sequence[Term], *, empty: bool = False, rows: int | None = None) -> torch.Tensor:
        """A micro-batch: what its backward starts from, 0-d, before the loss scale. empty: its rows stand in for none."""
        names = tuple(term.name for term in terms)
        if self.names and names != self.names:
            what = f"its losses are {', '.join(names)}, those of the one before {', '.join(self.names)}"
            raise LossError(findings=[Finding(f"micro-batch {self.count + 1}", what, "Return the same losses every time")])
        self.names, self.count = names, self.count + 1
        if self._measured and self.count > 1:
            what = "the step has more micro-batches than run.parallelize was told, and several losses"
            raise LossError(findings=[Finding("micro-batch", what, "Give run.parallelize(..., accumulate=)")])
        keep = 0.0 if empty else 1.0
        weights = [term.weight * keep for term in terms]
        values = [term.value * keep for term in terms]
        self._bare |= any(term.bare for term in terms)
        if rows is not None or empty:
            self._rows.append(float(rows or 0))
        if self.known is None and len(terms) > 1 and self.planned == 1 and not self.alone:
            self.known, self._measured = dict(zip(names, self._total(weights), strict=True)), True
        divisors = [self.known.get(name, self.known.get("", 0.0)) for name in names] if self.known is not None else None
        if divisors is None:
            divisors = [self._guessed(terms, weights)] * len(terms)
        self._weights.append(weights)
        self._sums.append(torch.stack([value.detach().to(torch.promote_types(value.dtype, torch.float64)) for value in values]))
        scaled = [value * (1.0 / divisor if divisor else 0.0) for value, divisor in zip(values, divisors, strict=True)]
        total = scaled[0]
        for value in scaled[1:]:
            total = total + value
        return total

    def _guessed(self, terms: Sequence[Term], weights: Sequence[Weight]) -> float:
        if len(weights) > 1 and len({float(weight) for weight in weights}) > 1:  # float() waits for the device
            shown = ", ".join(f"{term.name} {float(weight):g}" for term, weight in zip(terms, weights, strict=True))
            fix = "Give run.step(..., weight_fn=) that tells the weight of each from the batch"
            fix += "" if self.alone else ", or one micro-batch a step"
            why = "only the last stage sees them" if self.alone else "the step has several micro-batches"
            what = f"weigh differently ({shown}), and {why}"
            raise LossError(findings=[Finding("losses", what, fix)])
        if self.guess is None:
            self.guess = self._total(weights[:1])[0] * self.planned or 1.0
        return self.guess

    def _total(self, weights: Sequence[Weight]) -> list[float]:
        """Sums over the ranks. Raises LossError on every rank where a weight of any is none."""
        mine = [float(weight) if self.counts else 0.0 for weight in weights]
        told = [weight if _weighs(weight) else math.nan for weight in mine]
        totals = told if self.ranks.size == 1 else sum_scalars(told, self.ranks.control)
        wrong = [(name, weight) for name, weight, total in zip(self.names, mine, totals, strict=False) if math.isnan(total)]
        if wrong:
            fix = "A weight is finite, and at least 0"
            where = [("loss" if name == "loss" else f"loss {name!r}", weight) for name, weight in wrong]
            said = [(f"weighs {w:g}" if not _weighs(w) else "weighs nothing that counts on another rank") for _, w in where]
            raise LossError(findings=[Finding(name, what, fix) for (name, _), what in zip(where, said, strict=True)])
        return totals

    def told(self) -> dict[str, Any]:
        """JSON values: what was counted, for ranks that do not see the losses."""
        weights = [[float(weight) for weight in each] for each in self._weights]
        return {"names": list(self.names), "weights": weights, "rows": self._rows, "bare": self._bare}

    def follow(self, told: Mapping[str, Any]) -> None:
        """Takes what another rank has `told`; the sums stay there."""
        self.names, self._bare = tuple(told["names"]), told["bare"]
        self._weights, self._rows = told["weights"], told["rows"]
        self._sums = [torch.zeros(len(self.names), dtype=torch.float64, device=self.device)]

    def close(self) -> tuple[float, dict[str, float]]:
        """(what the gradients are to be divided by, weight of each loss over all ranks). Collective. Raises LossError where
        bare means have unequal weights."""
        self._check_bare()
        if self.known is not None:
            totals = {name: self.known.get(name, self.known.get("", 0.0)) for name in self.names}
            return 1.0, totals
        columns = [[float(weight) for weight in column] for column in zip(*self._weights, strict=True)]
        sums = [next((weight for weight in column if not _weighs(weight)), sum(column)) for column in columns]
        totals = dict(zip(self.names, self._total(sums), strict=True))
        weight = next(iter(totals.values()))
        assert self.guess is not None  # `add` has agreed on one
        return (weight / self.guess if weight else 1.0), totals

    def _check_bare(self) -> None:
        if not self._bare:
            return
        rows = self._rows or [-1.0]
        least, most = min(rows), max(rows)
        if self.ranks.size > 1:
            most, least = max_scalars([most, -least], self.ranks.control)
            least = -least
        if least != most:
            what = f"is a mean over micro-batches of {least:g} to {most:g} rows, which do not weigh the same"
            fix = "Return (sum, weight), or give weight_fn=lambda batch: rows of it"
            raise LossError(findings=[Finding("loss", what, fix)])

    def sums(self) -> torch.Tensor:
        """Sums of each loss on this rank: fp64 [losses]."""
        return torch.stack(self._sums).sum(0)
