"""A feed-forward layer of experts: a router sends each token to a few of them. Single-device code: nothing knows of ranks.

Shapes: B rows, S positions, N = B S tokens, D width, E experts, k experts a token, F width of an expert, T = N k pairs of a
token and an expert.

    p = softmax(router x), in at least fp32     k experts with the largest p (with balance: bias, of p + bias) are chosen
    y = sum over the chosen of p_e expert_e(x)  p divided by the sum of the chosen where `router_normalised`

Padding goes to no expert. With `capacity` c an expert takes ceil(c k n / E) tokens of a row of n, the first ones; what comes
later passes it by: its term is left out. Everything that is counted or limited is so by row, hence the same for any split of
a batch. Balance by a loss is that of a row (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20):

    f_e = E / (k n) * tokens of the row that chose e      P_e = mean of p_e over the row      loss = sum over e of f_e P_e

1 where all experts get the same; the k-fold of nothing else. Balance by a bias: arXiv:2408.15664; it moves outside of here.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.config.schema import ModelConfig
from meshwright.kernels.grouped_linear import grouped_linear
from meshwright.models.activations import activation, gated

__all__ = ["Experts", "MoE", "Router", "Routing"]


class Routing(NamedTuple):
    """What a layer says of its choices, row by row.

    balance_B  differentiable, at least fp32: coefficient * loss and z term of each row; None where the config has neither
    load_BE    int64: tokens that chose each expert, those dropped included
    dropped_B  int64: (token, expert) pairs that an expert had no place for
    """

    balance_B: torch.Tensor | None
    load_BE: torch.Tensor
    dropped_B: torch.Tensor


class Router(nn.Module):
    """Which experts a token goes to, and with what weight.

    share: of the gradient of the balance terms that is made here; where several holders of this router compute the same terms
    from the same tokens, and sum, they divide them.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        self.chosen = config.experts_per_token
        self.normalised = config.router_normalised
        self.capacity = config.capacity
        self.balance = config.balance_coefficient if config.balance == "loss" else 0.0
        self.z_loss = config.router_z_loss
        self.share = 1.0
        self.weight = nn.Parameter(torch.empty(config.experts, config.width, device="meta", dtype=dtype))
        self.bias: torch.Tensor | None
        # not on meta: nobody else gives it values
        self.register_buffer("bias", torch.zeros(config.experts) if config.balance == "bias" else None)

    def forward(self, x_BSD: torch.Tensor, documents_BS: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, Routing]:
        """(weights [B, S, k] in at least fp32, experts int64 [B, S, k], what it says of them).

        Experts that get nothing from a token are E, with weight 0. documents_BS: negative on padding.
        """
        wide = torch.promote_types(x_BSD.dtype, torch.float32)
        logits_BSE = F.linear(x_BSD.to(wide), self.weight.to(wide))
        p_BSE = logits_BSE.softmax(-1)
        experts = self.weight.shape[0]
        ranked_BSE = p_BSE.detach() if self.bias is None else p_BSE.detach() + self.bias.to(wide)
        ids_BSk = ranked_BSE.topk(self.chosen, dim=-1).indices
        gates_BSk = p_BSE.gather(-1, ids_BSk)
        if self.normalised:
            gates_BSk = gates_BSk / gates_BSk.sum(-1, keepdim=True)
        real_BS = torch.ones_like(x_BSD[..., 0], dtype=torch.bool) if documents_BS is None else documents_BS >= 0
        tokens_B = real_BS.sum(1)
        ids_BSk = ids_BSk.masked_fill(~real_BS[..., None], experts)
        load_BE = _counted(ids_BSk.flatten(1), experts)
        balance_B = self._balance(logits_BSE, p_BSE, real_BS, load_BE, tokens_B)
        dropped_B = torch.zeros_like(tokens_B)
        if self.capacity is not None:
            most_B = (tokens_B * (self.capacity * self.chosen / experts)).ceil()
            fits_BSk = _first(ids_BSk.flatten(1), most_B).view_as(ids_BSk)
            dropped_B = ((ids_BSk < experts) & ~fits_BSk).sum((1, 2))
            ids_BSk = ids_BSk.masked_fill(~fits_BSk, experts)
        gates_BSk = gates_BSk.masked_fill(ids_BSk == experts, 0.0)
        return gates_BSk, ids_BSk, Routing(balance_B, load_BE, dropped_B)

    def _balance(
        self,
        logits_BSE: torch.Tensor,
        p_BSE: torch.Tensor,
        real_BS: torch.Tensor,
        load_BE: torch.Tensor,
        tokens_B: torch.Tensor,
    ) -> torch.Tensor | None:
        if not self.balance and not self.z_loss:
            return None
        tokens_B1 = tokens_B.clamp(min=1)[:, None].to(p_BSE.dtype)
        total_B = p_BSE.new_zeros(p_BSE.shape[0])
        if self.balance:
            share_BE = load_BE / tokens_B1 * (load_BE.shape[1] / self.chosen)
            mean_BE = (p_BSE * real_BS[..., None]).sum(1) / tokens_B1
            total_B = total_B + self.balance * (share_BE * mean_BE).sum(-1)
        if self.z_loss:
            square_BS = logits_BSE.logsumexp(-1).square() * real_BS
            total_B = total_B + self.z_loss * (square_BS.sum(1, keepdim=True) / tokens_B1)[:, 0]
        return total_B * self.share


def _counted(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """How often each of 0 .. experts occurs in the rows of ids [R, n]: int64 [R, experts]."""
    counts = torch.zeros(ids.shape[0], experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add(1, ids, torch.ones_like(ids))[:, :experts]


def _first(ids: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """Of ids [R, n] whether each is among the first most[r] of its kind in its row: bool [R, n]."""
    grouped, order = ids.sort(dim=1, stable=True)
    place = torch.arange(ids.shape[1], device=ids.device) - torch.searchsorted(grouped, grouped)
    return torch.zeros_like(ids, dtype=torch.bool).scatter(1, order, place < most[:, None])


class Experts(nn.Module):
    """The matrices of all experts: `up` [E, rows, D] (gate and value alternate, as in a dense layer), `down` [E, D, F]."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        width = config.moe_ffn or config.ffn
        is_gated = config.activation == "swiglu"
        self.gate_rows = math.gcd(width, 16) if is_gated else 0
        self.activation = activation(config.activation)

        def matrices(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(config.experts, rows, columns, device="meta", dtype=dtype))

        self.up = matrices(width * (2 if is_gated else 1), config.width)
        self.down = matrices(config.width, width)

    def forward(self, x_TD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """x [T, D] sorted by expert, counts int64 [E] of how many go to each; rows behind them are nobody's. [T, D]"""
        return self.compute(x_TD, counts_E.cumsum(0))

    def compute(self, x_TD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        hidden_TF = gated(grouped_linear(x_TD, self.up, ends_E), self.activation, self.gate_rows)
        return grouped_linear(hidden_TF, self.down, ends_E)


class Rows(torch.autograd.Function):
    """Rows of x [n, D] in another order, each `copies` times: [n copies, D], row r is x[index[r] // copies].

    index, inverse: a permutation of n copies and its inverse, so that backward gathers too, in one order, and adds nothing
    from several threads.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, copies: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x[index // copies if copies > 1 else index]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        back = gradient[inverse]
        return (back.unflatten(0, (-1, ctx.copies)).sum(1) if ctx.copies > 1 else back), None, None, None


class MoE(nn.Module):
    """Takes the place of a feed-forward layer. load, dropped: sums of `Routing` since they were set to zero.

    leave: what the result goes through; where a rank has a part of each expert, it sums the parts.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        self.router = Router(config, dtype)
        self.experts = Experts(config, dtype)
        self.leave: nn.Module = nn.Identity()
        self.load: torch.Tensor
        self.dropped: torch.Tensor
        self.register_buffer("load", torch.zeros(config.experts, dtype=torch.int64), persistent=False)
        self.register_buffer("dropped", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x_BSD: torch.Tensor, documents_BS: torch.Tensor | None) -> tuple[torch.Tensor, Routing]:
        gates_BSk, ids_BSk, routing = self.router(x_BSD, documents_BS)
        chosen, width = ids_BSk.shape[-1], x_BSD.shape[-1]
        ids_T = ids_BSk.flatten()
        order_T = ids_T.argsort(stable=True)
        inverse_T = torch.empty_like(order_T).scatter(0, order_T, torch.arange(order_T.shape[0], device=order_T.device))
        counts_E = _counted(ids_T[None], self.router.weight.shape[0])[0]
        x_TD = Rows.apply(x_BSD.reshape(-1, width), order_T, inverse_T, chosen)
        y_TD = Rows.apply(self.experts(x_TD, counts_E), inverse_T, order_T, 1)
        # a product of matrices: sums in at least fp32 and makes no [N, k, D] of weighted rows
        y_N1D = torch.bmm(gates_BSk.reshape(-1, 1, chosen).to(y_TD.dtype), y_TD.view(-1, chosen, width))
        return self.leave(y_N1D.view_as(x_BSD)), routing

    def note(self, routing: Routing, counts_B: torch.Tensor) -> None:
        """Adds what a layer said of the rows that count."""
        self.load += (routing.load_BE * counts_B[:, None]).sum(0)
        self.dropped += (routing.dropped_B * counts_B).sum()
