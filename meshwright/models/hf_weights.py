"""Which Hugging Face tensor is which parameter of ours, as data, and the copying both ways, one parameter at a time.

Our fused parameters interleave their parts by groups (`spec.parameters.Fused`); theirs keep parts apart, or stack them
(GPT-2's `c_attn`, whose matrices are also transposed).
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.errors import CheckpointError, Finding
from meshwright.models.shards import Shards
from meshwright.spec.parameters import Fused, Table

__all__ = ["Piece", "WeightMap", "weight_map"]


@dataclass(frozen=True)
class Piece:
    """Rows of one of their tensors that make one part of one of our parameters.

    start, rows  of their tensor, once it is transposed if it is
    part         name inside of our fused parameter, or None where the whole is one
    expert       of our parameter of all experts; None where it is of no experts
    """

    theirs: str
    ours: str
    start: int
    rows: int
    part: str | None = None
    transposed: bool = False
    expert: int | None = None


_LLAMA = {
    "embedding": ("model.embed_tokens",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
    "layers.#.attention.qkv": tuple(f"model.layers.#.self_attn.{x}_proj" for x in "qkv"),
    "layers.#.attention.out": ("model.layers.#.self_attn.o_proj",),
    "layers.#.attention.q_norm": ("model.layers.#.self_attn.q_norm",),
    "layers.#.attention.k_norm": ("model.layers.#.self_attn.k_norm",),
    "layers.#.attention_norm": ("model.layers.#.input_layernorm",),
    "layers.#.mlp_norm": ("model.layers.#.post_attention_layernorm",),
    "layers.#.mlp.up": ("model.layers.#.mlp.gate_proj", "model.layers.#.mlp.up_proj"),
    "layers.#.mlp.down": ("model.layers.#.mlp.down_proj",),
}
_GPT2 = {
    "embedding": ("transformer.wte",),
    "position_embedding": ("transformer.wpe",),
    "norm": ("transformer.ln_f",),
    "head": ("lm_head",),
    "layers.#.attention.qkv": ("transformer.h.#.attn.c_attn",) * 3,
    "layers.#.attention.out": ("transformer.h.#.attn.c_proj",),
    "layers.#.attention_norm": ("transformer.h.#.ln_1",),
    "layers.#.mlp_norm": ("transformer.h.#.ln_2",),
    "layers.#.mlp.up": ("transformer.h.#.mlp.c_fc",),
    "layers.#.mlp.down": ("transformer.h.#.mlp.c_proj",),
}
_GPT2_TRANSPOSED = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")
_BERT = {
    "embedding": ("*.embeddings.word_embeddings",),
    "position_embedding": ("*.embeddings.position_embeddings",),
    "type_embedding": ("*.embeddings.token_type_embeddings",),
    "embedding_norm": ("*.embeddings.LayerNorm",),
    "layers.#.attention.qkv": tuple(f"*.encoder.layer.#.attention.self.{x}" for x in ("query", "key", "value")),
    "layers.#.attention.out": ("*.encoder.layer.#.attention.output.dense",),
    "layers.#.attention_norm": ("*.encoder.layer.#.attention.output.LayerNorm",),
    "layers.#.mlp.up": ("*.encoder.layer.#.intermediate.dense",),
    "layers.#.mlp.down": ("*.encoder.layer.#.output.dense",),
    "layers.#.mlp_norm": ("*.encoder.layer.#.output.LayerNorm",),
    "head": ("cls.predictions.decoder",),
    "head.transform": ("cls.predictions.transform.dense",),
    "head.transform_norm": ("cls.predictions.transform.LayerNorm",),
    "pooler": ("*.pooler.dense",),
    "classifier": ("classifier",),
}
_ROBERTA = {
    **_BERT,
    "head": ("lm_head.decoder",),
    "head.transform": ("lm_head.dense",),
    "head.transform_norm": ("lm_head.layer_norm",),
    "pooler": ("classifier.dense",),
    "classifier": ("classifier.out_proj",),
}
_MIXTRAL = {
    **_LLAMA,
    "layers.#.mlp.router": ("model.layers.#.block_sparse_moe.gate",),
    "layers.#.mlp.experts.up": (
        "model.layers.#.block_sparse_moe.experts.@.w1",
        "model.layers.#.block_sparse_moe.experts.@.w3",
    ),
    "layers.#.mlp.experts.down": ("model.layers.#.block_sparse_moe.experts.@.w2",),
}
_QWEN3_MOE = {
    **_LLAMA,
    "layers.#.mlp.router": ("model.layers.#.mlp.gate",),
    "layers.#.mlp.experts.up": (
        "model.layers.#.mlp.experts.@.gate_proj",
        "model.layers.#.mlp.experts.@.up_proj",
    ),
    "layers.#.mlp.experts.down": ("model.layers.#.mlp.experts.@.down_proj",),
}
_MODULES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3_MOE,
    "gpt2": _GPT2,
    "bert": _BERT,
    "ernie": _BERT,
    "roberta": _ROBERTA,
}
_BASE = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"), "model"),
    "gpt2": "transformer",
}
"""Prefix of the headless model; a file saved from that one lacks it. Encoders are called by their model_type."""
_SECOND_BIAS = {"cls.predictions.decoder.bias": "cls.predictions.bias", "lm_head.decoder.bias": "lm_head.bias"}
"""Output bias as the forward pass reads it -> the parameter that it is tied to, and saved as, where the matrix is tied."""
_WITHOUT_USE = re.compile(r"(\.attn\.(masked_)?bias|rotary_emb\.inv_freq|embeddings\.position_ids)$")
_OTHER_HEADS = re.compile(r"^(cls\.(seq_relationship|predictions)\.|lm_head\.|classifier\.)|(^|\.)pooler\.")


class WeightMap:
    """The map of one model. Made by `weight_map`."""

    def __init__(self, family: str, tied: bool, shapes: Mapping[str, tuple[int, ...]], pieces: Sequence[Piece], table: Table):
        self.family, self.tied, self.shapes, self.pieces, self._table = family, tied, shapes, pieces, table
        self.base = _BASE.get(family, family)
        self._by_ours: dict[str, list[Piece]] = defaultdict(list)
        self._by_theirs: dict[str, list[Piece]] = defaultdict(list)
        for piece in pieces:
            self._by_ours[piece.ours].append(piece)
            self._by_theirs[piece.theirs].append(piece)

    def their_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that an export has, in the order of our parameters."""
        shapes = {}
        for theirs, pieces in self._by_theirs.items():
            shape = self._rows_shape(theirs)
            shapes[self._saved_name(theirs)] = shape[::-1] if pieces[0].transposed else shape
            if theirs in _SECOND_BIAS and not self.tied:
                shapes[_SECOND_BIAS[theirs]] = shape
        return shapes

    def _saved_name(self, theirs: str) -> str:
        return _SECOND_BIAS.get(theirs, theirs) if self.tied else theirs

    def export(self, ours: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Their tensors, one after the other, from ours by name; the same one is asked for once while it is needed."""
        take = functools.lru_cache(maxsize=1)(ours)
        for theirs, pieces in self._by_theirs.items():
            parts = []
            for piece in pieces:
                tensor = take(piece.ours)
                if piece.expert is not None:
                    tensor = tensor[piece.expert]
                if piece.part is None:
                    parts.append(tensor)
                else:
                    fused = self._fused(piece.ours)
                    parts.append(torch.cat([tensor[at] for _, at in fused.slices(piece.part)]))
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            whole = whole.t().contiguous() if pieces[0].transposed else whole.contiguous()
            yield self._saved_name(theirs), whole
            if theirs in _SECOND_BIAS and not self.tied:
                yield _SECOND_BIAS[theirs], whole.clone()  # a file holds no two names for one memory

    def load(self, shards: Shards) -> Iterator[tuple[str, torch.Tensor]]:
        """Our parameters, one after the other. `check` has passed."""
        names = self._find(shards.names())
        for ours, pieces in self._by_ours.items():
            if len(pieces) == 1 and pieces[0].part is None and pieces[0].expert is None:
                yield ours, _rows(shards.get(names[pieces[0].theirs]), pieces[0]).contiguous()
                continue
            whole: torch.Tensor | None = None
            for piece in pieces:
                rows = _rows(shards.get(names[piece.theirs]), piece)
                if whole is None:
                    whole = rows.new_empty(self.shapes[ours])
                block = whole if piece.expert is None else whole[piece.expert]
                every = [(slice(None), slice(None))]
                for source, target in every if piece.part is None else self._fused(ours).slices(piece.part):
                    block[target] = rows[source]
            assert whole is not None
            yield ours, whole

    def check(self, shards: Shards) -> list[str]:
        """Names, shapes and ties, before a weight is read. Returns the names in the file that this task has no use for.

        Raises CheckpointError with every tensor that is missing, of another shape, not known or at odds with the tie.
        """
        present = shards.names()
        names = self._find(present)
        findings, used = [], set(names.values())
        for theirs, pieces in self._by_theirs.items():
            if theirs not in names:
                where = str(shards.folder)
                fix = "Set tie_word_embeddings if the output matrix is the embedding" if pieces[0].ours == "head.weight" else ""
                findings.append(Finding(where, f"no file has tensor {theirs}", fix))
                continue
            expected, shape = self._their_shape(theirs), shards.shape(names[theirs])
            if shape != expected:
                file = str(shards.file(names[theirs]))
                findings.append(Finding(file, f"{names[theirs]} is {list(shape)}, config.json asks for {list(expected)}"))
        findings += self._check_doubles(shards, names, used)
        idle = []
        for name in sorted(present - used):
            if _WITHOUT_USE.search(name) or _OTHER_HEADS.search(name):
                idle.append(name)
            else:
                findings.append(
                    Finding(str(shards.file(name)), f"{name} is no tensor of a {self.family} model", "Is model_type right?")
                )
        if findings:
            raise CheckpointError(f"{shards.folder}: the weights do not fit config.json", findings)
        return [name for name in idle if not _WITHOUT_USE.search(name)]

    def _check_doubles(self, shards: Shards, names: Mapping[str, str], used: set[str]) -> list[Finding]:
        """Tensors that are tied, hence one, and yet twice in the file: they must be equal."""
        if not self.tied:
            used |= set(_SECOND_BIAS.values())  # unread by the forward pass of an untied model
            return []
        heads = {"embedding.weight": self._output_name(), **_SECOND_BIAS}
        findings = []
        for first, second in heads.items():
            first_name = names.get(self._by_ours[first][0].theirs if first in self._by_ours else first)
            if first_name is None or second not in shards.names() or second == first_name:
                continue
            used.add(second)
            if not torch.equal(shards.get(first_name), shards.get(second)):
                findings.append(
                    Finding(
                        f"{shards.file(second)}",
                        f"tie_word_embeddings is on, but {first_name} and {second} differ",
                        "Set it to false to keep both, or remove the one that was not trained",
                    )
                )
        return findings

    def _output_name(self) -> str:
        return f"{_MODULES[self.family]['head'][0]}.weight"

    def _their_shape(self, theirs: str) -> tuple[int, ...]:
        shape = self._rows_shape(theirs)
        return shape[::-1] if self._by_theirs[theirs][0].transposed else shape

    def _rows_shape(self, theirs: str) -> tuple[int, ...]:
        pieces = self._by_theirs[theirs]
        tail = self.shapes[pieces[0].ours][1:] if pieces[0].expert is None else self.shapes[pieces[0].ours][2:]
        return (sum(piece.rows for piece in pieces), *tail)

    def _find(self, present: frozenset[str]) -> dict[str, str]:
        """Their name -> its spelling in the file: headless files lack the prefix, old norms have gamma and beta."""
        found = {}
        for theirs in self._by_theirs:
            for name in (theirs, theirs.removeprefix(f"{self.base}."), _SECOND_BIAS.get(theirs, theirs)):
                old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
                spelled = name if name in present else old
                if spelled in present:
                    found[theirs] = spelled
                    break
        return found

    def _fused(self, ours: str) -> Fused:
        fused = self._table.rule(ours).fused
        assert fused is not None
        return fused


def _rows(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    return (tensor.t() if piece.transposed else tensor)[piece.start : piece.start + piece.rows]


def weight_map(model: nn.Module, family: str, task: str, tied: bool) -> WeightMap:
    """The map between `model` (from `build`, meta is enough) and a Hugging Face family that computes the same."""
    table = model.table
    assert isinstance(table, Table)
    modules = _MODULES[family]
    shapes, pieces = {}, []
    for name, parameter in model.named_parameters():
        shapes[name] = tuple(parameter.shape)
        module, _, leaf = name.rpartition(".")
        rule = table.rule(name)
        if rule.experts:
            module, leaf = name, "weight"
        layer = re.search(r"\d+", module)
        theirs = [t.replace("#", layer[0] if layer else "").replace("*", family) for t in modules[re.sub(r"\d+", "#", module)]]
        fused = rule.fused
        offsets: dict[str, int] = defaultdict(int)
        for expert in range(parameter.shape[0]) if rule.experts else (None,):
            for index, base in enumerate(theirs):
                full = f"{base}.{leaf}" if expert is None else f"{base}.{leaf}".replace("@", str(expert))
                part = fused.parts[index] if fused else None
                rows = part.rows * fused.groups if fused and part else parameter.shape[0 if expert is None else 1]
                transposed = family == "gpt2" and _GPT2_TRANSPOSED.search(full) is not None
                pieces.append(Piece(full, name, offsets[full], rows, part.name if part else None, transposed, expert))
                offsets[full] += rows
    return WeightMap(family, tied and task != "classify", shapes, pieces, table)
