"""Architectures whose code is in model repositories, and never run: what they compute, written down around transformers' Llama
(see oracle.py)."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM


class NoTurning(nn.Module):
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones(1, 1, 1), torch.zeros(1, 1, 1)


class AlibiLlama(LlamaForCausalLM):
    """Baichuan of 13B: a key's logit loses a head's slope for every position that it lies back."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.rotary_emb = NoTurning()

    def forward(self, input_ids: Tensor, attention_mask: Any = None, past_key_values: Any = None, **more: Any) -> Any:
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        keys = torch.arange(past + input_ids.shape[1])
        back = keys[past:, None] - keys[None]
        assert self.config.num_attention_heads == 6
        slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8])  # of four, and every other one of eight
        bias = torch.where(back < 0, float("-inf"), -slopes[:, None, None] * back)
        return super().forward(input_ids, attention_mask=bias[None], past_key_values=past_key_values, **more)


class MixingLlama(LlamaForCausalLM):
    """Solar: some layers are given a mixture with what others were given."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        given: dict[int, Tensor] = {}
        share = config.bskcn_tv[1]

        def mix(index: int, x: Tensor) -> Tensor:
            given.update({number: x for number in (1, 2) if index in getattr(config, f"bskcn_{number}")})
            for number in (1, 2):
                if index in getattr(config, f"bskcn_{number + 2}"):
                    x = given[number] * share + x * (1 - share)
            return x

        for at, layer in enumerate(self.model.layers):
            layer.register_forward_pre_hook(lambda _, args, at=at: (mix(at, args[0]), *args[1:]))


class One(nn.Module):
    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, nn.Linear(size, size, bias=False))

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        out = getattr(self, self.name)(hidden_states)
        return (out, None) if self.name == "linear_attn" else out


class PartialLlama(LlamaForCausalLM):
    """DeciLM: halves of blocks are one matrix; those that are left out give nothing, and key heads of a group are alike."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer, block in zip(self.model.layers, config.block_configs, strict=True):
            if block["attention"].get("replace_with_linear"):
                layer.self_attn = One("linear_attn", config.hidden_size)
            if block["ffn"].get("replace_with_linear"):
                layer.mlp = One("linear_mlp", config.hidden_size)
        self.post_init()
