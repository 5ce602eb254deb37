"""Continuous batching of transformers on a Llama of the recipe's shape: random weights, SDPA, greedy, all prompts at once.

python -m meshwright.bench.peers.hf_serving llama-1b --requests 256 --prompt 512 --answer 256 [--smoke]

The same prompts as our side, and answers of exactly as many tokens: no token ends one. Everything is as transformers has it by
default (CUDA graphs and batches ahead as it chooses), but for blocks shared between prompts, which random ones have none of,
and a flash attention that would be looked up on a hub. Warmed up by eight tokens of every prompt. One device. Needs
transformers >= 5.17.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from typing import Any

import torch

from meshwright.bench.measure import GIB
from meshwright.bench.serve_work import add_work, answered, prompts_of, shape_of
from meshwright.config.schema import ModelConfig
from meshwright.distributed import device as devices

ENGINE = "hf"
WARM = 8
"""Tokens of each answer before those that count."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may be looked up
    try:
        from transformers import ContinuousBatchingConfig, GenerationConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints
    except ImportError as error:
        print(json.dumps({"engine": ENGINE, "skipped": f"needs transformers >= 5.17: {error}"}), flush=True)
        return
    device = devices.rank_device(devices.pick(), 0)
    devices.set_current(device)
    config = shape_of(args.recipe, args.smoke)
    model = model_of(config, device)
    prompts = [list(tokens) for tokens in prompts_of(config.vocab or 0, args)]
    options: dict[str, Any] = {"allow_block_sharing": False}
    if "auto_switch_to_flash" in {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}:
        options["auto_switch_to_flash"] = False
    if device.type == "cpu":  # by itself it takes nine tenths of the machine's memory
        options |= {"num_blocks": args.requests * (2 + (args.prompt + args.answer) // 256), "max_batch_tokens": 256}
    context = model.continuous_batching_context_manager(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=args.answer),
        continuous_batching_config=ContinuousBatchingConfig(**options),
        workload_hints=WorkloadHints(args.prompt, args.answer, args.requests),
    )
    with context as manager:
        measure(manager, prompts, min(WARM, args.answer))
        found = measure(manager, prompts, args.answer)
    memory = devices.memory(device)
    peaks = {"peak_gib": memory.allocated_peak / GIB, "reserved_gib": memory.reserved_peak / GIB}
    print(json.dumps({**found, **peaks, "attention": model.config._attn_implementation}), flush=True)


def model_of(config: ModelConfig, device: torch.device) -> Any:
    """The same shape and kind of random weights as ours, bf16 on an accelerator."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fields: dict[str, Any] = {"vocab_size": config.vocab, "attn_implementation": "sdpa"}
    shape = LlamaConfig(
        **fields,
        hidden_size=config.width,
        intermediate_size=config.ffn,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads or config.heads,
        head_dim=config.head_dim or config.width // config.heads,
        max_position_embeddings=config.max_len,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied,
        initializer_range=0.02,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if device.type == "cpu" else torch.bfloat16)
    try:
        with device:
            return LlamaForCausalLM(shape).eval()
    finally:
        torch.set_default_dtype(before)


def measure(manager: Any, prompts: list[list[int]], answer: int) -> dict[str, Any]:
    """All prompts to their end: `answered`. Raises RuntimeError for an answer that is not as long as it was asked for."""
    start = time.perf_counter()
    manager.add_requests(inputs=prompts, max_new_tokens=answer, record_timestamps=True)
    times: list[list[float]] = []
    while len(times) < len(prompts):
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("transformers' generation thread has ended before all answers were there")
        elif result.error is not None or (result.is_finished() and len(result.generated_tokens) != answer):
            raise RuntimeError(result.error or f"an answer of {len(result.generated_tokens)} tokens in place of {answer}")
        elif result.is_finished():
            times.append(result.timestamps)
    return answered(ENGINE, start, time.perf_counter(), times)


if __name__ == "__main__":
    main()
