"""Idefics 2: SigLIP for images of any size, a gated MLP, and a resampler that attends with learned queries."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.config.hf import explicit_config
from quire.features.media.families.fields import read_vision, size_field, text_width
from quire.features.media.families.idefics2 import resampler_config
from quire.features.media.towers.base import Tower
from quire.features.media.towers.idefics3 import RENAMES, fractional_positions
from quire.features.media.towers.parts import Part, by_shape, project, vision_activation
from quire.features.media.towers.vit import VisionEncoder
from quire.layers.linear import Linear, MergedLinear
from quire.layers.norm import RMSNorm
from quire.layers.parameter import parameter
from quire.types.media import Modality


class GatedMLP(Part):
    def __init__(self, inputs: int, inner: int, outputs: int, activation: str) -> None:
        super().__init__()
        self.gate_up = MergedLinear(inputs, {"gate_proj": inner, "up_proj": inner})
        self.down_proj = Linear(inner, outputs)
        self.activation = vision_activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project(self.gate_up, x).chunk(2, dim=-1)
        return project(self.down_proj, self.activation(gate) * up)


class ResamplerAttention(Part):
    """Queries of the latents; keys and values of the context, then the latents."""

    def __init__(self, width: int, heads: int, key_heads: int, size: int) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        self.q_proj = Linear(width, heads * size)
        self.kv = MergedLinear(width, dict.fromkeys(("k_proj", "v_proj"), key_heads * size))
        self.o_proj = Linear(heads * size, width)

    def forward(self, latents: Tensor, context: Tensor) -> Tensor:
        both = torch.cat([context, latents], dim=1)
        query = project(self.q_proj, latents).view(*latents.shape[:2], self.heads, -1).transpose(1, 2)
        key, value = project(self.kv, both).view(*both.shape[:2], 2, self.key_heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return project(self.o_proj, out.transpose(1, 2).flatten(2))


class ResamplerLayer(Part):
    def __init__(self, width: int, eps: float, activation: str, heads: int, key_heads: int, size: int) -> None:
        super().__init__()
        self.input_latents_norm, self.input_context_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.self_attn = ResamplerAttention(width, heads, key_heads, size)
        self.mlp = GatedMLP(width, 4 * width, width, activation)

    def forward(self, latents: Tensor, context: Tensor) -> Tensor:
        latents = latents + self.self_attn(self.input_latents_norm(latents), self.input_context_norm(context))
        return latents + self.mlp(self.post_attention_layernorm(latents))


class Resampler(Part):
    def __init__(self, config: Mapping[str, Any], width: int, text_eps: float) -> None:
        super().__init__()
        names = {"resampler_n_heads": 16, "num_key_value_heads": 4, "resampler_head_dim": 96}
        heads, key_heads, size = (size_field(config, name, value, "perceiver_config") for name, value in names.items())
        eps = config.get("rms_norm_eps", 1e-6) if config.get("hidden_size", 4096) == width else text_eps
        self.latents = parameter(size_field(config, "resampler_n_latents", 64, "perceiver_config"), width)
        activation, depth = str(config.get("hidden_act", "silu")), size_field(config, "resampler_depth", 3, "perceiver_config")
        self.layers = nn.ModuleList(ResamplerLayer(width, eps, activation, heads, key_heads, size) for _ in range(depth))
        self.norm = RMSNorm(width, eps)

    def forward(self, context: Tensor) -> Tensor:
        """context [frames, patches, width] -> [frames, latents, width]."""
        latents = self.latents.expand(len(context), -1, -1)
        for layer in self.layers:
            latents = layer(latents, context)
        normed: Tensor = self.norm(latents)
        return normed


class Connector(Part):
    def __init__(self, config: Mapping[str, Any], inputs: int) -> None:
        super().__init__()
        text, width = explicit_config(config, {}), text_width(config)
        inner = size_field(text, "intermediate_size", where="text_config")
        self.modality_projection = GatedMLP(inputs, inner, width, str(text.get("hidden_act", "silu")))
        self.perceiver_resampler = Resampler(resampler_config(config), width, text.get("rms_norm_eps", 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return self.perceiver_resampler(self.modality_projection(x))


class Idefics2Tower(Tower):
    renames = RENAMES

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.vision = read_vision(config, kind="idefics2_vision")
        self.vision_tower = VisionEncoder(self.vision)
        self.connector = Connector(config, self.vision.width)

    def features(self, pixels: Tensor) -> Tensor:
        """pixels [frames, channels, height, width] -> [frames, tokens, hidden size]."""
        rows, columns = (side // self.vision.patch_size for side in pixels.shape[2:])
        order = fractional_positions(rows, columns, self.vision.side, pixels.device)
        return self.connector(self.vision_tower(pixels, order))

    def encode(self, modality: Modality, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:  # noqa: ARG002
        frames = [self.frames(item["pixel_values"], item["frame_sizes"].tolist()) for item in items]
        found = iter(by_shape([frame for item in frames for frame in item], self.features))
        return [torch.cat([next(found)[0] for _ in item]) for item in frames]

    def frames(self, pixels: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return each frame without its padding, and without pixels that fill no patch, as one image."""
        patch = self.vision.patch_size
        return [
            frame[None, :, : height // patch * patch, : width // patch * patch]
            for frame, (height, width) in zip(pixels, sizes, strict=True)
        ]
