"""The plan when none is given: data parallel over every device, and the largest micro-batch that surely fits."""

from __future__ import annotations

from meshwright.config.schema import Config
from meshwright.errors import Finding, LayoutError
from meshwright.spec.counts import parameter_count
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan

__all__ = ["bucket_mib", "choose_plan", "memory_bytes"]

CPU_TOKENS = 2048
"""Tokens a micro-batch on CPU: past this, larger matrices are no faster and only cost memory."""
SAFE_SHARE = 0.85
"""Share of a device that the rough estimate may fill: fragmentation, workspaces and communication buffers take the rest."""


def choose_plan(config: Config, *, world: int, device_type: str, device_bytes: int | None, task: str) -> Plan:
    """device_bytes: memory of one device; None where it is not a limit (CPU). Raises LayoutError when one row does not fit."""
    compile_mode = config.compile
    if compile_mode == "auto":
        compile_mode = "off" if device_type == "cpu" else "inductor"
    rows = -(-config.train.batch // world)
    if config.train.micro_batch:
        micro, reason = config.train.micro_batch, "train.micro_batch"
    elif device_bytes is None:
        micro = max(1, min(rows, CPU_TOKENS // config.data.seq_len))
        reason = f"at most {CPU_TOKENS} tokens a micro-batch on CPU"
    else:
        micro, reason = _largest_that_fits(config, rows, device_bytes, task)
    layout = Layout(dp_replicate=world)
    accumulation = -(-rows // micro)
    return Plan(
        layout=layout,
        micro_batch=-(-rows // accumulation),  # even micro-batches: fewer padded rows at the same number of micro-steps
        precision=config.precision,
        compile=compile_mode,
        bucket_mib=bucket_mib(parameter_count(config.model, task), config.precision),
        reason=f"data parallel over {world} device{'s' * (world > 1)}; {reason}",
    )


def bucket_mib(parameters: int, precision: str) -> int:
    """Gradients reduced together: a 24th of them, at least 32 and at most 256 MiB.

    Fewer, larger messages use the link better (two H200: 129 GB/s at 16 MiB, 269 at 256), smaller ones leave less to reduce
    when backward is over. Measured in docs/performance-log.md.
    """
    item = 8 if precision == "fp64" else 4
    return max(32, min(256, round(parameters * item / 2**20 / 24)))


def _largest_that_fits(config: Config, rows: int, device_bytes: int, task: str) -> tuple[int, str]:
    budget = SAFE_SHARE * device_bytes
    if memory_bytes(config, 1, task) > budget:
        need, have = memory_bytes(config, 1, task) / 2**30, device_bytes / 2**30
        raise LayoutError(
            findings=[
                Finding(
                    "plan.micro_batch",
                    f"one row of {config.data.seq_len} tokens needs about {need:.1f} GiB and the device has {have:.1f} GiB",
                    "Shorten data.seq_len or choose a smaller model; only data parallelism is available",
                )
            ]
        )
    micro = next(m for m in range(rows, 0, -1) if memory_bytes(config, m, task) <= budget)
    used = memory_bytes(config, micro, task) / 2**30
    return micro, f"about {used:.1f} of {device_bytes / 2**30:.1f} GiB a device"


def memory_bytes(config: Config, micro_batch: int, task: str) -> float:
    """Rough peak of one data-parallel rank, in bytes: states and activations without recompute.

    States a parameter: bf16/fp16 2 work + 2 gradient + 4 reduced gradient + 4 master + 8 moments = 20; fp32 16; fp64 32.
    Activations a token and layer, e bytes an element (work type):
    e (8 width + 2 (1 + 2 kv/heads) width + 4 ffn) + 4 heads, and 8 bytes a logit for one chunk of the head.
    """
    model = config.model
    e = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[config.precision]
    states = {"bf16": 20, "fp16": 20, "fp32": 16, "fp64": 32}[config.precision] * parameter_count(model, task)
    kv_share = (model.kv_heads or model.heads) / model.heads
    layer = e * (8 * model.width + 2 * (1 + 2 * kv_share) * model.width + 4 * model.ffn) + 4 * model.heads
    tokens = micro_batch * config.data.seq_len
    head = 8 * (model.vocab or 0) * min(tokens, 8192)
    return states + tokens * layer * model.layers + head
