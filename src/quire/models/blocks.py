"""Transformer blocks: norms, attention and feed-forward in the arrangements that several families share."""

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.layers.attention import SelfAttention
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import Norm, RMSNorm
from quire.ops.quantized_layouts import Activations

# layers whose input is read by one linear layer only, and its name; not subclasses, which may read it twice
FIRST_LINEAR: Mapping[type[nn.Module], str] = MappingProxyType({SelfAttention: "qkv", GatedMLP: "gate_up"})


def fused_norm(reader: nn.Module, norm: Norm, x: Tensor, residual: Tensor | None) -> tuple[Activations, Tensor]:
    """Return norm.add(x [T, H], residual), quantized if the first linear layer of `reader`, the only reader, would do it."""
    first = FIRST_LINEAR.get(type(reader))
    if first is not None and type(norm) is RMSNorm:
        linear = getattr(reader, first)
        assert isinstance(linear, Linear)
        rounding = linear.rounding(x)
        if rounding is not None:
            return norm.add_rounded(x, residual, rounding)
    return norm.add(x, residual)


class Block(nn.Module):
    """Pre-norm attention and feed-forward. The residual stream is separate from x; each norm adds x to it."""

    def __init__(self, input_layernorm: Norm, self_attn: SelfAttention, post_attention_layernorm: Norm, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Run x [T, H], which is not yet added to the residual stream [T, H]; the same holds for the returned x.

        The last block returns the final tokens only.
        """
        rows, residual = fused_norm(self.self_attn, self.input_layernorm, x, residual)
        x = self.self_attn(rows, batch)
        residual = self.self_attn.select_residual(residual, batch)
        rows, residual = fused_norm(self.mlp, self.post_attention_layernorm, x, residual)
        return self.mlp(rows, self.self_attn.tokens_after(batch)), residual


class SandwichBlock(nn.Module):
    """A norm before and after both attention and feed-forward; the outputs of the latter norms are multiplied by `scale`."""

    def __init__(
        self, norms: tuple[Norm, Norm, Norm, Norm], self_attn: SelfAttention, mlp: nn.Module, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.scale = scale
        self.input_layernorm, self.post_attention_layernorm = norms[:2]
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norms[2:]
        self.self_attn = self_attn
        self.mlp = mlp

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        rows, residual = fused_norm(self.self_attn, self.input_layernorm, x, residual)
        x = self.scaled(self.post_attention_layernorm(self.self_attn(rows, batch)))
        residual = self.self_attn.select_residual(residual, batch)
        rows, residual = fused_norm(self.mlp, self.pre_feedforward_layernorm, x, residual)
        x = self.mlp(rows, self.self_attn.tokens_after(batch))
        return self.scaled(self.post_feedforward_layernorm(x)), residual

    def scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1.0 else x * self.scale


class ParallelBlock(nn.Module):
    """Attention and feed-forward in parallel, after one shared norm or one norm each."""

    def __init__(self, input_layernorm: Norm, self_attn: SelfAttention, mlp: nn.Module, mlp_norm: Norm | None = None) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.mlp = mlp
        self.post_attention_layernorm = mlp_norm

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        attended = self.self_attn(x, batch)
        residual = self.self_attn.select_residual(residual, batch)
        if self.post_attention_layernorm is None:
            x = self.self_attn.select_residual(x, batch)
        else:
            x = self.post_attention_layernorm(residual)
        return attended + self.mlp(x, self.self_attn.tokens_after(batch)), residual


class PostNormBlock(nn.Module):
    """Norms after attention and feed-forward, none before."""

    def __init__(
        self, self_attn: SelfAttention, post_attention_layernorm: Norm, mlp: nn.Module, post_feedforward_layernorm: Norm
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp
        self.post_feedforward_layernorm = post_feedforward_layernorm

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        x = self.post_attention_layernorm(self.self_attn(total, batch))
        total = x + self.self_attn.select_residual(total, batch)
        return self.post_feedforward_layernorm(self.mlp(total, self.self_attn.tokens_after(batch))), total


class ScaledBlock(Block):
    """Llama's block; the outputs of attention and feed-forward are multiplied by `scale`."""

    def __init__(
        self, input_layernorm: Norm, self_attn: SelfAttention, post_attention_layernorm: Norm, mlp: nn.Module, scale: float
    ) -> None:
        super().__init__(input_layernorm, self_attn, post_attention_layernorm, mlp)
        self.scale = scale

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor | None]:
        rows, residual = fused_norm(self.self_attn, self.input_layernorm, x, residual)
        x = self.self_attn(rows, batch) * self.scale
        residual = self.self_attn.select_residual(residual, batch)
        rows, residual = fused_norm(self.mlp, self.post_attention_layernorm, x, residual)
        return self.mlp(rows, self.self_attn.tokens_after(batch)) * self.scale, residual
