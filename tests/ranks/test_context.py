"""Context parallelism on ranks: attention over all positions, what a rank computes with, holds and counts, and long rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.config.schema import Config
from meshwright.data.batch import IGNORE, Batch
from meshwright.data.dataset import Row
from meshwright.data.loader import Loader
from meshwright.distributed.collectives import exchange, register_group
from meshwright.distributed.environment import World
from meshwright.distributed.world import init_world
from meshwright.errors import LayoutError
from meshwright.models import heads
from meshwright.models.attention import attention
from meshwright.models.layers import Layer
from meshwright.parallel import context_blocks
from meshwright.parallel.context import Context, counted_here
from meshwright.parallel.context_ring import ring_attention
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.train.evaluate import evaluate
from meshwright.verify.cases import Case, alone, opened, run, steps_of
from tests.parity.models import LENGTH, ROWS, case_of
from tests.ranks.pool import joined, layout_mesh, mesh

B, S, H, E = 2, 48, 12, 8


def documents() -> torch.Tensor:
    lengths = torch.tensor([[20, 2, 21], [3, 40, 0]])
    return torch.stack(
        [torch.cat([torch.repeat_interleave(torch.arange(3), row), torch.full((S - int(row.sum()),), -1)]) for row in lengths]
    ).int()


def over_ranks(
    method: str, kv_heads: int, causal: bool, window: int | None, docs: bool, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Result and gradients of queries, keys and values: at this rank's positions, and what they are of whole rows in fp64."""
    group = mesh((dist.get_world_size(),), ("cp",)).get_group("cp")
    context = Context(register_group("cp", group), group.rank(), group.size(), method, method == "ring" and causal)
    draw = torch.Generator().manual_seed(3)
    shapes = [(B, S, count, E) for count in (H, kv_heads, kv_heads, H)]
    *inputs, grad = (torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes)
    wide = [t.double().requires_grad_() for t in inputs]
    seen: dict[str, Any] = {"documents": documents() if docs else None, "cu_seqlens": None, "window": window, "causal": causal}
    expected = attention(*wide, **seen)
    gradients = torch.autograd.grad(expected, wide, grad.double())
    here = [context.own(t).requires_grad_() for t in inputs]
    attend = context.ring if method == "ring" else context.all_to_all
    out = attend(*here, **seen, dropout_p=0.0)
    found = [out, *torch.autograd.grad(out, here, context.own(grad))]
    wanted = [context.own(t) for t in (expected.detach(), *gradients)]
    return [(a.detach(), b) for a, b in zip(found, wanted, strict=True)]


CASES = [
    ("ring", 4, True, None, True),
    ("ring", 1, True, 9, False),
    ("ring", 12, False, 9, True),
    ("ring", 4, False, None, False),
    ("all_to_all", 4, True, None, True),
    ("all_to_all", 2, True, 9, False),
    ("all_to_all", 12, False, None, True),
]


def furthest() -> list[float]:
    return [max(float((a - b).abs().max()) for a, b in over_ranks(*case, torch.float64)) for case in CASES]


@pytest.mark.parametrize("world", [2, 4])
def test_attention_sees_all_positions(ranks, world):
    # Red with: the gradient of keys one step late on the ring, or not sent home at all; key/value heads dealt in turn to the
    # queries of all ranks.
    for found in ranks(world).run(furthest):
        assert {case: worst for case, worst in zip(CASES, found, strict=True) if worst >= 1e-13} == {}


def rounded_once() -> list[float]:
    """Share of the result, and of the gradient of the values, that is not the bf16 number next to the exact one."""
    out, *_, values = over_ranks("ring", 4, True, None, True, torch.bfloat16)
    return [float((a != b.bfloat16()).double().mean()) for a, b in (out, values)]


def test_low_precision_rounds_once(ranks):
    # What goes round is bf16; scores, sums and the gradients that travel are fp32. Red when the travelling gradients are bf16.
    for found in ranks(4).run(rounded_once):
        assert max(found) < 0.01


def checked() -> None:
    group = mesh((dist.get_world_size(),), ("cp",)).get_group("cp")
    key = register_group("cp", group)
    q, k, v = (torch.randn(1, 4, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(ring_attention, (q, k, v, None, None, True, 0, 0.5, key), test_utils=checks)
    torch.library.opcheck(exchange, (q, 2, 1, key), test_utils=checks)


def test_the_compiler_knows_the_operators(ranks):
    ranks(2).run(checked)


# ---- what a rank computes with, and counts


def plan_of(layout: Layout, method: str, **more: Any) -> Plan:
    return Plan(layout, micro_batch=8, precision="fp64", context=method, **more)


def positions_of(name: str, plan: Plan) -> dict[str, set[int]]:
    """Lengths in positions of what layers, and the output matrix, are given in a step; and of the scores of attention."""
    found: dict[str, set[int]] = {"layer": set(), "head": set()}
    real_layer, real_head = Layer.forward, heads.linear_loss

    def layer(self: Layer, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        found["layer"].add(x.shape[1])
        return real_layer(self, x, *rest)

    def head(x: torch.Tensor, *rest: Any) -> Any:
        found["head"].add(x.shape[1])
        return real_head(x, *rest)

    with (
        mock.patch.object(Layer, "forward", layer),
        mock.patch.object(heads, "linear_loss", head),
        opened(case_of(name), plan, layout_mesh(plan.layout), joined()) as context,
    ):
        next(steps_of(context, 1, single=False))
    return found


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_no_rank_has_more_than_its_positions(ranks, method):
    # Red when the head, or an embedding before the layers, works on whole rows.
    for found in ranks(4).run(positions_of, "decoder", plan_of(Layout(cp=4), method)):
        assert found == {"layer": {LENGTH // 4}, "head": {LENGTH // 4}}
    for found in ranks(2).run(positions_of, "mlm", plan_of(Layout(cp=2), method)):
        assert found["layer"] == {LENGTH // 2} and max(found["head"]) <= LENGTH // 2


def figures_of(name: str, plan: Plan | None) -> dict[str, float]:
    """Held-out figures of some rows, a ragged number of them."""
    case = case_of(name)
    if plan is None:
        with init_world(World(), "cpu") as single, opened(case, alone(case.config, 8), None, single) as context:
            return _figures(context, 0, 1)
    with opened(case, plan, layout_mesh(plan.layout), joined()) as context:
        return _figures(context, context.data_rank, plan.layout.dp)


def _figures(context: Any, rank: int, world: int) -> dict[str, float]:
    loader = Loader(context.train_loader.dataset, dp_rank=rank, dp_world=world, micro_batch=4)
    return evaluate(context.engine, context.objective, loader, rows=11, device=context.device)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("decoder", plan_of(Layout(cp=4), "ring")),
        ("mlm", plan_of(Layout(cp=2, dp_shard=2, zero=3), "ring")),
        ("classifier", plan_of(Layout(cp=2, pp=2), "all_to_all")),
    ],
)
def test_evaluation_counts_each_target_once(ranks, name, plan):
    # Red when a rank counts the targets of whole rows, or the classes of rows that the first rank counts.
    expected = figures_of(name, None)
    for found in ranks(4).run(figures_of, name, plan):
        assert found == pytest.approx(expected, rel=1e-12)


def pooling() -> Case:
    """A causal classifier, whose pooled position differs from row to row, with dropout before and in its head."""
    case = case_of("classifier")
    changed = {"arch": "decoder", "positions": "rope", "dropout": 0.1, "head_dropout": 0.3}
    model = case.config.model.model_copy(update=changed)
    return replace(case, config=case.config.model_copy(update={"model": model}), steps=2)


def pooled(plan: Plan) -> tuple[list[float], list[float]]:
    trace = run(pooling(), plan, layout_mesh(plan.layout), joined())
    return trace.losses, trace.norms


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_the_last_real_position_of_a_row_may_be_on_any_rank(ranks, method):
    # Red when a rank takes its own last position, when the gradient of the pooled state stays on the first rank, and when the
    # head drops by the key of the first position that is here.
    case = pooling()
    with init_world(World(), "cpu") as single:
        expected = run(case, alone(case.config, 8), None, single)
    for losses, norms in ranks(4).run(pooled, plan_of(Layout(cp=4), method)):
        assert losses == pytest.approx(expected.losses, rel=1e-12) and norms == pytest.approx(expected.norms, rel=1e-12)


def counted(select: bool) -> list[int]:
    """Targets that are counted here, and the model's own choice of them, which must be the same."""
    size = dist.get_world_size()
    group = mesh((size,), ("cp",)).get_group("cp")
    draw = torch.Generator().manual_seed(7)
    labels = torch.randint(0, 3, (3, 9 if select else 24), generator=draw)
    labels[labels == 0] = IGNORE
    chosen = torch.stack([torch.randperm(24, generator=draw)[:9] for _ in range(3)]) if select else None
    batch = Batch(torch.zeros(3, 24, dtype=torch.long), labels, torch.arange(3), select=chosen)
    model = torch.nn.Identity()
    model.context = Context(register_group("cp", group), group.rank(), size, "ring", True)  # type: ignore[assignment]
    return [counted_here(model, batch).targets(), batch.targets(), counted_here(torch.nn.Identity(), batch).targets()]


@pytest.mark.parametrize("select", [True, False])
def test_each_target_is_counted_by_one_rank(ranks, select):
    found = ranks(4).run(counted, select)
    assert sum(mine for mine, _, _ in found) == found[0][1] == found[0][2]


def refused(name: str, plan: Plan, **changed: Any) -> str:
    case = case_of(name)
    model = case.config.model.model_copy(update=changed)
    case = replace(case, config=case.config.model_copy(update={"model": model}))
    with opened(case, plan, layout_mesh(plan.layout), joined()) as context:
        batch = next(context.train_loader.steps(0, lambda _: ROWS)).micro[0]
        try:
            context.engine.model(batch.tokens[:, :-2])
        except LayoutError as error:
            return str(error)
    return ""


def test_a_length_that_does_not_divide_is_refused_at_the_model_too(ranks):
    for said in ranks(2).run(refused, "decoder", plan_of(Layout(cp=2), "ring")):
        assert f"rows of {LENGTH - 2} tokens" in said and "12 or 16" in said


def bytes_of(plan: Plan) -> dict[str, int]:
    """Bytes of masters and moments here, and of working weights."""
    with opened(case_of("decoder"), plan, layout_mesh(plan.layout), joined()) as context:
        next(steps_of(context, 1, single=False))
        pieces = context.engine.parameters_state()
        working = context.engine.parameters.ranges
        return {
            "states": sum(piece.tensor.nbytes for piece in pieces),
            "gradients": sum(part.gradient.nbytes for part in working),
            "weights": sum(part.working.nbytes for part in working),
        }


def test_states_are_sharded_over_data_and_context_ranks_together(ranks):
    # Red when ZeRO shards over dp_shard alone: everything is then twice as much.
    whole = 3 * 8 * sum(p.numel() for p in _whole().parameters())  # master and two moments in fp64
    for found in ranks(4).run(bytes_of, plan_of(Layout(dp_shard=2, cp=2, zero=3), "ring")):
        assert found["states"] == pytest.approx(whole / 4, rel=0.05)
        assert found["gradients"] == found["weights"] == pytest.approx(whole / 12, rel=0.1)


def _whole() -> torch.nn.Module:
    from meshwright.models import build

    return build(case_of("decoder").config.model, "lm")


# ---- long rows


@dataclass(frozen=True)
class Long:
    """Rows of random tokens, in documents where `documents` says so."""

    seq_len: int
    documents: bool = False
    rows: int = 4

    def row(self, sample: int) -> Row:
        draw = torch.Generator().manual_seed(sample)
        tokens = torch.randint(0, 64, (self.seq_len + 1,), generator=draw).numpy()
        return Row(tokens[:-1], tokens[1:].copy(), self.seq_len, None, None, None)


def long_case(length: int) -> Case:
    model = {"layers": 1, "width": 16, "heads": 1, "ffn": 16, "vocab": 64, "max_len": length}
    config = Config.model_validate(
        {
            "model": model,
            "data": {"train": [{"path": "corpus"}], "seq_len": length},
            "train": {"batch": 1, "lr": 1e-3},
            "precision": "fp32",
        }
    )
    return Case(config, Long(length), steps=2)


def long_run(length: int, plan: Plan) -> tuple[list[float], int]:
    """Losses, and the most scores that existed at once."""
    most = 0
    real = context_blocks.Tiles._scores

    def watched(self: Any, *rest: Any) -> torch.Tensor:
        nonlocal most
        out = real(self, *rest)
        most = max(most, out.numel())
        return out

    with mock.patch.object(context_blocks.Tiles, "_scores", watched):
        trace = run(long_case(length), plan, layout_mesh(plan.layout), joined())
    return trace.losses, most


@pytest.mark.parametrize("length", [4096, pytest.param(65536, marks=pytest.mark.slow)])
def test_a_long_row_trains_with_the_loss_of_one_device(ranks, length):
    # 64k positions: a rank never holds more than a tile of its 16k x 16k scores.
    plan = Plan(Layout(cp=4), 1, "fp32", context="ring", recompute="none")
    found = ranks(4).run(long_run, length, plan, timeout=600.0)
    case = long_case(length)
    with init_world(World(), "cpu") as single:
        expected = run(case, alone(case.config, 1), None, single).losses
    for losses, most in found:
        assert losses == pytest.approx(expected, rel=1e-5) and losses[0] != losses[1]
        assert 0 < most <= context_blocks.TILE["cpu"]
