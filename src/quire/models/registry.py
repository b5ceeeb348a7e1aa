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
    if impl != "transformers" and facts.architecture in FAMILIES:
        kind = _import(FAMILIES[facts.architecture])
        try:
            with torch.device("meta"):
                return kind(facts).eval()
        except KeyError as error:
            lack = f"the configuration of {facts.files.path} lacks {error}, which {facts.architecture} needs"
            raise ModelError(lack) from error
    unserved = f"no model family serves {facts.architecture} (known are {', '.join(sorted(FAMILIES))})"
    if impl == "quire":
        raise ModelError(unserved)
    try:
        with torch.device("meta"):
            return _import(FALLBACK)(facts).eval()
    except ModuleNotFoundError as error:
        install = f"transformers cannot be used ({error}); install it with pip install 'quire[transformers]'"
        raise ModelError(f"{unserved}, and {install}" if impl == "auto" else install) from error
    except ModelError as error:
        refusal = f"{facts.architecture} cannot be run through transformers: {error}"
        raise ModelError(f"{unserved}, and {refusal}" if impl == "auto" else refusal) from error


def _import(target: str) -> "type[Decoder]":
    from quire.models.decoder import Decoder

    module, name = target.split(":")
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, type) and issubclass(found, Decoder)
    return found
