"""MiniMax's lightning attention: heads whose states decay by a number of their own, the same for every token."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.recurrent import Recurrence, rows_of
from quire.ops.arguments import TimeSteps
from quire.ops.recurrent import ssd
from quire.types.cache import StateCache


class LightningAttention(nn.Module):
    """`depth`: where it is among the model's layers, from 0 to 1: the deeper, the slower states decay."""

    def __init__(self, hidden_size: int, heads: int, head_dim: int, depth: float) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.qkv_proj = Linear(hidden_size, 3 * heads * head_dim)
        self.norm = RMSNorm(heads * head_dim, 1e-6)
        self.output_gate = Linear(hidden_size, heads * head_dim)
        self.out_proj = Linear(heads * head_dim, hidden_size)
        self.core = Recurrence(StateCache(state=(heads, head_dim, head_dim)))
        slow = 1 - depth + 1e-5
        self.rates = [math.log(2.0 ** (-8 * (head + 1) / heads) * slow) for head in range(heads)]
        self.rate_log = self.bias = torch.empty(0)  # [heads]

    def finish(self, device: torch.device) -> None:
        self.rate_log = torch.tensor(self.rates, dtype=torch.float32, device=device)
        self.bias = torch.zeros_like(self.rate_log)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, H] -> [T, H]."""
        _, state = self.core.bound()
        parts = F.silu(self.qkv_proj(x, batch.tokens)).view(len(x), self.heads, 3, self.head_dim)
        query, key, value = (part.contiguous() for part in parts.unbind(2))
        steps = TimeSteps(x.new_zeros(len(x), self.heads), self.bias, self.rate_log, 1.0, 1.0)
        mixed = self.norm(ssd(value, steps, key, query, None, state, rows_of(batch)).flatten(1).to(x.dtype))
        out: Tensor = self.out_proj(torch.sigmoid(self.output_gate(x, batch.tokens)) * mixed, batch.tokens)
        return out
