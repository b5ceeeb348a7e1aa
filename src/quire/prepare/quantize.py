"""Give layers the methods of a quantization scheme; copies of quantized matrices in a 16-bit dtype."""

import importlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from quire.config.quantization_methods import methods
from quire.layers.embedding import Embedding, EmbeddingMethod, Head, HeadMethod
from quire.layers.linear import Linear, LinearMethod
from quire.layers.moe import Experts, ExpertsMethod
from quire.layers.quant.stored import HeldHead, HeldLinear, Target
from quire.ops.linear import SHORT
from quire.ops.quantized import can_be_copied, copied
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.quantization import Quantization

# schemes of sources other than quantized safetensors, whose schemes are in `config/quantization_methods.py`
SCHEMES: Mapping[str, str] = MappingProxyType(
    {
        "fp8 online": "quire.layers.quant.fp8:OnlineFloat8Scheme",
        "gguf": "quire.layers.quant.gguf:GGUFScheme",
        "gguf layouts": "quire.layers.quant.gguf:GGUFLayoutScheme",
    }
)


class Scheme(Protocol):
    """Returns the method of the layer at `path`; None: the layer keeps its own, and its tensors are floats."""

    def linear(self, path: str, layer: Linear) -> LinearMethod | None: ...

    def embedding(self, path: str, layer: Embedding) -> EmbeddingMethod | None: ...

    def head(self, path: str, layer: Head) -> HeadMethod | None: ...

    def experts(self, path: str, layer: Experts) -> ExpertsMethod | None: ...


def find_scheme(name: str) -> Any:
    """Return the class of a scheme. That of a quantization method takes its configuration, an Inventory or None, and a Target;
    others differ."""
    where = SCHEMES[name] if name in SCHEMES else methods()[name].scheme
    module, _, attribute = where.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"the scheme {where} of the quantization method {name!r} cannot be imported: {error}") from error


def find_grain(quantization: "Quantization | None") -> int:
    """Return how many neighbours along a matrix's outputs or inputs ranks must not separate, by the configuration.

    Errors in the configuration are reported when files are read.
    """
    if quantization is None or quantization.online:
        return 1
    try:
        scheme = find_scheme(quantization.method)(quantization.config, None, Target(torch.float32, frozenset()))
        grain: int = getattr(scheme, "grain", 1)
    except ModelError:
        return 1
    return grain


def quantize(model: nn.Module, scheme: Scheme) -> None:
    with torch.device("meta"):
        for path, layer in model.named_modules():
            match layer:
                case Linear():
                    _use(layer, scheme.linear(path, layer))
                case Embedding():
                    _use(layer, scheme.embedding(path, layer))
                case Head():
                    _use(layer, scheme.head(path, layer))
                case Experts(gated=False) if not getattr(scheme, "reads_ungated", False):
                    raise ModelError(f"{path}: quantized experts without gates are not supported; use unquantized weights")
                case Experts():
                    _use(layer, scheme.experts(path, layer))


def _use(layer: Any, method: Any) -> None:
    if method is not None:
        layer.use(method)


def count_copied(model: nn.Module, dtype: torch.dtype) -> int:
    """Return the number of values in matrices that can have a copy."""
    return sum(method.matrix.outputs * method.matrix.inputs for method in _methods(model)) if dtype in SHORT else 0


def make_copies(model: nn.Module, dtype: torch.dtype) -> None:
    for method in _methods(model):
        method.matrix = copied(method.matrix, dtype)


def _methods(model: nn.Module) -> Iterator[HeldLinear | HeldHead]:
    for module in model.modules():
        method = getattr(module, "method", None)
        if isinstance(method, HeldLinear | HeldHead) and can_be_copied(method.matrix):
            yield method
