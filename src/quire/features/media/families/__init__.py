"""Families of models that read images and videos, by architecture. Nothing here imports torch."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from quire.features.media.families.base import MediaFamily

# architecture -> "module:Class" below quire.features.media.families
FAMILIES: Mapping[str, str] = {
    "DeepseekVLForConditionalGeneration": "llava:DeepseekVL",
    "Gemma3ForConditionalGeneration": "gemma3:Gemma3",
    "Idefics2ForConditionalGeneration": "idefics2:Idefics2",
    "Idefics3ForConditionalGeneration": "idefics3:Idefics3",
    "InternVLForConditionalGeneration": "internvl:InternVL",
    "LightOnOcrForConditionalGeneration": "pixtral:LightOnOcr",
    "LlavaForConditionalGeneration": "llava:Llava",
    "LlavaNextForConditionalGeneration": "anyres:LlavaNext",
    "LlavaNextVideoForConditionalGeneration": "anyres:LlavaNextVideo",
    "LlavaOnevisionForConditionalGeneration": "anyres:LlavaOnevision",
    "Mistral3ForConditionalGeneration": "pixtral:Mistral3",
    "PaliGemmaForConditionalGeneration": "paligemma:PaliGemma",
    "Qwen2VLForConditionalGeneration": "qwen_vl:Qwen2VL",
    "Qwen2_5_VLForConditionalGeneration": "qwen_vl:Qwen2_5VL",
    "Qwen3VLForConditionalGeneration": "qwen_vl:Qwen3VL",
    "Qwen3VLMoeForConditionalGeneration": "qwen_vl:Qwen3VL",
    "Qwen3_5ForConditionalGeneration": "qwen_vl:Qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen_vl:Qwen3_5",
    "SmolVLMForConditionalGeneration": "idefics3:Idefics3",
    "VipLlavaForConditionalGeneration": "llava:VipLlava",
}
# the same for architectures with another encoder, by `model_type` of `vision_config`
BY_ENCODER: Mapping[tuple[str, str], str] = {("LlavaForConditionalGeneration", "pixtral"): "pixtral:Pixtral"}


def media_family(architecture: str, config: Mapping[str, Any]) -> MediaFamily | None:
    """Return the family of an architecture. config: the whole config.json. None: the model reads text only."""
    found = BY_ENCODER.get((architecture, _encoder(config))) or FAMILIES.get(architecture)
    return None if found is None else family_class(found)(config)


def family_class(found: str) -> type[MediaFamily]:
    """Return a class of FAMILIES or BY_ENCODER."""
    module, name = found.split(":")
    family: type[MediaFamily] = getattr(import_module(f"{__name__}.{module}"), name)
    return family


def _encoder(config: Mapping[str, Any]) -> str:
    vision = config.get("vision_config")
    return str(vision.get("model_type")) if isinstance(vision, Mapping) else ""
