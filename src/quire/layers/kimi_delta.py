"""Kimi's delta attention: a gated delta network whose states decay by a number of every key, and not of a head."""

import torch
from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.layers.claims import Claim, Claims, Take
from quire.layers.delta_net import DeltaShape
from quire.layers.linear import Linear, MergedLinear
from quire.layers.parameter import parameter
from quire.layers.recurrent import GatedNorm, Recurrence, ShortConvolution, rows_of
from quire.ops.arguments import TimeSteps
from quire.ops.recurrent import convolve, delta_rule


class KimiDelta(nn.Module):
    """What a state decays by, and what comes out is gated by, are made of a few numbers of a token each."""

    fixed = frozenset({"A_log", "dt_bias"})

    def __init__(self, hidden_size: int, shape: DeltaShape, eps: float) -> None:
        super().__init__()
        self.shape, size, wide = shape, shape.key_dim, shape.values
        parts = {"q_proj": wide, "k_proj": wide, "v_proj": wide, "f_a_proj": size, "g_a_proj": size, "b_proj": shape.heads}
        self.in_proj = MergedLinear(hidden_size, parts)
        self.f_b_proj = Linear(size, wide)
        self.g_b_proj = Linear(size, wide)
        kernels = {"q_conv1d": wide, "k_conv1d": wide, "v_conv1d": wide}
        self.conv1d = ShortConvolution(3 * wide, shape.width, bias=False, parts=kernels)
        self.A_log = parameter(shape.heads, dtype=torch.float32)
        self.dt_bias = parameter(shape.heads, size, dtype=torch.float32)
        self.o_norm = GatedNorm(size, eps, groups=shape.heads, norm_first=True, act="sigmoid")
        self.o_proj = Linear(wide, hidden_size)
        self.core = Recurrence(shape.cache)

    def claims(self, path: str) -> Claims:
        heads = self.shape.heads
        return {
            f"{path}.A_log": Claim((1, 1, heads, 1), (Take(self.A_log.data.view(1, 1, -1, 1)),)),
            f"{path}.dt_bias": Claim((self.shape.values,), (Take(self.dt_bias.data.view(-1)),)),
        }

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, H] -> [T, H]."""
        shape, rows, heads = self.shape, rows_of(batch), (len(x), self.shape.heads, self.shape.key_dim)
        conv, state = self.core.bound()
        sizes = [3 * shape.values, shape.key_dim, shape.key_dim, shape.heads]
        mixed, steps, gate, beta = torch.split(self.in_proj(x, batch.tokens), sizes, -1)
        mixed = convolve(mixed, self.conv1d.weight, None, conv, rows, silu=True)
        query, key, value = (part.view(heads) for part in mixed.chunk(3, -1))
        raw = self.f_b_proj(steps.contiguous(), batch.tokens).view(heads)
        out = delta_rule(query, key, value, TimeSteps(raw, self.dt_bias, self.A_log), beta, state, rows)
        opened = self.g_b_proj(gate.contiguous(), batch.tokens)
        final: Tensor = self.o_proj(self.o_norm(out.flatten(1), opened), batch.tokens)
        return final
