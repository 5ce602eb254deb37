"""The table of strategies: which plans of some devices stand beside each other, and its columns. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.bench.table import NONE, Result
from meshwright.bench.workloads import Workload
from meshwright.errors import Finding, UserError
from meshwright.runtime.choose import choose_plan
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.plan_rules import refused_for

__all__ = ["FULL", "NAMES", "ONE", "Strategy", "parse_micro", "strategies", "strategy_lines"]

FULL, ONE = "one device, fp32", "one device"
NAMES = ("ddp", "zero-1", "zero-2", "zero-3", "pipeline", "tensor", "pipeline x tensor")
MICRO_STEPS_A_STAGE = 4
"""Micro-batches a pipeline stage and step."""


@dataclass(frozen=True)
class Strategy:
    """One row. plan: keys of a plan, a layout and a micro-batch among them. rows: of the global batch. chosen: whether the
    rule of `meshwright train` takes this layout on these devices."""

    name: str
    devices: int
    plan: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 0
    precision: str = "bf16"
    chosen: bool = False


def strategies(
    workload: Workload, devices: int, micro: Mapping[str, int] | None = None, memory: int | None = None
) -> list[Strategy]:
    """Rows for `devices`: one device in fp32 and in bf16, data parallel, every ZeRO stage, pipeline and tensor parallelism,
    alone and together where there are ranks for both, and what the rule chooses where that is none of these.

    micro: rows a device of a strategy by name, default those of the workload; the global batch is that x `devices` in every
    row. memory: bytes of a device, for the rule; None on a CPU. What the model cannot have is left out.
    """
    micro = dict(micro or {})
    rows = {name: micro.get(name, workload.rows) for name in (ONE, *NAMES)}
    found = [
        Strategy(FULL, 1, _plan(Layout(), rows[ONE], precision="fp32"), rows[ONE], "fp32"),
        Strategy(ONE, 1, _plan(Layout(), rows[ONE]), rows[ONE]),
    ]
    if devices == 1:
        return found
    for name, layout in _layouts(devices).items():
        batch = rows[name] * devices
        steps = MICRO_STEPS_A_STAGE * layout.pp if layout.pp > 1 else 1
        here = max(1, batch // (layout.dp * steps)) if layout.pp * layout.tp > 1 else rows[name]
        found.append(Strategy(name, devices, _plan(layout, here), batch))
    config = workload.config(devices=devices, steps=1, folder="unused", precision="bf16")
    task = "lm" if workload.targets == "causal" else "mlm"
    found = [s for s in found if not refused_for(_whole(s), config.model, task, workload.seq_len)]
    chosen = choose_plan(config, world=devices, device_type="cuda", device_bytes=memory, task=task)
    same = [s for s in found if _whole(s).layout == chosen.layout]
    if same:
        return [replace(s, chosen=s is same[0]) for s in found]
    return [*found, Strategy("chosen", devices, _plan(chosen.layout, chosen.micro_batch), config.train.batch, chosen=True)]


def _layouts(devices: int) -> dict[str, Layout]:
    made = {"ddp": Layout(dp_replicate=devices)}
    made |= {f"zero-{stage}": Layout(dp_shard=devices, zero=stage) for stage in (1, 2, 3)}
    if devices % 2 == 0:
        rest = devices // 2
        beside = {"dp_shard": rest, "zero": 1} if rest > 1 else {}
        made["pipeline"] = Layout(pp=2, **beside)
        made["tensor"] = Layout(tp=2, **beside)
    if devices % 4 == 0:
        rest = devices // 4
        made["pipeline x tensor"] = Layout(pp=2, tp=2, **({"dp_shard": rest, "zero": 1} if rest > 1 else {}))
    return made


def _plan(layout: Layout, micro_batch: int, **more: Any) -> dict[str, Any]:
    sizes = {name: size for name, size in layout.to_dict().items() if size != getattr(Layout(), name)}
    return {"layout": sizes, "micro_batch": micro_batch, **more}


def _whole(strategy: Strategy) -> Plan:
    return Plan.from_dict(dict(strategy.plan))


def parse_micro(text: str) -> dict[str, int]:
    """`zero-2=64,zero-3=128` -> rows a device by strategy. Raises UserError that names what is unknown."""
    found: dict[str, int] = {}
    findings = []
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        if name not in (ONE, *NAMES) or not number.isdigit() or not int(number):
            findings.append(Finding("--micro", f"{part!r} is no strategy=rows", f"Strategies: {', '.join((ONE, *NAMES))}"))
        else:
            found[name] = int(number)
    if findings:
        raise UserError(findings=findings)
    return found


HEADER = (
    "strategy",
    "devices",
    "micro-batch",
    "batch",
    "samples/s",
    "tokens/s",
    "x one device",
    "x one in fp32",
    "scaling",
    "mean / peak GiB",
    "busy",
    "exposed comm.",
    "MFU",
    "of limit",
    "to the loss",
)


def strategy_lines(
    rows: Sequence[tuple[Strategy | None, Result]], limit: float | None, target: float | None
) -> list[list[str]]:
    """The table of one workload, header first. rows: with None for an engine that is not ours.

    scaling: samples/s over as many times those of one device in bf16. limit: samples/s or tokens/s (the workload's unit) of
    one device that needs its matmuls and attention alone. target: the loss of the last column.
    """
    one = {s.name: r for s, r in rows if s is not None and s.devices == 1 and r.figures is not None}
    lines = [[*HEADER[:-1], HEADER[-1] if target is None else f"to loss {target:g}"]]
    for strategy, result in rows:
        lines.append(_line(strategy, result, one, limit, target))
    return lines


def _line(
    strategy: Strategy | None, result: Result, one: Mapping[str, Result], limit: float | None, target: float | None
) -> list[str]:
    name = result.engine + (" (chosen)" if strategy is not None and strategy.chosen and strategy.name != "chosen" else "")
    micro = str(strategy.plan["micro_batch"]) if strategy is not None else NONE
    batch = str(strategy.rows) if strategy is not None else NONE
    if result.figures is None:
        return [name, str(result.gpus), micro, batch, result.reason, *[NONE] * (len(HEADER) - 5)]
    figures = result.figures
    rate = figures["samples_per_s"]

    def times(base: str) -> str:
        known = one.get(base)
        return NONE if known is None or known.figures is None else f"{rate / known.figures['samples_per_s']:.2f}"

    base = one.get(ONE)
    scaled = NONE
    if base is not None and base.figures is not None and result.gpus > 1:
        scaled = f"{rate / (result.gpus * base.figures['samples_per_s']):.1%}"
    memory = [figures.get("mean_gib"), figures.get("peak_gib")]
    return [
        name,
        str(result.gpus),
        micro,
        batch,
        f"{rate:,.1f}",
        f"{figures['tokens_per_s']:,.0f}",
        times(ONE),
        times(FULL),
        scaled,
        " / ".join(NONE if value is None else f"{value:.1f}" for value in memory),
        NONE if figures.get("busy") is None else f"{figures['busy']:.0f}%",
        NONE if figures.get("communication") is None else f"{figures['communication']:.1%}",
        NONE if figures.get("mfu") is None else f"{figures['mfu']:.1%}",
        NONE if limit is None else f"{result.rate / limit:.1%}",
        NONE if target is None or "reached" not in figures else _reached(figures["reached"]),
    ]


def _reached(reached: Mapping[str, Any] | None) -> str:
    return "not reached" if reached is None else f"{reached['step']} steps, {reached['seconds']:.1f} s"
