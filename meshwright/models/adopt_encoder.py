"""What an embedding, an `nn.TransformerEncoder` and an output layer may be as one of our models: read from their modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.config.schema import ModelConfig
from meshwright.errors import Finding, LayoutError
from meshwright.models.hf_weights import Piece
from meshwright.spec.parameters import Table

__all__ = ["Guess", "guesses"]

FIX = "Data parallelism and ZeRO run it as it is"
_LAYER = {
    "attention.out": "self_attn.out_proj",
    "attention_norm": "norm1",
    "mlp.up": "linear1",
    "mlp.down": "linear2",
    "mlp_norm": "norm2",
}


@dataclass(frozen=True)
class Guess:
    """One way to read a module. names: of its modules, by the name of ours. bare: of its parameters that are a module's
    weight among ours."""

    config: ModelConfig
    task: str
    names: Mapping[str, str]
    notes: tuple[str, ...]
    bare: frozenset[str] = frozenset()

    def pieces(self, shapes: Mapping[str, tuple[int, ...]], table: Table) -> list[Piece]:
        """Where each of our parameters, of these shapes, lies in theirs."""
        found = []
        for name, shape in shapes.items():
            owner, _, leaf = name.rpartition(".")
            if owner.endswith("attention.qkv"):  # theirs are stacked: queries, keys, values
                fused, base = table.rule(name).fused, self.names[owner]
                assert fused is not None
                for number, part in enumerate(fused.parts):
                    rows = part.rows * fused.groups
                    found.append(Piece(f"{base}.in_proj_{leaf}", name, number * rows, rows, part.name))
            else:
                theirs = self.names[owner]
                found.append(Piece(theirs if theirs in self.bare else f"{theirs}.{leaf}", name, 0, shape[0]))
        return found


def guesses(module: nn.Module) -> list[Guess]:
    """Every way to read it that its parameters allow. Raises LayoutError, with all reasons, where there is none."""
    encoders = {name: part for name, part in module.named_modules() if isinstance(part, nn.TransformerEncoder)}
    if len(encoders) != 1:
        what = f"has {len(encoders)} nn.TransformerEncoder, and neither is it of a family of transformers that is ours"
        raise _refused(module, [Finding("", what, FIX)])
    (path, encoder), *_ = encoders.items()
    embeddings, tables, outputs, findings = _around(module, path, encoder)
    findings += _layers_differ(encoder)
    if findings:
        raise _refused(module, findings)
    output, head = outputs[0]
    found = list(_readings(path, encoder, embeddings, tables, output, head))
    if not found:
        what = f"{output} has {head.out_features} outputs, and no table has as many rows; nor can they be classes"
        raise _refused(module, [Finding("", what, FIX)])
    return found


def _around(
    module: nn.Module, path: str, encoder: Any
) -> tuple[list[tuple[str, nn.Embedding]], list[tuple[str, nn.Parameter]], list[tuple[str, nn.Linear]], list[Finding]]:
    """The tables and linear layers beside the encoder, parameters that may be a table of positions, and what else has
    parameters there."""
    width = encoder.layers[0].self_attn.embed_dim if len(encoder.layers) and _ours(encoder.layers[0]) else None
    tables: list[tuple[str, nn.Parameter]] = []
    embeddings: list[tuple[str, nn.Embedding]] = []
    outputs: list[tuple[str, nn.Linear]] = []
    findings = []
    for name, part in module.named_modules():
        own = list(part.named_parameters(recurse=False))
        if not own or name == path or name.startswith(f"{path}."):
            continue
        if type(part) is nn.Embedding:
            embeddings.append((name, part))
            for option in ("padding_idx", "max_norm"):
                if getattr(part, option) is not None:
                    findings.append(Finding(name, f"has {option} {getattr(part, option)}, which our embedding has not", FIX))
            for option in ("scale_grad_by_freq", "sparse"):
                if getattr(part, option):
                    findings.append(Finding(name, f"has {option}, which our embedding has not", FIX))
        elif type(part) is nn.Linear:
            outputs.append((name, part))
        elif len(own) == 1 and not tables and own[0][1].dim() == 2 and own[0][1].shape[1] == width:
            tables.append((f"{name}.{own[0][0]}".lstrip("."), own[0][1]))
        else:
            findings.append(Finding(f"{name}.{own[0][0]}".lstrip("."), f"of {type(part).__name__} has no place in ours", FIX))
    if len(embeddings) not in (1, 2) or len(embeddings) + len(tables) > 2 or len(outputs) != 1:
        what = f"has {len(embeddings) + len(tables)} tables and {len(outputs)} nn.Linear beside its encoder"
        findings.append(Finding("", what, f"One table of tokens, perhaps one of positions, and one output layer. {FIX}"))
    return embeddings, tables, outputs, findings


def _layers_differ(encoder: nn.TransformerEncoder) -> list[Finding]:
    layers = list(encoder.layers)
    findings = [Finding(type(layer).__name__, "is no nn.TransformerEncoderLayer", FIX) for layer in layers if not _ours(layer)]
    if findings:
        return findings[:1]
    first = layers[0]
    if any(_numbers(layer) != _numbers(first) for layer in layers):
        findings.append(Finding("layers", "are not all alike", FIX))
    if first.norm1.bias is None:
        findings.append(Finding("norm1", "has no bias, and ours has", FIX))
    if _activation(first) is None:
        findings.append(Finding("activation", f"{first.activation} is not one of ours", "relu and gelu are"))
    if encoder.norm is not None and (type(encoder.norm) is not nn.LayerNorm or encoder.norm.eps != first.norm1.eps):
        findings.append(Finding("norm", "is no LayerNorm with the eps of the layers", FIX))
    return findings


def _ours(layer: nn.Module) -> bool:
    return type(layer) is nn.TransformerEncoderLayer


def _numbers(layer: Any) -> tuple[Any, ...]:
    attention = layer.self_attn
    biases = (attention.in_proj_bias is None, attention.out_proj.bias is None, layer.linear1.bias is None)
    shape = (attention.num_heads, layer.linear1.out_features, layer.norm1.eps, layer.norm2.eps)
    return (*shape, layer.norm_first, layer.dropout1.p, attention.dropout, _activation(layer), *biases)


def _activation(layer: Any) -> str | None:
    function = layer.activation
    if function is F.relu or function is torch.relu or type(function) is nn.ReLU:
        return "relu"
    if function is F.gelu or type(function) is nn.GELU:
        return "gelu_tanh" if getattr(function, "approximate", "none") == "tanh" else "gelu"
    return None


def _readings(
    path: str,
    encoder: nn.TransformerEncoder,
    embeddings: list[tuple[str, nn.Embedding]],
    tables: list[tuple[str, nn.Parameter]],
    output: str,
    head: nn.Linear,
) -> Iterator[Guess]:
    layer: Any = encoder.layers[0]
    names = {
        f"layers.{i}.{ours}": f"{path}.layers.{i}.{theirs}"
        for i in range(len(encoder.layers))
        for ours, theirs in _LAYER.items()
    }
    names |= {f"layers.{i}.attention.qkv": f"{path}.layers.{i}.self_attn" for i in range(len(encoder.layers))}
    names |= {"norm": f"{path}.norm", "head": output, "classifier": output}
    values: dict[str, Any] = {
        "layers": len(encoder.layers),
        "width": layer.self_attn.embed_dim,
        "heads": layer.self_attn.num_heads,
        "ffn": layer.linear1.out_features,
        "norm": "layer",
        "norm_eps": layer.norm1.eps,
        "norm_order": "pre" if layer.norm_first else "post",
        "final_norm": encoder.norm is not None,
        "activation": _activation(layer),
        "qkv_bias": layer.self_attn.in_proj_bias is not None,
        "attention_bias": layer.self_attn.out_proj.bias is not None,
        "mlp_bias": layer.linear1.bias is not None,
        "dropout": layer.dropout1.p,
        "attention_dropout": layer.self_attn.dropout,
        "pooler": False,
    }
    notes = []
    if layer.dropout.p:
        notes.append(f"dropout {layer.dropout.p} inside of the feed-forward layer becomes dropout after the embedding")
    bare = frozenset(name for name, _ in tables)
    for tokens, positions in _orders(embeddings, tables):
        table = {"embedding": tokens[0]} | ({"position_embedding": positions[0]} if positions else {})
        shape = {"vocab": tokens[1].num_embeddings, "positions": "learned" if positions else "none"}
        shape |= {"max_len": getattr(positions[1], "weight", positions[1]).shape[0]} if positions else {}
        for arch, task in _tasks(head.out_features, tokens[1].num_embeddings):
            special = {"classes": head.out_features} if task == "classify" else {"tied": head.weight is tokens[1].weight}
            special |= {} if task == "classify" else {"head_bias": head.bias is not None}
            if task == "classify" and head.bias is None:
                continue
            config = ModelConfig(**values, **shape, **special, arch=arch)
            yield Guess(config, task, names | table, tuple(notes), bare)


def _orders(embeddings: list[tuple[str, nn.Embedding]], tables: list[tuple[str, nn.Parameter]]) -> Iterator[tuple[Any, Any]]:
    """(tokens, positions): either of two embeddings may be that of the tokens."""
    if len(embeddings) == 1:
        yield embeddings[0], tables[0] if tables else None
    else:
        yield embeddings[0], embeddings[1]
        yield embeddings[1], embeddings[0]


def _tasks(outputs: int, vocab: int) -> Iterator[tuple[str, str]]:
    if outputs == vocab:
        yield from (("encoder", "mlm"), ("decoder", "lm"))
    yield from (("encoder", "classify"), ("decoder", "classify"))


def _refused(module: nn.Module, findings: list[Finding]) -> LayoutError:
    name = type(module).__name__
    where: Callable[[Finding], str] = lambda finding: f"{name}.{finding.where}" if finding.where else name
    return LayoutError(findings=[Finding(where(finding), finding.what, finding.fix) for finding in findings])
