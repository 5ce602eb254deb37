"""Tensor parallelism: the matrices of every layer, the embedding and the output matrix are split over the ranks of "tp".

A layer's first matrix is split by its rows, its second by its columns, so that one exchange before and one after carry a
whole branch. With sequence parallelism a rank holds its share of the positions in between, and the two exchanges are an
all-gather and a reduce-scatter of the same size; without, all positions, and an all-reduce in forward or backward.

             sequence parallel              without
    enter    all-gather of positions        nothing; backward: all-reduce
    leave    reduce-scatter of positions    all-reduce

The model's code stays as it is: modules are replaced by ones that hold a block, under the same parameter names.

Shapes: B rows, S positions, P = S / ranks positions of this rank under sequence parallelism (else S), D width, N positions
that the head sees, V vocabulary, W rows of it on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.distributed.collectives import (
    all_sum,
    copy,
    gather,
    gather_alike,
    gather_uneven,
    group_of,
    register_group,
    scatter_sum,
)
from meshwright.distributed.mesh import subgroup
from meshwright.errors import Finding, LayoutError
from meshwright.kernels.vocab_cross_entropy import vocab_cross_entropy
from meshwright.models.heads import LanguageHead, LossParts
from meshwright.models.layers import MLP, Attention, Layer
from meshwright.models.moe import MoE
from meshwright.models.trunk import Trunk
from meshwright.parallel.sharing import Sharing
from meshwright.parallel.split_backward import Deferral, deferred_linear
from meshwright.spec.box import Box
from meshwright.spec.placement import Placement
from meshwright.spec.plan import Plan
from meshwright.spec.sharding import head_split, nearest_multiples, tensor_findings, tensor_placements, vocabulary_split

__all__ = ["split_tensors"]


def split_tensors(model: nn.Module, plan: Plan, mesh: DeviceMesh | None) -> Sharing:
    """Leaves in `model` this rank's block of every parameter, with the exchanges around them; says what each block is.

    model: of `build`, whole or a pipeline stage of it; on meta, or filled, then blocks are cut out of the values. Ties stay
    ties. Attention dropout draws from torch's generator, which must be seeded differently on each rank of "tp", since each
    has other heads; nothing else here draws from it.
    Raises LayoutError for a model that is not ours or has too little to split; at the first forward for a length that does
    not divide. Collective where there are fewer key/value heads than ranks.
    """
    if mesh is None or plan.layout.tp == 1:
        return Sharing()
    if not isinstance(model, Trunk):
        what = f"{plan.layout.tp} ranks cannot split {type(model).__name__}: nothing says how its parameters are dealt"
        fix = "Use tp: 1, or one of our models: adopt(module) makes one of a transformer"
        raise LayoutError(findings=[Finding("layout.tp", what, fix)])
    findings = tensor_findings(model.config, plan.layout.tp)
    if findings:
        raise LayoutError(findings=findings)
    group = mesh.get_group("tp")
    axis = TensorAxis(register_group("tp", group), group.rank(), group.size(), plan.sequence_parallel)
    placements = tensor_placements(model.config, model.task, tp=axis.size, rank=axis.rank, sequence_parallel=axis.sequence)
    for canonical, other in model.table.ties:
        placements[other] = placements[canonical]
    _Splitter(model, axis, placements).split()
    held = {name: placements[name] for name, _ in model.named_parameters()}
    groups = {"tp": group}
    holders = _holder_groups(model, mesh, axis)
    if holders is not None:
        groups["kv"] = holders
    return Sharing(held, groups)


@dataclass(frozen=True)
class TensorAxis:
    """This rank's place among those that split the model. sequence: whether positions are spread over them too."""

    key: str
    rank: int
    size: int
    sequence: bool

    def enter(self, x_BPD: torch.Tensor) -> torch.Tensor:
        """[B, S, D] for a matrix split by rows."""
        return gather(x_BPD, 1, self.key) if self.sequence else copy(x_BPD, self.key)

    def leave(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """[B, P, D]: the sum of what the matrices split by columns gave."""
        return scatter_sum(x_BSD, 1, self.key) if self.sequence else all_sum(x_BSD, self.key)


class _Splitter:
    def __init__(self, model: Trunk, axis: TensorAxis, placements: dict[str, Placement]):
        self.model, self.axis, self.placements = model, axis, placements
        self.ties = {name for pair in model.table.ties for name in pair}
        self.tied: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}
        """A tied parameter and its block, by the id of the former, which lives on so that nothing else gets it."""

    def split(self) -> None:
        model, axis = self.model, self.axis
        enter = _Enter(axis)
        for index, layer in enumerate(model.layers):
            if isinstance(layer, Layer):
                self._attention(layer.attention, f"layers.{index}.attention", enter)
                if isinstance(layer.mlp, MoE):
                    self._experts(layer.mlp, f"layers.{index}.mlp", enter)
                else:
                    self._mlp(layer.mlp, f"layers.{index}.mlp", enter)
        if model.embedding is not None:
            weight = self._block(model.embedding.weight, "embedding.weight")
            model.embedding = VocabularyEmbedding(weight, self._first("embedding.weight"), axis)  # type: ignore[assignment]
        language = model.task != "classify"
        if language and model.head is not None:
            blocks = {name: self._block(p, f"head.{name}") for name, p in model.head.named_parameters(recurse=False)}
            model.head = VocabularyHead(model.head, blocks, self._first("head.weight"), model.config.vocab or 0, axis)
        model.split = Split(axis) if axis.sequence else nn.Identity()
        # a head without a transform uses the hidden states in its part of the vocabulary only; all else is done alike
        model.merge = Merge(axis, alike=not language or model.config.head_transform)

    def _attention(self, module: Attention, name: str, enter: _Enter) -> None:
        config = self.model.config
        heads = head_split(config.heads, config.kv_heads or config.heads, self.axis.size, self.axis.rank)
        module.group = heads.group
        if heads.shared:
            module.qkv = SplitQKV(  # type: ignore[assignment]
                {
                    f"{part}_{leaf}": self._block(parameter, f"{name}.qkv.{part}_{leaf}")
                    for leaf, parameter in module.qkv.named_parameters()
                    for part in ("q", "kv")
                }
            )
        else:
            self._rows(module.qkv, f"{name}.qkv")
        module.out = self._columns(module.out, f"{name}.out")  # type: ignore[assignment]
        module.register_forward_pre_hook(enter)

    def _mlp(self, module: MLP, name: str, enter: _Enter) -> None:
        self._rows(module.up, f"{name}.up")
        module.down = self._columns(module.down, f"{name}.down")  # type: ignore[assignment]
        module.register_forward_pre_hook(enter)

    def _experts(self, module: MoE, name: str, enter: _Enter) -> None:
        """Some features of every expert. All ranks route the same tokens; each learns how from its part of the result, and
        computes all of the balance terms."""
        for leaf, parameter in list(module.experts.named_parameters()):
            setattr(module.experts, leaf, self._block(parameter, f"{name}.experts.{leaf}"))
        module.router.share = 1.0 / self.axis.size
        module.leave = _Leave(self.axis)
        module.register_forward_pre_hook(enter)

    def _rows(self, linear: nn.Linear, name: str) -> None:
        for leaf, parameter in list(linear.named_parameters()):
            setattr(linear, leaf, self._block(parameter, f"{name}.{leaf}"))
        linear.out_features = linear.weight.shape[0]

    def _columns(self, linear: nn.Linear, name: str) -> RowParallel:
        return RowParallel(self._block(linear.weight, f"{name}.weight"), linear.bias, self.axis)

    def _block(self, parameter: torch.Tensor, name: str) -> nn.Parameter:
        if id(parameter) in self.tied:
            return self.tied[id(parameter)][1]
        box = self.placements[name].box
        values = parameter.detach()[box.inside(Box.whole(parameter.shape))].clone(memory_format=torch.contiguous_format)
        block = nn.Parameter(values, requires_grad=parameter.requires_grad)
        if name in self.ties:
            self.tied[id(parameter)] = (parameter, block)
        return block

    def _first(self, name: str) -> int:
        return self.placements[name].box.offset[0]


class _Enter:
    """Forward pre-hook of a branch; one object for all layers, which share their compiled code."""

    def __init__(self, axis: TensorAxis):
        self.axis = axis

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.axis.enter(args[0]), *args[1:])


class _Leave(nn.Module):
    def __init__(self, axis: TensorAxis):
        super().__init__()
        self.axis = axis

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return self.axis.leave(x_BSD)


class SplitQKV(nn.Module):
    """The rows of one key/value head and of some of its queries, [queries, key, value]: two blocks of one parameter."""

    def __init__(self, parameters: dict[str, nn.Parameter]):
        super().__init__()
        self.q_bias: nn.Parameter | None = None
        self.kv_bias: nn.Parameter | None = None
        self.q_weight, self.kv_weight = parameters.pop("q_weight"), parameters.pop("kv_weight")
        for name, parameter in parameters.items():
            setattr(self, name, parameter)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return torch.cat((F.linear(x_BSD, self.q_weight, self.q_bias), F.linear(x_BSD, self.kv_weight, self.kv_bias)), dim=-1)


class RowParallel(nn.Module):
    """A linear layer of which this rank holds columns of the weight: its result is summed over the ranks, then the bias
    is added, once."""

    deferrable = True

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, axis: TensorAxis):
        super().__init__()
        self.weight, self.bias, self.axis = weight, bias, axis
        self.deferral: Deferral | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features of this rank [B, S, F] -> [B, P, D]."""
        y_BPD = self.axis.leave(deferred_linear(x, self.weight, None, self.deferral))
        return y_BPD if self.bias is None else y_BPD + self.bias


class VocabularyEmbedding(nn.Module):
    """Rows [first, first + W) of the embedding; the other ranks' tokens are zeros here, and a sum brings them together."""

    def __init__(self, weight: nn.Parameter, first: int, axis: TensorAxis):
        super().__init__()
        self.weight, self.first, self.axis = weight, first, axis

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """[B, P, D]"""
        if self.axis.sequence:
            _check_length(tokens_BS.shape[1], self.axis.size)
        local_BS = tokens_BS - self.first
        other_BS = (local_BS < 0) | (local_BS >= self.weight.shape[0])
        x_BSD = F.embedding(local_BS.masked_fill_(other_BS, 0), self.weight)
        return self.axis.leave(x_BSD.masked_fill_(other_BS[..., None], 0.0))


class VocabularyHead(LanguageHead):
    """The head with rows [first, first + W) of the output matrix. Everything before the matrix is done alike on all ranks."""

    def __init__(self, head: LanguageHead, blocks: dict[str, nn.Parameter], first: int, vocab: int, axis: TensorAxis):
        nn.Module.__init__(self)
        self.transform, self.transform_norm, self.activation = head.transform, head.transform_norm, head.activation
        self.weight, self.bias = blocks["weight"], blocks.get("bias")
        self.first, self.vocab, self.axis = first, vocab, axis

    def _entering(self, x_BND: torch.Tensor) -> torch.Tensor:
        """Without a transform `Merge` sums the gradients already."""
        return x_BND if self.transform is None else copy(x_BND, self.axis.key)

    def logits(self, x_BND: torch.Tensor) -> torch.Tensor:
        """[B, N, V] on every rank."""
        sizes = [size for _, size in vocabulary_split(self.vocab, self.axis.size)]
        return gather_uneven(F.linear(self._entering(x_BND), self.weight, self.bias), sizes, self.axis.key)

    def loss(self, x_BND: torch.Tensor, labels: torch.Tensor, smoothing: float, z_loss: float) -> LossParts:
        parts = vocab_cross_entropy(
            self._entering(x_BND).reshape(-1, x_BND.shape[-1]),
            self.weight,
            self.bias,
            labels.reshape(-1),
            first=self.first,
            vocab=self.vocab,
            group=group_of(self.axis.key),
            smoothing=smoothing,
            z_loss=z_loss,
        )
        return LossParts(*parts)


class Split(nn.Module):
    """[B or 1, S, ...] -> this rank's positions [B or 1, P, ...]."""

    def __init__(self, axis: TensorAxis):
        super().__init__()
        self.axis = axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _check_length(x.shape[1], self.axis.size)
        share = x.shape[1] // self.axis.size
        return x.narrow(1, self.axis.rank * share, share)


class Merge(nn.Module):
    """Hidden states back to whole rows. alike: whether every rank computes all of what follows, and with it the whole
    gradient; else each has a part, and they are summed."""

    def __init__(self, axis: TensorAxis, *, alike: bool):
        super().__init__()
        self.axis, self.alike = axis, alike

    def forward(self, x_BPD: torch.Tensor) -> torch.Tensor:
        if not self.alike:
            return self.axis.enter(x_BPD)
        return gather_alike(x_BPD, 1, self.axis.key) if self.axis.sequence else x_BPD


def _check_length(length: int, ranks: int) -> None:
    if length % ranks:
        fix = f"Use rows of {nearest_multiples(length, ranks)}, another tp, or sequence_parallel: false"
        raise LayoutError(findings=[Finding("data.seq_len", f"{length} positions do not divide over {ranks} ranks", fix)])


def _holder_groups(model: Trunk, mesh: DeviceMesh, axis: TensorAxis) -> dist.ProcessGroup | None:
    """Ranks that hold the key/value heads of this one; None where every head has one holder by design. Collective."""
    heads, kv_heads = model.config.heads, model.config.kv_heads or model.config.heads
    if kv_heads >= axis.size:
        return None
    if kv_heads == 1:
        return mesh.get_group("tp")
    names = list(mesh.mesh_dim_names or ())
    rows = mesh.mesh.movedim(names.index("tp"), -1).reshape(-1, axis.size).tolist()
    holders = sorted({head_split(heads, kv_heads, axis.size, rank).holders for rank in range(axis.size)})
    return subgroup(mesh, "kv", [[row[rank] for rank in ranks] for row in rows for ranks in holders])
