"""Parameters that are only ever read."""

import torch
from torch import nn


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Uninitialized: the loader fills it. `dtype` fixes the type; without it the parameter takes the model's."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
