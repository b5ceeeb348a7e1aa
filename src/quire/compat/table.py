"""What vLLM's module paths have in Quire: path below `vllm` or `quire` -> name -> module:attribute of Quire."""

import quire

_ARGS = {"EngineArgs": "quire.config.args:EngineArgs", "AsyncEngineArgs": "quire.async_llm:AsyncEngineArgs"}
_ASYNC = {"AsyncLLM": "quire.async_llm:AsyncLLM", "AsyncLLMEngine": "quire.async_llm:AsyncLLMEngine"}
_ENGINE = {"LLMEngine": "quire.llm_engine:LLMEngine"}
_ERRORS = {"EngineDeadError": "quire.types.errors:EngineDead", "EngineGenerateError": "quire.types.errors:EngineError"}
_IO = "quire.features.pooling.io_processor"
_LOGPROBS = {
    "Logprob": "quire.types.outputs:Logprob",
    "FlatLogprobs": "quire.types.outputs:FlatLogprobs",
    "LogprobsOnePosition": "quire.types.outputs:TokenLogprobs",
}
_NETWORK = {"get_ip": "quire.compat.utils:get_ip", "get_open_port": "quire.compat.utils:get_open_port"}
_PARSER = {"FlexibleArgumentParser": "quire.compat.commands:FlexibleArgumentParser"}
_POOLED = {
    f"{kind}{end}": f"quire.types.pooling:{kind}{end}"
    for kind in ("Pooling", "Embedding", "Classification", "Scoring")
    for end in ("Output", "RequestOutput")
}
_PROCESSORS = {
    name: f"quire.features.logits_processors.interface:{name}"
    for name in (
        "AdapterLogitsProcessor", "AddedRequest", "BatchUpdate", "LogitsProcessor", "MoveDirectionality", "MovedRequest",
        "RemovedRequest", "RequestLogitsProcessor", "process_dict_updates",
    )
}  # fmt: skip
_PROMPTS = {
    "PromptType": "quire.types.prompts:PromptType",
    "SingletonPrompt": "quire.types.prompts:PromptType",
    "TextPrompt": "quire.types.prompts:TextPrompt",
    "TokensPrompt": "quire.types.prompts:TokensPrompt",
}
_TEMPLATES = {
    "load_chat_template": "quire.compat.tokenizers:load_chat_template",
    "resolve_hf_chat_template": "quire.compat.tokenizers:resolve_chat_template",
}
_TOKENIZER = {"get_tokenizer": "quire.compat.tokenizers:get_tokenizer"}
_VERSION = {"__version__": "quire.compat:VLLM_VERSION"}

MODULES: dict[str, dict[str, str]] = {
    "": {**{name: f"quire:{name}" for name in quire.__all__}, **_VERSION},
    "beam_search": {
        "BeamSearchOutput": "quire.types.outputs:BeamSearchOutput",
        "BeamSearchSequence": "quire.types.outputs:BeamSearchSequence",
    },
    "config": {
        "ModelConfig": "quire.config.model_config:ModelConfig",
        "VllmConfig": "quire.config.model_config:VllmConfig",
    },
    "distributed": {"cleanup_dist_env_and_memory": "quire.compat.utils:cleanup_dist_env_and_memory"},
    "distributed.parallel_state": {"cleanup_dist_env_and_memory": "quire.compat.utils:cleanup_dist_env_and_memory"},
    "engine.arg_utils": _ARGS,
    "engine.async_llm_engine": _ASYNC,
    "engine.llm_engine": _ENGINE,
    "engine.protocol": {"EngineClient": "quire.async_llm:AsyncLLM"},
    "entrypoints.chat_utils": _TEMPLATES,
    "entrypoints.cli.main": {"main": "quire.cli.main:main"},
    "entrypoints.llm": {"LLM": "quire.llm:LLM"},
    "entrypoints.openai.api_server": {"main": "quire.compat.commands:serve"},
    "exceptions": {
        "VLLMError": "quire.types.errors:QuireError",
        "VLLMClientError": "quire.types.errors:RequestError",
        "VLLMServerError": "quire.types.errors:EngineError",
        "VLLMValidationError": "quire.types.errors:InvalidParameter",
    },
    "inputs": _PROMPTS,
    "inputs.data": _PROMPTS,
    "logger": {"init_logger": "quire.compat.utils:init_logger"},
    "logprobs": _LOGPROBS,
    "lora.request": {"LoRARequest": "quire.types.adapter:LoRARequest"},
    "model_executor.models": {"ModelRegistry": "quire.config.model_registry:ModelRegistry"},
    "outputs": {
        "CompletionOutput": "quire.types.outputs:CompletionOutput",
        "RequestOutput": "quire.types.outputs:RequestOutput",
        **_POOLED,
    },
    "platforms": {"current_platform": "quire.compat.platforms:current_platform"},
    "plugins": {"load_general_plugins": "quire.config.plugins:load_general"},
    "plugins.io_processors": {"IOProcessor": f"{_IO}:IOProcessor"},
    "plugins.io_processors.interface": {
        name: f"{_IO}:{name}" for name in ("IOProcessor", "IOProcessorInput", "IOProcessorOutput")
    },
    "pooling_params": {"PoolingParams": "quire.types.pooling:PoolingParams"},
    "renderers": {"BaseRenderer": f"{_IO}:Renderer"},
    "renderers.hf": {"resolve_chat_template": "quire.compat.tokenizers:resolve_chat_template"},
    "sampling_params": {
        "BeamSearchParams": "quire.types.sampling:BeamSearchParams",
        "RepetitionDetectionParams": "quire.types.sampling:RepetitionDetectionParams",
        "RequestOutputKind": "quire.types.sampling:RequestOutputKind",
        "SamplingParams": "quire.types.sampling:SamplingParams",
        "StructuredOutputsParams": "quire.types.structured:StructuredOutputsParams",
    },
    "sequence": {"Logprob": "quire.types.outputs:Logprob", "RequestMetrics": "quire.types.outputs:RequestMetrics"},
    "tokenizers": {**_TOKENIZER, "TokenizerLike": "quire.text.tokenizer:Tokenizer"},
    "transformers_utils.tokenizer": {**_TOKENIZER, "AnyTokenizer": "quire.text.tokenizer:Tokenizer"},
    "usage.usage_lib": {"UsageContext": "quire.compat.utils:UsageContext"},
    "utils": {"random_uuid": "quire.compat.utils:random_uuid", **_NETWORK, **_PARSER},
    "utils.argparse_utils": _PARSER,
    "utils.network_utils": _NETWORK,
    "utils.system_utils": {"set_ulimit": "quire.compat.utils:set_ulimit"},
    "v1.engine.async_llm": _ASYNC,
    "v1.engine.exceptions": _ERRORS,
    "v1.engine.llm_engine": _ENGINE,
    "v1.metrics.loggers": {name: f"quire.stat_loggers:{name}" for name in ("AggregateStatLoggerBase", "StatLoggerBase")},
    "v1.metrics.stats": {
        name: f"quire.stat_loggers:{name}"
        for name in ("FinishedRequestStats", "IterationStats", "PrefixCacheStats", "SchedulerStats")
    },
    "v1.metrics.reader": {name: f"quire.obs.offline:{name}" for name in ("Counter", "Gauge", "Histogram", "Metric", "Vector")},
    "v1.sample.logits_processor": _PROCESSORS,
    "v1.sample.logits_processor.builtin": _PROCESSORS,
    "v1.sample.logits_processor.interface": _PROCESSORS,
    "version": _VERSION,
}

# paths whose names are another module's
WHOLE_MODULES = {"envs": "quire.compat.envs"}

# what `python -m PATH` runs
MAINS = {"entrypoints.cli.main": "quire.cli.main:main", "entrypoints.openai.api_server": "quire.compat.commands:serve"}

_CONNECTORS = "KV cache transfer, offloading and events are not built"
_INTERNALS = "the inside of the engine is another one; only vLLM's public API is followed"
_LAYERS = "vLLM's layers and kernels are not there; write quantization methods for Quire's layers (docs/plugins.md)"
_LOADERS = "vLLM's model classes, layers and loaders are not there; models are loaded by Quire's own"
_MEDIA = "give images and videos as PIL images, arrays or URLs; audio is not built"
_POOLING = "the modules of its pooling endpoints are not public; run `quire serve`"
_SERVER_PARTS = "the parts of the HTTP server are not public; run `quire serve`"
_WEIGHT_TRANSFER = "weight transfer and updates are not built"

NOT_BUILT_MODULES = {
    "assets": _MEDIA,
    "attention": _INTERNALS,
    "benchmarks": "run `quire bench`",
    "compilation": _INTERNALS,
    "config.kv_transfer": _CONNECTORS,
    "distributed.ec_transfer": _CONNECTORS,
    "distributed.kv_events": _CONNECTORS,
    "distributed.kv_transfer": _CONNECTORS,
    "distributed.weight_transfer": _WEIGHT_TRANSFER,
    "entrypoints.launcher": _SERVER_PARTS,
    "entrypoints.pooling": _POOLING,
    "entrypoints.serve": _SERVER_PARTS,
    "forward_context": _INTERNALS,
    "model_executor": _LOADERS,
    "model_executor.layers": _LAYERS,
    "multimodal": _MEDIA,
    "utils.print_utils": _POOLING,
    "utils.serial_utils": _POOLING,
    "v1.core": _INTERNALS,
    "v1.executor": _INTERNALS,
    "v1.kv_cache_interface": _INTERNALS,
    "v1.request": _INTERNALS,
    "v1.sample": _INTERNALS,
    "v1.worker": _INTERNALS,
    "worker": _INTERNALS,
}

NOT_BUILT_NAMES = {
    "CompilationConfig": "pass compilation_config as a dict; it is a hint",
    "EmbedsPrompt": "prompt embeddings are not built",
    "GuidedDecodingParams": "its name is now StructuredOutputsParams",
    "KVTransferConfig": _CONNECTORS,
    "MultiModalDataDict": _MEDIA,
    "PoolerConfig": "pass pooler_config as a dict",
    "ProfilerConfig": "pass profiler_config as a dict",
    "WeightTransferConfig": _WEIGHT_TRANSFER,
    "initialize_ray_cluster": "Quire starts Ray nodes itself with distributed_executor_backend='ray'",
}
