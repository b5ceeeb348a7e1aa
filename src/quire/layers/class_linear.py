"""The linear layers of classification heads."""

import torch.nn.functional as F
from torch import Tensor

from quire.attn.batch import Tokens
from quire.layers.linear import Linear, Plain


class ClassLinear(Linear):
    """A linear layer of a classification head: every rank holds all of it, as floats.

    `quantization=fp8` leaves it alone, and a LoRA adapter may replace its matrix and bias (PEFT's `modules_to_save`).
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias, as_floats=True)

    def compute_in_float32(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [N, inputs] float32 -> [N, outputs] float32."""
        if isinstance(self.method, Plain):
            out = F.linear(x, self.weight.float(), None if self.bias is None else self.bias.float())
        else:  # packed: the model's dtype is float32, and the next product overwrites this one
            out = self.method.apply(self, x).clone()
        return out if self.bank is None else self.bank.add(out, x, tokens.lora, self.bias)
