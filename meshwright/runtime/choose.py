"""The plan when none is given: the data-parallel layout that fits a device, and the largest micro-batch that surely does."""

from __future__ import annotations

from meshwright.config.schema import Config
from meshwright.errors import Finding, LayoutError
from meshwright.plan.memory import WEIGHT_BYTES, state_bytes
from meshwright.spec.counts import parameter_count
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan

__all__ = ["bucket_mib", "choose_plan", "memory_bytes"]

CPU_TOKENS = 2048
"""Tokens a micro-batch on CPU: past this, larger matrices are no faster and only cost memory."""
GIB = 2**30
SAFE_SHARE = 0.85
"""Share of a device that the rough estimate may fill: fragmentation, workspaces and communication buffers take the rest."""


def choose_plan(config: Config, *, world: int, device_type: str, device_bytes: int | None, task: str) -> Plan:
    """device_bytes: memory of one device; None where it is not a limit (CPU).

    Data parallel where states and one row fit a device, else ZeRO-1, else ZeRO-2, sharded over all devices. Raises
    LayoutError when one row fits none of them.
    """
    compile_mode = config.compile
    if compile_mode == "auto":
        compile_mode = "off" if device_type == "cpu" else "inductor"
    rows = -(-config.train.batch // world)
    layout, reason = Layout(dp_replicate=world), f"data parallel over {world} device{'s' * (world > 1)}"
    if device_bytes is not None:
        layout, reason = _first_that_fits(config, world, device_bytes, task)
    if config.train.micro_batch:
        micro, why = config.train.micro_batch, "train.micro_batch"
    elif device_bytes is None:
        micro = max(1, min(rows, CPU_TOKENS // config.data.seq_len))
        why = f"at most {CPU_TOKENS} tokens a micro-batch on CPU"
    else:
        micro = next(m for m in range(rows, 0, -1) if m == 1 or _fits(config, m, task, layout, device_bytes))
        why = f"about {memory_bytes(config, micro, task, layout) / GIB:.1f} of {device_bytes / GIB:.1f} GiB a device"
    accumulation = -(-rows // micro)
    return Plan(
        layout=layout,
        micro_batch=-(-rows // accumulation),  # even micro-batches: fewer padded rows at the same number of micro-steps
        precision=config.precision,
        compile=compile_mode,
        bucket_mib=bucket_mib(parameter_count(config.model, task), config.precision),
        reason=f"{reason}; {why}",
    )


def bucket_mib(parameters: int, precision: str) -> int:
    """Gradients reduced together: a 24th of them, at least 32 and at most 256 MiB.

    Fewer, larger messages use the link better (two H200: 129 GB/s at 16 MiB, 269 at 256), smaller ones leave less to reduce
    when backward is over. Measured in docs/performance-log.md.
    """
    item = 8 if precision == "fp64" else 4
    return max(32, min(256, round(parameters * item / 2**20 / 24)))


def _first_that_fits(config: Config, world: int, device_bytes: int, task: str) -> tuple[Layout, str]:
    """The layout that moves the fewest bytes among those that hold one row, and why it is that one."""
    have = device_bytes / GIB
    layouts = [Layout(dp_replicate=world)]
    if world > 1:
        layouts += [Layout(dp_shard=world, zero=1), Layout(dp_shard=world, zero=2)]
    told: list[str] = []
    for layout in layouts:
        name = f"ZeRO-{layout.zero}" if layout.zero else "data parallel"
        if _fits(config, 1, task, layout, device_bytes):
            because = f" ({', '.join(told)}, {SAFE_SHARE:.0%} of {have:.1f} may be used)" if told else ""
            return layout, f"{name} over {world} device{'s' * (world > 1)}{because}"
        told.append(f"{name} needs about {memory_bytes(config, 1, task, layout) / GIB:.1f} GiB")
    raise LayoutError(
        findings=[
            Finding(
                "plan.micro_batch",
                f"one row of {config.data.seq_len} tokens does not fit {have:.1f} GiB a device: {', '.join(told)}",
                "Shorten data.seq_len, choose a smaller model, or start more devices" + ("" if world > 1 else " (ZeRO)"),
            )
        ]
    )


def _fits(config: Config, micro_batch: int, task: str, layout: Layout, device_bytes: int) -> bool:
    return memory_bytes(config, micro_batch, task, layout) <= SAFE_SHARE * device_bytes


def memory_bytes(config: Config, micro_batch: int, task: str, layout: Layout) -> float:
    """Rough peak of one rank, in bytes: states (`plan.memory.state_bytes`) and activations without recompute.

    Autograd's own gradient of a weight lives until it is added to the flat buffer: e bytes an element of the largest one.
    Activations a token and layer, e bytes an element (work type):
    e (8 width + 2 (1 + 2 kv/heads) width + 4 ffn) + 4 heads, and 8 bytes a logit for one chunk of the head.
    """
    model, optimizer = config.model, config.train.optimizer
    e = WEIGHT_BYTES[config.precision]
    largest = max((model.vocab or 0) * model.width, 2 * model.ffn * model.width)
    parameters = parameter_count(model, task)
    states = state_bytes(
        parameters,
        config.precision,
        layout,
        moments=2 if optimizer.kind == "adamw" else int(optimizer.momentum > 0),
        ema=config.train.ema > 0,
        bucket_bytes=bucket_mib(parameters, config.precision) * 2**20,
        largest=largest,
    )
    kv_share = (model.kv_heads or model.heads) / model.heads
    layer = e * (8 * model.width + 2 * (1 + 2 * kv_share) * model.width + 4 * model.ffn) + 4 * model.heads
    tokens = micro_batch * config.data.seq_len
    head = 8 * (model.vocab or 0) * min(tokens, 8192)
    return states.total + e * largest + tokens * layer * model.layers + head
