"""What vLLM's engine takes and this one does not build yet: every name, its harmless values, and the reason.

A harmless value asks for nothing, so it is accepted in silence; anything else is refused by name. `None` is always harmless.
What only concerns speed or devices that are not there is taken, and told: `hints`.
"""

from typing import Any

from quire.types.errors import ConfigError

# reason -> {name: harmless values besides None}
_NOT_DIVIDED = "of the ways to use several devices tensor_, pipeline_ and data_parallel_size are built"
_BY_HAND = "engines on other machines are started there, with --headless and data_parallel_start_rank"
_BALANCED = "the server itself shares requests out among its engines; a request may name one with X-data-parallel-rank"
_WHOLE_ADAPTERS = "an adapter is used whole, by requests that ask for it"
_TEXT_ONLY = "only text models are served for now"
_RETURNED = "routed experts and sampling masks are not returned"
_SPECULATIVE = "speculative_config replaces it: see docs/speculation.md"
_RECOMPUTED = "preempted requests are computed again, and the KV cache is never swapped to the host"
_NO_OFFLOAD = "offloading is not available yet"
_NOT_MEASURED = "it is not measured yet"
_NOT_REPLACED = "the engine's parts cannot be replaced"
_Groups = tuple[tuple[str, dict[str, tuple[Any, ...]]], ...]
_TABLE: _Groups = (
    ("attention computes in the model's own dtype", {"override_attention_dtype": ()}),
    ("the caches of all layers have one type", {"kv_cache_dtype_skip_layers": ([],)}),
    ("recurrent states are float32, inputs of convolutions the model's type", {"mamba_cache_dtype": ("auto",),
                                                                              "mamba_ssm_cache_dtype": ("auto", "float32")}),
    ("enable_prefix_caching keeps recurrent states of prefixes, too", {"mamba_cache_mode": ("none", "align", "all")}),
    ("the model's files say what it is", {"hf_config_path": ()}),
    ("hf_overrides replaces it", {"rope_scaling": (), "rope_theta": ()}),
    ("windows are the model's own", {"disable_sliding_window": (False,)}),
    ("only text generation is built", {"runner": ("auto", "generate"), "convert": ("auto", "none"),
                                       "task": ("auto", "generate"),
                                       "diffusion_config": ({},), "pooler_config": ({},), "override_pooler_config": ({},)}),
    ("prompts are text or token ids", {"enable_prompt_embeds": (False,), "enable_mm_embeds": (False,)}),
    ("custom logits processors are not available yet", {"logits_processors": ([], ()), "logits_processor_pattern": ()}),
    (_RETURNED, {"enable_return_routed_experts": (False,), "return_sampling_mask": (False,)}),
    ("weights are read from the model's own files", {"model_weights": ("",)}),
    ("sampling noise has one precision", {"use_fp64_gumbel": (False,)}),
    ("recorded answers are not replayed", {"enable_trace_replay": (False,)}),
    ("the checkpoint defines its quantization; quantization='fp8' quantizes floats at load", {"quantization_config": ({},)}),
    ("requests queue without a limit; --max-queue sets when /readyz answers 503", {"max_num_queued_reqs": (),
                                                                                   "max_num_queued_tokens": ()}),
    (_SPECULATIVE, {
        "speculative_model": (), "num_speculative_tokens": (), "ngram_prompt_lookup_max": (), "ngram_prompt_lookup_min": (),
        "speculative_model_quantization": (), "speculative_draft_tensor_parallel_size": (), "speculative_max_model_len": (),
        "speculative_disable_by_batch_size": (), "spec_decoding_acceptance_method": ("rejection_sampler",),
        "typical_acceptance_sampler_posterior_threshold": (), "typical_acceptance_sampler_posterior_alpha": (),
    }),
    ("eplb_config replaces it", {"eplb_window_size": (), "eplb_step_interval": (), "eplb_log_balancedness": (False,)}),
    ("structured_outputs_config replaces it", {"guided_decoding_disable_any_whitespace": (False,),
                                               "guided_decoding_disable_additional_properties": (False,)}),
    ("the number of engines is fixed at the start", {"enable_elastic_ep": (False,)}),
    ("recurrent states are float32 and not rounded at random", {"mamba_config": ({},),
                                                                "enable_mamba_cache_stochastic_rounding": (False,)}),
    ("enable_per_request_metrics reports speculative decoding", {"per_request_spec_decode_metrics": ("none",)}),
    (_NO_OFFLOAD, {"offload_params": ([],)}),
    (_NO_OFFLOAD, {"kv_offloading_size": (), "cpu_offload_gb": (0, 0.0), "cpu_offload_params": (), "offload_group_size": (0,)}),
    (_NOT_REPLACED, {"scheduler_cls": (), "worker_cls": ("auto",), "worker_extension_cls": ("",), "io_processor_plugin": (),
                     "additional_config": ({},), "model_class_overrides": ({},), "override_neuron_config": ({},)}),
    (_NOT_DIVIDED, {
        "decode_context_parallel_size": (1,), "prefill_context_parallel_size": (1,), "device_ids": (),
    }),
    (_BY_HAND, {"data_parallel_backend": ("mp",)}),
    (_BALANCED, {
        "data_parallel_rank": (), "data_parallel_hybrid_lb": (False,), "data_parallel_external_lb": (False,),
        "data_parallel_multi_port_external_lb": (False,),
    }),
    (_WHOLE_ADAPTERS, {"default_mm_loras": ({},), "lora_target_modules": ([],), "enable_tower_connector_lora": (False,),
                       "enable_mixed_moe_lora_format": (False,), "enable_moe_shared_loras": (False,),
                       "long_lora_scaling_factors": (), "qlora_adapter_name_or_path": (), "enable_prompt_adapter": (False,)}),
    ("names of adapters are the server's: quire serve takes it; offline give lora_request", {"lora_modules": ([],)}),
    ("reasoning is parsed by the server: quire serve has these", {"reasoning_parser": ("",), "reasoning_parser_plugin": ("",)}),
    (_TEXT_ONLY, {
        "mm_encoder_only": (False,), "limit_mm_per_prompt": ({},), "mm_processor_kwargs": ({},), "media_io_kwargs": ({},),
        "allowed_local_media_path": ("",), "allowed_media_domains": ([],), "video_pruning_rate": (0, 0.0),
        "mm_encoder_fp8_scale_path": (), "mm_encoder_fp8_scale_save_path": (),
    }),
    (_RECOMPUTED, {"swap_space": (0, 0.0, 4, 4.0), "preemption_mode": ("recompute",)}),
    ("steps are not split into two overlapping halves", {"enable_dbo": (False,), "ubatch_size": (0, 1)}),
    ("experts exchange tokens by all-gather and reduce-scatter", {"all2all_backend": ("allgather_reducescatter", "naive")}),
    ("disaggregation is not available yet", {"kv_transfer_config": ({},), "kv_events_config": ({},),
                                             "ec_transfer_config": ({},)}),
    ("weights stay as they were loaded", {"enable_sleep_mode": (False,), "weight_transfer_config": ({},),
                                          "enable_cumem_allocator": (False,), "enable_nccl_comm_suspend": (False,)}),
    ("traces are written by the server: quire serve takes it", {"otlp_traces_endpoint": ()}),
    ("requests are logged by the server: quire serve takes it", {"enable_log_requests": (False,)}),
    (_NOT_MEASURED, {
        "collect_detailed_traces": ([],), "kv_cache_metrics": (False,), "kv_cache_metrics_sample": (),
        "cudagraph_metrics": (False,), "enable_mfu_metrics": (False,), "enable_layerwise_nvtx_tracing": (False,), 
        "enable_mm_processor_stats": (False,), "enable_logging_iteration_details": (False,), "profiler_config": ({},),
        "ray_workers_use_nsight": (False,),
    }),
)  # fmt: skip


def table_of(groups: _Groups) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """By name: the reason, and the harmless values."""
    return {name: (reason, harmless) for reason, names in groups for name, harmless in names.items()}


REFUSED = table_of(_TABLE)
SHORT_FLAGS = {
    "data_parallel_rank": "-dpn",
    "data_parallel_backend": "-dpb",
}


def refuse(name: str, value: Any, table: dict[str, tuple[str, tuple[Any, ...]]] = REFUSED) -> None:
    """Raises unless the value asks for nothing."""
    reason, harmless = table[name]
    if (
        value is None
        or _asks_nothing(name, value)
        or any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in harmless)
    ):
        return
    told = [item for item in harmless if item not in ([], {}, (), "")][:1]  # a value that somebody would write
    way_out = "leave it out" + "".join(f" or at {item!r}" for item in told)
    raise ConfigError(f"{name}={value!r} is not supported: {reason}; {way_out}")


def _asks_nothing(name: str, value: Any) -> bool:
    """`limit_mm_per_prompt` of 0 for every kind of media: {"image": 0}, or {"image": {"count": 0}}."""
    if name != "limit_mm_per_prompt" or not isinstance(value, dict):
        return False
    return all((item.get("count", 0) if isinstance(item, dict) else item) == 0 for item in value.values())
