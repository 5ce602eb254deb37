"""Transformers of others as ours: the same logits and gradients, the weights back bit for bit, and every reason against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.errors import LayoutError
from meshwright.models import LossParts
from meshwright.models.adopt import Adopted, adopt
from meshwright.spec.labels import IGNORE
from tests.ranks.foreign_models import KINDS, made
from tests.unit.hf_models import MODELS


class Encoder(nn.Module):
    """An embedding, nn.TransformerEncoder and an output layer, in the variants that people write."""

    def __init__(
        self,
        *,
        batch_first: bool = True,
        scale: float = 1.0,
        causal: bool = False,
        positions: bool = False,
        classes: int = 0,
        tied: bool = False,
        more: bool = False,
        **layer: Any,
    ) -> None:
        super().__init__()
        self.scale, self.causal, self.first_only = scale, causal, bool(classes)
        self.where = nn.Embedding(16, 8) if positions else None
        self.what = nn.Embedding(20, 8, **({"padding_idx": 0} if more else {}))
        options = {"dropout": 0.0, **layer, "batch_first": batch_first}
        made = nn.TransformerEncoderLayer(8, 2, 16, **options)
        norm = nn.LayerNorm(8) if options.get("norm_first") else None
        self.stack = nn.TransformerEncoder(made, 2, norm=norm, enable_nested_tensor=False)
        self.out = nn.Linear(8, classes or 20, bias=not tied)
        self.mixer = nn.Conv1d(8, 8, 1) if more else None
        if tied:
            self.out.weight = self.what.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.what(tokens) * self.scale
        if self.where is not None:
            x = x + self.where(torch.arange(tokens.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype) if self.causal else None
        x = self.stack(x, mask=mask, is_causal=self.causal)
        return self.out(x[:, 0] if self.first_only else x)


def varied(**options: Any) -> Encoder:
    torch.manual_seed(2)
    model = Encoder(**options).double()
    with torch.no_grad():  # biases and norms away from 0 and 1; nn.TransformerEncoder starts with layers that are all alike
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def tokens_of(adopted: Adopted) -> torch.Tensor:
    return torch.randint(3, adopted.config.vocab, (4, 7), generator=torch.Generator().manual_seed(5))


VARIANTS: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm": {"norm_first": True, "activation": "gelu"},
    "causal": {"causal": True},
    "positions": {"positions": True, "activation": nn.GELU(approximate="tanh")},
    "tied": {"tied": True},
    "first position": {"classes": 3},
}


# Mutations, each red: queries and keys swapped; norm1 and norm2 swapped; the stacked rows taken as one run; no final norm.
@pytest.mark.parametrize("name", VARIANTS)
def test_a_plain_encoder_becomes_ours_with_its_gradients(name: str) -> None:
    theirs = varied(**VARIANTS[name])
    adopted = adopt(theirs)
    tokens = tokens_of(adopted)
    expected, ours = theirs(tokens), adopted.model(tokens)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    expected.square().sum().backward()
    ours.square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in theirs.named_parameters()}
    adopted.give_back({name: p.grad for name, p in adopted.model.named_parameters()})  # gradients lie as weights do
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(parameter, wanted[name], rtol=0, atol=1e-11 * float(wanted[name].abs().max()))


@pytest.mark.parametrize("name", ["gpt2", "bert", "classifier", "roberta", "encoder"])
def test_of_families_that_compute_in_full_precision_logits_are_the_same(name: str) -> None:
    theirs = made(KINDS[name])
    adopted = adopt(theirs)
    tokens = torch.randint(2, 17, (3, 6), generator=torch.Generator().manual_seed(1))
    given = theirs(tokens)
    torch.testing.assert_close(adopted.model(tokens), getattr(given, "logits", given), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["llama-tied", "qwen2-window", "mistral-window", "gpt2-untied", "bert-untied"])
def test_weights_come_back_bit_for_bit(name: str) -> None:
    theirs = MODELS[name]()
    before = {name: value.clone() for name, value in theirs.state_dict().items()}
    adopted = adopt(theirs)
    assert adopted.model.training == theirs.training
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()
    adopted.give_back()
    used = {piece.theirs for piece in adopted.weights.pieces}
    assert used <= set(before) and len(used) > 5
    assert all(torch.equal(theirs.state_dict()[name], before[name]) for name in used)


def test_a_batch_of_transformers_gives_their_loss() -> None:
    theirs = made(KINDS["gpt2"])
    adopted = adopt(theirs)
    generator = torch.Generator().manual_seed(3)
    batch = {"input_ids": torch.randint(2, 17, (3, 6), generator=generator), "attention_mask": torch.ones(3, 6)}
    batch["attention_mask"][1, 4:] = 0
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORE)
    parts = adopted.model(**adopted.inputs(batch))
    assert isinstance(parts, LossParts)
    logits = theirs(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(parts.loss_sum, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_first": False}, ["batch_first=False", "attend across the rows"]),
        ({"scale": 3.0}, ["logits differ by", "does more, or other things"]),
        ({"more": True}, ["Encoder.what: has padding_idx 0", "Encoder.mixer.weight: of Conv1d has no place in ours"]),
        ({"activation": F.silu}, ["Encoder.activation", "relu and gelu"]),
        ({"bias": False}, ["Encoder.norm1: has no bias"]),
    ],
)
def test_a_plain_encoder_that_is_another_thing_is_refused(options: dict[str, Any], says: list[str]) -> None:
    theirs = varied(**options)
    before = {name: value.clone() for name, value in theirs.state_dict().items()}
    with pytest.raises(LayoutError) as raised:
        adopt(theirs)
    assert all(words in str(raised.value) for words in says), raised.value
    assert theirs.training and all(torch.equal(theirs.state_dict()[name], before[name]) for name in before)


def test_what_we_have_no_model_for_says_so() -> None:
    import transformers

    small = {"vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    distil = transformers.DistilBertForMaskedLM(
        transformers.DistilBertConfig(vocab_size=17, dim=8, n_layers=1, n_heads=2, hidden_dim=12)
    )
    tagger = transformers.BertForTokenClassification(transformers.BertConfig(**small))
    cases = [
        (distil, "is of family 'distilbert', which is not one of ours"),
        (tagger, "BertForTokenClassification: has a head that is not one of ours"),
        (KINDS["crnn"].make(), "has 0 nn.TransformerEncoder"),
    ]
    for module, says in cases:
        with pytest.raises(LayoutError, match=says):
            adopt(module)
    frozen = made(KINDS["gpt2"])
    frozen.transformer.wte.weight.requires_grad_(False)
    with pytest.raises(LayoutError, match="parameters are frozen"):
        adopt(frozen)


def test_what_training_does_otherwise_is_noted() -> None:
    notes = " ".join(adopt(varied(dropout=0.1)).notes)
    assert "inside of the feed-forward layer" in notes and "dropout_key" in notes
