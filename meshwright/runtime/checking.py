"""`Run.check`: what a model under training does with a batch, told in the same words on every rank."""

from __future__ import annotations

import functools
from typing import Any

from meshwright.distributed.reduce import gather_json, max_scalars
from meshwright.errors import Finding
from meshwright.runtime.training import Training
from meshwright.verify.probe import Call, first_nonfinite, mixes_rows

__all__ = ["findings_of"]


def findings_of(training: Training, batch: Any, call: Call) -> list[Finding]:
    """Of all ranks' batches. Collective: where one rank has to look closer all do, since their forwards may belong together."""
    ranks = training.ranks

    def anywhere(found: bool) -> bool:
        return found if ranks.size == 1 else max_scalars([float(found)], ranks.control)[0] > 0

    with training.cast():
        look = functools.partial(first_nonfinite, training.model, batch, call, anywhere)
        found = [look(), mixes_rows(training.model, batch, call, anywhere)]
    mine = [[each.where, each.what, each.fix] for each in found if each is not None]
    every = [mine] if ranks.size == 1 else gather_json(mine, ranks.control)
    told = dict.fromkeys(tuple(each) for one in every for each in one)
    return [Finding(*each) for each in told]
