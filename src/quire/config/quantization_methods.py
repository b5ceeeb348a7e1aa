"""The methods that quantize safetensors: Quire's own, and those that plug-ins add (group `quire.quantization`)."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.config.plugins import QUANTIZATION, PlugIn, load_all, load_general, refuse
from quire.types.errors import ConfigError


@dataclass(frozen=True)
class QuantizationMethod:
    """A method that quantizes safetensors: its names, and the scheme that reads it."""

    name: str  # as in `quant_method`
    scheme: str  # "module:Class" of a `prepare.quantize.Scheme`, imported with torch
    # layouts (`ops/quantized_layouts.py`) that its matrices become; (): the scheme's layers have a GEMM of their own
    layouts: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # other names, in files and as an argument
    # whether a `quantization_config` is its own whose `quant_method` is missing or not known; None: its names decide
    applies: Callable[[Mapping[str, Any]], bool] | None = None
    # last part of the names of its tensors -> bits of each weight in them; needed for names that `list_matrices` does not know
    tensors: Mapping[str, int] = field(default_factory=dict)


_READERS = "quire.layers.quant"
BUILT_IN = (
    QuantizationMethod("awq", f"{_READERS}.gptq:AWQScheme", ("int4",), ("awq_marlin", "auto_awq")),
    QuantizationMethod("bitsandbytes", f"{_READERS}.bitsandbytes:BitsAndBytesScheme", ("fp4", "w8a8")),
    QuantizationMethod(
        "compressed-tensors", f"{_READERS}.compressed_tensors:CompressedTensorsScheme",
        ("int4", "int8", "w8a8", "fp8", "fp4"), ("compressed_tensors",),
    ),
    QuantizationMethod("fp8", f"{_READERS}.fp8:Float8Scheme", ("fp8",), ("fbgemm_fp8",)),
    QuantizationMethod("gptq", f"{_READERS}.gptq:GPTQScheme", ("int4", "int8"), ("gptq_marlin", "auto_gptq")),
    QuantizationMethod(
        "modelopt", f"{_READERS}.modelopt:ModelOptScheme", ("fp8", "fp4"),
        ("modelopt_fp4", "modelopt_fp8", "modelopt_mixed", "modelopt_mxfp8"),
    ),
    QuantizationMethod("mxfp4", f"{_READERS}.mxfp4:MXFP4Scheme", ("fp4",), ("gpt_oss_mxfp4",)),  # gpt-oss's experts
)  # fmt: skip

_registered: list[QuantizationMethod] = []
_failures: list[str] = []  # of plug-ins


def register(method: QuantizationMethod) -> None:
    """Add a method in this process. Raise ConfigError if one of its names is taken."""
    _check(method, methods().values())
    _registered.append(method)
    forget_tables()


def forget_tables() -> None:
    """Make the tables below anew at their next use."""
    for table in (methods, aliases):
        table.cache_clear()


@functools.cache
def _plugin_methods() -> tuple[QuantizationMethod, ...]:
    found: list[QuantizationMethod] = []

    def use(plugin: PlugIn, loaded: Any) -> None:  # noqa: ARG001
        _check(loaded, (*BUILT_IN, *found))
        found.append(loaded)

    _failures.extend(load_all(QUANTIZATION, use))
    return tuple(found)


def check_plugins(require: bool) -> None:
    """Load the plug-ins. require: raise PlugInError if one of them failed."""
    methods()
    refuse(_failures, require)


@functools.cache
def methods() -> dict[str, QuantizationMethod]:
    """Return the methods by name."""
    load_general()  # they may register some
    return {method.name: method for method in (*BUILT_IN, *_plugin_methods(), *_registered)}


@functools.cache
def aliases() -> dict[str, str]:
    """Return the method of each name that files and arguments may use."""
    return {name: method.name for method in methods().values() for name in _names(method)}


def _names(method: QuantizationMethod) -> tuple[str, ...]:
    return method.name, *method.names


def _check(method: Any, known: Iterable[QuantizationMethod]) -> None:
    if not isinstance(method, QuantizationMethod):
        raise ConfigError(f"it must be a QuantizationMethod; got {type(method).__name__}")
    if bad := next((name for name in _names(method) if name != name.lower() or not name), None):
        raise ConfigError(f"names of quantization methods must be lower case and not empty; got {bad!r}")
    taken = {name: other.name for other in known for name in _names(other)}
    for name in _names(method):
        if name in taken:
            raise ConfigError(
                f"the quantization method {method.name!r} ({method.scheme}) has the name {name!r} of the method "
                f"{taken[name]!r}. Choose another name"
            )
