"""Check structured_outputs_config: vLLM's fields, as far as they have an effect."""

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from quire.types.errors import ConfigError

logger = logging.getLogger(__name__)

NAME = "structured_outputs_config"
GUIDANCE, XGRAMMAR = "guidance", "xgrammar"
BACKENDS = ("auto", GUIDANCE, XGRAMMAR, "outlines", "lm-format-enforcer")
FLAGS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
_UNSUPPORTED = {
    "reasoning_parser": ("", "use the argument reasoning_parser"),
    "enable_in_reasoning": (False, "a grammar begins where the reasoning ends"),
}


def checked_structured_outputs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given fields, with a backend that is not available replaced by guidance."""
    out = dict(given)
    for key, value in given.items():
        if key == "backend":
            out[key] = _checked_backend(value, bool(given.get("disable_fallback")))
        elif key in FLAGS:
            if not isinstance(value, bool):
                raise ConfigError(f"{NAME}.{key} must be true or false; got {value!r}")
        elif key in _UNSUPPORTED:
            harmless, reason = _UNSUPPORTED[key]
            if value is not None and value != harmless:
                raise ConfigError(f"{NAME}.{key} is not supported; got {value!r}. Remove it: {reason}.")
        else:
            raise ConfigError(f"{NAME} has no field {key!r}; it has backend, {', '.join([*FLAGS, *_UNSUPPORTED])}")
    return out


def _checked_backend(value: Any, disable_fallback: bool) -> str:
    if value not in BACKENDS:
        raise ConfigError(f"{NAME}.backend must be one of {', '.join(BACKENDS)}; got {value!r}")
    if value in BACKENDS[3:]:
        logger.warning("%s.backend=%r changes nothing here: guidance is used", NAME, value)
        return GUIDANCE
    if value == XGRAMMAR and find_spec("xgrammar") is None:
        if disable_fallback:
            raise ConfigError(
                f"{NAME}.backend={value!r} requires the package xgrammar. Install quire[xgrammar], or use guidance."
            )
        logger.warning("%s.backend=%r requires quire[xgrammar], which is not installed: guidance is used", NAME, value)
        return GUIDANCE
    return str(value)


def structured_backend(config: Mapping[str, Any]) -> str:
    """Return the backend that follows grammars: guidance or xgrammar. `auto` is guidance."""
    return XGRAMMAR if config.get("backend") == XGRAMMAR else GUIDANCE
