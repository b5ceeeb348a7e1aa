"""The cache of transformers with the rounding of an 8-bit one."""

import torch
from transformers import DynamicCache

MOST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


class RoundedCache(DynamicCache):
    """Round every key and value, by head, as it is added.

    scales: by layer, of keys and values, one each or one for every head; without them those of the largest values.
    """

    def __init__(self, config, kind, scales=None):
        super().__init__(config=config)
        self.kind, self.scales = kind, scales

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        given = (None, None) if self.scales is None else self.scales[layer_idx]
        pair = [self.rounded(x, scale) for x, scale in zip((key_states, value_states), given, strict=True)]
        return super().update(*pair, layer_idx, *args, **kwargs)

    def rounded(self, x, given):
        """x [1, heads, tokens, head_dim]."""
        scale = x.abs().amax(-1, keepdim=True) / MOST[self.kind] if given is None else given.view(1, -1, 1, 1)
        return (x / scale).clamp(-MOST[self.kind], MOST[self.kind]).to(self.kind).float() * scale
