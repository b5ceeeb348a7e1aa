"""Weights that are no numbers (NaN, infinity): every answer would be an error, so the file is refused by the tensor's name.

Looking at all of them costs a CPU a sixth of the time that loading takes, so there only vectors (norms, biases, sinks)
are looked at, which costs nothing; a GPU looks at everything it was given. Rows of a vocabulary are left out: whose row is
broken breaks the requests that have that token, and no others.
"""

import torch
from torch import Tensor, nn

from quire.layers.embedding import Embedding, Head
from quire.load.source import Source, TensorSlice

NOT_FINITE = "has numbers that are not finite (NaN or infinity); the file is damaged, fetch it again"
MAY_BE_INFINITE = "sinks"  # within a name; a head without one has -inf there


def is_broken(name: str, tensor: Tensor) -> bool:
    """The sum is quick, but of large numbers may be infinite, too."""
    if tensor.dtype.itemsize == 1 or not tensor.is_floating_point():
        return False
    if MAY_BE_INFINITE in name:
        return not bool((tensor < torch.inf).all())
    return not bool(tensor.sum(dtype=torch.float32).isfinite()) and not bool(tensor.isfinite().all())


def broken_parameters(model: nn.Module) -> list[str]:
    """By the model's names. On a device all sums are made before the host waits for one."""
    rows = {id(own) for part in model.modules() if isinstance(part, Embedding | Head) for own in part.parameters(recurse=False)}
    seen = [
        (name, own)
        for name, own in model.named_parameters()
        if own.is_floating_point() and own.dtype.itemsize > 1 and id(own) not in rows
    ]
    if not seen:
        return []
    finite = torch.stack([own.sum(dtype=torch.float32) for _, own in seen]).isfinite().tolist()
    return [name for (name, own), fine in zip(seen, finite, strict=True) if not fine and is_broken(name, own)]


def broken_tensor(source: Source) -> str | None:
    """The first, as the checkpoint calls it."""
    for part, tensor in source.read([TensorSlice(name) for name in source.shapes]):
        if is_broken(part.name, tensor):
            return part.name
    return None
