"""LFM2's operator: a convolution between two gates."""

from torch import Tensor, nn

from quire.attn.batch import Batch
from quire.layers.linear import Linear
from quire.layers.recurrent import Recurrence, ShortConvolution, rows_of
from quire.ops.recurrent import convolve
from quire.types.cache import StateCache


class ShortConv(nn.Module):
    def __init__(self, hidden_size: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.in_proj = Linear(hidden_size, 3 * hidden_size, bias=bias)
        self.conv = ShortConvolution(hidden_size, width, bias=bias)
        self.out_proj = Linear(hidden_size, hidden_size, bias=bias)
        self.core = Recurrence(StateCache((hidden_size, width - 1)))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, H] -> [T, H]."""
        conv, _ = self.core.bound()
        before, behind, values = self.in_proj(x, batch.tokens).chunk(3, -1)
        mixed = convolve(before * values, self.conv.weight, self.conv.bias, conv, rows_of(batch), silu=False)
        out: Tensor = self.out_proj(behind * mixed, batch.tokens)
        return out
