"""What quantized weights take whose files are not here, and floats that become fp8: by the tensors that the model claims of a
checkpoint when it is built without its weights.

Importing this file does not import torch; `expected_bytes` does.
"""

from typing import TYPE_CHECKING

from quire.config.facts import ModelFacts
from quire.config.quantization import Quantization, quantized_bytes
from quire.files.safetensors import TensorInfo

if TYPE_CHECKING:
    from torch import nn

    from quire.layers.claims import Claims

SCALE_BYTES = 4  # one for each output of a matrix that becomes fp8


def expected_bytes(facts: ModelFacts, quantization: Quantization, keeps: frozenset[str], dtype: str) -> int:
    """In memory. Raises what an engine would refuse about how the weights are quantized."""
    import torch

    from quire.layers.quant.stored import Target
    from quire.load.load import lay_out
    from quire.models.registry import build_model

    target, model = Target(getattr(torch, dtype), keeps), build_model(facts)
    claims, _ = lay_out(model, None, torch.device("meta"), False, quantization, target)
    if quantization.online:
        return _online_bytes(model)
    return quantized_bytes(_headers(claims), quantization, keeps, target.dtype.itemsize)


def _headers(claims: "Claims") -> dict[str, TensorInfo]:
    """As files would have them."""
    from quire.layers.quant.scheme import DTYPES

    called = {dtype: name for name, dtype in DTYPES.items()}
    found = {}
    for name, claim in claims.items():
        if claim is not None:
            dtype = claim.takes[0].view.dtype
            info = TensorInfo(called[dtype], claim.shape, 0, 0)
            found[name] = TensorInfo(info.dtype, info.shape, info.elements * dtype.itemsize, 0)
    return found


def _online_bytes(model: "nn.Module") -> int:
    from quire.layers.quant.fp8 import OnlineExperts, OnlineLinear

    total = sum(parameter.nbytes for parameter in model.parameters())
    for layer in model.modules():
        if isinstance(getattr(layer, "method", None), OnlineExperts | OnlineLinear):
            for matrix in layer.parameters(recurse=False):
                if matrix.dim() > 1:
                    total -= matrix.nbytes - matrix.numel() - SCALE_BYTES * matrix.numel() // matrix.shape[-1]
    return total
