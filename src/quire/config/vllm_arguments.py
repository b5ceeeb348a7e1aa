"""vLLM's arguments without effect in Quire, from `vllm_arguments.json`: reason -> name -> kind of value or harmless values.

Hints are about speed, memory or devices and change no answer: they are accepted, and the log says so. Refused arguments ask for
what is not built: only a harmless value, which asks for nothing, is accepted. `None` is always harmless.
"""

import json
import logging
from pathlib import Path
from typing import Any

from quire.config.fields import FLAG, LIST, OBJECT, TEXT, Kind
from quire.types.errors import ConfigError

logger = logging.getLogger(__name__)

_KINDS = {"flag": FLAG, "list": LIST, "object": OBJECT, "text": TEXT}
_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def _hints(table: str) -> dict[str, tuple[str, Kind]]:
    return {name: (reason, _KINDS[kind]) for reason, names in _TABLES[table].items() for name, kind in names.items()}


def _refused(table: str) -> dict[str, tuple[str, tuple[Any, ...]]]:
    return {name: (reason, tuple(harmless)) for reason, names in _TABLES[table].items() for name, harmless in names.items()}


HINTS, SERVER_HINTS = _hints("hints"), _hints("server_hints")  # name -> reason, kind of value
REFUSED, SERVER_REFUSED = _refused("refused"), _refused("server_refused")  # name -> reason, harmless values
HINT_SHORT_FLAGS = {"optimization_level": "-O", "compilation_config": "-cc", "attention_config": "-ac"}
SHORT_FLAGS = {"data_parallel_rank": "-dpn"}

# values of supported arguments -> equivalent values
REPLACED_VALUES: dict[str, dict[Any, str]] = {
    "model_impl": {"vllm": "quire"},
    "load_format": dict.fromkeys(("hf", "fastsafetensors", "instanttensor", "runai_streamer"), "auto"),
}
# values of supported arguments that are not supported, and why
REFUSED_VALUES: dict[str, dict[Any, str]] = {
    "load_format": {
        "bitsandbytes": "4-bit quantization at load is not supported; a quantized checkpoint declares itself. "
        "Leave it out, or use quantization='fp8'",
    },
}


def take_hint(name: str, value: Any, table: dict[str, tuple[str, Kind]] = HINTS) -> None:
    """Log that a hint changes nothing, unless its value asks for nothing."""
    reason, kind = table[name]
    if kind is FLAG and value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}")
    if value is None or value is False or value in ({}, [], ""):
        return
    logger.warning("%s=%r has no effect: %s", name, value, reason)


def replace_value(name: str, value: Any) -> Any:
    """Return the equivalent of a value of vLLM; unchanged if it has none."""
    other = REPLACED_VALUES.get(name, {}).get(value) if isinstance(value, str) else None
    if isinstance(value, str) and (reason := REFUSED_VALUES.get(name, {}).get(value)) is not None:
        raise ConfigError(f"{name}={value!r} is not supported: {reason}")
    if other is None:
        return value
    logger.warning("%s=%r is equivalent to %r", name, value, other)
    return other


def refuse(name: str, value: Any, table: dict[str, tuple[str, tuple[Any, ...]]] = REFUSED) -> None:
    """Raise ConfigError unless the value is harmless."""
    reason, harmless = table[name]
    plain = list(value) if isinstance(value, tuple) else value
    if value is None or any(plain == item and isinstance(plain, bool) == isinstance(item, bool) for item in harmless):
        return
    example = [item for item in harmless if item not in ([], {}, "")][:1]
    way_out = "leave it out" + "".join(f" or at {item!r}" for item in example)
    raise ConfigError(f"{name}={value!r} is not supported: {reason}; {way_out}")
