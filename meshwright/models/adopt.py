"""Somebody else's transformer as one of ours, with its weights, and back: what tensor and pipeline parallelism then split.

    adopted = adopt(module)         # transformers' decoders and encoders, or Embedding + nn.TransformerEncoder + Linear
    engine = parallelize(adopted.model, ...)    # any layout
    ...
    adopted.give_back(weights)                # into `module`, e.g. from parallel.whole.whole_weights(engine)

That both compute the same is not taken on trust: they are run on the same tokens, and a module that differs is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from meshwright.config.schema import ModelConfig
from meshwright.errors import CheckpointError, ConfigError, Finding, LayoutError
from meshwright.models.adopt_encoder import Guess, guesses
from meshwright.models.files import fill_model
from meshwright.models.hf_config import from_hf
from meshwright.models.hf_families import FAMILIES
from meshwright.models.hf_weights import WeightMap, weight_map
from meshwright.models.registry import build
from meshwright.spec.labels import IGNORE
from meshwright.spec.parameters import Table

__all__ = ["Adopted", "adopt"]

Call = Callable[[nn.Module, torch.Tensor], Any]
"""(module, int64 tokens [rows, positions]) to its logits, or to something that has them as `logits`."""
CLOSE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference of logits over the largest logit that is taken for rounding; some families compute norms in fp32."""


@dataclass(frozen=True, eq=False)
class Adopted:
    """model: a Decoder or Encoder with the weights of `origin`, on its device and in its dtype. notes: what training will do
    otherwise than the origin would, one line each."""

    model: nn.Module
    config: ModelConfig
    task: str
    origin: nn.Module
    weights: WeightMap
    notes: tuple[str, ...] = field(default=())

    @torch.no_grad()
    def give_back(self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        """Writes the parameters of `model`, or others by its names, into the origin."""
        ours = dict(self.model.named_parameters() if weights is None else weights)
        state = self.origin.state_dict()
        for name, tensor in self.weights.export(ours.__getitem__):
            state[name].copy_(tensor)

    def inputs(self, batch: Mapping[str, torch.Tensor], **more: Any) -> dict[str, Any]:
        """Keyword arguments of `model` from a batch as transformers' collators make it: `input_ids` [B, S] (or `tokens`),
        `attention_mask` [B, S] (0 on padding) and `labels`, [B, S] or for classification [B]. A decoder's labels are those of
        the same position, as transformers has them, and are moved to the position before here."""
        tokens = batch["input_ids"] if "input_ids" in batch else batch["tokens"]
        found: dict[str, Any] = {"tokens": tokens, **more}
        if (mask := batch.get("attention_mask")) is not None:
            found["documents"] = mask.to(torch.int32) - 1
        if (labels := batch.get("labels")) is not None:
            if self.task == "lm":
                labels = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], IGNORE)), dim=1)
            found["labels"] = labels.reshape(-1) if self.task == "classify" else labels
        return found


def adopt(module: nn.Module, call: Call | None = None) -> Adopted:
    """call: how the module is run on tokens, where that is not `module(tokens)`.

    Raises LayoutError with every reason why the module cannot be one of ours; it is left as it was.
    """
    name = type(module).__name__
    if any(parameter.is_meta for parameter in module.parameters()):
        raise LayoutError(findings=[Finding(name, "has no values yet", "Fill it first: what it computes is compared")])
    if hasattr(getattr(module, "config", None), "model_type"):
        return _proved([_hugging_face(module)], call or (lambda model, tokens: model(input_ids=tokens)))
    return _proved([_plain(module, guess) for guess in guesses(module)], call or (lambda model, tokens: model(tokens)))


def _hugging_face(module: nn.Module) -> Adopted:
    config: Any = module.config
    name, family = type(module).__name__, FAMILIES.get(config.model_type)
    if family is None:
        fix = f"Data parallelism and ZeRO run it as it is; tensor and pipeline parallelism: {', '.join(FAMILIES)}"
        raise LayoutError(findings=[Finding(name, f"is of family {config.model_type!r}, which is not one of ours", fix)])
    tasks = {theirs: ours for ours, theirs in family.tasks.items()}
    if name not in tasks:
        fix = f"Of this family: {', '.join(tasks)}. Data parallelism and ZeRO run it as it is"
        raise LayoutError(findings=[Finding(name, "has a head that is not one of ours", fix)])
    try:
        hf = from_hf({**config.to_dict(), "architectures": [name]}, name, tasks[name])
    except ConfigError as error:
        raise LayoutError(f"{name} is not a model of ours", error.findings) from None
    model = build(hf.config, hf.task)
    weights = weight_map(model, hf.family, hf.task, hf.config.tied)
    return _filled(_Held(module), model, hf.config, hf.task, weights, hf.notes)


def _plain(module: nn.Module, guess: Guess) -> Adopted:
    model = build(guess.config, guess.task)
    table = model.table
    assert isinstance(table, Table)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    weights = WeightMap("plain", False, shapes, guess.pieces(shapes, table), table)
    held = _Held(module, {piece.theirs for piece in weights.pieces})  # `guesses` has looked at the rest
    return _filled(held, model, guess.config, guess.task, weights, guess.notes)


def _filled(held: _Held, model: nn.Module, config: ModelConfig, task: str, weights: WeightMap, notes: Iterable[str]) -> Adopted:
    module, shards = held.module, cast(Any, held)
    try:
        left = weights.check(shards)
    except CheckpointError as error:
        raise LayoutError(f"{type(module).__name__} is not a model of ours", error.findings) from None
    first = next(module.parameters())
    fill_model(model, ((name, values.detach()) for name, values in weights.load(shards)), first.device, first.dtype)
    trained = dict(module.named_parameters(remove_duplicate=False))
    idle = [name for name, parameter in trained.items() if not parameter.requires_grad]
    if idle:
        what = f"{len(idle)} parameters are frozen ({idle[0]}), and ours lie in other tensors together with trained ones"
        raise LayoutError(findings=[Finding(type(module).__name__, what, "Train all of it, or use tp: 1 and pp: 1")])
    model.train(module.training)
    said = list(notes)
    if left:
        said.append(f"not trained, as our model has no use for them: {', '.join(left)}")
    if config.dropout:
        said.append(f"dropout {config.dropout} needs a `dropout_key`; without one there is none")
    return Adopted(model, config, task, module, weights, tuple(said))


class _Held:
    """The tensors of a module, read as `Shards` are."""

    def __init__(self, module: nn.Module, names: Collection[str] | None = None):
        self.module, self.folder = module, Path(type(module).__name__)
        state = module.state_dict()
        self._state = state if names is None else {name: state[name] for name in names}

    def names(self) -> frozenset[str]:
        return frozenset(self._state)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._state[name].shape)

    def get(self, name: str) -> torch.Tensor:
        return self._state[name]

    def file(self, name: str) -> Path:
        return self.folder


# ---- the proof -----------------------------------------------------------------------------------------------------------


def _proved(candidates: list[Adopted], call: Call) -> Adopted:
    """The first candidate that gives the origin's logits."""
    origin = candidates[0].origin
    vocab = min(candidate.config.vocab or 1 for candidate in candidates)
    length = min(8, *(candidate.config.max_len for candidate in candidates))
    device = next(origin.parameters()).device
    tokens = torch.randint(vocab // 2, vocab, (3, length), generator=torch.Generator().manual_seed(0)).to(device)
    findings = []
    # with gradients: without, nn.TransformerEncoderLayer takes a path of its own, which knows one kind of gelu
    with torch.enable_grad(), _in_evaluation(origin):
        try:
            given = call(origin, tokens)
        except Exception as error:
            what = f"does not run on tokens alone: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            fix = "Give adopt(module, call=...) a function that runs it on int64 [rows, positions]"
            raise LayoutError(findings=[Finding(type(origin).__name__, what, fix)]) from error
        expected = getattr(given, "logits", given)
        for candidate in candidates:
            with _in_evaluation(candidate.model):
                ours = candidate.model(tokens)
            finding = _differs(candidate, ours, expected)
            if finding is None:
                return candidate
            findings.append(finding)
    near = [finding for finding in findings if "differ" in finding.what]
    raise LayoutError("what the module computes is not what our model with the same weights does", near or findings)


def _differs(candidate: Adopted, ours: torch.Tensor, expected: Any) -> Finding | None:
    name = type(candidate.origin).__name__
    where = f"{name} as {candidate.config.arch} ({candidate.task})"
    fix = "Data parallelism and ZeRO run it as it is"
    if not isinstance(expected, torch.Tensor):
        return Finding(where, f"gives {type(expected).__name__}, not logits", fix)
    if ours.shape != expected.shape:
        return Finding(where, f"gives logits {list(expected.shape)}, ours are {list(ours.shape)}", fix)
    ours, expected = ours.detach(), expected.detach()
    far = float((ours - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    if far <= CLOSE.get(expected.dtype, 1e-3):
        return None
    why = "its forward does more, or other things, than to embed, encode and project"
    layers = [m for m in candidate.origin.modules() if isinstance(m, nn.TransformerEncoderLayer)]
    if layers and not layers[0].self_attn.batch_first:
        why = "its layers were left at batch_first=False: fed rows first, they attend across the rows of a batch"
    return Finding(where, f"logits differ by {far:.1e} of the largest; {why}", fix)


@contextlib.contextmanager
def _in_evaluation(module: nn.Module) -> Iterator[None]:
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
