# ruff: noqa: RUF009 - `setting` makes a dataclass field
"""Structured outputs: memory of token masks."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from quire.config.fields import OBJECT, setting
from quire.features.host import Feature, Memory, Sizes
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.config.config import Config

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
        logger.warning("%s.backend=%r has no effect: guidance is used", NAME, value)
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


MASKED_BYTES = 4 + 4 + 1 + 1  # of one token's logit: its copy in float32, the mask's bits in int32, allowed, and not allowed


@dataclass
class StructuredArgs:
    structured_outputs_config: dict[str, Any] = setting(
        {},
        OBJECT,
        "lengths and sampling",
        "backend (auto, guidance, xgrammar); for JSON disable_any_whitespace (false), disable_additional_properties (true)",
        after="logprobs_mode",
    )


class StructuredOutputs(Feature):
    name = "structured"
    cache_salt = None  # masks change what is sampled, not keys and values

    def check(self, args: StructuredArgs) -> None:
        args.structured_outputs_config = checked_structured_outputs(args.structured_outputs_config)

    def memory(self, config: "Config", sizes: Sizes) -> Memory:  # noqa: ARG002
        """Masks are applied when the activations of the step are gone, so only a large vocabulary makes this the peak."""
        drafts = 0 if config.speculation is None else config.speculation.num_speculative_tokens
        rows = min(config.max_batched_tokens, config.max_seqs * (1 + drafts))
        return Memory(step=MASKED_BYTES * rows * config.facts.vocab_size)
