"""Expert parallelism (GShard, arXiv:2006.16668): the experts of a layer are dealt to data ranks, and tokens travel to them.

The data ranks d = 0 .. D are cut into runs of ep neighbours. In each run rank e holds the experts [e E/ep, (e+1) E/ep) of every
layer; each of its tokens goes to the rank of each of its experts, is computed there, and comes back:

    sort rows by expert -> exchange counts -> all-to-all of rows -> sort by expert -> matrices -> all-to-all back

Counts are exchanged first, so no row is padded and none is lost; a rank, or an expert, without a row takes part all the same.
With T rows (tokens x experts of a token) on a rank, width D and w bytes an element it sends (ep-1)/ep T D w bytes on average
in each of the two exchanges, and as many in backward; beside it E counts. The host waits for the counts once a layer.

Everything else is as it was: routers and the rest of the model see a rank's own tokens, their gradients are summed over all
data ranks. Those of experts are summed over the D/ep ranks that hold the same ones; ZeRO cuts their states among those of them
that lie in one dp_shard group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.distributed.collectives import deal, register_group
from meshwright.distributed.mesh import DATA_AXES, subgroup
from meshwright.errors import Finding, LayoutError
from meshwright.models.layers import Layer
from meshwright.models.moe import Experts, MoE, Rows
from meshwright.models.trunk import Trunk
from meshwright.parallel.sharing import Domain, Sharing
from meshwright.spec.box import Box
from meshwright.spec.plan import Plan
from meshwright.spec.sharding import expert_findings

__all__ = ["DOMAIN", "ExchangedExperts", "expert_rows", "split_experts"]

DOMAIN = "experts"
"""`Placement.domain` of the matrices of experts."""


def split_experts(model: nn.Module, plan: Plan, mesh: DeviceMesh | None, sharing: Sharing) -> None:
    """Leaves in `model` this rank's experts of every layer, and says so in `sharing`; call it after tensors were split.

    model: of `build`, whole or a pipeline stage of it, on meta or filled. Collective over the world.
    Raises LayoutError for a model that is not ours or whose experts do not divide.
    """
    ep = plan.layout.ep
    if mesh is None or ep == 1:
        return
    if not isinstance(model, Trunk):
        what = f"{ep} ranks cannot share the experts of {type(model).__name__}: nothing says which parameters they are"
        raise LayoutError(findings=[Finding("layout.ep", what, "Use ep: 1")])
    findings = expert_findings(model.config, ep, plan.layout.dp)
    if findings:
        raise LayoutError(findings=findings)
    group, sharing.domains[DOMAIN] = _groups(plan, mesh)
    key, rank = register_group("ep", group), group.rank()
    for index, layer in enumerate(model.layers):
        if not isinstance(layer, Layer):
            continue
        moe = layer.mlp
        assert isinstance(moe, MoE)  # a model of experts has no other layers
        share = model.config.experts // ep
        for leaf, parameter in list(moe.experts.named_parameters()):
            name = f"layers.{index}.mlp.experts.{leaf}"
            placement = sharing.of(name, tuple(parameter.shape))
            box = Box((rank * share, *placement.box.offset[1:]), (share, *placement.box.shape[1:]))
            sharing.placements[name] = replace(placement, box=box, domain=DOMAIN)
            values = parameter.detach()[rank * share : (rank + 1) * share].clone()
            setattr(moe.experts, leaf, nn.Parameter(values, requires_grad=parameter.requires_grad))
        moe.experts = ExchangedExperts(moe.experts, key, ep)


class ExchangedExperts(Experts):
    """Experts of which this rank holds some; rows of all ranks of a group go where they belong and come back."""

    def __init__(self, experts: Experts, key: str, ranks: int):
        nn.Module.__init__(self)
        self.gate_rows, self.activation = experts.gate_rows, experts.activation
        self.up, self.down = experts.up, experts.down
        self.key, self.ranks = key, ranks
        # how many rows come is known to the device alone. Not a decorator: it would load torch's compiler at every start
        self.forward = torch.compiler.disable(self.forward)  # type: ignore[method-assign]

    def forward(self, x_TD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """As `Experts.forward`; x is sorted by expert, hence by rank."""
        ranks, here = self.ranks, self.up.shape[0]
        counts_RL = counts_E.view(ranks, here)
        coming_RL = deal(counts_E, [here] * ranks, [here] * ranks, self.key).view(ranks, here)
        send, receive = torch.stack((counts_RL.sum(1), coming_RL.sum(1))).tolist()
        arrived = deal(x_TD[: sum(send)], send, receive, self.key)
        # they come by rank, and by expert from each
        expert = torch.arange(here, device=x_TD.device).repeat(ranks)
        expert = expert.repeat_interleave(coming_RL.flatten(), output_size=sum(receive))
        order = expert.argsort(stable=True)
        inverse = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
        y = self.compute(Rows.apply(arrived, order, inverse, 1), coming_RL.sum(0).cumsum(0))
        back = deal(Rows.apply(y, inverse, order, 1), receive, send, self.key)
        return F.pad(back, (0, 0, 0, x_TD.shape[0] - back.shape[0]))


def expert_rows(ranks: Sequence[int], shards: int, ep: int) -> dict[str, list[list[int]]]:
    """Groups of the data ranks of one model, given in order: those that share experts ("ep"), that hold the same ones ("data"),
    and of the latter those among which ZeRO cuts ("shards"), and that hold the same piece ("replicas").

    shards: dp_shard. ep divides it or is a multiple of it.
    """
    count = len(ranks)
    inside = ep <= shards
    return {
        "ep": [list(ranks[start : start + ep]) for start in range(0, count, ep)],
        "data": [list(ranks[place::ep]) for place in range(ep)],
        "shards": [list(ranks[start + place : start + shards : ep]) for start in range(0, count, shards) for place in range(ep)]
        if inside
        else [[rank] for rank in ranks],
        "replicas": [list(ranks[place::shards]) for place in range(shards)]
        if inside
        else [list(ranks[place::ep]) for place in range(ep)],
    }


def _groups(plan: Plan, mesh: DeviceMesh) -> tuple[dist.ProcessGroup, Domain]:
    layout, names = plan.layout, list(mesh.mesh_dim_names or ())
    inside = [names.index(name) for name in DATA_AXES]
    outside = [index for index in range(len(names)) if index not in inside]
    models = mesh.mesh.permute(*outside, *inside).reshape(-1, layout.dp).tolist()
    found: dict[str, list[list[int]]] = {}
    for ranks in models:
        for purpose, rows in expert_rows(ranks, layout.dp_shard, layout.ep).items():
            found.setdefault(purpose, []).extend(rows)

    def group(purpose: str) -> dist.ProcessGroup | None:
        return subgroup(mesh, f"experts {purpose}", found[purpose]) if len(found[purpose][0]) > 1 else None

    ep, data = group("ep"), group("data")
    assert ep is not None  # of two ranks at least
    if not layout.zero:
        return ep, Domain(data, None, data, ep)
    sharded = layout.ep < layout.dp_shard
    distinct = mesh.get_group("dp_shard") if sharded else ep
    return ep, Domain(data, group("shards"), group("replicas") if sharded else data, distinct)
