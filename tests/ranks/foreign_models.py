"""Modules as other people write them, their rows and their loss sums; nothing of meshwright is in them.

A `Kind` makes a module, the rows of a step as a dictionary of tensors that all have the rows first, and a loss that is a sum
over rows. `oracle` trains it in plain torch: one process, the whole batch at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

ROWS = 8
Rows = dict[str, torch.Tensor]
LR, CLIP, DECAY, EPS, STEPS = 3e-3, 0.3, 0.1, 1e-6, 3


@dataclass(frozen=True)
class Kind:
    make: Callable[[], nn.Module]
    rows: Callable[[torch.Generator], Rows]
    loss: Callable[[nn.Module, Rows], torch.Tensor]
    accumulates: bool = True
    """Whether a batch in two micro-steps is the same batch: not with BatchNorm."""


def made(kind: Kind) -> nn.Module:
    torch.manual_seed(3)
    return kind.make().double()


def rows_of(kind: Kind, step: int) -> Rows:
    return kind.rows(torch.Generator().manual_seed(50 + step))


@dataclass
class Trained:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the first step."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


def decayed(name: str) -> bool:
    return not any(word in name.lower() for word in ("bias", "norm", "embedding"))


def oracle(kind: Kind) -> Trained:
    """An unused parameter has a gradient of zeros."""
    model, out = made(kind), Trained()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for n, p in trained.items() if decayed(n)], "weight_decay": DECAY},
        {"params": [p for n, p in trained.items() if not decayed(n)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = kind.loss(model, rows_of(kind, step)) / ROWS
        loss.backward()
        for p in trained.values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        if step == 0:
            out.gradients = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
        out.losses.append(float(loss.detach()))
        out.norms.append(float(nn.utils.clip_grad_norm_(list(trained.values()), CLIP)))
        optimizer.step()
    out.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    out.buffers = {name: b.clone() for name, b in model.named_buffers()}
    return out


# ---- text in pictures: convolution, recurrence, CTC ----------------------------------------------------------------------


class CRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU()
        )
        self.rnn = nn.LSTM(6 * 4, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.letters = nn.Linear(10, 7)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        x = self.features(picture)  # rows, channels, height 4, width 8
        x, _ = self.rnn(x.permute(0, 3, 1, 2).flatten(2))
        return F.log_softmax(self.letters(x), dim=-1)


def crnn_rows(generator: torch.Generator) -> Rows:
    return {
        "picture": torch.randn(ROWS, 1, 8, 16, generator=generator, dtype=torch.float64),
        "letters": torch.randint(1, 7, (ROWS, 4), generator=generator),
        "lengths": torch.randint(1, 5, (ROWS,), generator=generator),
    }


def crnn_loss(model: nn.Module, rows: Rows) -> torch.Tensor:
    scores = model(rows["picture"]).transpose(0, 1)
    length = torch.full((scores.shape[1],), scores.shape[0])
    return F.ctc_loss(scores, rows["letters"], length, rows["lengths"], reduction="sum")


# ---- recommendation: sparse gradients ------------------------------------------------------------------------------------


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(40, 6, mode="mean", sparse=True)
        self.users = nn.Embedding(30, 6, sparse=True)
        self.tower = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU())
        self.score = nn.Linear(10, 1)

    def forward(self, user: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return self.score(self.tower(torch.cat((self.items(seen), self.users(user)), dim=-1))).squeeze(-1)


def recommender_rows(generator: torch.Generator) -> Rows:
    return {
        "user": torch.randint(0, 30, (ROWS,), generator=generator),
        "seen": torch.randint(0, 40, (ROWS, 5), generator=generator),
        "liked": torch.randint(0, 2, (ROWS,), generator=generator).double(),
    }


def recommender_loss(model: nn.Module, rows: Rows) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(rows["user"], rows["seen"]), rows["liked"], reduction="sum")


# ---- signals: one-dimensional convolutions with BatchNorm ----------------------------------------------------------------


class Signals(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def stage(before: int, after: int) -> nn.Module:
            return nn.Sequential(nn.Conv1d(before, after, 3, padding=1, bias=False), nn.BatchNorm1d(after), nn.ReLU())

        self.stem = stage(2, 6)
        self.stages = nn.ModuleList(stage(6, 6) for _ in range(3))
        self.plain = nn.BatchNorm1d(6, affine=False, momentum=None)
        self.classes = nn.Linear(6, 4)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        x = self.stem(signal + 30.0)  # a mean far from 0 costs digits where variances are not joined with care
        for stage in self.stages:
            x = x + stage(x)
        return self.classes(self.plain(x[..., 0]))


def signals_rows(generator: torch.Generator) -> Rows:
    return {
        "signal": torch.randn(ROWS, 2, 12, generator=generator, dtype=torch.float64),
        "label": torch.randint(0, 4, (ROWS,), generator=generator),
    }


def signals_loss(model: nn.Module, rows: Rows) -> torch.Tensor:
    return F.cross_entropy(model(rows["signal"]), rows["label"], reduction="sum")


# ---- everything that is unusual at once ----------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """x @ weight, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.t(), x.t() @ gradients[0]


class Pair(NamedTuple):
    main: torch.Tensor
    beside: dict[str, list[torch.Tensor]]


@dataclass
class Answer:
    score: torch.Tensor
    aux: torch.Tensor


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 6)
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)
        self.extra = nn.Linear(6, 6)
        self.register_buffer("shift", torch.linspace(-1, 1, 6))
        self.aux: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, flagged: torch.Tensor) -> Pair:
        hidden = torch.tanh(self.up(x + self.shift))
        x = x + self.down(hidden) + Doubled.apply(x, self.weight)
        if bool(flagged.any()):  # ranks without such rows do not use it
            x = x + self.extra(x) * flagged[:, None]
        self.aux = (self.up.weight.square().mean() * x.square().mean(-1)).sum()  # a gradient that comes by another way
        return Pair(x, {"hidden": [hidden.mean(-1)]})


class Odd(nn.Module):
    """Unused, frozen, tied and doubly used parameters; blocks in a nested list, one called twice, one weight used without its
    block; a nested output."""

    def __init__(self, branching: bool = False) -> None:
        super().__init__()
        self.branching = branching
        self.inner = nn.ModuleDict({"body": nn.ModuleList(Unit() for _ in range(3))})
        self.rare = nn.ModuleList(Unit() for _ in range(1))
        self.scale = nn.Parameter(torch.ones(()))
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.unused = nn.Linear(6, 5)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: dict[str, torch.Tensor]) -> Answer:
        body = self.inner["body"]
        x, flagged = self.frozen(self.first(inputs["x"])), inputs["flagged"]
        aux = x.new_zeros(())
        for unit in (body[0], body[1], body[0], body[2]):
            choosy = self.branching and unit is body[1]
            if choosy and not bool(flagged.any()):
                continue  # on some ranks only
            out = unit(x, flagged)
            mixed = out.main * self.scale + out.beside["hidden"][0][:, None]
            x = torch.where(flagged[:, None], mixed, x) if choosy else mixed
            aux = aux if choosy else aux + unit.aux
        x = F.linear(x, body[2].down.weight.t(), body[2].up.bias)[:, :6] + self.last(x)
        return Answer(x.square().mean(-1), aux * 0.1)


def odd_rows(generator: torch.Generator) -> Rows:
    flagged = torch.zeros(ROWS, dtype=torch.bool)
    flagged[:3] = True
    return {"x": torch.randn(ROWS, 6, generator=generator, dtype=torch.float64), "flagged": flagged}


def odd_loss(model: nn.Module, rows: Rows) -> torch.Tensor:
    answer = model(rows)
    return answer.score.sum() + answer.aux


class Side(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.aux: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aux = torch.tanh(self.inner(torch.sin(self.inner(x)))).square().sum(-1)
        return x + 1.0


class Aside(nn.Module):
    """The outputs of its blocks have no gradient: all of it comes by what they leave behind."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = nn.ModuleList(Side() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for side in self.sides:
            x = side(x)
        return sum(side.aux for side in self.sides).sum()


# ---- language -------------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.transformer = nn.TransformerEncoder(layer, 3)
        self.output = nn.Linear(8, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.transformer(self.embedding(tokens)))


def token_rows(generator: torch.Generator) -> Rows:
    return {
        "tokens": torch.randint(2, 17, (ROWS, 7), generator=generator),
        "labels": torch.randint(0, 3, (ROWS, 7), generator=generator),
    }


def token_loss(model: nn.Module, rows: Rows) -> torch.Tensor:
    logits = model(rows["tokens"])
    logits = getattr(logits, "logits", logits)
    labels = rows["labels"] if logits.dim() == 3 else rows["labels"][:, 0]
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


SIZES: dict[str, Any] = {
    "vocab_size": 17,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
}
ENCODER = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"vocab_size": 17, "n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GROUPED = {**SIZES, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}


def hugging_face(model: str, config: str, **numbers: Any) -> Kind:
    return Kind(functools.partial(_transformer, model, config, numbers), token_rows, token_loss)


def _transformer(model: str, config: str, numbers: dict[str, Any]) -> nn.Module:
    import transformers

    return in_full_precision(getattr(transformers, model)(getattr(transformers, config)(**numbers)))


def in_full_precision(model: nn.Module) -> nn.Module:
    """Their RMSNorm rounds to fp32, and rounding at a border depends on the number of rows; torch's does not."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm") and not isinstance(child, nn.RMSNorm):
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model


KINDS: dict[str, Kind] = {
    "crnn": Kind(CRNN, crnn_rows, crnn_loss),
    "recommender": Kind(Recommender, recommender_rows, recommender_loss),
    "signals": Kind(Signals, signals_rows, signals_loss, accumulates=False),
    "odd": Kind(Odd, odd_rows, odd_loss),
    "branching": Kind(functools.partial(Odd, True), odd_rows, odd_loss),
    "aside": Kind(Aside, odd_rows, lambda model, rows: model(rows["x"])),
    "encoder": Kind(Plain, token_rows, token_loss),
    "gpt2": hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT2),
    "llama": hugging_face("LlamaForCausalLM", "LlamaConfig", **GROUPED),
    "qwen2": hugging_face("Qwen2ForCausalLM", "Qwen2Config", **GROUPED),
    "bert": hugging_face("BertForMaskedLM", "BertConfig", **ENCODER),
    "classifier": hugging_face("BertForSequenceClassification", "BertConfig", **ENCODER, num_labels=3),
    "roberta": hugging_face("RobertaForMaskedLM", "RobertaConfig", **{**ENCODER, "max_position_embeddings": 20}),
}
