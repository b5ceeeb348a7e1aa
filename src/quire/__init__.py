"""Quire: a high-throughput LLM inference and serving engine.

Importing this package is instant and does not import torch: names are fetched from their rooms on first use.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"  # the only place: pyproject.toml reads it

if TYPE_CHECKING:
    from quire.async_llm import AsyncEngineArgs as AsyncEngineArgs
    from quire.async_llm import AsyncLLM as AsyncLLM
    from quire.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from quire.config.args import EngineArgs as EngineArgs
    from quire.config.model_registry import ModelRegistry as ModelRegistry
    from quire.features.logits_processors.interface import LogitsProcessor as LogitsProcessor
    from quire.llm import LLM as LLM
    from quire.llm_engine import LLMEngine as LLMEngine
    from quire.types.adapter import LoRARequest as LoRARequest
    from quire.types.outputs import CompletionOutput as CompletionOutput
    from quire.types.outputs import RequestOutput as RequestOutput
    from quire.types.pooling import ClassificationOutput as ClassificationOutput
    from quire.types.pooling import ClassificationRequestOutput as ClassificationRequestOutput
    from quire.types.pooling import EmbeddingOutput as EmbeddingOutput
    from quire.types.pooling import EmbeddingRequestOutput as EmbeddingRequestOutput
    from quire.types.pooling import PoolingOutput as PoolingOutput
    from quire.types.pooling import PoolingParams as PoolingParams
    from quire.types.pooling import PoolingRequestOutput as PoolingRequestOutput
    from quire.types.pooling import ScoringOutput as ScoringOutput
    from quire.types.pooling import ScoringRequestOutput as ScoringRequestOutput
    from quire.types.prompts import PromptType as PromptType
    from quire.types.prompts import TextPrompt as TextPrompt
    from quire.types.prompts import TokensPrompt as TokensPrompt
    from quire.types.sampling import BeamSearchParams as BeamSearchParams
    from quire.types.sampling import RequestOutputKind as RequestOutputKind
    from quire.types.sampling import SamplingParams as SamplingParams
    from quire.types.structured import StructuredOutputsParams as StructuredOutputsParams

_HOMES = {
    "LLM": "quire.llm",
    "LLMEngine": "quire.llm_engine",
    "AsyncLLM": "quire.async_llm",
    "AsyncLLMEngine": "quire.async_llm",
    "AsyncEngineArgs": "quire.async_llm",
    "EngineArgs": "quire.config.args",
    "ModelRegistry": "quire.config.model_registry",
    "LogitsProcessor": "quire.features.logits_processors.interface",
    "SamplingParams": "quire.types.sampling",
    "BeamSearchParams": "quire.types.sampling",
    "RequestOutputKind": "quire.types.sampling",
    "StructuredOutputsParams": "quire.types.structured",
    "RequestOutput": "quire.types.outputs",
    "CompletionOutput": "quire.types.outputs",
    "LoRARequest": "quire.types.adapter",
    "ClassificationOutput": "quire.types.pooling",
    "ClassificationRequestOutput": "quire.types.pooling",
    "EmbeddingOutput": "quire.types.pooling",
    "EmbeddingRequestOutput": "quire.types.pooling",
    "PoolingOutput": "quire.types.pooling",
    "PoolingParams": "quire.types.pooling",
    "PoolingRequestOutput": "quire.types.pooling",
    "ScoringOutput": "quire.types.pooling",
    "ScoringRequestOutput": "quire.types.pooling",
    "PromptType": "quire.types.prompts",
    "TextPrompt": "quire.types.prompts",
    "TokensPrompt": "quire.types.prompts",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _VllmPaths:
    """The last finder, asked for modules that are not files: vLLM's paths (`quire.outputs` ...) are in `compat/table.py`."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith(("quire.", "vllm.")):
            return None
        return importlib.import_module("quire.compat.modules").find_spec(name, path, target)


sys.meta_path.append(_VllmPaths)
