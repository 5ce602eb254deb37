"""Our own side of a serving measurement: an engine with random weights of a recipe, and random prompts, all queued at once.

python -m meshwright.bench.serving llama-1b --requests 256 --prompt 512 --answer 256 [--running 256] [--smoke]
                                            [--quantization fp8] [--kv-cache-dtype fp8] [--eager] [--no-early]
                                            [--profile FILE] [--tp N] [--pp N] [--dp N]

An answer has exactly `--answer` tokens, temperature 0. Prints one line of JSON: tokens of answers a second, steps, seconds of
the median step in which every sequence has one new token, and beside them the limit of such a step: the bytes of the weights,
and of the keys and values of the mean context, at the rate at which this device copies (measured in the same run).

--tp, --pp and --dp spread it as `meshwright serve` does, under torchrun with as many ranks as their product.
--profile writes a trace of five such steps (chrome://tracing, Perfetto) and prints the time of each kernel in one of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import profile, supported_activities

from meshwright.bench.ceilings import copy_rate
from meshwright.bench.kernels import swapped
from meshwright.bench.measure import GIB
from meshwright.bench.serve_work import add_work, answered, prompts_of, shape_of
from meshwright.config.schema import ModelConfig
from meshwright.distributed import device as devices
from meshwright.distributed.environment import read_world
from meshwright.distributed.world import Ranks, init_world
from meshwright.kernels import early
from meshwright.models.initialize import materialise
from meshwright.models.registry import build
from meshwright.models.trunk import Trunk
from meshwright.serve.engine import LLMEngine
from meshwright.serve.layout import Serving
from meshwright.serve.quantize import KV_DTYPES, QUANTIZATIONS, cache_dtype, quantize_matrices
from meshwright.serve.ranks import ServingGroup
from meshwright.serve.replicas import Replicas, follow_line
from meshwright.serve.request import Output, Request
from meshwright.serve.sampling import SamplingParams
from meshwright.serve.step_sizes import step_sizes
from meshwright.serve.wire import meet


def main() -> None:
    args = arguments()
    with swapped(early, "ALLOWED", args.early and early.ALLOWED):
        run(args)


def run(args: argparse.Namespace) -> None:
    config = shape_of(args.recipe, args.smoke)
    serving = Serving(args.tp, args.pp, args.dp)
    if serving.ranks > 1:
        with init_world(read_world(), devices.pick()) as ranks:
            spread(config, serving, ranks, args)
        return
    device = devices.rank_device(devices.pick(), 0)
    devices.set_current(device)
    engine, weights = engine_of(config, device, args)
    prompts = prompts_of(config.vocab or 0, args)
    report(engine, config, device, serving, weights, prompts, args)
    if args.profile:
        traced(engine, device, prompts[: args.running or args.requests], args.profile)


def spread(config: ModelConfig, serving: Serving, ranks: Ranks, args: argparse.Namespace) -> None:
    """One rank of several, as `Fleet.as_rank` has it, with a model that no file holds. The first one reports."""
    engine, weights = engine_of(config, ranks.device, args, ServingGroup.join(serving.tp, serving.pp, serving.dp))
    lines = meet(ranks.control, ranks.rank, serving.leads[1:]) if serving.dp > 1 else []
    if ranks.rank:
        follow_line(engine, lines[0]) if lines else engine.follow()  # type: ignore[arg-type]  # it has no tokenizer
        return
    whole = Replicas(engine, lines) if serving.dp > 1 else engine  # type: ignore[arg-type]
    try:
        report(whole, config, ranks.device, serving, weights, prompts_of(config.vocab or 0, args), args)
    finally:
        whole.close()


def report(
    engine: LLMEngine | Replicas,
    config: ModelConfig,
    device: torch.device,
    serving: Serving,
    weights: int,
    prompts: list[tuple[int, ...]],
    args: argparse.Namespace,
) -> None:
    if args.warm:
        measure(engine, device, prompts[: args.running or args.requests], min(8, args.answer))
    found = measure(engine, device, prompts, args.answer)
    bound = limit(config, device, serving, weights, min(args.running or args.requests, args.requests), args)
    print(json.dumps({**found, **bound, **said(engine, device, args)}), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--running", type=int, help="sequences at a time; default: all")
    parser.add_argument("--budget", type=int, help="tokens of a step; default: as for a file of prompts; of one, a server's")
    parser.add_argument("--block", type=int, default=16, help="tokens of a block of the cache")
    parser.add_argument("--eager", action="store_true", help="steps are called, never recorded; the next one is not ahead")
    parser.add_argument("--no-early", dest="early", action="store_false", help="no kernel begins while another one ends")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="of the matrices")
    parser.add_argument("--kv-cache-dtype", choices=tuple(KV_DTYPES))
    parser.add_argument("--profile", metavar="FILE", help="a trace of five decode steps goes there")
    parser.add_argument("--no-warm", dest="warm", action="store_false")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share every matrix")
    parser.add_argument("--pp", type=int, default=1, help="stages of layers behind each other")
    parser.add_argument("--dp", type=int, default=1, help="copies side by side")
    args = parser.parse_args()
    if args.profile and args.tp * args.pp * args.dp > 1:
        parser.error("--profile is of one device")
    if args.quantization and args.tp * args.pp * args.dp > 1:
        parser.error("--quantization is of one device")
    return args


def engine_of(
    config: ModelConfig, device: torch.device, args: argparse.Namespace, group: ServingGroup | None = None
) -> tuple[LLMEngine, int]:
    """An engine of the recipe's shape, bf16 on an accelerator, and the bytes of weights that a step of the whole model reads.

    Every rank makes the same whole model on its device and keeps its part."""
    model = build(config, "lm", torch.float32 if device.type == "cpu" else torch.bfloat16)
    assert isinstance(model, Trunk), "a recipe with a language-model head"
    materialise(model, device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
    if args.quantization is not None:
        quantize_matrices(model, device)
    weights = read_bytes(model)
    if group is not None and not group.alone:
        model = group.split(model)
        if device.type != "cpu":
            torch.accelerator.empty_cache()  # the other ranks' parts, or the cache would be sized beside them
    running = args.running or args.requests
    offline = args.requests > 1
    budget = max(running, args.budget or step_sizes(device.type, offline).tokens)
    sizes: dict[str, Any] = {"max_running": running, "token_budget": budget, "block_size": args.block, "offline": offline}
    how: dict[str, Any] = {"graphs": False, "ahead": False} if args.eager else {}
    how["cache_dtype"] = cache_dtype(args.kv_cache_dtype)
    return LLMEngine(model, **sizes, **how, prefix=False, group=group), weights


def read_bytes(model: Trunk) -> int:
    """Of weights in a step. An embedding is looked up, so it counts where it is the output matrix too."""
    embedding = 0 if model.config.tied else model.embedding.weight.nbytes
    return sum(parameter.nbytes for parameter in model.parameters()) - embedding


def measure(engine: LLMEngine | Replicas, device: torch.device, prompts: list[tuple[int, ...]], answer: int) -> dict[str, Any]:
    """All prompts to their end: `answered`."""
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    log: list[tuple[float, list[Output]]] = []
    devices.synchronize(device)
    start = time.perf_counter()
    for number, tokens in enumerate(prompts):
        engine.add(Request(str(number), tokens, params))
    while engine.has_work:
        outputs = engine.step()
        log.append((time.perf_counter(), outputs))
    times: list[list[float]] = [[] for _ in prompts]
    for moment, outputs in log:  # behind the clock: a step of 256 sequences has as many outputs
        for output in outputs:
            times[int(output.id)] += [moment] * len(output.tokens)
    return answered("meshwright", start, log[-1][0], times)


def limit(
    config: ModelConfig, device: torch.device, serving: Serving, weights: int, sequences: int, args: argparse.Namespace
) -> dict[str, Any]:
    """`step_limit` at the rate at which this device copies."""
    rate = copy_rate(device, 16 << 20 if device.type == "cpu" else 4 << 30)
    wide = 4 if device.type == "cpu" else 2
    token = token_bytes(config, wide if args.kv_cache_dtype is None else KV_DTYPES[args.kv_cache_dtype].itemsize)
    return step_limit(weights, token, sequences, args.prompt + args.answer / 2, rate, serving)


def token_bytes(config: ModelConfig, size: int) -> int:
    """Of the keys and values of a token: 2 layers kv_heads head_dim x size."""
    head_dim = config.head_dim or config.width // config.heads
    return 2 * config.layers * (config.kv_heads or config.heads) * head_dim * size


def step_limit(weights: int, token: int, sequences: int, context: float, rate: float, serving: Serving) -> dict[str, Any]:
    """Seconds below which no token for each sequence can come: weights / (tp rate) + token x context x sequences / (tp n rate).

    n: pp x dp, or the sequences where they are fewer. Stages and copies each read their weights for their own sequences, so
    only tp divides that time; a stage that waits for the one before reads nothing. A rate of copies counts what is read and
    what is written; the step only reads.
    """
    each = rate * serving.tp
    cache = token * context * sequences / min(serving.pp * serving.dp, sequences)
    seconds = {"weights_limit": weights / each, "cache_limit": cache / each}
    return {"bytes_per_s": rate, "weight_bytes": weights, "token_bytes": token, **seconds, "step_limit": sum(seconds.values())}


def traced(engine: LLMEngine, device: torch.device, prompts: list[tuple[int, ...]], file: str, steps: int = 5) -> None:
    """Starts all prompts, and traces some steps once each has its first token and while none has ended. To stderr:
    microseconds of one step by kernel, with how often it ran, and how long the step was."""
    started = sum(map(len, prompts)) // engine.scheduler.token_budget + len(prompts)  # at most, with the last one's first token
    room = engine.max_len - max(map(len, prompts))
    params = SamplingParams(temperature=0.0, max_tokens=min(room, started + 4 * steps), ignore_eos=True)
    for number, tokens in enumerate(prompts):
        engine.add(Request(str(number), tokens, params))
    waiting = {str(number) for number in range(len(prompts))}
    while waiting:
        waiting -= {output.id for output in engine.step()}
    for _ in range(3):
        engine.step()
    with profile(activities=supported_activities()) as trace:
        at = time.perf_counter()
        for _ in range(steps):
            engine.step()
        devices.synchronize(device)
        seconds = time.perf_counter() - at
    trace.export_chrome_trace(file)
    found = [event for event in trace.key_averages() if (event.device_type == DeviceType.CPU) is (device.type == "cpu")]
    took = {event.key: event.self_cpu_time_total if device.type == "cpu" else event.self_device_time_total for event in found}
    print(f"{sum(took.values()) / steps:10.1f} us in kernels of a step of {seconds / steps * 1e6:.1f}", file=sys.stderr)
    for event in sorted(found, key=lambda event: -took[event.key])[:40]:
        print(f"{took[event.key] / steps:10.1f} us {event.count / steps:7.1f} x {event.key[:90]}", file=sys.stderr)
    while engine.has_work:
        engine.step()


def said(engine: LLMEngine | Replicas, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    memory, stats = devices.memory(device), engine.stats()
    return {
        "requests": args.requests,
        "prompt": args.prompt,
        "answer": args.answer,
        "blocks": int(stats["kv_blocks"]),
        "steps": int(stats["steps"]),
        "peak_gib": memory.allocated_peak / GIB,
        "reserved_gib": memory.reserved_peak / GIB,
    }


if __name__ == "__main__":
    main()
