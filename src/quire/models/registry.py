"""Which class serves which architecture. Targets are strings: a family, and torch, are imported when a model asks for them."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts
    from quire.models.decoder import Decoder

FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "GPT2LMHeadModel": "quire.models.gpt2:GPT2",
        "Gemma2ForCausalLM": "quire.models.gemma:Gemma2",
        "Gemma3ForCausalLM": "quire.models.gemma:Gemma3",
        "Gemma3ForConditionalGeneration": "quire.models.gemma:Gemma3Text",
        "GemmaForCausalLM": "quire.models.gemma:Gemma",
        "LlamaForCausalLM": "quire.models.llama:Llama",
        "MistralForCausalLM": "quire.models.llama:Llama",
        "MixtralForCausalLM": "quire.models.mixtral:Mixtral",
        "OPTForCausalLM": "quire.models.opt:OPT",
        "Phi3ForCausalLM": "quire.models.llama:Phi3",
        "Qwen2ForCausalLM": "quire.models.llama:Qwen2",
        "Qwen3ForCausalLM": "quire.models.llama:Qwen3",
        "Qwen3MoeForCausalLM": "quire.models.qwen3_moe:Qwen3MoE",
    }
)
FALLBACK = "quire.models.fallback:Fallback"


def build_model(facts: "ModelFacts", impl: str = "auto") -> "Decoder":
    """The model without its weights: every parameter is on the meta device until `load_weights` fills it.

    impl: "auto" = our own family, else the fallback; "quire" = only our own; "transformers" = only the fallback.
    """
    import torch

    if impl not in ("auto", "quire", "transformers"):
        raise ModelError(f"unknown model_impl {impl!r}; it must be auto, quire or transformers")
    family = FAMILIES.get(facts.architecture) if impl != "transformers" else None
    if family is None and impl == "quire":
        raise ModelError(f"no model family serves {facts.architecture}; known are {', '.join(sorted(FAMILIES))}")
    kind = _import(family) if family is not None else _fallback(facts)
    try:
        with torch.device("meta"):
            return kind(facts).eval()
    except KeyError as error:
        raise ModelError(f"the configuration of {facts.files.path} lacks {error}, which {facts.architecture} needs") from error


def _fallback(facts: "ModelFacts") -> "type[Decoder]":
    try:
        return _import(FALLBACK)
    except ImportError as error:
        raise ModelError(
            f"no model family serves {facts.architecture} (known are {', '.join(sorted(FAMILIES))}), "
            f"and the fallback through transformers cannot be used: {error}"
        ) from error


def _import(target: str) -> "type[Decoder]":
    from quire.models.decoder import Decoder

    module, name = target.split(":")
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, type) and issubclass(found, Decoder)
    return found
