"""Draws the next token of every row at once, on the device of the logits.

A row's draw is a function of its own logits, settings, seed and position: never of the rows beside it. The only random number
is one of [0, 1) a token, from a digest of seed and position, and the token is the first whose cumulated probability is larger.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import NamedTuple

import torch

from meshwright.distributed import device as devices
from meshwright.kernels.fused import best
from meshwright.serve.request import Logprob
from meshwright.serve.sampling import SamplingParams

__all__ = ["Drawing", "Drawn", "Row", "Scores", "begin", "begin_greedy", "draw", "scores_of", "uniform"]


@dataclass(frozen=True)
class Row:
    """What a draw depends on beside the logits. prompt, answer: for penalties alone. banned: tokens that may not come now.
    position: of the token that is drawn, in prompt and answer."""

    params: SamplingParams
    seed: int
    prompt: Listed[int] = ()
    answer: Listed[int] = ()
    banned: Listed[int] = ()
    position: int = 0


class Scores(NamedTuple):
    """What a model says of its next tokens. logits [R, V]. best: int64 [2, R], the token of the largest logit (the first of
    equals), and 1 where that logit is no finite number."""

    logits: torch.Tensor
    best: torch.Tensor


def scores_of(logits: torch.Tensor) -> Scores:
    return Scores(logits, best(logits))


@dataclass(frozen=True)
class Drawn:
    """One of each row. broken: the logits are no numbers, and the token means nothing."""

    tokens: Listed[int]
    logprobs: Listed[Logprob | None]
    broken: Listed[bool]


def uniform(seed: int, position: int) -> float:
    """A number of [0, 1) with 53 random bits."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + position.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Drawing(NamedTuple):
    """Tokens that the device is about to know, int64 [R]; `wait` until the host has them too, and all that was asked for."""

    tokens: torch.Tensor
    wait: Callable[[], Drawn]


def draw(logits: torch.Tensor, rows: Listed[Row]) -> Drawn:
    """A token of each row of logits [R, V]."""
    return begin(scores_of(logits), rows).wait()


def begin_greedy(scores: Scores) -> Drawing:
    """The largest logit of every row, and nothing beside it."""
    arrived = devices.fetch(scores.best)

    def wait() -> Drawn:
        tokens, broken = arrived()
        return Drawn(tokens, [None] * len(tokens), list(map(bool, broken)))

    return Drawing(scores.best[0], wait)


@torch.inference_mode()
def begin(scores: Scores, rows: Listed[Row]) -> Drawing:
    """A token of each row: bias and bans, then penalties, temperature, top_k, top_p, min_p, in this order; probabilities in
    fp64. All is launched on the device, and the host does not wait."""
    logits = scores.logits.to(torch.promote_types(scores.logits.dtype, torch.float32))
    shaped = _shape(logits, rows)
    tokens = scores.best[0].clone() if shaped is logits else shaped.argmax(1)
    for filtered in (False, True):
        chosen = [r for r, row in enumerate(rows) if not row.params.greedy and row.params.filtered is filtered]
        if chosen:
            index = torch.tensor(chosen, device=logits.device)
            picked = [rows[r] for r in chosen]
            tokens[index] = (_filtered if filtered else _plain)(_scaled(shaped[index], picked), picked)
    arrived, logprobs = devices.fetch(torch.stack((tokens, scores.best[1]))), _logprobs(logits, tokens, rows)

    def wait() -> Drawn:
        picked, broken = arrived()
        return Drawn(picked, logprobs(picked), list(map(bool, broken)))

    return Drawing(tokens, wait)


def _shape(logits: torch.Tensor, rows: Listed[Row]) -> torch.Tensor:
    """Logits after bias, bans and penalties; a copy where there are some."""
    if not any(row.params.logit_bias or row.banned or row.params.penalised for row in rows):
        return logits
    logits = logits.clone()
    vocab = logits.shape[1]
    for r, row in enumerate(rows):
        biases = {token: bias for token, bias in row.params.logit_bias.items() if token < vocab}
        if biases:
            index = torch.tensor(list(biases), device=logits.device)
            logits[r, index] += torch.tensor(list(biases.values()), dtype=logits.dtype, device=logits.device)
        banned = [token for token in row.banned if token < vocab]
        if banned:
            logits[r, torch.tensor(banned, device=logits.device)] = -torch.inf
        if row.params.penalised:
            _penalise(logits[r], row)
    return logits


def _penalise(logits_V: torch.Tensor, row: Row) -> None:
    """In place. The repetition penalty is for prompt and answer, the others are for the answer."""
    params, device = row.params, logits_V.device
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt, *row.answer}), device=device)
        values = logits_V[seen]
        logits_V[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if row.answer:
        answer = torch.tensor(list(row.answer), device=device)
        counts_V = torch.zeros_like(logits_V).index_add_(0, answer, torch.ones_like(answer, dtype=logits_V.dtype))
        logits_V -= params.frequency_penalty * counts_V + params.presence_penalty * (counts_V > 0)


def _scaled(shaped: torch.Tensor, rows: Listed[Row]) -> torch.Tensor:
    """fp64 [R, V], 0 the largest: a tiny temperature makes -inf of the others, which is no chance."""
    temperature = torch.tensor([[row.params.temperature] for row in rows], dtype=torch.float64, device=shaped.device)
    return (shaped.double() - shaped.double().amax(1, keepdim=True)) / temperature


def _first_beyond(p: torch.Tensor, rows: Listed[Row]) -> torch.Tensor:
    """Of p [R, V] >= 0, any sum: the index where the cumulated share first exceeds the row's random number, [R]."""
    numbers = [uniform(row.seed, row.position) for row in rows]
    sums = p.cumsum(1)
    targets = sums[:, -1:] * torch.tensor(numbers, dtype=p.dtype, device=p.device)[:, None]
    return torch.searchsorted(sums, targets, right=True)[:, 0].clamp_(max=p.shape[1] - 1)


def _plain(scaled: torch.Tensor, rows: Listed[Row]) -> torch.Tensor:
    return _first_beyond(scaled.exp(), rows)


def _filtered(scaled: torch.Tensor, rows: Listed[Row]) -> torch.Tensor:
    values, order = scaled.sort(dim=1, descending=True, stable=True)

    def column(numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=values.dtype, device=values.device)[:, None]

    place = torch.arange(values.shape[1], device=values.device)
    kept = place < column([float(row.params.top_k or values.shape[1]) for row in rows])
    p = values.masked_fill(~kept, -torch.inf).softmax(1)
    kept = (p.cumsum(1) - p < column([row.params.top_p for row in rows])) & (
        p >= p[:, :1] * column([row.params.min_p for row in rows])
    )
    kept[:, 0] = True
    return order.gather(1, _first_beyond(p * kept, rows)[:, None])[:, 0]


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, rows: Listed[Row]) -> Callable[[Listed[int]], list[Logprob | None]]:
    """What waits for them, once the tokens are known."""
    asked = [r for r, row in enumerate(rows) if row.params.logprobs is not None]
    if not asked:
        return lambda picked: [None] * len(picked)
    index = torch.tensor(asked, device=logits.device)
    shares = logits[index].log_softmax(1)
    most = min(max(rows[r].params.logprobs or 0 for r in asked), logits.shape[1])
    top = shares.topk(most, dim=1)
    values = devices.fetch(torch.cat((shares.gather(1, tokens[index][:, None]), top.values), 1))
    ids = devices.fetch(top.indices)

    def wait(picked: Listed[int]) -> list[Logprob | None]:
        found: list[Logprob | None] = [None] * len(picked)
        for r, (own, *likely), names in zip(asked, values(), ids(), strict=True):
            count = rows[r].params.logprobs or 0
            found[r] = Logprob(picked[r], own, tuple(zip(names[:count], likely[:count], strict=True)))
        return found

    return wait
