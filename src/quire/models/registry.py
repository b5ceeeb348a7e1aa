"""Which class serves which architecture. Targets are strings: a family is imported when a model asks for it."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from quire.models.decoder import Decoder
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "LlamaForCausalLM": "quire.models.llama:Llama",
        "MistralForCausalLM": "quire.models.llama:Llama",
        "Phi3ForCausalLM": "quire.models.llama:Phi3",
        "Qwen2ForCausalLM": "quire.models.llama:Qwen2",
        "Qwen3ForCausalLM": "quire.models.llama:Qwen3",
    }
)
FALLBACK = "quire.models.fallback:Fallback"


def build_model(facts: "ModelFacts", impl: str = "auto") -> Decoder:
    """The model without its weights: every parameter is on the meta device until `load_weights` fills it.

    impl: "auto" = our own family, else the fallback; "vllm" = only our own; "transformers" = only the fallback.
    """
    if impl not in ("auto", "vllm", "transformers"):
        raise ModelError(f"unknown model_impl {impl!r}; it must be auto, vllm or transformers")
    family = FAMILIES.get(facts.architecture) if impl != "transformers" else None
    if family is None and impl == "vllm":
        raise ModelError(f"no model family serves {facts.architecture}; known are {', '.join(sorted(FAMILIES))}")
    kind = _import(family) if family is not None else _fallback(facts)
    try:
        with torch.device("meta"):
            return kind(facts).eval()
    except KeyError as error:
        raise ModelError(f"the configuration of {facts.files.path} lacks {error}, which {facts.architecture} needs") from error


def _fallback(facts: "ModelFacts") -> type[Decoder]:
    try:
        return _import(FALLBACK)
    except ImportError as error:
        raise ModelError(
            f"no model family serves {facts.architecture} (known are {', '.join(sorted(FAMILIES))}), "
            f"and the fallback through transformers cannot be used: {error}"
        ) from error


def _import(target: str) -> type[Decoder]:
    module, name = target.split(":")
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, type) and issubclass(found, Decoder)
    return found
