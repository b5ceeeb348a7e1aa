"""What vLLM's engine takes and this one does not build yet: every name, its harmless values, and the reason.

A harmless value asks for nothing, so it is accepted in silence; anything else is refused by name. `None` is always harmless.
"""

from typing import Any

from quire.types.errors import ConfigError

# reason -> {name: harmless values besides None}
_ONE_DEVICE = "the engine runs on one device for now"
_NO_LORA = "LoRA adapters are not available yet"
_NO_SPECULATION = "speculative decoding is not available yet"
_TEXT_ONLY = "only text models are served for now"
_NO_KERNEL_CHOICE = "kernels are chosen by the engine"
_NO_OFFLOAD = "offloading is not available yet"
_NOT_MEASURED = "it is not measured yet"
_Groups = tuple[tuple[str, dict[str, tuple[Any, ...]]], ...]
_TABLE: _Groups = (
    ("no code from a model repository is ever run", {"trust_remote_code": (False,), "code_revision": ()}),
    ("only GGUF files are served quantized, and that needs no argument; on a GPU they are unfolded", {"quantization": ()}),
    ("the cache holds the model's own dtype", {"kv_cache_dtype": ("auto",)}),
    ("the tokenizer is chosen from the files", {"tokenizer_mode": ("auto", "hf")}),
    ("only text generation is built", {"runner": ("auto", "generate"), "convert": ("auto", "none"),
                                       "task": ("auto", "generate")}),
    ("prompts are text or token ids", {"enable_prompt_embeds": (False,)}),
    ("custom logits processors are not available yet", {"logits_processors": ([], ())}),
    ("content keys are sha256", {"prefix_caching_hash_algo": ("sha256",)}),
    (_NO_OFFLOAD, {"kv_offloading_size": (), "kv_offloading_backend": ("native",), "cpu_offload_gb": (0, 0.0),
                   "offload_group_size": (0,), "swap_space": (0, 0.0)}),
    ("outputs are streamed token by token", {"stream_interval": (1,)}),
    ("the scheduler cannot be replaced", {"scheduler_cls": ()}),
    ("pages are taken on demand", {"watermark": (0, 0.0), "scheduler_reserve_full_isl": (True,)}),
    (_ONE_DEVICE, {
        "tensor_parallel_size": (1,), "pipeline_parallel_size": (1,), "data_parallel_size": (1,),
        "data_parallel_size_local": (1,), "data_parallel_start_rank": (0,), "data_parallel_rank": (0,),
        "data_parallel_address": (), "data_parallel_rpc_port": (), "data_parallel_backend": ("mp",),
        "data_parallel_hybrid_lb": (False,), "data_parallel_external_lb": (False,),
        "data_parallel_multi_port_external_lb": (False,), "enable_expert_parallel": (False,), "all2all_backend": (),
        "enable_eplb": (False,), "eplb_config": ({},), "decode_context_parallel_size": (1,),
        "prefill_context_parallel_size": (1,), "nnodes": (1,), "node_rank": (0,),
        "master_addr": (), "master_port": (), "device_ids": (), "disable_custom_all_reduce": (False,), "enable_dbo": (False,),
    }),
    (_NO_LORA, {"enable_lora": (False,), "max_loras": (1,), "max_lora_rank": (16,), "max_cpu_loras": (), "lora_modules": ([],),
                "fully_sharded_loras": (False,)}),
    (_NO_SPECULATION, {"speculative_config": ({},), "spec_method": (), "spec_model": (), "spec_tokens": (0,)}),
    ("reasoning is parsed by the server: quire serve has these", {"reasoning_parser": ("",), "reasoning_parser_plugin": ("",)}),
    (_TEXT_ONLY, {
        "limit_mm_per_prompt": ({},), "mm_processor_kwargs": ({},), "mm_processor_cache_gb": (0, 4, 4.0),
        "media_io_kwargs": ({},), "allowed_local_media_path": ("",), "allowed_media_domains": ([],),
        "mm_encoder_tp_mode": ("weights",), "language_model_only": (False, True),
    }),
    (_NO_KERNEL_CHOICE, {
        "compilation_config": ({},), "optimization_level": (), "cudagraph_capture_sizes": (), "performance_mode": ("balanced",),
        "attention_backend": ("auto",), "attention_config": ({},), "moe_backend": ("auto",), "linear_backend": ("auto",),
    }),
    ("disaggregation is not available yet", {"kv_transfer_config": ({},), "kv_events_config": ({},),
                                             "ec_transfer_config": ({},)}),
    ("weights stay as they were loaded", {"enable_sleep_mode": (False,), "weight_transfer_config": ({},)}),
    ("traces are written by the server: quire serve takes it", {"otlp_traces_endpoint": ()}),
    (_NOT_MEASURED, {
        "collect_detailed_traces": ([],), "show_hidden_metrics_for_version": (),
        "kv_cache_metrics": (False,), "cudagraph_metrics": (False,), "enable_mfu_metrics": (False,),
    }),
)  # fmt: skip


def table_of(groups: _Groups) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """By name: the reason, and the harmless values."""
    return {name: (reason, harmless) for reason, names in groups for name, harmless in names.items()}


REFUSED = table_of(_TABLE)
SHORT_FLAGS = {
    "quantization": "-q",
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
}


def refuse(name: str, value: Any, table: dict[str, tuple[str, tuple[Any, ...]]] = REFUSED) -> None:
    """Raises unless the value asks for nothing."""
    reason, harmless = table[name]
    if value is None or any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in harmless):
        return
    way_out = f"; leave it out or at {harmless[0]!r}" if harmless else "; leave it out"
    raise ConfigError(f"{name}={value!r} is not supported: {reason}{way_out}")
