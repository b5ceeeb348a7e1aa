"""structured_outputs_config: vLLM's fields, those that mean something here."""

import logging
from collections.abc import Mapping
from typing import Any

from quire.types.errors import ConfigError

logger = logging.getLogger(__name__)

NAME = "structured_outputs_config"
BACKENDS = ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")  # all mean llguidance here
FLAGS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
_ELSEWHERE = {
    "reasoning_parser": ("", "it is an argument of its own: reasoning_parser"),
    "enable_in_reasoning": (False, "a grammar begins where the reasoning ends"),
}


def checked_structured_outputs(given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given; a backend of another name is called by the one that is there."""
    out = dict(given)
    for key, value in given.items():
        if key == "backend":
            if value not in BACKENDS:
                raise ConfigError(f"{NAME}.backend must be one of {', '.join(BACKENDS)}; got {value!r}")
            if value not in BACKENDS[:2]:
                logger.warning("%s.backend=%r changes nothing here: grammars are followed by llguidance", NAME, value)
                out[key] = "guidance"
        elif key in FLAGS:
            if not isinstance(value, bool):
                raise ConfigError(f"{NAME}.{key} must be true or false, got {value!r}")
        elif key in _ELSEWHERE:
            harmless, reason = _ELSEWHERE[key]
            if value is not None and value != harmless:
                raise ConfigError(f"{NAME}.{key}={value!r} is not supported: {reason}; leave it out")
        else:
            raise ConfigError(f"{NAME} has no {key!r}; it has backend, {', '.join([*FLAGS, *_ELSEWHERE])}")
    return out
