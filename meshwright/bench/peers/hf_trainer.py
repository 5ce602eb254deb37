"""Hugging Face's Trainer on a Llama or BERT of the workload's shape, bf16, SDPA: what most people would start with.

python -m torch.distributed.run --nproc-per-node N -m meshwright.bench.peers.hf_trainer llama-1b|bert-large [--smoke]
    [--compile | --liger]

--compile is the Trainer's torch_compile, --liger its use_liger_kernel; together they fail on torch 2.11, so they exclude each
other. On a CPU nothing is compiled, and --liger, whose kernels need an accelerator, gives no result. Needs transformers >= 5,
accelerate and, with --liger, liger_kernel.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch

from meshwright.bench.measure import Laps
from meshwright.bench.peers import PEERS, missing
from meshwright.bench.peers.common import Job, TorchRows, measured, parse, report, skip
from meshwright.distributed import device as devices


def main() -> None:
    job = parse(__doc__, PEERS["hf"].workloads, "--compile", "--liger")
    name = "hf-liger" if job.flags.liger else "hf"
    lacking = missing(PEERS[name])
    if lacking:
        skip(job, name, f"not installed: {', '.join(lacking)}")
    elif job.flags.compile and job.flags.liger:
        skip(job, name, "--compile and --liger exclude each other: together they fail on torch 2.11")
    elif job.flags.liger and job.device.type == "cpu":
        skip(job, name, "needs an accelerator: Liger's kernels do not run on a CPU")
    else:
        os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may be looked up
        devices.set_current(job.device)
        torch.set_float32_matmul_precision("high")
        train(job, name)


def hf_model(job: Job) -> torch.nn.Module:
    """The workload's shape in fp32, with the initial values and the dropout that transformers gives it."""
    from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

    ours = job.model
    shape: dict[str, Any] = {
        "vocab_size": job.vocab,
        "hidden_size": ours.width,
        "intermediate_size": ours.ffn,
        "num_hidden_layers": ours.layers,
        "num_attention_heads": ours.heads,
        "max_position_embeddings": ours.max_len,
        "attn_implementation": "sdpa",
    }
    if ours.arch == "encoder":
        dropouts: dict[str, Any] = {"hidden_dropout_prob": ours.dropout, "attention_probs_dropout_prob": ours.attention_dropout}
        return BertForMaskedLM(BertConfig(**shape, **dropouts))
    rope = {"rope_type": "default", "rope_theta": ours.rope_theta}
    return LlamaForCausalLM(
        LlamaConfig(
            **shape,
            num_key_value_heads=ours.kv_heads or ours.heads,
            head_dim=ours.head_dim or ours.width // ours.heads,
            rms_norm_eps=ours.norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=ours.tied,
            use_cache=False,
        )
    )


def settings(job: Job, folder: str) -> Any:
    from transformers import TrainingArguments

    cpu = job.device.type == "cpu"
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=job.workload.rows,
        max_steps=job.steps,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        optim="adamw_torch_fused",
        bf16=True,
        use_cpu=cpu,
        torch_compile=job.flags.compile and not cpu,
        use_liger_kernel=job.flags.liger,
        dataloader_num_workers=0 if cpu else 2,
        dataloader_pin_memory=not cpu,
        dataloader_drop_last=True,
        ddp_find_unused_parameters=False,
        average_tokens_across_devices=False,  # ranks have equally many targets; with it BERT's loss is multiplied by the ranks
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=0,
    )


def train(job: Job, name: str) -> None:
    from transformers import Trainer, TrainerCallback

    laps, losses = Laps(job.device), []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            laps.mark()

    class Kept(Trainer):
        """The Trainer as it is; the losses are kept on the device, so that nothing waits for them."""

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.detach())
            return loss

    data = TorchRows(job.workload, job.steps * job.workload.rows * job.world, shifted=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = settings(job, folder)
        torch.manual_seed(0)
        with job.device:
            model = hf_model(job)
        Kept(model=model, args=arguments, train_dataset=data, callbacks=[Clock()]).train()
    report(job, measured(job, name, laps, losses))


if __name__ == "__main__":
    main()
