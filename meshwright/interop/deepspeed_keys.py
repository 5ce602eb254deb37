"""The keys of a DeepSpeed config file, and what each is here: used, without effect, or refused by name.

They are those of DeepSpeed's own config of August 2026, and the old names that it still takes.
"""

from __future__ import annotations

__all__ = ["BF16", "FP16", "HINTS", "OFFLOAD", "OPTIMIZER", "SCHEDULERS", "TOP_FEATURES", "TOP_PLAIN", "TOP_USED", "ZERO"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TOP_USED = _words(
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps fp16 bf16 bfloat16 amp zero_optimization "
    "optimizer scheduler gradient_clipping steps_per_print dataloader_drop_last"
)
TOP_PLAIN = _words(
    "wall_clock_breakdown memory_breakdown dump_state prescale_gradients gradient_predivide_factor fp32_allreduce "
    "communication_data_type seq_parallel_communication_data_type disable_allgather zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer sparse_gradients aio flops_profiler tensorboard wandb csv_monitor comet comms_logger "
    "activation_checkpointing checkpoint data_types nebula vocabulary_size use_node_local_storage graph_harvesting "
    "zero_allow_comm_data_type_fp32 timers load_universal_checkpoint"
)
"""They change speed, memory or what is printed, never what is computed; here they have no effect."""

TOP_FEATURES = _words(
    "sparse_attention compression_training curriculum_learning progressive_layer_drop eigenvalue quantize_training autotuning "
    "elasticity pipeline tensor_parallel data_efficiency hybrid_engine torch_autocast compile weight_quantization "
    "pld domino sequence_parallel_size zenflow"
)
"""They change what is computed or how the model is cut: refused while they are on."""

HINTS = {
    "max_grad_norm": "gradient_clipping",
    "grad_clip": "gradient_clipping",
    "clip_grad": "gradient_clipping",
    "clip_grad_norm": "gradient_clipping",
    "max_norm": "gradient_clipping",
    "batch_size": "train_batch_size",
    "learning_rate": "optimizer.params.lr",
    "lr": "optimizer.params.lr",
    "zero": "zero_optimization",
}
"""Names of other tools for something that DeepSpeed calls otherwise."""

FP16 = _words(
    "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale "
    "fp16_master_weights_and_grads opt_level"
)
BF16 = _words("enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states")

STAGE3 = _words(
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance "
    "gather_16bit_weights_on_model_save module_granularity_threshold use_all_reduce_for_fetch_params"
)
ZERO = _words(
    "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions "
    "allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint offload_param offload_optimizer "
    "sub_group_size cpu_offload cpu_offload_param cpu_offload_params cpu_offload_use_pin_memory ignore_unused_parameters "
    "legacy_stage1 round_robin_gradients zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights "
    "zero_quantized_gradients zeropp_loco_param mics_shard_size mics_hierarchical_params_gather memory_efficient_linear "
    "pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks "
    "stage3_gather_fp16_weights_on_model_save"
) | {f"{prefix}{name}" for name in STAGE3 for prefix in ("", "stage3_")}
ONLY_STAGE3 = frozenset({f"{prefix}{name}" for name in STAGE3 for prefix in ("", "stage3_")}) | {
    "stage3_gather_fp16_weights_on_model_save",
    "sub_group_size",
    "offload_param",
    "cpu_offload_param",
    "cpu_offload_params",
}
"""Without effect below stage 3."""

OFFLOAD = _words("device nvme_path buffer_count buffer_size max_in_cpu pin_memory pipeline_read pipeline_write fast_init ratio")

ADAM = _words(
    "lr betas eps weight_decay bias_correction adam_w_mode torch_adam amsgrad fp32_optimizer_states set_grad_none freeze_step "
    "cuda_aware comm_backend_name"
)
OPTIMIZER = {"Adam": ADAM, "AdamW": ADAM, "SGD": _words("lr momentum weight_decay dampening nesterov")}

_WARMUP = _words("warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration")
SCHEDULERS = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": _WARMUP | {"total_num_steps"},
    "WarmupCosineLR": _words(
        "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type last_batch_iteration"
    ),
    "OneCycle": _words(
        "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count "
        "cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate "
        "last_batch_iteration"
    ),
}
