"""Towers of published shapes: every tensor of the checkpoint has its place. Nothing is allocated."""

from importlib import import_module

import pytest
import torch

from media_towers import open_family
from quire.load.assign import match, slices_of_model

QWEN_7B = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
# `vision_config` and other fields as the named repositories have them
SHAPES = {
    "Qwen/Qwen2-VL-7B-Instruct": ("Qwen2VL", {**QWEN_7B, "vision_config": {
        "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 3584, "patch_size": 14,
        "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2}}),
    "Qwen/Qwen2.5-VL-7B-Instruct": ("Qwen2_5_VL", {**QWEN_7B, "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
        "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2}}),
    "Qwen/Qwen3-VL-8B-Instruct": ("Qwen3VL", {"text_config": {"hidden_size": 4096}, "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
        "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304, "num_heads": 16,
        "num_position_embeddings": 2304, "out_hidden_size": 4096, "patch_size": 16, "spatial_merge_size": 2,
        "temporal_patch_size": 2}}),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": ("Mistral3", {
        "text_config": {"model_type": "mistral", "hidden_size": 5120, "rms_norm_eps": 1e-5}, "spatial_merge_size": 2,
        "vision_feature_layer": -1, "multimodal_projector_bias": False, "vision_config": {
            "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540,
            "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "pixtral", "num_attention_heads": 16,
            "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14, "rope_theta": 10000.0}}),
    "mistral-community/pixtral-12b": ("Llava", {
        "text_config": {"model_type": "mistral", "hidden_size": 5120, "head_dim": 128}, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full", "projector_hidden_act": "gelu", "vision_config": {
            "head_dim": 64, "hidden_act": "silu", "image_size": 1024, "is_composition": True, "model_type": "pixtral",
            "patch_size": 16, "rope_theta": 10000.0}}),
    "OpenGVLab/InternVL3-8B-hf": ("InternVL", {
        "text_config": {"model_type": "qwen2", "hidden_size": 3584}, "image_seq_length": 256, "vision_config": {
            "architectures": ["InternVisionModel"], "attention_bias": True, "hidden_act": "gelu", "hidden_size": 1024,
            "image_size": [448, 448], "intermediate_size": 4096, "layer_norm_eps": 1e-6, "model_type": "internvl_vision",
            "norm_type": "layer_norm", "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": [14, 14],
            "use_absolute_position_embeddings": True, "use_mean_pooling": True, "use_qk_norm": False}}),
}  # fmt: skip


class Names:
    """A checkpoint of which only names and shapes are read."""

    def __init__(self, shapes):
        self.shapes = shapes


@pytest.mark.parametrize("repository", list(SHAPES))
def test_every_tensor_has_its_place(repository):
    import transformers

    name, config = SHAPES[repository]
    small = {"num_hidden_layers": 1, "vocab_size": 200}
    text = {"text_config": config["text_config"] | small} if "text_config" in config else small
    oracle = getattr(transformers, f"{name}Config")(**config | text)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForConditionalGeneration")(oracle)
        config = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": oracle.model_type, **config}
        module, tower = open_family(config).tower.split(":")
        ours = getattr(import_module(f"quire.features.media.towers.{module}"), tower)(config)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    found = match(slices_of_model(ours), Names(shapes), ours.renames, repository)
    assert not any("language_model" in key or key == "lm_head.weight" for key in found)
    assert sum(value.numel() for value in ours.parameters()) > 3e8
