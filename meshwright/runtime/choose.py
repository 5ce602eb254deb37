"""The plan where none, or only a part of one, is given: the first layout that fits a device, and the largest micro-batch
that surely does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from meshwright.config.schema import Config
from meshwright.distributed.device import records
from meshwright.errors import Finding, LayoutError
from meshwright.plan.memory import WEIGHT_BYTES, state_bytes
from meshwright.spec.context import resolved
from meshwright.spec.counts import parameter_count, rank_parameters
from meshwright.spec.layout import Layout
from meshwright.spec.pipeline import alive, pipeline_actions
from meshwright.spec.plan import Plan
from meshwright.spec.plan_rules import refused_for

__all__ = ["bucket_mib", "choose_plan", "compile_mode", "layout_name", "layouts", "memory_bytes", "with_graphs"]

CPU_TOKENS = 2048
"""Tokens a micro-batch on CPU: past this, larger matrices are no faster and only cost memory."""
GIB = 2**30
SAFE_SHARE = 0.85
"""Share of a device that the rough estimate may fill: fragmentation, workspaces and communication buffers take the rest."""
BLOCK_SECONDS = 1.5e-3
"""Forward of a block below which the host is late with the launches of the next one. On an H200, where it takes 0.4 ms to
launch a compiled block, kernels of a 24-layer encoder of width 1,024 (0.69 ms by this count) wait for it, those of BERT-large
(2.06) and of a Llama of 1.2 billion parameters (4.98) do not."""
BLOCK_FLOPS = 400e12
"""A second, of matrix products in bf16 inside a block: what an H200 does."""
MICRO_STEPS_A_STAGE = 4
"""Micro-batches a pipeline stage and step: the bubble of 1F1B, (pp - 1) / (m + pp - 1), is then below a fifth."""


def choose_plan(
    config: Config,
    *,
    world: int,
    device_type: str,
    device_bytes: int | None,
    task: str,
    given: Mapping[str, Any] | None = None,
    local: int | None = None,
) -> Plan:
    """device_bytes: memory of one device; None where it is not a limit (CPU). local: devices of one host, default all.
    given: keys of a plan that are not to be chosen (as in a plan file; of a layout, too, what is missing is filled in).

    The first of `layouts` with which states and one row fit a device; plain data parallelism on a CPU. Raises LayoutError
    when one row fits none of them, and for a given layout that the devices cannot have.
    """
    given = dict(given or {})
    base = Plan(
        precision=config.precision,
        compile=compile_mode(config, device_type),
        bucket_mib=bucket_mib(parameter_count(config.model, task), config.precision),
    )
    base = replace(base, **{key: value for key, value in given.items() if key not in ("layout", "micro_batch", "reason")})
    if "layout" in given:
        plan, reason = replace(base, layout=fill_layout(given["layout"], world)), str(given.get("reason") or "given")
    elif device_bytes is None:
        plan, reason = replace(base, layout=Layout(dp_replicate=world)), layout_name(Layout(dp_replicate=world))
    else:
        plan, reason = _first_that_fits(base, config, world, local or world, device_bytes, task)
    plan = replace(plan, context=resolved(plan, config.model))
    if "micro_batch" in given:  # more than a rank's rows would be padding
        plan = replace(plan, micro_batch=min(given["micro_batch"], -(-config.train.batch // plan.layout.dp)), reason=reason)
    else:
        micro, why = _micro_batch(plan, config, device_bytes, task)
        plan = replace(plan, micro_batch=micro, reason=f"{reason}; {why}")
    return plan if "graphs" in given else with_graphs(plan, config, device_type, task, device_bytes)


def with_graphs(plan: Plan, config: Config, device_type: str, task: str, device_bytes: int | None) -> Plan:
    """The same plan with `graphs` where that is legal, fits, and a block's forward is so short (`BLOCK_SECONDS`) that the host
    is what a step waits for: 2 operations a parameter and token, `BLOCK_FLOPS` a second."""
    recorded = replace(plan, graphs=True)
    if not records(device_type) or refused_for(recorded, config.model, task, config.data.seq_len):
        return plan
    tokens = plan.micro_batch * config.data.seq_len
    seconds = 2 * rank_parameters(config.model, task, plan.layout).block * tokens / BLOCK_FLOPS
    fits = device_bytes is None or _fits(recorded, config, plan.micro_batch, task, device_bytes)
    return recorded if seconds < BLOCK_SECONDS and fits else plan


def fill_layout(given: Mapping[str, int], world: int) -> Layout:
    """A layout from some of its sizes: data ranks that are not given are what is left of `world`, to shard over where a ZeRO
    stage is given. Raises LayoutError where that is no whole number."""
    known = Layout(**given)
    rest, odd = divmod(world, known.world)
    free = [axis for axis in (("dp_shard", "dp_replicate") if known.zero else ("dp_replicate",)) if axis not in given]
    if not rest or (rest > 1 and not odd and not free):
        what = f"is for {known.world} ranks, but {world} are started"
        raise LayoutError(findings=[Finding("--plan", what, f"Give --nproc {known.world}")])
    if odd:
        sizes = " x ".join(f"{name} {size}" for name, size in known.axes if size > 1) or "one rank"
        legal = ", ".join(str(n) for n in (world - odd, world - odd + known.world) if n > 0)
        what, fix = f"{sizes} does not divide {world} ranks", f"Start {legal} ranks, or change a size"
        raise LayoutError(findings=[Finding("--plan", what, fix)])
    return replace(known, **{free[0]: rest * getattr(known, free[0])}) if free else known


def bucket_mib(parameters: int, precision: str) -> int:
    """Gradients reduced together: a 24th of them, at least 32 and at most 256 MiB.

    Fewer, larger messages use the link better (two H200: 129 GB/s at 16 MiB, 269 at 256), smaller ones leave less to reduce
    when backward is over. Measured in docs/performance-log.md.
    """
    item = 8 if precision == "fp64" else 4
    return max(32, min(256, round(parameters * item / 2**20 / 24)))


def layout_name(layout: Layout) -> str:
    """`ZeRO-1 over 4 devices x tensor 2`."""
    sharded = f"ZeRO-{layout.zero} over {layout.shards}" + (f" x {layout.dp_replicate} replicas" * (layout.dp_replicate > 1))
    name = sharded if layout.zero else f"data parallel over {layout.dp}"
    name += f" device{'s' * (layout.world > 1)}" if layout.world == layout.dp else ""
    rest = (("context", layout.cp), ("tensor", layout.tp), ("pipeline", layout.pp))
    name += f", experts over {layout.ep}" * (layout.ep > 1)
    return name + "".join(f" x {what} {size}" for what, size in rest if size > 1)


def compile_mode(config: Config, device_type: str) -> str:
    """What `compile: auto` is on a device: inductor, but on a CPU off, where compiling takes longer than most runs."""
    if config.compile != "auto":
        return config.compile
    return "off" if device_type == "cpu" else "inductor"


def _micro_batch(plan: Plan, config: Config, device_bytes: int | None, task: str) -> tuple[int, str]:
    """Rows of a micro-batch, and why as many."""
    rows = -(-config.train.batch // plan.layout.dp)
    if config.train.micro_batch:
        most, why = config.train.micro_batch, "train.micro_batch"
    elif device_bytes is None:
        most = max(1, min(rows, CPU_TOKENS * plan.layout.cp // config.data.seq_len))
        why = f"at most {CPU_TOKENS} tokens a micro-batch on CPU"
    else:
        most = next(m for m in range(rows, 0, -1) if m == 1 or _fits(plan, config, m, task, device_bytes))
        need = memory_bytes(config, most, task, plan)
        why = f"about {need / GIB:.1f} of {device_bytes / GIB:.1f} GiB a device"
    if plan.layout.pp > 1 and not config.train.micro_batch:
        fed = max(1, rows // (MICRO_STEPS_A_STAGE * plan.layout.pp))
        most, why = min(most, fed), why if most <= fed else f"{MICRO_STEPS_A_STAGE} micro-batches a pipeline stage"
    accumulation = -(-rows // most)
    return -(-rows // accumulation), why  # even micro-batches: fewer padded rows at the same number of micro-steps


def layouts(world: int, local: int) -> Iterator[Layout]:
    """In the order in which they are tried, what sends the least first: ZeRO-1, 2, 3 over all devices, tensor parallelism
    inside a host beside ZeRO, pipeline stages across hosts beside both, and context parallelism for rows too long for all that.

    ZeRO-1 sends what plain data parallelism sends, updates a share of the weights on each device, and was 1% faster on two
    (docs/performance.md).
    """
    if world == 1:
        yield Layout()
        return
    yield from (Layout(dp_shard=world, zero=stage) for stage in (1, 2, 3))
    inside = [tp for tp in (2, 4, 8, 16) if tp <= local and world % tp == 0]
    for tp in inside:
        yield from _beside(world, tp=tp)
    for pp in (2, 4, 8, 16, 32, 64):
        for tp in [*reversed(inside), 1]:
            if world % (pp * tp) == 0:
                yield from _beside(world, tp=tp, pp=pp)
    for cp in (2, 4, 8, 16, 32, 64):
        for tp in [*reversed(inside), 1]:
            if world % (cp * tp) == 0:
                yield Layout(dp_shard=world // (cp * tp), cp=cp, tp=tp, zero=3)


def replica_layouts(world: int, local: int) -> Iterator[Layout]:
    """For methods that send little between replicas: a replica a device, else a replica a host, sharded inside."""
    yield Layout(dp_replicate=world)
    hosts = world // local if world % local == 0 else 1
    if hosts > 1 and local > 1:
        yield from (Layout(dp_replicate=hosts, dp_shard=local, zero=stage) for stage in (1, 2, 3))


def _beside(world: int, *, tp: int, pp: int = 1) -> Iterator[Layout]:
    data = world // (tp * pp)
    if data == 1:
        yield Layout(tp=tp, pp=pp)
        return
    yield from (Layout(dp_shard=data, zero=stage, tp=tp, pp=pp) for stage in (1, 3))


def _first_that_fits(base: Plan, config: Config, world: int, local: int, device_bytes: int, task: str) -> tuple[Plan, str]:
    told: list[str] = []
    sync, length = config.train.sync, config.data.seq_len
    for layout in layouts(world, local) if sync.plain else replica_layouts(world, local):
        plan = replace(base, layout=layout, sequence_parallel=layout.tp == 1 or length // layout.cp % layout.tp == 0)
        if refused_for(plan, config.model, task, length):
            continue
        if _fits(plan, config, 1, task, device_bytes):
            share = f"{SAFE_SHARE:.0%} of {device_bytes / GIB:.1f} may be used"
            because = f" ({', '.join(told[-3:])}, {share})" if told else ""
            return plan, layout_name(layout) + because
        told.append(f"{_short(layout)} needs about {memory_bytes(config, 1, task, plan) / GIB:.1f} GiB")
    what = f"one row of {length} tokens does not fit {device_bytes / GIB:.1f} GiB a device: {', '.join(told)}"
    fix = "Shorten data.seq_len, choose a smaller model, or start more devices" + ("" if world > 1 else " (ZeRO)")
    raise LayoutError(findings=[Finding("plan.micro_batch", what, fix)])


def _short(layout: Layout) -> str:
    return (
        (f"ZeRO-{layout.zero}" if layout.zero else "data parallel" if layout.world == layout.dp else "")
        + f" cp {layout.cp}" * (layout.cp > 1)
        + f" tp {layout.tp}" * (layout.tp > 1)
        + f" pp {layout.pp}" * (layout.pp > 1)
    ).strip()


def _fits(plan: Plan, config: Config, micro_batch: int, task: str, device_bytes: int) -> bool:
    return memory_bytes(config, micro_batch, task, plan) <= SAFE_SHARE * device_bytes


def memory_bytes(config: Config, micro_batch: int, task: str, plan: Plan) -> float:
    """Rough peak of one rank, in bytes: states (`plan.memory.state_bytes`) and activations.

    Autograd's own gradient of a weight lives until it is added to the flat buffer: e bytes an element of the largest one.
    Activations a token and layer, e bytes an element (work type), with f = ffn (twice where gated) and q = (1 + 2 kv/heads)
    width:

        recompute    inside the matrices          between them    inputs of the matrices
        none         e (2 q + 4 ffn) + 4 heads    6 e width       2 e width
        selective    e (width + q + f)            2 e width       -
        full         -                            e width         -

    fp8 keeps the inputs of matrices in 8 bits: without recompute 2 width and ffn less, width more for what attention gives,
    which is kept beside. And 2 bytes an element of the widest of them, while it is cast.

    Tensor ranks share the first column, under sequence parallelism the second too; the third is whole on each. A stage of a
    pipeline keeps those of as many micro-batches as are under way. Context-parallel ranks have 1/cp of the tokens. Recompute
    has one whole layer beside them. And 8 bytes a logit for one chunk of the head. Activations in host memory are not taken
    off. Recorded blocks (`graphs`) keep their own gradients of weights, and of a token the gradient of each layer's input and a
    dropout key.
    """
    model, optimizer, layout = config.model, config.train.optimizer, plan.layout
    e, tp = WEIGHT_BYTES[config.precision], plan.layout.tp
    largest = max((model.vocab or 0) * model.width, 2 * model.ffn * model.width) // tp
    held = rank_parameters(model, task, layout)
    states = state_bytes(
        held.total,
        config.precision,
        layout,
        moments=optimizer.moments + config.train.sync.buffers,
        ema=config.train.ema > 0,
        bucket_bytes=plan.bucket_mib * 2**20,
        largest=largest,
        outside=held.outside,
        block=held.block,
        experts=held.experts,
        expert_block=held.expert_block,
        gather=plan.gather,
        offload=plan.offload,
    )
    q = (1 + 2 * (model.kv_heads or model.heads) / model.heads) * model.width
    f = model.ffn * (2 if model.activation == "swiglu" else 1)
    kinds = {
        "none": (e * (2 * q + 4 * model.ffn) + 4 * model.heads, 6 * e * model.width, 2 * e * model.width),
        "selective": (e * (model.width + q + f), 2 * e * model.width, 0),
        "full": (0, e * model.width, 0),
    }

    casts = 0
    if config.precision == "fp8":
        inside, between, inputs = kinds["none"]
        kinds["none"] = (inside - model.ffn + model.width, between, inputs - 2 * model.width)
        casts = 2 * max(f, round(q))

    def layer(recompute: str) -> float:
        inside, between, inputs = kinds[recompute]
        return inside / tp + between / (tp if plan.sequence_parallel else 1) + inputs

    kept = (layer(plan.recompute) + (plan.recompute_every - 1) * layer("none")) / plan.recompute_every
    tokens = micro_batch * config.data.seq_len // layout.cp
    under_way = _under_way(plan, -(-config.train.batch // (layout.dp * micro_batch)))
    layers = model.layers / layout.pp * under_way * kept + (layer("none") if plan.recompute != "none" else 0)
    head = 8 * (model.vocab or 0) * min(tokens, 8192) / tp
    recorded = model.layers * (e * held.block + tokens * (e * model.width + 4)) if plan.graphs else 0
    return states.total + e * largest + tokens * (layers + casts) + head + recorded


def _under_way(plan: Plan, steps: int) -> float:
    """Micro-batches whose activations the fullest rank of a pipeline holds at once, of all its stages together."""
    ranks = plan.layout.pp
    if ranks == 1:
        return 1
    if plan.schedule != "gpipe":
        steps = min(steps, 4 * ranks)  # more change nothing
    actions = pipeline_actions(plan.schedule, ranks, steps, plan.chunks)
    return max(alive(mine) for mine in actions) / plan.chunks
