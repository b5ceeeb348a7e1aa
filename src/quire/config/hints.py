"""What vLLM's users say about speed, memory or devices, and what changes no answer here: it is taken, and the log tells.

The other half of the same list is `refused`: what asks for something that is not there. Fields that do something are in `args`.
"""

import logging
from typing import Any

from quire.config.fields import FLAG, LIST, OBJECT, TEXT, Kind
from quire.types.errors import ConfigError

logger = logging.getLogger(__name__)

_OWN_KERNELS = "kernels and CUDA graphs are chosen by the engine (enforce_eager turns graphs off)"
_ONE_WAY = "there is one implementation of how ranks divide a model and communicate"
_PAGES = "pages are taken on demand, and preempted requests are run again"
_STEPS = "the scheduler fills its steps by itself"
_NO_MEDIA = "only text is taken, and media are refused when they come"
_ADAPTERS = "nothing is reserved for adapters beyond what they have, and each rank has its own share of what is divided"
_LOADING = "weights are mapped from their files"
_GONE = "vLLM has dropped it as well"
# why it changes nothing -> {name: kind of its value}
_TABLE: tuple[tuple[str, dict[str, Kind]], ...] = (
    ("no code from a model repository is ever run; models that need theirs are refused", {"trust_remote_code": FLAG,
                                                                                         "code_revision": TEXT}),
    (_OWN_KERNELS, {
        "compilation_config": OBJECT, "optimization_level": TEXT, "cudagraph_capture_sizes": LIST,
        "max_cudagraph_capture_size": TEXT, "max_seq_len_to_capture": TEXT, "performance_mode": TEXT,
        "attention_backend": TEXT, "attention_config": OBJECT, "kernel_config": OBJECT, "moe_backend": TEXT,
        "linear_backend": TEXT, "enable_flashinfer_autotune": FLAG, "disable_cascade_attn": FLAG,
        "kv_sharing_fast_prefill": FLAG, "mm_encoder_attn_backend": TEXT, "ir_op_priority": OBJECT, "cuda_graph_sizes": LIST,
        "gdn_prefill_backend": TEXT, "kda_prefill_backend": TEXT, "mamba_backend": TEXT, "mamba_ssu_algorithm": TEXT,
        "use_replayssm": FLAG, "replayssm_buffer_len": TEXT, "enable_bf16x3_router_gemm": FLAG, "jit_monitor_mode": TEXT,
        "jit_monitor_verbose": FLAG,
    }),
    (_ONE_WAY, {
        "disable_custom_all_reduce": FLAG, "disable_nccl_for_dp_synchronization": FLAG, "max_parallel_loading_workers": TEXT,
        "expert_placement_strategy": TEXT, "dbo_decode_token_threshold": TEXT, "dbo_prefill_token_threshold": TEXT,
        "cp_kv_cache_interleave_size": TEXT, "dcp_kv_cache_interleave_size": TEXT, "dcp_comm_backend": TEXT,
        "dcp_q_replicate": FLAG, "enable_batch_sharded_sampling": FLAG, "dp_sync_interval": TEXT,
        "cpu_distributed_timeout_seconds": TEXT,
    }),
    (_PAGES, {
        "watermark": TEXT, "scheduler_reserve_full_isl": FLAG, "disable_hybrid_kv_cache_manager": FLAG,
        "kv_offloading_backend": TEXT, "mamba_block_size": TEXT,
        "prefix_cache_retention_interval": TEXT, "prefix_match_unit": TEXT, "mamba_cache_philox_rounds": TEXT,
    }),
    ("a cache of 8 bits has the checkpoint's scales, or one computed for every token and head", {"calculate_kv_scales": FLAG}),
    ("content keys are sha256", {"prefix_caching_hash_algo": TEXT}),
    (_STEPS, {
        "max_num_partial_prefills": TEXT, "max_long_partial_prefills": TEXT, "num_scheduler_steps": TEXT,
        "multi_step_stream_outputs": FLAG, "num_lookahead_slots": TEXT, "scheduler_delay_factor": TEXT,
        "disable_async_output_proc": FLAG, "prefill_schedule_interval": TEXT,
    }),
    (_LOADING, {
        "safetensors_load_strategy": TEXT, "use_tqdm_on_load": FLAG, "pt_load_map_location": TEXT,
        "model_loader_extra_config": OBJECT, "ignore_patterns": LIST, "safetensors_prefetch_num_threads": TEXT,
        "safetensors_prefetch_block_size": TEXT, "enable_ep_weight_filter": FLAG,
    }),
    (_NO_MEDIA, {
        "mm_processor_cache_gb": TEXT, "mm_processor_cache_type": TEXT, "mm_shm_cache_max_object_size_mb": TEXT,
        "mm_encoder_tp_mode": TEXT,
        "language_model_only": FLAG, "disable_mm_preprocessor_cache": FLAG, "disable_chunked_mm_input": FLAG,
        "interleave_mm_strings": FLAG, "skip_mm_profiling": FLAG, "mm_hasher_algorithm": TEXT, "mm_encoder_attn_dtype": TEXT,
        "mm_encoder_fp8_scale_save_margin": TEXT, "video_pruning_method": TEXT, "mm_tensor_ipc": TEXT,
        "mm_processor_device": TEXT, "mm_ipc_gpu_memory_gb": TEXT, "mm_device_do_normalize": FLAG, "ec_manager_config": OBJECT,
        "enable_multimodal_encoder_data_parallel": FLAG,
    }),
    (_ADAPTERS, {"fully_sharded_loras": FLAG, "specialize_active_lora": FLAG}),
    ("all metrics are shown", {"show_hidden_metrics_for_version": TEXT}),
    ("grammars are followed by llguidance", {"guided_decoding_backend": TEXT, "guided_decoding_disable_fallback": FLAG}),
    ("requests are logged by the server, and only if asked to", {"disable_log_requests": FLAG}),
    ("prompts are rendered and tokenized in processes of their own", {
        "renderer_num_workers": TEXT, "tokenizer_pool_size": TEXT, "tokenizer_pool_type": TEXT,
        "tokenizer_pool_extra_config": OBJECT,
    }),
    ("a lost engine is always restarted and its requests continue", {"enable_fault_tolerance": FLAG,
                                                                     "fault_tolerance_config": OBJECT}),
    ("nothing is offloaded", {"offload_backend": TEXT, "offload_num_in_group": TEXT, "offload_prefetch_step": TEXT}),
    ("biases of an adapter are always used", {"enable_lora_bias": FLAG}),
    (_GONE, {"speculative_disable_mqa_scorer": FLAG, "disable_logprobs_during_spec_decoding": FLAG,
             "max_prompt_adapters": TEXT, "max_prompt_adapter_token": TEXT, "use_v2_block_manager": FLAG,
             "allow_deprecated_quantization": FLAG, "fail_on_environ_validation": FLAG, "worker_use_ray": FLAG,
             "engine_use_ray": FLAG}),
)  # fmt: skip
HINTS: dict[str, tuple[str, Kind]] = {name: (reason, kind) for reason, names in _TABLE for name, kind in names.items()}
HINT_SHORT_FLAGS = {
    "optimization_level": "-O",
    "compilation_config": "-cc",
    "attention_config": "-ac",
}

# values of fields that are there: what they are taken for
TAKEN_FOR: dict[str, dict[Any, str]] = {
    "model_impl": {"vllm": "quire"},
    "load_format": dict.fromkeys(("hf", "fastsafetensors", "instanttensor", "runai_streamer"), "auto"),
}
# values of vLLM's that they cannot have, and why
NOT_TAKEN: dict[str, dict[Any, str]] = {
    "load_format": {
        "bitsandbytes": "floats are not made 4 bits as they are loaded; a checkpoint that has been quantized says so itself. "
        "Leave it out, or say quantization='fp8' for 8 bits",
    },
}


def take_hint(name: str, value: Any, table: dict[str, tuple[str, Kind]] = HINTS) -> None:
    """Tells that it changes nothing, unless it asks for nothing either."""
    reason, kind = table[name]
    if kind is FLAG and value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}")
    if value is None or value is False or value in ({}, [], ""):
        return
    logger.warning("%s=%r changes nothing here: %s", name, value, reason)


def taken_for(name: str, value: Any) -> Any:
    other = TAKEN_FOR.get(name, {}).get(value) if isinstance(value, str) else None
    if isinstance(value, str) and (reason := NOT_TAKEN.get(name, {}).get(value)) is not None:
        raise ConfigError(f"{name}={value!r} is not supported: {reason}")
    if other is None:
        return value
    logger.warning("%s=%r is taken for %r, which is the same here", name, value, other)
    return other
