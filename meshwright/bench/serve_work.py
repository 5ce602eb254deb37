"""What every engine of `bench serving` answers, and the figures of its answers from the times of their tokens."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from meshwright.config.recipes import recipe
from meshwright.config.schema import ModelConfig

__all__ = ["add_work", "answered", "prompts_of", "shape_of"]

SMALL = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 512, "max_len": 512}


def add_work(parser: argparse.ArgumentParser) -> None:
    """The options that say what is to be answered."""
    parser.add_argument("recipe")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--answer", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--smoke", action="store_true", help="tiny numbers in place of the recipe's")


def shape_of(name: str, smoke: bool) -> ModelConfig:
    return ModelConfig(**{**recipe(name), **(SMALL if smoke else {})})


def prompts_of(vocab: int, args: argparse.Namespace) -> list[tuple[int, ...]]:
    """Random tokens, the same for every engine."""
    draw = random.Random(0)
    return [tuple(draw.randrange(vocab) for _ in range(args.prompt)) for _ in range(args.requests)]


def answered(engine: str, start: float, end: float, times: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The record of answers, all of which were asked for at `start`. times: of each token of each answer, as the host got it.

    tokens_per_s   tokens of answers over the seconds from `start` to `end`
    first_token    seconds to the first token of any answer; ttft: the median answer's
    decode_step    seconds from a token to the next of the same answer, the median while every answer is between its first and
                   its last token: nothing but single tokens is computed then. None where there is no such time
    """
    made, seconds = sum(map(len, times)), end - start
    opened, closed = max(one[0] for one in times), min(one[-1] for one in times)
    gaps = [after - before for one in times for before, after in pairwise(one) if opened <= before and after <= closed]
    return {
        "engine": engine,
        "tokens_per_s": made / seconds,
        "samples_per_s": len(times) / seconds,
        "tokens": made,
        "seconds": seconds,
        "spread": 0.0,
        "first_token": min(one[0] for one in times) - start,
        "ttft": statistics.median(one[0] for one in times) - start,
        "decode_step": statistics.median(gaps) if gaps else None,
        "decode_steps": len(gaps) // len(times),
    }
