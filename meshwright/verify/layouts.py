"""Which plans a number of ranks allows, and a few of them that stand for all. Integers only, no torch."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.config.schema import ModelConfig
from meshwright.errors import Finding, LayoutError, counted, not_json
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.plan_rules import refused, refused_for
from meshwright.verify.cover import pairwise

__all__ = ["CHUNKS", "describe", "factors", "layouts", "load_plans", "plans", "select"]

CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1, "zbv": 2}
"""Pipeline stages on a rank that a schedule is tried with."""


def layouts(world: int, experts: int = 0) -> list[Layout]:
    """Every way to split `world` ranks into pp x dp_replicate x dp_shard x cp x tp, each with every ZeRO stage and every way to
    deal `experts` to data ranks, that runs."""
    splits = [
        (pp, replicate, shard, cp, world // (pp * replicate * shard * cp))
        for pp in _divisors(world)
        for replicate in _divisors(world // pp)
        for shard in _divisors(world // (pp * replicate))
        for cp in _divisors(world // (pp * replicate * shard))
    ]
    every = (
        Layout(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, ep=ep, zero=zero)
        for pp, replicate, shard, cp, tp in splits
        for ep in (_divisors(math.gcd(replicate * shard, experts)) if experts else [1])
        for zero in range(4)
    )
    return [layout for layout in every if not refused(Plan(layout))]


def plans(world: int, base: Plan, model: ModelConfig, task: str, seq_len: int, rows: int) -> list[Plan]:
    """Every layout of `world` ranks, with every pipeline schedule, with and without sequence parallelism, with both methods of
    context parallelism, with each kind of recompute, and with one and three micro-steps of `rows` rows; what cannot run this
    model is left out.

    base: everything else; its micro-batch is the largest that is used.
    """
    found: dict[Plan, None] = {}
    for layout in layouts(world, model.experts):
        for changed in _variants(layout):
            for steps in (1, 3):
                micro = min(base.micro_batch, math.ceil(math.ceil(rows / layout.dp) / steps))
                plan = replace(base, layout=layout, micro_batch=micro, reason="", **changed)
                if not refused_for(plan, model, task, seq_len):
                    found[plan] = None
    return list(found)


def _variants(layout: Layout) -> Iterator[dict]:
    choices = itertools.product(
        CHUNKS if layout.pp > 1 else ("1f1b",),
        (True, False) if layout.tp > 1 else (True,),
        ("ring", "all_to_all") if layout.cp > 1 else ("auto",),
        ("none", "selective", "full"),
    )
    for schedule, sequence, context, recompute in choices:
        yield {
            "schedule": schedule,
            "chunks": CHUNKS[schedule] if layout.pp > 1 else 1,
            "sequence_parallel": sequence,
            "context": context,
            "recompute": recompute,
        }


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def factors(plan: Plan, rows: int) -> dict[str, Hashable]:
    """The choices in a plan, by name."""
    layout = plan.layout
    return {
        **dict(layout.axes),
        "ep": layout.ep,
        "zero": layout.zero,
        "schedule": plan.schedule if layout.pp > 1 else "",
        "sequence_parallel": plan.sequence_parallel if layout.tp > 1 else "",
        "context": plan.context if layout.cp > 1 else "",
        "recompute": plan.recompute,
        "micro_steps": plan.accumulation(rows) > 1,
    }


def select(candidates: Sequence[Plan], rows: int) -> list[Plan]:
    """A few plans in which every layout, and every pair of choices of all the candidates, is met."""
    seen: set[Layout] = set()
    chosen = pairwise([factors(plan, rows) for plan in candidates])
    seen.update(candidates[index].layout for index in chosen)
    for index, plan in enumerate(candidates):
        if plan.layout not in seen:
            seen.add(plan.layout)
            chosen.append(index)
    return [candidates[index] for index in sorted(chosen)]


def describe(plan: Plan, rows: int) -> tuple[str, str]:
    """(layout, how it is run) in a few words: "zero2 dp_shard 2 x tp 2", "3 micro-steps, selective recompute"."""
    layout = plan.layout
    parts = [f"{name} {size}" for name, size in layout.axes if size > 1] + [f"ep {layout.ep}"] * (layout.ep > 1)
    where = (f"zero{layout.zero} " if layout.zero else "") + (" x ".join(parts) or "one rank")
    how = [f"{plan.schedule}{f' x {plan.chunks}' if plan.chunks > 1 else ''}"] if layout.pp > 1 else []
    how += ["sequence parallel"] if layout.tp > 1 and plan.sequence_parallel else []
    how += [plan.context] if layout.cp > 1 else []
    steps = plan.accumulation(rows)
    how += [f"{steps} micro-steps"] if steps > 1 else []
    how += [f"{plan.recompute} recompute"] if plan.recompute != "none" else []
    how += [f"compile {plan.compile}"] if plan.compile != "off" else []
    how += [f"{plan.offload} offloaded"] if plan.offload != "none" else []
    return where, ", ".join(how)


def load_plans(path: str, world: int, base: Plan, model: ModelConfig, task: str, seq_len: int) -> list[Plan]:
    """The plans of a JSON file: one plan, or a list of them; what one leaves open is as in `base`.

    Raises LayoutError with everything that is wrong: no such file, unknown keys, plans for other ranks, refused layouts.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        fix = "Use auto, all, or the name of a JSON file with a list of plans"
        raise LayoutError(findings=[Finding(f"--layouts {path}", f"cannot be read: {error.strerror}", fix)]) from None
    except (ValueError, RecursionError) as error:
        raise LayoutError(findings=[Finding(path, not_json(error))]) from None
    entries = data if isinstance(data, list) else [data]
    found, findings = [], []
    for number, entry in enumerate(entries, 1):
        where = f"{path}: plan {number}"
        if not isinstance(entry, dict):
            findings.append(Finding(where, "is no JSON object"))
            continue
        try:
            plan = Plan.from_dict({**base.to_dict(), "layout": {}, **entry}, where)
        except LayoutError as error:
            findings += error.findings
            continue
        refusals = refused_for(plan, model, task, seq_len)
        findings += [Finding(f"{where}: {finding.where}", finding.what, finding.fix) for finding in refusals]
        if plan.layout.world != world:
            what = f"is for {counted(plan.layout.world, 'rank')}, but {world} are started"
            findings.append(Finding(where, what, f"Give --nproc {plan.layout.world}"))
        if plan.precision != base.precision:
            what = f"says precision {plan.precision}, but {base.precision} is verified"
            findings.append(Finding(where, what, f"Leave it out, or give --precision {plan.precision}"))
        found.append(plan)
    if not entries:
        findings.append(Finding(path, "holds no plan"))
    if findings:
        raise LayoutError(findings=findings)
    return found
