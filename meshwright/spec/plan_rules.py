"""Plans that are refused, and why: read before any device is taken, and again by `parallelize`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.config.schema import ModelConfig
from meshwright.errors import Finding
from meshwright.spec.context import context_findings
from meshwright.spec.layout import Layout
from meshwright.spec.model_rules import ARCHITECTURES
from meshwright.spec.plan import Plan
from meshwright.spec.sharding import expert_findings, nearest_divisors, tensor_findings
from meshwright.spec.stages import check_split

__all__ = ["REFUSALS", "Refusal", "refused", "refused_for"]


@dataclass(frozen=True)
class Refusal:
    """key: what of the plan is at fault. why and fix: for the user; docs/parallelism.md repeats each `why`."""

    key: str
    when: Callable[[Plan], bool]
    why: str
    fix: str | Callable[[Plan], str]

    def finding(self, plan: Plan) -> Finding:
        fix = self.fix if isinstance(self.fix, str) else self.fix(plan)
        return Finding(f"plan.{self.key}", f"{self.value(plan)}, but {self.why}", fix)

    def value(self, plan: Plan) -> object:
        head, _, leaf = self.key.rpartition(".")
        return getattr(plan.layout if head else plan, leaf)


REFUSALS = (
    Refusal(
        "layout.ep",
        lambda plan: plan.layout.dp % plan.layout.ep > 0,
        "experts live on data ranks, and ep must divide dp_replicate * dp_shard",
        lambda plan: f"Of {plan.layout.dp} data ranks, use ep: {nearest_divisors(plan.layout.ep, plan.layout.dp)}",
    ),
    Refusal(
        "layout.ep",
        lambda plan: (
            plan.layout.dp % plan.layout.ep == 0
            and plan.layout.dp_shard % plan.layout.ep > 0
            and plan.layout.ep % plan.layout.dp_shard > 0
        ),
        "the ranks that share experts must lie inside a dp_shard group, or be whole ones",
        lambda plan: (
            f"Use ep: {nearest_divisors(plan.layout.ep, plan.layout.dp_shard)}, or a multiple of {plan.layout.dp_shard}"
        ),
    ),
    Refusal(
        "layout.zero",
        lambda plan: plan.layout.zero > 0 and plan.layout.shards == 1,
        "there is nothing to shard over with dp_shard: 1 and cp: 1",
        "Use zero: 0, or dp_shard for the devices",
    ),
    Refusal(
        "layout.dp_shard",
        lambda plan: plan.layout.dp_shard > 1 and plan.layout.zero == 0,
        "nothing is sharded with zero: 0",
        "Use zero: 1, 2 or 3, or dp_replicate for the devices",
    ),
    Refusal(
        "gather",
        lambda plan: plan.gather == "once" and plan.layout.zero != 3,
        "only zero: 3 gathers weights for a block",
        "Leave it out, or use zero: 3",
    ),
    Refusal(
        "context",
        lambda plan: plan.context != "auto" and plan.layout.cp == 1,
        "there are no ranks to spread the positions of a row over with cp: 1",
        "Leave it out, or use cp for the devices",
    ),
    Refusal(
        "sequence_parallel",
        lambda plan: not plan.sequence_parallel and plan.layout.tp == 1,
        "there are no tensor-parallel ranks to spread positions over with tp: 1",
        "Leave it out, or use tp for the devices",
    ),
    Refusal(
        "schedule",
        lambda plan: plan.schedule != "1f1b" and plan.layout.pp == 1,
        "there is no pipeline with pp: 1",
        "Leave it out, or use pp for the devices",
    ),
    Refusal(
        "split",
        lambda plan: bool(plan.split) and plan.layout.pp == 1,
        "there are no stages to split layers over with pp: 1",
        "Leave it out, or use pp for the devices",
    ),
    Refusal(
        "chunks",
        lambda plan: plan.chunks > 1 and (plan.layout.pp == 1 or plan.schedule not in ("interleaved", "zero_bubble", "zbv")),
        "this schedule has one stage a rank",
        "Use chunks: 1, or a pipeline with schedule interleaved or zero_bubble",
    ),
    Refusal(
        "chunks",
        lambda plan: plan.layout.pp > 1 and plan.schedule == "interleaved" and plan.chunks == 1,
        "interleaved stages are at least two a rank",
        "Use chunks: 2, or schedule: 1f1b",
    ),
    Refusal(
        "chunks",
        lambda plan: plan.layout.pp > 1 and plan.schedule == "zbv" and plan.chunks != 2,
        "the V has two stages a rank",
        "Use chunks: 2",
    ),
    Refusal(
        "recompute_every",
        lambda plan: plan.recompute_every > 1 and plan.recompute == "none",
        "nothing is recomputed with recompute: none",
        "Use recompute: full or selective",
    ),
    Refusal(
        "offload_activations",
        lambda plan: plan.offload_activations and plan.recompute == "selective" and plan.compile == "off",
        "what selective recompute keeps is out of its reach in eager execution",
        "Use recompute: full or none, or compiled blocks",
    ),
    Refusal(
        "offload",
        lambda plan: plan.offload == "parameters" and plan.layout.zero != 3,
        "whole weights are needed on the device without zero: 3",
        "Use zero: 3, or offload: optimizer",
    ),
    Refusal(
        "graphs",
        lambda plan: plan.graphs and _blocks_communicate(plan.layout),
        "blocks that exchange something with other ranks are not recorded",
        "Leave it out, or use data parallelism with zero: 0, 1 or 2 alone",
    ),
    Refusal(
        "graphs",
        lambda plan: plan.graphs and (plan.recompute != "none" or plan.offload_activations),
        "what a recording keeps for backward is neither recomputed nor moved to host memory",
        "Leave it out, or use recompute: none and offload_activations: false",
    ),
    Refusal(
        "precision",
        lambda plan: plan.precision == "fp8" and plan.layout.tp * plan.layout.cp * plan.layout.ep > 1,
        "the scales of fp8 are those of whole rows and matrices, which tp, cp and ep split",
        "Use bf16, or data parallelism, ZeRO and pipeline stages",
    ),
    Refusal(
        "precision",
        lambda plan: plan.precision == "fp8" and plan.layout.pp > 1 and plan.schedule in ("zero_bubble", "zbv"),
        "fp8 does not put off the gradients of weights, which this schedule fills its bubble with",
        "Use bf16, or schedule: 1f1b or interleaved",
    ),
)


def _blocks_communicate(layout: Layout) -> bool:
    return layout.tp * layout.pp * layout.cp * layout.ep > 1 or layout.zero == 3


def refused(plan: Plan) -> list[Finding]:
    """Everything for which a plan cannot run with any model; empty if it can."""
    return [refusal.finding(plan) for refusal in REFUSALS if refusal.when(plan)]


def refused_for(plan: Plan, model: ModelConfig, task: str, seq_len: int) -> list[Finding]:
    """The same, and everything for which it cannot run with this model on rows of `seq_len` tokens."""
    found = refused(plan)
    layout = plan.layout
    if layout.pp * layout.tp * layout.cp * layout.ep > 1 and model.arch not in ARCHITECTURES:
        sizes = f"tp {layout.tp}, pp {layout.pp}, cp {layout.cp}, ep {layout.ep}"
        what = f"{sizes}, but nothing says how the parameters and positions of {model.arch!r} are split"
        return [*found, Finding("plan.layout", what, "Use 1 for each of them with models of your own")]
    if plan.graphs and (model.arch not in ARCHITECTURES or model.experts):
        what = "true, but only our own models without experts are known to run block after block"
        found.append(Finding("plan.graphs", what, "Leave it out"))
    found += expert_findings(model, layout.ep, layout.dp)
    if model.experts and layout.cp > 1:
        what = f"{layout.cp}, but the balance and the capacity of experts are counted by row, which cp splits"
        found.append(Finding("plan.layout.cp", what, "Use cp: 1 for a model of experts"))
    if layout.tp > 1:
        found += tensor_findings(model, layout.tp)
        if plan.sequence_parallel and layout.cp == 1 and seq_len % layout.tp:
            what = f"true, but rows of {seq_len} tokens do not divide by tp {layout.tp}"
            found.append(Finding("plan.sequence_parallel", what, "Use sequence_parallel: false, or another data.seq_len"))
    found += context_findings(plan, model, seq_len)
    if layout.pp > 1:
        found += check_split(plan.split, model.layers, layout.pp * plan.chunks)
    return found
