"""Text generation without a cache: every token is a full forward pass. Slow, simple, and the oracle of faster ways."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.errors import DataError, Finding

__all__ = ["generate", "pick"]


def pick(
    logits_V: torch.Tensor, generator: torch.Generator, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> int:
    """Draw a token from CPU logits [V], after temperature, then top-k, then top-p, in fp64.

    temperature  0: the largest logit, the first of equals
    top_k        only the k most likely; 0: all
    top_p        only the shortest list of most likely ones whose probabilities sum to at least p; the first always stays
    """
    if temperature == 0.0:
        return int(logits_V.argmax())
    sorted_V, order_V = logits_V.double().sort(descending=True, stable=True)
    sorted_V = (sorted_V - sorted_V[0]) / temperature  # at most 0: a tiny temperature overflows to -inf, which is no chance
    if top_k:
        sorted_V = sorted_V[:top_k]
    probability_V = sorted_V.softmax(0)
    before_V = probability_V.cumsum(0) - probability_V
    kept_V = torch.where(before_V < top_p, probability_V, 0.0)
    kept_V[0] = probability_V[0]
    return int(order_V[torch.multinomial(kept_V, 1, generator=generator)])


def _refuse(model: nn.Module, ids: list[int], max_tokens: int, temperature: float, top_k: int, top_p: float, seed: int) -> None:
    limit = getattr(model, "max_len", None)
    found = []
    if not ids:
        found.append(Finding("prompt", "is empty", "Give at least one token, for instance the start token"))
    if limit is not None and len(ids) > limit:
        found.append(Finding("prompt", f"has {len(ids)} tokens, the model takes {limit}", "Shorten it"))
    for key, value, wrong, fix in (
        ("max_tokens", max_tokens, max_tokens < 0, "Use 0 or more"),
        ("temperature", temperature, not 0 <= temperature < float("inf"), "Use 0 (greedy) or more"),
        ("top_k", top_k, top_k < 0, "Use 0 (all) or more"),
        ("top_p", top_p, not 0 < top_p <= 1, "Use a share above 0, at most 1"),
        ("seed", seed, not 0 <= seed < 2**63, "Use 0 to 2**63 - 1"),
    ):
        if wrong:
            found.append(Finding(key, f"{value} makes no sense", fix))
    if found:
        raise DataError(findings=found)


@torch.no_grad()
def generate(
    model: nn.Module,
    ids: list[int],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    eos: int | None = None,
) -> list[int]:
    """Continue `ids` by at most `max_tokens` tokens; the new ones only, a final `eos` included.

    Ends early after `eos`, and when prompt and answer fill the model's `max_len`. Sampling draws from a CPU generator
    with `seed`, so that equal logits give equal tokens on any device. Raises DataError for an empty or too long prompt
    and for settings out of range.
    """
    _refuse(model, ids, max_tokens, temperature, top_k, top_p, seed)
    device = next(model.parameters()).device
    limit = getattr(model, "max_len", None)
    room = max_tokens if limit is None else min(max_tokens, limit - len(ids))
    generator = torch.Generator().manual_seed(seed)
    new: list[int] = []
    for _ in range(room):
        tokens_BS = torch.tensor([ids + new], dtype=torch.int64, device=device)
        last_BK = torch.tensor([[tokens_BS.shape[1] - 1]], dtype=torch.int64, device=device)
        logits_V = model(tokens_BS, select=last_BK)[0, 0].cpu()
        new.append(pick(logits_V, generator, temperature=temperature, top_k=top_k, top_p=top_p))
        if new[-1] == eos:
            break
    return new
