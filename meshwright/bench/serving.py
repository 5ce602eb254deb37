"""Our own side of a serving measurement: an engine with random weights of a recipe, and random prompts, all queued at once.

python -m meshwright.bench.serving llama-1b --requests 256 --prompt 512 --answer 256 [--running 256] [--smoke]
                                            [--quantization fp8] [--kv-cache-dtype fp8]
                                            [--eager] [--no-early] [--profile FILE]

An answer has exactly `--answer` tokens, temperature 0. Prints one line of JSON: tokens of answers a second, steps, seconds of
the median step in which every sequence has one new token, and beside them the limit of such a step: the bytes of the weights,
and of the keys and values of the mean context, at the rate at which this device copies (measured in the same run).

--profile writes a trace of five such steps (chrome://tracing, Perfetto) and prints the time of each kernel in one of them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import profile, supported_activities

from meshwright.bench.ceilings import copy_rate
from meshwright.bench.kernels import swapped
from meshwright.bench.measure import GIB
from meshwright.config.recipes import recipe
from meshwright.config.schema import ModelConfig
from meshwright.distributed import device as devices
from meshwright.kernels import early
from meshwright.models.initialize import materialise
from meshwright.models.registry import build
from meshwright.models.trunk import Trunk
from meshwright.serve.engine import LLMEngine
from meshwright.serve.quantize import KV_DTYPES, QUANTIZATIONS, cache_dtype, quantize_matrices
from meshwright.serve.request import Request
from meshwright.serve.runner import Runner
from meshwright.serve.sampling import SamplingParams

SMALL = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 512, "max_len": 512}


def main() -> None:
    args = arguments()
    config = ModelConfig(**{**recipe(args.recipe), **(SMALL if args.smoke else {})})
    device = devices.rank_device(devices.pick(), 0)
    devices.set_current(device)
    with swapped(early, "ALLOWED", args.early and early.ALLOWED):
        run(config, device, args)


def run(config: ModelConfig, device: torch.device, args: argparse.Namespace) -> None:
    engine = engine_of(config, device, args)
    prompts = prompts_of(config.vocab or 0, args)
    if args.warm:
        measure(engine, device, prompts[: args.running or args.requests], 8)
    found = measure(engine, device, prompts, args.answer)
    bound = limit(engine, device, min(args.running or args.requests, args.requests), args.prompt + args.answer / 2)
    print(json.dumps({**found, **bound, **said(engine, device, args)}), flush=True)
    if args.profile:
        traced(engine, device, prompts[: args.running or args.requests], args.profile)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--answer", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--running", type=int, help="sequences at a time; default: all")
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a step")
    parser.add_argument("--block", type=int, default=16, help="tokens of a block of the cache")
    parser.add_argument("--eager", action="store_true", help="steps are called, never recorded; the next one is not ahead")
    parser.add_argument("--no-early", dest="early", action="store_false", help="no kernel begins while another one ends")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="of the matrices")
    parser.add_argument("--kv-cache-dtype", choices=tuple(KV_DTYPES))
    parser.add_argument("--profile", metavar="FILE", help="a trace of five decode steps goes there")
    parser.add_argument("--no-warm", dest="warm", action="store_false")
    parser.add_argument("--smoke", action="store_true", help="tiny numbers in place of the recipe's")
    return parser.parse_args()


def engine_of(config: ModelConfig, device: torch.device, args: argparse.Namespace) -> LLMEngine:
    """An engine of the recipe's shape, bf16 on an accelerator."""
    model = build(config, "lm", torch.float32 if device.type == "cpu" else torch.bfloat16)
    assert isinstance(model, Trunk), "a recipe with a language-model head"
    materialise(model, device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
    if args.quantization is not None:
        quantize_matrices(model, device)
    running = args.running or args.requests
    sizes: dict[str, Any] = {"max_running": running, "token_budget": max(args.budget, running), "block_size": args.block}
    how: dict[str, Any] = {"graphs": False, "ahead": False} if args.eager else {}
    return LLMEngine(model, **sizes, **how, cache_dtype=cache_dtype(args.kv_cache_dtype), prefix=False)


def prompts_of(vocab: int, args: argparse.Namespace) -> list[tuple[int, ...]]:
    draw = random.Random(0)
    return [tuple(draw.randrange(vocab) for _ in range(args.prompt)) for _ in range(args.requests)]


def measure(engine: LLMEngine, device: torch.device, prompts: list[tuple[int, ...]], answer: int) -> dict[str, Any]:
    """All prompts to their end. decode: seconds of the steps in which nothing but single tokens was computed."""
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    devices.synchronize(device)
    start = time.perf_counter()
    for number, tokens in enumerate(prompts):
        engine.add(Request(str(number), tokens, params))
    made, decode, first = 0, [], None
    while engine.has_work:
        before, running = engine.stats()["computed_tokens"], len(engine.scheduler.running)
        at = time.perf_counter()
        made += sum(len(output.tokens) for output in engine.step())
        first = first or (time.perf_counter() - start if made else None)
        if engine.stats()["computed_tokens"] - before == running == len(prompts):
            decode.append(time.perf_counter() - at)
    seconds = time.perf_counter() - start
    return {
        "engine": "meshwright",
        "output_tokens_per_s": made / seconds,
        "tokens": made,
        "seconds": seconds,
        "first_token": first,
        "decode_step": statistics.median(decode) if decode else None,
        "decode_steps": len(decode),
    }


def limit(engine: LLMEngine, device: torch.device, sequences: int, context: float) -> dict[str, Any]:
    """Seconds that a step of one token for each sequence cannot go below: weights / rate + 2 layers kv_heads head_dim bytes x
    context x sequences / rate. A rate of copies counts what is read and what is written; the step only reads. An embedding is
    looked up, so it counts where it is the output matrix too."""
    runner = engine.runner
    assert isinstance(runner, Runner)  # of one device
    model, config, size = runner.model, runner.model.config, runner.cache_dtype.itemsize
    weights = sum(parameter.nbytes for parameter in model.parameters())
    weights -= 0 if config.tied else model.embedding.weight.nbytes
    head_dim = config.head_dim or config.width // config.heads
    token = 2 * config.layers * (config.kv_heads or config.heads) * head_dim * size
    rate = copy_rate(device, 16 << 20 if device.type == "cpu" else 4 << 30)
    seconds = {"weights_limit": weights / rate, "cache_limit": token * context * sequences / rate}
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


def said(engine: LLMEngine, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    memory = devices.memory(device)
    return {
        "requests": args.requests,
        "prompt": args.prompt,
        "answer": args.answer,
        "blocks": engine.pool.blocks,
        "steps": engine.stats()["steps"],
        "peak_gib": memory.allocated_peak / GIB,
    }


if __name__ == "__main__":
    main()
