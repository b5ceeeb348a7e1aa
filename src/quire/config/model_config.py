"""`llm.model_config` and `engine.vllm_config` under vLLM's names, for programs written for vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from quire.config.config import Config
from quire.features.pooling.host import pooling_of, supported_tasks


class HFConfig(SimpleNamespace):
    """config.json, as attributes. That of a GGUF file is made from its metadata."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(**values)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class ModelConfig:
    _config: Config
    max_model_len: int  # that fits the cache

    is_multimodal_model = is_encoder_decoder = use_mla = False

    @property
    def runner_type(self) -> str:
        return "pooling" if pooling_of(self._config) else "generate"

    @property
    def task(self) -> str:
        return supported_tasks(self._config)[0]

    @property
    def model(self) -> str:
        return self._config.args.model

    @property
    def tokenizer(self) -> str:
        return self._config.args.tokenizer or self.model

    @property
    def served_model_name(self) -> str:
        return self._config.served_names[0]

    @property
    def dtype(self) -> Any:
        """Return the torch dtype."""
        return getattr(import_module("torch"), self._config.dtype)

    @property
    def seed(self) -> int:
        return self._config.seed

    @property
    def max_logprobs(self) -> int:
        return self._config.max_logprobs

    @property
    def architecture(self) -> str:
        return self._config.facts.architecture

    @property
    def hf_config(self) -> HFConfig:
        return HFConfig(self._config.facts.hf)

    @property
    def hf_text_config(self) -> HFConfig:
        return self.hf_config

    def get_vocab_size(self) -> int:
        return self._config.facts.vocab_size

    def get_hidden_size(self) -> int:
        return self._config.facts.hidden_size

    def get_head_size(self) -> int:
        return self._config.facts.layers[0].head_dim if self._config.facts.layers else 0

    def get_total_num_kv_heads(self) -> int:
        return self._config.facts.layers[0].kv_heads if self._config.facts.layers else 0

    def get_total_num_hidden_layers(self) -> int:
        return len(self._config.facts.kinds or self._config.facts.layers)

    def get_sliding_window(self) -> int | None:
        return next((layer.window for layer in self._config.facts.layers if layer.window is not None), None)

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Return the model's default sampling parameters that differ from neutral ones."""
        return dict(self._config.default_sampling)


@dataclass(frozen=True)
class VllmConfig:
    model_config: ModelConfig
    cache_config: SimpleNamespace
    parallel_config: SimpleNamespace
    scheduler_config: SimpleNamespace

    @classmethod
    def of(cls, config: Config, max_model_len: int) -> "VllmConfig":
        args = config.args
        cache = SimpleNamespace(
            block_size=config.page_size,
            cache_dtype=config.cache_dtype,
            enable_prefix_caching=config.prefix_caching,
            gpu_memory_utilization=args.gpu_memory_utilization,
        )
        parallel = SimpleNamespace(
            tensor_parallel_size=args.tensor_parallel_size,
            pipeline_parallel_size=args.pipeline_parallel_size,
            data_parallel_size=args.data_parallel_size,
            world_size=config.world,
        )
        scheduler = SimpleNamespace(
            max_model_len=max_model_len,
            max_num_batched_tokens=config.max_batched_tokens,
            max_num_seqs=config.max_seqs,
            policy=config.policy,
        )
        return cls(ModelConfig(config, max_model_len), cache, parallel, scheduler)
