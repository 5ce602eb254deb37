"""Generation without a cache: greedy, sampling, limits and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.config.schema import ModelConfig
from meshwright.errors import DataError
from meshwright.models import build, generate, initialize
from meshwright.models.generate import pick


class Next(nn.Module):
    """Says token + 1 (modulo 10), with a little of everything else."""

    def __init__(self, max_len: int | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        if max_len is not None:
            self.max_len = max_len

    def forward(self, tokens, *, select):
        logits = torch.arange(10.0).expand(*tokens.shape, 10) * 0.01
        logits = logits.scatter(2, ((tokens + 1) % 10)[..., None], 5.0)
        return logits.gather(1, select[..., None].expand(-1, -1, 10))


def test_greedy_and_eos():
    assert generate(Next(), [3], max_tokens=4) == [4, 5, 6, 7]
    assert generate(Next(), [3], max_tokens=9, eos=6) == [4, 5, 6]
    assert generate(Next(), [3], max_tokens=0) == []


def test_max_len_ends_it():
    assert generate(Next(6), [1, 2, 3], max_tokens=9) == [4, 5, 6]
    assert generate(Next(3), [1, 2, 3], max_tokens=9) == []
    with pytest.raises(DataError, match="has 4 tokens, the model takes 3"):
        generate(Next(3), [1, 2, 3, 4], max_tokens=1)


def test_refusals_come_all_at_once():
    with pytest.raises(DataError) as raised:
        generate(Next(), [], max_tokens=-1, temperature=-1.0, top_k=-2, top_p=0.0, seed=2**63)
    assert [f.where for f in raised.value.findings] == ["prompt", "max_tokens", "temperature", "top_k", "top_p", "seed"]


def shares(logits: list[float], draws: int = 4000, **settings) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    ids = [pick(torch.tensor(logits), g, **settings) for _ in range(draws)]
    return torch.bincount(torch.tensor(ids), minlength=len(logits)) / draws


def test_sampling_follows_the_probabilities():
    # Red with: logits multiplied by the temperature, top_p compared after the sum. Four standard errors: 0.032.
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().tolist()
    assert (shares(logits) - torch.tensor([0.1, 0.2, 0.3, 0.4])).abs().max() < 0.032
    cold = torch.tensor([0.01, 0.04, 0.09, 0.16]) / 0.3
    assert (shares(logits, temperature=0.5) - cold).abs().max() < 0.032
    assert (shares(logits, top_k=2) - torch.tensor([0, 0, 3 / 7, 4 / 7])).abs().max() < 0.032
    assert (shares(logits, top_p=0.6) - torch.tensor([0, 0, 3 / 7, 4 / 7])).abs().max() < 0.032
    assert shares(logits, top_p=0.01).tolist() == [0, 0, 0, 1]
    assert shares([1.0, 1.0, 0.0], draws=5, temperature=0.0).tolist() == [1, 0, 0]
    assert shares([1.0, 2.0, -3.0], draws=5, temperature=1e-320).tolist() == [
        0,
        1,
        0,
    ]  # red where it divides first: not a number


def test_a_seed_gives_the_same_text_and_the_model_is_left_alone():
    config = ModelConfig(layers=2, width=32, heads=4, ffn=32, vocab=50, max_len=64, init_std=0.2)
    model = build(config, "lm")
    initialize(model, 0, "cpu")
    texts = [generate(model, [1, 2], max_tokens=20, temperature=1.0, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2] and len(texts[0]) == 20
    greedy = generate(model, [1, 2], max_tokens=5)
    logits = model(torch.tensor([[1, 2, *greedy]]))
    assert logits[0, 1:-1].argmax(-1).tolist() == greedy
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
