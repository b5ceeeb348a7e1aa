"""Multimodal checkpoints whose text model is run alone: the weights of their other parts are not read."""

from dataclasses import dataclass

from quire.config.families.card import Renames

_VISION = ("vision_tower", "multi_modal_projector")
_VISION_MODEL = ("vision_model", "connector")
_AUDIO = ("audio_tower", "multi_modal_projector")
_BOTH = ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
_NEWLINE = (*_VISION, "image_newline")


@dataclass(frozen=True)
class Composite:
    model_type: str
    unread: tuple[str, ...]  # parts whose weights are not read
    text: str  # model_type of the text model, where the nested config does not name it

    @property
    def renames(self) -> Renames:
        """Remove the prefix of the text model: `model.language_model.` or `language_model.model.`."""
        unread = "|".join(self.unread)
        return ((rf"^(model\.)?({unread})(\.|$)", None), (r"^(model\.)?(language_model|text_model)\.(model\.)*", ""))


COMPOSITES: dict[str, Composite] = {
    f"{name}ForConditionalGeneration": Composite(model_type, unread, text)
    for name, model_type, text, unread in (
        ("DeepseekVL", "deepseek_vl", "llama", ("vision_model", "aligner")),
        ("Gemma3", "gemma3", "gemma3_text", _VISION),
        ("Gemma3n", "gemma3n", "gemma3n_text", _BOTH),
        ("Gemma4", "gemma4", "gemma4_text", _BOTH),
        ("Gemma4Unified", "gemma4_unified", "gemma4_unified_text", ("vision_embedder", "embed_vision", "embed_audio")),
        ("GotOcr2", "got_ocr2", "qwen2", _VISION),
        ("Idefics2", "idefics2", "mistral", _VISION_MODEL),
        ("Idefics3", "idefics3", "llama", _VISION_MODEL),
        ("InternVL", "internvl", "qwen2", _VISION),
        ("LightOnOcr", "lighton_ocr", "qwen3", ("vision_encoder", "vision_projection")),
        ("Llama4", "llama4", "llama4_text", ("vision_model", "multi_modal_projector")),
        ("Llava", "llava", "llama", _VISION),
        ("LlavaNext", "llava_next", "llama", _NEWLINE),
        ("LlavaNextVideo", "llava_next_video", "llama", _NEWLINE),
        ("LlavaOnevision", "llava_onevision", "qwen2", _NEWLINE),
        ("Mistral3", "mistral3", "mistral", _VISION),
        ("PaliGemma", "paligemma", "gemma", _VISION),
        ("Qwen2Audio", "qwen2_audio", "qwen2", _AUDIO),
        ("Qwen2VL", "qwen2_vl", "qwen2_vl_text", ("visual",)),
        ("Qwen2_5_VL", "qwen2_5_vl", "qwen2_5_vl_text", ("visual",)),
        ("Qwen3VL", "qwen3_vl", "qwen3_vl_text", ("visual",)),
        ("Qwen3VLMoe", "qwen3_vl_moe", "qwen3_vl_moe_text", ("visual",)),
        ("Qwen3_5", "qwen3_5", "qwen3_5_text", ("visual", "mtp")),
        ("Qwen3_5Moe", "qwen3_5_moe", "qwen3_5_moe_text", ("visual", "mtp")),
        ("SmolVLM", "smolvlm", "llama", _VISION_MODEL),
        ("VideoLlava", "video_llava", "llama", ("video_tower", "image_tower", "multi_modal_projector")),
        ("VipLlava", "vipllava", "llama", _VISION),
        ("Voxtral", "voxtral", "llama", _AUDIO),
    )
}
TEXT_TYPES = {composite.model_type: composite.text for composite in COMPOSITES.values()}
