"""Which class serves which architecture. Targets are strings: a family, and torch, are imported when a model asks for them."""

import importlib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from quire.files.reading import reading
from quire.models.composite import COMPOSITES, TEXT_MODELS, renames_of
from quire.models.transformers_types import check_model_type
from quire.types.cache import LayerCache
from quire.types.errors import ModelError

NO_CACHE = LayerCache(1, 1)  # in the place of what nobody knows, of a model that will be refused

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts
    from quire.models.decoder import Decoder

FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "AXK1ForCausalLM": "quire.models.deepseek:AXK1",
        "AfmoeForCausalLM": "quire.models.afmoe:AFMoE",
        "ApertusForCausalLM": "quire.models.apertus:Apertus",
        "AquilaForCausalLM": "quire.models.llama:Llama",
        "AquilaModel": "quire.models.llama:Llama",
        "ArceeForCausalLM": "quire.models.llama:Arcee",
        "BaiChuanForCausalLM": "quire.models.other_names:Baichuan",
        "BaichuanForCausalLM": "quire.models.other_names:Baichuan",
        "BailingMoeForCausalLM": "quire.models.mixtures:OlderBailing",
        "BailingMoeV2ForCausalLM": "quire.models.mixtures:Bailing",
        "BambaForCausalLM": "quire.models.bamba:Bamba",
        "BloomForCausalLM": "quire.models.alibi:Bloom",
        "ChatGLMForConditionalGeneration": "quire.models.glm:ChatGLM",
        "ChatGLMModel": "quire.models.glm:ChatGLM",
        "CodeGenForCausalLM": "quire.models.gptj:CodeGen",
        "Cohere2ForCausalLM": "quire.models.cohere:Cohere2",
        "CohereForCausalLM": "quire.models.cohere:Cohere",
        "CwmForCausalLM": "quire.models.llama:Llama",
        "DbrxForCausalLM": "quire.models.dbrx:DBRX",
        "DeciLMForCausalLM": "quire.models.decilm:DeciLM",
        "DeepseekForCausalLM": "quire.models.mixtures:Deepseek",
        "DeepseekV2ForCausalLM": "quire.models.deepseek:DeepseekV2",
        "DeepseekV3ForCausalLM": "quire.models.deepseek:DeepseekV3",
        "Dots1ForCausalLM": "quire.models.mixtures:Dots1",
        "Ernie4_5ForCausalLM": "quire.models.llama:Ernie45",
        "Ernie4_5_MoeForCausalLM": "quire.models.mixtures:Ernie45MoE",
        "Exaone4ForCausalLM": "quire.models.exaone:Exaone4",
        "ExaoneForCausalLM": "quire.models.exaone:Exaone",
        "ExaoneMoEForCausalLM": "quire.models.mixtures:ExaoneMoE",
        "ExaoneMoeForCausalLM": "quire.models.mixtures:ExaoneMoE",
        "FalconForCausalLM": "quire.models.falcon:Falcon",
        "FalconH1ForCausalLM": "quire.models.hybrids:FalconH1",
        "FalconMambaForCausalLM": "quire.models.mamba:FalconMamba",
        "FlexOlmoForCausalLM": "quire.models.mixtures:FlexOlmo",
        "GPT2LMHeadModel": "quire.models.gpt2:GPT2",
        "GPTBigCodeForCausalLM": "quire.models.starcoder:GPTBigCode",
        "GPTJForCausalLM": "quire.models.gptj:GPTJ",
        "GPTNeoXForCausalLM": "quire.models.gpt_neox:GPTNeoX",
        "Gemma2ForCausalLM": "quire.models.gemma:Gemma2",
        "Gemma3ForCausalLM": "quire.models.gemma:Gemma3",
        "Gemma3nForCausalLM": "quire.models.gemma3n:Gemma3n",
        "Gemma4ForCausalLM": "quire.models.gemma4:Gemma4",
        "Gemma4UnifiedForCausalLM": "quire.models.gemma4:Gemma4",
        "GemmaForCausalLM": "quire.models.gemma:Gemma",
        "Glm4ForCausalLM": "quire.models.glm:Glm4",
        "Glm4MoeForCausalLM": "quire.models.mixtures:Glm4MoE",
        "Glm4MoeLiteForCausalLM": "quire.models.deepseek:Glm4MoELite",
        "GlmForCausalLM": "quire.models.glm:Glm",
        "GptOssForCausalLM": "quire.models.gpt_oss:GptOss",
        "GraniteForCausalLM": "quire.models.granite:Granite",
        "GraniteMoeForCausalLM": "quire.models.granite:GraniteMoE",
        "GraniteMoeHybridForCausalLM": "quire.models.hybrids:GraniteHybrid",
        "GraniteMoeSharedForCausalLM": "quire.models.granite:GraniteMoE",
        "HeliumForCausalLM": "quire.models.llama:Helium",
        "HunYuanDenseV1ForCausalLM": "quire.models.hunyuan:HunYuan",
        "HunYuanMoEV1ForCausalLM": "quire.models.hunyuan:HunYuanMoE",
        "HyperCLOVAXForCausalLM": "quire.models.granite:HyperCLOVAX",
        "IQuestCoderForCausalLM": "quire.models.llama:Llama",
        "InternLM2ForCausalLM": "quire.models.other_names:InternLM2",
        "InternLM3ForCausalLM": "quire.models.other_names:InternLM3",
        "InternLMForCausalLM": "quire.models.other_names:InternLM",
        "Jais2ForCausalLM": "quire.models.llama:Jais2",
        "JambaForCausalLM": "quire.models.hybrids:Jamba",
        "KimiLinearForCausalLM": "quire.models.kimi_linear:KimiLinear",
        "LLaMAForCausalLM": "quire.models.llama:Llama",
        "Lfm2ForCausalLM": "quire.models.lfm2:LFM2",
        "Lfm2MoeForCausalLM": "quire.models.lfm2:LFM2MoE",
        "Llama4ForCausalLM": "quire.models.llama4:Llama4",
        "LlamaForCausalLM": "quire.models.llama:Llama",
        "LongcatFlashForCausalLM": "quire.models.longcat:LongCat",
        "MPTForCausalLM": "quire.models.alibi:MPT",
        "Mamba2ForCausalLM": "quire.models.mamba:Mamba2",
        "MambaForCausalLM": "quire.models.mamba:Mamba",
        "MiMoForCausalLM": "quire.models.llama:MiMo",
        "MiMoV2FlashForCausalLM": "quire.models.mimo:MiMoV2Flash",
        "MiniCPM3ForCausalLM": "quire.models.deepseek:MiniCPM3",
        "MiniCPMForCausalLM": "quire.models.granite:MiniCPM",
        "MiniMaxForCausalLM": "quire.models.minimax:MiniMax",
        "MiniMaxM2ForCausalLM": "quire.models.mixtures:MiniMaxM2",
        "Ministral3ForCausalLM": "quire.models.llama:Ministral3",
        "MinistralForCausalLM": "quire.models.llama:Llama",
        "MistralForCausalLM": "quire.models.llama:Llama",
        "MixtralForCausalLM": "quire.models.mixtral:Mixtral",
        "MptForCausalLM": "quire.models.alibi:MPT",
        "NemotronForCausalLM": "quire.models.nemotron:Nemotron",
        "NemotronHForCausalLM": "quire.models.nemotron_h:NemotronH",
        "OPTForCausalLM": "quire.models.opt:OPT",
        "Olmo2ForCausalLM": "quire.models.olmo:Olmo2",
        "Olmo3ForCausalLM": "quire.models.olmo:Olmo3",
        "OlmoForCausalLM": "quire.models.olmo:Olmo",
        "OlmoHybridForCausalLM": "quire.models.olmo_hybrid:OlmoHybrid",
        "OlmoeForCausalLM": "quire.models.mixtures:OlmoE",
        "OrionForCausalLM": "quire.models.other_names:Orion",
        "PanguEmbeddedForCausalLM": "quire.models.other_names:InternLM",
        "Phi3ForCausalLM": "quire.models.llama:Phi3",
        "PhiForCausalLM": "quire.models.phi:Phi",
        "PhiMoEForCausalLM": "quire.models.mixtures:PhiMoE",
        "PhimoeForCausalLM": "quire.models.mixtures:PhiMoE",
        "QWenLMHeadModel": "quire.models.other_names:QWen",
        "Qwen2ForCausalLM": "quire.models.llama:Qwen2",
        "Qwen2MoeForCausalLM": "quire.models.mixtures:Qwen2MoE",
        "Qwen3ForCausalLM": "quire.models.llama:Qwen3",
        "Qwen3MoeForCausalLM": "quire.models.qwen3_moe:Qwen3MoE",
        "Qwen3NextForCausalLM": "quire.models.qwen3_next:Qwen3Next",
        "Qwen3_5ForCausalLM": "quire.models.qwen3_next:Qwen35",
        "Qwen3_5MoeForCausalLM": "quire.models.qwen3_next:Qwen35MoE",
        "RWForCausalLM": "quire.models.falcon:Falcon",
        "SeedOssForCausalLM": "quire.models.llama:SeedOss",
        "SmolLM3ForCausalLM": "quire.models.llama:SmolLM3",
        "SolarForCausalLM": "quire.models.solar:Solar",
        "SolarOpenForCausalLM": "quire.models.mixtures:SolarOpen",
        "StableLMEpochForCausalLM": "quire.models.stablelm:StableLM",
        "StableLmForCausalLM": "quire.models.stablelm:StableLM",
        "Starcoder2ForCausalLM": "quire.models.starcoder:StarCoder2",
        "VaultGemmaForCausalLM": "quire.models.gemma:VaultGemma",
        "XverseForCausalLM": "quire.models.llama:Llama",
        "YoutuForCausalLM": "quire.models.deepseek:Youtu",
        "Zamba2ForCausalLM": "quire.models.zamba2:Zamba2",
    }
)
FALLBACK = "quire.models.fallback:Fallback"
RECOMPUTED = "quire.models.recomputed:Recomputed"


def find_family(facts: "ModelFacts") -> str | None:
    """The family of ours that serves the model, or the text half of it."""
    if facts.architecture in COMPOSITES:
        return FAMILIES.get(TEXT_MODELS.get(facts.hf.get("model_type", ""), ""))
    return FAMILIES.get(facts.architecture)


def complete_facts(facts: "ModelFacts", impl: str) -> "ModelFacts":
    """Of a model that transformers runs: what its cache must hold, as the model itself says. Whoever cannot be run is left as
    is: `build_model` says why."""
    ours = find_family(facts) is not None and impl != "transformers"
    if not ours and impl != "quire" and facts.architecture not in COMPOSITES:
        facts = replace(facts, by_transformers=True)
        try:
            _check_known(facts)
            return importlib.import_module("quire.models.fallback_plan").plan(facts)  # type: ignore[no-any-return]
        except (ModuleNotFoundError, ModelError):
            return replace(facts, layers=(NO_CACHE,), unplanned="") if facts.unplanned else facts
    if facts.unplanned:
        raise ModelError(facts.unplanned)
    return facts


def build_model(facts: "ModelFacts", impl: str = "auto") -> "Decoder":
    """The model without its weights: every parameter is on the meta device until `load_weights` fills it.

    impl: "auto" = our own family, else the fallback; "quire" = only our own; "transformers" = only the fallback.
    """
    if impl not in ("auto", "quire", "transformers"):
        raise ModelError(f"unknown model_impl {impl!r}; it must be auto, quire or transformers")
    family = find_family(facts)
    if impl != "transformers" and family is not None:
        return _build(_import(family), facts)
    if facts.architecture in COMPOSITES:
        raise ModelError(_why_not(facts))
    if facts.states:
        raise ModelError(
            f"{facts.architecture} cannot be run through transformers: it has recurrent layers, whose states are kept for a "
            "family of our own only; model_impl must be auto or quire for it"
        )
    unserved = f"no model family serves {facts.architecture} (`quire models` lists them)"
    if impl == "quire":
        raise ModelError(unserved)
    try:
        _check_known(facts)
        return _import(RECOMPUTED if facts.recomputed else FALLBACK)(facts).eval()
    except ModuleNotFoundError as error:
        install = f"transformers cannot be used ({error}); install it with pip install 'quire[transformers]'"
        raise ModelError(f"{unserved}, and {install}" if impl == "auto" else install) from error
    except ModelError as error:
        refusal = f"{facts.architecture} cannot be run through transformers: {error}"
        raise ModelError(f"{unserved}, and {refusal}" if impl == "auto" else refusal) from error


def _check_known(facts: "ModelFacts") -> None:
    """Refuse a model type that transformers does not list before transformers, and torch with it, is imported."""
    check_model_type(facts.hf.get("model_type"), bool(facts.hf.get("auto_map")))


def _build(kind: "type[Decoder]", facts: "ModelFacts") -> "Decoder":
    import torch

    with reading(facts.files.path, f"its configuration makes no {facts.architecture}"), torch.device("meta"):
        try:
            model = kind(facts).eval()
        except KeyError as error:
            lack = f"the configuration of {facts.files.path} lacks {error}, which {facts.architecture} needs"
            raise ModelError(lack) from error
        except ModelError as error:
            raise ModelError(f"{facts.files.path}: {error}") from error
    if facts.architecture in COMPOSITES:
        model.renames = (*renames_of(facts.architecture), *model.renames)
    return model


def _why_not(facts: "ModelFacts") -> str:
    text = facts.hf.get("model_type")
    halves = f"{facts.architecture} is several models, of which only the text model is served, and by a family of our own"
    if text not in TEXT_MODELS:
        return f"{halves}; but none serves its text model of type {text!r} (known are {', '.join(TEXT_MODELS)})"
    return f"{halves}; model_impl must be auto or quire for it"


def _import(target: str) -> "type[Decoder]":
    from quire.models.decoder import Decoder

    module, name = target.split(":")
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, type) and issubclass(found, Decoder)
    return found
