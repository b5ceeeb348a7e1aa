"""Checkpoints of models that also see or hear: their text half is a decoder of one of our families, under another name.

What belongs to the other halves is named here and left aside; a tensor that nobody knows is still an error.
"""

from collections.abc import Mapping
from types import MappingProxyType

Renames = tuple[tuple[str, str | None], ...]

# the model_type of a text half -> the architecture that it is
TEXT_MODELS: Mapping[str, str] = MappingProxyType(
    {
        "gemma": "GemmaForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "gemma3n_text": "Gemma3nForCausalLM",
        "gemma4_text": "Gemma4ForCausalLM",
        "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
        "gpt2": "GPT2LMHeadModel",
        "llama": "LlamaForCausalLM",
        "llama4_text": "Llama4ForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral": "MistralForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "opt": "OPTForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        # without images the three positions that these turn by are one
        "qwen2_vl": "Qwen2ForCausalLM",
        "qwen2_vl_text": "Qwen2ForCausalLM",
        "qwen2_5_vl": "Qwen2ForCausalLM",
        "qwen2_5_vl_text": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_vl_text": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    }
)

_SEEN = ("vision_tower", "multi_modal_projector")
_HEARD = ("audio_tower", "multi_modal_projector")
_BOTH = ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
# architecture -> the parts that text needs nothing of
COMPOSITES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "DeepseekVLForConditionalGeneration": ("vision_model", "aligner"),
        "Gemma3ForConditionalGeneration": _SEEN,
        "Gemma3nForConditionalGeneration": _BOTH,
        "Gemma4ForConditionalGeneration": _BOTH,
        "Gemma4UnifiedForConditionalGeneration": ("vision_embedder", "embed_vision", "embed_audio"),
        "GotOcr2ForConditionalGeneration": _SEEN,
        "Idefics2ForConditionalGeneration": ("vision_model", "connector"),
        "Idefics3ForConditionalGeneration": ("vision_model", "connector"),
        "InternVLForConditionalGeneration": _SEEN,
        "LightOnOcrForConditionalGeneration": ("vision_encoder", "vision_projection"),
        "Llama4ForConditionalGeneration": ("vision_model", "multi_modal_projector"),
        "LlavaForConditionalGeneration": _SEEN,
        "LlavaNextForConditionalGeneration": (*_SEEN, "image_newline"),
        "LlavaNextVideoForConditionalGeneration": (*_SEEN, "image_newline"),
        "LlavaOnevisionForConditionalGeneration": (*_SEEN, "image_newline"),
        "Mistral3ForConditionalGeneration": _SEEN,
        "PaliGemmaForConditionalGeneration": _SEEN,
        "Qwen2AudioForConditionalGeneration": _HEARD,
        "Qwen2VLForConditionalGeneration": ("visual",),
        "Qwen2_5_VLForConditionalGeneration": ("visual",),
        "Qwen3VLForConditionalGeneration": ("visual",),
        "Qwen3VLMoeForConditionalGeneration": ("visual",),
        "Qwen3_5ForConditionalGeneration": ("visual", "mtp"),
        "Qwen3_5MoeForConditionalGeneration": ("visual", "mtp"),
        "SmolVLMForConditionalGeneration": ("vision_model", "connector"),
        "VideoLlavaForConditionalGeneration": ("video_tower", "image_tower", "multi_modal_projector"),
        "VipLlavaForConditionalGeneration": _SEEN,
        "VoxtralForConditionalGeneration": _HEARD,
    }
)


def renames_of(architecture: str) -> Renames:
    """Before the text half's own: `model.language_model.layers.0...` and `language_model.model.layers.0...` are both found."""
    aside = "|".join(COMPOSITES[architecture])
    return ((rf"^(model\.)?({aside})(\.|$)", None), (r"^(model\.)?(language_model|text_model)\.(model\.)*", ""))
